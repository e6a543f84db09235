"""A head's tile [R, K] to and from the bytes of an EncodedState, for every read format.

Offsets ``o_rows`` [R] (int64) are rows of the head's slot, (head · V + v), from the pointers' first element of
that slot; K is a power of two, so that no block is padded. One-byte floats come as uint8 pointers, bfloat16 as int16.
"""

from __future__ import annotations

from ...quant.formats import FORMATS
from ...quant.policy import StatePolicy
from .codec import (
    bf16_bits,
    block_amax,
    e2m1_pack,
    e2m1_value,
    e4m3_scale,
    e4m3_scale_code,
    e4m3_value,
    e8m0_scale,
    float_bits,
    grid_code,
    over_blocks,
    power_of_two_scale,
    quotient,
    row_scale,
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
    b_x, b_top, p_codes, p_row, p_block, p_total, o_rows, m_rows,
    FORMAT: tl.constexpr, RULE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Encode b_x [R, K] float32 and store codes and scales. Rows outside m_rows must hold zeros.

    For nvfp4, the scalar b_top is the largest magnitude of the whole head, and p_total points at the head's scale.
    """
    K: tl.constexpr = b_x.shape[1]
    m_x = m_rows[:, None]
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
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        if FORMAT == "nvfp4":
            b_scale, b_amax, b_total = two_level_scale(b_a, b_top, RULE, ISA)
            b_multiplier = b_scale * b_total
            # an all-zero block has scale 1
            b_stored = e4m3_scale_code(tl.where(b_amax == 0.0, 1.0, b_scale))
            tl.store(p_total, b_total)
        else:
            b_multiplier = power_of_two_scale(block_amax(b_a, 32), 2 if FORMAT == "mxfp4" else 8)
            b_stored = float_bits(b_multiplier) >> 23
        o_s = o_rows[:, None] * (K // BLOCK) + tl.arange(0, K // BLOCK)[None, :]
        tl.store(p_block + o_s, b_stored.to(tl.uint8), mask=m_x)
        if FORMAT == "mxfp8":
            b_code = grid_code(quotient(b_a, b_multiplier, 32, ISA), 3, -6, 448.0) | b_sign
            tl.store(p_codes + o_x, b_code.to(tl.uint8), mask=m_x)
        else:
            o_x = o_rows[:, None] * (K // 2) + tl.arange(0, K // 2)[None, :]
            tl.store(p_codes + o_x, e2m1_pack(b_x, b_multiplier, BLOCK, ISA), mask=m_x)


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
