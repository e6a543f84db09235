"""A recipe in a model's directory: written, found again by everything, and honest about what it leaves out."""

import json
import re
import warnings

import pytest
from tiny_models import build, run, tokens
from torch import nn

from quantize_state import Recipe, StatePolicy, attach, export_recipe, resolve_recipe
from quantize_state.adapters import find_layers
from quantize_state.cli import main
from quantize_state.evals.embedded import embedded_path
from quantize_state.evals.models import load_model, meta_model
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from quantize_state.quant.model_recipe import FILE_NAME

RECIPE = Recipe(StatePolicy(read="nvfp4", window=8), {"0": StatePolicy(read="fp8_e4m3", rotation="hadamard")})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """tiny-gdn's directory, by links: its recipe is written beside them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gdn").mkdir()
    for path in embedded_path("tiny-gdn").iterdir():
        (tmp_path / "gdn" / path.name).symlink_to(path)
    (tmp_path / "gdn" / "hf_quant_config.json").write_text("{}")
    return tmp_path / "gdn"


def test_attach_and_resolve_find_what_was_exported(folder):
    model = load_model(str(folder), device="cpu").model
    assert resolve_recipe(model) is None and resolve_recipe(folder) is None
    with pytest.raises(InvalidValueError, match=r"gdn brings no recipe: it has no state_quant_config.json"):
        attach(model, "auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is left out, so nothing is said
        described = export_recipe(model, RECIPE, folder)
    assert set(described.layers.values()) == {"decoupled-nvfp4-w8", "decoupled-fp8_e4m3-hadamard"}
    assert resolve_recipe(folder) == resolve_recipe(str(folder)) == resolve_recipe(model) == RECIPE
    with attach(model, "auto") as handle:
        policies = list(handle.policies.values())
        assert policies[0] == RECIPE.layers["0"] and set(policies[1:]) == {RECIPE.default}
        handle.use("reference")
        handle.use("auto")
        assert list(handle.policies.values()) == policies
    assert (folder / "hf_quant_config.json").read_text() == "{}"
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        export_recipe(model, RECIPE, folder)


def test_layers_left_unquantised_are_named(folder):
    model = meta_model(str(folder))
    names = [layer.name for layer in find_layers(model)]
    recipe = Recipe(StatePolicy(), {f"{names[1]}*": StatePolicy(read="nvfp4")})
    with pytest.warns(UserWarning, match=rf"not quantised: exact FP32 states in {names[0]}, {names[2]}"):
        described = export_recipe(model, recipe, folder)
    assert described.unquantized == (names[0], *names[2:]) and described.unsupported == ()
    assert json.loads((folder / FILE_NAME).read_text())["unquantized"] == list(described.unquantized)


def test_a_recurrent_layer_that_no_adapter_knows_is_named(folder):
    model = meta_model(str(folder))
    lost = find_layers(model)[2]
    # Another class, whose forward uses none of the known functions.
    lost.module.__class__ = type("OtherDeltaNet", (nn.Module,), {"forward": lambda self, x: x})
    with pytest.warns(UserWarning, match=rf"states that no adapter knows in {re.escape(lost.name)}"):
        described = export_recipe(model, "decoupled-nvfp4", folder)
    assert described.unsupported == (lost.name,) and lost.name not in described.layers


def test_a_recipe_for_other_layers_is_refused(folder):
    export_recipe(meta_model(str(folder)), "decoupled-nvfp4", folder)
    path = folder / FILE_NAME
    plain = json.loads(path.read_text())
    plain["layers"] = dict(list(plain["layers"].items())[1:])
    path.write_text(json.dumps(plain))
    with pytest.raises(InvalidValueError, match=r"was exported for other layers; it differs in model.layers.0"):
        resolve_recipe(load_model(str(folder), device="cpu").model)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "can't read"),
        ("[]", "has schema None"),
        ('{"schema": "quantize-state/model/2"}', r"schema 'quantize-state/model/2'; .* reads 'quantize-state/model/1'"),
        ('{"schema": "quantize-state/model/1"}', r"damaged: KeyError: 'recipe'"),
        ('{"schema": "quantize-state/model/1", "recipe": {"defualt": 1}, "layers": {}}', r"damaged: .*'defualt'"),
    ],
)
def test_damaged_files(folder, text, says):
    (folder / FILE_NAME).write_text(text)
    with pytest.raises(FileFormatError, match=says):
        resolve_recipe(folder)


def test_commands_find_the_recipe(folder, capsys):
    assert main(["export-recipe", "gdn", "--policy", "decoupled-fp8"]) == 0
    assert "6 layers decoupled-fp8" in capsys.readouterr().out
    assert main(["export-recipe", "gdn", "--policy", "reference"]) == 2
    assert "--replace writes over it" in capsys.readouterr().err
    assert main(["export-recipe", "gdn", "--policy", "replay-fp32", "--replace"]) == 0
    assert "exact FP32 states in model.layers.0.linear_attn," in capsys.readouterr().out
    assert main(["export-recipe", "gdn", "--policy", "decoupled-int8", "--replace"]) == 0
    for policy in ([], ["--policy", "auto"]):
        assert main(["generate", "gdn", "--prompt", "The", "--max-new-tokens", "2", *policy]) == 0
        assert "the model's recipe: " in capsys.readouterr().err
    assert main(["generate", "gdn", "--policy", "replay-fp32", "--prompt", "The", "--max-new-tokens", "2"]) == 0
    assert "replay-fp32: " in capsys.readouterr().err
    assert main(["generate", "tiny-gdn", "--policy", "auto", "--prompt", "The"]) == 2
    assert "brings no recipe" in capsys.readouterr().err
    assert (
        main(["eval", "gdn", "--arms", "reference", "--recipe", "auto", "--tokens", "20", "--out", "run", "--json"])
        == 0
    )
    arms = {arm["name"]: arm for arm in json.loads(capsys.readouterr().out)["arms"]}
    assert arms["recipe:model"]["policy"]["read"] == "int8"
    assert main(["eval", "tiny-gdn", "--recipe", "auto", "--tokens", "20", "--out", "other"]) == 2
    assert "brings no recipe" in capsys.readouterr().err


def test_a_model_of_no_directory_brings_nothing():
    model = build("qwen3_next")
    assert resolve_recipe(model) is None
    with pytest.raises(InvalidValueError, match="this model brings no recipe"):
        attach(model, "auto")
    run(model, tokens(1, 2))  # and nothing of it is left attached
    with pytest.raises(InvalidValueError, match="no model directory"):
        export_recipe(model, "decoupled-nvfp4", ".")


def test_questions_take_up_the_models_own_recipe(folder):
    """The arms of gpqa and tasks: the exported recipe by default or when asked for, not beside arms that were named."""
    from argparse import Namespace

    from quantize_state.cli._questions import arms_of

    def asked(**given):
        return arms_of(Namespace(**{"model": str(folder), "arms": None, "recipe": None, "temperature": 0.0} | given))

    assert "recipe:model" not in asked()
    with pytest.raises(InvalidValueError, match="brings no recipe"):
        asked(recipe="auto")
    export_recipe(meta_model(str(folder)), RECIPE, folder)
    assert asked()["recipe:model"] == RECIPE
    assert "recipe:model" not in asked(arms="replay-fp32")
    assert asked(arms="replay-fp32", recipe="auto")["recipe:model"] == RECIPE
