"""A policy per layer: matching, YAML both ways, and what is refused."""

from __future__ import annotations

import pytest

from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.recipe import Recipe

NAMES = [f"model.layers.{i}.mixer" for i in (0, 1, 10, 11)]

YAML = """
version: 1
default: decoupled-nvfp4
layers:
  "model.layers.1?.*": decoupled-fp8
  "0": {read: null, window: 4}
  model.layers.11.mixer: coupled-int8-sr
"""


def names(recipe: Recipe) -> list[str]:
    return [policy.name for policy in recipe.for_layers(NAMES)]


def test_the_last_pattern_that_matches_counts():
    recipe = Recipe.from_yaml(YAML)
    assert names(recipe) == ["replay-fp32-w4", "decoupled-nvfp4", "decoupled-fp8_e4m3", "coupled-int8-sr"]
    assert recipe.for_layer("model.layers.10.mixer", 2).read == "fp8_e4m3"


def test_one_policy_for_all_layers():
    for given in ("replay-fp32", StatePolicy(), Recipe(), {"default": "replay-fp32"}, {}):
        assert names(Recipe.of(given)) == ["replay-fp32"] * 4


def test_patterns_are_case_sensitive_and_whole():
    for pattern in ("layers.0.mixer", "MODEL.layers.0.mixer", "4", "-1", "00"):
        with pytest.raises(InvalidValueError, match="no layer matches"):
            Recipe(layers={pattern: StatePolicy()}).for_layers(NAMES)


def test_every_pattern_without_a_layer_is_named():
    with pytest.raises(InvalidValueError, match=r"'\*\.7\.\*', 'head'.*model\.layers\.11\.mixer"):
        Recipe(layers={"*.7.*": StatePolicy(), "*": StatePolicy(), "head": StatePolicy()}).for_layers(NAMES)


@pytest.mark.parametrize(
    "policy",
    [
        *(parse_arm(name) for name in ("reference", "replay-bf16", "decoupled-nvfp4-w32-four_over_six-hadamard")),
        StatePolicy(seed=3),
        StatePolicy(checkpoint="int8", window=1, stochastic=True, seed=5),
    ],
)
def test_yaml_and_back(policy):
    recipe = Recipe(policy, {"*.mixer": policy, "0": StatePolicy()})
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_from_a_file(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(YAML, encoding="utf-8")
    assert Recipe.from_yaml(path) == Recipe.from_yaml(YAML)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("version: 1\nlayer: {}", "'layer'.*Did you mean 'layers'"),
        ("version: 2", "version 2"),
        ("version: 1\ndefault: {red: nvfp4}", "'red'.*Did you mean 'read'"),
        ("version: 1\nlayers: {'*': {window: 'ten'}}", r"window in the recipe's layers\['\*'\] is 'ten'"),
        ("version: 1\nlayers: {'*': {read: [nvfp4]}}", "read .* is"),
        ("version: 1\nlayers: {'*': {window: 0}}", "1 to 256"),
        ("version: 1\nlayers: {'*': decoupled-nvfp5}", "nvfp5"),
        ("version: 1\nlayers: [a]", "layers of a recipe"),
        ("version: 1\ndefault: 4", "default is 4"),
        ("version: 1\ndefault:", "default is None"),
    ],
)
def test_what_is_not_understood_is_named(given, message):
    with pytest.raises(InvalidValueError, match=message) as error:
        Recipe.from_yaml(given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", ["", "- a", "default: replay-fp32", "a: [", "\0", "!!python/object:os.system {}"])
def test_what_is_no_recipe(given):
    with pytest.raises(FileFormatError) as error:
        Recipe.from_yaml(given)
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name in ("missing.yaml", "binary"):
        with pytest.raises(FileFormatError, match=name):
            Recipe.from_yaml(tmp_path / name)


def test_errors_are_those_of_the_toolkit():
    with pytest.raises(QuantizeStateError):
        Recipe.of(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError):
        Recipe.of([1])  # type: ignore[arg-type]
