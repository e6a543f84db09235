"""``bench --speculative``: a verification of T tokens by each arm, beside T plain steps and a state for every draft."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.shapes import find_shape
from ...kernels.timing import GraphTimer, Timer, l2_bytes, need_gpu
from ...quant.errors import InvalidValueError
from ...quant.spec import LayerSpec
from . import bench, memory
from .cases import CaseFolder
from .measure import arm_policy
from .result import BASELINES, SpeculativeResult, VerifyCase
from .verify_measure import Bench, Shape, check_all, measure, moved_bytes, same_launches

SHAPES = ("nemotron-3-super", "qwen3.5-4b")
ARMS = ("replay-fp32", "decoupled-fp8", "decoupled-nvfp4")
BATCHES = (1, 32, 128, 256, 512)
TOKENS = (1, 2, 4, 6, 8)
ACCEPTANCE = 0.8
CASE_SCHEMA = "quantize-state/speculative-case/1"


@dataclass(frozen=True)
class Plan:
    """What to measure; everything in it has been checked."""

    shapes: dict[str, LayerSpec]
    batches: tuple[int, ...]
    arms: tuple[str, ...]
    tokens: tuple[int, ...]
    window: int
    acceptance: float

    @property
    def cases(self) -> int:
        return len(self.shapes) * len(self.batches) * len(self.arms) * len(self.tokens)


@dataclass(frozen=True)
class _CaseFile:
    """A finished case, kept so that a run that was cut short goes on."""

    device: str
    git_commit: str | None
    case: VerifyCase
    schema: str = CASE_SCHEMA


def make_plan(
    shapes: Sequence[str] = (),
    family: str | None = None,
    batches: Sequence[int] = (),
    arms: Sequence[str] = (),
    window: int = 16,
    tokens: Sequence[int] = (),
    acceptance: float = ACCEPTANCE,
) -> Plan:
    """Check what was asked for; the baselines are always part of it. InvalidValueError names what is allowed."""
    named = [a for a in arms if a not in BASELINES] or list(ARMS)
    plan = bench.make_plan(shapes, family, batches or BATCHES, named, window)
    chosen = plan.shapes if shapes or family is not None else dict(find_shape(name) for name in SHAPES)
    arms = [a for a in plan.arms if a not in BASELINES]
    for arm in arms:
        policy = arm_policy(arm, window)
        if policy is None or policy.window == 1:
            raise InvalidValueError(f"arm {arm!r} has no ring, so there is nothing to roll back to")
    for n in tokens or TOKENS:
        if not 1 <= n <= window:
            raise InvalidValueError(f"--tokens has {n}; a verification takes 1 to {window}, the window, tokens")
    if not 0 <= acceptance <= 1:
        raise InvalidValueError(f"acceptance is {acceptance}; it is the probability of a right draft, 0 to 1")
    return Plan(chosen, plan.batches, (*BASELINES, *arms), tuple(tokens or TOKENS), window, acceptance)


def describe(plan: Plan) -> list[dict[str, Any]]:
    """What ``--dry-run`` shows: bytes of one sequence's full verification, and resident. No GPU needed."""
    rows: list[dict[str, Any]] = []
    for shape, spec in plan.shapes.items():
        for arm in plan.arms:
            moved = {f"T = {t}": moved_bytes(spec, arm, plan.window, t, 1.0).total for t in plan.tokens}
            rows.append({"shape": shape, "arm": arm, "batches": list(plan.batches), "bytes_per_row": moved})
    return rows


def run(
    plan: Plan,
    out: Path,
    *,
    timer: Timer | None = None,
    device: torch.device | None = None,
    sizes: dict[str, Sequence[int]] | None = None,
    workers: int | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> SpeculativeResult:
    """Measure, and write ``out``/speculative.json. A run that was cut short goes on where it was, on the same device
    and commit; until the end speculative.unfinished.json has what there is.

    Args:
        timer, device, sizes: for tests, as in ``bench.run``.
        workers: processes that check and compile at once; by default the machine's cores but two, at most twelve.
        progress: called with what is being done, cases done and cases in all.
    """
    device = need_gpu("bench") if device is None else device
    folder = CaseFolder(out, "speculative.json", _CaseFile, device)
    show = progress or (lambda what, done, total: None)
    show("bandwidth", 0, plan.cases)
    timer = timer or GraphTimer(replays=9, seconds=0.06)
    if workers is None:
        workers = max(1, min(12, (os.cpu_count() or 1) - 2)) if device.type == "cuda" else 1
    bandwidth = memory.measure(timer, device, sizes)
    own = Bench(timer, device, bandwidth, l2_bytes(device), plan.window, plan.acceptance, plan.batches, plan.tokens)
    cases: list[VerifyCase] = []
    places = (list(plan.shapes), plan.batches, plan.tokens, plan.arms)

    def found() -> SpeculativeResult:
        cases.sort(key=lambda c: [p.index(v) for p, v in zip(places, (c.shape, c.batch, c.tokens, c.arm), strict=True)])
        made_by = folder.made_by(plan.window, {"states": 0, "tokens": 1, "slots": 0, "counts": 2}, {})
        return SpeculativeResult(bandwidth, cases, made_by)

    for shape, spec in plan.shapes.items():
        todo = []
        for key in ((arm, t, b) for arm in plan.arms for t in plan.tokens for b in plan.batches):
            known = folder.find(_stem(shape, plan, *key))
            if known is None:
                todo.append(key)
            else:
                cases.append(known)
        show(f"{shape}: checks", len(cases), plan.cases)
        checks = check_all(spec, todo, plan.window, device, workers)
        here = Shape(own, spec)
        for arm, tokens, batch in todo:
            show(f"{shape}, {arm}, {tokens} tokens, batch {batch}", len(cases), plan.cases)
            case = measure(here, shape, arm, tokens, batch, checks[arm, tokens, same_launches(batch)])
            cases.append(case)
            folder.keep(_stem(shape, plan, arm, tokens, batch), case)
            folder.write(found(), finished=False)
        here.pools.clear()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    result = found()
    folder.write(result, finished=True)
    return result


def _stem(shape: str, plan: Plan, arm: str, tokens: int, batch: int) -> str:
    return f"{shape}-{arm}-w{plan.window}-a{plan.acceptance:g}-t{tokens}-b{batch}"
