"""``quantize-state compile``: every kernel ahead of time, without a GPU, and what its machine code holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..kernels.compile import Compiled

COLUMNS = {"fp4_unpack": "fp4→", "fp4_pack": "→fp4", "fp8_unpack": "fp8→", "fp8_pack": "→fp8", "matrix": "mma"}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "compile", help="compile every kernel without a GPU; registers, spills, instructions"
    )
    parser.add_argument(
        "--arch", default="90a,100a,103a,120a", help="architectures, separated by commas (default: %(default)s)"
    )
    parser.add_argument(
        "--shape", action="append", default=[], metavar="NAME", help="only this layer shape (repeatable)"
    )
    parser.add_argument("--arm", action="append", default=[], metavar="ARM", help="only this arm (repeatable)")
    parser.add_argument(
        "--all", action="store_true", help="every shape with every read format, not NVFP4 and a few others (minutes)"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep PTX, cubin and SASS there")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..kernels.compile import cases, compile_all, summary

    targets = [name.strip() for name in args.arch.split(",") if name.strip()]
    results = compile_all(targets, cases(not args.all, args.shape, args.arm), args.out)
    if args.json:
        print(json.dumps(summary(results), indent=2))
    else:
        _show(results)
    return 1 if any(r.problems for r in results) else 0


def _show(results: list[Compiled]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("kernel", "sm", "shape", "policy"):
        table.add_column(name)
    for name in ("warps", "regs", "spills", "shared", "instr", *COLUMNS.values()):
        table.add_column(name, justify="right")
    for r in results:
        numbers = (r.warps, r.registers, r.spills, r.shared, r.instructions, *(r.counts[c] for c in COLUMNS))
        table.add_row(r.kernel.removesuffix("_kernel"), r.target, r.shape, r.policy, *map(str, numbers))
    console = Console(width=None if Console().is_terminal else 140)
    console.print(table, highlight=False)
    bad = [r for r in results if r.problems]
    for r in bad:
        console.print(f"{r.kernel} for sm_{r.target}, {r.shape}, {r.policy}: {'; '.join(r.problems)}", highlight=False)
    console.print(f"{len(results)} kernels, {len(bad)} with problems", highlight=False)
