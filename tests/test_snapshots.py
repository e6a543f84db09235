"""The baseline that writes a state for every draft, under the interpreter, against the recurrence in float64."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from kernel_cases import SPECS, as_bytes, gaps_untouched, padded
from recurrence import random_inputs

from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.standard.reference import standard
from quantize_state.kernels.standard.snapshots import verify
from quantize_state.quant.errors import InvalidValueError
from quantize_state.quant.spec import LayerSpec

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FP32 = 1e-6
"""Relative error of FP32 arithmetic against float64 after three tokens: a rounding of the state for each."""


def error(ours, exact):
    return float((ours.double() - exact).norm() / exact.norm())


def case(family, rows, tokens, seed=1, dtype=torch.bfloat16):
    t = random_inputs(SPECS[family][0], rows, tokens, seed, dtype=torch.float32)
    return TokenInputs(t.q.to(dtype), t.k.to(dtype), t.v.to(dtype), t.beta, t.g)


@pytest.mark.parametrize("family", SPECS)
def test_every_token_has_its_state(family):
    """Rows that go on from slots of their own, one that is padding, a target that is none, slots that no row names."""
    spec, rate = SPECS[family]
    states = torch.randn(9, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(0))
    pool = padded(states, 24)
    inputs = case(family, 3, 3)
    source = torch.tensor([4, -1, 2], dtype=torch.int32)
    targets = torch.tensor([[4, 0, 7], [1, 1, 1], [6, -1, 5]], dtype=torch.int32)
    out = torch.full((3, 3, spec.heads, spec.value_dim), float("nan"))
    verify(spec, pool, inputs, source, targets, decay_rate=rate, out=out)
    for b in (0, 2):
        exact = states[int(source[b])].double()[None]
        for t in range(3):
            y = standard(spec, exact, inputs.rows_at(torch.tensor([b])).slice(t, t + 1), rate)
            assert error(out[b, t], y[0]) < FP32, (b, t)
            if targets[b, t] >= 0:
                assert error(pool[int(targets[b, t])], exact[0]) < FP32, (b, t)
    assert out[1].isnan().all(), "a padded row was written"
    for slot in (1, 2, 3, 8):
        assert torch.equal(as_bytes(pool[slot]), as_bytes(states[slot])), f"slot {slot} was written"
    assert gaps_untouched(pool)


def test_going_on_from_the_accepted_token():
    """Verification after verification, each from the slot of the last accepted token, is the plain recurrence."""
    spec, rate = SPECS["gdn"]
    pool = torch.randn(6, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(0))
    exact = pool[[0, 3]].double()
    targets = torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32)
    source = torch.tensor([0, 3], dtype=torch.int32)
    for i, accepted in enumerate(([1, 3], [2, 1], [3, 2])):
        inputs = case("gdn", 2, 3, seed=i)
        y = verify(spec, pool, inputs, source, targets)
        for b, count in enumerate(accepted):
            for t in range(count):
                one = inputs.rows_at(torch.tensor([b])).slice(t, t + 1)
                expected = standard(spec, exact[b : b + 1], one, rate)
                assert error(y[b, t], expected[0]) < 4 * FP32, (i, b, t)
        source = targets.gather(1, torch.tensor(accepted)[:, None] - 1)[:, 0]


def test_what_it_refuses():
    spec, _ = SPECS["gdn"]
    inputs, pool = case("gdn", 2, 3), torch.zeros(6, spec.heads, spec.value_dim, spec.key_dim)
    slots = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(InvalidValueError, match=r"\[2, 3\]"):
        verify(spec, pool, inputs, slots, slots)
    with pytest.raises(InvalidValueError, match="48"):
        verify(LayerSpec("gdn", 1, 1, 16, 48), pool, inputs, slots, slots)
