"""Sixteen E2M1 codes at a time, as f16x2 pairs: how the readout spends under four instructions per element.

A block of 16 codes is one int64, so that one load brings it whole. Two codes become one f16x2 word:

* with ISA < 100 by bit moves, seven for both halves of eight codes and one per word: sign to bit 15, magnitude to
  bits 11..9 of each half, which is the value times 2**-14, subnormals included. Words hold the elements
  (0, 4) (2, 6) (1, 5) (3, 7) of eight;
* with ISA >= 100 by the hardware's conversion, in the elements' own order.

Θ is stored in the same order (``pair_position``) as float16, scaled by a power of two: products of one block are
summed in float16, its scale comes after the sum, in float32. The error, about 4e-4 of the output's norm, is below
that of a bfloat16 output.
"""

from __future__ import annotations

from .targets import tl, triton

PAIRS_PTX = tl.constexpr(
    "{ .reg .b8 b<8>; .reg .b32 lo, hi; mov.b64 {lo, hi}, $8;"
    " mov.b32 {b0, b1, b2, b3}, lo; mov.b32 {b4, b5, b6, b7}, hi;"
    " cvt.rn.f16x2.e2m1x2 $0, b0; cvt.rn.f16x2.e2m1x2 $1, b1; cvt.rn.f16x2.e2m1x2 $2, b2; cvt.rn.f16x2.e2m1x2 $3, b3;"
    " cvt.rn.f16x2.e2m1x2 $4, b4; cvt.rn.f16x2.e2m1x2 $5, b5; cvt.rn.f16x2.e2m1x2 $6, b6; cvt.rn.f16x2.e2m1x2 $7, b7; }"
)
LOW_BYTES_PTX = tl.constexpr("prmt.b32 $0, $1, 0, 0x2404;")
DOT_PTX = tl.constexpr(
    "{ .reg .b32 q<8>, s, t; .reg .b16 l, h; .reg .f32 x, y;"
    " mov.b64 {q0, q1}, $9; mov.b64 {q2, q3}, $10; mov.b64 {q4, q5}, $11; mov.b64 {q6, q7}, $12;"
    " mul.rn.f16x2 s, $1, q0; mul.rn.f16x2 t, $5, q4;"
    " fma.rn.f16x2 s, $2, q1, s; fma.rn.f16x2 t, $6, q5, t;"
    " fma.rn.f16x2 s, $3, q2, s; fma.rn.f16x2 t, $7, q6, t;"
    " fma.rn.f16x2 s, $4, q3, s; fma.rn.f16x2 t, $8, q7, t;"
    " add.rn.f16x2 s, s, t; mov.b32 {l, h}, s; cvt.f32.f16 x, l; cvt.f32.f16 y, h; add.f32 $0, x, y; }"
)


# The power of two at or below the largest element of a scaled Θ, and what a decoded value must be multiplied by, with
# the hardware's conversion and without. A block's sum stays below 48·2**(THETA_BITS + 1) units: float16 holds it.
THETA_BITS_CONVERTED = tl.constexpr(8)
THETA_BITS_MOVED = tl.constexpr(13)
UNIT_CONVERTED = tl.constexpr(1.0)
UNIT_MOVED = tl.constexpr(2.0**14)


@triton.jit
def pair_position(o_k, ISA: tl.constexpr):
    """Where element o_k of Θ stands: bits 0 and 2 of its index swapped, but for the hardware's order."""
    if ISA >= 100:
        return o_k
    else:
        return (o_k & ~5) | ((o_k & 1) << 2) | ((o_k >> 2) & 1)


@triton.jit
def _low_bytes(b_x, ISA: tl.constexpr):
    """(b_x << 8) & 0xFF00FF00, by one instruction where there is one."""
    if ISA >= 90:
        return tl.inline_asm_elementwise(LOW_BYTES_PTX, "=r,r", [b_x], tl.int32, True, 1)
    else:
        return (b_x << 8) & -0xFF0100


@triton.jit
def _eight(b_w, b_signs, ISA: tl.constexpr):
    """Eight codes in an int32 to four f16x2 words."""
    b_even = ((b_w << 4) & b_signs) | ((b_w << 1) & 0x0E0E0E0E)
    b_odd = (b_w & b_signs) | ((b_w >> 3) & 0x0E0E0E0E)
    return _low_bytes(b_even, ISA), b_even & -0xFF0100, _low_bytes(b_odd, ISA), b_odd & -0xFF0100


@triton.jit
def block_pairs(b_block, ISA: tl.constexpr, b_zero=0):
    """Blocks of 16 codes (int64) to eight int32 tensors of f16x2 pairs. ``b_zero``: a zero that has to be known first
    (operand.begin_loads)."""
    if ISA >= 100:
        return tl.inline_asm_elementwise(
            PAIRS_PTX, "=r,=r,=r,=r,=r,=r,=r,=r,l", [b_block],
            (tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32), True, 1,
        )  # fmt: skip
    else:
        b_signs = b_zero | -0x7F7F7F80  # 0x80808080 as an int32
        b_0, b_1, b_2, b_3 = _eight(b_block.to(tl.int32), b_signs, ISA)
        b_4, b_5, b_6, b_7 = _eight((b_block >> 32).to(tl.int32), b_signs, ISA)
        return b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7


@triton.jit
def _fma_pair(b_low, b_high, b_pair, b_q):
    """Both halves of one f16x2 product, in plain Triton: b_q int32 holds two float16 of Θ."""
    b_low += (b_pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True) * (b_q & 0xFFFF).to(tl.int16).to(
        tl.float16, bitcast=True
    )
    b_high += (b_pair >> 16).to(tl.int16).to(tl.float16, bitcast=True) * (b_q >> 16).to(tl.int16).to(
        tl.float16, bitcast=True
    )
    return b_low, b_high


@triton.jit
def pairs_dot(b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7, b_qa, b_qb, b_qc, b_qd, ISA: tl.constexpr):
    """Block sums, float32 [R, N], of pairs [R, N] and sixteen float16 of Θ in four int64 [1, N]."""
    if ISA >= 90:
        return tl.inline_asm_elementwise(
            DOT_PTX, "=f,r,r,r,r,r,r,r,r,l,l,l,l",
            [b_0, b_1, b_2, b_3, b_4, b_5, b_6, b_7, b_qa, b_qb, b_qc, b_qd], tl.float32, True, 1,
        )  # fmt: skip
    else:
        b_low = tl.zeros(b_0.shape, tl.float16)
        b_high = tl.zeros(b_0.shape, tl.float16)
        b_low, b_high = _fma_pair(b_low, b_high, b_0, b_qa.to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_1, (b_qa >> 32).to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_2, b_qb.to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_3, (b_qb >> 32).to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_4, b_qc.to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_5, (b_qc >> 32).to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_6, b_qd.to(tl.int32))
        b_low, b_high = _fma_pair(b_low, b_high, b_7, (b_qd >> 32).to(tl.int32))
        return b_low.to(tl.float32) + b_high.to(tl.float32)
