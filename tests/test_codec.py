"""What encode, fake_quantize, EncodedState and rotate promise, format by format, also for input that is odd."""

import copy
import math
import pickle
import subprocess
import sys

import pytest
import torch

from quantize_state import quant
from quantize_state.quant import (
    FORMATS,
    ROTATIONS,
    EncodedState,
    InvalidValueError,
    NonFiniteStateError,
    derive_seeds,
    encode,
    fake_quantize,
    rotate,
)
from quantize_state.quant.rotation import blocks

CASES = [(f, r) for f, fmt in FORMATS.items() for r in (fmt.scale_rules if fmt.scaling else ["amax"])]
ROUNDING = [f for f, fmt in FORMATS.items() if fmt.stochastic]
BLOCKED = ["mxfp8", "nvfp4", "mxfp4"]

TOLERANCES = {
    # name: (value, why the result is not exact)
    "rotation": (1e-6, "float32 rounding of sums of up to 128 products, relative to the vector's length"),
}

# |decoded − x| <= a·|x| + b·(largest magnitude that shares x's scale) + c·2**-126, with amax scales.
# 2**-126 is the least row scale, tile scale and E8M0 scale; docs/formats.md derives the bounds.
BOUNDS = {
    "fp32": (0.0, 0.0, 0.0),
    "bf16": (2.0**-8, 0.0, 2.0**-8),
    "fp16": (2.0**-11, 0.0, 2.0**101),
    "fp8_e4m3": (1 / 17, 2.0**-10 / 448, 2.0**-10),
    "int8": (0.0, 1 / 254, 1 / 2),
    "mxfp8": (1 / 8, 2.0**-18, 2.0**-10),
    "nvfp4": (0.0, 0.0, 0.0),  # in check_bound
    "mxfp4": (0.0, 1 / 4, 1 / 4),
}


def randn(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), **kwargs)


def as_bits(t):
    return t.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def same(a, b):
    """Bit for bit, for tensors and encoded states."""
    if isinstance(a, EncodedState):
        assert (a.format, a.scale_rule, a.rotation, a.shape) == (b.format, b.scale_rule, b.rotation, b.shape)
        return a.tensors().keys() == b.tensors().keys() and all(same(t, b.tensors()[n]) for n, t in a.tensors().items())
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(as_bits(a), as_bits(b))


def shared_amax(x, fmt):
    """For each element of ``x`` the largest magnitude among those that share its scale."""
    block = FORMATS[fmt].block or (x.shape[-1] if FORMATS[fmt].scaling else 1)
    padded = torch.nn.functional.pad(x.abs(), (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    return padded.amax(-1, keepdim=True).expand_as(padded).flatten(-2)[..., : x.shape[-1]]


def check_bound(x, fmt, got=None):
    got = fake_quantize(x, fmt) if got is None else got
    assert torch.isfinite(got).all()
    a, b, c = BOUNDS[fmt]
    bound = (a * x.double().abs() + b * shared_amax(x, fmt).double()) * (1 + 1e-6) + c * 2.0**-126
    if fmt == "nvfp4":
        amax = shared_amax(x, fmt).double()
        s2 = (x.abs().amax((-2, -1), keepdim=True).double() / 2688).clamp(min=2.0**-126)
        share = torch.where(amax >= 6 * 2.0**-6 * s2 * (1 + 1e-6), 3 / 17, 1 / 3)  # a normal, a subnormal scale
        bound = torch.where(amax >= 6 * 2.0**-9 * s2, share * amax, 2.0**-9 * s2) * (1 + 1e-6)
    assert ((got.double() - x.double()).abs() <= bound).all(), fmt


# ---- encode, decode, fake_quantize


@pytest.mark.parametrize("k", [128, 1, 2, 15, 17, 60, 100, 127])
@pytest.mark.parametrize("fmt, rule", CASES)
def test_fake_quantize_is_encode_then_decode(fmt, rule, k):
    x = randn(3, 2, 5, k, seed=k)
    seeds = torch.arange(6).view(3, 2)
    for rotation in (None, *ROTATIONS):
        for options in ({}, {"seeds": seeds}) if FORMATS[fmt].stochastic else ({},):
            state = encode(x, fmt, rule, rotation, **options)
            assert state.shape == x.shape == state.decode().shape
            for unrotate in (True, False):
                fake = fake_quantize(x, fmt, rule, rotation, unrotate=unrotate, **options)
                assert same(state.decode(unrotate=unrotate), fake)
            assert same(state.decode(torch.bfloat16), fake_quantize(x, fmt, rule, rotation, **options).bfloat16())


def test_layout_and_bytes():
    """Shapes, dtypes and bytes as docs/formats.md has them; K = 40 needs padding."""
    layouts = {
        "fp32": (torch.float32, 40, {}),
        "bf16": (torch.bfloat16, 40, {}),
        "fp16": (torch.float16, 40, {}),
        "fp8_e4m3": (torch.float8_e4m3fn, 40, {"row": (torch.float32, (3, 2, 5))}),
        "int8": (torch.int8, 40, {"row": (torch.float32, (3, 2, 5))}),
        "mxfp8": (torch.float8_e4m3fn, 64, {"block": (torch.float8_e8m0fnu, (3, 2, 5, 2))}),
        "mxfp4": (torch.uint8, 32, {"block": (torch.float8_e8m0fnu, (3, 2, 5, 2))}),
        "nvfp4": (
            torch.uint8,
            24,
            {"block": (torch.float8_e4m3fn, (3, 2, 5, 3)), "global": (torch.float32, (3, 2))},
        ),
    }
    for fmt, (dtype, width, scales) in layouts.items():
        state = encode(randn(3, 2, 5, 40), fmt)
        assert (state.codes.dtype, state.codes.shape) == (dtype, (3, 2, 5, width))
        assert {n: (t.dtype, tuple(t.shape)) for n, t in state.scales.items()} == scales
        want = 30 * width * dtype.itemsize + sum(math.prod(s) * d.itemsize for d, s in scales.values())
        assert state.nbytes == want == sum(t.untyped_storage().nbytes() for t in state.tensors().values())
        bytes_per_element = encode(randn(1, 1, 128, 128), fmt).nbytes / 128**2
        assert math.isclose(bytes_per_element, FORMATS[fmt].bytes_per_element, abs_tol=4 / 128**2)
    assert {f: FORMATS[f].bytes_per_element for f in layouts} == {
        "fp32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1.03125, "int8": 1.03125, "mxfp8": 1.03125, "mxfp4": 0.53125,
        "nvfp4": 0.5625,
    }  # fmt: skip
    assert {f: (FORMATS[f].bits, FORMATS[f].block) for f in ("int8", "mxfp8", "nvfp4")} == {
        "int8": (8, 0), "mxfp8": (8, 32), "nvfp4": (4, 16),
    }  # fmt: skip


def test_e2m1_is_packed_low_nibble_first():
    x = torch.tensor([[0.5, -6.0, 1.0, 0, 1.5, 2, 3, 4, -0.5, -1, -1.5, -2, -3, -4, 6, 0]]) * 448
    assert encode(x, "nvfp4").codes[0].tolist() == [0xF1, 0x02, 0x43, 0x65, 0xA9, 0xCB, 0xED, 0x07]


@pytest.mark.parametrize("fmt", FORMATS)
def test_strides_do_not_matter(fmt):
    base = randn(6, 4, 40, 36)
    views = {
        "every other": base[::2, :, ::2, ::2],
        "transposed": base.mT,
        "permuted": base.permute(2, 1, 0, 3),
        "offset": base[1:, 2:, 3:, 5:],
        "expanded": base[:1, :1].expand(5, 3, 40, 36),
        "expanded rows": base[:, :, :1].expand(6, 4, 7, 36),
        "expanded columns": base[..., :1].expand(6, 4, 40, 17),
    }
    for name, x in views.items():
        before = x.clone()
        want = x.contiguous()
        assert same(encode(x, fmt, rotation="hadamard16"), encode(want, fmt, rotation="hadamard16")), name
        assert same(fake_quantize(x, fmt), fake_quantize(want, fmt)), name
        assert torch.equal(x, before), name


@pytest.mark.parametrize("fmt", FORMATS)
def test_the_input_is_neither_changed_nor_kept(fmt):
    x = randn(2, 3, 4, 32)
    state, fake = encode(x, fmt), fake_quantize(x, fmt)
    decoded = state.decode()
    before = x.clone()
    first = state.clone()
    x.zero_()
    fake.fill_(7)
    decoded.fill_(7)
    assert same(state, first)
    assert same(encode(before, fmt), first)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_tile_does_not_depend_on_its_batch(fmt):
    """Also past the chunks that fake_quantize works in: 70 tiles of 16 · 128."""
    x = randn(35, 2, 16, 128) * torch.logspace(-6, 6, 35).view(35, 1, 1, 1)
    for rotation in (None, "hadamard"):
        state, fake = encode(x, fmt, rotation=rotation), fake_quantize(x, fmt, rotation=rotation)
        for i, j in ((0, 0), (17, 1), (34, 1)):
            assert same(state[i, j], encode(x[i, j], fmt, rotation=rotation))
            assert same(fake[i, j], fake_quantize(x[i, j], fmt, rotation=rotation))


@pytest.mark.parametrize("lead", [(0,), (0, 4), (3, 0), ()])
def test_empty_batches_and_single_tiles(lead):
    for fmt, rule in CASES:
        for rotation in (None, "hadamard"):
            x = torch.ones(*lead, 6, 40)
            state = encode(x, fmt, rule, rotation)
            assert state.shape == x.shape == state.decode().shape == fake_quantize(x, fmt, rule, rotation).shape
            full = encode(torch.ones(2, 2, 6, 40), fmt, rule, rotation)[0, 0]
            for name, t in state.tensors().items():
                assert (t.dtype, t.shape) == (full.tensors()[name].dtype, (*lead, *full.tensors()[name].shape))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn])
def test_other_dtypes_are_converted_to_float32_first(dtype):
    x = randn(2, 3, 4, 32).to(dtype)
    for fmt in FORMATS:
        assert same(encode(x, fmt), encode(x.float(), fmt))
        assert same(fake_quantize(x, fmt), fake_quantize(x.float(), fmt))


def test_no_gradient_and_no_complaint():
    x = randn(1, 2, 4, 32).requires_grad_()
    for fmt in FORMATS:
        assert not fake_quantize(x, fmt, rotation="hadamard").requires_grad
        assert not encode(x, fmt, rotation="hadamard").decode().requires_grad
        with torch.inference_mode():
            fake_quantize(x, fmt)
        with torch.device("cpu"):
            fake_quantize(x, fmt)


# ---- values: zero, tiny, subnormal, huge, not finite


@pytest.mark.parametrize("fmt, rule", CASES)
def test_zeros_decode_to_zeros(fmt, rule):
    for rotation in (None, "hadamard16"):
        x = torch.zeros(2, 3, 4, 40)
        state = encode(x, fmt, rule, rotation)
        assert same(state.decode(), x)
        for t in state.scales.values():
            assert torch.isfinite(t.float()).all()
            assert (t.float() > 0).all()
        if FORMATS[fmt].stochastic:
            assert same(fake_quantize(x, fmt, rule, rotation, seeds=torch.tensor(3)), x)


@pytest.mark.parametrize("fmt", FORMATS)
def test_negative_zero_keeps_its_sign_but_in_int8(fmt):
    x = torch.tensor([[-0.0, 0.0, 1.0, -1e-9]])
    signs = [fmt != "int8", False, False, fmt != "int8"]
    assert torch.signbit(fake_quantize(x, fmt)).tolist() == [signs]
    assert torch.signbit(encode(x, fmt).decode()).tolist() == [signs]


@pytest.mark.parametrize("fmt", FORMATS)
def test_errors_keep_to_the_documented_bounds(fmt):
    ones = randn(2, 3, 8, 64).sign()
    for x in (
        randn(2, 3, 8, 64),
        randn(2, 3, 8, 64) * 1e-6,
        randn(2, 3, 8, 64).exp() * ones,
        ones * 10.0 ** -(torch.arange(64) // 16 * 2.7),
        ones * torch.where(torch.arange(64) < 32, 1.0, 2.0**-20),
        ones * torch.logspace(0, -8, 24).repeat_interleave(64).view(3, 8, 64),
        randn(2, 3, 8, 64) * 1e-36,
        randn(2, 3, 8, 64) * 1e-40,
        torch.full((1, 1, 2, 64), 1e-45),
    ):
        check_bound(x, fmt)


def test_property_errors_keep_to_the_documented_bounds():
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies

    @hypothesis.settings(max_examples=60, deadline=None)
    @hypothesis.given(
        st.sampled_from(sorted(FORMATS)),
        st.integers(1, 5),
        st.integers(1, 40),
        st.integers(-45, 38),
        st.floats(0, 20),
        st.integers(0, 1 << 30),
        st.data(),
    )
    def check(fmt, v, k, exponent, spread, seed, data):
        scale = torch.full((v, k), 10.0**exponent, dtype=torch.float64)
        x = (randn(v, k, seed=seed) * scale * 10.0 ** (-spread * torch.rand(v, k).double())).float()
        special = data.draw(st.lists(st.sampled_from([0.0, -0.0, 1e-45, -1e-38, float(x.abs().max())]), max_size=4))
        x.view(-1)[: len(special)] = torch.tensor(special)[: x.numel()]
        x = x.clamp(-3e38, 3e38) if fmt not in ("fp16",) else x.clamp(-65504, 65504)
        got = fake_quantize(x, fmt)
        assert same(got, encode(x, fmt).decode())
        check_bound(x, fmt, got)

    check()


@pytest.mark.parametrize("fmt, rule", CASES)
def test_huge_values_stay_finite(fmt, rule):
    top = torch.finfo(torch.float32).max
    for value in (top, top * 0.9, top * 0.6):
        x = torch.full((2, 2, 32), value) * randn(2, 2, 32).sign()
        x[0, 0, ::3] *= 0.8
        for options in ({}, {"seeds": torch.arange(2)}) if FORMATS[fmt].stochastic else ({},):
            state = encode(x, fmt, rule, **options)
            assert torch.isfinite(state.decode()).all()
            assert all(torch.isfinite(t.float()).all() for t in state.scales.values())
    if fmt != "fp16":
        assert ((fake_quantize(x, fmt, rule) / x - 1).abs() < 0.26).all()


@pytest.mark.parametrize("fmt", FORMATS)
def test_inf_and_nan_are_errors_that_name_the_place(fmt):
    for bad in (math.inf, -math.inf, math.nan):
        for lane in (0, 31, 39):
            for rotation in (None, "hadamard"):
                x = randn(4, 3, 5, 40)
                x[2, 1, 4, lane] = bad
                for call in (encode, fake_quantize):
                    with pytest.raises(NonFiniteStateError, match=r"slot 2, head 1$"):
                        call(x, fmt, rotation=rotation)
                    call(x, fmt, rotation=rotation, check_finite=False)
    x[3, 0] = math.nan
    with pytest.raises(NonFiniteStateError, match="slot 2, head 1 and 1 more"):
        fake_quantize(x, fmt)
    with pytest.raises(NonFiniteStateError, match="its only tile"):
        fake_quantize(x[2, 1], fmt)
    with pytest.raises(NonFiniteStateError, match=r"leading index \[1\]"):
        fake_quantize(x[2], fmt)
    many = torch.zeros(100, 2, 16, 128)  # more than one chunk
    many[97, 1, 3, 5] = math.nan
    with pytest.raises(NonFiniteStateError, match="slot 97, head 1"):
        fake_quantize(many, fmt)
    with pytest.raises(NonFiniteStateError, match="slot 97, head 1"):
        encode(many, fmt)
    with pytest.raises(NonFiniteStateError):
        fake_quantize(torch.full((1, 1, 2, 2), 1e300, dtype=torch.float64), fmt)


def test_a_block_whose_scale_underflows_keeps_the_least_one():
    x = torch.zeros(1, 64)
    x[0, :16], x[0, 16:32], x[0, 32:48] = 2688.0, 2.0**-9 * 6 * 1.49, 2.0**-11
    state = encode(x, "nvfp4")
    assert state.scales["global"].item() == 1.0
    assert state.scales["block"].float().tolist() == [[448.0, 2.0**-9, 2.0**-9, 1.0]]
    assert state.decode()[0, ::16].tolist() == [2688.0, 6 * 2.0**-9, 0.0, 0.0]


# ---- bad calls


def test_bad_calls_are_clear():
    x = randn(2, 3, 4, 32)
    for call in (encode, fake_quantize):
        for arguments, options, message in (
            ((x, "nvpf4"), {}, "unknown format 'nvpf4'. Did you mean 'nvfp4'"),
            ((x, "nvfp4", "four_over_sex"), {}, "unknown scale rule 'four_over_sex'. Did you mean 'four_over_six'"),
            ((x, "nvfp4", "amax", "hadamard32"), {}, "unknown rotation 'hadamard32'. Did you mean"),
            ((x, "int8", "four_over_six"), {}, "format int8 has no scale rule 'four_over_six'; it has amax, mse"),
            ((x, "fp32"), {"seeds": torch.tensor(0)}, "no stochastic rounding for fp32; it exists for bf16"),
            ((x, "fp16"), {"seeds": torch.zeros(2, 3)}, "seeds are int64, not torch.float32"),
            ((x, "fp16"), {"seeds": torch.arange(5)}, r"seeds \[5\] do not broadcast to leading axes \[2, 3\]"),
            ((x[0, 0, 0], "fp16"), {}, r"\[..., V, K\] with V and K at least 1, not \[32\]"),
            ((x[..., :0], "fp16"), {}, r"not \[2, 3, 4, 0\]"),
            ((x.int(), "fp16"), {}, "a state is a float tensor, not torch.int32"),
            ((x + 0j, "fp16"), {}, "a state is a float tensor, not torch.complex64"),
        ):
            with pytest.raises(InvalidValueError, match=message):
                call(*arguments, **options)


def test_plain_formats_take_any_scale_rule():
    """They have no scale to choose, so a policy's rule for its read copy does not stop its FP16 checkpoint."""
    x = randn(2, 3, 4, 32)
    for fmt in ("fp32", "bf16", "fp16"):
        assert same(fake_quantize(x, fmt, "four_over_six"), fake_quantize(x, fmt))


# ---- EncodedState


@pytest.mark.parametrize("fmt", FORMATS)
def test_indexing_takes_leading_axes(fmt):
    x = randn(5, 3, 4, 40)
    state = encode(x, fmt, rotation="hadamard16")
    mask = torch.tensor([True, False, True, True, False])
    indices = (
        2,
        (2, 1),
        slice(1, 4),
        (slice(None), 1),
        (..., 1),
        (1, ...),
        ...,
        (None, 2),
        torch.tensor([4, 0, 0]),
        [3, 1],
        mask,
        (mask, ..., 2),
        (torch.tensor([0, 4]), torch.tensor([2, 1])),
        -1,
    )
    for index in indices:
        part = state[index]
        assert same(part.decode(), state.decode()[index if index is not ... else slice(None)][..., :4, :40]) or (
            isinstance(index, tuple) and ... in [i for i in index if not isinstance(i, torch.Tensor)]
        )
    assert same(state[..., 1].decode(), state.decode()[:, 1])
    assert same(state[mask, ..., 2].decode(), state.decode()[mask, 2])
    assert state[1, ...].shape == (3, 4, 40)
    assert state[2:4].codes.data_ptr() != state.codes.data_ptr()
    assert state[:2].codes.data_ptr() == state.codes.data_ptr()  # a view
    for wrong in ((0, 0, 0), (..., 0, 0, 0), 5, (0, slice(None), 1)):
        with pytest.raises(IndexError):
            state[wrong]


@pytest.mark.parametrize("fmt", FORMATS)
def test_write_in_place(fmt):
    x, y = randn(5, 3, 4, 40), randn(5, 3, 4, 40, seed=1)
    for index, other in (
        (2, y[0]),
        (slice(1, 3), y[:2]),
        (torch.tensor([4, 0]), y[:2]),
        ((torch.tensor([4, 0]), 1), y[:2, 0]),
        ((..., 2), y[:, 0]),
        (slice(None), y[:1]),
        ([True, False, False, True, False], y[3:]),
    ):
        index = torch.tensor(index) if isinstance(index, list) else index
        state = encode(x, fmt)
        tensors = state.tensors()
        want = x.clone()
        if isinstance(index, tuple) and index[0] is ...:
            want[:, index[1]] = other
        else:
            want[index] = other
        assert state.write_(index, encode(other, fmt)) is state
        assert same(state, encode(want, fmt))
        assert all(t is tensors[name] for name, t in state.tensors().items())


def test_write_refuses_what_does_not_fit():
    state = encode(randn(5, 3, 4, 40), "nvfp4")
    before = state.clone()
    for index, other in (
        (0, encode(randn(3, 4, 40), "mxfp4")),
        (0, encode(randn(3, 4, 40), "nvfp4", rotation="hadamard")),
        (0, encode(randn(3, 4, 48), "nvfp4")),  # the same bytes, another K
        (0, encode(randn(3, 5, 40), "nvfp4")),
        (0, encode(randn(2, 4, 40), "nvfp4")),
        (slice(0, 2), encode(randn(3, 3, 4, 40), "nvfp4")),
    ):
        with pytest.raises((InvalidValueError, RuntimeError)):
            state.write_(index, other)
        assert same(state, before)
    with pytest.raises(IndexError):
        state.write_((0, 0, 0), encode(randn(4, 40), "nvfp4"))
    assert same(state, before)


@pytest.mark.parametrize("fmt", FORMATS)
def test_save_load_copy_and_move(fmt, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    state = encode(randn(2, 3, 4, 40), fmt, rotation="hadamard16")
    safetensors.save_file(state.tensors(), tmp_path / "state.safetensors")
    loaded = safetensors.load_file(tmp_path / "state.safetensors")
    assert same(EncodedState.from_tensors(loaded, fmt, "amax", "hadamard16", key_dim=40), state)
    assert same(pickle.loads(pickle.dumps(state)), state)
    assert same(copy.deepcopy(state), state)
    assert same(state.to("cpu"), state)
    clone = state.clone()
    as_bits(clone.codes).zero_()
    assert not same(clone, state)
    assert state.device == torch.device("cpu")


@pytest.mark.parametrize("fmt", FORMATS)
def test_any_bytes_decode(fmt):
    """A read copy filled with random bytes decodes to something, without an error (the isolation test does this)."""
    state = encode(randn(2, 2, 8, 64), fmt)
    for t in state.tensors().values():
        t.view(torch.uint8).random_(0, 256) if t.dim() else t.fill_(math.nan)
    assert state.decode().shape == (2, 2, 8, 64)


# ---- rotation


def sylvester(k, rotation):
    """The documented matrix in float64."""
    parts = []
    for size in blocks(k, rotation):
        h = torch.ones(1, 1, dtype=torch.float64)
        while len(h) < size:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        parts.append(h / size**0.5)
    return torch.block_diag(*parts)


@pytest.mark.parametrize("k", [1, 2, 15, 16, 17, 60, 64, 100, 127, 128, 192])
@pytest.mark.parametrize("rotation", ROTATIONS)
def test_rotation_is_the_documented_symmetric_orthonormal_matrix(rotation, k):
    tolerance = TOLERANCES["rotation"][0]
    r = sylvester(k, rotation)
    assert torch.allclose(r @ r, torch.eye(k, dtype=torch.float64), atol=1e-14)
    assert torch.equal(r, r.T)
    x = randn(3, 5, k)
    length = x.norm(dim=-1, keepdim=True)
    assert ((rotate(x, rotation) - (x.double() @ r)).abs() <= tolerance * length).all()
    assert ((rotate(rotate(x, rotation), rotation) - x).abs() <= tolerance * length).all()
    assert torch.allclose(rotate(x.double(), rotation), x.double() @ r, atol=1e-14)
    q = randn(k)
    assert torch.allclose(rotate(x, rotation) @ rotate(q, rotation), x @ q, atol=10 * tolerance * k)
    assert same(rotate(x, rotation)[1, 2], rotate(x[1, 2], rotation))  # not dependent on the batch
    assert same(rotate(x.mT.contiguous().mT, rotation), rotate(x, rotation))


def test_rotation_blocks():
    assert blocks(128, "hadamard") == [128]
    assert blocks(192, "hadamard") == [128, 64]
    assert blocks(60, "hadamard") == [32, 16, 8, 4]
    assert blocks(60, "hadamard16") == [16, 16, 16, 8, 4]
    assert blocks(17, "hadamard16") == [16, 1]
    assert rotate(x := randn(3, 4), None) is x


def test_rotation_spreads_an_outlier():
    x = randn(2, 2, 64, 128)
    x[..., 5] *= 100
    error = {r: (fake_quantize(x, "nvfp4", rotation=r) - x)[..., 6:].norm() for r in (None, *ROTATIONS)}
    plain = (fake_quantize(x, "int8") - x)[..., 6:].norm()
    assert (fake_quantize(x, "int8", rotation="hadamard") - x)[..., 6:].norm() < plain / 2
    assert all(torch.isfinite(e) for e in error.values())


# ---- stochastic rounding beyond its arithmetic (test_codec_oracles.py)


@pytest.mark.parametrize("fmt", ROUNDING)
def test_seeds_broadcast_and_decide_everything(fmt):
    x = randn(3, 2, 4, 40)
    seeds = derive_seeds(11, "layers.3", torch.tensor([5, 9, 5])[:, None], torch.arange(2))
    assert seeds.shape == (3, 2)
    one = encode(x, fmt, seeds=seeds)
    assert same(one, encode(x, fmt, seeds=seeds.clone()))
    assert same(
        encode(x, fmt, seeds=torch.tensor([[4], [5], [6]])),
        encode(x, fmt, seeds=torch.tensor([[4] * 2, [5] * 2, [6] * 2])),
    )
    assert not same(one.decode(), encode(x, fmt).decode())
    assert len(derive_seeds(0, torch.arange(1000)).unique()) == 1000


def test_errors_and_specs_load_without_torch():
    """A report renders on a machine without torch, and needs these two."""
    code = "import sys; sys.modules['torch'] = None; from quantize_state.quant import InvalidValueError, LayerSpec"
    subprocess.run([sys.executable, "-c", code], check=True)
    for name in quant.__all__:
        assert getattr(quant, name) is not None
