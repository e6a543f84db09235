"""``quantize-state generate``: text from a model whose state follows a policy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ._options import add_model_options, quiet_transformers


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="generate text with a quantised state")
    add_model_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--policy", default="decoupled-nvfp4", metavar="ARM", help="an arm name (default: decoupled-nvfp4)"
    )
    which.add_argument("--recipe", metavar="FILE", help="a YAML recipe: a policy per layer")
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="tokens to generate (default: 200)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and stochastic rounding (default: 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.errors import InvalidValueError
    from ..quant.policy import parse_arm
    from ..quant.recipe import Recipe

    if args.max_new_tokens < 1:
        raise InvalidValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be 1 or more")
    if args.temperature < 0:
        raise InvalidValueError(f"--temperature is {args.temperature}; it must be 0 or more")
    policy = Recipe.from_yaml(Path(args.recipe)) if args.recipe else parse_arm(args.policy, seed=args.seed)
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise InvalidValueError("the prompt is empty")

    import torch
    from transformers import TextStreamer

    from ..adapters import attach
    from ..evals.models import load_model

    quiet_transformers()
    loaded = load_model(args.model, device=args.device, dtype=args.dtype, trust_remote_code=args.trust_remote_code)
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(loaded.model.device)
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}
    torch.manual_seed(args.seed)
    with attach(loaded.model, policy) as handle:
        generated = loaded.model.generate(
            **inputs,
            **sampling,
            max_new_tokens=args.max_new_tokens,
            streamer=TextStreamer(loaded.tokenizer, skip_prompt=False),
            return_dict_in_generate=True,  # which keeps the cache alive, and with it the states
        )
        resident = handle.state_bytes()["total"]
        del generated
    print(f"{args.recipe or args.policy}: {resident / 1024:.0f} KiB of state, ring included", file=sys.stderr)
    return 0
