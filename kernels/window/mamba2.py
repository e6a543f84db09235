"""The window kernel of Mamba-2: appends tokens to the ring, and gives Θ and C, or what a flush multiplies its keys by.

All arithmetic is FP32, or exact: products of 16-bit inputs. Exponentials are of sums of log-decays between two
tokens, never of differences, so that −∞ is an ordinary log-decay. What else the fold needs (decay, X, W) are functions
of the ring that it computes itself, which spares an [L, K] tile per head in memory.
"""

from __future__ import annotations

from ..device.dot import dot_fp32, dot_raw
from ..device.math import exp, inverse_norm
from ..device.operand import begin_loads
from ..device.targets import tl, triton
from .plan import NOTHING
from .tokens import load_pieces, load_rows, put, store_theta, taken


@triton.jit
def _dots(
    p_ring_k, p_k, p_q, i_row, i_n, i_first, s_token, o_j,
    K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """k_j·q_t [LP, 8] of the keys of ring rows o_j and of eight tokens from i_first on, and what keys are multiplied by
    [LP]; zeros where there is no such key or token. BK columns at a time, as pieces of 32: few rows a thread."""
    LP: tl.constexpr = o_j.shape[0]
    o_t = i_first + tl.arange(0, 8)
    o_c = (tl.arange(0, BK // 32) * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
    b_dots = tl.zeros([LP, 8], tl.float32)
    b_square = tl.zeros([LP], tl.float32)
    for i_c in tl.range(0, K, BK):
        b_k = load_pieces(p_ring_k + i_c, p_k + i_c, i_row, i_n, s_token, o_j, o_c)
        b_q = tl.load(p_q + i_c + (o_t * s_token)[:, None, None] + o_c, mask=(o_t < i_n)[:, None, None], other=0.0)
        b_q = tl.trans(tl.reshape(b_q, [8, BK]))
        if b_k.dtype == b_q.dtype:
            b_dots += dot_raw(b_k, b_q, ISA)
        else:
            b_dots += dot_fp32(b_k.to(tl.float32), b_q.to(tl.float32), ISA)
        if NORM:
            b_k = b_k.to(tl.float32)
            b_square += tl.sum(b_k * b_k, axis=1)
    b_norm = tl.full([LP], 1.0, tl.float32)
    if NORM:
        b_norm = inverse_norm(b_square)
    return b_dots, b_norm


@triton.jit
def mamba2_window(
    p_q, p_k, p_v, p_beta, p_rate,  # tokens: [B, T, Hk, K] twice, [B, T, H, V], [B, T, H]; A [H]
    p_ring_k, p_ring_v, p_ring_beta,
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_top,
    p_columns,  # column scales of the copy [H, K], the same for all heads of a group
    s_q, s_k, s_v, s_beta,  # batch strides of the tokens
    s_ring_k, s_ring_v, s_ring_beta,  # slot strides of the ring
    H: tl.constexpr, Hk: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, T: tl.constexpr,
    GROUP: tl.constexpr, GP: tl.constexpr, VP: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, BALANCED: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, Hk, pieces of eight tokens): the GROUP heads of one B and C. Θ [B, T, Hk, K] is q, gain [B, T, H] is
    e^G, and C is stored; of rows that flush, in C's place, what W's keys are multiplied by: e^(G_h − G_j)·β_j, and
    zeros in top [B, H].

    Of the first token the decays of all ring rows are summed, and each later one multiplies by its own. Rows stand
    from the last one backwards, so that the sums Σ g_i over i > j run forwards (Triton's backward ones cost ten times
    as much)."""
    N: tl.constexpr = T if T < 8 else 8
    NP: tl.constexpr = 1 if N == 1 else 2 if N == 2 else 4 if N <= 4 else 8
    i_b = tl.program_id(0)
    i_k = tl.program_id(1)
    i_first = tl.program_id(2) * 8
    i_row = tl.load(p_row + i_b)
    i_used = tl.load(p_used + i_b)
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_n = tl.where(i_used > 0, i_used - i_row, 1)
    if (i_row + begin_loads(ISA) <= NOTHING) | (i_first >= i_n):
        return
    i_b = i_b.to(tl.int64)
    i_h = i_k * GROUP
    o_l = tl.arange(0, LP)
    o_j = (i_row + i_n - 1 - o_l) & (LP - 1)  # behind the first row the free ones, for which zeros are stored
    o_g = tl.arange(0, GP)
    m_g = o_g < GROUP
    p_q += i_b * s_q + i_k * K
    p_k += i_b * s_k + i_k * K
    p_v += i_b * s_v + i_h * V
    p_beta += i_b * s_beta + i_h
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_v += i_slot * s_ring_v + i_h * V
    p_ring_beta += i_slot * s_ring_beta + i_h
    # the ring's rows before the tokens; the tokens themselves come from the inputs, so no barrier is needed
    b_dots, b_norm = _dots(p_ring_k, p_k, p_q, i_row, i_n, i_first, Hk * K, o_j, K, BK, NORM, ISA)
    b_rate = tl.load(p_rate + i_h + o_g, mask=m_g, other=0.0)
    b_beta = load_rows(p_ring_beta, p_beta, i_row, H, H, o_j, o_g, m_g, i_n)  # [LP, GP]
    # row l holds what comes right after token j: its sums are Σ g_i over i > j, without a difference
    b_next = load_rows(p_ring_beta, p_beta, i_row, H, H, o_j + 1, o_g, m_g, i_n)
    i_base = tl.maximum(i_row + i_first, 0)  # the row of the first token; a closed window's comes after it
    m_base = (o_j <= i_base)[:, None]
    b_between = tl.cumsum(tl.where((o_j < i_base)[:, None], b_next, 0.0) * b_rate[None, :], axis=0)
    b_w = exp(b_between) * b_beta * b_norm[:, None]
    b_sum = tl.sum(tl.where(m_base, b_beta, 0.0) * b_rate[None, :], axis=0)
    i_bt = i_b * T + i_first
    p_c += (i_bt * H + i_h + o_g[None, :]) * L + o_j[:, None]
    p_gain += i_bt * H + i_h
    m_c = (o_j < L)[:, None] & m_g[None, :]
    if i_used <= 0:
        tl.store(p_top + i_b * H + i_h + o_g, tl.zeros([GP], tl.int32), mask=m_g)
        tl.store(p_c, b_w, mask=m_c)
        tl.store(p_gain + o_g, exp(b_sum), mask=m_g)
    else:
        o_n = tl.arange(0, NP)
        m_n = (i_first + o_n < i_n) & (i_row + i_first + o_n >= 0)
        b_scale = tl.full([NP], SCALE, tl.float32)
        b_q = tl.load(
            p_q + ((i_first + o_n) * (Hk * K))[:, None] + tl.arange(0, K)[None, :], mask=m_n[:, None], other=0.0
        )
        b_q = b_q.to(tl.float32)
        if NORM:
            b_scale *= inverse_norm(tl.sum(b_q * b_q, axis=1))
        p_to = p_theta + (i_bt * Hk + i_k) * K
        b_factor = store_theta(
            b_q * b_scale[:, None], p_to, o_n * (Hk * K), m_n, p_columns + i_h * K, o_n * 0, BALANCED, ROTATE, HALF, ISA
        )
        m_later = (i_row + i_first + o_n > i_base) & m_n
        b_g = tl.load(
            p_beta + ((i_first + o_n) * H)[:, None] + o_g[None, :], mask=m_later[:, None] & m_g[None, :], other=0.0
        )
        b_g = b_g.to(p_ring_beta.dtype.element_ty).to(tl.float32) * b_rate[None, :]
        b_gain = exp(b_sum[None, :] + tl.cumsum(b_g, axis=0)) * b_factor[:, None]
        tl.store(p_gain + (o_n * H)[:, None] + o_g[None, :], b_gain, mask=m_n[:, None] & m_g[None, :])
        o_t = tl.arange(0, 8)
        b_step = b_w
        for i in tl.static_range(N):
            i_last = i_row + i_first + i
            if i > 0:
                b_one = tl.sum(tl.where((o_n == i)[:, None], b_g, 0.0), axis=0)
                b_step = tl.where((o_j == i_last)[:, None], b_w, b_step * exp(b_one)[None, :])
            b_dot = tl.sum(tl.where((o_t == i)[None, :], b_dots, 0.0), axis=1)
            if NORM:
                b_dot *= tl.sum(tl.where(o_n == i, b_scale, 0.0), axis=0)
            else:
                b_dot *= SCALE
            i_rows = tl.where((i_first + i < i_n) & (i_last >= 0), L, 0)
            b_c = tl.where((o_j <= i_last)[:, None], b_dot[:, None] * b_step, 0.0)
            tl.store(p_c + i * (H * L), b_c, mask=m_c & (o_j < i_rows)[:, None])

    # into the ring, last: a store waits for its load, and loads behind it for the store
    for i in tl.static_range(N):
        i_t = i_first + i
        i_last = i_row + i_t
        m_t = (i_t < i_n) & (i_last >= 0)
        b_k1 = taken(p_k + i_t * (Hk * K), m_t, K, K)
        b_v1 = taken(p_v + i_t * (H * V), m_t, GROUP * V, VP)
        b_beta1 = taken(p_beta + i_t * H, m_t, GROUP, GP)
        put(p_ring_k + i_last * (Hk * K), b_k1, m_t, K, K)
        put(p_ring_v + i_last * (H * V), b_v1, m_t, GROUP * V, VP)
        put(p_ring_beta + i_last * H, b_beta1, m_t, GROUP, GP)
