"""The recipe that a model brings along: set by ModelOpt's quantizers, or exported into its directory."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..quant.errors import InvalidValueError
from ..quant.model_recipe import COLUMNS_NAME, FILE_NAME, ModelRecipe
from ..quant.policy import StatePolicy
from ..quant.recipe import Recipe
from .models import SsmLayer, find_layers

QUANTIZER = "state_read_quantizer"
"""What quantize_state.integrations.modelopt adds to a mixer."""


def resolve_recipe(model: nn.Module | str | os.PathLike[str]) -> Recipe | None:
    """The recipe that ``model`` brings along; None where it brings none.

    For a model in memory that is what its ModelOpt quantizers say, or else the ``state_quant_config.json`` where it
    was loaded from; for a directory or a hub id it is that file.

    Raises InvalidValueError where the file was exported for other layers than the model has, FileFormatError where
    it is damaged.
    """
    if not isinstance(model, nn.Module):
        found = _read(os.fspath(model))
        return None if found is None else found.recipe
    layers = find_layers(model)
    quantizers = {layer.name: q for layer in layers if (q := getattr(layer.module, QUANTIZER, None)) is not None}
    if quantizers:
        return Recipe(layers={name: _policy(name, quantizer) for name, quantizer in quantizers.items()})
    found = _read(getattr(model, "name_or_path", ""))
    if found is None:
        return None
    names = {layer.name for layer in layers}
    if names != set(found.layers):
        other = ", ".join(sorted(names ^ set(found.layers)))
        raise InvalidValueError(
            f"{FILE_NAME} of {model.name_or_path} was exported for other layers; it differs in {other}"
        )
    return found.recipe


def required_recipe(model: nn.Module | str | os.PathLike[str]) -> Recipe:
    """``resolve_recipe``; raises InvalidValueError where there is none."""
    recipe = resolve_recipe(model)
    if recipe is None:
        where = getattr(model, "name_or_path", "") if isinstance(model, nn.Module) else os.fspath(model)
        raise InvalidValueError(
            f"{where or 'this model'} brings no recipe: it has no {FILE_NAME} (`quantize-state export-recipe` writes "
            "one) and no ModelOpt state_read_quantizer"
        )
    return recipe


def describe_recipe(model: nn.Module, policy: StatePolicy | Recipe | Mapping[str, Any] | str) -> ModelRecipe:
    """What a policy or recipe comes to for ``model``'s layers (weights are not needed: the meta device will do)."""
    recipe = Recipe.of(policy)
    layers = find_layers(model)
    policies = recipe.for_layers([layer.name for layer in layers])
    return ModelRecipe(
        recipe,
        {layer.name: own.name for layer, own in zip(layers, policies, strict=True)},
        tuple(layer.name for layer, own in zip(layers, policies, strict=True) if own.exact),
        tuple(_unsupported(model, layers)),
    )


def export_recipe(
    model: nn.Module,
    policy: StatePolicy | Recipe | Mapping[str, Any] | str,
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
) -> ModelRecipe:
    """Write the recipe into a model's directory, where ``attach(model, "auto")`` and the commands find it.

    Returns what was written, and warns of layers that it leaves unquantised, by name.
    """
    described = describe_recipe(model, required_recipe(model) if policy == "auto" else policy)
    described.write(directory, overwrite=overwrite)
    if described.left_out:
        warnings.warn(f"{Path(directory) / FILE_NAME}: {described.left_out}", stacklevel=2)
    return described


def _read(source: str) -> ModelRecipe | None:
    if not source:
        return None
    if Path(source).is_dir():
        path = Path(source) / FILE_NAME
        return ModelRecipe.read(path) if path.is_file() else None
    if source.count("/") != 1 or source.startswith((".", "/")):
        return None
    from transformers.utils import cached_file

    def fetched(name: str) -> str | None:
        return cached_file(
            source,
            name,
            _raise_exceptions_for_gated_repo=False,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
        )

    found = fetched(FILE_NAME)
    if found is not None:
        fetched(COLUMNS_NAME)  # into the same folder, where the recipe looks for it
    return None if found is None else ModelRecipe.read(found)


def _policy(name: str, quantizer: Any) -> StatePolicy:
    if not hasattr(quantizer, "policy"):
        raise InvalidValueError(
            f"{name}.{QUANTIZER} is a {type(quantizer).__name__}: a state has one format, not a list"
        )
    return quantizer.policy()


def _unsupported(model: nn.Module, layers: list[SsmLayer]) -> list[str]:
    """Layers for which transformers keeps a recurrent state, and that are none of ``layers``."""
    from transformers import DynamicCache

    config: Any = getattr(model, "config", None)
    try:
        cache = DynamicCache(config=config)
        kinds = getattr(config.get_text_config(), "layer_types", None) or []
    except Exception:  # a model of its own making, whose config no cache understands
        return []
    known = {getattr(layer.module, "layer_idx", None) for layer in layers}
    # transformers 5.19 gives layers without any state the cache of one with a state.
    known |= {i for i, kind in enumerate(kinds) if kind in ("mlp", "moe")}
    lost = [i for i, kept in enumerate(cache.layers) if hasattr(kept, "recurrent_states") and i not in known]
    numbered = {m.layer_idx: n for n, m in model.named_modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return [numbered.get(i, f"layer {i}") for i in lost]
