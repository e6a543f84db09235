"""The window kernel of several tokens for the delta rule whose channels each have their own decay (KDA).

Keys of the ring are decayed to where the tokens begin, once, and the tokens' keys and queries from there; keys of the
tokens, which lie between, are decayed from token to token. Tiles are those of channel.py.
"""

# mypy: disable-error-code="assignment, index, misc, var-annotated"
# (tuples that grow in a loop that the compiler unrolls)
from __future__ import annotations

from ..device.math import LOG2E, exp2_fast, inverse_norm
from ..device.targets import tl, triton
from .channel import eight_sums
from .plan import NOTHING
from .tokens import copy, store_theta


@triton.jit
def _row(p_ring, p_token, m_ring, m_k, T: tl.constexpr):
    """A row of one head, float32: at p_ring if m_ring, else at p_token. Before the first of T tokens, all are the
    ring's."""
    if T == 1:
        return tl.load(p_ring, mask=m_k, other=0.0).to(tl.float32)
    elif p_ring.dtype == p_token.dtype:
        return tl.load(tl.where(m_ring, p_ring, p_token), mask=m_k, other=0.0).to(tl.float32)
    else:
        b_r = tl.load(p_ring, mask=m_k & m_ring, other=0.0)
        return tl.where(m_ring, b_r, tl.load(p_token, mask=m_k & (m_ring == 0), other=0.0).to(b_r.dtype)).to(tl.float32)


@triton.jit
def _keys(
    p_ring_k, p_k, p_ring_g, p_g, i_row, i_j, i_end, o_k,
    S_K: tl.constexpr, S_G: tl.constexpr, STEP: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    """Eight keys and log-decays to base 2 of rows i_j, i_j + STEP, …, zeros outside of 0 to i_end: two tuples."""
    K: tl.constexpr = o_k.shape[0] * o_k.shape[1]
    b_ks = ()
    b_gs = ()
    for i in tl.static_range(8):  # all loads before the first of them is waited for
        i_l = i_j + i * STEP
        m_k = o_k < tl.where((i_l >= 0) & (i_l < i_end), K, 0)
        m_r = tl.zeros(o_k.shape, tl.int32) + i_l < i_row
        p_rk, p_tk = p_ring_k + i_j * S_K + o_k, p_k + (i_j - i_row) * S_K + o_k
        p_rg, p_tg = p_ring_g + i_j * S_G + o_k, p_g + (i_j - i_row) * S_G + o_k
        b_ks = b_ks + (_row(p_rk + i * STEP * S_K, p_tk + i * STEP * S_K, m_r, m_k, T),)
        b_gs = b_gs + (_row(p_rg + i * STEP * S_G, p_tg + i * STEP * S_G, m_r, m_k, T) * LOG2E,)
    return b_ks, b_gs


@triton.jit
def _tokens(p_k, p_q, p_g, i_row, i_first, i_n, o_k, S_K: tl.constexpr, S_G: tl.constexpr, N: tl.constexpr, KEY, DECAY):
    """Keys, queries and log-decays to base 2 of N tokens, rounded as the ring holds them; zeros where there is none."""
    K: tl.constexpr = o_k.shape[0] * o_k.shape[1]
    b_ks = ()
    b_qs = ()
    b_gs = ()
    for i in tl.static_range(N):
        i_t = i_first + i
        m_k = o_k < tl.where((i_t < i_n) & (i_row + i_t >= 0), K, 0)
        b_ks = b_ks + (tl.load(p_k + i_t * S_K + o_k, mask=m_k, other=0.0).to(KEY).to(tl.float32),)
        b_qs = b_qs + (tl.load(p_q + i_t * S_K + o_k, mask=m_k, other=0.0).to(tl.float32),)
        b_gs = b_gs + (tl.load(p_g + i_t * S_G + o_k, mask=m_k, other=0.0).to(DECAY).to(tl.float32) * LOG2E,)
    return b_ks, b_qs, b_gs


@triton.jit
def _store_thetas(
    p_ring_k, p_k, p_q, p_ring_g, p_g, i_row, i_from, i_first, i_n, b_cs, b_queries, o_k, p_theta, p_gain, p_columns,
    H: tl.constexpr, S_K: tl.constexpr, S_G: tl.constexpr, LP: tl.constexpr, N: tl.constexpr, FROM: tl.constexpr,
    BALANCED: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Θ of N tokens: e^G of a query times b_queries, minus the keys up to it, of ring and tokens, times b_cs [LP]."""
    VEC: tl.constexpr = o_k.shape[1]
    K: tl.constexpr = o_k.shape[0] * VEC
    b_xs = ()
    for _ in tl.static_range(N):
        b_xs = b_xs + (tl.zeros(o_k.shape, tl.float32),)
    b_sum = tl.zeros(o_k.shape, tl.float32)
    for i_8 in range(0, i_from, 8):
        b_rks, b_rgs = _keys(p_ring_k, p_k, p_ring_g, p_g, i_row, i_8, i_from, o_k, S_K, S_G, 1, FROM)
        for j in tl.static_range(8):
            b_sum += b_rgs[j]
            b_z = b_rks[j] * exp2_fast(b_sum, ISA)
            o_j = (tl.zeros([K // VEC], tl.int32) + (i_8 + j)) & (LP - 1)
            b_next = ()
            for i in tl.static_range(N):
                b_next = b_next + (b_xs[i] + b_z * tl.gather(b_cs[i], o_j, 0)[:, None],)
            b_xs = b_next
    b_ks, b_qs, b_gs = _tokens(
        p_k, p_q, p_g, i_row, i_first, i_n, o_k, S_K, S_G, N, p_ring_k.dtype.element_ty, p_ring_g.dtype.element_ty
    )
    for i in tl.static_range(N):
        i_t = i_first + i
        b_sum += b_gs[i]
        b_decay = exp2_fast(b_sum, ISA)
        b_z = b_ks[i] * b_decay
        o_j = (tl.zeros([K // VEC], tl.int32) + (i_row + i_t)) & (LP - 1)  # of tokens that are not verified, any
        b_next = ()
        for j in tl.static_range(N):
            b_next = b_next + ((b_xs[j] + b_z * tl.gather(b_cs[j], o_j, 0)[:, None] if j >= i else b_xs[j]),)
        b_xs = b_next
        b_theta = tl.reshape(b_decay * b_qs[i] * b_queries[i] - b_xs[i], [1, K])
        i_one = tl.where((i_t < i_n) & (i_row + i_t >= 0), 1, 0)
        o_0 = tl.arange(0, 1)
        b_factor = store_theta(
            b_theta, p_theta + i_t * (H * K), o_0, o_0 < i_one, p_columns, o_0,
            BALANCED, ROTATE, HALF, ISA,
        )  # fmt: skip
        tl.store(p_gain + i_t * H + o_0, b_factor, mask=o_0 < i_one)


@triton.jit
def channel_window_many(
    p_q, p_k, p_v, p_beta, p_g,  # tokens: [B, T, H, K] twice, [B, T, H, V], [B, T, H], [B, T, H, K]
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g, p_mix,  # mix [slots, H, L, L]: the rows of M
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_start, p_top,
    p_columns,  # column scales of the copy [H, K]
    s_q, s_k, s_v, s_beta, s_g,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_mix,
    H: tl.constexpr, Hk: tl.constexpr, V: tl.constexpr,  # constants, as strides that cost no instructions
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, T: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    VP: tl.constexpr, VEC: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, BALANCED: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, H). Θ [B, T, H, K] with its factor in gain [B, T, H], and C; of rows that flush, in C's place and in
    start, their keys' norms, and zero in top [B, H]. Four tokens at a time."""
    N: tl.constexpr = T if T < 4 else 4
    FROM: tl.constexpr = T if T > 4 else 1  # with one piece alone, all keys before its tokens are the ring's
    S_K: tl.constexpr = Hk * K
    S_G: tl.constexpr = H * K
    i_b = tl.program_id(0)
    i_h = tl.program_id(1)
    i_k = i_h // GROUP
    i_row = tl.load(p_row + i_b)
    if i_row <= NOTHING:
        return
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    i_b = i_b.to(tl.int64)
    i_n = tl.where(i_used > 0, i_used - i_row, 1)
    o_l = tl.arange(0, LP)
    o_k = tl.arange(0, K // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    p_q += i_b * s_q + i_k * K
    p_k += i_b * s_k + i_k * K
    p_v += i_b * s_v + i_h * V
    p_beta += i_b * s_beta + i_h
    p_g += i_b * s_g + i_h * K
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_v += i_slot * s_ring_v + i_h * V
    p_ring_beta += i_slot * s_ring_beta + i_h
    p_ring_g += i_slot * s_ring_g + i_h * K
    p_mix += i_slot * s_mix + i_h * (L * L)
    p_theta += i_b * (T * H * K) + i_h * K
    p_gain += i_b * (T * H) + i_h
    p_c += i_b * (T * H * L) + i_h * L

    # M as [column, row], a column a thread: sums over rows stay in it. Rows in use are zero behind their last
    o_m = tl.max_contiguous(o_l, 1)
    m_m = (o_l < L)[:, None] & (o_l < i_row)[None, :]
    b_m = tl.load(p_mix + o_m[:, None] + (o_m * L)[None, :], mask=m_m, other=0.0)
    b_norm = tl.zeros([LP], tl.float32)
    b_none = tl.zeros([K // VEC], tl.float32)
    for i_first in range(0, T, N):
        i_from = tl.maximum(i_row + i_first, 0)  # the row where the tokens begin
        for i in tl.static_range(N):
            i_t = i_first + i
            i_last = i_row + i_t
            m_t = (i_t < i_n) & (i_last >= 0)
            copy(p_k + i_t * S_K, p_ring_k + i_last * S_K, m_t & (i_h % GROUP == 0), K, K)
            copy(p_v + i_t * (H * V), p_ring_v + i_last * (H * V), m_t, V, VP)
            copy(p_beta + i_t * H, p_ring_beta + i_last * H, m_t, 1, 1)
            copy(p_g + i_t * S_G, p_ring_g + i_last * S_G, m_t, K, K)
        KEY: tl.constexpr = p_ring_k.dtype.element_ty
        DECAY: tl.constexpr = p_ring_g.dtype.element_ty
        b_ks, b_qs, b_gs = _tokens(p_k, p_q, p_g, i_row, i_first, i_n, o_k, S_K, S_G, N, KEY, DECAY)

        # with the keys of the tokens up to each: a, the products with keys, b, those with queries, [LP]
        b_as = ()
        b_bs = ()
        b_tks = ()
        b_tqs = ()
        b_zs = ()
        b_ns = ()
        b_square = tl.zeros([LP], tl.float32)
        b_sum = tl.zeros(o_k.shape, tl.float32)
        i_to = i_row + i_first
        for i in tl.static_range(N):
            b_decay = exp2_fast(b_gs[i], ISA)
            b_next = ()
            for j in tl.static_range(i):
                b_next = b_next + (b_zs[j] * b_decay,)
            b_zs = b_next + (b_ks[i],)
            b_xs = ()
            b_ys = ()
            for j in tl.static_range(4):
                b_xs = b_xs + (tl.sum(b_zs[j] * b_ks[i], axis=1) if j <= i else b_none,)
                b_ys = b_ys + (tl.sum(b_zs[j] * b_qs[i], axis=1) if j <= i else b_none,)
            b_x = eight_sums(b_xs + b_ys)
            m_i = (o_l >= i_to) & (o_l <= i_to + i)
            b_a = tl.where(m_i, tl.gather(b_x, (o_l - i_to) & 7, 0), 0.0)
            b_b = tl.where(m_i, tl.gather(b_x, (o_l - i_to + 4) & 7, 0), 0.0)
            b_as = b_as + (b_a,)
            b_bs = b_bs + (b_b,)
            b_square = tl.where(o_l == i_to + i, b_a, b_square)  # the product with itself
            b_ns = b_ns + (tl.sum(b_qs[i] * b_qs[i], axis=1),)
            b_sum += b_gs[i]
            b_decay = exp2_fast(b_sum, ISA)
            b_tks = b_tks + (b_ks[i] * b_decay,)
            b_tqs = b_tqs + (b_qs[i] * b_decay,)

        # and with those before, decayed to where the tokens begin
        b_sum = tl.zeros(o_k.shape, tl.float32)
        for i_8 in range(0, i_from, 8):
            i_top = i_from - 1 - i_8
            b_rks, b_rgs = _keys(p_ring_k, p_k, p_ring_g, p_g, i_row, i_top, i_from, o_k, S_K, S_G, -1, FROM)
            b_rzs = ()
            b_rns = ()
            for i in tl.static_range(8):
                b_rzs = b_rzs + (b_rks[i] * exp2_fast(b_sum, ISA),)
                b_sum += b_rgs[i]
                b_rns = b_rns + (tl.sum(b_rks[i] * b_rks[i], axis=1),)
            m_i = (o_l <= i_top) & (o_l > i_top - 8)
            o_i = (i_top - o_l) & 7
            if NORM:
                b_square = tl.where(m_i, tl.gather(eight_sums(b_rns), o_i, 0), b_square)
            b_next_as = ()
            b_next_bs = ()
            for i in tl.static_range(N):
                b_rxs = ()
                b_rys = ()
                for j in tl.static_range(8):
                    b_rxs = b_rxs + (tl.sum(b_rzs[j] * b_tks[i], axis=1),)
                    b_rys = b_rys + (tl.sum(b_rzs[j] * b_tqs[i], axis=1),)
                b_next_as = b_next_as + (tl.where(m_i, tl.gather(eight_sums(b_rxs), o_i, 0), b_as[i]),)
                b_next_bs = b_next_bs + (tl.where(m_i, tl.gather(eight_sums(b_rys), o_i, 0), b_bs[i]),)
            b_as = b_next_as
            b_bs = b_next_bs

        b_norm = tl.full([LP], 1.0, tl.float32)
        b_scales = tl.full([8], SCALE, tl.float32)
        if NORM:
            b_norm = inverse_norm(b_square)
            for _ in tl.static_range(8 - N):
                b_ns = b_ns + (b_none,)
            b_scales *= inverse_norm(eight_sums(b_ns))
        if i_used <= 0:
            tl.store(p_top + i_b * H + i_h, 0)
            tl.store(p_c + o_l, b_norm, mask=o_l < L)
            tl.store(p_start + (i_b * H + i_h) * L + o_l, b_norm, mask=o_l < L)

        b_cs = ()
        b_queries = ()
        for i in tl.static_range(N):
            i_t = i_first + i
            i_last = i_row + i_t
            m_last = o_l == i_last
            b_beta = tl.load(p_beta + i_t * H, mask=i_t < i_n, other=0.0).to(tl.float32)
            b_scale = tl.sum(tl.where(tl.arange(0, 8) == i, b_scales, 0.0), axis=0)
            b_a = b_as[i] * b_norm * (tl.sum(tl.where(m_last, b_norm, 0.0), axis=0) * b_beta)
            b_a = tl.where(o_l < i_last, b_a, 0.0)
            b_b = tl.where(o_l <= i_last, b_bs[i] * b_norm * b_scale, 0.0)
            # one step of the forward substitution: row t of M is β_t e_t − A[t, :]·M
            b_new = tl.where(m_last, b_beta, 0.0) - tl.sum(b_a[None, :] * b_m, axis=1)
            b_m = tl.where(m_last[None, :], b_new[:, None], b_m)
            b_c = tl.sum(b_b[None, :] * b_m, axis=1)
            i_rows = tl.where((i_t < i_n) & (i_last >= 0), L, 0)
            tl.store(p_mix + i_last * L + o_l, b_new, mask=o_l < i_rows)
            tl.store(p_c + i_t * (H * L) + o_l, b_c, mask=o_l < tl.where(i_used > 0, i_rows, 0))
            b_cs = b_cs + (tl.where(o_l <= i_last, b_c * b_norm, 0.0),)
            b_queries = b_queries + (b_scale,)

        if i_used > 0:
            _store_thetas(
                p_ring_k, p_k, p_q, p_ring_g, p_g, i_row, i_from, i_first, i_n, b_cs, b_queries, o_k,
                p_theta, p_gain, p_columns + i_h * K, H, S_K, S_G, LP, N, FROM, BALANCED, ROTATE, HALF, ISA,
            )  # fmt: skip
