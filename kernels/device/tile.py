"""A head's tile [R, K] to and from the bytes of an EncodedState, for every read format.

Offsets ``o_rows`` [R] (int64) are rows of the head's slot, (head · V + v), from the pointers' first element of
that slot; K is a power of two, so that no block is padded. One-byte floats come as uint8 pointers, bfloat16 as int16.
"""

# Tuples of tensors grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from ...quant.formats import FORMATS
from ...quant.policy import StatePolicy
from .codec import (
    bf16_bits,
    bits_float,
    block_amax,
    blocks_of,
    divided,
    e2m1_value,
    e2m1_word,
    e4m3_scale,
    e4m3_scale_code,
    e4m3_value,
    e8m0_scale,
    float_bits,
    grid_code,
    head_scale,
    largest,
    over_blocks,
    power_of_two_scale,
    quotient,
    reciprocal,
    row_scale,
    scaled,
    two_level_scale,
)
from .targets import tl, triton


def lacks(policy: StatePolicy) -> str | None:
    """Why the device codec cannot encode as ``policy`` says, or None: it has the scale rule mse for nvfp4 alone."""
    if policy.scale_rule == "mse":
        for name in (policy.checkpoint, policy.read):
            if name not in (None, "nvfp4") and FORMATS[name].scaling is not None:
                return f"the device codec has the scale rule mse for nvfp4 alone, not for {name}"
    return None


@triton.jit
def store_tile(
    b_x, b_top, p_codes, p_row, p_block, p_total, i_row, i_rows,
    FORMAT: tl.constexpr, RULE: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Encode b_x [R, K] float32, rows from i_row (int64) on of the slot, and store codes and scales: of i_rows rows, or
    WHOLE of all. Rows beyond must hold zeros. WORDS: p_codes of 4-bit formats points at whole words of 8 bytes.

    For nvfp4, the scalar b_top is the largest magnitude of the whole head, and p_total points at the head's scale.
    """
    R: tl.constexpr = b_x.shape[0]
    K: tl.constexpr = b_x.shape[1]
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        N: tl.constexpr = K // BLOCK
        store_e2m1(
            blocks_of(b_x, BLOCK), b_top, p_codes, p_block, p_total, i_row * N, i_rows * N,
            R * N, FORMAT, RULE, WHOLE, WORDS, ISA,
        )  # fmt: skip
    else:
        m_rows = tl.arange(0, R) < (R if WHOLE else i_rows)
        m_x = m_rows[:, None]
        o_rows = i_row + tl.arange(0, R)
        o_x = o_rows[:, None] * K + tl.arange(0, K)[None, :]
        b_a = tl.abs(b_x)
        b_sign = (float_bits(b_x) >> 24) & 0x80
        if FORMAT == "fp32":
            tl.store(p_codes + o_x, b_x, mask=m_x)
        elif FORMAT == "fp16":
            tl.store(p_codes + o_x, tl.minimum(tl.maximum(b_x, -65504.0), 65504.0).to(tl.float16), mask=m_x)
        elif FORMAT == "bf16":
            tl.store(p_codes + o_x, bf16_bits(b_x), mask=m_x)
        elif FORMAT == "fp8_e4m3":
            b_row = row_scale(tl.max(b_a, axis=1), 448.0)
            b_code = grid_code(quotient(b_a, b_row[:, None], K, ISA), 3, -6, 448.0) | b_sign
            tl.store(p_codes + o_x, b_code.to(tl.uint8), mask=m_x)
            tl.store(p_row + o_rows, b_row, mask=m_rows)
        elif FORMAT == "int8":
            b_row = row_scale(tl.max(b_a, axis=1), 127.0)
            b_code = grid_code(quotient(b_a, b_row[:, None], K, ISA), 7, 7, 127.0)
            tl.store(p_codes + o_x, tl.where(b_sign != 0, -b_code, b_code).to(tl.int8), mask=m_x)
            tl.store(p_row + o_rows, b_row, mask=m_rows)
        else:
            b_multiplier = power_of_two_scale(block_amax(b_a, 32), 8)
            o_s = o_rows[:, None] * (K // 32) + tl.arange(0, K // 32)[None, :]
            tl.store(p_block + o_s, (float_bits(b_multiplier) >> 23).to(tl.uint8), mask=m_x)
            b_code = grid_code(quotient(b_a, b_multiplier, 32, ISA), 3, -6, 448.0) | b_sign
            tl.store(p_codes + o_x, b_code.to(tl.uint8), mask=m_x)


BLOCK_PTX = tl.constexpr(
    "{ .reg .pred p; setp.ne.b32 p, $17, 0;"
    + "".join(f" mov.b32 ${i}, 0;" for i in range(16))
    + "".join(f" @p ld.global.v4.f32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [$16 + {4 * i}];" for i in range(0, 16, 4))
    + " }"
)
WHOLE_BLOCK_PTX = tl.constexpr(
    "".join(f" ld.global.v4.f32 {{${i}, ${i + 1}, ${i + 2}, ${i + 3}}}, [$16 + {4 * i}];" for i in range(0, 16, 4))
)
OUTPUTS_PTX = tl.constexpr(",".join(["=&f"] * 16))
F = tl.float32


@triton.jit
def load_blocks(p_x, m_x, WHOLE: tl.constexpr):
    """Sixteen float32 from each of the addresses p_x [B], multiples of 16 bytes, as a tuple of tensors [B]. Triton's
    own loads would spread a block over four threads."""
    o = p_x.to(tl.int64)
    if WHOLE:
        return tl.inline_asm_elementwise(
            WHOLE_BLOCK_PTX, OUTPUTS_PTX + ",l", [o], (F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F), False, 1
        )
    else:
        return tl.inline_asm_elementwise(
            BLOCK_PTX, OUTPUTS_PTX + ",l,r", [o, m_x.to(tl.int32)],
            (F, F, F, F, F, F, F, F, F, F, F, F, F, F, F, F), False, 1,
        )  # fmt: skip


@triton.jit
def store_e2m1(
    b_x, b_top, p_codes, p_block, p_total, i_block, i_blocks,
    B: tl.constexpr, FORMAT: tl.constexpr, RULE: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """``store_tile`` for 4-bit formats, of B blocks from i_block (int64) on of the slot, i_blocks of which count: a
    tuple of their elements. So a thread has whole blocks: makes a scale once, asks no other for a maximum, and stores
    words."""
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
    if FORMAT == "nvfp4":
        b_total, b_power = head_scale(b_top, RULE)
        tl.store(p_total, b_total)
        if ISA >= 90:
            if b_power != 1.0:
                b_x = scaled(b_x, b_power, BLOCK)
        else:
            b_power = 1.0
        b_scale, b_amax = two_level_scale(b_x, b_total, b_power, RULE, True, ISA)
        b_multiplier = b_scale * b_total * b_power
        # an all-zero block has scale 1
        b_stored = e4m3_scale_code(tl.where(b_amax == 0.0, 1.0, b_scale))
        b_inverse = reciprocal(b_multiplier, ISA)
    else:
        b_multiplier = power_of_two_scale(largest(b_x, BLOCK), 2)
        b_stored = float_bits(b_multiplier) >> 23
        b_inverse = bits_float((254 << 23) - float_bits(b_multiplier))  # exact, and so is the rounding of a product
    o_b = tl.arange(0, B)
    m_b = None if WHOLE else o_b < i_blocks
    tl.store(p_block + i_block + o_b, b_stored.to(tl.uint8), mask=m_b)
    b_words = ()
    for i in tl.static_range(0, BLOCK, 8):
        b_q = ()
        for j in tl.static_range(8):
            if FORMAT == "nvfp4":
                b_q = b_q + (divided(b_x[i + j], b_multiplier, b_inverse, ISA),)
            else:
                b_q = b_q + (b_x[i + j] * b_inverse,)
        b_words = b_words + (e2m1_word(b_q[0], b_q[1], b_q[2], b_q[3], b_q[4], b_q[5], b_q[6], b_q[7], ISA),)
    p_codes += i_block * (BLOCK // 2)
    for i in tl.static_range(BLOCK // 16):
        b_word = (b_words[2 * i].to(tl.int64) & 0xFFFFFFFF) | (b_words[2 * i + 1].to(tl.int64) << 32)
        o_w = o_b * (BLOCK // 16) + i
        if WORDS:
            tl.store(p_codes.to(tl.pointer_type(tl.int64)) + o_w, b_word, mask=m_b)
        else:
            for j in tl.static_range(8):
                tl.store(p_codes + o_w * 8 + j, (b_word >> (8 * j)).to(tl.uint8), mask=m_b)


@triton.jit
def load_plain(p_codes, o_rows, m_rows, K: tl.constexpr, FORMAT: tl.constexpr, ISA: tl.constexpr):
    """Elements [R, K] of every format with at least 8 bits, as float32, without their scales. Masked rows are zero."""
    o_x = o_rows[:, None] * K + tl.arange(0, K)[None, :]
    if FORMAT == "fp8_e4m3" or FORMAT == "mxfp8":
        return e4m3_value(tl.load(p_codes + o_x, mask=m_rows[:, None], other=0), ISA)
    elif FORMAT == "bf16":
        b_bits = tl.load(p_codes + o_x, mask=m_rows[:, None], other=0).to(tl.int32)
        return (b_bits << 16).to(tl.float32, bitcast=True)
    else:
        return tl.load(p_codes + o_x, mask=m_rows[:, None], other=0).to(tl.float32)


@triton.jit
def load_e2m1(p_codes, o_rows, m_rows, K: tl.constexpr):
    """Elements [R, K] of the 4-bit formats as float32, without their scales. Masked rows are zero."""
    o_x = o_rows[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :]
    b_code = tl.load(p_codes + o_x, mask=m_rows[:, None], other=0).to(tl.int32)
    return tl.reshape(tl.join(e2m1_value(b_code), e2m1_value(b_code >> 4)), [o_rows.shape[0], K])


@triton.jit
def load_block_scales(p_block, o_rows, m_rows, N: tl.constexpr, FORMAT: tl.constexpr):
    """Block scales [R, N] as float32, without nvfp4's scale of the head."""
    o_s = o_rows[:, None] * N + tl.arange(0, N)[None, :]
    if N > 1:
        # Loads of single bytes would otherwise decide the layout of the whole tile: one row per thread.
        o_s = tl.max_contiguous(o_s, (1, 2))
    b_code = tl.load(p_block + o_s, mask=m_rows[:, None], other=0)
    if FORMAT == "nvfp4":
        return e4m3_scale(b_code)
    else:
        return e8m0_scale(b_code)


@triton.jit
def load_tile(
    p_codes, p_row, p_block, p_total, o_rows, m_rows, K: tl.constexpr, FORMAT: tl.constexpr, ISA: tl.constexpr
):  # fmt: skip
    """What ``EncodedState.decode(unrotate=False)`` gives, to the bit: [R, K] float32; masked rows are zero."""
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        b_x = load_e2m1(p_codes, o_rows, m_rows, K)
    else:
        b_x = load_plain(p_codes, o_rows, m_rows, K, FORMAT, ISA)
    if FORMAT == "nvfp4":
        b_s = load_block_scales(p_block, o_rows, m_rows, K // 16, FORMAT) * tl.load(p_total)
        b_x = b_x * over_blocks(b_s, 16)
    elif FORMAT == "mxfp4" or FORMAT == "mxfp8":
        b_x = b_x * over_blocks(load_block_scales(p_block, o_rows, m_rows, K // 32, FORMAT), 32)
    elif FORMAT == "fp8_e4m3" or FORMAT == "int8":
        b_x = b_x * tl.load(p_row + o_rows, mask=m_rows, other=0.0)[:, None]
    return b_x
