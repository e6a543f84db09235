"""One arm of one layer shape: a pool of states, its correctness check, and the time of each kind of step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch

from ...kernels import checks, sequence, timing
from ...kernels.cases import random_state, random_tokens
from ...kernels.launch import isa_of
from ...kernels.paths import Path, standard_pays
from ...kernels.readout.triton import readout
from ...kernels.standard.triton import step as standard_step
from ...kernels.standard.triton import unsupported_layer
from ...kernels.timing import Launcher, Sample, Schedule, Timer, cut, l2_bytes, schedule, slots_needed
from ...quant.columns import unit_columns
from ...quant.errors import InvalidValueError, NonFiniteStateError
from ...quant.policy import StatePolicy, parse_arm
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState
from . import memory, traffic
from .peers import PEERS
from .result import Bandwidth, Case, Check, Kind, Status, Step, Time

STANDARD: Literal["standard"] = "standard"
KINDS: tuple[Kind, ...] = ("non-flush", "flush", "mixed")
"""The steps of an arm with a ring. Speculative decode adds its own kind here and in ``Arm.launches``."""

PARTS = ("plan", "window", "readout", "window of a flush", "fold", "renew")
"""Launches that are also timed alone."""

MEMORY_SHARE = 0.35
"""Of the free memory that a pool may take: the codec's temporaries need some too."""


def arm_policy(arm: str, window: int) -> StatePolicy | None:
    """The policy of an arm; None for ``standard`` and peers, which have no ring. Raises InvalidValueError."""
    if arm == STANDARD or arm in PEERS:
        return None
    policy = parse_arm(arm, window=window)
    if policy.checkpoint != "fp32":
        raise InvalidValueError(f"arm {arm!r} has no kernels: they keep an FP32 checkpoint, not {policy.checkpoint}")
    return policy


@dataclass
class Bench:
    """What all measurements of a run share."""

    timer: Timer
    device: torch.device
    bandwidth: Sequence[Bandwidth]
    breakdown: bool = False
    l2: int = 0
    note: Callable[[str], None] = field(default=lambda text: None)

    def __post_init__(self) -> None:
        self.l2 = self.l2 or l2_bytes(self.device)

    def pool_slots(self, spec: LayerSpec, policy: StatePolicy, batches: Sequence[int]) -> int:
        """Slots of a pool for these batches, as many as memory allows."""
        wanted = max(slots_needed(b, _cold_bytes(spec, policy, b), self.l2) for b in batches)
        if self.device.type != "cuda":
            return wanted
        free, _ = torch.cuda.mem_get_info(self.device)
        probe = DecodeState.allocate(
            spec, policy, 1, dtype=traffic.ACTIVATIONS,
            decay_rate=torch.zeros(spec.heads) if spec.rules.gain_sets_decay else None, columns=unit_columns(spec),
        )  # fmt: skip
        return min(wanted, int(MEMORY_SHARE * free / probe.state_bytes()["total"]))


def _cold_bytes(spec: LayerSpec, policy: StatePolicy, batch: int) -> int:
    """What a launch reads of states alone: the least that passes between two uses of a slot."""
    parts = traffic.read(spec, policy, 0).read
    return int(batch * (parts.get("copy", 0) or parts["state"]))


def measure_arm(
    bench: Bench,
    shape: str,
    spec: LayerSpec,
    arm: str,
    window: int,
    batches: Sequence[int],
    done: Callable[[Case], None],
) -> None:
    """Measure one arm at each batch; ``done`` gets each case as soon as it is there."""
    policy = arm_policy(arm, window)
    blank: dict[str, Any] = {"shape": shape, "window": window if policy is None else policy.window, "arm": arm}
    blank |= {name: getattr(spec, name) for name in ("family", "heads", "key_heads", "value_dim", "key_dim")}

    def case(batch: int, status: Status, note: str = "", found: Sequence[checks.Check] = (), **rest: Any) -> None:
        rest = {"steps": [], "amortised_us": None} | rest
        listed = [Check(c.name, c.error if math.isfinite(c.error) else None, c.limit) for c in found]
        done(Case(**blank, batch=batch, status=status, note=note, checks=listed, **rest))

    if arm in PEERS:
        for batch in batches:
            _measure_peer(bench, spec, arm, batch, case)
        return
    own = policy if policy is not None else StatePolicy(window=1)
    reason = sequence.unsupported_layer(spec, own) if policy is not None else unsupported_layer(spec, "fp32")
    if reason is not None:
        for batch in batches:
            case(batch, "skipped", reason)
        return
    pool: DecodeState | None = None
    for batch in batches:
        with checks.launched_as(batch):
            found = check(spec, policy, bench.device)
            if policy is not None and standard_pays(spec, policy, isa_of(bench.device), batch):
                found += checks.check_paths(spec, policy, bench.device)
        if bad := [c for c in found if not c.passed]:
            case(batch, "refused", f"not timed: {bad[0]}", found)
            continue
        try:
            if pool is None:
                slots = bench.pool_slots(spec, own, batches)
                pool = random_state(spec, own, slots, seed=0, device=bench.device, dtype=traffic.ACTIVATIONS)
            timed = Arm(bench, spec, policy, batch, pool)
            steps = timed.steps()
        except InvalidValueError as error:
            case(batch, "skipped", str(error), found)
            continue
        except NonFiniteStateError as error:
            case(batch, "refused", f"not counted: {error}", found)
            continue
        breakdown = timed.breakdown() if bench.breakdown and policy is not None else {}
        case(batch, "timed", "", found, steps=steps, amortised_us=amortised(steps, own.window), breakdown=breakdown)


def check(spec: LayerSpec, policy: StatePolicy | None, device: torch.device) -> list[checks.Check]:
    """The correctness gate: a small batch of the same shape against the references."""
    if policy is None:
        return checks.check_standard(spec, device)
    return checks.check_replay(spec, policy, device)


def amortised(steps: Sequence[Step], window: int) -> float | None:
    """((L − 1)·non-flush + flush)/L in µs; the one step there is where nothing is amortised."""
    times = {s.kind: s.time.median for s in steps}
    if "flush" not in times:
        return times.get("standard")
    return ((window - 1) * times.get("non-flush", 0.0) + times["flush"]) / window


@dataclass
class Arm:
    """An arm at one batch, ready to be timed. Its pool's contents move on, as they would when serving."""

    bench: Bench
    spec: LayerSpec
    policy: StatePolicy | None
    batch: int
    pool: DecodeState

    def __post_init__(self) -> None:
        device = self.bench.device
        self.inputs = random_tokens(self.spec, self.batch, seed=1, device=device, dtype=traffic.ACTIVATIONS)
        shape = (self.batch, 1, self.spec.heads, self.spec.value_dim)
        self.out = torch.zeros(shape, dtype=traffic.ACTIVATIONS, device=device)
        self.workspace = sequence.Workspace.allocate(self.pool, self.batch)

    def launches(self, kind: Kind) -> tuple[list[Launcher], Launcher]:
        """The launches of a graph, and what restores the cursors before it."""
        if kind == "standard" or kind == "auto":
            plan, groups, cursor = self._planned("flush")
            cursor.fill_(self.pool.emptied)  # as every step but the first finds it
        else:
            plan, groups, cursor = self._planned(kind)
        w = self.workspace
        path: Path = "auto" if kind == "auto" else "replay"

        def step(slots: torch.Tensor) -> None:
            if kind == STANDARD:
                standard_step(self.pool, self.inputs, slots, out=self.out, done=w.done, status=w.status)
            else:
                sequence.step(self.pool, self.inputs, slots, path=path, workspace=w, out=self.out)

        each: list[Launcher] = [partial(step, slots) for slots in groups]
        return each * plan.passes, partial(self.pool.cursor.copy_, cursor)

    def _planned(self, kind: timing.Kind) -> tuple[Schedule, list[torch.Tensor], torch.Tensor]:
        state = self.pool
        cold = _cold_bytes(self.spec, state.policy, self.batch)
        plan = schedule(kind, self.batch, state.policy.window, state.slots, cold, self.bench.l2)
        return (plan, *cut(plan, state.slots, self.bench.device))

    def steps(self) -> list[Step]:
        """The time of each kind of step. Raises NonFiniteStateError where a state has left the finite numbers."""
        kinds: tuple[Kind, ...] = (STANDARD,) if self.policy is None else KINDS
        if self.policy is not None and self.policy.window == 1:
            kinds = ("flush",)
        if self.policy is not None and sequence.takes_standard(self.pool, self.batch, "auto"):
            kinds += ("auto",)
        found = []
        for kind in kinds:
            exact = kind in (STANDARD, "auto")
            moved = traffic.standard(self.spec) if exact else traffic.step(kind, self.spec, self.pool.policy)
            found.append(make_step(kind, self.time(kind), moved.times(self.batch), self.bench))
        return found

    def time(self, kind: Kind) -> Sample:
        """The time of one kind of step. Raises NonFiniteStateError as ``steps``."""
        self.bench.note(kind)
        launches, before = self.launches(kind)
        sample = self.bench.timer(launches, before)
        self.workspace.check_finite(self.pool)
        return sample

    def breakdown(self, names: Sequence[str] = PARTS) -> dict[str, Time]:
        """Each launch of a step alone: of a step that reads, at half a ring, and of one in which all rows flush."""
        state, inputs, batch = self.pool, self.inputs, self.batch
        length, found = state.policy.window, {}
        groups = self._planned("flush")[1]
        # each group's own terms, so that folding over and over keeps the states what they are: small
        work = [sequence.Workspace.allocate(state, batch) for _ in groups]

        def read(slots: torch.Tensor, w: sequence.Workspace) -> None:
            terms = (w.theta[:batch], w.gain[:batch], w.c[:batch])
            readout(state.read_source, state.ring["v"], *terms, slots, w.used, self.out)

        def plan(slots: torch.Tensor, w: sequence.Workspace) -> None:
            sequence.plan(state, slots, w)

        def window(slots: torch.Tensor, w: sequence.Workspace) -> None:
            sequence.window(state, inputs, slots, w)

        def fold(slots: torch.Tensor, w: sequence.Workspace) -> None:
            sequence.fold(state, inputs, slots, w, self.out)

        def renew(slots: torch.Tensor, w: sequence.Workspace) -> None:
            sequence.renew_folded(state, slots, w)

        half, full = max(length // 2 - 1, 0), length - 1
        parts: dict[str, tuple[int, Callable[[torch.Tensor, sequence.Workspace], None]]] = {
            "plan": (half, plan),
            "window": (half, window),
            "readout": (half, read),
            "window of a flush": (full, window),
            "fold": (full, fold),
        }
        if state.copy is not None:
            parts["renew"] = (full, renew)
        for name in (n for n in names if n in parts):
            fill, launch = parts[name]
            self.bench.note(name)
            restore = partial(state.cursor.fill_, fill)
            restore()
            for slots, w in zip(groups, work, strict=True):
                plan(slots, w)
                window(slots, w)
            each = [partial(launch, slots, w) for slots, w in zip(groups, work, strict=True)]
            found[name] = _time(self.bench.timer(each, restore))
        return found


def make_step(kind: Kind, sample: Sample, moved: traffic.Traffic, bench: Bench) -> Step:
    speed, of_read, of_copy, of_floor = memory.shares(bench.bandwidth, moved, sample.median)
    return Step(kind, _time(sample), moved.read, moved.written, speed, of_read, of_copy, of_floor)


def _time(sample: Sample) -> Time:
    return Time(**vars(sample))


def _measure_peer(bench: Bench, spec: LayerSpec, arm: str, batch: int, case: Callable[..., None]) -> None:
    peer = PEERS[arm](spec)
    if reason := peer.missing():
        case(batch, "skipped", reason)
        return
    found = peer.check(bench.device)
    if bad := [c for c in found if not c.passed]:
        case(batch, "refused", f"not timed: {bad[0]}", found)
        return
    policy = StatePolicy(window=1)
    slots = bench.pool_slots(spec, policy, [batch])
    try:
        plan = schedule("flush", batch, 1, slots, _cold_bytes(spec, policy, batch), bench.l2)
    except InvalidValueError as error:
        case(batch, "skipped", str(error), found)
        return
    bench.note(arm)
    sample = bench.timer(peer.launches(batch, plan.groups, bench.device))
    steps = [make_step(STANDARD, sample, traffic.standard(spec).times(batch), bench)]
    case(batch, "timed", peer.note, found, steps=steps, amortised_us=sample.median)
