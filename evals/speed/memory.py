"""What the memory gives in this run, and what share of it a step reaches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch

from ...kernels import bandwidth
from ...kernels.timing import COLD, Timer, l2_bytes
from .result import Bandwidth, Time
from .traffic import Traffic

MIB = 2**20
SIZES = {"read": (64 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB), "copy": (256 * MIB, 1024 * MIB, 4096 * MIB)}
"""Bytes of one launch. A 4-bit read of a batch is 0.1 to 0.2 GB, and short launches reach less than long ones."""


def measure(timer: Timer, device: torch.device, sizes: dict[str, Sequence[int]] | None = None) -> list[Bandwidth]:
    """Copy and read-only bandwidth, cold, each at several sizes; of several block sizes the fastest counts."""
    sizes = dict(SIZES) if sizes is None else sizes
    cold = COLD * l2_bytes(device)
    largest = max(max(each) for each in sizes.values())
    buffer = torch.ones(max(2 * largest, cold + largest) // 4, device=device)
    out = torch.empty(largest // 4, device=device)
    found = []
    for kind, each in sizes.items():
        for size in each:
            count = size // 4 if kind == "read" else size // 8
            pieces = [buffer[i : i + count] for i in range(0, buffer.numel() - count + 1, count)]
            needed = max(2, math.ceil(cold / (4 * count)) + 1)
            launch = bandwidth.read if kind == "read" else bandwidth.copy
            target = out if kind == "read" else out[:count]
            best = min(
                (
                    timer([partial(launch, piece, target, block) for piece in pieces[:needed]])
                    for block in bandwidth.BLOCKS
                ),
                key=lambda sample: sample.median,
            )
            found.append(Bandwidth(kind, size, Time(**vars(best)), size / best.median / 1e3))  # type: ignore[arg-type]
    return found


def at_size(measured: Sequence[Bandwidth], kind: str, size: float) -> float:
    """GB/s of ``kind`` at the measured size nearest to ``size``."""
    return min((b for b in measured if b.kind == kind), key=lambda b: abs(math.log(b.bytes / size))).gb_per_s


def shares(measured: Sequence[Bandwidth], traffic: Traffic, microseconds: float) -> tuple[float, float, float, float]:
    """GB/s, and its share of the read and of the copy bandwidth, and the floor's share of the time (see Step)."""
    read, written = sum(traffic.read.values()), sum(traffic.written.values())
    total = read + written
    speed = total / microseconds / 1e3
    reads, copies = at_size(measured, "read", total), at_size(measured, "copy", total)
    floor = (max(0.0, read - written) / reads + (min(read, written) + written) / copies) / 1e3
    return speed, speed / reads, speed / copies, floor / microseconds
