"""``quantize-state eval``: the main job. KL of every arm against FP32, and a report."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._options import COLUMNS_HELP, add_model_options, quiet_transformers, recipe_arms


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "eval",
        help="measure what low-precision states do to a model",
        description="Teacher-force a model with each arm's state beside FP32, and report the KL divergence.",
    )
    add_model_options(parser)
    parser.add_argument("--arms", metavar="ARM,…", help="comma-separated arms (default: see `quantize-state ls`)")
    parser.add_argument(
        "--recipe",
        metavar="FILE",
        help="add an arm: a YAML recipe with a policy per layer, or auto, the recipe in the model's directory (which "
        "is added by itself where neither --arms nor --recipe is given)",
    )
    parser.add_argument(
        "--weights",
        choices=("nvfp4", "fp8", "int8"),
        help="add arms with weights quantised by NVIDIA ModelOpt: alone, and together with each quantised state",
    )
    parser.add_argument("--columns", metavar="FILE", help=f"{COLUMNS_HELP} (default: measured on another text)")
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens per sequence (default: 4096)")
    parser.add_argument(
        "--sequences",
        type=int,
        default=1,
        metavar="N",
        help="sequences (default: 1); torchrun -m quantize_state eval … shares them between processes",
    )
    parser.add_argument("--batch", type=int, default=1, metavar="N", help="sequences run as one batch (default: 1)")
    parser.add_argument(
        "--together",
        type=int,
        default=1,
        metavar="N",
        help="arms that run beside one reference, which saves its time and costs memory (default: 1)",
    )
    parser.add_argument(
        "--text", default="pydoc", metavar="SOURCE", help="pydoc, stdlib or a UTF-8 file (default: pydoc, held out)"
    )
    parser.add_argument(
        "--generate",
        type=int,
        default=0,
        metavar="N",
        help="the published protocol: FP32 generates N tokens after a prompt, and every arm is forced on them",
    )
    parser.add_argument("--window", type=int, default=16, metavar="L", help="tokens per flush (default: 16)")
    parser.add_argument(
        "--engine",
        choices=("scan", "step", "vllm"),
        default="scan",
        help="scan: whole windows at once; step: token by token, as decode; vllm: through vLLM's decode path, beside "
        "transformers' (docs/vllm.md)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of the text spans, sampling, rounding and bootstrap (default: 0)"
    )
    parser.add_argument("--out", metavar="DIR", help="where results go (default: runs/TIME-MODEL)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead of a table")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..evals.weights import WEIGHT_ARMS
    from ..quant.errors import InvalidValueError
    from ..quant.policy import DEFAULT_ARMS, parse_arm

    if args.arms is not None and not args.arms.strip(", "):
        raise InvalidValueError("--arms names no arm; see `quantize-state ls`")
    default = DEFAULT_ARMS if args.weights is None else WEIGHT_ARMS
    names = default if args.arms is None else tuple(name.strip() for name in args.arms.split(",") if name.strip())
    for name in names:
        parse_arm(name)  # a misspelt arm should not cost the time that torch takes to load a model
    arms: dict[str, Any] = {name: name for name in names}
    arms |= recipe_arms(args.model, args.recipe, look=args.arms is None)

    if args.engine == "vllm":
        return _through_vllm(args, arms)

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from ..evals.evaluate import evaluate
    from ..evals.report import write_reports
    from ..evals.rundir import fresh_folder
    from ..evals.table import print_table
    from ..evals.team import Team

    quiet_transformers()
    team = Team.join()
    errors = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeElapsedColumn(),
        console=errors, disable=not errors.is_terminal or not team.first,
    )  # fmt: skip
    tasks: dict[str, Any] = {}
    out = team.agree(lambda: Path(args.out) if args.out is not None else fresh_folder(args.model))

    def show(what: str, done: int, total: int) -> None:
        if what not in tasks:
            tasks[what] = bar.add_task(what, total=total)
        bar.update(tasks[what], completed=done)

    with bar:
        result = evaluate(
            args.model,
            arms,
            text=args.text,
            tokens=args.tokens,
            sequences=args.sequences,
            generate=args.generate,
            window=args.window,
            engine=args.engine,
            weights=args.weights,
            columns=args.columns,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
            device_map=args.device_map,
            batch=args.batch,
            together=args.together,
            trust_remote_code=args.trust_remote_code,
            out=out,
            progress=show,
            team=team,
        )
    team.leave()
    if not team.first:
        return 0
    stored = out / "result.json"
    reports = write_reports(result, out)
    if args.json:
        print(stored.read_text(encoding="utf-8"), end="")
    else:
        print_table(result)
        print("", stored, *reports, sep="\n")
    return 0


def _through_vllm(args: argparse.Namespace, arms: dict[str, Any]) -> int:
    import importlib.util
    import json

    from ..quant.errors import InvalidValueError

    if importlib.util.find_spec("vllm") is None:
        raise InvalidValueError("--engine vllm needs vLLM; `pip install quantize-state[vllm]` brings it")
    if args.generate:
        raise InvalidValueError("--generate goes with the engines scan and step; --engine vllm runs on the text")
    if args.weights is not None:
        raise InvalidValueError("--weights goes with the engines scan and step; leave it out with --engine vllm")
    from rich.console import Console

    from ..evals.records import write_atomic
    from ..evals.rundir import fresh_folder
    from ..evals.through_vllm import compare, print_comparison

    out = Path(args.out) if args.out is not None else fresh_folder(args.model)
    stored = out / "vllm.json"
    if stored.exists():
        raise InvalidValueError(f"{stored} exists and is never overwritten; choose another place")
    quiet_transformers()
    errors = Console(stderr=True)
    if args.arms is None:
        arms = {name: policy for name, policy in arms.items() if not name.startswith(("coupled", "reference"))}
    with errors.status("") as status:
        result = compare(
            args.model,
            arms,
            text=args.text,
            tokens=args.tokens,
            sequences=args.sequences,
            window=args.window,
            seed=args.seed,
            device=args.device,
            dtype=args.dtype,
            device_map=args.device_map,
            trust_remote_code=args.trust_remote_code,
            progress=status.update,
        )
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(stored, json.dumps(result, indent=2) + "\n", overwrite=False)
    if args.json:
        print(stored.read_text(encoding="utf-8"), end="")
    else:
        print_comparison(result)
        print("", stored, sep="\n")
    return 0
