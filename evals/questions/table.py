"""A result on questions as a table on the console; no torch."""

from __future__ import annotations

from .result import QuestionsResult
from .verdict import judge
from .view import arm_rows


def print_table(result: QuestionsResult) -> None:
    """Print the arms and the verdict under them."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("arm", no_wrap=True)
    columns = ("right", "difference, points (95 %)", "lost", "gained", "p", "tokens", "cut off", "unparsed")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in arm_rows(result):
        faint = "bold" if row["subject"] else "dim" if row["finding"] == "the reference itself" else ""
        difference = f"{row['difference']} ({row['span']})" if row["difference"] else "–"
        table.add_row(
            escape(row["name"]),
            row["accuracy"],
            difference,
            row["lost"],
            row["gained"],
            row["p"],
            row["tokens"],
            row["cut_off"],
            row["unparsed"],
            style=faint,
        )
    verdict = judge(result)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width: do not fold lines to 80
    console.print(table)
    console.print()
    console.print(escape(verdict.sentence), highlight=False)
    for fact in verdict.facts:
        console.print(escape(fact), style="dim", highlight=False)
