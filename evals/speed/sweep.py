"""Try launches of each kernel on this GPU, and print the best ones as entries of the launch table.

    python -m quantize_state.evals.speed.sweep --op readout --shape qwen3.5-4b --arm decoupled-nvfp4 --batch 1,32,256
    python -m quantize_state.evals.speed.sweep --paths runs/…/speed.json

A candidate whose correctness check fails, or that does not compile or fit, is named and not timed. Entries go in front
of those in kernels/launch.py; ``--json FILE`` writes them with every time. ``--paths`` reads a bench instead and
prints the entries of kernels/paths.py: up to how many heads the standard kernel is as fast as a mixed step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ...kernels import launch as table
from ...kernels.cases import random_state
from ...kernels.launch import Entry, Launch, find_launch, isa_of
from ...kernels.paths import Crossover
from ...kernels.shapes import find_shape
from ...kernels.timing import GraphTimer, Timer, l2_bytes, need_gpu
from ...quant.errors import InvalidValueError, QuantizeStateError
from ...quant.policy import StatePolicy
from ...quant.spec import LayerSpec
from ..records import write_atomic
from . import traffic
from .measure import STANDARD, Arm, Bench, arm_policy, check
from .result import SpeedResult

OPS = ("standard", "readout", "fold", "fold_long", "renew", "window", "plan")
TIMED: dict[str, tuple[str, ...]] = {
    **{op: (op,) for op in ("readout", "fold", "renew", "plan")},
    "window": ("window", "window of a flush"),
    "fold_long": ("fold",),
}
"""What decides, by op: of a window 15 launches of 16 are those of steps that read. fold_long is the fold of windows
above 32."""
WORTH = 0.98
"""A candidate replaces the table's launch where it takes less than this share of its time; repeats differ by 1 %."""


@dataclass(frozen=True)
class Tried:
    """One candidate at one batch: microseconds, or why it was not timed."""

    batch: int
    launch: Launch
    microseconds: float | None
    problem: str = ""


def candidates(op: str, base: Launch, spec: LayerSpec, programs: int = 132) -> list[Launch]:
    """Launches to try for an op, the table's own first; ``programs``: multiprocessors of the device."""
    rows = [r for r in (16, 32, 64, 128) if r <= max(16, 1 << (spec.value_dim - 1).bit_length())]
    knobs: dict[str, Sequence[int]] = {"warps": (1, 2, 4, 8)}
    if op in ("standard", "readout"):
        knobs["rows"] = [4, 8, *rows] if op == "standard" else rows
    elif op in ("fold", "fold_long"):
        knobs |= {"warps": (1, 2, 4, 8), "rows": [r for r in rows if r > 16], "columns": (16, 32, 64)}
        knobs["programs"] = [programs * n for n in (2, 3, 4, 8)]
    elif op == "renew":
        knobs |= {"warps": (1, 2, 4), "rows": [8, *rows][:3], "programs": [programs * n for n in (8, 16, 32)]}
    settings: list[dict[str, Any]] = [dict(zip(knobs, v, strict=True)) for v in itertools.product(*knobs.values())]
    tried = [replace(base, **chosen) for chosen in settings]
    if "rows" in knobs:  # 8 to 256 state elements in the registers of a thread; fewer than 4 are no 16 bytes
        least = 4 if op == "standard" else 8
        tried = [c for c in tried if least <= c.rows * spec.key_dim / (32 * c.warps) <= 256]
    return list(dict.fromkeys([base, *tried]))


@contextmanager
def preferred(entry: Entry) -> Iterator[None]:
    """Inside, the launch table begins with ``entry``. Not for use from several threads."""
    before = table.TABLE
    table.TABLE = (entry, *before)
    try:
        yield
    finally:
        table.TABLE = before


def sweep(
    bench: Bench,
    op: str,
    spec: LayerSpec,
    policy: StatePolicy | None,
    batches: Sequence[int],
    *,
    limit: int | None = None,
    done: Callable[[Tried], None] | None = None,
) -> list[Tried]:
    """Check and time the candidates of ``op`` at each batch. ``policy`` None is the standard kernel's."""
    own = policy if policy is not None else StatePolicy(window=1)
    slots = bench.pool_slots(spec, own, batches)
    pool = random_state(spec, own, slots, seed=0, device=bench.device, dtype=traffic.ACTIVATIONS)
    isa, format = isa_of(bench.device), key_of(op, spec, policy)
    processors = 132
    if bench.device.type == "cuda":
        processors = torch.cuda.get_device_properties(bench.device).multi_processor_count
    found = []
    for batch in batches:
        base = _current(op, format, spec, isa, batch)
        for chosen in candidates(op, base, spec, processors)[:limit]:
            with preferred(Entry(chosen, op)):
                tried = _try(bench, op, spec, policy, batch, pool, chosen)
            found.append(tried)
            if done is not None:
                done(tried)
    return found


def _current(op: str, format: str, spec: LayerSpec, isa: int, batch: int) -> Launch:
    sizes = (0, 0) if op == "plan" else (spec.value_dim, spec.key_dim)
    return find_launch(op, format, *sizes, isa, batch)


def key_of(op: str, spec: LayerSpec, policy: StatePolicy | None) -> str:
    """The table's ``format`` of an op: the copy's, the family for windows and folds, nothing for the others."""
    if op in ("window", "fold", "fold_long"):
        return spec.family
    if policy is None or op == "plan":
        return ""
    return policy.read or policy.checkpoint


def _try(bench: Bench, op: str, spec: LayerSpec, policy: StatePolicy | None, batch: int, pool, chosen: Launch) -> Tried:
    try:
        bad = [c for c in check(spec, policy, bench.device) if not c.passed]
        if bad:
            return Tried(batch, chosen, None, f"wrong: {bad[0]}")
        arm = Arm(bench, spec, policy, batch, pool)
        if op == STANDARD:
            return Tried(batch, chosen, arm.time(STANDARD).median)
        parts = arm.breakdown(TIMED[op])
    except QuantizeStateError:
        raise
    except Exception as error:  # what a compiler raises for a launch that does not fit
        return Tried(batch, chosen, None, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}")
    return Tried(batch, chosen, parts[TIMED[op][0]].median)


def best_entries(
    op: str, spec: LayerSpec, policy: StatePolicy | None, isa: int, tried: Sequence[Tried]
) -> list[tuple[Entry, float, float]]:
    """(entry, µs, µs of the table's own launch) where a candidate beats the table, smaller batches first; the entry of
    the largest batch holds for all above it too."""
    batches = sorted({t.batch for t in tried})
    sizes = {} if op == "plan" else {"value_dim": spec.value_dim, "key_dim": spec.key_dim}
    format = key_of(op, spec, policy) or None
    found = []
    for batch in batches:
        here = [t for t in tried if t.batch == batch]
        timed = [t for t in here if t.microseconds is not None]
        if not timed:
            continue
        base, best = here[0], min(timed, key=lambda t: t.microseconds or 0.0)
        before = base.microseconds if base.microseconds is not None else float("inf")
        if best.microseconds is not None and best.microseconds < WORTH * before:
            at_most = None if batch == batches[-1] else batch
            entry = Entry(best.launch, op, format, isa=isa, max_batch=at_most, **sizes)
            found.append((entry, best.microseconds, before))
    return found


def _spelt(value: Any, *without: str) -> str:
    given = {n: v for n, v in asdict(value).items() if v != getattr(type(value), n, None) and n not in without}
    return ", ".join(f'{n}="{v}"' if isinstance(v, str) else f"{n}={v}" for n, v in given.items())


def source(entry: Entry) -> str:
    """An entry as kernels/launch.py spells it."""
    conditions = _spelt(entry, "launch", "op")
    return f'Entry(Launch({_spelt(entry.launch)}), "{entry.op}"{", " + conditions if conditions else ""}),'


def crossovers(result: SpeedResult) -> list[tuple[Crossover, str]]:
    """For each kind of layer and read format: the most heads, of those measured from the fewest on without a gap, with
    which the standard kernel is at least as fast as a mixed step; and a comment that names what was measured. Raises
    InvalidValueError for a result without the smallest batch, which says nothing about it."""
    times = {(c.shape, c.arm, c.batch): c.serving_us for c in result.cases if c.serving_us is not None}
    points: dict[tuple[str, str, int, int], list[tuple[int, bool, str]]] = {}
    for case in result.cases:
        standard, own = times.get((case.shape, STANDARD, case.batch)), case.serving_us
        if standard is None or own is None or not case.arm.startswith(("replay", "decoupled")):
            continue
        policy = arm_policy(case.arm, case.window)
        assert policy is not None
        key = (case.family, policy.read or policy.checkpoint, case.value_dim, case.key_dim)
        points.setdefault(key, []).append((case.heads * case.batch, standard <= own, case.shape))
    smallest = {c.shape: min(o.batch for o in result.cases if o.shape == c.shape) for c in result.cases}
    if not points or max(smallest.values()) > 1:
        raise InvalidValueError("--paths needs standard and other arms from batch 1 on: bench --batch 1,2,4,8,16,32")
    found = []
    for key, measured in points.items():
        paying = itertools.takewhile(lambda p: p[1], sorted(measured, key=lambda p: (p[0], p[1])))
        heads = max((p[0] for p in paying), default=0)
        shapes = ", ".join(dict.fromkeys(shape for *_, shape in measured))
        found.append((Crossover(heads, *key), f"{shapes}: {min(measured)[0]} to {max(measured)[0]} heads measured"))
    return found


def main(
    arguments: Sequence[str] | None = None, *, timer: Timer | None = None, device: torch.device | None = None
) -> int:
    """Sweep, or read a bench. Exit codes: 0 done, 2 an error that the message explains."""
    parser = argparse.ArgumentParser(
        prog="python -m quantize_state.evals.speed.sweep", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--op", action="append", choices=OPS, help="which kernels (repeatable; default: all)")
    parser.add_argument("--shape", action="append", default=[], metavar="NAME", help="a layer (repeatable)")
    parser.add_argument("--family", metavar="NAME", help="of a shape that is spelt as heads x value dim x key dim")
    parser.add_argument("--arm", action="append", default=[], metavar="ARM", help="repeatable")
    parser.add_argument("--batch", default="1,32,256", metavar="N,…", help="batch sizes (default: %(default)s)")
    parser.add_argument("--window", type=int, default=16, metavar="L")
    parser.add_argument("--limit", type=int, metavar="N", help="try the first N candidates of each op alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write entries and every time there")
    parser.add_argument("--paths", type=Path, metavar="SPEED.json", help="a bench: where the standard kernel pays")
    args = parser.parse_args(arguments)
    try:
        if args.paths is not None:
            for entry, measured in crossovers(SpeedResult.read(args.paths)):
                print(f"    Crossover({_spelt(entry)}),  # {measured}")
            return 0
        return _sweep_all(args, timer or GraphTimer(), device)
    except QuantizeStateError as error:
        print(f"sweep: {error}", file=sys.stderr)
        return 2


def _sweep_all(args: argparse.Namespace, timer: Timer, device: torch.device | None) -> int:
    batches = _batches(args.batch)
    shapes = [find_shape(text, args.family) for text in args.shape or ("nemotron-3-super", "qwen3.5-4b")]
    arms = args.arm or ["decoupled-nvfp4"]
    policies = {arm: arm_policy(arm, args.window) for arm in arms}
    if device is None:
        device = need_gpu("sweep")
    bench = Bench(timer, device, (), l2=l2_bytes(device))
    records: list[dict[str, Any]] = []
    done: set[tuple[Any, ...]] = set()
    for name, spec in shapes:
        for op in args.op or OPS:
            for arm, policy in policies.items():
                chosen = None if op == STANDARD else policy
                if op != STANDARD and chosen is None:
                    continue
                key = (op, spec.value_dim, spec.key_dim, spec.heads, key_of(op, spec, chosen))
                if key in done:
                    continue
                done.add(key)
                title = f"{op}, {name}" + ("" if op == STANDARD else f", {arm}")
                tried = sweep(bench, op, spec, chosen, batches, limit=args.limit, done=lambda t, n=title: _say(n, t))  # type: ignore[misc]
                best = best_entries(op, spec, chosen, isa_of(device), tried)
                for entry, microseconds, before in best:
                    print(f"    {source(entry)}  # {microseconds:.2f} µs, {before:.2f} before: {name}", flush=True)
                records.append(
                    {
                        "op": op, "shape": name, "arm": arm,
                        "entries": [{**asdict(e), "microseconds": us, "before": old} for e, us, old in best],
                        "tried": [asdict(t) for t in tried],
                    }
                )  # fmt: skip
    if args.json is not None:
        finite = json.dumps({"device": _name(device), "sweeps": records}, indent=1).replace("Infinity", "null")
        write_atomic(args.json, finite + "\n", overwrite=False)
    return 0


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InvalidValueError(f"--batch is {text!r}; it must be whole numbers with commas, such as 1,256")
    return sorted(int(part) for part in parts)


def _say(title: str, tried: Tried) -> None:
    said = tried.problem if tried.microseconds is None else f"{tried.microseconds:.2f} µs"
    print(f"{title}, batch {tried.batch}: {tried.launch}: {said}", file=sys.stderr, flush=True)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


if __name__ == "__main__":
    sys.exit(main())
