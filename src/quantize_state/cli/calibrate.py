"""``quantize-state calibrate``: column scales of a model's read copies, in a file."""

from __future__ import annotations

import argparse
from pathlib import Path

from ._options import add_model_options, quiet_transformers


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "calibrate",
        help="measure the column scales that -balanced arms need",
        description="Teacher-force a model on a text with its exact recurrence, and write the column scales of its "
        "read copies, c = (E[S²]/E[Θ²])^¼ per layer, head and key column. Arms with -balanced use them: --columns "
        "FILE, or `columns: FILE` in a recipe beside it.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--text",
        default="stdlib",
        metavar="SOURCE",
        help="pydoc, stdlib or a UTF-8 file; not the text that is evaluated afterwards (default: stdlib)",
    )
    parser.add_argument("--tokens", type=int, default=4096, metavar="N", help="tokens of the text (default: 4096)")
    parser.add_argument("--seed", type=int, default=0, help="of the text span (default: 0)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="a safetensors file; must not exist")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from ..quant.errors import InvalidValueError

    if args.out.exists():
        raise InvalidValueError(f"{args.out} exists and is never overwritten; choose another place")

    from ..evals.calibrate import calibrate
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
    with progress_bar("calibrating", "tokens") as progress:
        scales = calibrate(
            loaded,
            text=args.text,
            tokens=args.tokens,
            seed=args.seed,
            progress=lambda what, done, total: progress(done, total),
        )
    scales = scales.write(args.out)
    spread = {name: float((c.amax(-1) / c.amin(-1)).max()) for name, c in scales.layers.items()}
    widest = max(spread, key=lambda name: spread[name])
    print(
        f"{args.out}: column scales of {len(spread)} layers, from {scales.measured_on}; within a head they differ up "
        f"to {spread[widest]:.3g} times ({widest})"
    )
    print(f"SHA-256 {scales.sha256}")
    return 0
