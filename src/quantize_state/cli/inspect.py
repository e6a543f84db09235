"""``quantize-state inspect``: what a file of states holds, head by head."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .convert import is_torch_file

if TYPE_CHECKING:
    from ..quant.inspection import StateReport


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "inspect",
        help="show what a file of states holds, by layer and head",
        description="Shape, format, bytes, largest magnitude, share of zeros and of saturated codes, and the error "
        "against the original, for each layer and head of a file of states.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="packed, captured or saved states, or a cache")
    parser.add_argument("--original", type=Path, metavar="FILE", help="what a packed file was made from, for the error")
    parser.add_argument(
        "--plot",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="IMAGE",
        help="draw histograms (default: FILE with .png at the end)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.inspection import inspect

    if is_torch_file(args.file):
        from ..adapters.saved_cache import SavedTensors

        reports = list(inspect(SavedTensors(args.file), args.original))
    else:
        reports = list(inspect(args.file, args.original))
    if args.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))
    else:
        _show(reports)
    if args.plot is not None:
        from ..evals.state_plots import draw_histograms

        image = args.plot if args.plot != Path() else args.file.with_name(args.file.name + ".png")
        draw_histograms(reports, image, args.file.name)
        print("" if args.json else f"\n{image}")
    return 0


def _show(reports: Sequence[StateReport]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("state", overflow="fold")
    table.add_column("shape")
    table.add_column("format")
    for name in ("bytes", "head", "amax", "zeros", "saturated", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for report in reports:
        shape = " × ".join(map(str, report.shape))
        first = [escape(report.name), shape, report.format, f"{report.nbytes:,}"]
        for i, head in enumerate(report.heads):
            table.add_row(
                *(first if i == 0 else [""] * 4),
                str(i) if len(report.shape) > 2 else "–",
                f"{head.amax:.4g}",
                f"{100 * head.zeros:.2f} %",
                "–" if head.saturated is None else f"{100 * head.saturated:.2f} %",
                "–" if head.error is None else f"{head.error:.4g}",
            )
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table, highlight=False)
    total = sum(report.nbytes for report in reports)
    console.print(f"\n{len(reports)} states, {total:,} bytes", highlight=False)
