"""Ways to keep a state that are no policies: what a study compares the real formats with.

All are pure functions of window starts (``Reads``) to what outputs would read in their place, so the error law gives
their output errors and ``injected`` their divergence, without kernels or packed bytes. Scales are E4M3 per block of 16
times one FP32 number per head, as in NVFP4; 4-bit controls move the bytes of NVFP4 plus what their docstrings say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...quant.codec import fake_quantize
from ...quant.rotation import rotate
from ..error_law import Reader, Reads

Rounding = Callable[[Tensor, Tensor | None], Tensor]
"""States [*, H, V, K], and how strongly each column is read [*, H, 1, K] (None: all alike), to rounded states."""

E2M1 = (-6.0, -4.0, -3.0, -2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
INT4 = tuple(float(i) for i in range(-8, 8))
NL4 = tuple(float(i) for i in (-127, -101, -80, -63, -47, -33, -19, -6, 6, 19, 33, 47, 63, 80, 101, 127))
"""16 levels for blocks of 16 normal numbers, each scaled for its least squared error (Lloyd's algorithm)."""

BLOCK = 16
SHIFTS = tuple(2.0 ** (j / 8) for j in range(-5, 5))
"""Block scales tried, times the one that maps the largest magnitude to the outermost level."""


class ReadWeights:
    """Θ's second moments per layer and head, over all windows seen so far: what a server could know at a flush.

    Call it with ``reads`` to get E[Θ·Θᵀ] [H, K, K] over the windows before these, and to have these counted. The very
    first call gets the moments of its own windows.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, reads: Reads) -> Tensor:
        theta = reads.theta[..., :-1, :] if reads.flushes else reads.theta
        moments = (theta.mT @ theta).flatten(0, 1).sum(0)
        count = theta.shape[0] * theta.shape[1] * theta.shape[-2]
        before = self._sums.get(reads.layer)
        known = moments / count if before is None else before / self._counts[reads.layer]
        self._sums[reads.layer] = moments if before is None else before + moments
        self._counts[reads.layer] = self._counts.get(reads.layer, 0) + count
        return known


def plain(format: str, rule: str = "amax") -> Rounding:
    """A format of the toolkit."""
    return lambda states, weights: fake_quantize(states, format, rule, check_finite=False)


def levels(values: Sequence[float], *, shifts: Sequence[float] = SHIFTS, signed: bool = False) -> Rounding:
    """Blocks of 16 on any 16 levels, each with the E4M3 scale of the least (weighted) squared error.

    ``signed``: a scale may be negative (E4M3 has a sign), so that the outermost level, if it stands on one side only,
    serves both.
    """

    def rounding(states: Tensor, weights: Tensor | None) -> Tensor:
        grid = torch.tensor(values, device=states.device)
        blocks = states.unflatten(-1, (-1, BLOCK))
        heavy = None if weights is None else weights.expand(states.shape).unflatten(-1, (-1, BLOCK))
        scale = block_scales(blocks, grid, shifts, signed, heavy)
        return (_nearest(blocks / scale, grid) * scale).flatten(-2)

    return rounding


def block_scales(blocks: Tensor, grid: Tensor, shifts: Sequence[float], signed: bool, weights: Tensor | None) -> Tensor:
    """The best scale [*, blocks, 1] of each block [*, blocks, 16]."""
    outermost = grid[grid.abs().argmax()]
    if signed:
        base = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True)) / outermost
    else:
        base = blocks.abs().amax(-1, keepdim=True) / outermost.abs()
    total = (base.abs().amax(dim=(-1, -2, -3), keepdim=True) / 256).clamp_min(2.0**-100)
    best = least = None
    for shift in shifts:
        for sign in (1.0, -1.0) if signed and len(shifts) > 1 else (1.0,):
            wanted = base * (shift * sign) / total
            stored = wanted.abs().clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn).float()
            scale = torch.where(wanted < 0, -stored, stored) * total
            error = (_nearest(blocks / scale, grid) * scale - blocks).square()
            error = (error if weights is None else error * weights).sum(-1, keepdim=True)
            if best is None or least is None:
                best, least = scale, error
            else:
                best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    assert best is not None
    return best


def rounded(rounding: Rounding) -> Reader:
    """Rounding alone."""
    return lambda reads: rounding(reads.states, None)


def weighted(rounding: Rounding) -> Reader:
    """Scales chosen for the least error where Θ reads most: squared errors count with E[Θ_k²]. No bytes more."""
    moments = ReadWeights()

    def reader(reads: Reads) -> Tensor:
        return rounding(reads.states, moments(reads).diagonal(dim1=-2, dim2=-1)[:, None, :])

    return reader


def rotated(rounding: Rounding, rotation: str = "hadamard16") -> Rounding:
    """Rounding of S·R along K; weights lose their meaning and are dropped."""
    return lambda states, weights: rotate(rounding(rotate(states, rotation), None), rotation)


def rotated_values(rounding: Rounding) -> Rounding:
    """A Hadamard rotation along V: H·S is kept, and outputs are rotated back."""

    def turned(states: Tensor, weights: Tensor | None) -> Tensor:
        inside = rotate(states.mT.contiguous(), "hadamard").mT.contiguous()
        return rotate(rounding(inside, weights).mT.contiguous(), "hadamard").mT

    return turned


def low_rank(rounding: Rounding, rank: int) -> Reader:
    """The ``rank`` largest rank-one parts in FP16 beside the rounded remainder: 2·rank·(V + K) bytes a head more.

    A read takes them as ``rank`` more ring rows: y = Q(S₀ − U·Wᵀ)·Θ + U·(WᵀΘ).
    """

    def reader(reads: Reads) -> Tensor:
        left, size, right = torch.linalg.svd(reads.states, full_matrices=False)
        root = size[..., :rank].sqrt()
        u = (left[..., :rank] * root[..., None, :]).half().float()
        w = (right[..., :rank, :] * root[..., :, None]).half().float()
        part = u @ w
        return rounding(reads.states - part, None) + part

    return reader


def two_axis(rounding: Rounding, *, rows: bool = False, balanced: bool = True) -> Reader:
    """A scale c per column, FP16, folded into Θ: Q(S₀/c)·(c ⊙ Θ). 2·K bytes a head more.

    ``balanced``: c_k = (E[S_k²] / E[Θ_k²])^¼, at which the error Σ c_k²·E[Θ_k²] of noise that is spread evenly over
    columns of size E[S_k²]/c_k² is least (Cauchy and Schwarz). Otherwise c_k² = E[S_k²] alone. ``rows``: also a scale
    per row, folded into the output (2·V bytes more).
    """
    moments = ReadWeights()

    def reader(reads: Reads) -> Tensor:
        size = reads.states.square().mean(-2, keepdim=True)
        size = size + 1e-3 * size.mean(-1, keepdim=True) + 1e-30
        if balanced:
            read = moments(reads).diagonal(dim1=-2, dim2=-1)[:, None, :]
            column = (size / (read + 1e-3 * read.mean(-1, keepdim=True) + 1e-30)) ** 0.25
        else:
            column = size.sqrt()
        column = (column / column.mean(-1, keepdim=True)).half().float()
        scaled = reads.states / column
        row = torch.ones_like(scaled[..., :1])
        if rows:
            row = scaled.square().mean(-1, keepdim=True).sqrt().clamp_min(1e-6).half().float()
        return rounding(scaled / row, None) * row * column

    return reader


def feedback(
    values: Sequence[float] = E2M1,
    *,
    rotation: str | None = None,
    damping: float = 0.01,
    frozen: ReadWeights | None = None,
) -> Reader:
    """Columns rounded one after another, each error compensated in the columns still to come, as Θ reads them.

    The quadratic form is E[Θ·Θᵀ] of earlier windows (``frozen``: of these alone), so the rounding errors of a row are
    made to cancel where outputs look: the arithmetic known from quantising weights against their inputs. The copy's
    bytes and its reader stay those of the format; a flush costs K² multiplications a row, and K² numbers a head.
    """
    moments = ReadWeights() if frozen is None else frozen

    def reader(reads: Reads) -> Tensor:
        form = moments(reads)
        states = rotate(reads.states.contiguous(), rotation)
        if rotation is not None:
            form = rotate(rotate(form, rotation).mT.contiguous(), rotation)
        return rotate(_compensated(states, form, torch.tensor(values, device=states.device), damping), rotation)

    return reader


def _compensated(states: Tensor, form: Tensor, grid: Tensor, damping: float) -> Tensor:
    """states [*, H, V, K], form [H, K, K]."""
    columns = states.shape[-1]
    trace = form.diagonal(dim1=-2, dim2=-1)
    eye = torch.eye(columns, device=states.device, dtype=torch.float64)
    damped = form.double() + (damping * trace.mean(-1)[..., None, None] + 1e-30).double() * eye
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    left = states.clone()
    out = torch.empty_like(left)
    for start in range(0, columns, BLOCK):
        block = left[..., start : start + BLOCK]
        weights = trace[:, None, None, start : start + BLOCK]
        scale = block_scales(block[..., None, :], grid, SHIFTS, False, weights)[..., 0, :]
        for k in range(start, min(start + BLOCK, columns)):
            out[..., k] = _nearest(left[..., k] / scale[..., 0], grid) * scale[..., 0]
            error = (left[..., k] - out[..., k]) / upper[:, k, k, None]
            left[..., k:] -= error[..., None] * upper[:, None, k, k:]
    return out


def _nearest(x: Tensor, grid: Tensor) -> Tensor:
    """The nearest of the levels in ``grid``, which ascend."""
    return grid[torch.bucketize(x.contiguous(), (grid[1:] + grid[:-1]) / 2)]
