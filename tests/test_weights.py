"""eval --weights: quantised weights alone, quantised states alone, and both, told apart."""

import dataclasses

import pytest
import torch

from quantize_state import QuantizeStateError, Recipe, StatePolicy, evaluate
from quantize_state.cli import main
from quantize_state.evals.measure import Measured
from quantize_state.evals.models import load_model
from quantize_state.evals.report import render_html, render_markdown
from quantize_state.evals.result import Result
from quantize_state.evals.text import load_text, tokenise
from quantize_state.evals.verdict import judge, kind_of, weight_effects
from quantize_state.evals.weights import setups
from quantize_state.quant.errors import InvalidValueError

pytest.importorskip("modelopt")

TOLERANCES = {
    "kl": (1e-3, "the same KL from one long forward pass: float32 sums in another order, and the meter's own sums"),
}
BOTH = "weights-nvfp4+decoupled-nvfp4"


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-mamba2", device="cpu")


@pytest.fixture(scope="module")
def result(loaded, tmp_path_factory):
    out = tmp_path_factory.mktemp("weights") / "run"
    arms = ["reference", "replay-fp32", "decoupled-nvfp4"]
    return evaluate(loaded, arms, tokens=200, weights="nvfp4", out=out), out


def test_every_rounding_state_runs_with_and_without_quantised_weights(result):
    assert [arm.name for arm in result[0].arms] == [
        "reference", "replay-fp32", "decoupled-nvfp4", "weights-nvfp4", BOTH,
    ]  # fmt: skip
    assert [arm.weights for arm in result[0].arms] == [None, None, None, "nvfp4", "nvfp4"]
    recipe = Recipe(StatePolicy(read="int8"))
    assert set(setups({"reference-again": None, "r": recipe}, "fp8", 0)) == {
        "reference-again", "r", "weights-fp8", "weights-fp8+r",
    }  # fmt: skip


@torch.no_grad()
def test_the_weights_arm_is_that_of_the_quantised_model(loaded, result):
    from quantize_state.integrations.modelopt import quantize_weights

    ids = torch.tensor(tokenise(loaded.tokenizer, load_text("pydoc").text, 201, 1, 0))[:, :-1]
    quantized = quantize_weights(loaded.model, "nvfp4")
    a, b = (m(ids).logits.double().log_softmax(-1) for m in (loaded.model, quantized))
    want = (a.exp() * (a - b)).sum(-1).mean().item()
    assert want > 1e-4
    assert result[0].arm("weights-nvfp4").kl.mean == pytest.approx(want, rel=TOLERANCES["kl"][0])


def test_the_effects_are_apart_and_what_the_state_adds_is_against_the_weights(result):
    arms = {arm.name: arm for arm in result[0].arms}
    weights, state, both = (arms[n] for n in ("weights-nvfp4", "decoupled-nvfp4", BOTH))
    assert both.kl.mean > weights.kl.mean > 3 * state.kl.mean
    assert both.kl_to_weights.mean < 0.5 * both.kl.mean, "the weights' own effect is not in it"
    assert 0.3 < both.kl_to_weights.mean / state.kl.mean < 3
    assert weights.kl_to_weights is None and state.kl_to_weights is None
    assert len(both.layers) == 6 and all(layer.state_error < 1e-5 for layer in both.layers)
    assert both.bytes_per_element == state.bytes_per_element


def test_reports_show_them_apart(result):
    value, out = result
    assert Result.read(out / "result.json") == value
    (effect,) = weight_effects(value)
    assert (effect.weights.name, effect.state.name, effect.both.name) == ("weights-nvfp4", "decoupled-nvfp4", BOTH)
    assert {kind_of(arm) for arm in value.arms if arm.weights} == {"other"}
    assert judge(value).subject == "decoupled-nvfp4", "the verdict is about states, not about both"
    for text in (render_html(value), render_markdown(value)):
        assert "Weights and states apart" in text and "the state adds" in text and "weight-only preset" in text
    alone = dataclasses.replace(value, arms=value.arms[:3])
    for text in (render_html(alone), render_markdown(alone)):
        assert "Weights and states apart" not in text and "weight-only preset" not in text


def test_a_run_with_weights_is_another_configuration(loaded, result):
    _, out = result
    with pytest.raises(QuantizeStateError, match=r"another configuration.*quantized weights"):
        evaluate(loaded, ["reference"], tokens=200, out=out)
    with pytest.raises(InvalidValueError, match="weight format 'nvfp5'"):
        evaluate(loaded, ["reference"], tokens=200, weights="nvfp5")


@pytest.mark.parametrize("together", [1, 5])
def test_arms_beside_one_reference_and_documents_that_resume_give_the_same(loaded, tmp_path, monkeypatch, together):
    arms = ["reference", "decoupled-nvfp4", "coupled-int8"]
    options = {"tokens": 40, "sequences": 2, "weights": "nvfp4"}
    want = evaluate(loaded, arms, **options)
    assert [len(arm.kl_to_weights.by_document) for arm in want.arms if arm.kl_to_weights] == [2, 2]
    save, saved = Measured.save, []

    def save_then_stop(measured, path, fingerprint):
        save(measured, path, fingerprint)
        saved.append(path)
        if path.parent.name.startswith("weights-nvfp4+coupled"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Measured, "save", save_then_stop)
        with pytest.raises(KeyboardInterrupt):
            evaluate(loaded, arms, **options, together=together, out=tmp_path / "run")
    assert saved[-1].exists(), "the sum of both effects over the first document is kept"
    got = evaluate(loaded, arms, **options, together=together, out=tmp_path / "run")
    assert [dataclasses.replace(arm, seconds=0) for arm in got.arms] == [
        dataclasses.replace(arm, seconds=0) for arm in want.arms
    ]


def test_the_quantised_copy_is_on_one_device():
    with pytest.raises(InvalidValueError, match="leave --device-map out"):
        evaluate("tiny-gdn", ["reference"], tokens=40, weights="nvfp4", device_map="auto")


def test_the_command_chooses_its_arms(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["eval", "tiny-gdn", "--weights", "int8", "--tokens", "40", "--out", "run"]) == 0
    out, err = capsys.readouterr()
    assert err == "", "quiet in a pipe"
    for name in ("weights-int8 ", "weights-int8+decoupled-nvfp4", "weights-int8+coupled-nvfp4", "reference-again"):
        assert name in out
    assert "INT8 weights alone cost" in out
