"""The standard FP32 kernel and the renewal of the read copy, run by Triton's interpreter."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from kernel_cases import SPECS, as_bytes, gaps_untouched, make_far, make_state, pools, token
from recurrence import random_inputs, recurrence

from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.fold.renew import renew
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.shapes import SHAPES, find_shape
from quantize_state.kernels.standard.reference import standard
from quantize_state.kernels.standard.reference import step as reference_standard
from quantize_state.kernels.standard.triton import step, unsupported_layer
from quantize_state.kernels.step import step as reference_step
from quantize_state.quant.codec import encode
from quantize_state.quant.errors import InvalidValueError
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import STALE, DecodeState

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FP32 = 5e-7
"""Relative error of FP32 arithmetic against float64: sums of 64 products, one rounding of the state per token."""
NANO = LayerSpec("mamba2", heads=4, key_heads=2, value_dim=80, key_dim=32)
"""A head dimension that no tile of rows divides."""
SLOTS = [3, -1, 1, 4, 0]


def error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("family", SPECS)
def test_the_reference_is_the_recurrence(family):
    spec, rate = SPECS[family]
    inputs = random_inputs(spec, 2, 3, 1)
    state = torch.randn(2, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    expected, states = recurrence(spec, inputs, state, rate)
    ours = state.clone()
    for t in range(3):
        y = standard(spec, ours, inputs.slice(t, t + 1), rate)
        assert error(y, expected[:, t]) < 1e-14 and error(ours, states[t]) < 1e-14


@pytest.mark.parametrize("family", SPECS)
def test_one_token(family):
    """Output and state; padding, a slot that no row names, rings and copies stay as they are; cursors say STALE."""
    state = make_state(family, read="nvfp4", window=4, fills=[0] * 5)
    before, inputs = state.clone(), token(family, len(SLOTS))
    live = [b for b, s in enumerate(SLOTS) if s >= 0]
    rows = torch.tensor([SLOTS[b] for b in live])
    expected_state = state.checkpoint.codes[rows].double()
    expected = standard(state.spec, expected_state, inputs.rows_at(torch.tensor(live)), state.decay_rate)
    out = torch.full((len(SLOTS), 1, state.spec.heads, state.spec.value_dim), float("nan"))
    status = torch.zeros(1, dtype=torch.int64)
    step(state, inputs, torch.tensor(SLOTS), out=out, status=status)
    assert error(out[live, 0], expected) < FP32 and error(state.checkpoint.codes[rows], expected_state) < FP32
    assert out[1].isnan().all(), "a padded row was written"
    assert state.position.tolist() == [101, 101, 100, 101, 101] and int(status) == 0
    assert state.cursor.tolist() == [STALE, STALE, 0, STALE, STALE]
    for name, pool in pools(state).items():
        touched = [2] if name.startswith("checkpoint") else range(5)
        for slot in touched:
            assert torch.equal(as_bytes(pool[slot]), as_bytes(pools(before)[name][slot])), (name, slot)
        assert gaps_untouched(pool), name


@pytest.mark.parametrize("family", SPECS)
def test_it_is_a_window_of_one(family):
    """Several tokens, against the reference step of policy window 1; gains and decays of one state feed the next."""
    state = make_state(family, read=None, window=1, fills=[0] * 2, slots=2)
    clone = state.clone()
    for seed in range(4):
        inputs = token(family, 2, seed=seed)
        expected, ours = reference_step(clone, inputs), step(state, inputs)
        assert error(ours, expected) < 4 * FP32 and error(state.checkpoint.codes, clone.checkpoint.codes) < 4 * FP32
    assert torch.equal(state.position, clone.position)


def test_head_dimensions_that_are_no_power_of_two():
    rate = -torch.tensor([0.1, 1.0, 2.0, 9.0])
    state = DecodeState.allocate(NANO, StatePolicy(window=1), 2, decay_rate=rate)
    state.renew_(torch.randn(2, 4, 80, 32))
    inputs, exact = random_inputs(NANO, 2, 1, 3, dtype=torch.float32), state.checkpoint.codes.double()
    expected = standard(NANO, exact, inputs, rate)
    assert error(step(state, inputs)[:, 0], expected) < FP32 and error(state.checkpoint.codes, exact) < FP32


def test_strided_tokens_skip_and_gate():
    state = make_state("mamba2", read=None, window=4, fills=[0, 0], slots=2)
    t = token("mamba2", 2)
    wide = TokenInputs(*(None if x is None else torch.cat([x, x + 1], 1)[:, :1] for x in vars(t).values()))
    assert wide.v.stride(0) == 2 * t.v.stride(0)
    rng = torch.Generator().manual_seed(5)
    z, d = torch.randn(t.v.shape, generator=rng), torch.randn(state.spec.heads, generator=rng)
    y = standard(state.spec, state.checkpoint.codes.double(), t, state.decay_rate)[:, None]
    expected = (y + d[:, None] * t.v) * torch.nn.functional.silu(z)
    assert error(step(state, wide, skip=(t.v.contiguous(), d), gate=z), expected) < FP32


def test_bfloat16_outputs_are_the_rounded_ones():
    state = make_state("gdn", read=None, window=4, fills=[0], slots=1)
    inputs, other = token("gdn", 1), state.clone()
    half = torch.empty(1, 1, state.spec.heads, state.spec.value_dim, dtype=torch.bfloat16)
    step(state, inputs, out=half)
    assert error(half, step(other, inputs)) < 2**-7  # the interpreter truncates


def test_slots_beyond_two_billion_elements():
    state = make_state("gdn", window=4, slots=4, fills=[0] * 4)
    far, inputs, slots = make_far(state), token("gdn", 2), torch.tensor([3, 2])
    assert torch.equal(step(far, inputs, slots), step(state, inputs, slots))
    for s in (far, state):
        renew(s, slots)
    for name, pool in pools(state).items():
        if not name.startswith("ring"):  # which hold NaN
            assert torch.equal(as_bytes(pools(far)[name][2:]), as_bytes(pool[2:])), name


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_state_that_is_not_finite_is_named_and_bad_queries_are_not(value):
    state = make_state("gdn", read=None, window=4, fills=[0, 0], slots=2)
    inputs, status = token("gdn", 2), torch.zeros(1, dtype=torch.int64)
    inputs.q[0, 0, 0, 0] = value
    step(state, inputs, status=status)
    assert int(status) == 0
    state.checkpoint.codes[1, 2, 3, 4] = value
    step(state, token("gdn", 2), status=status)
    assert int(status) == 1 + 1 * state.spec.heads + 2


@pytest.mark.parametrize(
    "policy",
    [{"read": f} for f in FORMATS]
    + [{"read": "nvfp4", "scale_rule": rule} for rule in ("four_over_six", "mse")]
    + [{"read": "nvfp4", "rotation": "hadamard"}]
    + [{"read": "nvfp4", "balanced": True}, {"read": "fp8_e4m3", "rotation": "hadamard", "balanced": True}],
    ids=str,
)
def test_renewing_gives_the_copy_of_the_checkpoint(policy):
    state = make_state("kda", window=4, slots=3, fills=[0] * 3, **policy)
    old = state.clone()
    reference_standard(state, token("kda", 3), torch.arange(3))
    renew(state, torch.tensor([2, -1, 0], dtype=torch.int32))
    expected = encode(state.checkpoint.codes, *state.copy.how)
    for name, t in expected.tensors().items():
        ours = state.copy.tensors()[name]
        for slot, tensor in ((0, t), (2, t), (1, old.copy.tensors()[name])):
            assert torch.equal(as_bytes(ours[slot]), as_bytes(tensor[slot])), (name, slot)


def test_what_it_refuses():
    spec = SPECS["gdn"][0]
    assert unsupported_layer(spec, "fp32") is None
    assert "bf16" in unsupported_layer(spec, "bf16")
    assert "48" in unsupported_layer(LayerSpec("gdn", 1, 1, 16, 48), "fp32")
    state = DecodeState.allocate(spec, StatePolicy(checkpoint="bf16"), 1)
    with pytest.raises(InvalidValueError, match="bf16"):
        step(state, token("gdn", 1))
    with pytest.raises(InvalidValueError, match="given 2"):
        step(make_state("gdn", slots=1, fills=[0]), random_inputs(spec, 1, 2, 0, dtype=torch.float32))


def test_shapes_by_name_or_spelt():
    assert find_shape("ultra") == ("nemotron-3-ultra", SHAPES["nemotron-3-ultra"])
    assert find_shape("32/16x128x128", "gdn")[1] == SHAPES["qwen3.5-4b"]
    assert find_shape("12x128x128", "kda")[1] == SHAPES["kimi-k3-rank"]
    assert find_shape("128/8x64x128", "mamba2")[1] == SHAPES["nemotron-3-super"]
    for text, family, says in (
        ("qwen", None, "unknown shape 'qwen'"),
        ("qwen3.5-4b", "kda", "is gdn, not kda"),
        ("4x64x128", None, "needs a family"),
        ("4x64x128", "rwkv", "unknown layer family 'rwkv'"),
        ("4/3x64x128", "gdn", "multiple of key_heads"),
    ):
        with pytest.raises(InvalidValueError, match=says):
            find_shape(text, family)
