"""The launch table: tile rows, warps and stages of every kernel, by format, shape and architecture.

Data, filled by a sweep on the device; nothing is tuned while kernels run, since most of them write in place.
Measured on an H200 (2026-11-30, batch 256) where a line says so; the rest are guesses that a sweep will replace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .device.targets import INTERPRET, PORTABLE, TARGETS, Target

ANY = None


@dataclass(frozen=True)
class Launch:
    """``rows`` and ``columns`` of a tile of the state; ``programs``: how many persistent programs, at most."""

    warps: int
    rows: int = 0
    columns: int = 0
    stages: int = 1
    programs: int = 0


@dataclass(frozen=True)
class Entry:
    """When ``launch`` applies; None is any. The first entry that fits wins."""

    launch: Launch
    op: str
    format: str | None = ANY
    value_dim: int | None = ANY
    key_dim: int | None = ANY
    isa: int | None = ANY
    max_batch: int | None = ANY


TABLE: tuple[Entry, ...] = (
    # of 4-bit copies rows of all heads, 32 for each warp or a multiple: quads of rows that a thread takes part in
    Entry(Launch(rows=128, warps=2), "readout", "nvfp4"),
    Entry(Launch(rows=128, warps=2), "readout", "mxfp4"),
    Entry(Launch(rows=32, warps=4), "readout", "fp32"),
    *(Entry(Launch(rows=64, warps=2), "readout", f) for f in ("fp8_e4m3", "mxfp8", "int8")),
    Entry(Launch(rows=32, warps=4), "readout"),
    # of several queries: sixteen rows a warp at a time, so at least 16 · warps
    Entry(Launch(rows=64, warps=2), "readout_many"),
    # one warp waits for no other; KDA makes its keys again for every tile, which then has to be large
    Entry(Launch(rows=128, columns=32, warps=4, stages=3, programs=132 * 2), "fold", "kda", isa=90),
    Entry(Launch(rows=32, columns=32, warps=1, stages=1, programs=132 * 8), "fold", "mamba2", isa=90),
    Entry(Launch(rows=32, columns=32, warps=1, stages=3, programs=132 * 8), "fold", "gdn", isa=90),
    Entry(Launch(rows=64, columns=32, warps=4, programs=132 * 3), "fold", "kda"),
    Entry(Launch(rows=32, columns=32, warps=2, programs=132 * 8), "fold"),
    # windows above 32: Triton 3.6 miscompiles KDA's copies ahead (stages) there on sm_90: NaN with two, and with three
    Entry(Launch(rows=32, columns=32, warps=4, programs=132 * 4), "fold_long", "kda"),
    Entry(Launch(rows=32, columns=32, warps=1, stages=3, programs=132 * 8), "fold_long", "gdn", isa=90),
    Entry(Launch(rows=32, columns=32, warps=1, programs=132 * 8), "fold_long"),
    # blocks in threads; tiles of 128 rows are shared out where few rows flush
    Entry(Launch(rows=128, warps=2, programs=132 * 16), "renew"),
    Entry(Launch(warps=1), "window"),
    Entry(Launch(warps=4), "plan"),
    # one warp: with several, a key goes through shared memory and its norm through barriers, 28 of them; nothing that
    # was tried is faster by more than 2 % for any batch from 1 to 256 (H200)
    Entry(Launch(rows=8, warps=1), "standard"),
    # terms of a scan by padded window; the carry of nvfp4 holds whole heads, whose scale is one, others some rows
    Entry(Launch(warps=8, columns=32), "scan_terms", "64"),
    Entry(Launch(warps=8, columns=64), "scan_terms", "32"),
    Entry(Launch(warps=4, columns=32), "scan_terms"),
    Entry(Launch(warps=4, rows=16), "scan_token_terms"),
    Entry(Launch(warps=8, stages=2), "scan_carry", "nvfp4", 64),
    Entry(Launch(warps=8, stages=1), "scan_carry", "nvfp4"),
    Entry(Launch(rows=16, warps=4, stages=2), "scan_carry"),
    Entry(Launch(warps=16, stages=3), "scan_token_carry", "nvfp4"),
    Entry(Launch(rows=16, warps=4, stages=3), "scan_token_carry"),
    Entry(Launch(rows=16, warps=2), "scan_read", "long"),
    Entry(Launch(rows=64, warps=8), "scan_read", "fp32"),
    Entry(Launch(rows=32, warps=4), "scan_read"),
)


def find_launch(op: str, format: str, value_dim: int, key_dim: int, isa: int, batch: int) -> Launch:
    """The first entry that fits; every op has one without conditions."""
    for e in TABLE:
        asked = ((e.format, format), (e.value_dim, value_dim), (e.key_dim, key_dim), (e.isa, isa))
        if e.op == op and all(a in (ANY, b) for a, b in asked) and (e.max_batch is ANY or batch <= e.max_batch):
            return e.launch
    raise KeyError(op)


@dataclass(frozen=True)
class Call:
    """A kernel launch that was recorded instead of run."""

    kernel: Any
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]


_recorder: tuple[Target, list[Call]] | None = None


@contextmanager
def recording(target: Target) -> Iterator[list[Call]]:
    """Inside, ``run`` keeps the launches that ``target`` would get, and runs none. For ahead-of-time compilation:
    what is compiled is then what is launched. Not for use from several threads."""
    global _recorder
    calls: list[Call] = []
    _recorder = (target, calls)
    try:
        yield calls
    finally:
        _recorder = None


def isa_of(device: torch.device) -> int:
    """The instructions that kernels may use on ``device``, or on the target of ``recording``."""
    if _recorder is not None:
        return _recorder[0].isa
    if device.type != "cuda" or INTERPRET:
        return PORTABLE
    major, minor = torch.cuda.get_device_capability(device)
    return next((t.isa for t in TARGETS.values() if t.capability == 10 * major + minor), PORTABLE)


def run(kernel: Any, grid: tuple[int, ...], launch: Launch, *arguments: Any, **constants: Any) -> None:
    """Launch ``kernel`` with the table's options; ``constants`` are its constexprs, and Triton's other options."""
    constants = {"enable_fp_fusion": True, "num_warps": launch.warps, "num_stages": launch.stages} | constants
    if _recorder is not None:
        _recorder[1].append(Call(kernel, arguments, constants))
    else:
        kernel[grid](*arguments, **constants)
