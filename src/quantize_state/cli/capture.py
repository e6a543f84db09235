"""``quantize-state capture``: the states that a model has along a text, in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._options import add_model_options, quiet_transformers


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "capture",
        help="save the FP32 states that a model has along a text",
        description="Teacher-force a model on a text with its exact recurrence and save every SSM layer's state every "
        "N tokens, as tensors LAYER@TOKENS of shape [sequences, heads, V, K].",
    )
    add_model_options(parser)
    parser.add_argument(
        "--text", default="pydoc", metavar="SOURCE", help="pydoc, stdlib or a UTF-8 file (default: pydoc, held out)"
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens per sequence (default: 4096)")
    parser.add_argument("--every", type=int, default=512, metavar="N", help="tokens between states (default: 512)")
    parser.add_argument("--sequences", type=int, default=1, metavar="N", help="sequences, run as a batch (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the text spans (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="where to write; must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.errors import InvalidValueError

    if args.out.exists():
        raise InvalidValueError(f"{args.out} exists and is never overwritten; choose another place")

    from ..evals.capture import capture
    from ..evals.models import load_model
    from ._progress import progress_bar

    quiet_transformers()
    loaded = load_model(
        args.model,
        device=args.device,
        dtype=args.dtype,
        device_map=args.device_map,
        trust_remote_code=args.trust_remote_code,
    )
    with progress_bar("capturing", "tokens") as progress:
        slots = capture(
            loaded,
            args.out,
            text=args.text,
            tokens=args.tokens,
            every=args.every,
            sequences=args.sequences,
            seed=args.seed,
            progress=progress,
        )
    layers = {name.partition("@")[0] for name in slots}
    print(
        f"{args.out}: {len(slots)} states of {len(layers)} layers at {len(slots) // len(layers)} places, "
        f"{sum(slot.nbytes for slot in slots.values()):,} bytes"
    )
    return 0
