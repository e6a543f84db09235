"""Scales: where they sit, how they are stored, and the rules that choose them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from .rounding import E4M3, EXPONENT_MASK, Grid, constant

SCALE_RULES: dict[str, str] = {
    "amax": "the largest magnitude maps to the format's largest code",
    "four_over_six": "per block of 16, the better of mapping the largest magnitude to 6 or to 4 (nvfp4)",
    "mse": "per block or row, the scale near amax's with the smallest squared error",
}

SMALLEST = 2.0**-126
"""The smallest normal float32. No FP32 or E8M0 scale is smaller, so no scale is zero or flushed to zero."""

LARGEST = torch.finfo(torch.float32).max * (1 - 2.0**-20)
"""What the largest code may decode to: below float32's maximum by a margin for rounding, so never infinite."""

Scales = dict[str, Tensor]


class Scaling(Protocol):
    """How a format's elements are scaled. The codec calls choose, multiplier and store, in this order.

    Shapes: magnitudes ``a`` float32 [n, V, blocks, block], their maxima ``amax`` [n, V, blocks].
    """

    @property
    def block(self) -> int:
        """Elements along K that share a scale; 0 for whole rows."""

    @property
    def bytes_per_element(self) -> float:
        """Bytes of scales per element, at K = 128."""

    @property
    def rules(self) -> tuple[str, ...]:
        """The scale rules that exist here; ``amax`` always does."""

    def choose(self, a: Tensor, amax: Tensor, grid: Grid, rule: str, unclipped: bool) -> Scales:
        """The scales as float32, all positive and finite. ``unclipped``: none so small that elements saturate."""

    def multiplier(self, scales: Scales) -> Tensor:
        """What values on the grid are multiplied by, float32 [..., V, blocks], from chosen or stored scales."""

    def store(self, scales: Scales, amax: Tensor) -> Scales:
        """Chosen scales in the dtypes they are stored in, each [n, ...]."""


def squared_error(a: Tensor, multiplier: Tensor, grid: Grid) -> Tensor:
    """Σ(v − round(v))² over the last axis, v = a/multiplier: float32 [..., n] and [...] to [...].

    The sum's bits decide between scales, so its order is fixed: with h the largest power of two below n, element
    i + h is added to element i, until one is left; squares are rounded before they are added (no fused adds).
    """
    v = a / multiplier.unsqueeze(-1)
    return tree_sum(grid.nearest(v, torch.empty_like(v)).sub_(v).square_())


def tree_sum(x: Tensor) -> Tensor:
    """The sum of contiguous ``x`` over its last axis, in squared_error's order; overwrites ``x``."""
    while (n := x.shape[-1]) > 16 or n & (n - 1):
        h = 1 << ((n - 1).bit_length() - 1)
        x[..., : n - h] += x[..., h:]
        x = x[..., :h]
    if not x.numel():
        return x[..., 0]
    # Adding a shifted copy of everything, wanted or not, is faster than adding slices of 8 or fewer.
    flat = x.reshape(-1)
    h = n
    while (h := h // 2) > 0:
        flat = flat[:-h] + flat[h:]
    return flat[::n].view(x.shape[:-1]) if n > 1 else flat.view(x.shape[:-1])


def _divide(x: Tensor, divisor: float) -> Tensor:
    return x / constant(divisor, torch.float32, x.device)


def _times(x: Tensor, factor: float) -> Tensor:
    return x * constant(factor, torch.float32, x.device)


@dataclass(frozen=True)
class RowScale:
    """One FP32 scale per row: amax / max."""

    block: ClassVar[int] = 0
    bytes_per_element: ClassVar[float] = 4 / 128
    """At K = 128, the usual key dimension."""
    rules: ClassVar[tuple[str, ...]] = ("amax", "mse")

    def choose(self, a: Tensor, amax: Tensor, grid: Grid, rule: str, unclipped: bool) -> Scales:
        scale = _divide(amax, grid.max).clamp_(SMALLEST, LARGEST / grid.max)
        if rule == "mse" and not unclipped:
            moved = ((scale * (j / 16)).clamp_(min=SMALLEST) for j in range(16, 7, -1))
            scale = _best(a, grid, ((s, s, (s / scale).square_()) for s in moved))
        return {"row": scale.squeeze(-1)}

    def multiplier(self, scales: Scales) -> Tensor:
        return scales["row"].unsqueeze(-1)

    def store(self, scales: Scales, amax: Tensor) -> Scales:
        return scales


@dataclass(frozen=True)
class PowerOfTwoScale:
    """One E8M0 scale per block, as in the OCP MX formats: 2**(floor(log2 amax) − emax), elements saturate.

    Scales we write are at least 2**-126, so their byte is the exponent field of the same float32.
    """

    block: int = 32
    rules: ClassVar[tuple[str, ...]] = ("amax", "mse")

    @property
    def bytes_per_element(self) -> float:
        return 1 / self.block

    def choose(self, a: Tensor, amax: Tensor, grid: Grid, rule: str, unclipped: bool) -> Scales:
        exponent = (amax.view(torch.int32) & EXPONENT_MASK).sub_(grid.emax << 23)
        scale = exponent.clamp_(min=1 << 23).view(torch.float32)
        highest = 2.0 ** (127 - grid.emax)
        if unclipped:
            scale = torch.where(amax > scale * grid.max, scale * 2, scale).clamp_(max=highest)
        if rule == "mse":
            # Half of OCP's scale is not tried: it would clip everything above half of amax.
            moved = (scale, (scale * 2).clamp_(max=highest))
            scale = _best(a, grid, ((s, s, (s / scale).square_()) for s in moved))
        return {"block": scale}

    def multiplier(self, scales: Scales) -> Tensor:
        return scales["block"].to(torch.float32)

    def store(self, scales: Scales, amax: Tensor) -> Scales:
        code = (scales["block"].view(torch.int32) >> 23).to(torch.uint8)
        return {"block": code.view(torch.float8_e8m0fnu)}


@dataclass(frozen=True)
class TwoLevelScale:
    """NVFP4's scales: one E4M3 per block and one FP32 for the whole [V, K] tile."""

    block: int = 16
    rules: ClassVar[tuple[str, ...]] = ("amax", "four_over_six", "mse")

    SMALLEST_BLOCK: ClassVar[float] = 2.0**-9
    """The smallest E4M3 number above zero."""

    @property
    def bytes_per_element(self) -> float:
        return 1 / self.block

    def choose(self, a: Tensor, amax: Tensor, grid: Grid, rule: str, unclipped: bool) -> Scales:
        # Scales 1.5 times amax's must fit into E4M3 as well, hence its ceiling of 256 for the other two rules.
        ceiling = E4M3.max if rule == "amax" else 256.0
        tile = amax.amax((-2, -1), keepdim=True)
        total = _divide(tile, grid.max * ceiling).clamp_(SMALLEST, LARGEST / (grid.max * E4M3.max))
        scale = self._round(amax / _times(total, grid.max), unclipped)
        if rule == "four_over_six":
            wide = self._round(amax / _times(total, 4.0), unclipped)
            scale = _best(a, grid, ((s, s * total, s.square()) for s in (scale, wide)))
        elif rule == "mse":
            scale = _best(a, grid, ((s, s * total, s.square()) for s in self._near(scale, unclipped)))
        return {"block": scale, "global": total}

    def _round(self, raw: Tensor, unclipped: bool) -> Tensor:
        if not unclipped:
            return E4M3.nearest_(raw, low=self.SMALLEST_BLOCK)
        scale = E4M3.nearest_(raw.clone(), low=self.SMALLEST_BLOCK)
        # Rounded up, so that no element is clipped and stochastic rounding has no bias; the margin keeps a block
        # whose amax is 6·scale·(1 ± a few units in the last place) where it is.
        short = raw > scale * (1 + 2.0**-20)
        codes = scale.to(torch.float8_e4m3fn).view(torch.uint8).add_(short).clamp_(max=0x7E)
        return codes.view(torch.float8_e4m3fn).to(torch.float32)

    def _near(self, scale: Tensor, unclipped: bool) -> Iterable[Tensor]:
        codes = scale.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)
        for offset in (0, 1, 2, 3, 4, 5, 6) if unclipped else (0, 1, -1, 2, -2, 3, 4, 5, 6):
            code = (codes + offset).clamp_(1, 0x7E).to(torch.uint8)
            yield code.view(torch.float8_e4m3fn).to(torch.float32)

    def multiplier(self, scales: Scales) -> Tensor:
        block, total = scales["block"], scales["global"]
        return block.to(torch.float32) * total.view(*total.shape, *(1,) * (block.dim() - total.dim()))

    def store(self, scales: Scales, amax: Tensor) -> Scales:
        # An all-zero block has scale 1, as in ModelOpt; what it decodes to does not depend on it.
        block = scales["block"].masked_fill(amax == 0, 1.0)
        return {"block": block.to(torch.float8_e4m3fn), "global": scales["global"].flatten()}


def _best(a: Tensor, grid: Grid, candidates: Iterable[tuple[Tensor, Tensor, Tensor | float]]) -> Tensor:
    """Of (scale, multiplier, weight) the scale with the least weight·squared_error; the first one on a tie."""
    best: Tensor | None = None
    least: Tensor | None = None
    for scale, multiplier, weight in candidates:
        error = squared_error(a, multiplier, grid) * weight
        if best is None or least is None:
            best, least = scale, error
        else:
            better = error < least
            best = torch.where(better, scale, best)
            least = torch.where(better, error, least)
    assert best is not None
    return best
