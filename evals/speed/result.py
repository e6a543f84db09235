"""What a bench writes: times, bytes and bandwidth as strict JSON, read without torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..records import dump, load, write_atomic
from ..result import Provenance

SCHEMA = "quantize-state/speed/1"

Kind = Literal["non-flush", "flush", "mixed", "standard", "auto"]
Status = Literal["timed", "refused", "skipped"]


@dataclass(frozen=True)
class Time:
    """Microseconds per launch: median, 20th and 80th percentile over ``replays`` of a graph of ``launches``."""

    median: float
    p20: float
    p80: float
    launches: int
    replays: int


@dataclass(frozen=True)
class Bandwidth:
    """A ``copy`` (bytes read and written are both counted) or a ``read`` of ``bytes`` in one launch."""

    kind: Literal["copy", "read"]
    bytes: int
    time: Time
    gb_per_s: float


@dataclass(frozen=True)
class Step:
    """One kind of step: its time, the bytes that it has to move (evals/speed/traffic.py), and what they say.

    ``auto``: by the standard kernel on a state with ring and copy, where kernels/paths.py says so; elsewhere auto is
    ``mixed``.

    ``share_of_read`` and ``share_of_copy``: GB/s over the bandwidth measured in the same run at the nearest size.
    ``share_of_floor``: the time in which the memory could do it, reads beyond the writes at the read's speed and
    the rest at the copy's, over the time taken.
    """

    kind: Kind
    time: Time
    bytes_read: dict[str, float]
    bytes_written: dict[str, float]
    gb_per_s: float
    share_of_read: float
    share_of_copy: float
    share_of_floor: float

    @property
    def bytes(self) -> float:
        return sum(self.bytes_read.values()) + sum(self.bytes_written.values())


@dataclass(frozen=True)
class Check:
    name: str
    error: float | None
    limit: float


@dataclass(frozen=True)
class Case:
    """One arm at one shape and batch. ``refused``: its correctness check failed, so it was not timed.
    ``skipped``: it can't run here; ``note`` says why. ``breakdown``: each launch of a step alone, at half a ring."""

    shape: str
    family: str
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    batch: int
    window: int
    arm: str
    status: Status
    note: str
    checks: list[Check]
    steps: list[Step]
    amortised_us: float | None
    breakdown: dict[str, Time] = field(default_factory=dict)

    def step(self, kind: str) -> Step | None:
        return next((s for s in self.steps if s.kind == kind), None)

    @property
    def auto_us(self) -> float | None:
        """What the step costs that serving takes (kernels/paths.py): the standard kernel's or the mixed one's."""
        step = self.step("auto")
        return self.serving_us if step is None else step.time.median

    @property
    def serving_us(self) -> float | None:
        """What a step costs with rows at different fills: the mixed step, or the one that there is."""
        step = self.step("mixed") or self.step("standard")
        return None if step is None else step.time.median


@dataclass(frozen=True)
class SpeedResult:
    """A run of ``quantize-state bench`` on one device."""

    bandwidth: list[Bandwidth]
    cases: list[Case]
    provenance: Provenance
    schema: str = SCHEMA

    @classmethod
    def read(cls, path: str | Path) -> SpeedResult:
        """Raises FileFormatError for a file that is no whole result of this version."""
        return load(cls, Path(path), SCHEMA)

    def write(self, path: Path) -> None:
        """Raises QuantizeStateError where ``path`` exists: results are never overwritten."""
        write_atomic(path, dump(self), overwrite=False)


SPECULATIVE_SCHEMA = "quantize-state/speculative-speed/1"


@dataclass(frozen=True)
class VerifyStep:
    """One kind of step that verifies ``tokens`` tokens a row: its time, the bytes it has to move, and what they say.

    ``reads``: no row ends a window and no draft is cut. ``full`` and ``partial``: rows where they are found after a
    long time, if drafts are right with probability ``acceptance``; ``flushing`` of them end a window in a step, and
    ``accepted`` tokens are committed, means over rows. Shares as in Step.
    """

    kind: Literal["reads", "full", "partial"]
    acceptance: float
    accepted: float
    flushing: float
    time: Time
    bytes_read: dict[str, float]
    bytes_written: dict[str, float]
    gb_per_s: float
    share_of_read: float
    share_of_copy: float
    share_of_floor: float

    @property
    def bytes(self) -> float:
        return sum(self.bytes_read.values()) + sum(self.bytes_written.values())


@dataclass(frozen=True)
class VerifyCase:
    """One arm at one shape, batch and number of tokens to verify. ``standard``: that many plain steps; ``snapshots``:
    a state written for every token. ``resident_bytes``: of one sequence in one layer, ring included."""

    shape: str
    family: str
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    batch: int
    window: int
    arm: str
    tokens: int
    status: Status
    note: str
    checks: list[Check]
    steps: list[VerifyStep]
    resident_bytes: int

    def step(self, kind: str) -> VerifyStep | None:
        """That kind of step; the baselines have one, which is every kind."""
        found = next((s for s in self.steps if s.kind == kind), None)
        return self.steps[0] if found is None and self.steps and self.arm in BASELINES else found


BASELINES = ("standard", "snapshots")


@dataclass(frozen=True)
class SpeculativeResult:
    """A run of ``quantize-state bench --speculative`` on one device."""

    bandwidth: list[Bandwidth]
    cases: list[VerifyCase]
    provenance: Provenance
    schema: str = SPECULATIVE_SCHEMA

    @classmethod
    def read(cls, path: str | Path) -> SpeculativeResult:
        """Raises FileFormatError for a file that is no whole result of this version."""
        return load(cls, Path(path), SPECULATIVE_SCHEMA)

    def write(self, path: Path) -> None:
        """Raises QuantizeStateError where ``path`` exists: results are never overwritten."""
        write_atomic(path, dump(self), overwrite=False)
