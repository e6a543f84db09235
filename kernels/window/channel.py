"""Dot products and sums over the keys of a ring whose channels each have their own decay: KDA's part of the window
kernel.

Channels are tiles [N, VEC], of which a thread holds a row, and a key is one such tile: decays are summed from key to
key within a thread, and only what is summed over channels crosses threads.
"""

# mypy: disable-error-code="assignment"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from ..device.math import LOG2E, exp2_fast
from ..device.targets import tl, triton


@triton.jit
def total(b_x):
    """The sum of a tile [N, VEC]."""
    return tl.sum(tl.sum(b_x, axis=1), axis=0)


@triton.jit
def _halves(b_x, b_y, M: tl.constexpr):
    """Threads without bit M of their index get their x plus that of the thread with it, the others so of y: [N]."""
    o_n = tl.arange(0, b_x.shape[0])
    m_y = (o_n & M) != 0
    return tl.where(m_y, b_y, b_x) + tl.gather(tl.where(m_y, b_x, b_y), o_n ^ M, 0)


@triton.jit
def eight_sums(b_x):
    """The sums [8] of eight [N]: after three exchanges between threads each has an eighth of one vector's."""
    N: tl.constexpr = b_x[0].shape[0]
    b_0 = _halves(b_x[0], b_x[4], N // 2)
    b_1 = _halves(b_x[1], b_x[5], N // 2)
    b_2 = _halves(b_x[2], b_x[6], N // 2)
    b_3 = _halves(b_x[3], b_x[7], N // 2)
    b_0 = _halves(b_0, b_2, N // 4)
    b_1 = _halves(b_1, b_3, N // 4)
    return tl.sum(tl.reshape(_halves(b_0, b_1, N // 8), [8, N // 8]), axis=1)


@triton.jit
def channel_dots(
    p_ring_k, p_ring_g, i_last, b_token, b_query, b_sum, o_k, o_l,
    S_K: tl.constexpr, S_G: tl.constexpr, NORM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Keys j < last, decayed to the last token, times its key and query, and their squares: [LP] each, zeros where no
    such key is. Channels are [N, VEC], a row a thread; b_sum is the last token's log-decay, to base 2.

    Eight keys at a time from the last backwards, so that a short ring costs less than a full one. Their strides are
    constants, so that one address serves all eight.
    """
    K: tl.constexpr = o_k.shape[0] * o_k.shape[1]
    b_a = tl.zeros(o_l.shape, tl.float32)
    b_b = tl.zeros(o_l.shape, tl.float32)
    b_n = tl.zeros(o_l.shape, tl.float32)
    for i_8 in range(0, i_last, 8):
        i_first = i_last - 1 - i_8
        p_k = p_ring_k + i_first * S_K + o_k
        p_g = p_ring_g + i_first * S_G + o_k
        b_ks = ()
        b_gs = ()
        for i in tl.static_range(8):  # all loads before the first of them is waited for
            m_k = o_k < tl.where(i_first >= i, K, 0)
            b_ks = b_ks + (tl.load(p_k - i * S_K, mask=m_k, other=0.0).to(tl.float32),)
            b_gs = b_gs + (tl.load(p_g - i * S_G, mask=m_k, other=0.0).to(tl.float32),)
        b_as = ()
        b_bs = ()
        b_ns = ()
        for i in tl.static_range(8):
            b_z = b_ks[i] * exp2_fast(b_sum, ISA)
            b_sum += b_gs[i] * LOG2E
            b_as = b_as + (tl.sum(b_z * b_token, axis=1),)
            b_bs = b_bs + (tl.sum(b_z * b_query, axis=1),)
            if NORM:
                b_ns = b_ns + (tl.sum(b_ks[i] * b_ks[i], axis=1),)
        m_i = (o_l <= i_first) & (o_l > i_first - 8)
        o_i = (i_first - o_l) & 7
        b_a = tl.where(m_i, tl.gather(eight_sums(b_as), o_i, 0), b_a)
        b_b = tl.where(m_i, tl.gather(eight_sums(b_bs), o_i, 0), b_b)
        if NORM:
            b_n = tl.where(m_i, tl.gather(eight_sums(b_ns), o_i, 0), b_n)
    return b_a, b_b, b_n


@triton.jit
def channel_theta(
    p_ring_k, p_ring_g, i_last, b_c, b_last, b_own, o_k,
    S_K: tl.constexpr, S_G: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """e^G·b_last − Σ_j c_j·e^G_j·k_j [N, VEC] for keys j < last; b_c [LP], b_own the last token's log-decay to base
    2."""
    N: tl.constexpr = o_k.shape[0]
    K: tl.constexpr = o_k.shape[0] * o_k.shape[1]
    LP: tl.constexpr = b_c.shape[0]
    b_x = tl.zeros(o_k.shape, tl.float32)
    b_sum = tl.zeros(o_k.shape, tl.float32)
    for i_8 in range(0, i_last, 8):
        p_k = p_ring_k + i_8 * S_K + o_k
        p_g = p_ring_g + i_8 * S_G + o_k
        b_ks = ()
        b_gs = ()
        for i in tl.static_range(8):
            m_k = o_k < tl.where(i_8 + i < i_last, K, 0)
            b_ks = b_ks + (tl.load(p_k + i * S_K, mask=m_k, other=0.0).to(tl.float32),)
            b_gs = b_gs + (tl.load(p_g + i * S_G, mask=m_k, other=0.0).to(tl.float32),)
        for i in tl.static_range(8):
            b_sum += b_gs[i] * LOG2E
            b_z = b_ks[i] * exp2_fast(b_sum, ISA)
            o_j = (tl.zeros([N], tl.int32) + (i_8 + i)) & (LP - 1)  # behind the last, any: the key is zero
            b_x += b_z * tl.gather(b_c, o_j, 0)[:, None]
    return exp2_fast(b_sum + b_own, ISA) * b_last - b_x
