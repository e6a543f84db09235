"""The device codec, run by Triton's interpreter, against the torch codec: equality to the bit."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import numpy as np
import pytest
import torch

from quantize_state.kernels.device import codec, probe
from quantize_state.kernels.device.targets import INTERPRET, tl, triton, unavailable
from quantize_state.kernels.device.views import has_quads
from quantize_state.quant import scales
from quantize_state.quant.codec import encode
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.rotation import rotate
from quantize_state.quant.rounding import E2M1, E4M3, INT8

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FORMAT_RULES = [(name, "amax") for name in FORMATS] + [("nvfp4", "four_over_six"), ("nvfp4", "mse")]


@triton.jit
def _bf16_kernel(p_x, p_o, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_o + o, codec.bf16_bits(tl.load(p_x + o)))


def check(x, format, rule="amax", rotation=None):
    assert not probe.codec_differences(x, format, rule, rotation), (format, rule, rotation)


@pytest.mark.parametrize("grid", [E2M1, E4M3, INT8], ids=["e2m1", "e4m3", "int8"])
def test_every_value_and_every_tie(grid):
    code = torch.arange(128) if grid is not E2M1 else torch.arange(8)
    values = code.float() if grid is INT8 else probe.grid_values(grid)
    values = values[values <= grid.max]
    ties = (values[1:] + values[:-1]) / 2
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-10, 1e30, 3.4e38, grid.max * 1.04, grid.max * 1.1])
    a = torch.cat([probe.with_neighbours(values), probe.with_neighbours(ties), tiny])
    count = 1024
    a = torch.cat([a, torch.zeros(-len(a) % count)])
    rounded, codes = torch.empty_like(a), torch.empty(len(a), dtype=torch.int32)
    probe.round_on_device(a, grid, rounded, codes, count)
    expected = grid.nearest(a, torch.empty_like(a))
    assert torch.equal(probe.as_bytes(rounded), probe.as_bytes(expected))
    assert torch.equal(values[codes.long()], expected)


def test_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e2m1, scale, power = (torch.empty(256) for _ in range(4))
    probe.decode_every_code(codes, e4m3, e2m1, scale, power)
    finite = (codes & 0x7F) != 0x7F
    expected = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(probe.as_bytes(e4m3[finite]), probe.as_bytes(expected[finite]))
    assert torch.equal(scale[:127], expected[:127])
    two = FORMATS["mxfp4"].element.load(codes)
    assert torch.equal(probe.as_bytes(e2m1), probe.as_bytes(two.view(256, 2)[:, 0].contiguous()))
    assert torch.equal(power[1:255], codes.view(torch.float8_e8m0fnu).to(torch.float32)[1:255])


def test_bf16_rounding():
    rng = torch.Generator().manual_seed(0)
    near = probe.with_neighbours((torch.arange(1, 100).float() / 128 + 1) * 2.0**-100)
    x = torch.cat([near, torch.randn(331, generator=rng)])
    x[:5] = torch.tensor([3.4e38, -3.4e38, 0.0, -0.0, 1e-45])
    out = torch.empty(1024, dtype=torch.int16)
    _bf16_kernel[(1,)](x, out, N=1024)
    expected = encode(x[None], "bf16").codes[0]
    assert torch.equal(out, expected.view(torch.int16))


@pytest.mark.parametrize("format,rule", FORMAT_RULES)
def test_states(format, rule):
    """Ordinary tiles, and one with zeros, −0, subnormals, an all-zero block beside tiny ones, and an outlier."""
    x = probe.hard_states(format)
    check(x, format, rule)
    check(torch.zeros(1, 16, 32), format, rule)
    if FORMATS[format].bits == 4:
        assert not probe.codec_differences(x, format, rule, words=False), "stored by bytes"


@pytest.mark.parametrize("format,rule", FORMAT_RULES)
@pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1e38])
def test_extreme_magnitudes(format, rule, magnitude):
    check(torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * magnitude, format, rule)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3", "int8"])
def test_ties_of_whole_tiles(format):
    """Every tie of E2M1, E4M3 or INT8 and its neighbours, with a row that fixes the scales to powers of two."""
    grid = FORMATS[format].element.grid
    values = torch.arange(128.0) if grid is INT8 else probe.grid_values(grid)
    points = probe.with_neighbours((values[1:] + values[:-1]) / 2)
    block = FORMATS[format].block or 64
    usable = block - 1
    points = torch.cat([points, torch.zeros(-len(points) % usable)]).view(-1, usable)
    points = points * torch.where(torch.arange(usable) % 2 == 0, 1, -1)
    rows = torch.cat([torch.full((len(points), 1), grid.max), points], 1)
    rows = torch.cat([rows, torch.zeros(-len(rows) % (64 // block), block)]).view(-1, 64)
    for start in range(0, len(rows), 64):
        check(rows[None, start : start + 64].contiguous(), format)


def test_the_order_of_four_over_six_sums(monkeypatch):
    """Blocks for which a sum in another order would choose the other scale."""
    # Multiples of 1/4 with scales 1 and 1.5: many blocks fit both equally well, but for rounding.
    x = torch.randint(-24, 25, (1, 32768, 32), generator=torch.Generator().manual_seed(5)) / 4
    x[..., ::16] = 6.0
    x[0, 0] = 6.0 * 256
    ordered = encode(x, "nvfp4", "four_over_six").scales["block"].view(torch.uint8)

    def neighbours_first(t):
        while t.shape[-1] > 1:
            t = t[..., ::2] + t[..., 1::2]
        return t[..., 0]

    with monkeypatch.context() as patch:
        patch.setattr(scales, "tree_sum", neighbours_first)
        other = encode(x, "nvfp4", "four_over_six").scales["block"].view(torch.uint8)
    rows = (ordered != other).any(-1)[0].nonzero()[:15, 0]
    assert len(rows) == 15, "too few blocks show the order"
    chosen = x[:, torch.cat([torch.zeros(1, dtype=torch.int64), rows])]  # with the row that gives the tile its scale
    check(chosen, "nvfp4", "four_over_six")


@pytest.mark.parametrize("rotation", ["hadamard16", "hadamard"])
@pytest.mark.parametrize("format", ["nvfp4", "fp8_e4m3"])
def test_rotated(format, rotation):
    x = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(3))
    assert not torch.equal(rotate(x, rotation), x)
    check(x, format, "amax", rotation)


def exact_fma(a, b, c):
    """a·b + c of float32, rounded once: to odd in float64, which float32 rounding does not notice."""
    a, b, c = (np.asarray(t, np.float64) for t in (a, b, c))
    product = a * b
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    even = (total.view(np.int64) & 1) == 0
    moved = np.nextafter(total, np.copysign(np.inf, error))
    return torch.from_numpy(np.where((error != 0) & even, moved, total).astype(np.float32))


@pytest.mark.parametrize("off", [-1, 0, 1])
def test_division_by_a_reciprocal(monkeypatch, off):
    """What runs on a GPU where the interpreter divides, with exact fused arithmetic in Triton's place: quotients at and
    beside every tie, of blocks whose multipliers are as small and as large as they come; a reciprocal that the hardware
    has one unit off is as good."""
    monkeypatch.setattr(tl, "fma", exact_fma)
    monkeypatch.setattr(
        tl,
        "inline_asm_elementwise",
        lambda _ptx, _constraints, arguments, *_: ((1 / arguments[0]).view(torch.int32) + off).view(torch.float32),
    )
    rng = torch.Generator().manual_seed(0)
    exponents = torch.randint(-71, 120, (4096, 1), generator=rng)
    multiplier = torch.ldexp(1 + torch.rand(4096, 1, generator=rng), exponents)
    values = probe.grid_values(E2M1)
    near = probe.with_neighbours(torch.cat([values[1:], (values[1:] + values[:-1]) / 2]))
    quotients = torch.cat([near, -near, torch.randn(8, generator=rng), torch.tensor([0.0, -0.0])])
    x = multiplier * quotients
    multiplier = multiplier.expand_as(x).contiguous()
    inverse = codec.reciprocal(multiplier, 90)
    assert torch.equal(inverse, 1 / multiplier)
    found = codec.divided(x, multiplier, inverse, 90)
    assert torch.equal(probe.as_bytes(found), probe.as_bytes(x / multiplier))


def test_what_can_be_read_sixteen_bytes_at_a_time():
    pool = torch.zeros(4, 2, 8, 32)
    assert has_quads(pool) and has_quads(torch.zeros(4, 516)[:, :512].unflatten(1, (2, 8, 32)))
    assert not has_quads(torch.zeros(4, 514)[:, :512].unflatten(1, (2, 8, 32)))
    assert not has_quads(torch.zeros(4, 516)[:, 2:514].unflatten(1, (2, 8, 32)))
