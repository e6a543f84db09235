"""Sixteen bytes of a row of the copy as words of an operand of device/mma.py, and Θ as the other one.

Four elements at a time are a *step* of a thread: of each row two words, of every format. Block scales are multiplied
in, which is exact: a code times its scale has at most six significant bits. Rows' scales come after the sums.

* nvfp4, mxfp4: float16 times a Θ in float16, as the window kernels store it for them, or bfloat16 times a float32 Θ;
* fp8, mxfp8, int8, bf16: bfloat16 times the three bfloat16 parts of a float32 Θ;
* fp16: two parts of its own, fp32: three.
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from .fp4 import block_pairs
from .mma import bf16_pair, half_floats, pair_parts, scaled_pair
from .targets import tl, triton

BARRIER_PTX = tl.constexpr("{ .reg .pred p; setp.ne.u32 p, 0, 0; bar.red.popc.u32 $0, 0, p; }")


@triton.jit
def begin_loads(ISA: tl.constexpr):
    """Zero, an int32, that is known only when all loads above are under way: make what comes first after them depend on
    it. Else ptxas puts each load near its use, to save registers, and a warp waits for memory several times."""
    if ISA >= 90:
        return tl.inline_asm_elementwise(BARRIER_PTX, "=r", [], tl.int32, False, 1)
    else:
        return 0


@triton.jit
def load_words(p, m):
    """Two int64 in a row for each thread, by one load where they are aligned."""
    return tl.split(tl.load(p[:, None] + tl.arange(0, 2)[None, :], mask=m[:, None], other=0))


@triton.jit
def _e4m3_pairs(b_w, b_s, MX: tl.constexpr, ISA: tl.constexpr):
    """Four codes in an int32 to bfloat16 pairs (0, 2) and (1, 3), times the scale b_s where MX."""
    b_even = ((b_w << 8) & -0x7FFF8000) | ((b_w << 4) & 0x07F007F0)  # 0x80008000 as an int32
    b_odd = (b_w & -0x7FFF8000) | ((b_w >> 4) & 0x07F007F0)
    b_unit = tl.full(b_w.shape, 0x7B807B80, tl.int32)  # 2**120, which makes exponents of E4M3 those of bfloat16
    b_even, b_odd = scaled_pair(b_even, b_unit, False, ISA), scaled_pair(b_odd, b_unit, False, ISA)
    if MX:
        b_even, b_odd = scaled_pair(b_even, b_s, False, ISA), scaled_pair(b_odd, b_s, False, ISA)
    return b_even, b_odd


@triton.jit
def _int8_pairs(b_w):
    """Four int8 in an int32 to bfloat16 pairs (0, 1) and (2, 3)."""
    b_w ^= -0x7F7F7F80  # 0x80808080: numbers from 0 to 255, which are 128 too large
    b_x = ((b_w & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    b_y = (((b_w >> 8) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    b_z = (((b_w >> 16) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    b_w = (((b_w >> 24) & 0xFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
    return bf16_pair(b_x, b_y), bf16_pair(b_z, b_w)


@triton.jit
def _scaled_word(b_w, b_s, HALF: tl.constexpr, ISA: tl.constexpr):
    """Pairs of decoded 4-bit codes times b_s, float16 where HALF, else bfloat16."""
    b_w = scaled_pair(b_w, b_s, True, ISA)
    if HALF:
        return b_w
    else:
        b_x, b_y = half_floats(b_w)
        return bf16_pair(b_x, b_y)


@triton.jit
def _split_eight(b_x):
    """[N, 2, 2, 2] as eight tensors."""
    b_x, b_y = tl.split(b_x)
    b_0, b_1 = tl.split(b_x)
    b_2, b_3 = tl.split(b_y)
    return tl.split(b_0) + tl.split(b_1) + tl.split(b_2) + tl.split(b_3)


@triton.jit
def _scaled_block(b_x, b_s, HALF: tl.constexpr, ISA: tl.constexpr):
    """Sixteen 4-bit codes (int64) times b_s, a pair of the scale in float16: eight pairs."""
    b_p = block_pairs(b_x, ISA)
    if ISA >= 90:
        b_found = ()
        for i in tl.static_range(8):
            b_found = b_found + (_scaled_word(b_p[i], b_s, HALF, ISA),)
        return b_found
    else:  # all at once, for the interpreter's sake
        b_x = tl.join(tl.join(b_p[0], b_p[1]), tl.join(b_p[2], b_p[3]))
        b_x = tl.join(b_x, tl.join(tl.join(b_p[4], b_p[5]), tl.join(b_p[6], b_p[7])))
        return _split_eight(_scaled_word(b_x, b_s[:, None, None, None], HALF, ISA))


@triton.jit
def decoded(b_x, b_y, b_s, b_t, FORMAT: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr):
    """Two int64 of codes and the scales of each to their pairs in order: all first parts, then second, then third."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        return _scaled_block(b_x, b_s, HALF, ISA) + _scaled_block(b_y, b_t, HALF, ISA)
    else:
        b_0, b_1 = b_x.to(tl.int32), (b_x >> 32).to(tl.int32)
        b_2, b_3 = b_y.to(tl.int32), (b_y >> 32).to(tl.int32)
        if FORMAT == "bf16":
            return b_0, b_1, b_2, b_3
        elif FORMAT == "fp32":
            b_p = pair_parts(
                b_0.to(tl.float32, bitcast=True), b_1.to(tl.float32, bitcast=True),
                b_2.to(tl.float32, bitcast=True), b_3.to(tl.float32, bitcast=True),
            )  # fmt: skip
            return b_p[0] + b_p[1] + b_p[2]
        elif FORMAT == "fp16":  # eleven significant bits: two parts
            b_x, b_y = half_floats(b_0)
            b_z, b_w = half_floats(b_1)
            b_p = pair_parts(b_x, b_y, b_z, b_w)
            b_x, b_y = half_floats(b_2)
            b_z, b_w = half_floats(b_3)
            b_q = pair_parts(b_x, b_y, b_z, b_w)
            return b_p[0] + b_q[0] + b_p[1] + b_q[1]
        elif FORMAT == "int8":
            return _int8_pairs(b_0) + _int8_pairs(b_1) + _int8_pairs(b_2) + _int8_pairs(b_3)
        else:
            MX: tl.constexpr = FORMAT == "mxfp8"
            b_p = _e4m3_pairs(b_0, b_s, MX, ISA) + _e4m3_pairs(b_1, b_s, MX, ISA)
            return b_p + _e4m3_pairs(b_2, b_s, MX, ISA) + _e4m3_pairs(b_3, b_s, MX, ISA)


@triton.jit
def block_scales(p_row, b_top, o_piece, m, FORMAT: tl.constexpr, ISA: tl.constexpr):
    """What a thread's two int64 are multiplied by, as pairs; of mxfp4 scales over the row's largest.

    ``p_row``: the block scales of the thread's row; ``b_top``: the code of that row's largest.
    """
    if FORMAT == "nvfp4":
        b_s = tl.load(p_row + o_piece * 2, mask=m, other=0).to(tl.int32) * 0x00800080
        b_t = tl.load(p_row + o_piece * 2 + 1, mask=m, other=0).to(tl.int32) * 0x00800080
        if ISA < 100:  # decoded codes are 2**-14 of their values there
            b_up = tl.full(b_s.shape, 0x78007800, tl.int32)  # 2**15
            b_s, b_t = scaled_pair(b_s, b_up, True, ISA), scaled_pair(b_t, b_up, True, ISA)
        return b_s, b_t
    elif FORMAT == "mxfp4":
        FIELD: tl.constexpr = 16 if ISA >= 100 else 30
        b_s = tl.load(p_row + o_piece, mask=m, other=0).to(tl.int32) - b_top + FIELD
        b_s = (tl.maximum(b_s, 0) << 10) * 0x00010001
        return b_s, b_s
    elif FORMAT == "mxfp8":
        b_s = tl.load(p_row + o_piece // 2, mask=m, other=0).to(tl.int32) * 0x00800080
        return b_s, b_s
    else:
        return o_piece, o_piece


@triton.jit
def row_unit(p_scale, p_block, m, N: tl.constexpr, FORMAT: tl.constexpr):
    """What sums of a row are multiplied by, and the code of the largest of its N block scales, if any."""
    b_top = m.to(tl.int32)
    b_unit = b_top.to(tl.float32)
    if FORMAT == "mxfp4":
        b_top = tl.load(p_block, mask=m, other=0).to(tl.int32)
        for i in tl.static_range(1, N):
            b_top = tl.maximum(b_top, tl.load(p_block + i, mask=m, other=0).to(tl.int32))
        b_unit = (b_top << 23).to(tl.float32, bitcast=True)
    elif FORMAT == "fp8_e4m3" or FORMAT == "int8":
        b_unit = tl.load(p_scale, mask=m, other=0.0)
    return b_unit, b_top


@triton.jit
def _two_floats(b_w):
    """The two float32 of an int64."""
    return b_w.to(tl.int32).to(tl.float32, bitcast=True), (b_w >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def theta_operand(p_theta, o_position, m, STEP: tl.constexpr, FORMAT: tl.constexpr, ISA: tl.constexpr):
    """Four elements of a float32 Θ, two in an int64, in the order in which codes are decoded: parts of two pairs."""
    if (FORMAT == "nvfp4" or FORMAT == "mxfp4") and ISA < 100:
        p_theta += o_position // 8 * 4  # of eight codes the pairs (0, 4) (2, 6), then (1, 5) (3, 7)
        b_x = _two_floats(tl.load(p_theta, mask=m, other=0))
        b_y = _two_floats(tl.load(p_theta + 2, mask=m, other=0))
        b_z = _two_floats(tl.load(p_theta + 1, mask=m, other=0))
        b_w = _two_floats(tl.load(p_theta + 3, mask=m, other=0))
        return pair_parts(b_x[STEP % 2], b_y[STEP % 2], b_z[STEP % 2], b_w[STEP % 2])
    else:
        b_x, b_z = load_words(p_theta + o_position // 2, m)
        b_x, b_y = _two_floats(b_x)
        b_z, b_w = _two_floats(b_z)
        if FORMAT == "fp8_e4m3" or FORMAT == "mxfp8":
            return pair_parts(b_x, b_z, b_y, b_w)
        else:
            return pair_parts(b_x, b_y, b_z, b_w)
