"""``quantize-state report``: render result.json files; works without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ..evals.result import Result

Format = Literal["html", "md", "both"]


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="render one result, or compare several; needs no torch",
        description="Render result.json as report.html (one file, works offline) and report.md. Several results "
        "give one comparison.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="a result.json, or the folder of a run")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: beside the result; several: here)")
    parser.add_argument(
        "--format", choices=("html", "md", "both"), default="both", help="what to write (default: both)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for path in report(args.results, args.out, args.format):
        print(path)
    return 0


def report(paths: Sequence[str | Path], out: str | Path | None = None, format: Format = "both") -> list[Path]:
    """Read results and write their report; returns the files written.

    One result is reported beside it, several in the current folder, unless ``out`` says where. Raises
    FileFormatError for a file that is no whole result of this version.
    """
    from ..evals.report import write_reports
    from ..evals.result import Result

    results: list[Result] = [Result.read(path) for path in paths]
    if out is None:
        first = Path(paths[0])
        out = (first if first.is_dir() else first.parent) if len(results) == 1 else Path.cwd()
    return write_reports(results, out, format=format)
