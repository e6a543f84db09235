"""The readout of several queries, under the interpreter: every format, unequal rows, poison in all that is not read."""

import os
import re

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import importlib
from dataclasses import replace

import pytest
import torch
from kernel_cases import SPECS, read_case
from test_kernels import FP32, error

from quantize_state.kernels import launch
from quantize_state.kernels.device.mma import MMA_BF16_PTX, MMA_F16_PTX, mma
from quantize_state.kernels.device.targets import INTERPRET, tl, triton, unavailable
from quantize_state.kernels.readout.triton import readout
from quantize_state.quant.encoded import EncodedState
from quantize_state.quant.errors import InvalidValueError
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.spec import LayerSpec

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

LIVE = [0, 2, 3]
THETA = 5e-4
"""Of products with a Θ rounded to float16, whose sums are float32: half of its last bit is 2.4e-4 of an element."""


def check(case, bound, **keywords):
    state, arguments, out, y = case
    readout(state.read_source, state.ring["v"], *arguments, out, **keywords)
    assert error(out[LIVE], y[LIVE]) < bound
    assert out[1].isnan().all(), "a padded row was written"


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format):
    """V = 40 is two tiles of sixteen rows and a half of one; eight queries fill a product's columns."""
    check(read_case(format, queries=8, family="kda"), FP32)


@pytest.mark.parametrize("format", ["fp32", "nvfp4"])
def test_a_shared_theta(format):
    check(read_case(format, queries=2, family="mamba2", shared=3, fills=(0, 1, 0, 2, 3)), FP32)


@pytest.mark.parametrize(("format", "queries"), [("nvfp4", 2), ("nvfp4", 4), ("mxfp4", 4)])
def test_theta_in_float16(format, queries):
    check(read_case(format, queries=queries, half=True), THETA)


@pytest.mark.parametrize("format", ["fp8_e4m3", "mxfp8", "int8"])
def test_a_single_query_of_eight_bits(format, monkeypatch):
    """As a GPU takes it; the interpreter by itself takes single queries by the other kernel."""
    kernel = importlib.import_module("quantize_state.kernels.readout.triton")
    case = read_case(format, queries=1)
    source = case[0].read_source
    assert kernel.single_by_products(source, 90) and not kernel.single_by_products(source, 0)
    assert not kernel.single_by_products(read_case("nvfp4", queries=1)[0].read_source, 90)
    odd = torch.zeros(3, source.codes[0].numel() + 4, dtype=torch.uint8).view(source.codes.dtype)
    odd = odd[:, : source.codes[0].numel()].unflatten(1, source.codes.shape[1:])
    assert not kernel.single_by_products(replace(source, codes=odd), 90), "slots that are no whole words"
    monkeypatch.setattr(kernel, "single_by_products", lambda *_: True)
    monkeypatch.setattr(kernel, "readout_kernel", None)
    check(case, FP32)


def test_more_queries_than_a_product_has_columns():
    check(read_case("nvfp4", queries=9, half=True, family="kda"), THETA)


def test_windows_beyond_sixteen():
    check(read_case("bf16", queries=2, window=21, fills=(0, 3, 20, 21, 17)), FP32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_of_other_types(dtype):
    check(read_case("fp8_e4m3", queries=2, dtype=dtype), FP32)


@pytest.mark.parametrize(("rows", "warps"), [(16, 4), (64, 1), (128, 8)])
def test_launches(rows, warps, monkeypatch):
    """One tile or several for a head of 40 rows, by one warp or several."""
    entry = launch.Entry(launch.Launch(rows=rows, warps=warps), "readout_many")
    monkeypatch.setattr(launch, "TABLE", (entry, *launch.TABLE))
    check(read_case("nvfp4", queries=3, half=True, family="kda", fills=(0, 1, 0, 2, 3)), THETA)


def test_several_tiles_of_several_warps(monkeypatch):
    monkeypatch.setitem(SPECS, "tall", (LayerSpec("gdn", 1, 1, 56, 32), None))
    check(read_case("nvfp4", queries=2, half=True, family="tall"), THETA)  # two warps of two tiles, by the table


def test_unequal_rows_leave_the_rest_alone():
    """Of four queries a row reads those from its certain token on, if that has no output yet, to its last ring row."""
    state, arguments, out, y = read_case("nvfp4", queries=4, half=True)
    used = arguments[-1]
    row = torch.tensor([-1, -2, 0, 2], dtype=torch.int32)
    theta, gain, c = arguments[:3]
    for b in LIVE:  # the terms of queries that are not read were never written
        for t in range(4):
            if not 0 <= int(row[b]) + t < int(used[b]):
                theta[b, t], gain[b, t], c[b, t] = float("nan"), float("nan"), float("nan")
    c[torch.arange(8).expand_as(c) >= used[:, None, None, None]] = float("nan")
    out.fill_(7.0)  # what poisoned terms would write is NaN
    readout(state.read_source, state.ring["v"], *arguments, out, row=row)
    for b in LIVE:
        for t in range(4):
            if 0 <= int(row[b]) + t < int(used[b]):
                assert error(out[b, t], y[b, t]) < THETA, (b, t)
            else:
                assert (out[b, t] == 7.0).all(), (b, t)


def test_skip_and_gate():
    state, arguments, out, y = read_case("bf16", queries=3)
    rng = torch.Generator().manual_seed(5)
    x, z = torch.randn(y.shape, generator=rng), torch.randn(y.shape, generator=rng)
    d = torch.randn(state.spec.heads, generator=rng)
    y = (y + d[:, None] * x) * torch.nn.functional.silu(z)
    check((state, arguments, out, y), FP32, skip=(x, d), gate=z)


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8", "mxfp8", "mxfp4"])
def test_extreme_codes(format):
    """Every code of a byte that the format has, subnormal ones too, and block scales far apart in a row."""
    state, (theta, gain, c, slots, used), out, _ = read_case(format, queries=2)
    copy: EncodedState = state.copy
    count = copy.codes[0].numel()
    codes = torch.arange(count, dtype=torch.int32).mul(7).remainder(256).to(torch.uint8)
    if "fp8" in format:
        codes[codes % 128 == 127] = 1  # which are NaN
    if format == "int8":
        codes[codes == 128] = 1
    for slot in range(copy.codes.shape[0]):
        copy.codes[slot].view(torch.uint8).copy_(codes.view(copy.codes[slot].shape))
        for name, t in copy.scales.items():
            if name == "block":
                t[slot].view(torch.uint8).copy_(torch.arange(t[slot].numel()).remainder(9).add(120).view(t[slot].shape))
    c.zero_()
    readout(copy, state.ring["v"], theta, gain, c, slots, used, out)
    for b in LIVE:
        y = torch.einsum("hvk,thk->thv", copy.decode()[int(slots[b])].double(), theta[b].double())
        assert error(out[b], y * gain[b, ..., None]) < FP32


@triton.jit
def one_product(p_a, p_b, p_c, p_d, N: tl.constexpr, HALF: tl.constexpr):
    o = tl.arange(0, N)
    b_a = (tl.load(p_a + o), tl.load(p_a + N + o), tl.load(p_a + 2 * N + o), tl.load(p_a + 3 * N + o))
    b_b = (tl.load(p_b + o), tl.load(p_b + N + o))
    b_c = (tl.load(p_c + o), tl.load(p_c + N + o), tl.load(p_c + 2 * N + o), tl.load(p_c + 3 * N + o))
    b_d = mma(b_c, b_a, b_b, HALF, 0)
    for i in tl.static_range(4):
        tl.store(p_d + i * N + o, b_d[i])


@pytest.mark.parametrize("half", [False, True])
def test_registers_of_a_product_lie_as_the_instruction_has_them(half):
    """The PTX manual's formulas for m16n8k16: register i of lane 4·g + t, low half first. Two warps."""
    rng, dtype = torch.Generator().manual_seed(0), torch.float16 if half else torch.bfloat16
    a, b = torch.randn(2, 16, 16, generator=rng).to(dtype), torch.randn(2, 16, 8, generator=rng).to(dtype)
    c = torch.randn(2, 16, 8, generator=rng)
    words_a, words_b = torch.zeros(4, 64, 2, dtype=dtype), torch.zeros(2, 64, 2, dtype=dtype)
    words_c, found = torch.zeros(4, 64), torch.zeros(4, 64)
    for warp in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i in range(8):  # elements of A
                row, column = g + 8 * (i % 4 >= 2), 2 * t + i % 2 + 8 * (i >= 4)
                words_a[i // 2, 32 * warp + lane, i % 2] = a[warp, row, column]
            for i in range(4):  # of B, and of C
                words_b[i // 2, 32 * warp + lane, i % 2] = b[warp, 2 * t + i % 2 + 8 * (i >= 2), g]
                words_c[i, 32 * warp + lane] = c[warp, g + 8 * (i >= 2), 2 * t + i % 2]
    one_product[(1,)](words_a.view(torch.int32), words_b.view(torch.int32), words_c, found, N=64, HALF=half)
    expected = a.float() @ b.float() + c
    for warp in range(2):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for i in range(4):
                ours, exact = found[i, 32 * warp + lane], expected[warp, g + 8 * (i >= 2), 2 * t + i % 2]
                assert ours == pytest.approx(float(exact), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("ptx", [MMA_F16_PTX, MMA_BF16_PTX])
def test_operands_of_the_instruction_are_in_order(ptx):
    """D, A, B, C, as ``mma`` hands them over."""
    lists = re.findall(r"\{([^}]*)\}", ptx.value)
    assert [n for each in lists for n in re.findall(r"\d+", each)] == [str(i) for i in range(14)]
    assert [each.count("$") for each in lists] == [4, 4, 2, 4]
    assert ("bf16.bf16" in ptx.value) == (ptx is MMA_BF16_PTX) and "m16n8k16.row.col.f32" in ptx.value


def test_slots_that_are_no_whole_words_are_refused():
    state, arguments, out, _ = read_case("fp8_e4m3", queries=2)
    codes = state.copy.codes
    raw = torch.zeros(codes.shape[0], codes[0].numel() + 3, dtype=torch.uint8)
    odd = raw[:, : codes[0].numel()].unflatten(1, codes.shape[1:]).view(codes.dtype)
    copy = EncodedState(**(vars(state.copy) | {"codes": odd}))
    with pytest.raises(InvalidValueError, match="pad slots to 8 bytes"):
        readout(copy, state.ring["v"], *arguments, out)
