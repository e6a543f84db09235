"""``quantize-state generate``: text from a model whose state follows a policy."""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from ._options import COLUMNS_HELP, add_model_options, quiet_transformers


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser("generate", help="generate text with a quantised state")
    add_model_options(parser)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--policy",
        metavar="ARM",
        help="an arm name, or auto: the recipe in the model's directory (default: that, or else decoupled-nvfp4)",
    )
    which.add_argument("--recipe", metavar="FILE", help="a YAML recipe: a policy per layer")
    parser.add_argument("--columns", metavar="FILE", help=COLUMNS_HELP)
    parser.add_argument("--prompt", required=True, help="the text to continue; - reads it from standard input")
    parser.add_argument(
        "--max-new-tokens", type=int, default=200, metavar="N", help="tokens to generate (default: 200)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of sampling and stochastic rounding (default: 0)")
    parser.add_argument(
        "--assistant",
        metavar="ngram|MODEL",
        help="draft tokens by looking n-grams up in the text so far, or by another model with the same tokenizer; "
        "prints how many are accepted, and whether the text is that of plain decoding",
    )
    parser.add_argument(
        "--draft-tokens", type=int, metavar="N", help="tokens that the assistant drafts at a time (default: 3)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.columns import ColumnScales
    from ..quant.errors import InvalidValueError
    from ..quant.policy import CALIBRATE, parse_arm
    from ..quant.recipe import Recipe

    if args.max_new_tokens < 1:
        raise InvalidValueError(f"--max-new-tokens is {args.max_new_tokens}; it must be 1 or more")
    if args.temperature < 0:
        raise InvalidValueError(f"--temperature is {args.temperature}; it must be 0 or more")
    if args.draft_tokens is not None and args.assistant is None:
        raise InvalidValueError("--draft-tokens needs --assistant, ngram or a model")
    if args.draft_tokens is not None and args.draft_tokens < 1:
        raise InvalidValueError(f"--draft-tokens is {args.draft_tokens}; it must be 1 or more")
    policy: Any = None
    if args.recipe:
        policy = Recipe.from_yaml(Path(args.recipe))
    elif args.policy not in (None, "auto"):
        policy = parse_arm(args.policy, seed=args.seed)
    columns = None if args.columns is None else ColumnScales.read(args.columns)
    if columns is None and getattr(policy, "balanced", False) and getattr(policy, "columns", None) is None:
        raise InvalidValueError(f"the policy needs column scales; {CALIBRATE}")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not prompt:
        raise InvalidValueError("the prompt is empty")

    import torch
    from transformers import TextStreamer

    from ..adapters import attach, required_recipe, resolve_recipe
    from ..evals.models import input_device, load_model

    quiet_transformers()
    options = {
        "device": args.device,
        "dtype": args.dtype,
        "device_map": args.device_map,
        "trust_remote_code": args.trust_remote_code,
    }
    loaded = load_model(args.model, **options)
    spelled = args.recipe or args.policy
    if policy is None:
        found = required_recipe(loaded.model) if args.policy == "auto" else resolve_recipe(loaded.model)
        spelled = "the model's recipe" if found is not None else "decoupled-nvfp4"
        policy = found if found is not None else parse_arm(spelled, seed=args.seed)
    inputs = loaded.tokenizer(prompt, return_tensors="pt").to(input_device(loaded.model))
    sampling = {"do_sample": True, "temperature": args.temperature} if args.temperature else {"do_sample": False}

    def generate(**more: Any) -> Any:
        torch.manual_seed(args.seed)
        # The dict keeps the cache alive, and with it the states.
        return loaded.model.generate(
            **inputs, **sampling, max_new_tokens=args.max_new_tokens, return_dict_in_generate=True, **more
        )

    # by replay: at a batch of one the standard path would show the text of an FP32 state, whatever the policy
    with attach(loaded.model, policy, path="replay", columns=columns) as handle, ExitStack() as stack:
        assistant = _assistant(args, loaded, options, stack) if args.assistant else {}
        generated = generate(**assistant, streamer=TextStreamer(loaded.tokenizer, skip_prompt=False))
        resident = handle.state_bytes()["total"]
        text = generated.sequences[0].tolist()
        del generated
        name = spelled
        print(f"{name}: {resident / 1024:.0f} KiB of state, ring included", file=sys.stderr)
        if assistant:
            print(f"{name}: {_accepted(handle.acceptance)}", file=sys.stderr)
            if not args.temperature:
                _compare(name, text, generate(output_logits=True), inputs["input_ids"].shape[1])
            handle.use("reference")
            generate(**assistant)
            print(f"FP32 state: {_accepted(handle.acceptance)}", file=sys.stderr)
    return 0


def _assistant(args: argparse.Namespace, loaded: Any, options: dict[str, Any], stack: ExitStack) -> dict[str, Any]:
    """What ``generate`` takes for the assistant; one with states of its own is attached, in FP32, for the rollback."""
    from transformers import DynamicCache

    from ..adapters import attach
    from ..evals.models import load_model
    from ..quant.errors import InvalidValueError, UnsupportedModelError

    drafts = args.draft_tokens or 3
    if args.assistant == "ngram":
        return {"prompt_lookup_num_tokens": drafts}
    other = load_model(args.assistant, **options)
    if other.tokenizer.get_vocab() != loaded.tokenizer.get_vocab():
        raise InvalidValueError(
            f"the tokenizers of {args.model!r} and its assistant {args.assistant!r} differ; drafts need the same one"
        )
    other.model.generation_config.update(
        num_assistant_tokens=drafts, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
    )
    if all(DynamicCache(config=other.model.config).is_linear):
        raise InvalidValueError(
            f"the assistant {args.assistant!r} has no attention layer, and transformers' assisted generation counts an "
            "assistant's tokens by these; use a hybrid, an attention model, or ngram"
        )
    with suppress(UnsupportedModelError):  # attention alone, which rolls back by itself
        stack.enter_context(attach(other.model, "reference"))
    return {"assistant_model": other.model}


def _accepted(found: Any) -> str:
    return (
        f"acceptance length {found.length:.2f} tokens per step "
        f"({found.accepted} of {found.drafted} drafts accepted in {found.steps} steps)"
    )


def _compare(name: str, text: list[int], plain: Any, start: int) -> None:
    """Say whether ``text`` is that of plain decoding; where they part, by how much the best logit led."""
    expected = plain.sequences[0].tolist()
    place = next((i for i, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]), None)
    if place is None and len(text) == len(expected):
        said = f"the same {len(text) - start} tokens as plain decoding"
    else:
        place = min(len(text), len(expected)) if place is None else place
        best = plain.logits[place - start][0].float().topk(2).values.tolist()
        said = (
            f"differs from plain decoding from token {place - start + 1} on, where the two best logits are "
            f"{best[0]:.6g} and {best[1]:.6g}"
        )
    print(f"{name}: {said}", file=sys.stderr)
