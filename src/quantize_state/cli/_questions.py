"""What ``gpqa`` and ``tasks`` share: their options, and asking with a progress bar."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..quant.errors import InvalidValueError, QuantizeStateError
from ._options import COLUMNS_HELP, add_model_options, quiet_transformers, recipe_arms

if TYPE_CHECKING:
    from ..evals.questions.plan import Plan, Source


def add_options(parser: argparse.ArgumentParser) -> None:
    add_model_options(parser, spread=False)
    parser.add_argument("--arms", metavar="ARM,…", help="comma-separated arms (default: see `quantize-state ls`)")
    parser.add_argument("--recipe", metavar="FILE", help="add an arm: a YAML recipe, or auto for the model's own")
    parser.add_argument("--columns", metavar="FILE", help=COLUMNS_HELP)
    parser.add_argument("--repeats", type=int, default=1, metavar="R", help="answers per question (default: 1)")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample from the top P (default: 1)")
    parser.add_argument("--top-k", type=int, default=0, metavar="K", help="sample from the top K (default: 0, all)")
    parser.add_argument(
        "--max-gen-toks",
        type=int,
        default=16384,
        metavar="N",
        help="the most tokens per answer (default: 16384; lm-eval's own 256 cuts reasoning off)",
    )
    parser.add_argument(
        "--until",
        action="append",
        metavar="TEXT",
        help=r"a text that ends an answer, beside the task's own, such as '\n' or 'Question:'; may be repeated",
    )
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="ask the first N questions (default: all)")
    parser.add_argument(
        "--shard", default="1/1", metavar="I/N", help="ask every N-th question from the I-th on; merge with `report`"
    )
    parser.add_argument("--batch-size", type=int, default=8, metavar="B", help="questions at once (default: 8)")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples in the prompt (default: the task's)")
    parser.add_argument("--chat-template", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--system-instruction", metavar="TEXT", help="a system message before the prompt")
    parser.add_argument("--think-end-token", metavar="TEXT", help="answers begin after this text, such as </think>")
    parser.add_argument("--filter", metavar="NAME", help="the task's filter that counts (default: flexible-extract)")
    parser.add_argument("--metric", metavar="NAME", help="the task's metric that counts (default: its first)")
    parser.add_argument("--window", type=int, default=16, metavar="L", help="tokens per flush (default: 16)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of sampling, few-shot examples, rounding and bootstrap (default: 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="where results go (default: runs/TIME-MODEL)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the options describe; raises InvalidValueError for what is wrong with them."""
    from ..evals.questions.plan import Plan

    index, slash, count = args.shard.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal()):
        raise InvalidValueError(f"--shard is {args.shard!r}; it must be I/N, such as 1/2 and 2/2 on two machines")
    return Plan(
        repeats=args.repeats,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        cap=args.max_gen_toks,
        until=tuple(text.replace("\\n", "\n") for text in args.until or ()),
        limit=args.limit,
        shard=(int(index), int(count)),
        batch_size=args.batch_size,
        seed=args.seed,
        window=args.window,
        num_fewshot=args.num_fewshot,
        chat_template=args.chat_template,
        system_instruction=args.system_instruction,
        think_end_token=args.think_end_token,
        filter=args.filter,
        metric=args.metric,
        include_path=getattr(args, "include_path", None),
    )


def arms_of(args: argparse.Namespace, likelihood: bool | None = None) -> dict[str, Any]:
    """The arms by name. Without --arms the default ones, and where tokens are drawn the reference with other seeds."""
    from ..evals.questions.result import RESEEDED
    from ..quant.columns import ColumnScales
    from ..quant.policy import CALIBRATE, DEFAULT_ARMS, parse_arm
    from ..quant.recipe import Recipe

    if args.arms is not None and not args.arms.strip(", "):
        raise InvalidValueError("--arms names no arm; see `quantize-state ls`")
    default = [*DEFAULT_ARMS[:1], *([RESEEDED] if args.temperature > 0 else []), *DEFAULT_ARMS[1:]]
    names = default if args.arms is None else [name.strip() for name in args.arms.split(",") if name.strip()]
    arms: dict[str, Any] = {"reference": "reference"}  # with which every arm is compared
    for name in names:
        arms[name] = name
        if name == RESEEDED:
            continue
        if parse_arm(name).balanced:  # a misspelt arm should not cost the time that torch takes to load a model
            if args.columns is None:
                raise InvalidValueError(f"the arm {name} needs column scales; {CALIBRATE}")
            policy = parse_arm(name, window=args.window, seed=args.seed)
            arms[name] = Recipe(policy, columns=ColumnScales.read(args.columns))
    return arms | recipe_arms(args.model, args.recipe, look=args.arms is None)


def need_lm_eval() -> None:
    """Raise where lm-eval is not installed, before a model is loaded."""
    from importlib.util import find_spec

    missing = [name for name in ("lm_eval", "accelerate") if find_spec(name) is None]
    if missing:
        raise QuantizeStateError(
            f"this needs {' and '.join(missing)}, which is not installed: pip install 'quantize-state[gpqa]'"
        )


def ask_and_report(args: argparse.Namespace, tasks: list[tuple[str, Source, Path | None]], plan: Plan) -> int:
    """Ask each task's questions; a task may have a folder of its own below --out."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..evals.models import load_model
    from ..evals.questions.ask import ask
    from ..evals.questions.table import print_table
    from ..evals.report import write_reports
    from ..evals.rundir import fresh_folder
    from ..evals.team import Team

    quiet_transformers()
    arms, team = arms_of(args), Team.join()
    out = team.agree(lambda: Path(args.out) if args.out is not None else fresh_folder(args.model))
    loaded = load_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        trust_remote_code=args.trust_remote_code,
    )
    errors = Console(stderr=True)
    try:
        for task, source, below in tasks:
            folder = out if below is None else out / below
            bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("answers"),
                TimeElapsedColumn(), console=errors, disable=not (errors.is_terminal and team.first),
            )  # fmt: skip
            shown: dict[str, Any] = {}

            def show(what: str, done: int, total: int, bar: Any = bar, shown: dict[str, Any] = shown) -> None:
                if what not in shown:
                    shown[what] = bar.add_task(what, total=total)
                bar.update(shown[what], completed=done)

            with bar:
                result = ask(loaded, task, arms, source, plan, folder, team=team, progress=show)
            if result is None:
                continue
            reports = write_reports(result, folder)
            if args.json:
                print((folder / "result.json").read_text(encoding="utf-8"), end="")
            else:
                print_table(result)
                print("", folder / "result.json", *reports, sep="\n")
    finally:
        team.leave()
    return 0
