"""Encode a state to packed codes and scales, or round it as that would without making the bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .encoded import EncodedState, unturned
from .errors import InvalidValueError, NonFiniteStateError
from .formats import FORMATS, Format, find_format
from .rotation import rotate
from .rounding import restore_sign_, uniform
from .scales import Scales

__all__ = ["EncodedState", "encode", "fake_quantize"]

CHUNK = 1 << 18
"""Elements worked on at a time on a CPU, so that the buffers stay in the second-level cache."""


def encode(
    tensor: Tensor,
    format: str,
    scale_rule: str = "amax",
    rotation: str | None = None,
    columns: Tensor | None = None,
    *,
    seeds: Tensor | None = None,
    check_finite: bool = True,
) -> EncodedState:
    """Encode ``tensor`` [..., V, K] (any float dtype and strides; rounded to float32 first).

    ``columns``: float32, broadcastable to [..., K]; the tensor's columns are multiplied by 1/columns before they are
    rotated. ``seeds``: int64, broadcastable to the leading axes; with it rounding is stochastic, and a tile depends on
    its own seed alone. ``check_finite=False`` skips the check for Inf and NaN, which then encode to anything.

    Raises InvalidValueError for unknown names, a scale rule that the format lacks, wrong shapes or dtypes, and
    NonFiniteStateError naming the first leading index with Inf or NaN.
    """
    job = _Job(tensor, format, scale_rule, rotation, columns, seeds, check_finite)
    parts: list[tuple[Tensor, Scales]] = []
    if job.grid is None:
        parts.append((job.blocks.flatten(-2).clone(), {}))
    for blocks, part_seeds in job.chunks():
        a = torch.empty_like(blocks)
        scales, _ = job.round_into(a, blocks, part_seeds)
        parts.append((job.fmt.element.store(a.flatten(-2), blocks.flatten(-2)), scales))
    codes, scales = _joined(parts)
    lead = tensor.shape[:-2]
    scales = {name: t.view((*lead, *t.shape[1:])) for name, t in scales.items()}
    codes = codes.view((*lead, *codes.shape[1:]))
    return EncodedState(codes, scales, format, scale_rule, rotation, tensor.shape, columns)


def fake_quantize(
    tensor: Tensor,
    format: str,
    scale_rule: str = "amax",
    rotation: str | None = None,
    columns: Tensor | None = None,
    *,
    seeds: Tensor | None = None,
    unrotate: bool = True,
    check_finite: bool = True,
) -> Tensor:
    """``encode(…).decode(unrotate=unrotate)`` bit for bit, as a new float32 tensor, several times faster."""
    job = _Job(tensor, format, scale_rule, rotation, columns, seeds, check_finite)
    out = torch.empty_like(job.blocks) if job.grid is not None else job.blocks.clone()
    for blocks, a, part_seeds in job.chunks(out):
        _, multiplier = job.round_into(a, blocks, part_seeds, store=False)
        if multiplier is not None:
            a.mul_(multiplier)
        restore_sign_(a, blocks, job.scratch)
        if not job.fmt.element.signed_zero:
            a.add_(0.0)
    if job.padded:
        out = out.flatten(-2)[..., : job.columns].contiguous()
    out = out.view(tensor.shape)
    return unturned(out, rotation, columns) if unrotate else out


class _Job:
    """One call's checked arguments, and the tensor as float32 [n, V, blocks, block]."""

    def __init__(
        self,
        tensor: Tensor,
        format: str,
        scale_rule: str,
        rotation: str | None,
        scales: Tensor | None,
        seeds: Tensor | None,
        check: bool,
    ) -> None:
        shape = tensor.shape
        if len(shape) < 2 or not shape[-1] or not shape[-2]:
            raise InvalidValueError(f"a state is [..., V, K] with V and K at least 1, not {list(shape)}")
        if not tensor.is_floating_point():
            raise InvalidValueError(f"a state is a float tensor, not {tensor.dtype}")
        self.fmt = fmt = find_format(format, scale_rule)
        self.grid = fmt.element.grid
        self.rule = scale_rule
        self.check = check
        self.lead = shape[:-2]
        self.seeds = None if seeds is None else _flat_seeds(seeds, fmt, self.lead, tensor.device)
        self.columns = columns = shape[-1]
        self.scratch: Tensor | None = None
        x = tensor.detach().to(torch.float32)
        if scales is not None:
            _check_scales(scales, shape)
            x = x * (1.0 / scales)[..., None, :]
        x = rotate(x, rotation).contiguous()
        size = fmt.block or columns + columns % fmt.element.packed
        self.padded = -columns % size
        if self.padded:
            x = functional.pad(x, (0, self.padded))
        self.blocks = x.view(math.prod(self.lead), shape[-2], (columns + self.padded) // size, size)
        if check and fmt.scaling is None:
            self._check(x)

    def chunks(self, *more: Tensor) -> Iterator[tuple[Any, ...]]:
        """(blocks, …, seeds) piece by piece along the first axis; ``more`` are cut like the blocks.

        At least one piece, so that an empty batch gets its shapes and dtypes too; none for float32.
        """
        blocks, seeds = self.blocks, self.seeds
        if self.grid is None:
            return
        count = step = blocks.shape[0]
        if count and not blocks.is_cuda:
            step = max(1, CHUNK // (blocks.numel() // count))
        if step >= count:
            yield blocks, *more, seeds
            return
        for start in range(0, count, step):
            cut = slice(start, start + step)
            yield blocks[cut], *(t[cut] for t in more), None if seeds is None else seeds[cut]

    def round_into(
        self, a: Tensor, blocks: Tensor, seeds: Tensor | None, store: bool = True
    ) -> tuple[Scales, Tensor | None]:
        """Write the rounded magnitudes of ``blocks``, in units of their scales, into ``a``.

        Returns the scales, as they are stored if ``store``, and the multiplier (which broadcasts against ``a``)
        that turns ``a`` back into the state's units.
        """
        grid, scaling = self.grid, self.fmt.scaling
        assert grid is not None
        torch.abs(blocks, out=a)
        scales: Scales = {}
        multiplier = None
        if scaling is not None:
            amax = _block_amax(a)
            if self.check:
                self._check(amax)
            scales = scaling.choose(a, amax, grid, self.rule, seeds is not None)
            multiplier = scaling.multiplier(scales).unsqueeze(-1)
            a.div_(multiplier)
            if store:
                scales = scaling.store(scales, amax)
        if self.scratch is None or self.scratch.shape != a.shape:
            self.scratch = torch.empty_like(a)
        if seeds is None:
            grid.nearest_(a, self.scratch)
        else:
            grid.stochastic_(a, self._random(a, seeds), self.scratch)
        return scales, multiplier

    def _random(self, a: Tensor, seeds: Tensor) -> Tensor:
        rows = a.shape[1]
        random = uniform(seeds, rows * self.columns)
        if self.padded:
            random = functional.pad(random.view(-1, rows, self.columns), (0, self.padded))
        return random.view(a.shape)

    def _check(self, sample: Tensor) -> None:
        """Raise if ``sample`` (the state, or the largest magnitude of each block) holds Inf or NaN."""
        # One sum is cheaper than isfinite and all. It may overflow with finite terms: then look more closely.
        if math.isfinite(sample.sum().item()):
            return
        bad = (~torch.isfinite(self.blocks)).flatten(1).any(1).view(self.lead)
        if places := bad.nonzero().tolist():
            more = f" and {len(places) - 1} more" if len(places) > 1 else ""
            raise NonFiniteStateError(f"the state holds Inf or NaN at {_place(places[0])}{more}")


def _check_scales(columns: Tensor, shape: torch.Size) -> None:
    wanted = torch.Size((*shape[:-2], shape[-1]))
    try:
        fits = torch.broadcast_shapes(columns.shape, wanted) == wanted
    except RuntimeError:
        fits = False
    if not fits or columns.dtype != torch.float32:
        raise InvalidValueError(
            f"column scales are float32 and broadcast to [..., K] = {list(wanted)}, not {columns.dtype} "
            f"{list(columns.shape)}"
        )


def _place(index: list[int]) -> str:
    if len(index) == 2:
        return f"slot {index[0]}, head {index[1]}"
    return f"leading index {index}" if index else "its only tile"


def _flat_seeds(seeds: Tensor, fmt: Format, lead: torch.Size, device: torch.device) -> Tensor:
    """``seeds`` as int64 [n]."""
    if not fmt.stochastic:
        able = ", ".join(name for name, f in FORMATS.items() if f.stochastic)
        raise InvalidValueError(f"no stochastic rounding for {fmt.name}; it exists for {able}")
    if seeds.dtype != torch.int64:
        raise InvalidValueError(f"seeds are int64, not {seeds.dtype}")
    try:
        return seeds.to(device).expand(lead).reshape(-1)
    except RuntimeError:
        raise InvalidValueError(f"seeds {list(seeds.shape)} do not broadcast to leading axes {list(lead)}") from None


def _block_amax(a: Tensor) -> Tensor:
    """Magnitudes [n, V, blocks, block] to their maxima [n, V, blocks]; a NaN wins."""
    if a.device.type == "cpu" and a.shape[-1] <= 64 and a.numel():
        # Pooling takes half the time of amax over short rows, and passes NaN on as well.
        return torch.max_pool1d(a.view(1, 1, -1), a.shape[-1]).view(a.shape[:-1])
    return a.amax(-1)


def _joined(parts: list[tuple[Tensor, Scales]]) -> tuple[Tensor, Scales]:
    """Chunks put together along the first axis."""
    if len(parts) == 1:
        return parts[0]
    scales = {name: _cat([s[name] for _, s in parts]) for name in parts[0][1]}
    return _cat([codes for codes, _ in parts]), scales


def _cat(tensors: list[Tensor]) -> Tensor:
    if tensors[0].element_size() > 1:
        return torch.cat(tensors)
    return torch.cat([t.view(torch.uint8) for t in tensors]).view(tensors[0].dtype)
