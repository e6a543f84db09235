"""``quantize-state ls``: models, layer families, formats and arms."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("ls", help="list embedded models, layer families, formats and arms")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..adapters import supported_model_types
    from ..evals.embedded import EMBEDDED
    from ..quant.formats import FORMATS
    from ..quant.policy import ARM_GRAMMAR, DEFAULT_ARMS, parse_arm
    from ..quant.rotation import ROTATIONS
    from ..quant.scales import SCALE_RULES
    from ..quant.spec import FAMILIES

    supported = supported_model_types()
    models = [{"name": m.name, "family": m.family, "about": m.description} for m in EMBEDDED.values()]
    families: list[dict[str, Any]] = [
        {"name": f.name, "title": f.title, "models": supported.get(f.name, [])} for f in FAMILIES.values()
    ]
    formats: list[dict[str, Any]] = [
        {"name": f.name, "title": f.title, "bytes_per_element": f.bytes_per_element, "stochastic": f.stochastic}
        for f in FORMATS.values()
    ]
    arms: list[dict[str, Any]] = [
        {"name": name, "resident": policy.bytes_resident, "moved": policy.bytes_moved}
        for name in DEFAULT_ARMS
        for policy in (parse_arm(name),)
    ]
    if args.json:
        print(json.dumps({"models": models, "families": families, "formats": formats, "arms": arms}, indent=2))
        return 0

    from rich.console import Console
    from rich.table import Table

    console = Console()

    def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, justify="right" if column.startswith("bytes") else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()

    show("Embedded models", ["name", "family", "what it is"], [list(m.values()) for m in models])
    show(
        "Layer families, and the model types that this transformers has them in",
        ["name", "title", "model types"],
        [[f["name"], f["title"], ", ".join(f["models"]) or "none"] for f in families],
    )
    show(
        "Formats (bytes per state element at K = 128, scales included)",
        ["name", "title", "bytes", "stochastic"],
        [[f["name"], f["title"], f"{f['bytes_per_element']:.4g}", "yes" if f["stochastic"] else ""] for f in formats],
    )
    show(
        "Arms (bytes per state element at window 16, the ring not counted)",
        ["name", "bytes resident", "bytes moved per token"],
        [[a["name"], f"{a['resident']:.4g}", f"{a['moved']:.4g}"] for a in arms],
    )
    console.print(f"More arms: {ARM_GRAMMAR}.", highlight=False)
    console.print(f"Scale rules: {', '.join(SCALE_RULES)}. Rotations: {', '.join(ROTATIONS)}.", highlight=False)
    return 0
