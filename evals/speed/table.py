"""The bench's results as a table on a console, and as a page with a plot; from the JSON alone, no torch.

    python -m quantize_state.evals.speed.table results/speed/speed-*.json --out results/speed

writes README.md and speed.svg there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

from ...quant.errors import QuantizeStateError
from ..records import write_atomic
from ..report import markdown_text
from .result import Case, SpeculativeResult, SpeedResult, Step, VerifyCase

COLUMNS = ("non-flush", "flush", "amortised", "mixed", "× standard", "MB", "GB/s", "of read", "of copy")
SLOWER = 1.02
"""Times over others from which on a step counts as slower: repeats differ by 1 %."""
PART_COLUMNS = ("plan", "window", "readout", "window of a flush", "fold", "renew")


def microseconds(value: float | None) -> str:
    """4.21, 54.2, 557, 2,145; an en dash where there is none."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def columns(result: SpeedResult) -> tuple[str, ...]:
    """Those of the table; ``auto`` where some batch was small enough for the standard kernel."""
    return (*COLUMNS, "auto") if any(c.step("auto") for c in result.cases) else COLUMNS


def slower_than_standard(result: SpeedResult) -> list[str]:
    """Where what serving takes is slower than the standard kernel, one line each."""
    found = []
    for shape, batch, cases in by_shape_and_batch(result):
        standard = standard_of(cases)
        base = None if standard is None else standard.serving_us
        for case in cases:
            if base and case.arm.startswith(("replay", "decoupled")) and (case.auto_us or 0.0) > SLOWER * base:
                found.append(
                    f"{shape}, batch {batch}, {case.arm}: auto takes {microseconds(case.auto_us)} µs and the standard "
                    f"kernel {microseconds(base)}; fill kernels/paths.py by the sweep of this bench, with --paths"
                )
    return found


def cells(case: Case, standard: Case | None, auto: bool = False) -> list[str]:
    """A row of the table; ``MB`` and what follows are of the mixed step, or of the only one there is."""
    base = None if standard is None else standard.serving_us
    gain = "–" if base is None or case.serving_us is None else f"{base / case.serving_us:.2f}"
    mixed = case.step("mixed") or case.step("standard")
    main = mixed or case.step("flush")
    moved = ["–"] * 4
    if main is not None:
        both = (percent(share) for share in (main.share_of_read, main.share_of_copy))
        moved = [f"{main.bytes / 1e6:,.1f}", f"{main.gb_per_s:,.0f}", *both]
    times = [_timed(case.step("non-flush")), _timed(case.step("flush")), microseconds(case.amortised_us), _timed(mixed)]
    if not auto or case.arm == "standard" or not case.step("mixed"):
        return [*times, gain, *moved, *["–"] * auto]
    step = case.step("auto")
    return [*times, gain, *moved, "replay" if step is None else f"standard {microseconds(step.time.median)}"]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _timed(step: Step | None) -> str:
    """54.2 (85 %): microseconds, and the floor's share of them."""
    return "–" if step is None else f"{microseconds(step.time.median)} ({percent(step.share_of_floor)})"


def spread(result: SpeedResult) -> str:
    """How far the 20th and 80th percentiles lie from the median, over all times: half of them, and at most."""
    widths = sorted((s.time.p80 - s.time.p20) / s.time.median for c in result.cases for s in c.steps)
    if not widths:
        return ""
    return (
        f"From the 20th to the 80th percentile: {100 * widths[len(widths) // 2]:.1f} % of the median for half of the "
        f"times, {100 * widths[-1]:.1f} % at most."
    )


def by_shape_and_batch(result: SpeedResult) -> list[tuple[str, int, list[Case]]]:
    groups = groupby(result.cases, key=lambda c: (c.shape, c.batch))
    return [(shape, batch, list(cases)) for (shape, batch), cases in groups]


def standard_of(cases: Sequence[Case]) -> Case | None:
    return next((c for c in cases if c.arm == "standard" and c.status == "timed"), None)


def dimensions(case: Case | VerifyCase) -> str:
    keys = f"/{case.key_heads}" if case.key_heads != case.heads else ""
    return f"{case.heads}{keys} × {case.value_dim} × {case.key_dim}"


def bandwidth_line(result: SpeedResult | SpeculativeResult) -> str:
    def named(kind: str) -> str:
        return ", ".join(f"{b.gb_per_s:,.0f} ({b.bytes / 2**20:,.0f} MiB)" for b in result.bandwidth if b.kind == kind)

    return f"Bandwidth measured in the same run, GB/s: read {named('read')}; copy, both ways counted, {named('copy')}."


def made_by(result: SpeedResult | SpeculativeResult) -> str:
    """Device, versions, commit and time, as a page says them."""
    p = result.provenance
    return (
        f"{p.device}, torch {p.versions.get('torch', '?')}, Triton {p.versions.get('triton', '?')}, "
        f"quantize-state {p.quantize_state} ({(p.git_commit or 'unknown commit')[:9]}"
        f"{', with changes' if p.git_dirty else ''}), {p.started}."
    )


def print_result(result: SpeedResult) -> None:
    """Print all cases to the console, one table for each shape."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    for _, of_shape in groupby(by_shape_and_batch(result), key=lambda g: g[0]):
        groups = list(of_shape)
        first = groups[0][2][0]
        title = f"{first.shape}: {first.family}, {dimensions(first)}, window {first.window}; µs per step"
        table = Table(title=escape(title), title_justify="left", title_style="bold", box=None, pad_edge=False)
        table.add_column("batch", justify="right")
        table.add_column("arm", no_wrap=True)
        for column in columns(result):
            table.add_column(column, justify="right", no_wrap=True)
        for _, batch, cases in groups:
            for i, case in enumerate(cases):
                timed = case.status == "timed"
                shown = cells(case, standard_of(cases), "auto" in columns(result)) if timed else [case.status]
                table.add_row(str(batch) if i == 0 else "", escape(case.arm), *shown, end_section=case is cases[-1])
        console.print(table, highlight=False)
        _print_parts(console, [c for *_, cases in groups for c in cases if c.breakdown])
        console.print()
    for line in slower_than_standard(result):
        console.print(escape(line), style="yellow", highlight=False)
    for case in result.cases:
        if case.status != "timed":
            console.print(escape(f"{case.shape}, batch {case.batch}, {case.arm}: {case.note}"), highlight=False)
    console.print(escape(bandwidth_line(result)), style="dim", highlight=False)
    console.print(escape(spread(result)), style="dim", highlight=False)


def _print_parts(console, cases: Sequence[Case]) -> None:
    if not cases:
        return
    from rich.table import Table

    table = Table(title="each launch alone", title_justify="left", title_style="dim", box=None, pad_edge=False)
    for column in ("batch", "arm", *PART_COLUMNS):
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    for case in cases:
        parts = (case.breakdown.get(name) for name in PART_COLUMNS)
        table.add_row(str(case.batch), case.arm, *(microseconds(None if p is None else p.median) for p in parts))
    console.print(table, highlight=False)


def markdown_page(results: Sequence[SpeedResult], plot: str | None = "speed.svg") -> str:
    """The page that results/speed/ shows: a plot, and a table for each result and shape."""
    lines = ["# Speed", "", "Generated from the JSON files in this folder by `make report`; not edited.", ""]
    if plot is not None:
        lines += [f"![Speed-up of the mixed step over the standard kernel, by batch]({plot})", ""]
    lines += [
        "µs, medians; in parentheses the floor's share: the time that the memory would need for the bytes that the "
        "step has to move, at the bandwidth measured in the same run, over the time taken. A step is everything that "
        "a decode step of one layer launches, on states that come from memory, not from the cache. Non-flush: the "
        "mean over ring fills 0 to L − 2. Amortised: ((L − 1)·non-flush + flush)/L. Mixed: rows at all fills, so that "
        "one in L flushes, as under continuous batching; what follows it is of this step. MB: bytes that it has to "
        "move (`evals/speed/traffic.py`). Of read, of copy: GB/s over the bandwidth of a read and of a copy.",
        "",
    ]
    if any("auto" in columns(result) for result in results):
        lines += [
            "Auto: what serving takes: `standard` and its time where the batch is small (`kernels/paths.py`), with the "
            "outputs of an FP32 state, else replay, which is the mixed step.",
            "",
        ]
    for result in results:
        for _, of_shape in groupby(by_shape_and_batch(result), key=lambda g: g[0]):
            groups = list(of_shape)
            first = groups[0][2][0]
            lines += [
                f"## {markdown_text(first.shape)}: {first.family}, {dimensions(first)}, window {first.window}",
                "",
                f"| batch | arm | {' | '.join(columns(result))} |",
                "|---:|---" + "|---:" * len(columns(result)) + "|",
            ]
            for _, batch, cases in groups:
                for i, case in enumerate(cases):
                    shown = cells(case, standard_of(cases), "auto" in columns(result))
                    if case.status != "timed":
                        shown = [case.status, *[""] * (len(columns(result)) - 1)]
                    head = [str(batch) if i == 0 else "", markdown_text(case.arm)]
                    lines.append(f"| {' | '.join([*head, *shown])} |")
            lines += ["", *_parts_lines([c for *_, cases in groups for c in cases if c.breakdown])]
            notes = dict.fromkeys(
                f"{c.arm}, batch {c.batch}: {c.note}" for *_, cases in groups for c in cases if c.note
            )
            lines += [f"- {markdown_text(note)}" for note in notes]
            lines += [""] * bool(notes)
        slow = slower_than_standard(result)
        lines += [f"- {markdown_text(line)}" for line in slow] + [""] * bool(slow)
        lines += [markdown_text(bandwidth_line(result)), "", markdown_text(f"{made_by(result)} {spread(result)}"), ""]
    return "\n".join(lines)


def _parts_lines(cases: Sequence[Case]) -> list[str]:
    if not cases:
        return []
    lines = [
        f"| each launch alone, µs | arm | {' | '.join(PART_COLUMNS)} |",
        "|---:|---" + "|---:" * len(PART_COLUMNS) + "|",
    ]
    for case in cases:
        parts = (case.breakdown.get(name) for name in PART_COLUMNS)
        shown = [microseconds(None if p is None else p.median) for p in parts]
        lines.append(f"| {case.batch} | {markdown_text(case.arm)} | {' | '.join(shown)} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page and its plot. Exit codes: 0 done, 2 an error that the message explains."""
    parser = argparse.ArgumentParser(prog="python -m quantize_state.evals.speed.table", description=main.__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where README.md and speed.svg go")
    args = parser.parse_args(arguments)
    from .plot import speedup_svg

    try:
        results = [SpeedResult.read(path) for path in args.results]
        svg = speedup_svg(results)
        if svg is not None:
            write_atomic(args.out / "speed.svg", svg, overwrite=True)
        page = markdown_page(results, "speed.svg" if svg is not None else None)
        write_atomic(args.out / "README.md", page, overwrite=True)
    except QuantizeStateError as error:
        print(f"quantize-state speed table: {error}", file=sys.stderr)
        return 2
    print(args.out / "README.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
