"""By which path a token is decoded, and the table of batches up to which replay does not pay.

At small batches a step is launches and latency, and one launch of the standard kernel is faster than replay's four.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec

Path = Literal["replay", "standard", "auto"]
"""``replay`` reads the copy and the ring; ``standard`` reads and writes the FP32 checkpoint, so that its outputs carry
no read error; ``auto`` is what CROSSOVERS says is faster for the batch. A state may go from one to the other at any
token. What measures accuracy asks for ``replay``, or it measures FP32."""

ANY = None


@dataclass(frozen=True)
class Crossover:
    """Up to how many ``heads``, those of all rows of a batch together, a step by the standard kernel takes no longer
    than one by replay. Heads, not rows: both move their bytes by the head, and ranks split a layer's. None is any; the
    first that fits counts."""

    heads: int
    family: str | None = ANY
    format: str | None = ANY
    value_dim: int | None = ANY
    key_dim: int | None = ANY
    isa: int | None = ANY


CROSSOVERS: tuple[Crossover, ...] = (
    # measured on an H200 (2026-11-30) at batches 1, 2, 4, 8, 16, 32 of 128, 32 and 64 heads for fp32, fp8_e4m3 and
    # nvfp4 (KDA: not nvfp4); other formats have the crossover of the one that moves as many bytes
    Crossover(512, "mamba2", "nvfp4"),
    Crossover(512, "mamba2", "mxfp4"),
    Crossover(1024, "mamba2"),
    Crossover(512, "gdn"),
    Crossover(1024, "kda"),
)
"""Filled by ``python -m quantize_state.evals.speed.sweep --paths speed.json``."""


def standard_pays(spec: LayerSpec, policy: StatePolicy, isa: int, batch: int) -> bool:
    """Whether ``auto`` means the standard kernel. Windows of one token have nothing to replay."""
    if policy.window == 1:
        return True
    format = policy.read or policy.checkpoint
    for c in CROSSOVERS:
        asked = (
            (c.family, spec.family), (c.format, format), (c.value_dim, spec.value_dim), (c.key_dim, spec.key_dim),
            (c.isa, isa),
        )  # fmt: skip
        if all(a in (ANY, b) for a, b in asked):
            return batch * spec.heads <= c.heads
    return False
