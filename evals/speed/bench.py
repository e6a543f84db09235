"""``bench``: every arm at every shape and batch, checked first, then timed; a result that is never overwritten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...kernels.shapes import BATCHES, SHAPES, find_shape
from ...kernels.timing import GraphTimer, Timer, need_gpu
from ...quant.errors import InvalidValueError, unknown_name
from ...quant.spec import FAMILIES, LayerSpec
from .. import provenance
from . import memory, traffic
from .cases import CaseFolder
from .measure import KINDS, STANDARD, Bench, arm_policy, measure_arm
from .peers import PEERS
from .result import Case, SpeedResult

DEFAULT_ARMS = (STANDARD, "replay-fp32", "decoupled-fp8", "decoupled-nvfp4")
EVERY_ARM = (
    STANDARD, "replay-fp32", "decoupled-bf16", "decoupled-fp16", "decoupled-fp8", "decoupled-mxfp8", "decoupled-int8",
    "decoupled-nvfp4", "decoupled-nvfp4-four_over_six", "decoupled-mxfp4",
)  # fmt: skip
CASE_SCHEMA = "quantize-state/speed-case/1"


@dataclass(frozen=True)
class Plan:
    """What to measure; everything in it has been checked."""

    shapes: dict[str, LayerSpec]
    batches: tuple[int, ...]
    arms: tuple[str, ...]
    window: int
    breakdown: bool = False

    @property
    def cases(self) -> int:
        return len(self.shapes) * len(self.batches) * len(self.arms)


@dataclass(frozen=True)
class _CaseFile:
    """A finished case, kept so that a run that was cut short goes on."""

    device: str
    git_commit: str | None
    case: Case
    schema: str = CASE_SCHEMA


def make_plan(
    shapes: Sequence[str] = (),
    family: str | None = None,
    batches: Sequence[int] = (),
    arms: Sequence[str] = (),
    window: int = 16,
    peers: Sequence[str] = (),
    breakdown: bool = False,
) -> Plan:
    """Check what was asked for. Without shapes: those of ``family``, or the first of each family.

    Raises InvalidValueError naming what is allowed.
    """
    if family is not None and family not in FAMILIES:
        raise unknown_name("layer family", family, FAMILIES)
    for peer in peers:
        if peer not in PEERS:
            raise unknown_name("peer", peer, PEERS)
    named = list(EVERY_ARM) if list(arms) == ["all"] else list(arms or DEFAULT_ARMS)
    for arm in named:
        arm_policy(arm, window)
    if shapes and list(shapes) != ["all"]:
        chosen = dict(find_shape(text, family) for text in shapes)
    elif family is not None or shapes:
        chosen = {n: s for n, s in SHAPES.items() if family in (None, s.family)}
    else:
        chosen = {n: s for n, s in SHAPES.items() if n == next(m for m, o in SHAPES.items() if o.family == s.family)}
    for batch in batches:
        if not 1 <= batch <= 4096:
            raise InvalidValueError(f"batch is {batch}; it must be 1 to 4096")
    return Plan(
        chosen, tuple(batches or BATCHES), tuple(dict.fromkeys([*named, *peers])), window, breakdown
    )  # fmt: skip


def describe(plan: Plan) -> list[dict[str, Any]]:
    """What ``--dry-run`` shows: each arm and shape with the bytes that a sequence's step has to move. No GPU needed."""
    rows: list[dict[str, Any]] = []
    for shape, spec in plan.shapes.items():
        for arm in plan.arms:
            policy = arm_policy(arm, plan.window)
            kinds = (STANDARD,) if policy is None else KINDS if policy.window > 1 else ("flush",)
            moved = {
                k: traffic.standard(spec).total if policy is None else traffic.step(k, spec, policy).total
                for k in kinds
            }
            rows.append({"shape": shape, "arm": arm, "batches": list(plan.batches), "bytes_per_row": moved})
    return rows


def run(
    plan: Plan,
    out: Path,
    *,
    timer: Timer | None = None,
    device: torch.device | None = None,
    sizes: dict[str, Sequence[int]] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> SpeedResult:
    """Measure, and write ``out``/speed.json. A run that was cut short goes on where it was, on the same device and
    commit; until the end speed.unfinished.json has what there is.

    Args:
        timer, device, sizes: for tests; by default CUDA graphs on the current GPU, without which this raises
            InvalidValueError.
        progress: called with what is being done, cases done and cases in all.
    """
    if device is None:
        device = need_gpu("bench")
    folder = CaseFolder(out, "speed.json", _CaseFile, device)
    show = progress or (lambda what, done, total: None)
    show("bandwidth", 0, plan.cases)
    timer = timer or GraphTimer()
    bandwidth = memory.measure(timer, device, sizes)
    cases: list[Case] = []
    order = {arm: i for i, arm in enumerate(plan.arms)}
    shapes = list(plan.shapes)
    versions = {n: provenance.version(n) for n in ("fla-core", "flash-linear-attention") if n and PEERS.keys() & order}

    def found() -> SpeedResult:
        cases.sort(key=lambda c: (shapes.index(c.shape), c.batch, order[c.arm]))
        made_by = folder.made_by(plan.window, {"states": 0, "tokens": 1, "slots": 0}, versions)
        return SpeedResult(bandwidth, cases, made_by)

    for shape, spec in plan.shapes.items():
        for arm in plan.arms:
            todo = []
            for batch in plan.batches:
                known = folder.find(_stem(shape, arm, batch, plan))
                if known is None:
                    todo.append(batch)
                else:
                    cases.append(known)

            def done(case: Case, shape: str = shape, arm: str = arm) -> None:
                cases.append(case)
                folder.keep(_stem(shape, arm, case.batch, plan), case)
                show(f"{shape}, {arm}", len(cases), plan.cases)

            if todo:
                show(f"{shape}, {arm}", len(cases), plan.cases)
                bench = Bench(timer, device, bandwidth, plan.breakdown)
                bench.note = lambda what, shape=shape, arm=arm: show(  # type: ignore[misc]
                    f"{shape}, {arm}: {what}", len(cases), plan.cases
                )
                measure_arm(bench, shape, spec, arm, plan.window, todo, done)
                if device.type == "cuda":
                    torch.cuda.empty_cache()
                folder.write(found(), finished=False)
    result = found()
    folder.write(result, finished=True)
    return result


def _stem(shape: str, arm: str, batch: int, plan: Plan) -> str:
    return f"{shape}-{arm}-w{plan.window}-b{batch}{'-parts' if plan.breakdown else ''}"
