"""Rounding and scales on the device: the torch codec (quant/rounding.py, quant/scales.py), bit for bit.

Helpers for tiles b_x [R, K] float32 in registers. All rounding is one addition in float32 (see ``Grid.nearest``),
never a round trip through an 8-bit float: the ptxas that ships with Triton 3.6 miscompiles that on sm_90 without
an error. Divisions are IEEE divisions. Callers compile with ``enable_fp_fusion=False``: the squared errors of
four_over_six and mse are rounded before they are added.
"""

# Tuples of tensors grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc"
from __future__ import annotations

from .targets import tl, triton

EXPONENT = tl.constexpr(0x7F800000)
SMALLEST = tl.constexpr(2.0**-126)
LARGEST = tl.constexpr(3.4028234663852886e38 * (1 - 2.0**-20))  # quant/scales.py's
RECIPROCAL_PTX = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")
E2M1_PTX = tl.constexpr(
    "{ .reg .b8 b<4>;"
    " cvt.rn.satfinite.e2m1x2.f32 b0, $2, $1; cvt.rn.satfinite.e2m1x2.f32 b1, $4, $3;"
    " cvt.rn.satfinite.e2m1x2.f32 b2, $6, $5; cvt.rn.satfinite.e2m1x2.f32 b3, $8, $7;"
    " mov.b32 $0, {b0, b1, b2, b3}; }"
)
BYTES_PTX = tl.constexpr(
    "{ .reg .b32 l, h; prmt.b32 l, $1, $2, 0x0040; prmt.b32 h, $3, $4, 0x0040; prmt.b32 $0, l, h, 0x5410; }"
)


@triton.jit
def float_bits(b_x):
    return b_x.to(tl.int32, bitcast=True)


@triton.jit
def bits_float(b_x):
    return b_x.to(tl.float32, bitcast=True)


@triton.jit
def _binade(b_a, LOW: tl.constexpr):
    """2**max(floor(log2 a), LOW) for magnitudes a."""
    return bits_float(tl.maximum(float_bits(b_a) & EXPONENT, (LOW + 127) << 23))


@triton.jit
def round_grid(b_a, MANTISSA: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    """Magnitudes to the nearest value (ties to even) of a small float with its lowest binade at LOW; saturates."""
    b_a = tl.minimum(b_a, MAX)
    b_magic = _binade(b_a, LOW) * (1.5 * 2.0 ** (23 - MANTISSA))  # exact: adding it leaves whole steps
    return (b_a + b_magic) - b_magic


@triton.jit
def grid_code(b_a, MANTISSA: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    """The codes (int32) of what ``round_grid`` gives: the same addition, whose last bits count the steps."""
    b_a = tl.minimum(b_a, MAX)
    b_p = _binade(b_a, LOW)
    b_step = float_bits(b_a + b_p * (1.5 * 2.0 ** (23 - MANTISSA))) - float_bits(b_p)
    # bits(1.5·2**(23−m)) − bits(1) = ((23−m) << 23) + (1 << 22)
    return (
        b_step
        + (float_bits(b_p) >> (23 - MANTISSA))
        - (((23 - MANTISSA) << 23) + (1 << 22) + ((LOW + 127) << MANTISSA))
    )


@triton.jit
def e4m3_value(b_code, ISA: tl.constexpr):
    """E4M3 codes (uint8) to float32. Only of loaded codes: see the module's first paragraph."""
    if ISA >= 90:
        return b_code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        b_code = b_code.to(tl.int32)
        return bits_float(((b_code & 0x80) << 24) | ((b_code & 0x7F) << 20)) * 2.0**120


@triton.jit
def e4m3_scale(b_code):
    """E4M3 codes of block scales (uint8, positive) to float32: two instructions, the same on every machine."""
    return bits_float(b_code.to(tl.int32) << 20) * 2.0**120


@triton.jit
def e4m3_scale_code(b_scale):
    """The inverse of ``e4m3_scale``, for numbers that E4M3 holds (int32)."""
    return float_bits(b_scale * 2.0**-120) >> 20


@triton.jit
def e8m0_scale(b_code):
    """E8M0 codes (uint8, at least 1: no scale is below 2**-126) to float32."""
    return bits_float(b_code.to(tl.int32) << 23)


@triton.jit
def e2m1_value(b_code):
    """E2M1 codes (integers, the low four bits) to float32: sign and magnitude into an FP16, times 2**14, is exact."""
    b_half = ((b_code & 8) << 12) | ((b_code & 7) << 9)
    return b_half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def bf16_bits(b_x):
    """float32 to the bits of bfloat16 (int16), saturating; the interpreter's own cast truncates."""
    b_m = float_bits(tl.minimum(tl.abs(b_x), 3.3895313892515355e38))
    b_m = (b_m + 0x7FFF + ((b_m >> 16) & 1)) >> 16
    return (b_m | ((float_bits(b_x) >> 16) & 0x8000)).to(tl.int16)


@triton.jit
def block_amax(b_a, BLOCK: tl.constexpr):
    """Magnitudes [R, K] to their maxima [R, K / BLOCK]."""
    R: tl.constexpr = b_a.shape[0]
    K: tl.constexpr = b_a.shape[1]
    return tl.max(tl.reshape(b_a, [R, K // BLOCK, BLOCK]), axis=2)


@triton.jit
def tile_amax(b_x):
    """The largest magnitude of [R, K]: a scalar, which has no layout that others would have to follow."""
    return tl.max(tl.max(tl.abs(b_x), axis=1), axis=0)


@triton.jit
def over_blocks(b_s, BLOCK: tl.constexpr):
    """Values per block [R, N] to one per element [R, N · BLOCK]."""
    R: tl.constexpr = b_s.shape[0]
    N: tl.constexpr = b_s.shape[1]
    return tl.reshape(tl.broadcast_to(b_s[:, :, None], [R, N, BLOCK]), [R, N * BLOCK])


@triton.jit
def negative(b_x):
    """−x, which costs nothing in a fused multiply-add. Triton's own minus is 0 − x: an addition, and 0 for x = 0."""
    return b_x * -1.0


@triton.jit
def reciprocal(b_m, ISA: tl.constexpr):
    """1 / m, rounded correctly for m from 2**-126 to 2**126: what ``rcp.rn`` does there, without its other cases. For
    ``divided``; plain Triton needs none."""
    if ISA >= 90:
        b_r = tl.inline_asm_elementwise(RECIPROCAL_PTX, "=f,f", [b_m], tl.float32, True, 1)
        return tl.fma(b_r, tl.fma(negative(b_m), b_r, 1.0), b_r)
    else:
        return b_m


@triton.jit
def divided(b_x, b_m, b_inverse, ISA: tl.constexpr):
    """x / m, rounded as a division, from the rounded reciprocal of m, which is at least 2**-71.

    Markstein: one correction by the exact residual gives the rounded quotient. The residual is a multiple of 2**-46·m
    times the quotient's binade, so it is exact for quotients from 2**-32 on, which makes it at least 2**-149; no format
    here tells smaller ones from each other. Zeros keep their sign. The interpreter's fused multiply-add rounds twice;
    it, and plain Triton, divide.
    """
    if ISA >= 90:
        b_q = b_x * b_inverse
        return tl.fma(negative(tl.fma(b_q, b_m, negative(b_x))), b_inverse, b_q)
    else:
        return tl.div_rn(b_x, b_m)


@triton.jit
def quotient(b_x, b_multiplier, BLOCK: tl.constexpr, ISA: tl.constexpr):
    """b_x [R, K] over its blocks' multipliers [R, K / BLOCK], rounded as a division, by one division per block. Where
    multipliers are tiny, both sides are scaled by a power of two first (see ``divided``)."""
    if ISA >= 90:
        b_power = tl.where(b_multiplier < 2.0**-64, 2.0**64, 1.0)
        b_m = b_multiplier * b_power
        b_x = b_x * over_blocks(b_power, BLOCK)
        return divided(b_x, over_blocks(b_m, BLOCK), over_blocks(reciprocal(b_m, ISA), BLOCK), ISA)
    else:
        return tl.div_rn(b_x, over_blocks(b_multiplier, BLOCK))


@triton.jit
def row_scale(b_amax, MAX: tl.constexpr):
    """FP32 scales of rows with maxima b_amax."""
    return tl.minimum(tl.maximum(tl.div_rn(b_amax, tl.full(b_amax.shape, MAX, tl.float32)), SMALLEST), LARGEST / MAX)


@triton.jit
def power_of_two_scale(b_amax, EMAX: tl.constexpr):
    """E8M0 scales, as float32, of blocks with maxima b_amax: 2**(floor(log2 amax) − EMAX), at least 2**-126."""
    return bits_float(tl.maximum((float_bits(b_amax) & EXPONENT) - (EMAX << 23), 1 << 23))


@triton.jit
def _e4m3_round(b_raw, UNCLIPPED: tl.constexpr):
    """Block scales to E4M3, as float32, at least its smallest value above zero; UNCLIPPED: the next one above those
    that would clip an element (quant/scales.py)."""
    b_scale = round_grid(tl.maximum(b_raw, 2.0**-9), 3, -6, 448.0)
    if UNCLIPPED:
        b_code = grid_code(b_scale, 3, -6, 448.0) + (b_raw > b_scale * (1 + 2.0**-20)).to(tl.int32)
        return e4m3_scale(tl.minimum(b_code, 0x7E))
    else:
        return b_scale


@triton.jit
def _fitting_error(b_a, b_multiplier, ISA: tl.constexpr):
    """Σ(v − round(v))² over blocks of 16, v = a / multiplier (at least 2**-64), as [R, N]. The order of the sum decides
    bits: element i + 8 is added to element i, then 4, 2, 1 (quant/scales.py, tree_sum); each is a sum of two."""
    R: tl.constexpr = b_a.shape[0]
    N: tl.constexpr = b_multiplier.shape[1]
    b_inverse = over_blocks(reciprocal(b_multiplier, ISA), 16)
    b_v = divided(b_a, over_blocks(b_multiplier, 16), b_inverse, ISA)
    b_e = round_grid(b_v, 1, 0, 6.0) - b_v
    b_e = b_e * b_e
    for i in tl.static_range(4):
        b_e = tl.sum(tl.reshape(b_e, [R * N, 2, 8 >> i]), axis=1)
    return tl.reshape(b_e, [R, N])


@triton.jit
def _halved(b_e, N: tl.constexpr):
    b_sums = ()
    for i in tl.static_range(N):
        b_sums = b_sums + (b_e[i] + b_e[i + N],)
    return b_sums


@triton.jit
def _fitting_error_of_blocks(b_x, b_multiplier, ISA: tl.constexpr):
    """``_fitting_error`` of a tuple of the blocks' elements."""
    b_inverse = reciprocal(b_multiplier, ISA)
    b_errors = ()
    for i in tl.static_range(16):
        b_v = divided(tl.abs(b_x[i]), b_multiplier, b_inverse, ISA)
        b_e = round_grid(b_v, 1, 0, 6.0) - b_v
        b_errors = b_errors + (b_e * b_e,)
    return _halved(_halved(_halved(_halved(b_errors, 8), 4), 2), 1)[0]


@triton.jit
def _error(b_a, b_multiplier, BLOCKS: tl.constexpr, ISA: tl.constexpr):
    if BLOCKS:
        return _fitting_error_of_blocks(b_a, b_multiplier, ISA)
    else:
        return _fitting_error(b_a, b_multiplier, ISA)


@triton.jit
def head_scale(b_top, RULE: tl.constexpr):
    """NVFP4's FP32 scale of a head whose largest magnitude is b_top, and the power of two that ``two_level_scale``
    wants its numbers and their divisors multiplied by, so that ``divided`` loses nothing. Scalars."""
    CEILING: tl.constexpr = 448.0 if RULE == "amax" else 256.0
    b_total = tl.div_rn(b_top, 6.0 * CEILING)
    b_total = tl.minimum(tl.maximum(b_total, SMALLEST), LARGEST / (6.0 * 448.0))
    return b_total, tl.where(b_total < 2.0**-50, 2.0**64, 1.0)


@triton.jit
def _over_head(b_amax, b_divisor, ISA: tl.constexpr):
    return divided(b_amax, b_divisor, reciprocal(b_divisor, ISA), ISA)


@triton.jit
def two_level_scale(
    b_a, b_total, b_power, RULE: tl.constexpr, BLOCKS: tl.constexpr, ISA: tl.constexpr, UNCLIPPED: tl.constexpr = False
):  # fmt: skip
    """NVFP4's scales of magnitudes [R, K] · b_power: the blocks' scales and maxima [R, K / 16]. BLOCKS: of a tuple of
    the blocks' elements. UNCLIPPED: for stochastic rounding."""
    b_amax = largest(b_a, 16) if BLOCKS else block_amax(b_a, 16)
    b_scale = _e4m3_round(_over_head(b_amax, b_total * 6.0 * b_power, ISA), UNCLIPPED)
    if RULE != "amax":
        b_least = _error(b_a, b_scale * b_total * b_power, BLOCKS, ISA) * (b_scale * b_scale)
    if RULE == "four_over_six":
        b_other = _e4m3_round(_over_head(b_amax, b_total * 4.0 * b_power, ISA), UNCLIPPED)
        b_error = _error(b_a, b_other * b_total * b_power, BLOCKS, ISA) * (b_other * b_other)
        b_scale = tl.where(b_error < b_least, b_other, b_scale)
    elif RULE == "mse":
        b_code = e4m3_scale_code(b_scale)
        for i in range(1, 7 if UNCLIPPED else 9):  # codes further by 1, −1, 2, −2, 3, 4, 5, 6; by 1 to 6
            i_near = i
            if not UNCLIPPED:
                i_near = tl.where(i > 4, i - 2, tl.where(i % 2 == 1, (i + 1) // 2, -(i // 2)))
            b_other = e4m3_scale(tl.minimum(tl.maximum(b_code + i_near, 1), 0x7E))
            b_error = _error(b_a, b_other * b_total * b_power, BLOCKS, ISA) * (b_other * b_other)
            b_better = b_error < b_least
            b_scale = tl.where(b_better, b_other, b_scale)
            b_least = tl.where(b_better, b_error, b_least)
    return b_scale, b_amax


@triton.jit
def e2m1_code(b_a):
    """Numbers to int32 whose lowest byte is the code of their magnitude, as ``grid_code(b_a, 1, 0, 6.0)`` has it; of
    the rest, bits 22 and above are not zero. By one addition: of 1.5·2**(22 + e) in binade e, so that the last bit is
    a step, and of 2e steps, the codes below the binade less the steps below it."""
    b_a = tl.minimum(tl.abs(b_a), 6.0)
    b_e = float_bits(tl.maximum(b_a, 1.0)) >> 23
    return float_bits(b_a + bits_float(b_e * ((1 << 23) + 2) + ((22 << 23) + (1 << 22) - 254)))


@triton.jit
def _sign(b_word, b_x):
    """b_word << 4 with the sign of x in bit 3; bits 0 to 2 are any."""
    return (b_word << 4) | (b_x.to(tl.uint32, bitcast=True) >> 28)


@triton.jit
def e2m1_word(q0, q1, q2, q3, q4, q5, q6, q7, ISA: tl.constexpr):
    """Eight numbers to E2M1 codes in an int32, the first in the lowest four bits."""
    if ISA >= 100:
        return tl.inline_asm_elementwise(
            E2M1_PTX, "=r,f,f,f,f,f,f,f,f", [q0, q1, q2, q3, q4, q5, q6, q7], tl.int32, True, 1
        )
    else:
        b_0 = e2m1_code(q0) + (e2m1_code(q1) << 4)
        b_1 = e2m1_code(q2) + (e2m1_code(q3) << 4)
        b_2 = e2m1_code(q4) + (e2m1_code(q5) << 4)
        b_3 = e2m1_code(q6) + (e2m1_code(q7) << 4)
        if ISA >= 90:
            b_word = tl.inline_asm_elementwise(BYTES_PTX, "=r,r,r,r,r", [b_0, b_1, b_2, b_3], tl.int32, True, 1)
        else:
            b_word = (b_0 & 0xFF) | ((b_1 & 0xFF) << 8) | ((b_2 & 0xFF) << 16) | (b_3 << 24)
        b_sign = q7.to(tl.uint32, bitcast=True) >> 28
        b_sign = _sign(_sign(_sign(_sign(_sign(_sign(_sign(b_sign, q6), q5), q4), q3), q2), q1), q0)
        return (b_word & 0x77777777) | (b_sign.to(tl.int32, bitcast=True) & -0x77777778)


@triton.jit
def blocks_of(b_x, BLOCK: tl.constexpr):
    """A tile [R, K] as a tuple of the blocks' elements 0, 1, …, each [R · K / BLOCK]."""
    B: tl.constexpr = b_x.shape[0] * b_x.shape[1] // BLOCK
    b_blocks = (tl.reshape(b_x, [B, BLOCK]),)
    for i in tl.static_range(4 if BLOCK == 16 else 5):
        b_low, b_high = (), ()
        for j in tl.static_range(1 << i):
            # the leading half of what is left of the index
            b_halves = tl.permute(tl.reshape(b_blocks[j], [B, 2, BLOCK >> (i + 1)]), (0, 2, 1))
            b_0, b_1 = tl.split(b_halves)
            if 2 << i == BLOCK:
                b_0, b_1 = tl.reshape(b_0, [B]), tl.reshape(b_1, [B])
            b_low, b_high = b_low + (b_0,), b_high + (b_1,)
        b_next = ()
        for j in tl.static_range(1 << i):
            b_next = b_next + (b_low[j], b_high[j])
        b_blocks = b_next
    return b_blocks


@triton.jit
def scaled(b_x, b_power, N: tl.constexpr):
    """The N tensors of a tuple times b_power."""
    b_y = ()
    for i in tl.static_range(N):
        b_y = b_y + (b_x[i] * b_power,)
    return b_y


@triton.jit
def largest(b_x, N: tl.constexpr):
    """The largest magnitude of the N tensors of a tuple, element by element."""
    b_top = tl.abs(b_x[0])
    for i in tl.static_range(1, N):
        b_top = tl.maximum(b_top, tl.abs(b_x[i]))
    return b_top


@triton.jit
def turned(b_x, p_columns, BALANCED: tl.constexpr, ROTATE: tl.constexpr):
    """Rows [R, K] of a state in the units of its copy: over the head's column scales p_columns [K], then rotated."""
    if BALANCED:
        b_c = tl.load(p_columns + tl.arange(0, b_x.shape[1]))
        b_x = b_x * tl.div_rn(tl.full(b_c.shape, 1.0, tl.float32), b_c)[None, :]
    if ROTATE > 1:
        b_x = hadamard(b_x, ROTATE)
    return b_x


@triton.jit
def hadamard(b_x, SIZE: tl.constexpr):
    """Rows [R, K] times block-diagonal orthonormal Hadamard matrices of SIZE; sums in quant/rotation.py's order."""
    R: tl.constexpr = b_x.shape[0]
    K: tl.constexpr = b_x.shape[1]
    for i in tl.static_range(8):
        if (2 << i) <= SIZE:
            b_y = tl.permute(tl.reshape(b_x, [R, K // (2 << i), 2, 1 << i]), (0, 1, 3, 2))
            b_a, b_b = tl.split(b_y)
            b_x = tl.reshape(tl.permute(tl.join(b_a + b_b, b_a - b_b), (0, 1, 3, 2)), [R, K])
    return b_x * (1.0 / SIZE**0.5)
