"""Functions whose fast forms are not good enough for a recurrence that runs for millions of tokens."""

from __future__ import annotations

from .codec import bits_float
from .targets import tl, triton

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp(b_x):
    """e**x for x <= 88 to about one unit in the last place; zero below −87.3, and for −inf; NaN stays.

    The hardware's e**x errs by 2**-22 always to the same side: the checkpoint is multiplied by e**g at every flush,
    so a state that remembers long would drift. Cody and Waite's reduction and a polynomial (fma-free products of n).
    """
    b_c = tl.maximum(b_x, -100.0, propagate_nan=tl.PropagateNan.ALL)
    b_n = tl.floor(b_c * LOG2E + 0.5)
    b_r = (b_c - b_n * 0.693359375) + b_n * 2.12194440e-4
    b_p = tl.full(b_x.shape, 1.0 / 5040, tl.float32)
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0 / 720, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0 / 120, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0 / 24, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0 / 6, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 0.5, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0, tl.float32))
    b_p = tl.fma(b_p, b_r, tl.full(b_x.shape, 1.0, tl.float32))
    b_power = bits_float((tl.maximum(b_n, -126.0).to(tl.int32) + 127) << 23)
    return tl.where(b_x < -87.3, 0.0, b_p * b_power)


@triton.jit
def exp_fast(b_x, ISA: tl.constexpr):
    """e**x by the hardware, within 2**-22; what is below 2**-126 may become zero. For what lives a window."""
    if ISA >= 90:
        return exp2_fast(b_x * LOG2E, ISA)
    else:
        return tl.exp(b_x)


@triton.jit
def exp2_fast(b_x, ISA: tl.constexpr):
    """2**x in the same way."""
    if ISA >= 90:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [b_x], tl.float32, True, 1)
    else:
        return tl.exp2(b_x)


@triton.jit
def inverse_norm(b_square):
    """1 / sqrt(Σx² + 1e-6), the l2norm of transformers and fla, to about one unit in the last place: the hardware's,
    whose error a step of Newton's squares away. An IEEE root and division cost ten times as much."""
    b_square += 1e-6
    b_y = tl.rsqrt(b_square)
    return tl.where(b_square < float("inf"), b_y + 0.5 * b_y * (1.0 - b_square * b_y * b_y), b_y)
