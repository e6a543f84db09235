"""``quantize-state gpqa``: what every arm's state does to a model's answers to GPQA, through lm-eval."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

from . import _questions

TASKS = ("cot_zeroshot", "generative_n_shot", "zeroshot", "n_shot", "cot_n_shot")
SUBSETS = ("diamond", "main", "extended")
STAND_IN = "stand-in"


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "gpqa",
        help="measure what low-precision states do to GPQA answers, with intervals",
        description="Ask GPQA's questions with each arm's state, through lm-eval, and report paired differences to "
        "FP32 with intervals. The questions come from your own copy; nothing is downloaded.",
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="your copy of GPQA: its CSV, JSONL with its columns, or a folder that datasets saved; or `stand-in`, "
        "198 questions that are not GPQA and show how the command works",
    )
    parser.add_argument("--task", default=TASKS[0], choices=TASKS, help=f"form of the question (default: {TASKS[0]})")
    parser.add_argument(
        "--subset", default=SUBSETS[0], choices=SUBSETS, help="which task of lm-eval; --data decides the questions"
    )
    _questions.add_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..evals.questions.dataset import COLUMNS, HOW_TO_GET_IT, read_questions
    from ..evals.questions.plan import Source
    from ..evals.questions.standin import NAME, UNTIL, stand_in
    from ..quant.errors import InvalidValueError

    if args.data is None:
        raise InvalidValueError(f"--data is missing. {HOW_TO_GET_IT}")
    if args.data == STAND_IN and not Path(STAND_IN).exists():
        rows = [{column: row[column] for column in COLUMNS} for row in stand_in()]
        name, is_stand_in = NAME, True
    else:
        rows, name, is_stand_in = read_questions(args.data), Path(args.data).name, False
    _questions.arms_of(args)
    _questions.need_lm_eval()
    plan = _questions.plan_of(args)
    if is_stand_in and not plan.until:
        plan = dataclasses.replace(plan, until=UNTIL)
    source = Source(name, rows, is_stand_in)
    return _questions.ask_and_report(args, [(f"gpqa_{args.subset}_{args.task}", source, None)], plan)
