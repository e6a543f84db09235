"""``quantize-state plan``: a read format for each layer within a budget, verified by measurement."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._options import add_model_options, quiet_transformers


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="choose a read format for each layer within a budget",
        description="Measure each layer's sensitivity, choose read formats that meet a budget, verify the recipe on "
        "other text, and compare it with the best uniform format at equal bytes. Exit code 1: the budget is not met "
        "by measurement.",
    )
    add_model_options(parser)
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--budget-kl", type=float, metavar="X", help="mean KL to FP32, nats per token")
    budget.add_argument("--budget-bytes", type=float, metavar="Y", help="bytes moved per state element and step")
    parser.add_argument("--out", required=True, metavar="RECIPE.yaml", help="the recipe; RECIPE.plan/ holds the rest")
    parser.add_argument(
        "--formats",
        metavar="FORMAT,…",
        help="candidates, with scale rule and rotation as in arm names (see the report)",
    )
    parser.add_argument("--probe", metavar="FORMAT", help="the candidate that each layer is measured with (the first)")
    parser.add_argument(
        "--every-format", action="store_true", help="measure each layer under each candidate, to check the predictions"
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens per sequence (default: 4096)")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="sequences (default: 1)")
    parser.add_argument(
        "--text",
        default="pydoc",
        metavar="SOURCE",
        help="pydoc, stdlib or a UTF-8 file; its first half is measured on, its second verified on",
    )
    parser.add_argument("--window", type=int, default=16, metavar="L", help="tokens per flush (default: 16)")
    parser.add_argument("--together", type=int, default=4, metavar="N", help="arms beside one reference (default: 4)")
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences run as one batch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the text spans and bootstrap (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..evals.plan import CANDIDATES, candidates, folder_of, plan
    from ..evals.plan_report import print_plan, write_reports

    chosen = CANDIDATES if args.formats is None else [x.strip() for x in args.formats.split(",") if x.strip()]
    candidates(chosen, args.window)  # a misspelt one should not cost the time that torch takes to load a model
    out = Path(args.out)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    quiet_transformers()
    errors = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
        console=errors, disable=not errors.is_terminal,
    )  # fmt: skip
    task = bar.add_task("", total=None)
    with bar:
        found = plan(
            args.model,
            out=out,
            budget_kl=args.budget_kl,
            budget_bytes=args.budget_bytes,
            candidate_names=chosen,
            probe=args.probe,
            every_format=args.every_format,
            window=args.window,
            text=args.text,
            tokens=args.tokens,
            sequences=args.sequences,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
            device_map=args.device_map,
            batch=args.batch,
            together=args.together,
            trust_remote_code=args.trust_remote_code,
            progress=lambda what, done, total: bar.update(task, description=what, completed=done, total=total),
        )
    reports = write_reports(found, folder_of(out))
    print_plan(found)
    print("", out, *reports, sep="\n")
    return 0 if found.within_budget else 1
