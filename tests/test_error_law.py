"""The error law as a tool: predictions from one FP32 pass are the errors that a decoupled arm really makes."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from recurrence import SPECS, random_inputs

from quantize_state import DecodeState, StatePolicy, attach, parse_arm
from quantize_state.evals.error_law import ErrorLaw, predict, reader_of
from quantize_state.evals.layer_errors import LayerErrorMeter
from quantize_state.evals.models import load_model
from quantize_state.evals.rollout import Rollout
from quantize_state.evals.shadow import ExactShadow
from quantize_state.kernels.step import prefill, scan
from quantize_state.quant.errors import InvalidValueError

EXACT = 2e-4
"""Relative. Both errors are differences of FP32 numbers 5 to 200 times as large, each right to about 2e-7."""

ARMS = [
    "decoupled-nvfp4",
    "decoupled-fp8-w8",
    "decoupled-nvfp4-w32-four_over_six-hadamard",
    "decoupled-mxfp4-w5-mse-hadamard16",
]


def fresh(spec, policy, rate):
    return DecodeState.allocate(spec, policy, 2, decay_rate=rate)


def measured(spec, rate, inputs, prompt, arm):
    """Squared output error per head of a decoupled scan against the exact one, on the same inputs."""
    outputs = []
    for policy in (parse_arm(arm), StatePolicy(window=1)):
        state = fresh(spec, policy, rate)
        if prompt:
            prefill(state, inputs.slice(0, prompt))
        outputs.append(scan(state, inputs.slice(prompt, inputs.tokens)).double())
    y, exact = outputs
    return (y - exact).square().sum(dim=(0, 1, 3)), exact.square().sum(dim=(0, 1, 3))


@pytest.mark.parametrize("prompt", [0, 21])
@pytest.mark.parametrize("family", SPECS)
def test_prediction_is_the_measured_error_of_every_head(family, prompt):
    spec, rate = SPECS[family]
    inputs = random_inputs(spec, 2, prompt + 107, seed=1, dtype=torch.float32)  # no multiple of any window
    law = ErrorLaw({arm: parse_arm(arm) for arm in ARMS}, prompt=prompt)
    exact = fresh(spec, StatePolicy(window=1), rate)
    layer = SimpleNamespace(name="layer")
    cuts = [0, *([8, prompt] if prompt else []), prompt + 50, prompt + 53, prompt + 107]  # chunks of any length
    for start, stop in itertools.pairwise(cuts):
        chunk = inputs.slice(start, stop)
        law(layer, chunk, scan(exact, chunk), exact)
    predicted = law.predictions()
    for arm in ARMS:
        error, norm = measured(spec, rate, inputs, prompt, arm)
        assert predicted[arm]["layer"].error == pytest.approx(error, rel=EXACT)
        assert predicted[arm]["layer"].exact == pytest.approx(norm, rel=EXACT)
        assert predicted[arm]["layer"].layer == pytest.approx(float((error.sum() / norm.sum()).sqrt()), rel=EXACT)
        assert float((error / norm).sqrt().min()) > 1e-3, "a check that can't fail: there is no error to predict"


def test_a_function_may_read_in_any_way():
    spec, rate = SPECS["gdn"]
    inputs = random_inputs(spec, 2, 64, seed=1, dtype=torch.float32)
    law = ErrorLaw({"nothing": (16, lambda reads: reads.states), "half": (16, lambda reads: 0.5 * reads.states)})
    exact = fresh(spec, StatePolicy(window=1), rate)
    law(SimpleNamespace(name="layer"), inputs, scan(exact, inputs), exact)
    found = law.predictions()
    assert found["nothing"]["layer"].layer == 0
    assert 0 < found["half"]["layer"].layer < 0.5


def test_no_law_where_the_recurrence_is_rounded():
    for arm in ("coupled-nvfp4", "decoupled-bf16-nvfp4"):
        with pytest.raises(InvalidValueError, match="no error law for"):
            reader_of(parse_arm(arm))


def test_one_pass_of_a_model_predicts_its_arms():
    """The first layer has the reference's inputs, so there the arm's own measurement is the prediction."""
    loaded = load_model("tiny-gdn", device="cpu")
    ids = torch.arange(2 * 48)[None] % 256
    arms = {arm: parse_arm(arm) for arm in ("decoupled-nvfp4", "decoupled-fp8-w8")}
    with attach(loaded.model, "reference") as handle:
        predicted = predict(handle, ids, arms)
        for name, policy in arms.items():
            meter = LayerErrorMeter()
            Rollout(handle, policy).advance(ids, observer=ExactShadow(meter, 0))
            layers = meter.result({}, {})
            assert list(predicted[name]) == [layer.name for layer in layers]
            pairs = [(predicted[name][layer.name].layer, layer.output_error) for layer in layers]
            assert pairs[0][0] == pytest.approx(pairs[0][1], rel=EXACT)
            for expected, found in pairs[1:]:
                assert expected == pytest.approx(found, rel=0.2), "deeper layers' inputs differ by earlier errors"
