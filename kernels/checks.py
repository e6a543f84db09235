"""Kernels against the torch references, on whatever device: what has to hold before a kernel is timed or trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..quant.codec import encode
from ..quant.encoded import EncodedState
from ..quant.formats import FORMATS
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from . import launch, sequence
from .cases import forget_unused, random_state, random_tokens
from .fold.renew import renew
from .paths import Path
from .scan import triton as scan
from .scan.reference import scan_windows as reference_scan
from .standard.reference import standard
from .standard.reference import step as standard_reference
from .standard.triton import step as standard_step
from .step import step as reference_step

FP32 = 4e-6
"""Relative error of FP32 sums in another order; measured on an H200: 2.3e-7 at most."""
HALF = 2e-3
"""Of outputs whose block sums are float16, of 4-bit reads; measured 5.5e-4, in the interpreter 1.2e-3."""


@dataclass(frozen=True)
class Check:
    """One comparison: a relative error, or a count of things that differ, and what it may be at most."""

    name: str
    error: float
    limit: float

    @property
    def passed(self) -> bool:
        return math.isfinite(self.error) and self.error <= self.limit

    def __str__(self) -> str:
        return f"{self.name} {self.error:.3g} (at most {self.limit:g})"


def relative(ours: Tensor, exact: Tensor) -> float:
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def different_bytes(ours: Tensor, expected: Tensor) -> float:
    a, b = (t.contiguous().view(torch.uint8) for t in (ours, expected))
    return float((a != b).sum())


@contextmanager
def launched_as(batch: int) -> Iterator[None]:
    """Inside, a batch of any size gets the launches that the table has for ``batch`` rows, so that a small check
    runs what a large batch runs. Not for use from several threads."""
    table = launch.TABLE
    fitting = (e for e in table if e.max_batch is launch.ANY or batch <= e.max_batch)
    launch.TABLE = tuple(replace(e, max_batch=launch.ANY) for e in fitting)
    try:
        yield
    finally:
        launch.TABLE = table


def check_replay(
    spec: LayerSpec, policy: StatePolicy, device: torch.device | str, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> list[Check]:
    """One step of rows at several ring fills, two that flush, one that is padding, beside a slot that no row names.
    ``dtype``: of the ring and the token."""
    return list(_replay(spec, policy, torch.device(device), seed, dtype))


def _replay(
    spec: LayerSpec, policy: StatePolicy, device: torch.device, seed: int, dtype: torch.dtype
) -> Iterator[Check]:
    length = policy.window
    fills = [0, length // 2, max(0, length - 2), length - 1, length - 1, 0]
    rows = [4, -1, 1, 3, 0, 2]  # slot 5 is named by none
    state = random_state(spec, policy, 6, seed=seed, device=device, dtype=dtype)
    forget_unused(state, fills)
    before, clone = state.clone(), state.clone()
    slots = torch.tensor(rows, dtype=torch.int32, device=device)
    inputs = random_tokens(spec, len(rows), seed=seed + 7, device=device, dtype=dtype)
    expected = reference_step(clone, inputs, slots)
    w = sequence.Workspace.allocate(state, len(rows))
    for t in (w.theta, w.gain, w.c, w.start):
        t.fill_(float("nan"))
    w.top.fill_(0x7E000000)  # of a flush long ago, and enormous
    out = torch.full_like(expected, float("nan"))
    sequence.step(state, inputs, slots, workspace=w, out=out)

    flushing = [b for b, s in enumerate(rows) if s >= 0 and fills[s] == length - 1]
    reading = [b for b, s in enumerate(rows) if s >= 0 and fills[s] < length - 1]
    four_bit = FORMATS[state.read_source.format].bits == 4
    if reading:
        yield Check("output of reads", relative(out[reading], expected[reading]), HALF if four_bit else FP32)
    yield Check("output of flushes", relative(out[flushing], expected[flushing]), FP32)
    yield Check("padded outputs written", float((~out[1].isnan()).sum()), 0)
    folded = [rows[b] for b in flushing]
    yield Check("state of flushes", relative(state.checkpoint.codes[folded], clone.checkpoint.codes[folded]), FP32)
    held = [rows[b] for b in reading]
    yield Check("state bytes of reads", different_bytes(state.checkpoint.codes[held], before.checkpoint.codes[held]), 0)
    yield Check(
        "cursors and positions",
        float((state.cursor != clone.cursor).sum() + (state.position != clone.position).sum()),
        0,
    )
    yield Check("ring bytes", sum(different_bytes(t, clone.ring[n]) for n, t in state.ring.items()), 0)
    yield from _copy_checks(state)
    yield Check("bytes of a slot that no row names", touched(state, before, 5), 0)
    yield Check("not finite", float(int(w.status)), 0)


def _copy_checks(state: DecodeState) -> Iterator[Check]:
    """The copy is the encoding of the checkpoint that the kernels left, to the bit."""
    if state.copy is None:
        return
    copy = state.copy
    again = encode(state.checkpoint.codes, *copy.how)
    ours = copy.tensors()
    yield Check("copy bytes", sum(different_bytes(ours[n], t) for n, t in again.tensors().items()), 0)


def touched(state: DecodeState, before: DecodeState, slot: int) -> float:
    """Bytes of a slot that differ between two states."""
    index = torch.tensor([slot], device=state.cursor.device)
    a, b = state.select(index), before.select(index)
    pairs = [(t, b.ring[n]) for n, t in a.ring.items()] + [(a.checkpoint.codes, b.checkpoint.codes)]
    if a.copy is not None and b.copy is not None:
        other = b.copy.tensors()
        pairs += [(t, other[n]) for n, t in a.copy.tensors().items()]
    return sum(different_bytes(x, y) for x, y in pairs)


def check_scan(spec: LayerSpec, policy: StatePolicy, device: torch.device | str, seed: int = 0) -> list[Check]:
    """Three windows and two tokens by the scan's kernels, from a state with a copy, against the reference's scan."""
    state = random_state(spec, policy, 2, seed=seed, device=torch.device(device))
    state.cursor.zero_()
    clone, rows = state.clone(), torch.arange(2, device=state.cursor.device)
    inputs = random_tokens(spec, 2, 3 * policy.window + 2, seed=seed + 7, device=torch.device(device))
    y, expected = scan.scan_windows(state, inputs, rows), reference_scan(clone, inputs, rows)
    # a copy's codes may differ where the states that they encode differ in their last bit
    return [
        Check("outputs", relative(y, expected), FP32 if policy.exact else HALF),
        Check("outputs of the first window", relative(y[:, : policy.window], expected[:, : policy.window]), FP32),
        Check("states", relative(state.checkpoint.codes, clone.checkpoint.codes), FP32),
    ]


def check_standard(spec: LayerSpec, device: torch.device | str, seed: int = 0) -> list[Check]:
    """Three tokens of the standard kernel against the recurrence in float64, and the renewed copy."""
    device = torch.device(device)
    state = random_state(spec, StatePolicy(read="nvfp4"), 4, seed=seed, device=device)
    before, rows = state.clone(), [2, -1, 0]
    live = torch.tensor([0, 2], device=device)
    slots = torch.tensor(rows, dtype=torch.int32, device=device)
    exact = state.checkpoint.codes[slots[live].long()].double()
    worst, out, status = 0.0, torch.empty(0), torch.zeros(1, dtype=torch.int64, device=device)
    for t in range(3):
        inputs = random_tokens(spec, len(rows), seed=seed + t, device=device)
        out = torch.full((len(rows), 1, spec.heads, spec.value_dim), float("nan"), device=device)
        standard_step(state, inputs, slots, out=out, status=status)
        expected = standard(spec, exact, inputs.rows_at(live), state.decay_rate)
        worst = max(worst, relative(out[live, 0], expected))
    found = [
        Check("output", worst, FP32),
        Check("state", relative(state.checkpoint.codes[slots[live].long()], exact), FP32),
        Check("padded outputs written", float((~out[1].isnan()).sum()), 0),
        Check("bytes of a slot that no row names", touched(state, before, 1), 0),
        Check("not finite", float(int(status)), 0),
    ]
    renew(state, torch.arange(4, dtype=torch.int32, device=device))
    return [*found, *_copy_checks(state)]


def check_paths(spec: LayerSpec, policy: StatePolicy, device: torch.device | str, seed: int = 0) -> list[Check]:
    """Rings of every kind go to the standard kernel for two tokens and back to replay for three, beside padding."""
    device = torch.device(device)
    length = policy.window
    fills = [0, 1, length // 2, length - 1, length - 1]
    state = random_state(spec, policy, len(fills), seed=seed, device=device)
    forget_unused(state, fills)
    clone, w = state.clone(), sequence.Workspace.allocate(state, len(fills))
    slots = torch.tensor([3, -1, 0, 2, 1], dtype=torch.int32, device=device)
    live, held = torch.tensor([0, 2, 3, 4], device=device), torch.tensor([3, 0, 2, 1], device=device)
    exact = copied = 0.0
    walk: tuple[Path, ...] = ("standard", "standard", "replay", "replay", "replay")
    for t, path in enumerate(walk):
        inputs = random_tokens(spec, len(slots), seed=seed + 7 + t, device=device)
        expected = (standard_reference if path == "standard" else reference_step)(clone, inputs, slots)
        out = torch.full_like(expected, float("nan"))
        sequence.step(state, inputs, slots, path=path, workspace=w, out=out)
        error = relative(out[live], expected[live])
        if t < 3:  # the third token flushes
            exact = max(exact, error)
        else:
            copied = max(copied, error)
    # of copies that were renewed: codes may differ where the states that they encode differ in their last bit
    limit = FP32 if policy.exact else HALF
    found = [
        Check("output of the standard kernel and of the flush behind it", exact, FP32),
        Check("output of reads after it", copied, limit),
        Check("state", relative(state.checkpoint.codes[held], clone.checkpoint.codes[held]), FP32),
        Check("cursors", float((state.cursor != clone.cursor).sum()), 0),
        Check("positions", float((state.position != clone.position).sum()), 0),
        Check("rows still counted", float(w.done.abs().sum()), 0),
        Check("not finite", float(int(w.status)), 0),
    ]
    return [*found, *_copy_checks(state.select(held))]


FAR = 1 << 30
"""Elements between the slots of a far pool: offsets pass 2**31 at the third slot."""
ROOM = 2**26
"""Bytes for the first slot of all tensors of a far pool."""


def far_bytes() -> int:
    """Memory that a far pool of three slots takes: its widest elements have four bytes."""
    return 2 * FAR * 4 + ROOM


def far_copy(state: DecodeState) -> DecodeState:
    """The same three slots, FAR elements apart, all tensors in one buffer: slots lie further apart than ROOM."""
    memory = torch.empty(far_bytes(), dtype=torch.uint8, device=state.cursor.device)
    used = 0

    def spread(t: Tensor) -> Tensor:
        nonlocal used
        pool = memory[used:].view(t.dtype)
        far = pool.as_strided(t.shape, (FAR, *t[0].contiguous().stride()), pool.storage_offset())
        _bytes(far).copy_(_bytes(t))
        used += -(-t[0].numel() * t.element_size() // 256) * 256
        assert used <= ROOM
        return far

    def encoded(e: EncodedState) -> EncodedState:
        return replace(e, codes=spread(e.codes), scales={n: spread(t) for n, t in e.scales.items()})

    near = state.clone()
    ring = {n: spread(t) for n, t in near.ring.items()}
    copy = None if near.copy is None else encoded(near.copy)
    return replace(near, checkpoint=encoded(near.checkpoint), copy=copy, ring=ring)


def _bytes(t: Tensor) -> Tensor:
    """One-byte floats as uint8: not every copy kernel knows them."""
    return t.view(torch.uint8) if t.element_size() == 1 else t


def check_far(spec: LayerSpec, device: torch.device | str) -> list[Check]:
    """Slots whose offsets pass 2**31 elements give the bytes that near ones give."""
    device = torch.device(device)
    near = random_state(spec, StatePolicy(read="nvfp4", window=4), 3, seed=0, device=device)
    near.cursor.copy_(torch.tensor([0, 3, 1], device=device))
    far = far_copy(near)
    slots = torch.tensor([2, 1], dtype=torch.int32, device=device)
    inputs = random_tokens(spec, 2, seed=1, device=device)
    outputs = [sequence.step(s, inputs, slots) for s in (near, far)]
    found = [Check("output bytes", different_bytes(*outputs), 0)]
    found.append(Check("state bytes", sum(touched(far, near, s) for s in (0, 1, 2)), 0))
    for state in (near, far):
        state.cursor.zero_()
    outputs = [standard_step(s, inputs, slots) for s in (near, far)]
    found.append(Check("output bytes of the standard kernel", different_bytes(*outputs), 0))
    for state in (near, far):
        renew(state, slots)
    return [*found, Check("state bytes after it", sum(touched(far, near, s) for s in (0, 1, 2)), 0)]


def check_graph(spec: LayerSpec, policy: StatePolicy, device: torch.device, path: Path = "replay") -> list[Check]:
    """Three replays of a captured step leave the bytes that three steps leave."""
    eager = random_state(spec, policy, 4, seed=0, device=device)
    eager.cursor.copy_(torch.tensor([0, policy.window - 2, policy.window - 1, 0], device=device))
    captured = eager.clone()
    slots = torch.tensor([3, 1, -1, 2], dtype=torch.int32, device=device)
    inputs = random_tokens(spec, 4, seed=1, device=device)
    shape = (4, 1, spec.heads, spec.value_dim)
    outs = [torch.zeros(shape, device=device) for _ in range(2)]
    spaces = [sequence.Workspace.allocate(state, 4) for state in (eager, captured)]
    # compiled before it is captured
    sequence.step(eager.clone(), inputs, slots, path=path, workspace=spaces[1], out=outs[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sequence.step(captured, inputs, slots, path=path, workspace=spaces[1], out=outs[1])
    for _ in range(3):
        sequence.step(eager, inputs, slots, path=path, workspace=spaces[0], out=outs[0])
        graph.replay()
    torch.cuda.synchronize()
    return [
        Check("output bytes", different_bytes(outs[1], outs[0]), 0),
        Check("state bytes", sum(touched(captured, eager, s) for s in range(4)), 0),
        Check("cursors", float((captured.cursor != eager.cursor).sum()), 0),
    ]
