"""Matrix products as exact as FP32, on tensor cores."""

from __future__ import annotations

from .codec import bits_float, float_bits
from .targets import tl, triton


@triton.jit
def bf16_parts(b_x):
    """Three bfloat16 whose sum is the float32 b_x exactly: its 24 significant bits in three times eight."""
    b_1 = bits_float(float_bits(b_x) & -65536)
    b_2 = bits_float(float_bits(b_x - b_1) & -65536)
    return b_1.to(tl.bfloat16), b_2.to(tl.bfloat16), (b_x - b_1 - b_2).to(tl.bfloat16)


@triton.jit
def dot_fp32(b_a, b_b, ISA: tl.constexpr):
    """b_a [M, K] float32 · b_b [K, N] float32 or bfloat16, float32 out, with an error of FP32's order.

    On tensor cores as products of bfloat16 parts, each exact, the smallest first: three if b_b is bfloat16, with
    nothing left out; else six, and what is left out is 2**-24 of a product. The sums are truncated there, not
    rounded: add the result to what lives long, never accumulate into it.
    The interpreter's bfloat16 products are wrong; it, and plain Triton, take FP32 products.
    """
    if ISA >= 90:
        b_a1, b_a2, b_a3 = bf16_parts(b_a)
        if b_b.dtype == tl.bfloat16:
            b_c = tl.dot(b_a3, b_b)
            b_c = tl.dot(b_a2, b_b, b_c)
            return tl.dot(b_a1, b_b, b_c)
        else:
            b_b1, b_b2, b_b3 = bf16_parts(b_b)
            b_c = tl.dot(b_a2, b_b2)
            b_c = tl.dot(b_a1, b_b3, b_c)
            b_c = tl.dot(b_a3, b_b1, b_c)
            b_c = tl.dot(b_a1, b_b2, b_c)
            b_c = tl.dot(b_a2, b_b1, b_c)
            return tl.dot(b_a1, b_b1, b_c)
    else:
        return tl.dot(b_a, b_b.to(tl.float32), input_precision="ieee")


@triton.jit
def dot_raw(b_a, b_b, ISA: tl.constexpr):
    """b_a · b_b of loaded inputs, float32: products of two 16-bit floats are exact on tensor cores as they are."""
    if ISA >= 90 and b_a.dtype.primitive_bitwidth == 16:
        return tl.dot(b_a, b_b)
    else:
        return dot_fp32(b_a.to(tl.float32), b_b.to(tl.float32), ISA)


@triton.jit
def weighted_rows(b_x, b_w, ISA: tl.constexpr):
    """Σ_j w_j·x_j [N] of rows b_x [M, N] and float32 b_w [M], exact to FP32.

    Of bfloat16 rows by one matrix product, whose second operand has the three parts of w as columns: no sums across
    warps, and products that are exact.
    """
    if b_x.dtype == tl.bfloat16:
        b_1, b_2, b_3 = bf16_parts(b_w)
        o_n = tl.arange(0, 8)[None, :]
        b_parts = tl.where(o_n == 0, b_1[:, None], 0.0)
        b_parts = tl.where(o_n == 1, b_2[:, None], b_parts)
        b_parts = tl.where(o_n == 2, b_3[:, None], b_parts)
        if ISA >= 90:
            return tl.sum(tl.dot(tl.trans(b_x), b_parts.to(tl.bfloat16)), axis=1)
        else:
            b_parts = b_parts.to(tl.float32)
            return tl.sum(tl.dot(tl.trans(b_x).to(tl.float32), b_parts, input_precision="ieee"), axis=1)
    else:
        return tl.sum(b_x.to(tl.float32) * b_w[:, None], axis=0)


@triton.jit
def weighted_sums(b_x, b_w, ISA: tl.constexpr):
    """Σ_j w_ji·x_j [I, N] of rows b_x [M, N] and float32 b_w [M, I], exact to FP32; I a power of two.

    As ``weighted_rows``: the three parts of bfloat16 rows' weights are columns of one product.
    """
    M: tl.constexpr = b_x.shape[0]
    I: tl.constexpr = b_w.shape[1]
    W: tl.constexpr = 8 if I == 1 else 4
    if I >= 8 and ISA >= 90 and b_x.dtype == tl.bfloat16:
        b_1, b_2, b_3 = bf16_parts(b_w)
        b_y = tl.dot(tl.trans(b_x), b_3)
        b_y = tl.dot(tl.trans(b_x), b_2, b_y)
        return tl.trans(tl.dot(tl.trans(b_x), b_1, b_y))
    o_n = tl.arange(0, W)[None, None, :]
    b_w = b_w[:, :, None]
    if b_x.dtype == tl.bfloat16:
        b_1, b_2, b_3 = bf16_parts(b_w)
        b_parts = tl.where(o_n == 0, b_1, 0.0)
        b_parts = tl.where(o_n == 1, b_2, b_parts)
        b_parts = tl.reshape(tl.where(o_n == 2, b_3, b_parts), [M, I * W])
        if ISA >= 90:
            b_y = tl.dot(tl.trans(b_x), b_parts.to(tl.bfloat16))
        else:
            b_y = dot_fp32(tl.trans(b_x).to(tl.float32), b_parts.to(tl.float32), ISA)
    else:
        b_parts = tl.reshape(tl.where(o_n == 0, b_w, 0.0), [M, I * W])
        b_y = dot_fp32(tl.trans(b_x).to(tl.float32), b_parts, ISA)
    return tl.trans(tl.sum(tl.reshape(b_y, [b_x.shape[1], I, W]), axis=2))
