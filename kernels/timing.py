"""Timing launches on a GPU: CUDA graphs, cold caches, and which rows of a pool each launch works on.

A pool holds far more slots than a batch has rows. A random permutation of them is cut into groups of a batch's rows,
and successive launches use other groups, so that a state always comes from memory; tokens and other small inputs are
in the L2 cache, as they are behind the kernel that made them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from ..quant.errors import InvalidValueError
from .device.targets import INTERPRET, unavailable

Launcher = Callable[[], Any]
Kind = Literal["non-flush", "flush", "mixed"]

POOL_SLOTS = 1025
"""Slots of a pool where memory allows and caches do not ask for more."""
COLD = 4
"""Between two uses of a slot, launches move at least this many times the L2 cache."""


@dataclass(frozen=True)
class Sample:
    """Microseconds per launch: median and 20th and 80th percentile over ``replays`` of a graph of ``launches``."""

    median: float
    p20: float
    p80: float
    launches: int
    replays: int


def summarise(times: Sequence[float], launches: int) -> Sample:
    """``times``: microseconds of each replay of a graph of ``launches``."""
    if not times or launches < 1:
        raise InvalidValueError(f"{len(times)} replays of {launches} launches give no time")
    each = sorted(t / launches for t in times)
    cuts = statistics.quantiles(each, n=5, method="inclusive") if len(each) > 1 else each * 4
    return Sample(statistics.median(each), cuts[0], cuts[-1], launches, len(each))


class Timer(Protocol):
    """Times a list of launches that follow each other; ``before`` runs before each replay and is not timed."""

    def __call__(self, launches: Sequence[Launcher], before: Launcher | None = None) -> Sample: ...


@dataclass(frozen=True)
class GraphTimer:
    """All launches in one CUDA graph, replayed; the device is never idle between the replays."""

    replays: int = 25
    seconds: float = 0.25
    """Replays end early after this long, but for five of them."""

    def __call__(self, launches: Sequence[Launcher], before: Launcher | None = None) -> Sample:
        before = before or (lambda: None)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            before()
            for launch in launches:  # compiles what is new
                launch()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in launches:
                launch()
        first = self._replay(graph, before, 1)[0]
        replays = max(5, min(self.replays, int(self.seconds * 1e6 / max(first, 1.0))))
        times = self._replay(graph, before, replays + 1)[1:]
        graph.reset()
        return summarise(times, len(launches))

    def _replay(self, graph: Any, before: Launcher, count: int) -> list[float]:
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, stop in events:
            before()
            start.record()
            graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [1e3 * start.elapsed_time(stop) for start, stop in events]


def need_gpu(what: str) -> torch.device:
    """The CUDA device that timing needs; InvalidValueError says what is missing."""
    if INTERPRET:
        raise InvalidValueError(f"{what} needs a GPU, and TRITON_INTERPRET runs kernels on numpy; unset it")
    if not torch.cuda.is_available():
        build = "" if torch.version.cuda else "; this torch is a CPU build"
        raise InvalidValueError(f"{what} needs an NVIDIA GPU (Hopper or Blackwell) and finds none{build}")
    device = torch.device("cuda", torch.cuda.current_device())
    if reason := unavailable(device):
        raise InvalidValueError(f"{what} can't run: {reason}")
    return device


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache; 60 MB, an H200's, where the driver is not asked."""
    if device.type != "cuda":
        return 60 * 10**6
    return int(getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)) or 60 * 10**6


@dataclass(frozen=True)
class Schedule:
    """Which rows each launch of a graph works on, at which ring fill.

    ``groups`` of ``batch`` rows; a graph goes over all of them ``passes`` times, so a slot's fill grows by one
    from pass to pass. ``fills`` [groups][batch]: the ring's fill of each row when the graph begins.
    """

    kind: Kind
    batch: int
    groups: int
    passes: int
    fills: tuple[tuple[int, ...], ...]

    @property
    def launches(self) -> int:
        return self.groups * self.passes


def slots_needed(batch: int, launch_bytes: int, l2: int) -> int:
    """Slots of a pool in which a slot is used again only after COLD times the L2 cache."""
    return max(POOL_SLOTS, cold_groups(launch_bytes, l2) * batch + 1)


def cold_groups(launch_bytes: int, l2: int) -> int:
    return max(2, math.ceil(COLD * l2 / launch_bytes) + 1)


def schedule(kind: Kind, batch: int, window: int, slots: int, launch_bytes: int, l2: int) -> Schedule:
    """Plan a graph.

    ``non-flush``: every ring fill from 0 to L − 2 equally often, all rows of a launch alike. ``flush``: fill L − 1
    everywhere. ``mixed``: the rows of a launch spread over 0 to L − 1, so that one in L flushes. Raises
    InvalidValueError where the pool is too small for cold caches, or a window of one has no step without a flush.
    """
    available, needed = slots // batch, cold_groups(launch_bytes, l2)
    if available < needed:
        raise InvalidValueError(
            f"{slots} slots are {available} groups of {batch} rows; {needed} are needed, so that {COLD} times the "
            f"{l2 / 1e6:.0f} MB of the L2 cache pass between two uses of a slot"
        )
    if kind == "non-flush" and window == 1:
        raise InvalidValueError("a window of 1 flushes at every step")
    cycle = {"non-flush": window - 1, "flush": 1, "mixed": window}[kind]
    groups = min(available, max(needed, 2 * window))
    if groups >= cycle:
        groups, passes = groups - groups % cycle, 1
        if groups < needed:  # rounding down must not warm the cache
            groups, passes = min(available, needed), cycle
    else:
        passes = cycle
    start = {
        "non-flush": lambda g, r: g % cycle if passes == 1 else 0,
        "flush": lambda g, r: window - 1,
        "mixed": lambda g, r: (r * max(1, window // batch) + g) % window,
    }[kind]
    fills = tuple(tuple(start(g, r) for r in range(batch)) for g in range(groups))
    return Schedule(kind, batch, groups, passes, fills)


def cut(plan: Schedule, slots: int, device: torch.device, seed: int = 0) -> tuple[list[Tensor], Tensor]:
    """Slots [B] int32 of each group, and the cursors [slots] int32 to begin a graph with."""
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(seed))[: plan.groups * plan.batch]
    cursor = torch.zeros(slots, dtype=torch.int32)
    cursor[order] = torch.tensor(plan.fills, dtype=torch.int32).flatten()
    groups = order.to(torch.int32).view(plan.groups, plan.batch).to(device)
    return list(groups.unbind()), cursor.to(device)
