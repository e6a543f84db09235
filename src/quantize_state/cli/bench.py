"""``quantize-state bench``: time the kernels on this GPU, each after its correctness check."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="time the kernels on this GPU, each after its correctness check",
        description="Time a decode step of one layer with each arm, under CUDA graphs and with cold caches. A kernel "
        "whose correctness check fails is not timed.",
    )
    parser.add_argument("--family", metavar="NAME", help="mamba2, gdn or kda: all shapes of it")
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME",
        help="a model's layer, or heads x value dim x key dim with --family, such as 32/16x128x128 "
        "(repeatable; `all`; default: the first shape of each family)",
    )  # fmt: skip
    parser.add_argument(
        "--batch", metavar="N,…",
        help="batch sizes (default: 1,8,32,64,128,256,512; with --speculative 1,32,128,256,512)",
    )  # fmt: skip
    parser.add_argument("--window", type=int, default=16, metavar="L", help="tokens per flush (default: 16)")
    parser.add_argument(
        "--arms", metavar="ARM,…", help="standard, replay-fp32, decoupled-FORMAT …, or all (default: four of them)"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME", help="other people's kernels too: fla")
    parser.add_argument(
        "--speculative",
        action="store_true",
        help="verifications of several tokens instead, beside plain steps and a state for every draft",
    )
    parser.add_argument(
        "--tokens", metavar="T,…", help="tokens to verify, with --speculative: a certain one and drafts (1,2,4,6,8)"
    )
    parser.add_argument(
        "--acceptance", type=float, metavar="P", help="probability of a right draft, with --speculative (0.8)"
    )
    parser.add_argument("--breakdown", action="store_true", help="also time each launch of a step alone")
    parser.add_argument("--out", metavar="DIR", help="where the result goes (default: runs/TIME-speed)")
    parser.add_argument("--dry-run", action="store_true", help="show what would be measured, without a GPU")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    plan, describe, measure, show, stem = _speculative(args) if args.speculative else _plain(args)
    if args.dry_run:
        _show_plan(describe(plan), args.json)
        return 0

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..evals.rundir import fresh_folder
    from ..kernels.timing import need_gpu

    need_gpu("bench")
    out = Path(args.out) if args.out is not None else fresh_folder(stem)
    errors = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("cases"), TimeElapsedColumn(),
        console=errors, disable=not errors.is_terminal,
    )  # fmt: skip
    with bar:
        task = bar.add_task("bandwidth", total=plan.cases)
        result = measure(
            plan, out, progress=lambda what, done, total: bar.update(task, description=what, completed=done)
        )
    stored = out / f"{stem}.json"
    if args.json:
        print(stored.read_text(encoding="utf-8"), end="")
    else:
        show(result)
        print("", stored, sep="\n")
    return 1 if any(case.status == "refused" for case in result.cases) else 0


def _plain(args: argparse.Namespace) -> tuple[Any, ...]:
    """Plan, what shows it, what measures it, what shows the result, and the result's name."""
    from ..evals.speed.bench import describe, make_plan
    from ..evals.speed.bench import run as measure
    from ..evals.speed.table import print_result
    from ..quant.errors import InvalidValueError

    if args.tokens is not None or args.acceptance is not None:
        raise InvalidValueError("--tokens and --acceptance say what is verified; they go with --speculative")
    plan = make_plan(
        args.shape, args.family, _numbers(args.batch), _names(args.arms), args.window, args.peer, args.breakdown
    )
    return plan, describe, measure, print_result, "speed"


def _speculative(args: argparse.Namespace) -> tuple[Any, ...]:
    """The same for verifications."""
    from ..evals.speed.speculative import ACCEPTANCE, describe, make_plan
    from ..evals.speed.speculative import run as measure
    from ..evals.speed.speculative_table import print_result
    from ..quant.errors import InvalidValueError

    if args.peer or args.breakdown:
        raise InvalidValueError("--peer and --breakdown time steps without drafts; leave them out with --speculative")
    plan = make_plan(
        args.shape, args.family, _numbers(args.batch), _names(args.arms), args.window,
        _numbers(args.tokens, "--tokens"), ACCEPTANCE if args.acceptance is None else args.acceptance,
    )  # fmt: skip
    return plan, describe, measure, print_result, "speculative"


def _names(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _numbers(text: str | None, option: str = "--batch") -> list[int]:
    from ..quant.errors import InvalidValueError

    try:
        return [int(part) for part in _names(text)]
    except ValueError:
        raise InvalidValueError(f"{option} is {text!r}; it must be whole numbers with commas, such as 1,256") from None


def _show_plan(rows: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(title="bytes that a step moves for one sequence", title_justify="left", box=None, pad_edge=False)
    for name in ("shape", "arm", "batches"):
        table.add_column(name)
    kinds = list(dict.fromkeys(kind for row in rows for kind in row["bytes_per_row"]))
    for kind in kinds:
        table.add_column(kind, justify="right")
    for i, row in enumerate(rows):
        new = i == 0 or rows[i - 1]["shape"] != row["shape"]
        moved = (row["bytes_per_row"].get(kind) for kind in kinds)
        table.add_row(
            row["shape"] if new else "", row["arm"], ", ".join(map(str, row["batches"])) if new else "",
            *("" if b is None else f"{b:,.0f}" for b in moved),
        )  # fmt: skip
    console = Console()
    Console(width=None if console.is_terminal else 140).print(table, highlight=False)
