"""A verification of T tokens by one arm: its correctness check, its bytes, and the time of each kind of step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, Literal

import torch

from ...kernels import checks, launch, sequence
from ...kernels.cases import random_state, random_tokens
from ...kernels.inputs import TokenInputs
from ...kernels.speculative import sequence_bytes
from ...kernels.standard import snapshots
from ...kernels.standard.triton import step as standard_step
from ...kernels.timing import Launcher, Sample, Timer, cold_groups
from ...kernels.verify_checks import check_snapshots, check_verify
from ...kernels.window.accept import accept
from ...quant.errors import InvalidValueError, NonFiniteStateError
from ...quant.policy import StatePolicy
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState
from . import memory, traffic
from .acceptance import Row, accepted_counts, cursor_shares, expected_tokens, spread
from .measure import arm_policy
from .result import BASELINES, Bandwidth, Check, Time, VerifyCase, VerifyStep

Kind = Literal["reads", "full", "partial"]

ROWS = 64
"""At least this many rows take part in a time, so that few of them, too, stand at all cursors."""
MEMORY_SHARE = 0.6
"""Of the free memory that a pool may take; a state for every draft needs much."""


def policy_of(arm: str, window: int) -> StatePolicy:
    """That of an arm; baselines keep an FP32 state and no ring."""
    return (None if arm in BASELINES else arm_policy(arm, window)) or StatePolicy(window=1)


def resident_bytes(spec: LayerSpec, arm: str, window: int, tokens: int) -> int:
    """Of one sequence in one layer that is to verify ``tokens`` tokens; plain steps can't be rolled back."""
    if arm in BASELINES:
        return sequence_bytes(spec, StatePolicy(), tokens - 1 if arm == "snapshots" else 0)["snapshots"]
    return sequence_bytes(spec, policy_of(arm, window), tokens - 1)["total"]


def moved_bytes(spec: LayerSpec, arm: str, window: int, tokens: int, acceptance: float | None) -> traffic.Traffic:
    """Mean bytes of a row's step; with ``acceptance`` None rows are only read, at fills alike."""
    if arm == "standard":
        return traffic.standard(spec).times(tokens)
    if arm == "snapshots":
        return traffic.snapshots(spec, tokens)
    policy = policy_of(arm, window)
    total = traffic.Traffic({}, {})
    for cursor, share in enumerate(_shares(window, tokens, acceptance)):
        row = Row(cursor, window, tokens)
        total = total.plus(traffic.verification(spec, policy, cursor, row.verified, row.closing).times(share))
    return total


def _shares(window: int, tokens: int, acceptance: float | None) -> list[float]:
    if acceptance is not None:
        return cursor_shares(window, tokens, acceptance)
    fills = window - tokens
    return [1 / fills if cursor < fills else 0.0 for cursor in range(window)]


# Correctness, which compiles every kernel: in several processes on a GPU, since compilers run on one core


def _compile_timed(job: Job) -> None:
    """Launch once what will be timed, so that it comes from Triton's cache on the disk then: outputs are bfloat16."""

    def once(launches: Sequence[Launcher], before: Launcher | None = None) -> Sample:
        if before is not None:
            before()
        launches[0]()
        return Sample(1.0, 1.0, 1.0, 1, 1)

    any_time = Time(1.0, 1.0, 1.0, 1, 1)
    speeds = [Bandwidth("read", 1, any_time, 1.0), Bandwidth("copy", 1, any_time, 1.0)]
    own = Bench(once, torch.device(job.device), speeds, 1, job.window, 1.0, (ROWS,), (job.tokens,))
    with checks.launched_as(job.batch):
        Shape(own, job.spec).steps(job.arm, ROWS, job.tokens)
    torch.cuda.synchronize()


@dataclass(frozen=True)
class Job:
    spec: LayerSpec
    arm: str
    window: int
    tokens: int
    batch: int
    device: str


def check(job: Job) -> list[checks.Check]:
    """The gate of one arm, by the launches of its batch."""
    with checks.launched_as(job.batch):
        if job.arm == "standard":
            return checks.check_standard(job.spec, job.device)
        if job.arm == "snapshots":
            return check_snapshots(job.spec, job.device, job.tokens)
        policy = policy_of(job.arm, job.window)
        if job.tokens == 1:
            return checks.check_replay(job.spec, policy, torch.device(job.device))
        return check_verify(job.spec, policy, job.device, job.tokens)


def _checked(jobs: Sequence[Job], workers: int) -> Iterator[list[checks.Check] | str]:
    """What each job found, or what it raised: a kernel that does not compile is not timed either."""
    if workers == 1 or len(jobs) == 1:
        yield from map(_safely, jobs)
        return
    with ProcessPoolExecutor(min(workers, len(jobs)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_safely, jobs)


def _safely(job: Job) -> list[checks.Check] | str:
    try:
        found = check(job)
        if torch.device(job.device).type == "cuda" and all(c.passed for c in found):
            _compile_timed(job)
        return found
    except Exception as error:  # whatever a compiler or driver raises is a finding
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def same_launches(batch: int) -> tuple[launch.Entry, ...]:
    """The entries of the launch table that can apply to a batch: batches that share them share their checks."""
    return tuple(e for e in launch.TABLE if e.max_batch is launch.ANY or batch <= e.max_batch)


# Times


@dataclass
class Bench:
    timer: Timer
    device: torch.device
    bandwidth: Sequence[Bandwidth]
    l2: int
    window: int
    acceptance: float
    batches: tuple[int, ...]
    tokens: tuple[int, ...]

    def step(
        self, kind: Kind, sample: Sample, moved: traffic.Traffic, accepted: float,
        flushing: float = 0.0,
    ) -> VerifyStep:  # fmt: skip
        shares = memory.shares(self.bandwidth, moved, sample.median)
        acceptance = self.acceptance if kind == "partial" else 1.0
        time = Time(**vars(sample))
        return VerifyStep(kind, acceptance, accepted, flushing, time, moved.read, moved.written, *shares)


class Shape:
    """Pools of one shape, kept for all numbers of tokens and batches."""

    def __init__(self, bench: Bench, spec: LayerSpec) -> None:
        self.bench, self.spec = bench, spec
        self.pools: dict[str, DecodeState] = {}

    def groups(self, arm: str, batch: int, tokens: int) -> int:
        """Groups of a batch's rows that launches take turns with."""
        state = 4 * self.spec.elements
        if arm == "standard":
            cold = state
        elif arm == "snapshots":
            cold = state * tokens
        else:
            policy = policy_of(arm, self.bench.window)
            read = traffic.read(self.spec, policy, 0).read
            cold = int(read.get("copy", 0) or read["state"])
        return max(cold_groups(batch * cold, self.bench.l2), math.ceil(ROWS / batch))

    def pool(self, arm: str, groups: int, *rows: int) -> tuple[DecodeState, list[torch.Tensor]]:
        """The arm's pool, one at a time, with room for every batch; and the slots of ``groups``, each [*rows]."""
        policy = policy_of(arm, self.bench.window)
        if arm not in self.pools:
            self.pools.clear()
            each = [(b, t) for b in self.bench.batches for t in self.bench.tokens]
            slots = max(self.groups(arm, b, t) * b * (t if arm == "snapshots" else 1) for b, t in each)
            if self.bench.device.type == "cuda":
                torch.cuda.empty_cache()
                free, _ = torch.cuda.mem_get_info(self.bench.device)
                slots = min(slots, int(MEMORY_SHARE * free / resident_bytes(self.spec, arm, self.bench.window, 1)))
            self.pools[arm] = random_state(
                self.spec, policy, slots, seed=0, device=self.bench.device, dtype=traffic.ACTIVATIONS
            )
        state, wanted = self.pools[arm], groups * math.prod(rows)
        if wanted > state.slots:
            raise InvalidValueError(f"{wanted} slots are needed, and memory has room for {state.slots}")
        order = torch.randperm(state.slots, generator=torch.Generator().manual_seed(0))[:wanted].to(torch.int32)
        return state, list(order.view(groups, *rows).to(self.bench.device).unbind())

    def steps(self, arm: str, batch: int, tokens: int) -> list[VerifyStep]:
        inputs = random_tokens(
            self.spec, batch, tokens, seed=1, device=self.bench.device, dtype=traffic.ACTIVATIONS
        )  # fmt: skip
        shape = (batch, tokens, self.spec.heads, self.spec.value_dim)
        out = torch.zeros(shape, dtype=traffic.ACTIVATIONS, device=self.bench.device)
        if arm in BASELINES:
            moved = moved_bytes(self.spec, arm, self.bench.window, tokens, 1.0).times(batch)
            sample = (self._standard if arm == "standard" else self._snapshots)(batch, tokens, inputs, out)
            return [self.bench.step("full", sample, moved, float(tokens))]
        return list(self._verifications(arm, batch, tokens, inputs, out))

    def _standard(self, batch: int, tokens: int, inputs: TokenInputs, out: torch.Tensor) -> Sample:
        """T plain steps of the same rows, one after the other, as one launch."""
        state, slots_of = self.pool("standard", self.groups("standard", batch, tokens), batch)
        each = [inputs.slice(t, t + 1).map(torch.Tensor.contiguous) for t in range(tokens)]
        outs = [out[:, t : t + 1].contiguous() for t in range(tokens)]
        status = torch.zeros(1, dtype=torch.int64, device=self.bench.device)

        def steps(slots: torch.Tensor) -> None:
            for token, y in zip(each, outs, strict=True):
                standard_step(state, token, slots, out=y, status=status)

        return self.bench.timer([partial(steps, slots) for slots in slots_of])

    def _snapshots(self, batch: int, tokens: int, inputs: TokenInputs, out: torch.Tensor) -> Sample:
        """All tokens are accepted, so each verification goes on from the last slot of the one before."""
        groups = self.groups("snapshots", batch, tokens)
        state, slots_of = self.pool("snapshots", groups, batch, tokens)
        keywords = {"decay_rate": state.decay_rate, "out": out}
        pool = state.checkpoint.codes
        return self.bench.timer(
            [partial(snapshots.verify, self.spec, pool, inputs, s[:, -1].contiguous(), s, **keywords) for s in slots_of]
        )

    def _verifications(
        self, arm: str, batch: int, tokens: int, inputs: TokenInputs, out: torch.Tensor
    ) -> Iterator[VerifyStep]:
        window, acceptance = self.bench.window, self.bench.acceptance
        groups = self.groups(arm, batch, tokens)
        state, slots_of = self.pool(arm, groups, batch)
        space = sequence.Workspace.allocate(state, batch, tokens=tokens)
        kinds: dict[Kind, float | None] = {"reads": None, "full": 1.0}
        if tokens > 1:
            kinds["partial"] = acceptance
        if tokens == window:
            del kinds["reads"]
        for kind, right in kinds.items():
            shares = _shares(window, tokens, right)
            cursor = torch.zeros_like(state.cursor)
            fills = torch.tensor(spread(shares, groups, batch), dtype=cursor.dtype, device=cursor.device)
            cursor[torch.cat(slots_of).long()] = fills.flatten()
            chances = torch.tensor(accepted_counts(tokens, 1.0 if right is None else right))
            drawn = torch.multinomial(chances, batch, True, generator=torch.Generator().manual_seed(2)) + 1
            counts = drawn.to(torch.int32).to(self.bench.device)

            def verification(slots: torch.Tensor, counts: torch.Tensor = counts) -> None:
                if tokens == 1:
                    sequence.step(state, inputs, slots, workspace=space, out=out)
                    return
                _, verified = sequence.verify(state, inputs, slots, workspace=space, out=out)
                accept(state, counts, verified, slots)

            sample = self.bench.timer([partial(verification, s) for s in slots_of], partial(state.cursor.copy_, cursor))
            space.check_finite(state)
            moved = moved_bytes(self.spec, arm, window, tokens, right).times(batch)
            taken = expected_tokens(window, tokens, 1.0 if right is None else right, shares)
            yield self.bench.step(kind, sample, moved, taken, shares[-1])


def check_all(
    spec: LayerSpec, todo: Sequence[tuple[str, int, int]], window: int, device: torch.device, workers: int
) -> dict[tuple[str, int, tuple[launch.Entry, ...]], list[checks.Check] | str]:
    jobs = {(arm, t, same_launches(b)): Job(spec, arm, window, t, b, str(device)) for arm, t, b in todo}
    once: dict[Any, Any] = {}  # plain steps are the same whatever their number
    same = {key: (("standard", key[2]) if key[0] == "standard" else key) for key in jobs}
    for key, job in jobs.items():
        once.setdefault(same[key], job)
    found = dict(zip(once, _checked(list(once.values()), workers), strict=True))
    return {key: found[same[key]] for key in jobs}


def measure(
    here: Shape, shape: str, arm: str, tokens: int, batch: int, found: list[checks.Check] | str
) -> VerifyCase:  # fmt: skip
    spec, window = here.spec, here.bench.window
    listed = [] if isinstance(found, str) else found
    written = [Check(c.name, c.error if math.isfinite(c.error) else None, c.limit) for c in listed]
    status: Literal["timed", "refused", "skipped"]
    status, note, steps = "timed", "", []
    bad = [c for c in listed if not c.passed]
    if isinstance(found, str) or bad:
        status, note = "refused", f"not timed: {found if isinstance(found, str) else bad[0]}"
    else:
        try:
            steps = here.steps(arm, batch, tokens)
        except (InvalidValueError, torch.OutOfMemoryError) as error:
            status, note = "skipped", " ".join(str(error).split())[:200]
        except NonFiniteStateError as error:
            status, note = "refused", f"not counted: {error}"
    resident = resident_bytes(spec, arm, window, tokens)
    sizes = (spec.family, spec.heads, spec.key_heads, spec.value_dim, spec.key_dim)
    return VerifyCase(shape, *sizes, batch, window, arm, tokens, status, note, written, steps, resident)
