"""The result table on a console and in Markdown, both from result.json alone; no torch.

    python -m quantize_state.evals.table results/accuracy/*.json --readme README.md

rewrites what stands between the two markers in README.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from . import formatting as f
from .compare import labels
from .records import write_atomic
from .report import markdown_text
from .result import Result
from .verdict import floor_note, floor_of, judge, kl_text, note_on
from .view import sorted_arms

_COLUMNS = (
    "model",
    "arm",
    "mean KL to FP32 (95 % interval), nats per token",
    "99.9th percentile",
    "top-1 agreement",
    "perplexity ratio",
    "bytes resident",
    "bytes moved",
)
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def print_table(result: Result) -> None:
    """Print the arms to the console, the best first, and the verdict under them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    result = result.printable()
    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("arm", no_wrap=True)
    for column in ("KL (95 %), nats/token", "p99.9", "max", "top-1", "ppl ratio", "B resident", "B moved"):
        table.add_column(column, justify="right", no_wrap=True)
    floor, verdict = floor_of(result), judge(result)
    for arm in sorted_arms(result):
        faint = "dim" if floor_note(arm, floor) else "bold" if arm.name == verdict.subject else ""
        table.add_row(
            escape(arm.name),
            kl_text(arm),
            f.scientific(arm.kl.p999 if arm.kl.tokens else None, 2),
            f.scientific(arm.kl.max if arm.kl.tokens else None, 2),
            f.percent(arm.top1_agreement.rate),
            "–" if arm.ppl is None else f"{arm.ppl.ratio:.4f}",
            f"{arm.bytes_per_element.resident:.2f}",
            f"{arm.bytes_per_element.moved_per_step:.2f}",
            style=faint,
        )
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width: do not fold lines to 80
    console.print(table)
    console.print()
    console.print(escape(verdict.sentence), highlight=False)
    for fact in verdict.facts:
        console.print(escape(fact), style="dim", highlight=False)


def markdown_table(paths: Sequence[str | Path]) -> str:
    """The results as one Markdown table by model and arm, with the conditions that they were measured under."""
    results = [Result.read(path).printable() for path in paths]
    if not results:
        raise InvalidValueError("no result.json given")
    lines = [f"| {' | '.join(_COLUMNS)} |", "|---" * len(_COLUMNS) + "|"]
    for name, result in zip(labels(results), results, strict=True):
        floor, subject = floor_of(result), judge(result).subject
        for i, arm in enumerate(sorted_arms(result)):
            shown, note = markdown_text(arm.name), markdown_text(note_on(arm, floor))
            cells = [
                markdown_text(name) if i == 0 else "",
                f"**{shown}**" if arm.name == subject else shown,
                markdown_text(kl_text(arm)) + (f", {note}" if note else ""),
                f.scientific(arm.kl.p999 if arm.kl.tokens else None, 2),
                f.percent(arm.top1_agreement.rate),
                "–" if arm.ppl is None else f"{arm.ppl.ratio:.5f}",
                f"{arm.bytes_per_element.resident:.2f}",
                f"{arm.bytes_per_element.moved_per_step:.2f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *dict.fromkeys(_conditions(result) for result in results), ""])


def rewrite_block(readme: Path, content: str) -> bool:
    """Put ``content`` between the markers; True where that changed the file. Raises where the markers are not there."""
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidValueError(f"can't read {readme}: {error.strerror or error}") from None
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise FileFormatError(f"{readme} must hold {BEGIN} and, after it, {END}, once each")
    head, rest = text.split(BEGIN)
    new = f"{head}{BEGIN}\n{content.strip()}\n{END}{rest.split(END)[1]}"
    if new == text:
        return False
    write_atomic(readme, new, overwrite=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the Markdown table, or write it into a README. Exit codes: 0 done, 2 an error that the message explains."""
    parser = argparse.ArgumentParser(prog="python -m quantize_state.evals.table", description=main.__doc__)
    parser.add_argument("results", nargs="+", metavar="RESULT.json")
    parser.add_argument("--readme", metavar="FILE", help=f"rewrite the block between {BEGIN} and {END}")
    args = parser.parse_args(arguments)
    try:
        table = markdown_table(args.results)
        if args.readme:
            changed = rewrite_block(Path(args.readme), table)
            print(f"{args.readme}: {'rewritten' if changed else 'up to date'}")
        else:
            print(table)
    except QuantizeStateError as error:
        print(f"quantize-state table: {error}", file=sys.stderr)
        return 2
    return 0


def _conditions(result: Result) -> str:
    text, p = result.text, result.provenance
    return markdown_text(
        f"{text.sequences} × {f.number(text.tokens)} tokens of {text.source} ({text.protocol}), {p.engine} engine, "
        f"window {p.window}, {p.dtype} on {p.device}, torch {p.versions.get('torch', 'unknown')}, "
        f"transformers {p.versions.get('transformers', 'unknown')}, quantize-state {p.quantize_state}. "
        "Intervals: block bootstrap over tokens. Bytes are per state element, moved ones per decode step, "
        "both without the ring."
    )


if __name__ == "__main__":
    sys.exit(main())
