"""The device codec, run by Triton's interpreter, against the torch codec: equality to the bit."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch

from quantize_state.kernels.device import codec, tile
from quantize_state.kernels.device.targets import INTERPRET, tl, triton, unavailable
from quantize_state.kernels.device.views import raw_view
from quantize_state.quant import scales
from quantize_state.quant.codec import encode
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.rotation import rotate
from quantize_state.quant.rounding import E2M1, E4M3, INT8

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FORMAT_RULES = [(name, "amax") for name in FORMATS] + [("nvfp4", "four_over_six")]


@triton.jit
def _grid_kernel(p_a, p_rounded, p_code, N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b_a = tl.load(p_a + o)
    tl.store(p_rounded + o, codec.round_grid(b_a, M, LOW, MAX))
    tl.store(p_code + o, codec.grid_code(b_a, M, LOW, MAX))


@triton.jit
def _values_kernel(p_code, p_e4m3, p_e2m1, p_scale, p_power, N: tl.constexpr):
    o = tl.arange(0, N)
    b_code = tl.load(p_code + o)
    tl.store(p_e4m3 + o, codec.e4m3_value(b_code, 0))
    tl.store(p_e2m1 + o, codec.e2m1_value(b_code.to(tl.int32)))
    tl.store(p_scale + o, codec.e4m3_scale(b_code & 0x7F))
    tl.store(p_power + o, codec.e8m0_scale(b_code))


@triton.jit
def _bf16_kernel(p_x, p_o, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_o + o, codec.bf16_bits(tl.load(p_x + o)))


@triton.jit
def _encode_kernel(
    p_x, p_codes, p_row, p_block, p_total, p_decoded, V: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, ROTATE: tl.constexpr,
):  # fmt: skip
    i_h = tl.program_id(0)
    o_v = tl.arange(0, R)
    m_v = o_v < V
    o_rows = (i_h * V + o_v).to(tl.int64)
    b_x = tl.load(p_x + o_rows[:, None] * K + tl.arange(0, K)[None, :], mask=m_v[:, None], other=0.0)
    if ROTATE > 1:
        b_x = codec.hadamard(b_x, ROTATE)
    b_top = codec.tile_amax(b_x)
    tile.store_tile(b_x, b_top, p_codes, p_row, p_block, p_total + i_h, o_rows, m_v, FORMAT, FOUR_OVER_SIX, 0)
    b_back = tile.load_tile(p_codes, p_row, p_block, p_total + i_h, o_rows, m_v, K, FORMAT, 0)
    tl.store(p_decoded + o_rows[:, None] * K + tl.arange(0, K)[None, :], b_back, mask=m_v[:, None])


def as_bits(t):
    return t.contiguous().view(torch.uint8)


def encoded_on_device(x, format, rule="amax", rotation=None):
    """(codes and scales by name, decoded) of x [heads, V, K], by the device code."""
    heads, value_dim, key_dim = x.shape
    expected = encode(x, format, rule, rotation)
    ours = {name: torch.full_like(as_bits(t), 0xA5).view(t.dtype) for name, t in expected.tensors().items()}
    raw = {n: raw_view(t) for n, t in ours.items()}
    none = torch.zeros(1)
    decoded = torch.full_like(x, float("nan"))
    size = {None: 0, "hadamard16": 16, "hadamard": key_dim}[rotation]
    _encode_kernel[(heads,)](
        x, raw["codes"], *(raw.get(f"scales.{n}", none) for n in ("row", "block", "global")), decoded,
        V=value_dim, R=max(16, triton.next_power_of_2(value_dim)), K=key_dim,
        FORMAT=format, FOUR_OVER_SIX=rule == "four_over_six", ROTATE=size,
    )  # fmt: skip
    return expected, ours, decoded


def check(x, format, rule="amax", rotation=None):
    expected, ours, decoded = encoded_on_device(x, format, rule, rotation)
    for name, tensor in expected.tensors().items():
        assert torch.equal(as_bits(tensor), as_bits(ours[name])), (format, rule, rotation, name)
    assert torch.equal(as_bits(expected.decode(unrotate=False)), as_bits(decoded)), (format, rule, rotation)


def with_neighbours(points):
    """Positive float32 points and the three floats on either side of each."""
    bits = points.to(torch.float32).view(torch.int32)
    around = bits[:, None] + torch.arange(-3, 4, dtype=torch.int32)
    return around.flatten().clamp(0).view(torch.float32)


@pytest.mark.parametrize("grid", [E2M1, E4M3, INT8], ids=["e2m1", "e4m3", "int8"])
def test_every_value_and_every_tie(grid):
    code = torch.arange(128) if grid is not E2M1 else torch.arange(8)
    values = code.float() if grid is INT8 else _values(grid)
    values = values[values <= grid.max]
    ties = (values[1:] + values[:-1]) / 2
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-10, 1e30, 3.4e38, grid.max * 1.04, grid.max * 1.1])
    a = torch.cat([with_neighbours(values), with_neighbours(ties), tiny])
    count = 1024
    a = torch.cat([a, torch.zeros(-len(a) % count)])
    rounded, codes = torch.empty_like(a), torch.empty(len(a), dtype=torch.int32)
    low = grid.min_exponent
    _grid_kernel[(len(a) // count,)](a, rounded, codes, N=count, M=grid.mantissa, LOW=low, MAX=grid.max)
    expected = grid.nearest(a, torch.empty_like(a))
    assert torch.equal(as_bits(rounded), as_bits(expected))
    assert torch.equal(values[codes.long()], expected)


def _values(grid):
    """The grid's values in the order of their codes."""
    code = torch.arange(8 if grid is E2M1 else 127)
    exponent, rest = code >> grid.mantissa, code & ((1 << grid.mantissa) - 1)
    whole = rest + torch.where(exponent > 0, 1 << grid.mantissa, 0)
    return whole * 2.0 ** (exponent.clamp(min=1) - 1 + grid.min_exponent - grid.mantissa)


def test_every_code():
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e2m1, scale, power = (torch.empty(256) for _ in range(4))
    _values_kernel[(1,)](codes, e4m3, e2m1, scale, power, N=256)
    finite = (codes & 0x7F) != 0x7F
    expected = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(as_bits(e4m3[finite]), as_bits(expected[finite]))
    assert torch.equal(scale[:127], expected[:127])
    two = FORMATS["mxfp4"].element.load(codes)
    assert torch.equal(as_bits(e2m1), as_bits(two.view(256, 2)[:, 0].contiguous()))
    assert torch.equal(power[1:255], codes.view(torch.float8_e8m0fnu).to(torch.float32)[1:255])


def test_bf16_rounding():
    rng = torch.Generator().manual_seed(0)
    near = with_neighbours((torch.arange(1, 100).float() / 128 + 1) * 2.0**-100)
    x = torch.cat([near, torch.randn(331, generator=rng)])
    x[:5] = torch.tensor([3.4e38, -3.4e38, 0.0, -0.0, 1e-45])
    out = torch.empty(1024, dtype=torch.int16)
    _bf16_kernel[(1,)](x, out, N=1024)
    expected = encode(x[None], "bf16").codes[0]
    assert torch.equal(out, expected.view(torch.int16))


@pytest.mark.parametrize("format,rule", FORMAT_RULES)
def test_states(format, rule):
    """Ordinary tiles, and one with zeros, −0, subnormals, an all-zero block beside tiny ones, and an outlier."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(3, 20, 64, generator=rng)
    x[1] *= 10.0 ** torch.randint(-6, 6, (20, 1), generator=rng)
    x[2, 0] = 0.0
    x[2, 1, :16] = -0.0
    x[2, 2] *= 1e-38
    x[2, 3] *= 1e-42
    x[2, 4, :32] = 0.0
    x[2, 5, 7] = 1e30 if format not in ("fp16", "bf16") else 1e5
    check(x, format, rule)
    check(torch.zeros(1, 16, 32), format, rule)


@pytest.mark.parametrize("format,rule", FORMAT_RULES)
@pytest.mark.parametrize("magnitude", [1e-40, 1e-20, 1e38])
def test_extreme_magnitudes(format, rule, magnitude):
    check(torch.randn(1, 16, 32, generator=torch.Generator().manual_seed(2)).clamp(-3, 3) * magnitude, format, rule)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3", "int8"])
def test_ties_of_whole_tiles(format):
    """Every tie of E2M1, E4M3 or INT8 and its neighbours, with a row that fixes the scales to powers of two."""
    grid = FORMATS[format].element.grid
    values = torch.arange(128.0) if grid is INT8 else _values(grid)
    points = with_neighbours((values[1:] + values[:-1]) / 2)
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
