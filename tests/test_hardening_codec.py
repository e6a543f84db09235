"""The codec where magnitudes are mixed, memory is strided and writes go in place; test_codec.py has the rest."""

import pytest
import torch
from hardening import bounded
from hypothesis import given
from hypothesis import strategies as st
from test_codec import CASES, check_bound, same

from quantize_state.quant import FORMATS, EncodedState, encode, fake_quantize
from quantize_state.quant.rounding import E4M3

SCALED = [name for name, fmt in FORMATS.items() if fmt.scaling is not None]


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# ---- magnitudes, one per block


@pytest.mark.parametrize("fmt", FORMATS)
@given(
    st.lists(
        st.sampled_from([0.0, -0.0, 1e-45, 1e-40, 2.0**-126, 1e-20, 1e-8, 1e-6, 1e-4, 2.0**-20, 0.01, 1.0, 1e4, 1e30]),
        min_size=2,
        max_size=6,
    ),
    st.integers(0, 100),
)
@bounded(40)
def test_a_magnitude_for_every_block(fmt, magnitudes, seed):
    """Blocks of 16 that differ by any power of ten, zeros among them: within bounds, and zero is zero."""
    blocks = torch.tensor(magnitudes).repeat_interleave(16)
    x = randn(3, len(blocks), seed=seed).clamp(-3, 3) * blocks
    if fmt == "fp16":
        x = x.clamp(-65504, 65504)
    got = fake_quantize(x, fmt)
    check_bound(x, fmt, got)
    assert same(got, encode(x, fmt).decode())
    zero = x == 0
    assert not got[zero].any()
    if fmt != "int8":
        assert torch.equal(torch.signbit(got), torch.signbit(x))


@pytest.mark.parametrize("fmt, rule", CASES)
def test_a_zero_block_among_tiny_ones(fmt, rule):
    """A tensor of magnitude 1e-6, one block of it all zero, of either sign: scales stay finite and above zero."""
    for zero in (0.0, -0.0):
        x = randn(2, 4, 64) * 1e-6
        x[:, :, 16:32] = zero
        state = encode(x, fmt, rule)
        back = state.decode()
        assert not back[:, :, 16:32].any() and torch.isfinite(back).all()
        assert all(bool(((t.float() > 0) & t.float().isfinite()).all()) for t in state.scales.values())
        sizes = (back - x).norm() / x.norm()
        assert sizes < {"fp16": 0.1, "mxfp4": 0.3, "nvfp4": 0.15}.get(fmt, 0.05)


# ---- NVFP4's scales, every one of them


def test_every_block_scale_at_a_global_scale_of_one():
    """Tile amax 2688 makes s2 = 1; blocks with amax 6·s for every E4M3 number s, 2**-9 … 448, decode exactly."""
    scales = torch.arange(1, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6])
    x = (scales[:, None] * codes).view(1, -1)
    state = encode(x, "nvfp4")
    assert state.scales["global"].item() == 1.0
    assert torch.equal(state.scales["block"].float()[0], scales)
    assert torch.equal(state.decode(), x)


def test_block_scales_between_two_numbers():
    """Midpoints of neighbouring E4M3 numbers, and the floats around them, go to the even one; below the least, up."""
    numbers = torch.arange(0, 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (numbers[1:] + numbers[:-1]) / 2
    bits = middles.view(torch.int32)
    for offset, expected in ((-1, numbers[:-1]), (1, numbers[1:]), (0, None)):
        raw = (bits + offset).view(torch.float32)
        lower_is_even = torch.arange(len(raw)) % 2 == 0
        want = torch.where(lower_is_even, numbers[:-1], numbers[1:]) if expected is None else expected
        got = E4M3.nearest_(raw.clone(), low=2.0**-9)
        assert torch.equal(got, want.clamp(min=2.0**-9)), offset


def test_saturation_into_e4m3_in_every_format_that_has_it():
    """464 is the tie to 448, 465 would be 480; all go to 448, none to NaN, whatever scale they meet."""
    values = torch.tensor([448.0, 464.0, 465.0, 480.0, 500.0, 57344.0])
    assert E4M3.nearest_(values.clone()).tolist() == [448.0] * 6
    x = torch.zeros(6, 32)
    x[:, 0], x[:, 1] = values, 448.0
    for fmt in ("mxfp8", "fp8_e4m3"):
        back = fake_quantize(x, fmt)
        assert torch.isfinite(back).all() and not encode(x, fmt).codes.view(torch.uint8).eq(0x7F).any()
    assert encode(x[:5], "mxfp8").decode()[:, 0].tolist() == [448.0] * 5


# ---- memory


@pytest.mark.parametrize("fmt", FORMATS)
def test_codes_and_scales_with_strides(fmt):
    """Tensors as a serving engine's pool holds them: gaps between slots, every other row, transposed leading axes."""
    x = randn(4, 3, 5, 64)
    whole = encode(x, fmt)

    def spread(t):
        raw = t.contiguous().view(torch.uint8)
        pool = torch.full((t.shape[0], 2, *raw.shape[1:]), 0x5A, dtype=torch.uint8)
        pool[:, 1] = raw
        return pool.view(t.dtype)[:, 1]

    def crossed(t):
        raw = t.view(torch.uint8) if t.element_size() == 1 else t
        return raw.transpose(0, 1).contiguous().transpose(0, 1).view(t.dtype)

    for lay in (spread, crossed):
        codes, scales = lay(whole.codes), {n: lay(t) for n, t in whole.scales.items()}
        assert not codes.is_contiguous()
        strided = EncodedState(codes, scales, fmt, "amax", None, whole.shape)
        assert same(strided.decode(), whole.decode())
        assert same(strided[1:3, ::2].decode(), whole.decode()[1:3, ::2])
        assert same(strided[torch.tensor([2, 0])].decode(), whole.decode()[[2, 0]])
        assert strided.nbytes == whole.nbytes


@pytest.mark.parametrize("fmt", FORMATS)
@given(st.data())
@bounded(25)
def test_writes_in_place_reach_the_original_and_nothing_else(fmt, data):
    """Through views (slices) too, into pools with strides, from sources with strides."""
    pool = encode(randn(6, 4, 3, 40), fmt)
    addresses = {n: t.data_ptr() for n, t in pool.tensors().items()}
    want = pool.decode()
    new = encode(randn(6, 4, 3, 40, seed=1), fmt)
    start, step = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 3))
    view, theirs = pool[start::step], new[start::step]
    heads = data.draw(st.sampled_from([slice(None), slice(1, 3), slice(None, None, 2), 2]))
    index = (slice(None), heads)
    view.write_(index, theirs[index])
    want[start::step, heads] = new.decode()[start::step, heads]
    assert same(pool.decode(), want)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True)))
    pool.write_(rows, new[:1])
    want[rows] = new.decode()[:1]
    assert same(pool.decode(), want)
    assert {n: t.data_ptr() for n, t in pool.tensors().items()} == addresses


@pytest.mark.parametrize("fmt", SCALED)
def test_a_state_past_two_billion_elements_is_shaped_without_memory(fmt):
    """Offsets on the meta device, where nothing is allocated: bytes and shapes of 2**33 elements."""
    slots = 1 << 15
    one = encode(torch.zeros(1, 16, 128, 128), fmt)
    huge = EncodedState(
        one.codes.expand(slots, *one.codes.shape[1:]),
        {n: t.expand(slots, *t.shape[1:]) for n, t in one.scales.items()},
        fmt, "amax", None, torch.Size((slots, 16, 128, 128)),
    )  # fmt: skip
    assert huge.nbytes == slots * one.nbytes > 1 << 32
    assert same(huge[slots - 1 :].decode(), one.decode()) and huge[torch.tensor([-1])].shape == one.shape
    with pytest.raises(IndexError):
        huge[slots]
