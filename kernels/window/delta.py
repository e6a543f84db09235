"""The window kernel of the delta rule for one token: appends it to the ring, and gives Θ and C, or what a flush
multiplies its keys by. Several tokens are taken by delta_many.py and channel_many.py.

Of M = (I + A)⁻¹·diag(β) it appends the token's row to ``DecodeState.mix``: a step of the forward substitution per
token, so that no token pays for all. Arithmetic as in mamba2.py.
"""

from __future__ import annotations

from ..device.dot import dot_raw, weighted_sums
from ..device.math import LOG2E, exp, inverse_norm
from ..device.operand import begin_loads
from ..device.targets import tl, triton
from .channel import channel_dots, channel_theta, total
from .plan import NOTHING
from .tokens import column, load_keys, load_scalars, put, store_theta, taken


@triton.jit
def delta_window(
    p_q, p_k, p_v, p_beta, p_g,  # tokens: [B, Hk, K] twice, [B, H, V], [B, H], [B, H] or [B, H, K]
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g, p_mix,  # mix [slots, H, L, L]: the rows of M
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_start, p_top,
    p_columns,  # column scales of the copy [H, K]
    s_q, s_k, s_v, s_beta, s_g,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_mix,
    H: tl.constexpr, Hk: tl.constexpr, V: tl.constexpr,  # constants, as strides that cost no instructions
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, GROUP: tl.constexpr, PER: tl.constexpr,
    VP: tl.constexpr,
    CHANNEL: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, BALANCED: tl.constexpr,
    ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, H / PER): PER heads of one key. Θ [B, H, K] with its factor in gain [B, H], and C; of rows that
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

    # M as [column, head, row], a column a thread: sums over rows stay in it. Rows in use are zero behind their last
    o_m = tl.max_contiguous(o_l, 1)
    p_m = p_mix + o_m[:, None, None] + (o_g * (L * L))[None, :, None] + (o_m * L)[None, None, :]
    b_m = tl.load(p_m, mask=(o_l < L)[:, None, None] & (o_l < i_row)[None, None, :], other=0.0)
    m_last = o_l == i_row
    b_beta = tl.load(p_beta + o_g).to(tl.float32)[None, :]
    if CHANNEL:
        o_k = tl.arange(0, K // VEC)[:, None] * VEC + tl.arange(0, VEC)[None, :]
        b_query = tl.load(p_q + o_k).to(tl.float32)
        b_token = tl.load(p_k + o_k).to(p_ring_k.dtype.element_ty).to(tl.float32)
        b_own = tl.load(p_g + o_k).to(tl.float32) * LOG2E
        b_a, b_b, b_norm = channel_dots(
            p_ring_k, p_ring_g, i_row, b_token, b_query, b_own, o_k, o_l, Hk * K, H * K, NORM, ISA
        )
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
        m_q = o_l == i_row + 1
        # before the keys, which go through shared memory: what is behind a barrier waits for what is ahead of it
        b_gs = load_scalars(p_ring_g, p_g, i_row, H, H, o_l, o_g, 1)
        b_next = load_scalars(p_ring_g + H, p_g, i_row - 1, H, H, o_l, o_g, 1)
        b_k = load_keys(p_ring_k, p_k, p_q, i_row, 1, Hk * K, o_l, K)
        b_dots = dot_raw(b_k, tl.trans(b_k), ISA)
        b_norm = tl.full([LP], 1.0, tl.float32)
        if NORM:
            b_norm = inverse_norm(tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_dots, 0.0), axis=1))
        b_scale = tl.sum(tl.where(m_q, b_norm, 0.0), axis=0) * SCALE
        b_after = exp(tl.cumsum(b_next, axis=0, reverse=True)) * column(b_norm)
        # the products are symmetric: a column is a row
        b_a = column(tl.sum(tl.where(m_last[None, :], b_dots, 0.0), axis=1)) * b_after
        b_b = column(tl.sum(tl.where(m_q[None, :], b_dots, 0.0), axis=1)) * b_after
    b_a *= tl.sum(tl.where(m_last, b_norm, 0.0), axis=0) * b_beta
    b_a = tl.where((o_l < i_row)[:, None], b_a, 0.0)
    # one step of the forward substitution: row t of M is β_t e_t − A[t, :]·M
    b_new = tl.where(m_last[:, None], b_beta, 0.0) - tl.sum(tl.trans(b_a)[None, :, :] * b_m, axis=2)
    m_l = (o_l < L)[:, None]
    tl.store(p_mix + i_row * L + o_l[:, None] + (o_g * (L * L))[None, :], b_new, mask=m_l)
    i_head = i_b * H + i_h
    o_c = o_l[:, None] + (o_g * L)[None, :]
    if i_used > 0:
        b_b = tl.where((o_l <= i_row)[:, None], b_b * b_scale, 0.0)
        b_c = tl.sum(tl.trans(b_b)[None, :, :] * b_m, axis=2)
        b_c += tl.sum(tl.where(m_last[:, None], b_b, 0.0), axis=0)[None, :] * b_new
        tl.store(p_c + i_head * L + o_c, b_c, mask=m_l)
        b_cx = b_c * column(b_norm)
        if CHANNEL:
            b_cx = tl.reshape(b_cx, [LP])
            b_last = b_query * b_scale - b_token * tl.sum(tl.where(m_last, b_cx, 0.0), axis=0)
            b_theta = channel_theta(p_ring_k, p_ring_g, i_row, b_cx, b_last, b_own, o_k, Hk * K, H * K, ISA)
            b_theta = tl.reshape(b_theta, [1, K])
        else:
            # the keys again, from the nearest cache: they would have taken 32 registers all the while
            b_k = load_keys(p_ring_k, p_k, p_q, i_row, 1, Hk * K, o_l, K)
            b_from = exp(tl.cumsum(b_gs, axis=0))  # of the query's row, whose log-decay is zero, e^G_t
            b_theta = weighted_sums(b_k, b_from * tl.where(m_q[:, None], b_scale, -b_cx), ISA)
        b_factor = store_theta(
            b_theta, p_theta + i_head * K, o_g * K, o_g < PER, p_columns + i_h * K, o_g * K,
            BALANCED, ROTATE, HALF, ISA,
        )  # fmt: skip
        tl.store(p_gain + i_head + o_g, b_factor, mask=o_g < PER)
    elif CHANNEL:
        tl.store(p_top + i_b * H + i_h, 0)
        tl.store(p_c + i_head * L + o_l, b_norm, mask=o_l < L)
        tl.store(p_start + (i_b * H + i_h) * L + o_l, b_norm, mask=o_l < L)
    else:
        tl.store(p_top + i_b * H + i_h + o_g, tl.zeros([PER], tl.int32))
        tl.store(p_c + i_head * L + o_c, b_after, mask=m_l)
        tl.store(p_start + (i_b * H + i_h) * L + o_c, exp(tl.cumsum(b_gs, axis=0)) * column(b_norm), mask=m_l)
        tl.store(p_gain + i_head + o_g, exp(tl.sum(b_gs, axis=0)))

    # into the ring, last: a store waits for its load, and loads behind it for the store
    m_k = i_h % GROUP == 0
    m_t = i_row >= 0  # as it always is here
    b_k1 = taken(p_k, m_k, K, K)
    b_v1 = taken(p_v, m_t, PER * V, VP)
    b_beta1 = taken(p_beta, m_t, PER, PER)
    b_g1 = taken(p_g, m_t, PER * G, PER * G)
    put(p_ring_k + i_row * (Hk * K), b_k1, m_k, K, K)
    put(p_ring_v + i_row * (H * V), b_v1, m_t, PER * V, VP)
    put(p_ring_beta + i_row * H, b_beta1, m_t, PER, PER)
    put(p_ring_g + i_row * (H * G), b_g1, m_t, PER * G, PER * G)
