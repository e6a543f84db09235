"""The decode kernels under Triton's interpreter where inputs, states and batches are odd; more in test_kernels.py."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import math

import pytest
import torch
from hardening import error
from kernel_cases import SPECS, make_state, pools, token

from quantize_state.kernels import sequence
from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.step import step as reference_step
from quantize_state.quant.codec import encode

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

TOLERANCES = {
    # name: (value, why the result is not exact)
    "fp32": (4e-6, "float32 sums in another order"),
    "half": (3e-3, "block sums in float16, which the interpreter rounds twice per product"),
    "gates": (3e-5, "identical keys with gains of 2: the triangular system's condition number is 3**3"),
}


def both(state, inputs, slots=None):
    """One step by the reference on a clone and by the kernels: (expected, ours, clone)."""
    clone = state.clone()
    expected = reference_step(clone, inputs, slots)
    return expected, sequence.step(state, inputs, slots), clone


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("family", SPECS)
def test_a_batch_of_padding_alone_changes_nothing(family):
    state = make_state(family, window=4, slots=3, fills=[0, 3, 1])
    before = state.clone()
    y = sequence.step(state, token(family, 2), torch.tensor([-1, -1]))
    assert not y.any()
    assert all(same_bytes(pool, pools(before)[name]) for name, pool in pools(state).items())
    assert torch.equal(state.cursor, before.cursor) and torch.equal(state.position, before.position)


@pytest.mark.parametrize("family", SPECS)
def test_a_window_of_one_flushes_at_every_token(family):
    state = make_state(family, window=1, slots=2, fills=[0, 0])
    for t in range(2):
        expected, y, clone = both(state, token(family, 2, seed=t))
        assert error(y, expected) < TOLERANCES["fp32"][0]
        assert error(state.checkpoint.codes, clone.checkpoint.codes) < TOLERANCES["fp32"][0]
        assert not state.cursor.any()


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("beta", [0.0, 1.0, 2.0])
def test_decays_mixed_over_heads_and_channels(family, beta):
    """0, −1e-6, −5, −20, −100 and −Inf side by side, identical keys; one row reads, one flushes."""
    state = make_state(family, read="fp8_e4m3", window=4, slots=2, fills=[2, 3], dtype=torch.float32)
    raw = token(family, 2, dtype=torch.float32)
    decays = torch.tensor([0.0, -1e-6, -5.0, -20.0, -100.0, -math.inf])
    rng = torch.Generator().manual_seed(int(beta))
    pick = lambda t: decays[torch.randint(6, t.shape, generator=rng)]  # noqa: E731
    for slot, fill in ((0, 2), (1, 3)):
        state.ring["k"][slot, :fill] = raw.k[slot]
        state.ring["beta"][slot, :fill] = beta
        state.ring["g"][slot, :fill] = pick(state.ring["g"][slot, :fill])
    inputs = TokenInputs(raw.q, raw.k, raw.v, torch.full_like(raw.beta, beta), pick(raw.g))
    expected, y, clone = both(state, inputs)
    scale = max(float(expected.double().norm()), 1e-20)
    assert float((y - expected).norm()) <= TOLERANCES["gates"][0] * scale
    difference = (state.checkpoint.codes - clone.checkpoint.codes).norm()
    assert float(difference) <= TOLERANCES["gates"][0] * float(clone.checkpoint.codes.norm())


def test_mamba2_gains_from_nothing_to_everything():
    """Δ of softplus(−30) and softplus(+30) and beyond, where a head's decay underflows to zero."""
    state = make_state("mamba2", read="fp8_e4m3", window=4, slots=2, fills=[2, 3], dtype=torch.float32)
    raw = token("mamba2", 2, dtype=torch.float32)
    gains = torch.tensor([9.4e-14, 30.0, 1e4])
    for slot, fill in ((0, 2), (1, 3)):
        state.ring["beta"][slot, :fill] = gains[torch.arange(6) % 3]
    inputs = TokenInputs(raw.q, raw.k, raw.v, gains[(torch.arange(6) + 1) % 3].expand_as(raw.beta).contiguous())
    expected, y, clone = both(state, inputs)
    assert error(y, expected) < TOLERANCES["fp32"][0]
    assert error(state.checkpoint.codes, clone.checkpoint.codes) < TOLERANCES["fp32"][0]


@pytest.mark.parametrize("read", ["nvfp4", "fp8_e4m3", "mxfp4"])
def test_a_state_with_zero_and_tiny_blocks(read):
    """Heads of zeros, of 1e-6 with a zero block, and of one magnitude per block: the copy is the codec's."""
    state = make_state("gdn", read=read, window=4, slots=1, fills=[3], dtype=torch.float32)
    tile = state.checkpoint.codes
    tile[:, 0] = 0.0
    tile[:, 1] *= 1e-6
    tile[:, 1, :, 16:32] = 0.0
    tile[:, 2] *= torch.tensor([1.0, 2.0**-20, 1e-4, 1e-8]).repeat_interleave(16)
    for name, ring in state.ring.items():
        ring.fill_(0.0)
        assert not ring.any(), name
    zero = token("gdn", 1, dtype=torch.float32).map(torch.zeros_like)  # the fold keeps what is there
    y = sequence.step(state, zero)
    assert not y.any()
    again = encode(state.checkpoint.codes, read)
    assert all(same_bytes(t, state.copy.tensors()[name]) for name, t in again.tensors().items())
    assert torch.isfinite(state.copy.decode()).all() and not state.copy.decode()[:, 0].any()


def test_nan_and_inf_in_a_token_show_at_once_and_are_named_at_the_flush():
    for bad in (math.nan, math.inf):
        state = make_state("gdn", window=2, slots=2, fills=[0, 0], dtype=torch.float32)
        workspace = sequence.Workspace.allocate(state, 2, half=False)
        inputs = token("gdn", 2, dtype=torch.float32)
        inputs.v[1, 0, 2, 0] = bad
        y = sequence.step(state, inputs, workspace=workspace)
        assert not torch.isfinite(y[1, 0, 2]).all() and torch.isfinite(y[0]).all()
        sequence.step(state, token("gdn", 2, dtype=torch.float32, seed=1), workspace=workspace)
        with pytest.raises(ValueError, match="slot 1, head 2"):
            workspace.check_finite(state)
        assert torch.isfinite(state.checkpoint.codes[0]).all()
