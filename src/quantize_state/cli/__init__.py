"""The ``quantize-state`` command: one module per subcommand, loaded when it is needed."""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys

from .. import __version__
from ..evals.formatting import printable
from ..quant.errors import QuantizeStateError

COMMANDS = (
    "eval",
    "gpqa",
    "tasks",
    "plan",
    "generate",
    "report",
    "ls",
    "doctor",
    "compile",
    "bench",
    "selftest",
    "capture",
    "calibrate",
    "convert",
    "inspect",
    "export-recipe",
    "export-flags",
)
"""Each is a module here (an underscore for a hyphen) with ``add_parser(subparsers)`` and ``run(args) -> exit code``."""


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand; importing a subcommand's module imports neither torch nor transformers."""
    parser = argparse.ArgumentParser(
        prog="quantize-state",
        description="Is a low-precision recurrent state safe for your hybrid model, and what does it buy?",
    )
    parser.add_argument("--version", action="version", version=f"quantize-state {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f".{name.replace('-', '_')}", __name__)
        module.add_parser(subparsers)
    return parser


def limit_spinning() -> None:
    """Let torch's threads sleep soon while they wait for each other; call it before torch loads.

    By default they spin, and on a machine that is busy with something else one spins while the other is not run:
    60 times slower, measured. A short spin costs an idle machine little.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "500")


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Exit codes: 0 done, 1 a check failed, 2 an error that the message explains."""
    limit_spinning()
    for stream in (sys.stdout, sys.stderr):  # a name that can't be written is better escaped than a crash
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except QuantizeStateError as error:
        rank = os.environ.get("RANK")  # of a process that torchrun started
        who = f" (process {rank})" if rank is not None and os.environ.get("WORLD_SIZE") != "1" else ""
        print(f"quantize-state {args.command}{who}: {printable(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"quantize-state {args.command}: interrupted; what was finished is kept", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
