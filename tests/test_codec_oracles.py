"""The codec's bits against ml_dtypes, ModelOpt, torchao and plain arithmetic: equal, wherever those define them."""

import math
import warnings

import numpy as np
import pytest
import torch

from quantize_state.quant import FORMATS, Format, derive_seeds, encode, fake_quantize
from quantize_state.quant.formats import Element
from quantize_state.quant.rounding import BF16, E2M1, E4M3, FP16, INT8, Grid, uniform
from quantize_state.quant.scales import PowerOfTwoScale, tree_sum

ml_dtypes = pytest.importorskip("ml_dtypes")

E3M2 = Grid(mantissa=2, min_exponent=-2, max=28.0)
E2M3 = Grid(mantissa=3, min_exponent=0, max=7.5)

GRIDS = {
    "e2m1": (E2M1, ml_dtypes.float4_e2m1fn),
    "e4m3": (E4M3, ml_dtypes.float8_e4m3fn),
    "e3m2": (E3M2, ml_dtypes.float6_e3m2fn),
    "e2m3": (E2M3, ml_dtypes.float6_e2m3fn),
    "fp16": (FP16, np.float16),
    "bf16": (BF16, ml_dtypes.bfloat16),
}

TOLERANCES = {
    # name: (value, why the result is not exact)
    "torchao": (0.03, "share of codes beside a tie that fall to its other side; most of the grid points are ties"),
    "search": (1e-5, "the oracle sums squared errors in float64, ours in float32: near ties may go either way"),
}


def grid_values(dtype) -> np.ndarray:
    """All finite non-negative values of a dtype, in order, as float32."""
    bits = {1: np.uint8, 2: np.uint16}[np.dtype(dtype).itemsize]
    width = {ml_dtypes.float4_e2m1fn: 3, ml_dtypes.float6_e3m2fn: 5, ml_dtypes.float6_e2m3fn: 5}.get(
        dtype, 8 * np.dtype(dtype).itemsize - 1
    )
    values = np.arange(1 << width).astype(bits).view(dtype).astype(np.float32)
    return values[np.isfinite(values)]


def probes(dtype) -> np.ndarray:
    """Every value of a dtype, every midpoint between neighbours, and the float32 next to each on both sides."""
    values = grid_values(dtype).astype(np.float64)
    points = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(np.float32)
    inf = np.float32(np.inf)
    near = np.concatenate([points, np.nextafter(points, inf), np.nextafter(points, -inf)])
    return np.unique(np.abs(near))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(kind), b.view(kind))


@pytest.mark.parametrize("name", GRIDS)
def test_nearest_equals_ml_dtypes_on_every_code_tie_and_neighbour(name):
    grid, dtype = GRIDS[name]
    random = np.random.default_rng(0).integers(0, 0x7F800000, 200_000, dtype=np.int64).astype(np.int32).view(np.float32)
    x = np.concatenate([probes(dtype), random, np.float32([0, 1e-45, 1e-40, 2.0**-126])])
    with np.errstate(over="ignore"):
        want = np.minimum(x, np.float32(grid.max)).astype(dtype).astype(np.float32)
    got = grid.nearest_(torch.from_numpy(x.copy()))
    assert same_bits(got, torch.from_numpy(want))


def test_int8_rounds_to_even_and_saturates():
    x = torch.arange(0, 130, 0.25)
    x = torch.cat([x, x.nextafter(torch.tensor(0.0)), x.nextafter(torch.tensor(200.0))])
    assert torch.equal(INT8.nearest_(x.clone()), x.round().clamp(max=127))


def test_saturation_into_e4m3():
    got = E4M3.nearest_(torch.tensor([431.9, 432.0, 440.0, 463.9, 464.0, 465.0, 480.0, 500.0, 57344.0, 3.4e38]))
    assert got.tolist() == [416.0] + [448.0] * 9
    assert E2M1.nearest_(torch.tensor([4.9, 5.0, 5.1, 6.0, 6.5, 7.0, 100.0])).tolist() == [4, 4, 6, 6, 6, 6, 6]


@pytest.mark.parametrize("name", ["e2m1", "e4m3", "e3m2", "e2m3"])
def test_codes_equal_ml_dtypes_and_every_code_round_trips(name):
    grid, dtype = GRIDS[name]
    bits = {"e2m1": 4, "e4m3": 8}.get(name, 6)
    element = Element(bits, grid)
    codes = np.arange(1 << bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float32)
    codes, values = codes[np.isfinite(values)], torch.from_numpy(values[np.isfinite(values)])
    packed = element.store(values.abs(), values)
    want = codes[0::2] | codes[1::2] << 4 if bits == 4 else codes
    assert packed.numpy().tolist() == want.tolist()
    assert same_bits(element.load(packed), values)


def test_native_e4m3_decodes_every_byte():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    got = FORMATS["fp8_e4m3"].element.load(codes)
    want = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(got.numpy(), want, equal_nan=True)
    assert np.array_equal(np.signbit(got.numpy()), np.signbit(want))


def test_every_e8m0_byte_decodes():
    codes = torch.arange(256, dtype=torch.uint8)
    got = PowerOfTwoScale().multiplier({"block": codes.view(torch.float8_e8m0fnu)})
    want = codes.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    assert np.array_equal(got.numpy(), want, equal_nan=True)


@pytest.mark.parametrize("fmt, emax", [("mxfp4", 2), ("mxfp8", 8)])
def test_e8m0_scale_is_ocps_floor_rule(fmt, emax):
    amax = np.exp2(np.random.default_rng(1).uniform(-140, 120, 500)).astype(np.float32)
    powers = np.exp2(np.arange(-126, 120, dtype=np.float32))
    amax = np.concatenate([amax, powers, np.nextafter(powers, np.float32(0)), np.float32([0, 1e-45, 3.4e38])])
    x = torch.zeros(len(amax), 32)
    x[:, 5] = -torch.from_numpy(amax)
    want = [max(math.frexp(a)[1] - 1 - emax, -126) + 127 if a else 1 for a in amax.tolist()]
    assert encode(x, fmt).scales["block"].view(torch.uint8).flatten().tolist() == want


# ---- whole formats, written again in numpy and ml_dtypes


def oracle(x: np.ndarray, fmt: str) -> np.ndarray:
    """One [V, K] tile encoded and decoded with the amax rule. K is a multiple of the block."""
    f32, block = np.float32, FORMATS[fmt].block or x.shape[1]
    b = x.reshape(x.shape[0], -1, block)
    amax = np.abs(b).max(-1)
    tiny = f32(2.0**-126)
    if fmt == "fp8_e4m3":
        m = np.maximum(amax / f32(448), tiny)
        q = (b / m[..., None]).astype(ml_dtypes.float8_e4m3fn)
    elif fmt == "int8":
        m = np.maximum(amax / f32(127), tiny)
        q = np.rint(b / m[..., None]) + f32(0)
    elif fmt == "nvfp4":
        s2 = np.maximum(amax.max() / f32(2688), tiny)
        m = np.maximum(amax / (s2 * f32(6)), f32(2**-9)).astype(ml_dtypes.float8_e4m3fn).astype(f32) * s2
        q = np.clip(b / m[..., None], -6, 6).astype(ml_dtypes.float4_e2m1fn)
    else:
        emax, top = {"mxfp4": (2, 6), "mxfp8": (8, 448)}[fmt]
        m = np.maximum(np.exp2(np.floor(np.log2(np.maximum(amax, tiny))) - emax), tiny).astype(f32)
        dtype = ml_dtypes.float4_e2m1fn if fmt == "mxfp4" else ml_dtypes.float8_e4m3fn
        q = np.clip(b / m[..., None], -top, top).astype(dtype)
    return (q.astype(f32) * m[..., None]).reshape(x.shape)


def tiles(v: int = 6, k: int = 96) -> dict[str, torch.Tensor]:
    """[n, V, K] tiles of many kinds; V differs from K so that a wrong transpose shows."""
    g = torch.Generator().manual_seed(7)
    normal = torch.randn(3, v, k, generator=g)
    levels = 10.0 ** -(torch.arange(v * k // 16) % 9).float()
    spread = normal * levels.repeat_interleave(16).view(v, k)
    holes = normal.clone()
    holes[:, :, 16:32] = 0
    holes[:, 2] = 0
    return {
        "normal": normal,
        "magnitudes 1 to 1e-8 by block": spread,
        "magnitude 1e-6 with all-zero blocks": holes * 1e-6,
        "large": normal * 1e30,
        "small": normal * 1e-30,
        "grid points": (torch.randint(-12, 13, (3, v, k), generator=g) / 2),
        "one large element": torch.where(torch.rand(3, v, k, generator=g) < 0.01, 1e4, normal),
        "block amax 2**-20 of the tile's": torch.where(torch.arange(k) < 16, 1.0, 2.0**-20) * normal.sign(),
        "subnormal": normal * 1e-40,
    }


@pytest.mark.parametrize("kind", tiles())
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "int8", "mxfp4", "mxfp8", "nvfp4"])
def test_format_equals_numpy(fmt, kind):
    x = tiles()[kind]
    want = torch.from_numpy(np.stack([oracle(t.numpy(), fmt) for t in x]))
    assert same_bits(fake_quantize(x, fmt), want)
    assert same_bits(encode(x, fmt).decode(), want)


def test_plain_formats_are_torchs_casts_but_saturate():
    x = torch.tensor([[0.0, -0.0, 1e-45, 6e-8, -3e-8, 65503.9, 65519.9, 65520.0, -1e38, 3.4e38]])
    assert same_bits(encode(x, "fp16").codes, x.clamp(-65504, 65504).to(torch.float16))
    limit = torch.finfo(torch.bfloat16).max
    assert same_bits(encode(x, "bf16").codes, x.clamp(-limit, limit).to(torch.bfloat16))
    assert same_bits(encode(x, "fp32").codes, x)


# ---- NVIDIA ModelOpt


@pytest.fixture(scope="module")
def modelopt():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("modelopt.torch.quantization.qtensor")


def test_nvfp4_equals_modelopt(modelopt):
    for kind, x in [(kind, x[..., :k]) for kind, x in tiles().items() if kind != "subnormal" for k in (96, 90)]:
        ours = encode(x, "nvfp4")
        for i, tile in enumerate(x):
            theirs, block, total = modelopt.NVFP4QTensor.quantize(tile.clone(), 16)
            assert torch.equal(ours.codes[i], theirs._quantized_data), kind
            assert same_bits(ours.scales["block"][i], block), kind
            assert same_bits(ours.scales["global"][i], total), kind
            if x.shape[-1] == 96:  # theirs cannot decode what it padded
                decoded = theirs.dequantize(torch.float32, scale=block, double_scale=total, block_sizes={-1: 16})
                assert torch.equal(ours.decode()[i], decoded), kind  # as numbers; the sign of zero is below


def test_nvfp4_differs_from_modelopt_on_purpose(modelopt):
    """docs/formats.md lists these: −0.0, the sign of decoded zeros, all-zero tiles, tiles below 3.2e-35."""

    def theirs(x):
        q, block, total = modelopt.NVFP4QTensor.quantize(x.clone(), 16)
        return q, block, total, q.dequantize(torch.float32, scale=block, double_scale=total, block_sizes={-1: 16})

    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1], x[0, 2] = 6.0, -0.0, -0.1  # −0.1 rounds to −0
    ours, (q, _, _, decoded) = encode(x, "nvfp4"), theirs(x)
    assert ours.codes[0, :2].tolist() == [0x87, 0x08]
    assert q._quantized_data[0, :2].tolist() == [0x07, 0x08]
    assert torch.signbit(ours.decode())[0, 1:3].tolist() == [True, True]
    assert torch.signbit(decoded)[0, 1:3].tolist() == [False, False]

    zeros = torch.zeros(2, 16)
    ours = encode(zeros, "nvfp4")
    assert ours.scales["global"].item() == 2.0**-126
    assert (ours.scales["block"].float() == 1).all()
    assert torch.equal(ours.decode(), zeros)
    assert theirs(zeros)[3].isnan().any() or theirs(zeros)[2] == 0

    tiny = torch.full((2, 16), 1e-43)
    assert torch.equal(encode(tiny, "nvfp4").decode(), torch.zeros(2, 16))
    assert not torch.isfinite(theirs(tiny)[3]).all() or theirs(tiny)[2] == 0


def test_row_formats_equal_modelopt(modelopt):
    x = torch.cat([tiles()[kind] for kind in ("normal", "large", "small", "grid points", "one large element")])
    x[x == 0] = 1.0  # ModelOpt's zero rows are NaN
    for fmt, kernel in (("fp8_e4m3", modelopt.FP8QTensor), ("int8", modelopt.INT8QTensor)):
        ours = encode(x, fmt)
        for i, tile in enumerate(x):
            theirs, scale = kernel.quantize(tile, axis=0)
            assert same_bits(ours.codes[i], theirs._quantized_data), fmt
            assert same_bits(ours.scales["row"][i], scale.flatten()), fmt


def test_mx_formats_equal_modelopt_where_its_rule_gives_the_same_scale(modelopt):
    """ModelOpt takes 2**ceil(log2(amax/max)), OCP floor(log2 amax) − emax: the same up to mantissa 1.5 (1.75)."""
    g = torch.Generator().manual_seed(3)
    for fmt, kernel, top in (("mxfp4", modelopt.MXFP4QTensor, 1.5), ("mxfp8", modelopt.MXFP8QTensor, 1.75)):
        x = torch.randn(64, 32, generator=g)
        x[:, 3] = x.abs().amax(-1) * 1.0001
        mantissa = torch.frexp(x[:, 3]).mantissa * 2
        x = x[mantissa <= top]
        assert len(x) > 20
        ours = encode(x, fmt)
        theirs, scale = kernel.quantize(x, 32) if fmt == "mxfp4" else kernel.quantize(x)
        assert torch.equal(ours.scales["block"].view(torch.uint8).flatten(), scale.flatten())
        if fmt == "mxfp8":
            assert same_bits(ours.codes, theirs._quantized_data)
        else:  # ModelOpt's MXFP4 rounds ties down instead of to even; there are none here
            assert torch.equal(ours.codes, theirs._quantized_data)


def test_e2m1_equals_torchaos_cast():
    """Its cast alone: its NVFP4Tensor multiplies by reciprocals, and so differs from ModelOpt in the last place."""
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    x = torch.from_numpy(probes(ml_dtypes.float4_e2m1fn))
    x = torch.cat([x, -x])
    x = torch.cat([x, x.new_zeros(x.numel() % 2)])
    theirs = kernels.pack_uint4(kernels.f32_to_f4_unpacked(x))
    assert torch.equal(Element(4, E2M1).store(E2M1.nearest_(x.abs()), x), theirs.view(torch.uint8))


def test_nvfp4_equals_torchaos_but_for_its_reciprocals_and_its_least_scale():
    """docs/formats.md: torchao multiplies by 1/scale where we divide, and its block scales stop at 2**-6.

    Given our s2, every other block scale is the same, and a code differs only where the quotient is beside a tie.
    """
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    middle = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = differing = 0
    for kind in ("normal", "magnitudes 1 to 1e-8 by block", "large", "grid points", "one large element"):
        for tile in tiles()[kind]:
            ours = encode(tile, "nvfp4")
            s2, block = ours.scales["global"], ours.scales["block"].float()
            theirs = module.NVFP4Tensor.to_nvfp4(tile, per_tensor_scale=s2)
            used = (tile.view(*block.shape, 16).abs().amax(-1) > 0) & (block > 2.0**-6)
            assert torch.equal(block[used], theirs.scale.view_as(block).float()[used]), kind
            a, b = (t.view(torch.uint8) for t in (ours.codes, theirs.qdata))
            a, b = (torch.stack([t & 15, t >> 4], -1).view(*block.shape, 16)[used] for t in (a, b))
            moved = a != b
            quotient = (tile.view(*block.shape, 16) / (block * s2)[..., None]).abs()[used][moved]
            assert ((quotient[:, None] - middle).abs() <= 1e-6 * middle).any(-1).all(), kind
            codes, differing = codes + a.numel(), differing + int(moved.sum())
    assert codes > 5000 and differing < TOLERANCES["torchao"][0] * codes


# ---- scale rules


def brute_force(v: torch.Tensor, scales: list[float], grid: Grid) -> list[float]:
    """Σ(v − round(v/s)·s)² in float64 for each scale; v float32 [n]."""
    errors = []
    for s in scales:
        q = grid.nearest_((v.abs() / s).float()).double()
        errors.append(float(((v.abs().double() - q * s) ** 2).sum()))
    return errors


def test_four_over_six_takes_the_better_scale():
    x = tiles()["normal"][0]
    state = encode(x, "nvfp4", "four_over_six")
    s2 = float(state.scales["global"])
    assert s2 == float(x.abs().max() / np.float32(6 * 256))
    tolerance = TOLERANCES["search"][0]
    picked = set()
    for block, scale in zip(x.view(-1, 16), state.scales["block"].float().flatten().tolist(), strict=True):
        amax = block.abs().max()
        two = [float((amax / np.float32(top * s2)).to(torch.float8_e4m3fn).float()) for top in (6, 4)]
        errors = brute_force(block / s2, two, E2M1)
        assert scale in two
        picked.add(two.index(scale))
        assert errors[two.index(scale)] <= min(errors) * (1 + tolerance)
    assert picked == {0, 1}


def test_four_over_six_gives_six_the_tie():
    x = torch.zeros(1, 16)
    x[0, :2] = torch.tensor([6.0, -3.0])  # exact either way: 6·s and 3·s, or 4·1.5s and 2·1.5s
    assert encode(x, "nvfp4", "four_over_six").scales["block"].float().item() == 256


@pytest.mark.parametrize("fmt", ["nvfp4", "mxfp4", "mxfp8", "fp8_e4m3", "int8"])
def test_mse_is_never_worse_than_the_other_rules(fmt):
    for kind in ("normal", "magnitudes 1 to 1e-8 by block", "one large element"):
        x = tiles()[kind]
        block = FORMATS[fmt].block or x.shape[-1]
        error = {
            rule: (fake_quantize(x, fmt, rule) - x).double().square().unflatten(-1, (-1, block)).sum(-1)
            for rule in FORMATS[fmt].scale_rules
        }
        others = ["four_over_six"] if fmt == "nvfp4" else ["amax"]  # nvfp4's amax has another global scale
        for rule in others:
            assert (error["mse"] <= error[rule] * (1 + TOLERANCES["search"][0])).all(), (fmt, kind, rule)
        assert error["mse"].sum() < error["amax"].sum() or fmt in ("int8", "fp8_e4m3")


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 32, 60, 128])
def test_tree_sum_adds_in_the_documented_order(n):
    x = torch.randn(5, 3, n, generator=torch.Generator().manual_seed(n))
    want = []
    for row in x.view(-1, n).numpy():
        row = list(row)
        while len(row) > 1:
            h = 1 << ((len(row) - 1).bit_length() - 1)
            row = [row[i] + row[i + h] if i + h < len(row) else row[i] for i in range(h)]
        want.append(row[0])
    assert tree_sum(x.clone()).flatten().tolist() == [float(v) for v in want]


# ---- stochastic rounding


def mix(x: int, key: int = 0) -> int:
    x ^= x >> 16
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x ^= key
    x ^= x >> 15
    return x * 0x846CA68B & 0xFFFFFFFF


def test_random_numbers_are_the_documented_hash():
    def fin(x):
        y = mix(x & 0xFFFFFFFF)
        return y ^ y >> 16

    for seed in (0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF):
        lo, hi = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
        k0, k1 = fin(lo ^ fin(hi + 0x9E3779B9)), fin(hi ^ fin(lo + 0x85EBCA6B))
        want = [(mix(i + k0 & 0xFFFFFFFF, k1) >> 8) / 2**24 for i in range(100)]
        assert uniform(torch.tensor([seed]), 100)[0].tolist() == want


def test_derived_seeds_are_the_documented_hash():
    def mix64(x):
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            x = (x ^ x >> shift) * factor & (1 << 64) - 1
        return x

    def derive(*parts):
        state = 0
        for part in parts:
            state = mix64((state ^ part & (1 << 64) - 1) + 0x9E3779B97F4A7C15 & (1 << 64) - 1)
        return state - (1 << 64) if state >> 63 else state

    got = derive_seeds(5, torch.tensor([[0], [-3]]), torch.arange(4))
    assert got.tolist() == [[derive(5, a, b) for b in range(4)] for a in (0, -3)]
    assert (
        derive_seeds("layers.0", 1).item() != derive_seeds("layers.1", 1).item() != derive_seeds(1, "layers.1").item()
    )


def test_uniform_is_uniform():
    u = uniform(derive_seeds(0, torch.arange(64)), 1 << 14).double()
    n = u.numel()
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
    counts = torch.histc(u, 256, 0, 1)
    assert ((counts - n / 256) ** 2 / (n / 256)).sum() < 256 + 5 * (2 * 256) ** 0.5
    centred = u - 0.5
    for shift in (1, 2, 128):  # neighbours in a tile, and the same element under the next seed
        assert abs((centred[:, :-shift] * centred[:, shift:]).mean() * 12) < 5 / n**0.5
    assert abs((centred[:-1] * centred[1:]).mean() * 12) < 5 / n**0.5
    raw = uniform(torch.arange(4096), 4).double() - 0.5  # seeds 0, 1, 2, …, not derived
    assert (raw.mean(0).abs() < 5 * (1 / 12 / 4096) ** 0.5).all()
    assert abs((raw[:-1] * raw[1:]).mean() * 12) < 5 / 16384**0.5


STOCHASTIC = [(n, r) for n, f in FORMATS.items() if f.stochastic for r in (f.scale_rules if f.scaling else ["amax"])]


@pytest.mark.parametrize("fmt, rule", STOCHASTIC)
def test_stochastic_rounding_is_unbiased_and_keeps_to_neighbours(fmt, rule):
    trials = 3000
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(5))
    x[0, 3] = 0.0
    x[1] *= 1e-3
    state = encode(x.expand(trials, 4, 32), fmt, rule, seeds=derive_seeds(1, torch.arange(trials)))
    grid, scaling = FORMATS[fmt].element.grid, FORMATS[fmt].scaling
    multiplier = torch.ones(4, 1) if scaling is None else scaling.multiplier(state[0].scales)
    multiplier = multiplier.repeat_interleave(32 // multiplier.shape[-1], -1)
    v = x.abs() / multiplier
    assert (v <= grid.max * (1 + 1e-6)).all()  # nothing clipped: the scale is rounded up
    v.clamp_(max=grid.max)
    step = grid.power(v) * 2.0**-grid.mantissa
    low = (v / step).floor() * step
    high = torch.where(low == v, low, low + step)
    got = state.decode().abs()
    is_low, is_high = got == low * multiplier, got == high * multiplier
    assert (is_low | is_high).all()
    # The count of ups is binomial: within 6 standard deviations, or one event where they are rare.
    p = ((v - low) / step).double()
    ups = (is_high & ~is_low).sum(0)
    assert ((ups - trials * p).abs() <= 6 * (trials * p * (1 - p)).sqrt() + 1).all()
    assert ups.sum() > 0


@pytest.mark.parametrize("name", GRIDS)
def test_stochastic_rounding_at_the_edges_of_its_random_numbers(name):
    """Up exactly where random < fraction: never for what is on the grid, always just below the fraction."""
    grid, dtype = GRIDS[name]
    values = torch.from_numpy(grid_values(dtype))
    values = values[values <= grid.max]
    for random in (0.0, 0.5, 1 - 2.0**-24):
        assert same_bits(grid.stochastic_(values.clone(), torch.full_like(values, random)), values)
    low, high = values[:-1], values[1:]
    for fraction in (2.0**-10, 0.25, 0.75, 1 - 2.0**-10):
        x = low + fraction * (high - low)
        exact = (x.double() - low) / (high.double() - low) == fraction  # not where float32 itself has to round
        assert exact.sum() > len(low) * 0.9
        for random, want in ((fraction, low), (fraction - 2.0**-24, high), (0.0, high), (1 - 2.0**-24, low)):
            got = grid.stochastic_(x.clone(), torch.full_like(x, random))
            assert torch.equal(got[exact], want[exact])
    top = torch.tensor([grid.max, 3.4e38])
    assert grid.stochastic_(top.clone(), torch.zeros(2)).tolist() == [grid.max] * 2


@pytest.mark.parametrize("fmt", [n for n, f in FORMATS.items() if f.stochastic])
def test_stochastic_rounding_keeps_exact_values(fmt):
    once = fake_quantize(tiles()["normal"], fmt)
    again = fake_quantize(once, fmt, seeds=torch.arange(3))
    assert torch.allclose(again, once, rtol=3e-7, atol=0)  # a scale may move by an ulp, no code does
    assert torch.equal(encode(once, fmt, seeds=torch.arange(3)).codes.float(), encode(once, fmt).codes.float())


def test_a_tile_rounds_by_its_own_seed_alone():
    x = torch.randn(5, 2, 8, 48, generator=torch.Generator().manual_seed(2))
    seeds = derive_seeds(9, torch.arange(5)[:, None], torch.arange(2))
    for fmt in ("nvfp4", "fp16", "int8"):
        whole = encode(x, fmt, seeds=seeds)
        one = encode(x[3:4, 1:], fmt, seeds=seeds[3:4, 1:])
        assert torch.equal(whole.codes[3, 1].view(torch.uint8), one.codes[0, 0].view(torch.uint8))
        shared = fake_quantize(x[:1].expand(2, 2, 8, 48), fmt, seeds=torch.tensor(7))
        assert torch.equal(shared[0], shared[1])
        assert not torch.equal(fake_quantize(x, fmt, seeds=seeds), fake_quantize(x, fmt, seeds=seeds + 1))


def test_adding_a_format_is_one_entry(monkeypatch):
    """MXFP6 E3M2, as notebook 04 adds it: codes equal to ml_dtypes' on the way."""
    monkeypatch.setitem(
        FORMATS, "mxfp6", Format("mxfp6", "MXFP6 E3M2, E8M0 scale per 32", Element(8, E3M2), PowerOfTwoScale(32))
    )
    x = tiles()["normal"]
    state = encode(x, "mxfp6", "mse", "hadamard16")
    assert same_bits(state.decode(), fake_quantize(x, "mxfp6", "mse", "hadamard16"))
    scale = PowerOfTwoScale().multiplier(encode(x, "mxfp6").scales).repeat_interleave(32, -1)
    want = np.clip((x / scale).numpy(), -28, 28).astype(ml_dtypes.float6_e3m2fn).astype(np.float32)
    assert torch.equal(fake_quantize(x, "mxfp6"), torch.from_numpy(want) * scale)
