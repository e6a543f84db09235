"""Merge a window into the checkpoint it started from."""

from __future__ import annotations

import torch
from torch import Tensor

from ..window.reference import FoldTerms


def fold(state: Tensor, terms: FoldTerms, v: Tensor, out: Tensor | None = None) -> Tensor:
    """S_h = S₀·diag(decay) + (Vᵀ − S₀·Xᵀ)·P. ``state`` [*, H, V, K], ``v`` [*, H, L, V]; ``out`` is contiguous."""
    values = _flat(v).mT
    if terms.x is not None:
        values = torch.baddbmm(values, _flat(state), _flat(terms.x).mT, alpha=-1)
    out = torch.mul(state, terms.decay[..., None, :], out=out)
    _flat(out).baddbmm_(values, _flat(terms.p))
    return out


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, *t.shape[-2:])
