"""The window kernels: from the ring and new tokens to what the readout and the fold need.

The plan kernels decide, on the device, which rows read, which flush and which are padding; they alone move cursors.
Their orders to the others: ``row`` [B], the ring row of a batch row's first token (−1: it is in the checkpoint
already; NOTHING: leave this batch row alone), and ``used`` [B], how many ring rows it then reads, 0 where it flushes.
``mamba2_window`` and ``delta_window`` append the tokens to the ring and give (Θ, C) of the rows that read. Of the
delta rule's M = (I + A)⁻¹·diag(β) they append the tokens' rows to ``DecodeState.mix``: a step of the forward
substitution per token, so that no token pays for all. What else the fold needs (decay, X, W) are functions of the
ring that it computes itself, which spares an [L, K] tile per head in memory.

All arithmetic is FP32, or exact: products of 16-bit inputs. Exponentials are of sums of log-decays between two
tokens, never of differences, so that −∞ is an ordinary log-decay.
"""

from __future__ import annotations

from ...quant import state as states
from ..device.codec import bits_float, float_bits, hadamard
from ..device.dot import dot_fp32, dot_raw, weighted_sums
from ..device.fp4 import THETA_BITS_CONVERTED, THETA_BITS_MOVED
from ..device.math import LOG2E, exp, inverse_norm
from ..device.operand import begin_loads
from ..device.targets import tl, triton
from .channel import channel_dots, channel_theta, total

NOTHING = tl.constexpr(-2)
STALE = tl.constexpr(states.STALE)


@triton.jit
def plan_kernel(
    p_slots, p_cursor, p_position, p_row, p_used, p_list, p_count, s_cursor, s_position, B,
    L: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """One program, for one token a row. ``list``: the rows that flush, ``count`` [1] of them: those whose ring is full,
    and those whose copy is stale, whose ring holds this token alone. Cursors and positions move on. BP rows at a
    time."""
    i_count = 0
    for i_b in range(0, B, BP):
        o_b = i_b + tl.arange(0, BP)
        m_b = o_b < B
        i_slot = tl.load(p_slots + o_b, mask=m_b, other=-1)
        m_live = i_slot >= 0
        o_slot = i_slot.to(tl.int64)
        p_c = p_cursor + o_slot * s_cursor
        p_p = p_position + o_slot * s_position
        i_cursor = tl.load(p_c, mask=m_live, other=0)
        i_position = tl.load(p_p, mask=m_live, other=0)  # not behind the stores, for which it would wait
        m_stale = i_cursor == STALE
        i_row = tl.where(m_live, tl.where(m_stale, 0, i_cursor), NOTHING)
        m_flush = m_live & (m_stale | (i_row + 1 >= L))
        b_after = tl.where(m_flush | (m_live == 0), 0, i_row + 1)
        tl.store(p_row + o_b, i_row, mask=m_b)
        tl.store(p_used + o_b, b_after, mask=m_b)
        tl.store(p_c, b_after, mask=m_live)
        tl.store(p_p, i_position + 1, mask=m_live)
        b_flush = m_flush.to(tl.int32)
        tl.store(p_list + i_count + tl.cumsum(b_flush, axis=0) - 1, o_b, mask=m_flush)
        i_count += tl.sum(b_flush, axis=0)
    tl.store(p_count, i_count)


@triton.jit
def verify_plan_kernel(
    p_slots, p_cursor, p_row, p_used, p_later_row, p_later_used, p_tokens, p_list, p_count, s_cursor,
    B, T, L: tl.constexpr, BP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program, for a certain token and T − 1 drafts a row, as kernels/speculative.py's ``plan``. First orders
    (``row``, ``used``): rows that close their window with the certain token (``list``, ``count``) flush, the others
    read all that is verified of them (``tokens`` [B]). Later ones: the drafts of the rows that closed, in their fresh
    rings. A closing row's cursor becomes −1, the others stay."""
    i_count = 0
    for i_b in range(0, B, BP):
        o_b = i_b + tl.arange(0, BP)
        m_b = o_b < B
        i_slot = tl.load(p_slots + o_b, mask=m_b, other=-1)
        p_c = p_cursor + i_slot.to(tl.int64) * s_cursor
        i_cursor = tl.load(p_c, mask=i_slot >= 0, other=-1)
        m_stale = i_cursor == STALE
        i_cursor = tl.where(m_stale, 0, i_cursor)
        m_live = (i_slot >= 0) & (i_cursor >= 0)  # a cursor of −1 waits for its count: nothing more is verified on it
        if EARLY:
            m_close = m_live & (m_stale | (i_cursor + T >= L))
            b_tokens = tl.zeros([BP], tl.int32) + T
        else:
            m_close = m_live & (m_stale | (i_cursor + 1 >= L))
            b_tokens = tl.minimum(tl.where(m_close, L, L - 1 - i_cursor), T)
        b_tokens = tl.where(m_live, b_tokens, 0)
        m_first = m_close | (m_live & (b_tokens > 0))
        m_later = m_close & (b_tokens > 1)
        tl.store(p_row + o_b, tl.where(m_first, i_cursor, NOTHING), mask=m_b)
        tl.store(p_used + o_b, tl.where(m_first & (m_close == 0), i_cursor + b_tokens, 0), mask=m_b)
        tl.store(p_later_row + o_b, tl.where(m_later, -1, NOTHING), mask=m_b)
        tl.store(p_later_used + o_b, tl.where(m_later, b_tokens - 1, 0), mask=m_b)
        tl.store(p_tokens + o_b, b_tokens, mask=m_b)
        tl.store(p_c, tl.zeros([BP], tl.int32) - 1, mask=m_close)
        b_close = m_close.to(tl.int32)
        tl.store(p_list + i_count + tl.cumsum(b_close, axis=0) - 1, o_b, mask=m_close)
        i_count += tl.sum(b_close, axis=0)
    tl.store(p_count, i_count)


@triton.jit
def load_rows(p_ring, p_token, i_row, s_row, s_token, o_l, o_k, m_k, i_n):
    """Rows o_l [LP] × columns o_k of one head's ring with i_n new tokens from i_row on, zeros after them."""
    m_x = ((o_l < i_row + i_n) & (o_l >= 0))[:, None] & m_k[None, :]
    if p_ring.dtype == p_token.dtype:
        p_x = tl.where(o_l < i_row, p_ring + o_l * s_row, p_token + (o_l - i_row) * s_token)
        return tl.load(p_x[:, None] + o_k[None, :], mask=m_x, other=0.0)
    else:
        m_r = (o_l < i_row)[:, None]
        b_r = tl.load(p_ring + o_l[:, None] * s_row + o_k[None, :], mask=m_x & m_r, other=0.0)
        b_t = tl.load(p_token + (o_l - i_row)[:, None] * s_token + o_k[None, :], mask=m_x & (m_r == 0), other=0.0)
        return tl.where(m_r, b_r, b_t.to(b_r.dtype))


@triton.jit
def load_pieces(p_ring, p_token, i_row, i_n, s_row, o_l, o_x):
    """The same in pieces o_x [1, N, 32] of columns, of the ring's type: [LP, N·32]."""
    m_r = (o_l < i_row)[:, None, None]
    m_x = ((o_l >= 0) & (o_l < i_row + i_n))[:, None, None]
    if p_ring.dtype == p_token.dtype:
        p_x = tl.where(o_l < i_row, p_ring + o_l * s_row, p_token + (o_l - i_row) * s_row)
        b_k = tl.load(p_x[:, None, None] + o_x, mask=m_x, other=0.0)
    else:
        o_r = (o_l * s_row)[:, None, None] + o_x
        b_k = tl.load(p_ring + o_r, mask=m_x & m_r, other=0.0)
        b_t = tl.load(p_token + (o_r - i_row * s_row), mask=m_x & (m_r == 0), other=0.0)
        b_k = tl.where(m_r, b_k, b_t.to(b_k.dtype))
    return tl.reshape(b_k, [o_l.shape[0], o_x.shape[1] * 32])


@triton.jit
def load_scalars(p_ring, p_token, i_row, s_row, s_token, o_l, o_g, i_n):
    """The same of log-decays or gains of heads o_g [N], one per row: [LP, N] float32."""
    m_r = (o_l < i_row) & (o_l >= 0)
    m_x = (o_l < i_row + i_n) & (o_l >= 0)
    if p_ring.dtype == p_token.dtype:
        p_x = tl.where(m_r, p_ring + o_l * s_row, p_token + (o_l - i_row) * s_token)
        return tl.load(p_x[:, None] + o_g[None, :], mask=m_x[:, None], other=0.0).to(tl.float32)
    else:
        b_r = tl.load(p_ring + (o_l * s_row)[:, None] + o_g[None, :], mask=m_r[:, None], other=0.0).to(tl.float32)
        p_t = p_token + ((o_l - i_row) * s_token)[:, None] + o_g[None, :]
        return tl.where(m_r[:, None], b_r, tl.load(p_t, mask=(m_x & (m_r == 0))[:, None], other=0.0).to(tl.float32))


@triton.jit
def column(b_x):
    """b_x [N] as [N, 1], in the layout of what it meets: a matrix product's is four registers for what fits in one."""
    return tl.trans(b_x[None, :])


@triton.jit
def load_keys(p_ring, p_token, p_query, i_row, i_n, s_row, o_l, K: tl.constexpr):
    """The keys of ``load_rows``, and behind them the query as one more row: [LP, K] of the ring's type.

    In pieces of 32 columns: a thread then has two rows of all pieces, and few addresses to choose.
    """
    LP: tl.constexpr = o_l.shape[0]
    m_r = o_l < i_row
    m_q = o_l == i_row + i_n
    m_x = o_l <= i_row + i_n
    o_x = (tl.arange(0, K // 32) * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
    if p_ring.dtype == p_token.dtype and p_ring.dtype == p_query.dtype:
        p_x = tl.where(m_r, p_ring + o_l * s_row, tl.where(m_q, p_query, p_token + (o_l - i_row) * s_row))
        b_k = tl.load(p_x[:, None, None] + o_x, mask=m_x[:, None, None], other=0.0)
    else:
        m_r = m_r[:, None, None]
        m_q = m_q[:, None, None]
        m_t = m_x[:, None, None] & (m_r == 0) & (m_q == 0)
        o_r = (o_l * s_row)[:, None, None] + o_x
        b_k = tl.load(p_ring + o_r, mask=m_r, other=0.0)
        b_k = tl.where(m_t, tl.load(p_token + (o_r - i_row * s_row), mask=m_t, other=0.0).to(b_k.dtype), b_k)
        b_q = tl.load(p_query + o_x + tl.zeros([LP, 1, 1], tl.int32), mask=m_q, other=0.0)
        b_k = tl.where(m_q, b_q.to(b_k.dtype), b_k)
    return tl.reshape(b_k, [LP, K])


@triton.jit
def prepared_query(p_q, o_k, NORM: tl.constexpr, SCALE: tl.constexpr):
    b_q = tl.load(p_q + o_k).to(tl.float32)
    if NORM:
        b_q *= inverse_norm(tl.sum(b_q * b_q, axis=0))
    return b_q * SCALE


@triton.jit
def key_norms(b_k, NORM: tl.constexpr):
    """What keys [LP, K] are multiplied by, [LP]."""
    if NORM:
        return inverse_norm(tl.sum(b_k * b_k, axis=1))
    else:
        return tl.full([b_k.shape[0]], 1.0, tl.float32)


@triton.jit
def _first(N, NP: tl.constexpr, m):
    """Indices [NP], and a mask of the first N, or of none where not m. (A scalar truth value can't be spread over a
    tile by the interpreter.)"""
    o = tl.arange(0, NP)
    return o, o < tl.where(m, N, 0)


@triton.jit
def taken(p_x, m, N, NP: tl.constexpr):
    """N elements, for ``put``, or none where not m."""
    o, m_x = _first(N, NP, m)
    return tl.load(p_x + o, mask=m_x)


@triton.jit
def put(p_x, b_x, m, N, NP: tl.constexpr):
    o, m_x = _first(N, NP, m)
    tl.store(p_x + o, b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def copy(p_from, p_to, m, N, NP: tl.constexpr):
    put(p_to, taken(p_from, m, N, NP), m, N, NP)


@triton.jit
def store_theta(
    b_theta, p_theta, o_theta, m_theta, p_columns, o_columns,
    BALANCED: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Store rows of Θ [N, K] at o_theta [N], times the copy's column scales at o_columns [N] and rotated as it is, and
    return what they must be multiplied by again [N]."""
    N: tl.constexpr = b_theta.shape[0]
    o_k = tl.arange(0, b_theta.shape[1])[None, :]
    o_to = o_theta[:, None]
    m_to = m_theta[:, None]
    if BALANCED:
        b_theta *= tl.load(p_columns + o_columns[:, None] + o_k)
    if ROTATE > 1:
        b_theta = hadamard(b_theta, ROTATE)
    b_factor = tl.full([N], 1.0, tl.float32)
    if HALF:
        # scaled by a power of two, so that float16 neither overflows nor loses the small ones: see device/fp4.py
        b_top = float_bits(tl.max(tl.abs(b_theta), axis=1)) >> 23
        b_top = tl.minimum(tl.maximum(b_top, 30), 230)  # a power of two that is normal, as its inverse
        SHIFT: tl.constexpr = THETA_BITS_CONVERTED if ISA >= 100 else THETA_BITS_MOVED
        b_theta *= bits_float((254 - b_top + SHIFT) << 23)[:, None]
        b_factor = bits_float((b_top - SHIFT) << 23)
        b_theta = b_theta.to(tl.float16)
        if ISA < 100:  # in the order of ``pair_position``
            b_theta = tl.reshape(b_theta, [N, b_theta.shape[1] // 8, 2, 2, 2])
            b_theta = tl.reshape(tl.permute(b_theta, (0, 1, 4, 3, 2)), [N, o_k.shape[1]])
        tl.store(p_theta + o_to + o_k, b_theta, mask=m_to)
    else:
        tl.store(p_theta + o_to + o_k, b_theta, mask=m_to)
    return b_factor


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


@triton.jit
def delta_window(
    p_q, p_k, p_v, p_beta, p_g,  # tokens: [B, T, Hk, K] twice, [B, T, H, V], [B, T, H], [B, T, H] or [B, T, H, K]
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g, p_mix,  # mix [slots, H, L, L]: the rows of M
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_start, p_top,
    p_columns,  # column scales of the copy [H, K]
    s_q, s_k, s_v, s_beta, s_g,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_mix,
    H: tl.constexpr, Hk: tl.constexpr, V: tl.constexpr,  # constants, as strides that cost no instructions
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, T: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    VP: tl.constexpr,
    CHANNEL: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, BALANCED: tl.constexpr,
    ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, H / PER): PER heads of one key. Θ [B, T, H, K] with its factor in gain [B, T, H], and C; of rows that
    flush, in C's place, what W's keys are multiplied by (their norms, and e^(G_h − G_j) where a head has one
    log-decay), in start the same of X's keys with e^G_j, e^G_h in gain, and zero in top [B, H]."""
    i_b = tl.program_id(0)
    i_h = tl.program_id(1) * PER
    i_k = i_h // GROUP
    i_row = tl.load(p_row + i_b)
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    if i_row + begin_loads(ISA) <= NOTHING:
        return
    i_b = i_b.to(tl.int64)
    G: tl.constexpr = K if CHANNEL else 1
    o_l = tl.arange(0, LP)
    o_g = tl.max_contiguous(tl.arange(0, PER), 1)  # neighbouring threads hold rows of a head, as of M
    p_q += i_b * s_q + i_k * K
    p_k += i_b * s_k + i_k * K
    p_v += i_b * s_v + i_h * V
    p_beta += i_b * s_beta + i_h
    p_g += i_b * s_g + i_h * G
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_v += i_slot * s_ring_v + i_h * V
    p_ring_beta += i_slot * s_ring_beta + i_h
    p_ring_g += i_slot * s_ring_g + i_h * G
    p_mix += i_slot * s_mix + i_h * (L * L)
    i_n = tl.where(i_used > 0, i_used - i_row, 1)
    # M as [column, head, row], a column a thread: sums over rows stay in it. Rows in use are zero behind their last
    o_m = tl.max_contiguous(o_l, 1)
    p_m = p_mix + o_m[:, None, None] + (o_g * (L * L))[None, :, None] + (o_m * L)[None, None, :]
    b_m = tl.load(p_m, mask=(o_l < L)[:, None, None] & (o_l < i_row)[None, None, :], other=0.0)
    for i_t in range(T):
        # the ring's rows before the tokens; the tokens themselves come from the inputs, so no barrier is needed
        i_last = i_row + i_t
        m_t = (i_t < i_n) & (i_last >= 0)
        m_last = o_l == i_last
        b_beta = tl.load(p_beta + i_t * H + o_g).to(tl.float32)[None, :]
        if CHANNEL:
            o_k = tl.arange(0, K // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
            b_query = tl.load(p_q + i_t * (Hk * K) + o_k).to(tl.float32)
            b_token = tl.load(p_k + i_t * (Hk * K) + o_k).to(p_ring_k.dtype.element_ty).to(tl.float32)
            b_own = tl.load(p_g + i_t * (H * K) + o_k).to(tl.float32) * LOG2E
            b_a, b_b, b_norm = channel_dots(
                p_ring_k, p_k, p_ring_g, p_g, i_row, i_last, b_token, b_query, b_own, o_k, o_l,
                Hk * K, H * K, T, NORM, ISA,
            )  # fmt: skip
            b_b = tl.where(m_last, total(b_token * b_query), b_b)
            b_scale = SCALE
            if NORM:
                b_norm = inverse_norm(tl.where(m_last, total(b_token * b_token), b_norm))
                b_scale = SCALE * inverse_norm(total(b_query * b_query))
            else:
                b_norm = tl.full([LP], 1.0, tl.float32)
            b_a = (b_a * b_norm)[:, None]
            b_b = (b_b * b_norm)[:, None]
        else:
            # a batch row that reads has at most L − 1 keys, so there is room for its query
            m_q = o_l == i_row + i_n
            # before the keys, which go through shared memory: what is behind a barrier waits for what is ahead of it
            b_gs = load_scalars(p_ring_g, p_g, i_row, H, H, o_l, o_g, i_n)
            b_next = load_scalars(p_ring_g + H, p_g, i_row - 1, H, H, o_l, o_g, i_n)
            b_k = load_keys(p_ring_k, p_k, p_q + i_t * (Hk * K), i_row, i_n, Hk * K, o_l, K)
            b_dots = dot_raw(b_k, tl.trans(b_k), ISA)
            b_norm = tl.full([LP], 1.0, tl.float32)
            if NORM:
                b_norm = inverse_norm(tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_dots, 0.0), axis=1))
            b_scale = tl.sum(tl.where(m_q, b_norm, 0.0), axis=0) * SCALE
            b_gs = tl.where((o_l <= i_last)[:, None], b_gs, 0.0)
            b_next = tl.where((o_l < i_last)[:, None], b_next, 0.0)
            b_after = exp(tl.cumsum(b_next, axis=0, reverse=True)) * column(b_norm)
            # the products are symmetric: a column is a row
            b_a = column(tl.sum(tl.where(m_last[None, :], b_dots, 0.0), axis=1)) * b_after
            b_b = column(tl.sum(tl.where(m_q[None, :], b_dots, 0.0), axis=1)) * b_after
        b_a *= tl.sum(tl.where(m_last, b_norm, 0.0), axis=0) * b_beta
        b_a = tl.where((o_l < i_last)[:, None], b_a, 0.0)
        # one step of the forward substitution: row t of M is β_t e_t − A[t, :]·M
        b_new = tl.where(m_last[:, None], b_beta, 0.0) - tl.sum(tl.trans(b_a)[None, :, :] * b_m, axis=2)
        m_l = (o_l < tl.where(m_t, L, 0))[:, None]
        tl.store(p_mix + i_last * L + o_l[:, None] + (o_g * (L * L))[None, :], b_new, mask=m_l)
        i_head = (i_b * T + i_t) * H + i_h
        o_c = o_l[:, None] + (o_g * L)[None, :]
        if i_used > 0:
            b_b = tl.where((o_l <= i_last)[:, None], b_b * b_scale, 0.0)
            b_c = tl.sum(tl.trans(b_b)[None, :, :] * b_m, axis=2)
            b_c += tl.sum(tl.where(m_last[:, None], b_b, 0.0), axis=0)[None, :] * b_new
            tl.store(p_c + i_head * L + o_c, b_c, mask=m_l)
            b_cx = b_c * column(b_norm)
            if CHANNEL:
                b_cx = tl.reshape(b_cx, [LP])
                b_last = b_query * b_scale - b_token * tl.sum(tl.where(m_last, b_cx, 0.0), axis=0)
                b_theta = channel_theta(
                    p_ring_k, p_k, p_ring_g, p_g, i_row, i_last, b_cx, b_last, b_own, o_k, Hk * K, H * K, T, ISA
                )
                b_theta = tl.reshape(b_theta, [1, K])
            else:
                # the keys again, from the nearest cache: they would have taken 32 registers all the while
                b_k = load_keys(p_ring_k, p_k, p_q + i_t * (Hk * K), i_row, i_n, Hk * K, o_l, K)
                b_from = exp(tl.cumsum(b_gs, axis=0))  # of the query's row, whose log-decay is zero, e^G_t
                b_theta = weighted_sums(b_k, b_from * tl.where(m_q[:, None], b_scale, -b_cx), ISA)
            b_factor = store_theta(
                b_theta, p_theta + i_head * K, o_g * K, o_g < PER, p_columns + i_h * K, o_g * K,
                BALANCED, ROTATE, HALF, ISA,
            )  # fmt: skip
            tl.store(p_gain + i_head + o_g, b_factor, mask=o_g < tl.where(m_t, PER, 0))
        elif CHANNEL:
            tl.store(p_top + i_b * H + i_h, 0)
            tl.store(p_c + i_head * L + o_l, b_norm, mask=o_l < tl.where(m_t, L, 0))
            tl.store(p_start + (i_b * H + i_h) * L + o_l, b_norm, mask=o_l < tl.where(m_t, L, 0))
        else:
            tl.store(p_top + i_b * H + i_h + o_g, tl.zeros([PER], tl.int32))
            tl.store(p_c + i_head * L + o_c, b_after, mask=m_l)
            tl.store(p_start + (i_b * H + i_h) * L + o_c, exp(tl.cumsum(b_gs, axis=0)) * column(b_norm), mask=m_l)
            tl.store(p_gain + i_head + o_g, exp(tl.sum(b_gs, axis=0)))
        if T > 1:
            b_m = tl.where(m_last[None, None, :], b_new[:, :, None], b_m)

    # into the ring, last: a store waits for its load, and loads behind it for the store
    for i_t in range(T):
        i_last = i_row + i_t
        m_t = (i_t < i_n) & (i_last >= 0)
        m_k = m_t & (i_h % GROUP == 0)
        b_k1 = taken(p_k + i_t * (Hk * K), m_k, K, K)
        b_v1 = taken(p_v + i_t * (H * V), m_t, PER * V, VP)
        b_beta1 = taken(p_beta + i_t * H, m_t, PER, PER)
        b_g1 = taken(p_g + i_t * (H * G), m_t, PER * G, PER * G)
        put(p_ring_k + i_last * (Hk * K), b_k1, m_k, K, K)
        put(p_ring_v + i_last * (H * V), b_v1, m_t, PER * V, VP)
        put(p_ring_beta + i_last * H, b_beta1, m_t, PER, PER)
        put(p_ring_g + i_last * (H * G), b_g1, m_t, PER * G, PER * G)
