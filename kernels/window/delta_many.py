"""The window kernel of several tokens for the delta rule with one log-decay per head (GDN).

A program takes some heads of one key with all tokens of a row: keys are loaded twice, for products with the tokens and
for Θ, and what goes from token to token is one row of M and the decays to it.
"""

from __future__ import annotations

from ..device.dot import dot_fp32, dot_raw, weighted_sums
from ..device.math import exp, inverse_norm
from ..device.targets import tl, triton
from .plan import NOTHING
from .tokens import column, copy, load_pieces, load_scalars, store_theta


@triton.jit
def _dots(
    p_ring_k, p_k, p_q, i_row, i_n, i_first, s_token, o_l,
    K: tl.constexpr, BK: tl.constexpr, NORM: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Keys j of ring rows o_l with the keys and queries of eight tokens t from i_first on: k_j·k_t and k_j·q_t [LP, 8],
    and what keys are multiplied by [LP]; zeros where there is no such key or token. BK columns at a time."""
    LP: tl.constexpr = o_l.shape[0]
    o_t = i_first + tl.arange(0, 8)
    m_t = (o_t < i_n)[:, None, None]
    o_c = (tl.arange(0, BK // 32) * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
    o_x = (o_t * s_token)[:, None, None] + o_c
    b_keys = tl.zeros([LP, 8], tl.float32)
    b_queries = tl.zeros([LP, 8], tl.float32)
    b_square = tl.zeros([LP], tl.float32)
    for i_c in tl.range(0, K, BK):
        b_k = load_pieces(p_ring_k + i_c, p_k + i_c, i_row, i_n, s_token, o_l, o_c)
        b_t = tl.reshape(tl.load(p_k + i_c + o_x, mask=m_t, other=0.0).to(b_k.dtype), [8, BK])
        b_q = tl.reshape(tl.load(p_q + i_c + o_x, mask=m_t, other=0.0), [8, BK])
        b_keys += dot_raw(b_k, tl.trans(b_t), ISA)
        if b_k.dtype == b_q.dtype:
            b_queries += dot_raw(b_k, tl.trans(b_q), ISA)
        else:
            b_queries += dot_fp32(b_k.to(tl.float32), tl.trans(b_q).to(tl.float32), ISA)
        if NORM:
            if LP <= 32:  # with themselves, of which the diagonal is wanted
                b_dots = dot_raw(b_k, tl.trans(b_k), ISA)
                b_square += tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_dots, 0.0), axis=1)
            else:
                b_k = b_k.to(tl.float32)
                b_square += tl.sum(b_k * b_k, axis=1)
    b_norm = tl.full([LP], 1.0, tl.float32)
    if NORM:
        b_norm = inverse_norm(b_square)
    return b_keys, b_queries, b_norm


@triton.jit
def _nth(b_x, o_n, i: tl.constexpr):
    """Column i of b_x [M, N], whose columns are o_n [N]."""
    return tl.sum(tl.where((o_n == i)[None, :], b_x, 0.0), axis=1)


@triton.jit
def delta_window_many(
    p_q, p_k, p_v, p_beta, p_g,  # tokens: [B, T, Hk, K] twice, [B, T, H, V], [B, T, H] twice
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g, p_mix,  # mix [slots, H, L, L]: the rows of M
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_start, p_top,
    p_columns,  # column scales of the copy [H, K]
    s_q, s_k, s_v, s_beta, s_g,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_mix,
    H: tl.constexpr, Hk: tl.constexpr, V: tl.constexpr,  # constants, as strides that cost no instructions
    K: tl.constexpr, BK: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, T: tl.constexpr,
    GROUP: tl.constexpr, PER: tl.constexpr, VP: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, BALANCED: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, H / PER): PER heads of one key. Θ [B, T, H, K] with its factor in gain [B, T, H], and C; of rows that
    flush, in C's place, what W's keys are multiplied by: their norms and e^(G_h − G_j), in start the same of X's keys
    with e^G_j, e^G_h in gain, and zero in top [B, H]. Eight tokens at a time."""
    N: tl.constexpr = T if T < 8 else 8
    NP: tl.constexpr = 1 if N == 1 else 2 if N == 2 else 4 if N <= 4 else 8
    i_b = tl.program_id(0)
    i_h = tl.program_id(1) * PER
    i_k = i_h // GROUP
    i_row = tl.load(p_row + i_b)
    if i_row <= NOTHING:
        return
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    i_b = i_b.to(tl.int64)
    i_n = tl.where(i_used > 0, i_used - i_row, 1)
    o_k = tl.arange(0, K)
    o_l = tl.arange(0, LP)
    o_g = tl.max_contiguous(tl.arange(0, PER), 1)  # neighbouring threads hold rows of a head, as of M
    o_n = tl.arange(0, NP)
    o_t = tl.arange(0, 8)
    p_q += i_b * s_q + i_k * K
    p_k += i_b * s_k + i_k * K
    p_v += i_b * s_v + i_h * V
    p_beta += i_b * s_beta + i_h
    p_g += i_b * s_g + i_h
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_v += i_slot * s_ring_v + i_h * V
    p_ring_beta += i_slot * s_ring_beta + i_h
    p_ring_g += i_slot * s_ring_g + i_h
    p_mix += i_slot * s_mix + i_h * (L * L)
    p_theta += i_b * (T * H * K) + i_h * K
    p_gain += i_b * (T * H) + i_h
    p_c += i_b * (T * H * L) + i_h * L

    # M as [column, head, row], a column a thread: sums over rows stay in it. Rows in use are zero behind their last
    o_m = tl.max_contiguous(o_l, 1)
    p_m = p_mix + o_m[:, None, None] + (o_g * (L * L))[None, :, None] + (o_m * L)[None, None, :]
    b_m = tl.load(p_m, mask=(o_l < L)[:, None, None] & (o_l < i_row)[None, None, :], other=0.0)
    # the ring's rows before the tokens; the tokens themselves come from the inputs, so no barrier is needed
    b_g = load_scalars(p_ring_g, p_g, i_row, H, H, o_l, o_g, i_n)  # [LP, PER]
    b_from = exp(tl.cumsum(b_g, axis=0))
    b_next = load_scalars(p_ring_g + H, p_g, i_row - 1, H, H, o_l, o_g, i_n)
    for i_first in range(0, T, N):
        o_token = i_first + o_n
        m_n = (o_token < i_n) & (i_row + o_token >= 0)
        for i in tl.static_range(N):
            i_t = i_first + i
            i_last = i_row + i_t
            m_t = (i_t < i_n) & (i_last >= 0)
            copy(p_k + i_t * (Hk * K), p_ring_k + i_last * (Hk * K), m_t & (i_h % GROUP == 0), K, K)
            copy(p_v + i_t * (H * V), p_ring_v + i_last * (H * V), m_t, PER * V, VP)
            copy(p_beta + i_t * H, p_ring_beta + i_last * H, m_t, PER, PER)
            copy(p_g + i_t * H, p_ring_g + i_last * H, m_t, PER, PER)

        b_keys, b_queries, b_norm = _dots(p_ring_k, p_k, p_q, i_row, i_n, i_first, Hk * K, o_l, K, BK, NORM, ISA)
        i_base = tl.maximum(i_row + i_first, 0)
        b_after = exp(tl.cumsum(tl.where((o_l < i_base)[:, None], b_next, 0.0), axis=0, reverse=True))
        b_after *= column(b_norm)
        if i_used <= 0:
            o_c = o_l[:, None] + (o_g * L)[None, :]
            m_l = (o_l < L)[:, None]
            tl.store(p_top + i_b * H + i_h + o_g, tl.zeros([PER], tl.int32))
            tl.store(p_c + o_c, b_after, mask=m_l)
            tl.store(p_start + (i_b * H + i_h) * L + o_c, b_from * column(b_norm), mask=m_l)
            tl.store(p_gain + o_g, exp(tl.sum(b_g, axis=0)))
        p_x = p_q + (o_token * (Hk * K))[:, None] + o_k[None, :]
        b_q = tl.load(p_x, mask=m_n[:, None], other=0.0).to(tl.float32)
        b_scale = tl.full([NP], SCALE, tl.float32)
        if NORM:
            b_scale *= inverse_norm(tl.sum(b_q * b_q, axis=1))
        b_start = b_from * -column(b_norm)
        b_weights = tl.zeros([LP, PER, NP], tl.float32)
        b_heads = tl.zeros([PER, NP], tl.float32)
        for i in tl.static_range(N):
            i_t = i_first + i
            i_last = i_row + i_t
            m_last = o_l == i_last
            m_g = o_g < tl.where(i_t < i_n, PER, 0)
            if i > 0:
                b_own = tl.load(p_g + i_t * H + o_g, mask=m_g, other=0.0).to(p_ring_g.dtype.element_ty).to(tl.float32)
                b_after = tl.where(m_last[:, None], column(b_norm), b_after * exp(b_own)[None, :])
            b_beta = tl.load(p_beta + i_t * H + o_g, mask=m_g, other=0.0).to(tl.float32)[None, :]
            b_one = tl.sum(tl.where(o_n == i, b_scale, 0.0), axis=0)
            b_a = column(_nth(b_keys, o_t, i)) * b_after * tl.sum(tl.where(m_last, b_norm, 0.0), axis=0) * b_beta
            b_a = tl.where((o_l < i_last)[:, None], b_a, 0.0)
            b_b = tl.where((o_l <= i_last)[:, None], column(_nth(b_queries, o_t, i)) * b_after * b_one, 0.0)
            # one step of the forward substitution: row t of M is β_t e_t − A[t, :]·M
            b_new = tl.where(m_last[:, None], b_beta, 0.0) - tl.sum(tl.trans(b_a)[None, :, :] * b_m, axis=2)
            b_m = tl.where(m_last[None, None, :], b_new[:, :, None], b_m)
            b_c = tl.sum(tl.trans(b_b)[None, :, :] * b_m, axis=2)
            i_rows = tl.where((i_t < i_n) & (i_last >= 0), L, 0)
            o_c = o_l[:, None]
            tl.store(p_mix + i_last * L + o_c + (o_g * (L * L))[None, :], b_new, mask=o_c < i_rows)
            tl.store(p_c + i_t * (H * L) + o_c + (o_g * L)[None, :], b_c, mask=o_c < tl.where(i_used > 0, i_rows, 0))
            b_weight = tl.where((o_l <= i_last)[:, None], b_c * b_start, 0.0)
            b_weights = tl.where((o_n == i)[None, None, :], b_weight[:, :, None], b_weights)
            b_head = tl.sum(tl.where(m_last[:, None], b_from, 0.0), axis=0) * b_one
            b_heads = tl.where((o_n == i)[None, :], b_head[:, None], b_heads)
        if i_used > 0:
            # the keys again, from the nearest cache: they would have taken 32 registers all the while
            o_x = (tl.arange(0, K // 32) * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
            b_k = load_pieces(p_ring_k, p_k, i_row, i_n, Hk * K, o_l, o_x)
            b_theta = weighted_sums(b_k, tl.reshape(b_weights, [LP, PER * NP]), ISA)
            b_theta += tl.reshape(b_heads[:, :, None] * b_q[None, :, :], [PER * NP, K])
            o_i = tl.arange(0, PER * NP)
            o_to = i_first + o_i % NP
            m_i = (o_to < i_n) & (i_row + o_to >= 0)
            b_factor = store_theta(
                b_theta, p_theta, o_to * (H * K) + o_i // NP * K, m_i, p_columns + i_h * K, o_i // NP * K,
                BALANCED, ROTATE, HALF, ISA,
            )  # fmt: skip
            tl.store(p_gain + o_to * H + o_i // NP, b_factor, mask=m_i)
