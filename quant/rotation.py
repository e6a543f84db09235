"""Orthonormal Hadamard rotations along the last axis, each its own inverse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import torch
from torch import Tensor

from .errors import unknown_name

ROTATIONS: dict[str, int] = {"hadamard16": 16, "hadamard": 0}
"""Name -> largest block that is rotated together; 0 is no limit."""

CHUNK = 1 << 16
"""Elements rotated at a time on a CPU, so that the buffers stay in the second-level cache."""


def blocks(size: int, rotation: str) -> list[int]:
    """The power-of-two blocks, in order, that ``rotation`` splits ``size`` columns into.

    As many as fit of the largest power of two (at most 16 for ``hadamard16``), then the next smaller one for
    what is left, down to 1. So nothing is padded: 128 is one block for ``hadamard``, 60 is 32, 16, 8, 4.
    """
    limit = ROTATIONS[rotation] or size
    parts = []
    while size:
        block = 1 << (min(limit, size).bit_length() - 1)
        parts.append(block)
        size -= block
    return parts


def rotate(x: Tensor, rotation: str | None) -> Tensor:
    """``x`` [..., K] times the rotation's matrix R, in x's float dtype; ``x`` itself if rotation is None.

    R is block diagonal with Sylvester-Hadamard matrices divided by the square root of their size: symmetric and
    orthonormal, so rotating twice gives ``x`` back to rounding, and (S·R)·(R·q) = S·q. Sums are pairwise with
    the distance 1, 2, 4, …, then one multiplication: the same bits on every device and for every batch. No gradient.
    """
    if rotation is None:
        return x
    if rotation not in ROTATIONS:
        raise unknown_name("rotation", rotation, ROTATIONS)
    columns = x.shape[-1]
    rows = x.detach().reshape(math.prod(x.shape[:-1]), columns)
    out = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    parts = blocks(columns, rotation)
    step = max(1, CHUNK // columns) if x.device.type == "cpu" else max(1, rows.shape[0])
    for source, target in zip(rows.split(step), out.split(step), strict=True):
        # A copy, with columns outermost: every sum runs over contiguous memory, whatever its distance.
        y = source.t().clone(memory_format=torch.contiguous_format)
        for start, size, count in _runs(parts):
            part = y[start : start + size * count]
            target[:, start : start + size * count] = _hadamard(part, size).t()
    return out.view(x.shape)


def _runs(sizes: list[int]) -> Iterator[tuple[int, int, int]]:
    """(start, size, count) for every run of equal sizes."""
    start = 0
    for size, run in groupby(sizes):
        count = len(list(run))
        yield start, size, count
        start += size * count


def _hadamard(y: Tensor, size: int) -> Tensor:
    """Orthonormal Sylvester-Hadamard transforms of ``size`` consecutive rows of contiguous [n, m]; overwrites y."""
    if size == 1:
        return y
    other = torch.empty_like(y)
    distance = 1
    while distance < size:
        pairs = (y.shape[0] // (2 * distance), 2, distance * y.shape[1])
        a, b = y.view(pairs).unbind(1)
        plus, minus = other.view(pairs).unbind(1)
        torch.add(a, b, out=plus)
        torch.sub(a, b, out=minus)
        y, other = other, y
        distance *= 2
    return y.mul_(1.0 / math.sqrt(size))
