"""Gates, keys and Δ at their limits, in float32 and through every way to advance; and very long sequences."""

import math

import pytest
import torch
import torch.nn.functional as F
from hardening import bounded, error, truth
from hypothesis import given
from hypothesis import strategies as st
from recurrence import SPECS, random_inputs
from tiny_models import TINY_MODELS, build, run, steps, tokens

from quantize_state.adapters import attach, find_layers
from quantize_state.adapters.families import _mamba2_chunk, _mamba2_step
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.step import folded, prefill, scan, step
from quantize_state.quant.policy import parse_arm
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

TOLERANCES = {
    # name: (value, why the result is not exact)
    "fp32": (3e-6, "float32 sums of up to a few hundred terms"),
    "growing": (2e-4, "a write that overshoots (β|k|² > 2) magnifies what rounding left at each of its 20 tokens"),
    "long": (2e-4, "a window's decay, e^-1.6e-5, is rounded by up to 2^-25, the same way 6,250 times"),
    "model": (1e-5, "float32 sums of a few dozen terms, through two layers"),
    "bfloat16": (2e-2, "outputs of layers are bfloat16: 2^-9 at each of a few roundings"),
}
DECAYS = [0.0, -1e-6, -5.0, -20.0, -100.0, -math.inf]
GAINS = [0.0, 1.0, 2.0, 1e-30]
KEYS = {"unit": 1.0, "identical": 1.0, "orthogonal pair": 1.0, "un-normalised": 1.3, "tiny": 1e-20, "zero": 0.0}


def close(ours, exact, tolerance="fp32"):
    return error(ours, exact) <= TOLERANCES[tolerance][0]


def advance(how, state, inputs):
    if how == "step":
        return torch.cat([step(state, inputs.slice(t, t + 1)) for t in range(inputs.tokens)], dim=1)
    return {"scan": scan, "prefill": prefill}[how](state, inputs)


def fresh(family, start, arm="replay-fp32-w7"):
    spec, rate = SPECS[family]
    state = DecodeState.allocate(spec, parse_arm(arm), len(start), decay_rate=rate)
    state.renew_(start)
    return state


def keys(kind, like):
    k = like / like.norm(dim=-1, keepdim=True)
    if kind == "identical":
        k = k[:, :1].expand_as(k)
    elif kind == "orthogonal pair":
        k = torch.eye(k.shape[-1])[torch.arange(k.shape[1]) % 2][None, :, None].expand_as(k)
    return k * KEYS[kind]


@pytest.mark.parametrize("how", ["step", "scan", "prefill"])
@pytest.mark.parametrize("family", ["gdn", "kda"])
@given(st.data())
@bounded(30)
def test_decays_gains_and_keys_at_their_limits(how, family, data):
    """Any mixture of limits over tokens, heads and channels, against the float64 recurrence, over three windows."""
    inputs = random_inputs(SPECS[family][0], 1, 20, data.draw(st.integers(0, 1000)), dtype=torch.float32)
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    pick = lambda values, like: torch.tensor(values)[torch.randint(len(values), like.shape, generator=rng)]  # noqa: E731
    decays = data.draw(st.lists(st.sampled_from(DECAYS), min_size=1, max_size=4))
    gains = data.draw(st.lists(st.sampled_from(GAINS), min_size=1, max_size=3))
    kind = data.draw(st.sampled_from(sorted(KEYS)))
    inputs = TokenInputs(
        inputs.q, keys(kind, inputs.k), inputs.v, pick(gains, inputs.beta), pick([*decays, -0.1], inputs.g)
    )
    spec = SPECS[family][0]
    start = torch.randn(1, spec.heads, spec.value_dim, spec.key_dim, generator=rng)
    outputs, states = truth(family, inputs, start)
    state = fresh(family, start)
    y = advance(how, state, inputs)
    tolerance = "growing" if kind == "un-normalised" and max(gains) > 1 else "fp32"
    scale = outputs.norm() + 1e-30  # a state that was forgotten and never written is zero
    assert torch.isfinite(y).all() and (y - outputs).norm() <= TOLERANCES[tolerance][0] * scale
    assert (folded(state) - states[-1]).norm() <= TOLERANCES[tolerance][0] * (states[-1].norm() + 1e-30)


@pytest.mark.parametrize("how", ["step", "scan", "prefill"])
@given(st.data())
@bounded(20)
def test_mamba2_gains_at_their_limits(how, data):
    """Δ from softplus(−30) to softplus(+30) and beyond, where a head's decay e^(A·Δ) underflows to zero."""
    inputs = random_inputs(SPECS["mamba2"][0], 1, 20, data.draw(st.integers(0, 1000)), dtype=torch.float32)
    gains = data.draw(st.lists(st.sampled_from([0.0, 9.4e-14, 1e-6, 1.0, 30.0, 1e4]), min_size=1, max_size=4))
    picked = torch.tensor(gains)[torch.randint(len(gains), inputs.beta.shape)]
    inputs = TokenInputs(inputs.q, inputs.k, inputs.v, picked)
    spec = SPECS["mamba2"][0]
    start = torch.randn(1, spec.heads, spec.value_dim, spec.key_dim)
    outputs, states = truth("mamba2", inputs, start)
    state = fresh("mamba2", start)
    assert close(advance(how, state, inputs), outputs) and close(folded(state), states[-1])


# ---- Δ in transformers' own terms


class Taken:
    """Stands for a running layer: keeps the inputs that a mapping hands over."""

    decoding = False

    def decodes(self, initial):
        return False

    def recur(self, inputs, initial, **options):
        self.inputs, self.options = inputs, options
        return torch.zeros(inputs.v.shape), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [None, 30.0, -30.0])
def test_delta_is_softplus_of_the_biased_input_in_its_own_dtype(bias, dtype):
    dt = torch.tensor([-40.0, -3.0, 0.0, 3.0, 25.0]).to(dtype)
    given_bias = None if bias is None else torch.full((5,), bias)  # parameters may be float32 beside bfloat16 inputs
    expected = F.softplus(dt if bias is None else dt + given_bias.to(dtype))
    assert torch.isfinite(expected).all() and (expected >= 0).all()
    x, bc = torch.ones(1, 1, 5, 3, dtype=dtype), torch.ones(1, 1, 1, 4, dtype=dtype)
    chunk, single = Taken(), Taken()
    _mamba2_chunk(chunk, x, dt.view(1, 1, 5), -torch.ones(5), bc, bc, dt_bias=given_bias, dt_softplus=True)
    _mamba2_step(
        single, None, x[0], dt.view(1, 5, 1).expand(1, 5, 3), -torch.ones(5, 3, 4), bc[0], bc[0],
        dt_bias=None if bias is None else given_bias[:, None].expand(5, 3), dt_softplus=True,
    )  # fmt: skip
    for taken in (chunk, single):
        assert taken.inputs.beta.dtype == dtype and torch.equal(taken.inputs.beta.flatten(), expected)
    _mamba2_chunk(chunk, x, expected.view(1, 1, 5), -torch.ones(5), bc, bc, dt_softplus=False, dt_limit=(0.5, 20.0))
    assert torch.equal(chunk.inputs.beta.flatten(), expected.clamp(0.5, 20.0))


@pytest.mark.parametrize("name", [n for n in ("mamba2", "nemotron_h") if n in TINY_MODELS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [30.0, -30.0])
def test_models_with_extreme_biases_of_delta(name, dtype, bias):
    model = build(name).to(dtype)
    for layer in find_layers(model):
        with torch.no_grad():
            layer.module.dt_bias[::2] = bias
    cuts = tokens(1, 9), *steps(tokens(1, 15, seed=1))
    expected, _ = run(model, *cuts)
    with attach(model, "replay-fp32-w4"):
        got, _ = run(model, *cuts)
    assert torch.isfinite(got).all()
    assert close(got, expected, "model" if dtype == torch.float32 else "bfloat16")


# ---- long


def test_a_hundred_thousand_steps_that_hardly_forget():
    """At decay 1 − 1e-6 every increment stays: in BF16 most would vanish beside the state that they add to."""
    count, decay = 100_000, 1 - 1e-6
    spec = LayerSpec("gdn", 1, 1, 3, 16)
    rng = torch.Generator().manual_seed(0)
    row = torch.randint(16, (1, count), generator=rng)
    k = torch.eye(16)[row][:, :, None]
    v = 1 + 0.5 * torch.randn(1, count, 1, 3, generator=rng)
    # keys are unit vectors and β is small, so each column is a series of its own: S ← (1 − β)·decay·S + β·v
    beta = torch.full((1, count, 1), 1e-5)
    inputs = TokenInputs(k, k, v, beta, torch.full((1, count, 1), math.log(decay)))
    columns, values, gain = row[0].tolist(), v[0, :, 0].double().tolist(), float(beta[0, 0, 0])
    series, last = [[0.0] * 3 for _ in range(16)], [0] * 16
    for t, (column, value) in enumerate(zip(columns, values, strict=True)):  # a column rests between its tokens
        rest = decay ** (t - last[column])
        series[column] = [s * rest + gain * (x - s * rest) for s, x in zip(series[column], value, strict=True)]
        last[column] = t
    rests = torch.tensor([decay ** (count - 1 - t) for t in last], dtype=torch.float64)
    exact = torch.tensor(series, dtype=torch.float64).mT * rests
    errors = {}
    for arm in ("decoupled-nvfp4", "coupled-bf16-w16"):
        state = DecodeState.allocate(spec, parse_arm(arm), 1)
        scan(state, inputs)
        errors[arm] = error(folded(state)[0, 0], exact)
        assert int(state.position) == count
    assert errors["decoupled-nvfp4"] < TOLERANCES["long"][0]
    assert errors["coupled-bf16-w16"] > 100 * TOLERANCES["long"][0], "a check that can't fail"
