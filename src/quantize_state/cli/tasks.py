"""``quantize-state tasks``: what every arm's state does to a model's answers to any question task of lm-eval."""

from __future__ import annotations

import argparse
from pathlib import Path

from . import _questions


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "tasks",
        help="the same as gpqa for any question task of lm-eval",
        description="Ask the questions of lm-eval's tasks with each arm's state, and report paired differences to FP32 "
        "with intervals. lm-eval loads the questions itself, from the hub or from where a task's file says.",
    )
    parser.add_argument("--tasks", required=True, metavar="TASK,…", help="tasks of lm-eval, such as gsm8k")
    parser.add_argument("--include-path", metavar="DIR", help="a folder with more task files in lm-eval's format")
    _questions.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..evals.questions.plan import Source
    from ..quant.errors import InvalidValueError

    names = list(dict.fromkeys(name.strip() for name in args.tasks.split(",") if name.strip()))
    if not names:
        raise InvalidValueError("--tasks names no task; such as --tasks gsm8k")
    if args.include_path is not None and not Path(args.include_path).is_dir():
        raise InvalidValueError(f"--include-path {args.include_path} is no folder")
    _questions.arms_of(args)
    _questions.need_lm_eval()
    plan = _questions.plan_of(args)
    return _questions.ask_and_report(args, [(name, Source(f"lm-eval task {name}"), Path(name)) for name in names], plan)
