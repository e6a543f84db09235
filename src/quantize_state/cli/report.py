"""``quantize-state report``: render result.json files; works without torch."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..quant.errors import InvalidValueError, QuantizeStateError

if TYPE_CHECKING:
    from ..evals.result import Result

Format = Literal["html", "md", "both"]


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "report",
        help="render one result, or compare several; needs no torch",
        description="Render result.json as report.html (one file, works offline) and report.md. Several results "
        "give one comparison. Results of `gpqa` and `tasks` are reported one by one, or merged into one.",
    )
    parser.add_argument("results", nargs="+", metavar="RESULT.json", help="a result.json, or the folder of a run")
    parser.add_argument("--out", metavar="DIR", help="where to write (default: beside the result; several: here)")
    parser.add_argument(
        "--format", choices=("html", "md", "both"), default="both", help="what to write (default: both)"
    )
    parser.add_argument(
        "--merge",
        action="store_true",
        help="make one result of several of `gpqa` or `tasks` that asked the same on several machines",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    for path in (merge if args.merge else report)(args.results, args.out, args.format):
        print(path)
    return 0


def report(paths: Sequence[str | Path], out: str | Path | None = None, format: Format = "both") -> list[Path]:
    """Read results and write their report; returns the files written.

    One result is reported beside it, several in the current folder, unless ``out`` says where. Raises
    FileFormatError for a file that is no whole result of this version.
    """
    from ..evals.questions.result import QuestionsResult
    from ..evals.report import read_result, write_reports

    given = [(Path(path), read_result(path)) for path in paths]
    results: list[Result] = []
    written: list[Path] = []
    for path, result in given:
        if not isinstance(result, QuestionsResult):
            results.append(result)
        elif out is not None and len(given) > 1:
            raise InvalidValueError(
                "results of questions are not compared, but reported each beside its result.json: leave out --out, "
                "or give --merge to make one result of them"
            )
        else:
            written += write_reports(result, out or _folder(path), format=format)
    if results:
        written += write_reports(results, out or (_folder(paths[0]) if len(given) == 1 else Path.cwd()), format=format)
    return written


def merge(paths: Sequence[str | Path], out: str | Path | None = None, format: Format = "both") -> list[Path]:
    """Merge results of questions into a new result with its report; returns the files written.

    They go into a new folder under runs/ unless ``out`` names one. Raises InvalidValueError for results that do not
    belong together, before anything is written.
    """
    from ..evals.questions.assemble import merge as merged_result
    from ..evals.questions.result import QuestionsResult
    from ..evals.report import write_reports
    from ..evals.rundir import fresh_folder

    merged = merged_result([QuestionsResult.read(path) for path in paths])
    folder = Path(out) if out is not None else fresh_folder(f"{merged.model.name}-merged")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise QuantizeStateError(f"can't write into {folder}: {error.strerror or error}") from error
    merged.write(folder / "result.json")
    return [folder / "result.json", *write_reports(merged, folder, format=format)]


def _folder(path: str | Path) -> Path:
    return Path(path) if Path(path).is_dir() else Path(path).parent
