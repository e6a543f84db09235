"""The window algebra against the step-by-step recurrence of docs/window-algebra.md in float64."""

import pytest
import torch
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.kernels.fold.reference import fold
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.readout.reference import readout
from quantize_state.kernels.window.reference import fold_terms, make_window, read_terms
from quantize_state.quant.spec import LayerSpec

RESIDUAL = 1e-12  # float64 rounding of a few hundred products of size one


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("length", [1, 2, 7, 16])
def test_readout_and_fold_equal_the_recurrence(family, length):
    spec, rate = SPECS[family]
    inputs = random_inputs(spec, rows=3, tokens=length, seed=length)
    state = torch.randn(3, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    outputs, states = recurrence(spec, inputs, state, rate)
    window = make_window(spec, inputs, decay_rate=rate, dtype=torch.float64)
    y = readout(state, read_terms(window), window.v).transpose(1, 2)
    assert (y - outputs).abs().max() < RESIDUAL
    assert (fold(state, fold_terms(window), window.v) - states[-1]).abs().max() < RESIDUAL


@pytest.mark.parametrize("family", SPECS)
def test_unused_rows_may_hold_anything(family):
    """Rows of a batch at different fills; the unused part of the ring is NaN."""
    spec, rate = SPECS[family]
    length = 8
    inputs = random_inputs(spec, rows=length, tokens=length, seed=1)
    used = torch.arange(1, length + 1)
    unused = torch.arange(length)[None] >= used[:, None]
    poisoned = inputs.map(lambda t: t.masked_fill(unused.reshape(unused.shape + (1,) * (t.dim() - 2)), float("nan")))
    state = torch.randn(length, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    window = make_window(spec, poisoned, decay_rate=rate, used=used, dtype=torch.float64)
    y = readout(state, read_terms(window, used[:, None] - 1), window.v)[:, :, 0]
    folded = fold(state, fold_terms(window), window.v)
    for row in range(length):
        one = TokenInputs(*(None if t is None else t[row : row + 1, : row + 1] for t in vars(inputs).values()))
        outputs, states = recurrence(spec, one, state[row : row + 1], rate)
        assert (y[row] - outputs[0, -1]).abs().max() < RESIDUAL
        assert (folded[row] - states[-1][0]).abs().max() < RESIDUAL


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("decay", [0.0, -1e-6, -20.0, -100.0, float("-inf")])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_extreme_gates(family, decay, beta):
    """Constant gates at their limits, with identical unit keys: the triangular system at its worst."""
    spec, _ = SPECS[family]
    inputs = random_inputs(spec, rows=1, tokens=16, seed=3)
    k = inputs.k[:, :1].expand_as(inputs.k) / inputs.k[:, :1].norm(dim=-1, keepdim=True)
    g = torch.full_like(inputs.g, 0.0)
    g[:, 5] = decay
    inputs = TokenInputs(inputs.q, k, inputs.v, torch.full_like(inputs.beta, beta), g)
    state = torch.randn(1, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    outputs, states = recurrence(spec, inputs, state, None)
    window = make_window(spec, inputs, dtype=torch.float64)
    y = readout(state, read_terms(window), window.v).transpose(1, 2)
    assert torch.isfinite(y).all()
    assert (y - outputs).abs().max() < RESIDUAL
    assert (fold(state, fold_terms(window), window.v) - states[-1]).abs().max() < RESIDUAL


def test_l2norm_and_scale_belong_to_the_window():
    raw = LayerSpec("gdn", 4, 2, 8, 16, qk_l2norm=True, query_scale=16**-0.5)
    plain = LayerSpec("gdn", 4, 2, 8, 16)
    inputs = random_inputs(raw, rows=2, tokens=5, seed=4)
    unit = lambda t: t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6)  # noqa: E731
    prepared = TokenInputs(unit(inputs.q) * 16**-0.5, unit(inputs.k), inputs.v, inputs.beta, inputs.g)
    ours = make_window(raw, inputs, dtype=torch.float64)
    theirs = make_window(plain, prepared, dtype=torch.float64)
    assert torch.equal(ours.q, theirs.q) and torch.equal(ours.k, theirs.k)
