"""Options that several subcommands share."""

from __future__ import annotations

import argparse
from typing import Any


def add_model_options(parser: argparse.ArgumentParser, *, spread: bool = True) -> None:
    """MODEL, --device, --device-map (where the command can ``spread`` a model over devices) and --dtype."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="an embedded model (see `quantize-state ls`), a Hugging Face directory, or a hub id",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    if spread:
        parser.add_argument(
            "--device-map",
            choices=("auto",),
            help="spread a model that is too large for one device over all of them (needs accelerate)",
        )
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        help="of weights and activations; auto is float32 on a CPU and the model's own elsewhere",
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="let a model directory or hub repository run its own code"
    )


COLUMNS_HELP = "column scales of -balanced arms: a file of `quantize-state calibrate`"


def recipe_arms(model: str, recipe: str | None, *, look: bool) -> dict[str, Any]:
    """The arm of ``--recipe``, a YAML file or ``auto``; without it, and if ``look``, of the recipe in the model's own
    directory, where there is one. Raises QuantizeStateError where ``auto`` finds none."""
    from pathlib import Path

    from ..quant.recipe import Recipe

    if recipe not in (None, "auto"):
        return {f"recipe:{Path(recipe).stem}": Recipe.from_yaml(Path(recipe))}
    if recipe is None and not look:
        return {}
    from ..adapters import required_recipe, resolve_recipe
    from ..evals.models import resolve_source

    source = resolve_source(model)
    own = required_recipe(source) if recipe == "auto" else resolve_recipe(source)
    return {} if own is None else {"recipe:model": own}


def quiet_transformers() -> None:
    """No loading bars and no advice on other kernels: standard output and error are for this command's words.

    Call it before a model is loaded: transformers then imports torchao, where that is installed.
    """
    import logging as python_logging

    from transformers.utils import logging

    for name in ("torchao", "torch.utils._pytree"):  # extensions that this machine can't load, and deprecations
        python_logging.getLogger(name).setLevel(python_logging.ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
