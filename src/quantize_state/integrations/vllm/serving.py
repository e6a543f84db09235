"""Which policy each layer of the served model has."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

from ...quant.errors import InvalidValueError
from ...quant.formats import FORMATS
from ...quant.model_recipe import FILE_NAME, ModelRecipe
from ...quant.policy import StatePolicy
from ...quant.recipe import Recipe

AUTO = "auto"


def read_recipe(asked: str) -> Recipe:
    """The recipe that an arm name or a file spells, if it can be served. Raises QuantizeStateError."""
    file = Path(asked)
    if file.suffix in (".yaml", ".yml") or file.is_file():
        return check_servable(Recipe.from_yaml(file), asked)
    return check_servable(Recipe.of(asked), asked)


def recipe_of_model(model: str) -> Recipe:
    """The recipe that ``quantize-state export-recipe`` put into the directory of a model.

    Raises InvalidValueError where there is none, FileFormatError where it is damaged.
    """
    file = Path(model) / FILE_NAME
    if not file.is_file():
        raise InvalidValueError(
            f"QUANTIZE_STATE_POLICY=auto, and there is no {FILE_NAME} in {model}; write it by `quantize-state "
            "export-recipe`, or set the variable to a recipe file or an arm name"
        )
    return check_servable(ModelRecipe.read(file).recipe, str(file))


def check_servable(recipe: Recipe, where: str) -> Recipe:
    """``recipe``, if vLLM's pages can hold what its policies keep. Raises InvalidValueError naming what they can't."""
    for policy in policies_of(recipe):
        name = f"policy {policy.name}" + ("" if policy.name == where else f" of {where!r}")
        if FORMATS[policy.checkpoint].scaling is not None:
            raise InvalidValueError(
                f"{name} has a {policy.checkpoint} checkpoint; vLLM's prefill reads and writes the checkpoint as plain "
                "numbers, so it must be fp32, bf16 or fp16. Coupled arms are for `quantize-state eval`"
            )
        if policy.balanced:
            raise InvalidValueError(f"{name} has column scales, which the vLLM plugin does not; leave out -balanced")
        if policy.stochastic:
            raise InvalidValueError(f"{name} rounds stochastically, which the vLLM plugin does not; leave out -sr")
    if len({policy.checkpoint for policy in policies_of(recipe)}) > 1:
        raise InvalidValueError(
            f"the policies of {where!r} have checkpoints of several formats; vLLM keeps one page layout for all layers"
        )
    return recipe


def policies_of(recipe: Recipe) -> tuple[StatePolicy, ...]:
    """The different policies of a recipe, the default one first."""
    return tuple(dict.fromkeys((recipe.default, *recipe.layers.values())))


def untouched(policy: StatePolicy) -> bool:
    """Whether a policy is what vLLM does by itself: FP32, read and written at every token."""
    return policy.exact and policy.window == 1 and policy.read is None


def policy_of(recipe: Recipe, prefix: str, index: int) -> StatePolicy:
    """The policy of the layer that vLLM calls ``prefix``, the ``index``-th SSM layer of the model."""
    policy = recipe.default
    for pattern, own in recipe.layers.items():
        if _matches(pattern, prefix, index):
            policy = own
    return policy


def check_patterns(recipe: Recipe, prefixes: list[str]) -> None:
    """Raise InvalidValueError naming every pattern of the recipe that matches none of the model's layers, in order."""
    lost = [p for p in recipe.layers if not any(_matches(p, name, i) for i, name in enumerate(prefixes))]
    if lost:
        raise InvalidValueError(
            f"no layer matches {', '.join(map(repr, lost))} of the recipe; vLLM's layers are {', '.join(prefixes)}"
        )


def _matches(pattern: str, prefix: str, index: int) -> bool:
    """As in a Recipe, but before ``layers.``, where vLLM and transformers may call a layer differently, all agree."""
    if pattern == str(index) or fnmatchcase(prefix, pattern):
        return True
    return "layers." in pattern and fnmatchcase(_from_layers(prefix), _from_layers(pattern))


def _from_layers(name: str) -> str:
    return name[max(name.find("layers."), 0) :]
