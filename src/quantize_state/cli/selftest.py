"""``quantize-state selftest``: every check of this device, in one command."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict

STYLES = {"PASS": "green", "FAIL": "bold red", "SKIP": "dim"}


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "selftest",
        help="check the kernels on this device against the references",
        description="Codec, kernels, CUDA graphs, far slots and memory of this device. Exit code 1 if a check fails. "
        "Without a GPU the kernels run on numpy, which shows their arithmetic alone.",
    )
    parser.add_argument("--quick", action="store_true", help="three read formats, no scale rules or rotations")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    import torch

    gpu = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET", "0") != "1"
    if not gpu and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"  # counts only before Triton is first imported

    from rich.console import Console
    from rich.table import Table

    from ..kernels.device.targets import INTERPRET, unavailable
    from ..kernels.selftest import Outcome, instructions, selftest
    from ..quant.errors import InvalidValueError

    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    if reason := unavailable(device):
        raise InvalidValueError(f"no kernel can run: {reason}")
    console, errors = Console(), Console(stderr=True)
    if not console.is_terminal:
        console = Console(width=160)
    facts = _facts(device, instructions(device), INTERPRET)
    if not args.json:
        for name, value in facts.items():
            console.print(f"[bold]{name}[/bold] {value}", highlight=False)
        console.print()

    def show(outcome: Outcome) -> None:
        if errors.is_terminal:
            errors.print(f"{outcome.status} {outcome.group}: {outcome.name}", style=STYLES[outcome.status])

    outcomes = selftest(device, quick=args.quick, done=show)
    counts = {status: sum(o.status == status for o in outcomes) for status in STYLES}
    speeds = _speeds(device) if gpu else {}
    if args.json:
        plain = {"device": facts, "counts": counts, "bandwidth": speeds, "outcomes": [asdict(o) for o in outcomes]}
        print(json.dumps(plain, indent=2))
        return 1 if counts["FAIL"] else 0
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "what", "detail"):
        table.add_column(column)
    table.add_column("s", justify="right")
    for o in outcomes:
        status = f"[{STYLES[o.status]}]{o.status}[/]"
        table.add_row(status, o.group, o.name, o.detail, f"{o.seconds:.1f}" if o.seconds else "")
    console.print(table, highlight=False)
    console.print()
    for name, speed in speeds.items():
        console.print(f"{name}: {speed:,.0f} GB/s", highlight=False)
    console.print(
        f"{counts['PASS']} passed, {counts['FAIL']} failed, {counts['SKIP']} skipped", highlight=False, style="bold"
    )
    return 1 if counts["FAIL"] else 0


def _facts(device, instructions: str, interpreted: bool) -> dict[str, str]:
    import torch

    from ..evals.provenance import processor, version

    found = {name: version(name) for name in ("quantize-state", "torch", "triton")} | {
        "python": platform.python_version()
    }
    if device.type == "cuda" and not interpreted:
        major, minor = torch.cuda.get_device_capability(device)
        memory = torch.cuda.get_device_properties(device).total_memory / 2**30
        found["device"] = f"{torch.cuda.get_device_name(device)}, sm_{major}{minor}, {memory:.0f} GiB"
        found["cuda"] = str(torch.version.cuda)
    else:
        found["device"] = f"{processor()}; kernels run by Triton's interpreter, small shapes only"
        if not torch.cuda.is_available():
            found["gpu"] = "none found" + ("" if torch.version.cuda else ": this torch is a CPU build")
    return found | {"kernels": instructions}


def _speeds(device) -> dict[str, float]:
    """GB/s of a read and of a copy, both ways counted, of one size each."""
    from ..evals.speed.memory import MIB, measure
    from ..kernels.timing import GraphTimer

    found = measure(GraphTimer(), device, {"read": (512 * MIB,), "copy": (512 * MIB,)})
    return {f"{b.kind}, {b.bytes // MIB} MiB": b.gb_per_s for b in found}
