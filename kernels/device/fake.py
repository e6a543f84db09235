"""A tile in registers as its bytes would decode: quant/codec.py's ``fake_quantize``, bit for bit, without memory.

Tiles b_x [R, K] float32, already rotated; callers compile with ``enable_fp_fusion=False``, as for device/codec.py.
NaN stays NaN, so that a state that was not finite once is found at the end.
"""

from __future__ import annotations

from .codec import (
    bf16_bits,
    bits_float,
    block_amax,
    float_bits,
    head_scale,
    over_blocks,
    power_of_two_scale,
    round_grid,
    row_scale,
    two_level_scale,
)
from .targets import tl, triton

SIGN = tl.constexpr(-(1 << 31))


@triton.jit
def xorshift(b_x, SHIFT: tl.constexpr):
    return b_x ^ (b_x >> SHIFT)


@triton.jit
def uniform(b_index, b_k0, b_k1):
    """Number b_index (int32) of the stream with keys b_k0, b_k1 (int32): quant/rounding.py, ``uniform``."""
    b_x = (b_index + b_k0).to(tl.uint32, bitcast=True)
    b_x = xorshift(b_x, 16) * 0x7FEB352D
    b_x = xorshift(b_x ^ b_k1.to(tl.uint32, bitcast=True), 15) * 0x846CA68B
    return (b_x >> 8).to(tl.int32, bitcast=True).to(tl.float32) * (2.0**-24)


@triton.jit
def stochastic_grid(b_a, b_random, MANTISSA: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    """Magnitudes to one of their two neighbours on the grid: quant/rounding.py, ``Grid.stochastic_``."""
    b_a = tl.minimum(b_a, MAX)
    b_step = bits_float(tl.maximum(float_bits(b_a) & 0x7F800000, (LOW + 127) << 23)) * (2.0**-MANTISSA)
    b_a = tl.div_rn(b_a, b_step)
    b_whole = tl.floor(b_a)
    return (b_whole + tl.where(b_random < b_a - b_whole, 1.0, 0.0)) * b_step


@triton.jit
def _rounded(b_a, b_random, MANTISSA: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        return stochastic_grid(b_a, b_random, MANTISSA, LOW, MAX)
    else:
        return round_grid(b_a, MANTISSA, LOW, MAX)


@triton.jit
def _unclipped_power(b_amax, EMAX: tl.constexpr, MAX: tl.constexpr):
    """E8M0 scales that clip no element, for stochastic rounding."""
    b_scale = power_of_two_scale(b_amax, EMAX)
    return tl.minimum(tl.where(b_amax > b_scale * MAX, b_scale * 2.0, b_scale), 2.0 ** (127 - EMAX))


@triton.jit
def fake_quantize(b_x, b_top, b_random, FORMAT: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """decode(encode(b_x)). b_top: for nvfp4 the largest magnitude of the whole head. b_random [R, K] in
    [0, 1): numbers of stochastic rounding, else anything."""
    b_a = tl.abs(b_x)
    if FORMAT == "fp32":
        b_y = b_a
    elif FORMAT == "fp16":
        b_y = _rounded(b_a, b_random, 10, -14, 65504.0, STOCHASTIC)
    elif FORMAT == "bf16":
        if STOCHASTIC:
            b_y = stochastic_grid(b_a, b_random, 7, -126, 3.3895313892515355e38)
        else:
            b_y = bits_float(bf16_bits(b_a).to(tl.int32) << 16)  # the grid's largest steps would overflow
    elif FORMAT == "fp8_e4m3" or FORMAT == "int8":
        MAX: tl.constexpr = 448.0 if FORMAT == "fp8_e4m3" else 127.0
        b_m = tl.broadcast_to(row_scale(tl.max(b_a, axis=1), MAX)[:, None], b_a.shape)
        if FORMAT == "fp8_e4m3":
            b_y = _rounded(tl.div_rn(b_a, b_m), b_random, 3, -6, 448.0, STOCHASTIC) * b_m
        else:
            b_y = _rounded(tl.div_rn(b_a, b_m), b_random, 7, 7, 127.0, STOCHASTIC) * b_m
    else:
        BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32
        EMAX: tl.constexpr = 8 if FORMAT == "mxfp8" else 2
        if FORMAT == "nvfp4":
            b_total, _ = head_scale(b_top, RULE)
            b_scale, _ = two_level_scale(b_a, b_total, 1.0, RULE, False, 0, STOCHASTIC)
            b_scale = b_scale * b_total
        elif STOCHASTIC:
            b_scale = _unclipped_power(block_amax(b_a, BLOCK), EMAX, 448.0 if FORMAT == "mxfp8" else 6.0)
        else:
            b_scale = power_of_two_scale(block_amax(b_a, BLOCK), EMAX)
        b_m = over_blocks(b_scale, BLOCK)
        if FORMAT == "mxfp8":
            b_y = _rounded(tl.div_rn(b_a, b_m), b_random, 3, -6, 448.0, STOCHASTIC) * b_m
        else:
            b_y = _rounded(tl.div_rn(b_a, b_m), b_random, 1, 0, 6.0, STOCHASTIC) * b_m
    b_y = bits_float(float_bits(b_y) | (float_bits(b_x) & SIGN))
    if FORMAT == "int8":
        b_y = b_y + 0.0  # has no −0
    return tl.where(b_a < float("inf"), b_y, b_x)  # what is not finite stays so, and is found at the end
