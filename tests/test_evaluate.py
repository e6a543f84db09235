"""The main job on an embedded model: evidence in, evidence out, and nothing lost on the way."""

import json

import pytest
import torch

from quantize_state import DecodeState, QuantizeStateError, Recipe, StatePolicy, attach, evaluate
from quantize_state.evals.evaluate import GENERATION_PROMPT
from quantize_state.evals.models import load_model
from quantize_state.evals.result import Result

NOISE = 1e-9
"""KL of two FP32 evaluations of one model that sum in other orders (nats per token)."""


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-gdn", device="cpu")


@pytest.fixture(scope="module")
def result(loaded, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    arms = ["reference", "reference-again", "replay-fp32", "coupled-nvfp4", "coupled-nvfp4-w16", "decoupled-nvfp4"]
    return evaluate(loaded, arms, tokens=256, out=out), out


def test_the_order_of_the_arms_and_the_noise_floor(result):
    kl = {arm.name: arm.kl.mean for arm in result[0].arms}
    assert kl["reference"] == 0
    assert 0 < kl["reference-again"] < NOISE, "the floor is two FP32 evaluations, so neither zero nor large"
    assert 0 < kl["replay-fp32"] < NOISE
    assert 1e3 * NOISE < kl["decoupled-nvfp4"] < kl["coupled-nvfp4-w16"] < kl["coupled-nvfp4"]


def test_layer_errors_are_those_of_the_layers_own_state(result):
    arms = {arm.name: arm for arm in result[0].arms}
    assert len(arms["decoupled-nvfp4"].layers) == 6 and not arms["reference-again"].layers
    for layer in arms["decoupled-nvfp4"].layers:
        assert layer.state_error < 1e-5, "the recurrence is FP32 whatever the copy is"
        assert 1e-3 < layer.output_error < 1
    for layer in arms["coupled-nvfp4"].layers:
        assert layer.state_error > 1e-2


def test_growth_begins_where_the_arms_own_copy_is_read(loaded):
    arms = evaluate(loaded, ["decoupled-nvfp4", "decoupled-nvfp4-w64"], tokens=512).arms
    points = [{x.exponents.output.points for x in arm.layers} for arm in arms]
    assert points == [{5}, {3}], "buckets from token 16 on, and from 64 on"


def test_what_is_stored_is_what_was_returned(result):
    value, out = result
    assert Result.read(out / "result.json") == value
    assert value.text.tokens == 256 and value.text.sequences == 1 and value.status == "complete"
    again = evaluate("tiny-gdn", ["reference", "coupled-nvfp4"], tokens=256, out=out, device="cpu")
    assert again == value, "a finished run is given back, not run again"
    with pytest.raises(QuantizeStateError, match=r"another configuration.*text"):
        evaluate("tiny-gdn", ["reference"], tokens=128, out=out, device="cpu")


def test_an_interrupted_run_resumes_at_the_arm_where_it_stopped(loaded, tmp_path):
    class Killed(Exception):
        pass

    ran = []

    def stop_in_second(what, done, total):
        ran.append(what)
        if what == "decoupled-fp8":
            raise Killed

    arms = ["decoupled-nvfp4", "decoupled-fp8"]
    with pytest.raises(Killed):
        evaluate(loaded, arms, tokens=64, out=tmp_path, progress=stop_in_second)
    assert not (tmp_path / "result.json").exists()
    ran.clear()
    value = evaluate(loaded, arms, tokens=64, out=tmp_path, progress=lambda what, *_: ran.append(what))
    assert set(ran) == {"decoupled-fp8"}
    assert [arm.name for arm in value.arms] == arms
    straight = evaluate(loaded, arms, tokens=64)
    assert [arm.kl for arm in straight.arms] == [arm.kl for arm in value.arms]


def test_stepping_tells_the_same_story_as_the_scan(loaded):
    """Over two windows: there a code that FP32 rounding flips has not yet spread through the layers above it."""
    arms = ["decoupled-nvfp4", "coupled-nvfp4-w16"]
    scanned, stepped = (evaluate(loaded, arms, tokens=32, engine=engine).arms for engine in ("scan", "step"))
    for scan, step in zip(scanned, stepped, strict=True):
        assert scan.kl.mean == pytest.approx(step.kl.mean, rel=0.02)


def test_tokens_that_the_reference_generated(loaded, tmp_path):
    arms = ["reference", "decoupled-nvfp4"]
    value = evaluate(loaded, arms, generate=64, out=tmp_path)
    assert (value.text.generated, value.text.prompt, value.text.tokens) == (64, GENERATION_PROMPT - 1, 64)
    assert value.arm("decoupled-nvfp4").kl.tokens == 64
    generated = json.loads((tmp_path / "generated.json").read_text())
    assert len(generated[0]) == GENERATION_PROMPT + 64
    assert evaluate(loaded, arms, generate=64).arm("decoupled-nvfp4").kl == value.arm("decoupled-nvfp4").kl


def test_generation_goes_on_where_it_stopped(loaded, tmp_path, monkeypatch):
    class Killed(Exception):
        pass

    def stop(what, done, total):
        if what == "generating" and done == 48:
            raise Killed

    monkeypatch.setattr("quantize_state.evals.evaluate.STORED_EVERY", 20)
    with pytest.raises(Killed):
        evaluate(loaded, ["decoupled-nvfp4"], generate=64, out=tmp_path / "run", progress=stop)
    (partial,) = (tmp_path / "run").glob("shards/generated/*.json")
    assert len(json.loads(partial.read_text())[0]) == GENERATION_PROMPT + 40
    seen = []
    again = evaluate(
        loaded,
        ["decoupled-nvfp4"],
        generate=64,
        out=tmp_path / "run",
        progress=lambda what, done, total: seen.append(done) if what == "generating" else None,
    )
    assert min(seen) == 48, "the first 40 tokens are not generated again"
    straight = evaluate(loaded, ["decoupled-nvfp4"], generate=64)
    assert again.text.sha256 == straight.text.sha256


def test_a_recipe_is_an_arm_like_any_other(loaded):
    recipe = Recipe(StatePolicy(read="fp8_e4m3"), {"0": StatePolicy(read="nvfp4")})
    arms = {"decoupled-fp8": "decoupled-fp8", "mixed": recipe, "decoupled-nvfp4": StatePolicy(read="nvfp4")}
    value = evaluate(loaded, arms, tokens=128)
    fp8, mixed, nvfp4 = (arm.bytes_per_element.moved_per_step for arm in value.arms)
    assert mixed == pytest.approx((5 * fp8 + nvfp4) / 6)
    assert value.arm("decoupled-fp8").kl.mean < value.arm("mixed").kl.mean < value.arm("decoupled-nvfp4").kl.mean
    assert [layer.policy for layer in value.arm("mixed").layers] == ["decoupled-nvfp4"] + 5 * ["decoupled-fp8_e4m3"]


def test_several_sequences_are_rows_of_one_batch(loaded):
    both = evaluate(loaded, ["decoupled-fp8"], tokens=64, sequences=2)
    assert both.arms[0].kl.tokens == 128


def test_python_in_five_lines(loaded):
    inputs = loaded.tokenizer("The import statement", return_tensors="pt")
    plain = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False)
    with attach(loaded.model, StatePolicy(read="fp32", window=16)) as handle:
        same = loaded.model.generate(**inputs, max_new_tokens=24, do_sample=False)
        cache = loaded.model(**inputs, use_cache=True)
        assert handle.state_bytes()["total"] > 0
        assert all(isinstance(state, DecodeState) for state in handle.states(cache.past_key_values).values())
    assert torch.equal(plain, same)
