"""``quantize-state export-recipe``: the recipe of the states, into a model's directory."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._options import COLUMNS_HELP


def add_parser(subparsers) -> None:
    parser = subparsers.add_parser(
        "export-recipe",
        help="write a recipe into a model's directory, where the other commands find it",
        description="Write state_quant_config.json beside a model's config.json: which policy each SSM layer's state "
        "has. eval, generate and attach(model, 'auto') take it up; other files are left as they are.",
    )
    parser.add_argument("model", type=Path, metavar="DIR", help="a Hugging Face directory; only its config is read")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--policy", metavar="ARM", help="an arm name for all layers, such as decoupled-nvfp4")
    which.add_argument("--recipe", type=Path, metavar="FILE", help="a YAML recipe: a policy per layer")
    parser.add_argument("--columns", type=Path, metavar="FILE", help=COLUMNS_HELP)
    parser.add_argument("--replace", action="store_true", help="replace the recipe that is there")
    parser.add_argument("--trust-remote-code", action="store_true", help="let the directory run its own code")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from ..quant.columns import ColumnScales
    from ..quant.errors import InvalidValueError
    from ..quant.model_recipe import FILE_NAME
    from ..quant.policy import parse_arm
    from ..quant.recipe import Recipe

    policy: Any = Recipe.from_yaml(args.recipe) if args.recipe else Recipe.of(parse_arm(args.policy))
    if args.columns is not None:
        policy = replace(policy, columns=ColumnScales.read(args.columns))
    if (args.model / FILE_NAME).exists() and not args.replace:
        raise InvalidValueError(f"{args.model / FILE_NAME} exists; --replace writes over it")

    from ..adapters.auto import describe_recipe
    from ..evals.formatting import plural
    from ..evals.models import meta_model
    from ._options import quiet_transformers

    quiet_transformers()
    described = describe_recipe(meta_model(str(args.model), trust_remote_code=args.trust_remote_code), policy)
    path = described.write(args.model, overwrite=args.replace)
    counts: dict[str, int] = {}
    for name in described.layers.values():
        counts[name] = counts.get(name, 0) + 1
    print(f"{path}: " + ", ".join(f"{plural(count, 'layer')} {name}" for name, count in counts.items()))
    if described.left_out:
        print(described.left_out)
    return 0
