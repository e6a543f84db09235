"""Verifications as tables on a console, and as a page with a plot; from the JSON alone, no torch.

    python -m quantize_state.evals.speed.speculative_table results/speed/speculative-*.json --out results/speed

writes speculative.md and speculative.svg there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ...quant.errors import QuantizeStateError
from ..records import write_atomic
from ..report import markdown_text
from .result import BASELINES, SpeculativeResult, VerifyCase, VerifyStep
from .table import bandwidth_line, dimensions, made_by, microseconds, percent

COLUMNS = ("reads", "× T = 1", "full", "tokens", "partial", "tokens", "× plain", "× snapshots", "reads × snapshots")
EXPLAINED = (
    "µs of one verification of T tokens, medians; in parentheses the floor's share: the time that the memory would "
    "need for the bytes that it has to move, at the bandwidth measured in the same run, over the time taken. For T = 1 "
    "that is a plain step. Reads: no row ends a window and no draft is cut; × T = 1: that over a single token's. Full "
    "and partial: rows where they are found after a long time of serving, if every draft is right, or each with the "
    "probability {acceptance:g}; rows that end their window are flushed, and tokens are those committed per step. "
    "× plain: how many times faster than T plain steps of the standard FP32 kernel, × snapshots: than one launch that "
    "writes an FP32 state for every token (both with full acceptance, which is their best case); reads × snapshots: "
    "the same of a verification that only reads."
)


def rows_of(cases: Sequence[VerifyCase]) -> Iterator[tuple[VerifyCase, list[str]]]:
    """The cells of each case of one shape and batch."""
    by = {(c.arm, c.tokens): c for c in cases}
    for case in cases:
        if case.status != "timed":
            yield case, [case.status, *[""] * (len(COLUMNS) - 1)]
            continue

        def ratio(arm: str, tokens: int, above: str, below: str, case: VerifyCase = case) -> str:
            other = by.get((arm, tokens))
            over, under = other.step(above) if other is not None else None, case.step(below)
            return "–" if over is None or under is None else f"{over.time.median / under.time.median:.2f}"

        reads, full, partial = (case.step(kind) for kind in ("reads", "full", "partial"))
        baseline = case.arm in BASELINES
        single = by.get((case.arm, 1))
        times = "–"
        if single is not None and not baseline and reads is not None and single.step("reads") is not None:
            times = f"{reads.time.median / single.step('reads').time.median:.2f}"  # type: ignore[union-attr]
        yield case, [
            "–" if baseline else _timed(reads), times, _timed(full), _tokens(full),
            *(["–", "–"] if baseline else [_timed(partial), _tokens(partial)]),
            ratio("standard", case.tokens, "full", "full"), ratio("snapshots", case.tokens, "full", "full"),
            "–" if baseline else ratio("snapshots", case.tokens, "full", "reads"),
        ]  # fmt: skip


def _timed(step: VerifyStep | None) -> str:
    return "–" if step is None else f"{microseconds(step.time.median)} ({percent(step.share_of_floor)})"


def _tokens(step: VerifyStep | None) -> str:
    return "–" if step is None else f"{step.accepted:.2f}"


def by_shape(result: SpeculativeResult) -> list[tuple[str, list[VerifyCase]]]:
    return [(shape, list(cases)) for shape, cases in groupby(result.cases, key=lambda c: c.shape)]


def memory_rows(cases: Sequence[VerifyCase]) -> list[list[str]]:
    """KiB of one sequence in one layer, by arm and number of tokens; the first row is the head."""
    tokens = sorted({c.tokens for c in cases})
    held = {(c.arm, c.tokens): c.resident_bytes for c in cases}
    arms = [a for a in dict.fromkeys(c.arm for c in cases) if a != "standard"]
    body = [[a, *(f"{held[a, t] / 1024:,.0f}" if (a, t) in held else "–" for t in tokens)] for a in arms]
    return [["arm", *(f"T = {t}" for t in tokens)], *body]


def spread(result: SpeculativeResult) -> str:
    """How far the 20th and 80th percentiles lie from the median, over all times: half of them, and at most."""
    widths = sorted((s.time.p80 - s.time.p20) / s.time.median for c in result.cases for s in c.steps)
    if not widths:
        return ""
    return (
        f"From the 20th to the 80th percentile: {100 * widths[len(widths) // 2]:.1f} % of the median for half of the "
        f"times, {100 * widths[-1]:.1f} % at most."
    )


def print_result(result: SpeculativeResult) -> None:
    """Print all cases to the console: one table for each shape, and its memory."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=150)
    for shape, cases in by_shape(result):
        first = cases[0]
        title = f"{shape}: {first.family}, {dimensions(first)}, window {first.window}; µs per verification of T tokens"
        table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        for name in ("batch", "T", "arm", *COLUMNS):
            table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=name == "arm")
        for batch, of_batch in groupby(cases, key=lambda c: c.batch):
            shown = list(rows_of(list(of_batch)))
            for i, (case, cells) in enumerate(shown):
                new = i == 0 or shown[i - 1][0].tokens != case.tokens
                last = i + 1 == len(shown) or shown[i + 1][0].tokens != case.tokens
                head = [str(batch) if i == 0 else "", str(case.tokens) if new else "", escape(case.arm)]
                table.add_row(*head, *cells, end_section=last)
        console.print(table, highlight=False)
        head, *body = memory_rows(cases)
        held = Table(title="KiB of one sequence", title_justify="left", title_style="dim", box=None, pad_edge=False)
        for name in head:
            held.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
        for row in body:
            held.add_row(*row)
        console.print(held, highlight=False)
        console.print()
    for case in result.cases:
        if case.status != "timed":
            what = f"{case.shape}, batch {case.batch}, {case.tokens} tokens, {case.arm}: {case.note}"
            console.print(escape(what), highlight=False)
    console.print(escape(bandwidth_line(result)), style="dim", highlight=False)
    console.print(escape(spread(result)), style="dim", highlight=False)


def acceptance_of(result: SpeculativeResult) -> float | None:
    return next((s.acceptance for c in result.cases for s in c.steps if s.kind == "partial"), None)


def markdown_page(results: Sequence[SpeculativeResult], plot: str | None = "speculative.svg") -> str:
    """The page that results/speed/ shows: a plot, and for each result and shape a table, and memory."""
    lines = ["# Verifying drafts", "", "Generated from the JSON files in this folder by `make report`; not edited.", ""]
    if plot is not None:
        lines += [f"![Time of a verification by its number of tokens]({plot})", ""]
    for result in results:
        acceptance = acceptance_of(result)
        lines += [EXPLAINED.format(acceptance=1.0 if acceptance is None else acceptance), ""]
        for shape, cases in by_shape(result):
            first = cases[0]
            lines += [f"## {markdown_text(shape)}: {first.family}, {dimensions(first)}, window {first.window}", ""]
            lines += [f"| batch | T | arm | {' | '.join(COLUMNS)} |", "|---:|---:|---" + "|---:" * len(COLUMNS) + "|"]
            for batch, of_batch in groupby(cases, key=lambda c: c.batch):
                shown = list(rows_of(list(of_batch)))
                for i, (case, cells) in enumerate(shown):
                    new = i == 0 or shown[i - 1][0].tokens != case.tokens
                    head = [str(batch) if i == 0 else "", str(case.tokens) if new else "", markdown_text(case.arm)]
                    lines.append(f"| {' | '.join([*head, *cells])} |")
            head, *body = memory_rows(cases)
            lines += ["", "KiB of one sequence in one layer, ring included:", "", f"| {' | '.join(head)} |"]
            lines += ["|---" + "|---:" * (len(head) - 1) + "|"]
            lines += [f"| {' | '.join([markdown_text(row[0]), *row[1:]])} |" for row in body]
            notes = [c for c in cases if c.note]
            lines += ["", *(markdown_text(_noted(c)) for c in notes)] if notes else []
            lines.append("")
        lines += [markdown_text(bandwidth_line(result)), "", markdown_text(f"{made_by(result)} {spread(result)}"), ""]
    return "\n".join(lines)


def _noted(case: VerifyCase) -> str:
    return f"- {case.arm}, batch {case.batch}, {case.tokens} tokens: {case.note}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plot. Exit codes: 0 done, 2 an error that the message explains."""
    parser = argparse.ArgumentParser(
        prog="python -m quantize_state.evals.speed.speculative_table", description=main.__doc__
    )
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where speculative.md and .svg go")
    args = parser.parse_args(arguments)
    from .plot import verification_svg

    write: Callable[[Path, str], None] = lambda path, text: write_atomic(path, text, overwrite=True)  # noqa: E731
    try:
        results = [SpeculativeResult.read(path) for path in args.results]
        svg = verification_svg(results)
        if svg is not None:
            write(args.out / "speculative.svg", svg)
        write(args.out / "speculative.md", markdown_page(results, "speculative.svg" if svg is not None else None))
    except QuantizeStateError as error:
        print(f"quantize-state speculative table: {error}", file=sys.stderr)
        return 2
    print(args.out / "speculative.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
