"""Outputs from a checkpoint, or its read copy, and the ring: one state read per query."""

from __future__ import annotations

from torch import Tensor

from ..window.reference import ReadTerms


def readout(state: Tensor, terms: ReadTerms, v: Tensor) -> Tensor:
    """y = S₀·Θ + Vᵀ·C. ``state`` [*, H, V, K], ``v`` [*, H, L, V]; returns [*, H, T, V]."""
    return terms.theta @ state.mT + terms.c @ v
