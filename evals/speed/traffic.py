"""The byte model: what one step of a layer has to move, counted from the tensors that hold it.

Counted once each: the state as it is read and written, the ring rows before the token as read, the token's row as
written, the token's inputs as read and the outputs as written. Not counted: what the kernels of a step hand on to each
other (Θ, C, M) and the token's ring row when it is read back, which live in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ...quant.columns import unit_columns
from ...quant.policy import StatePolicy
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState

ACTIVATIONS = torch.bfloat16


@dataclass(frozen=True)
class Traffic:
    """Bytes by what they are: ``state``, ``copy``, ``ring``, ``activations``."""

    read: dict[str, float]
    written: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.read.values()) + sum(self.written.values())

    def times(self, factor: float) -> Traffic:
        return Traffic(*({n: b * factor for n, b in part.items()} for part in (self.read, self.written)))

    def plus(self, other: Traffic) -> Traffic:
        def add(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
            return {n: a.get(n, 0) + b.get(n, 0) for n in (*a, *(n for n in b if n not in a))}

        return Traffic(add(self.read, other.read), add(self.written, other.written))


@dataclass(frozen=True)
class _Sizes:
    state: int
    copy: int
    ring_row: int
    query: int
    output: int


@lru_cache
def _sizes(spec: LayerSpec, policy: StatePolicy) -> _Sizes:
    """Bytes of one slot: checkpoint, copy, one row of the ring; and of the token's query and outputs."""
    rate = torch.zeros(spec.heads) if spec.rules.gain_sets_decay else None
    state = DecodeState.allocate(spec, policy, 1, dtype=ACTIVATIONS, decay_rate=rate, columns=unit_columns(spec))
    width = ACTIVATIONS.itemsize
    return _Sizes(
        state.checkpoint.nbytes,
        0 if state.copy is None else state.copy.nbytes,
        sum(t.numel() * t.element_size() for t in state.ring.values()) // policy.window,
        spec.key_heads * spec.key_dim * width,
        spec.heads * spec.value_dim * width,
    )


def standard(spec: LayerSpec) -> Traffic:
    """One token of one sequence: the FP32 state read and written."""
    s = _sizes(spec, StatePolicy(window=1))
    return Traffic({"state": s.state, "activations": s.ring_row + s.query}, {"state": s.state, "activations": s.output})


def read(spec: LayerSpec, policy: StatePolicy, fill: float) -> Traffic:
    """One token of one sequence whose ring holds ``fill`` tokens before it, and which does not flush."""
    s = _sizes(spec, policy)
    source: dict[str, float] = {"copy": s.copy} if policy.read is not None else {"state": s.state}
    return Traffic(
        source | {"ring": fill * s.ring_row, "activations": s.ring_row + s.query},
        {"ring": s.ring_row, "activations": s.output},
    )


def flush(spec: LayerSpec, policy: StatePolicy) -> Traffic:
    """The token that fills the ring: the checkpoint read and written, the copy written."""
    s = _sizes(spec, policy)
    copied: dict[str, float] = {} if policy.read is None else {"copy": s.copy}
    ring = (policy.window - 1) * s.ring_row
    written: dict[str, float] = {"state": s.state, "ring": s.ring_row, "activations": s.output}
    return Traffic({"state": s.state, "ring": ring, "activations": s.ring_row + s.query}, written | copied)


def verification(spec: LayerSpec, policy: StatePolicy, cursor: int, tokens: int, closing: bool) -> Traffic:
    """``tokens`` verified tokens of one sequence whose ring holds ``cursor`` before them. Where the first closes the
    window, the others read the copy that it has written."""
    s = _sizes(spec, policy)
    drafts, moved = tokens, Traffic({}, {})
    if closing:
        drafts, moved = tokens - 1, flush(spec, policy)
        cursor = 0
    if drafts == 0:
        return moved
    source: dict[str, float] = {"copy": s.copy} if policy.read is not None else {"state": s.state}
    activations = drafts * (s.ring_row + s.query)
    reads = source | {"ring": cursor * s.ring_row, "activations": activations}
    return moved.plus(Traffic(reads, {"ring": drafts * s.ring_row, "activations": drafts * s.output}))


def snapshots(spec: LayerSpec, tokens: int) -> Traffic:
    """``tokens`` tokens of one sequence, with an FP32 state read before them and written after each."""
    s = _sizes(spec, StatePolicy(window=1))
    return Traffic(
        {"state": s.state, "activations": tokens * (s.ring_row + s.query)},
        {"state": tokens * s.state, "activations": tokens * s.output},
    )


def step(kind: str, spec: LayerSpec, policy: StatePolicy) -> Traffic:
    """Mean over a ``non-flush`` step's fills 0 to L − 2, a ``flush``, or the mean of a ``mixed`` batch's rows."""
    length = policy.window
    if kind == "flush" or length == 1:
        return flush(spec, policy)
    reads = read(spec, policy, (length - 2) / 2)
    if kind == "non-flush":
        return reads
    return reads.times((length - 1) / length).plus(flush(spec, policy).times(1 / length))
