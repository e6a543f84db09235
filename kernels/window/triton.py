"""The window kernels: from the ring and a new token to what the readout and the fold need.

``plan_kernel`` decides, on the device, which rows read, which flush and which are padding; it alone moves cursors.
``mamba2_window`` and ``delta_window`` append the token to the ring and give (Θ, C) of the rows that read; the latter
also gives M = (I + A)⁻¹·diag(β) of the rows that flush. What else the fold needs (decay, X, W) are functions of
the ring that it computes itself, which spares an [L, K] tile per head in memory.

All arithmetic is FP32; forward substitution, and exponentials of sums of log-decays between two tokens, never of
differences, so that −∞ is an ordinary log-decay.
"""

from __future__ import annotations

from ..device.codec import bits_float, float_bits, hadamard
from ..device.fp4 import THETA_BITS_CONVERTED, THETA_BITS_MOVED, pair_position
from ..device.math import exp, inverse_norm
from ..device.targets import tl, triton


@triton.jit
def plan_kernel(
    p_slots, p_cursor, p_position, p_row, p_used, p_list, p_count, B, L: tl.constexpr, BP: tl.constexpr
):  # fmt: skip
    """One program. ``row`` [B]: ring row of the new token, −1 for padding; ``used`` [B]: ring rows to read, 0 for
    rows that do not; ``list``: the rows that flush, ``count`` [1] of them. Cursors and positions move on."""
    o_b = tl.arange(0, BP)
    m_b = o_b < B
    i_slot = tl.load(p_slots + o_b, mask=m_b, other=-1)
    m_live = i_slot >= 0
    i_row = tl.load(p_cursor + i_slot, mask=m_live, other=-1)
    m_flush = m_live & (i_row + 1 >= L)
    b_after = tl.where(m_flush, 0, i_row + 1)
    tl.store(p_row + o_b, i_row, mask=m_b)
    tl.store(p_used + o_b, b_after, mask=m_b)
    tl.store(p_cursor + i_slot, b_after, mask=m_live)
    tl.store(p_position + i_slot, tl.load(p_position + i_slot, mask=m_live, other=0) + 1, mask=m_live)
    b_flush = m_flush.to(tl.int32)
    tl.store(p_list + tl.cumsum(b_flush, axis=0) - 1, o_b, mask=m_flush)
    tl.store(p_count, tl.sum(b_flush, axis=0))


@triton.jit
def load_ring(p_ring, p_token, i_row, s_row, o_k, m_k, LP: tl.constexpr):
    """Rows [LP, n] of one head's ring as float32: the token at i_row, zeros after it."""
    o_l = tl.arange(0, LP)[:, None]
    b_r = tl.load(p_ring + o_l * s_row + o_k[None, :], mask=(o_l < i_row) & m_k[None, :], other=0.0).to(tl.float32)
    b_t = tl.load(p_token + o_k, mask=m_k, other=0.0).to(tl.float32)
    return tl.where(o_l == i_row, b_t[None, :], b_r)


@triton.jit
def log_decays(p_ring, p_token, i_row, s_row, o_l):
    """Scalar log-decays, or gains, of rows o_l of one head's ring: the token's at i_row, zeros after it."""
    b_r = tl.load(p_ring + o_l * s_row, mask=o_l < i_row, other=0.0)
    return tl.where(o_l == i_row, tl.load(p_token).to(tl.float32), b_r)


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
def _copy(p_from, p_to, N, NP: tl.constexpr):
    o = tl.arange(0, NP)
    tl.store(p_to + o, tl.load(p_from + o, mask=o < N).to(p_to.dtype.element_ty), mask=o < N)


@triton.jit
def _store_theta(b_theta, p_theta, K: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr):
    """Store Θ [K], rotated as the copy is, and return what it must be multiplied by again."""
    o_k = tl.arange(0, K)
    if ROTATE > 1:
        b_theta = tl.reshape(hadamard(tl.reshape(b_theta, [1, K]), ROTATE), [K])
    b_factor = tl.sum(tl.full([1], 1.0, tl.float32), axis=0)
    if HALF:
        # scaled by a power of two, so that float16 neither overflows nor loses the small ones: see device/fp4.py
        b_top = float_bits(tl.max(tl.abs(b_theta), axis=0)) >> 23
        b_top = tl.minimum(tl.maximum(b_top, 30), 230)  # a power of two that is normal, as its inverse
        SHIFT: tl.constexpr = THETA_BITS_CONVERTED if ISA >= 100 else THETA_BITS_MOVED
        b_theta *= bits_float((254 - b_top + SHIFT) << 23)
        b_factor = bits_float((b_top - SHIFT) << 23)
        tl.store(p_theta + pair_position(o_k, ISA), b_theta.to(tl.float16))
    else:
        tl.store(p_theta + o_k, b_theta)
    return b_factor


@triton.jit
def mamba2_window(
    p_q, p_k, p_v, p_beta, p_rate,  # token: [B, Hk, K] twice, [B, H, V], [B, H]; A [H]
    p_ring_k, p_ring_v, p_ring_beta,
    p_slots, p_row, p_used, p_theta, p_gain, p_c,
    s_q, s_k, s_v, s_beta,  # batch strides of the token
    s_ring_k, s_ring_v, s_ring_beta,  # slot strides of the ring
    H, Hk, V,
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, GROUP: tl.constexpr, GP: tl.constexpr, VP: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, Hk): the GROUP heads of one B and C. Θ [B, Hk, K] is q, gain [B, H] is e^G."""
    i_b = tl.program_id(0)
    i_k = tl.program_id(1)
    i_row = tl.load(p_row + i_b)
    if i_row < 0:
        return
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_b = i_b.to(tl.int64)
    i_h = i_k * GROUP
    o_k = tl.arange(0, K)
    p_k += i_b * s_k + i_k * K
    p_v += i_b * s_v + i_h * V
    p_beta += i_b * s_beta + i_h
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_beta += i_slot * s_ring_beta + i_h
    _copy(p_k, p_ring_k + i_row * (Hk * K), K, K)
    _copy(p_v, p_ring_v + i_slot * s_ring_v + i_row * (H * V) + i_h * V, GROUP * V, VP)
    _copy(p_beta, p_ring_beta + i_row * H, GROUP, GP)
    if tl.load(p_used + i_b) <= 0:
        return

    # the ring's rows before the token; the token itself comes from the inputs, so no barrier is needed
    b_k = load_ring(p_ring_k, p_k, i_row, Hk * K, o_k, o_k < K, LP)
    b_q = prepared_query(p_q + i_b * s_q + i_k * K, o_k, NORM, SCALE)
    b_dot = tl.sum(b_k * b_q[None, :], axis=1) * key_norms(b_k, NORM)  # [LP]

    o_g = tl.arange(0, GP)
    o_l = tl.arange(0, LP)[:, None]
    b_rate = tl.load(p_rate + i_h + o_g, mask=o_g < GROUP, other=0.0)
    b_beta = load_ring(p_ring_beta, p_beta, i_row, H, o_g, o_g < GROUP, LP)  # [LP, GP]
    # row j of b_next is row j + 1 of b_beta: its sums from the end are Σ g_i over j < i <= row, without a difference
    o_next = tl.arange(0, LP)[:, None] + 1
    b_next = tl.load(p_ring_beta + o_next * H + o_g[None, :], mask=(o_next < i_row) & (o_g < GROUP)[None, :], other=0.0)
    b_token = tl.load(p_beta + o_g, mask=o_g < GROUP, other=0.0).to(tl.float32)
    b_next = tl.where(o_next == i_row, b_token[None, :], b_next)
    b_c = b_dot[:, None] * exp(tl.cumsum(b_next * b_rate[None, :], axis=0, reverse=True)) * b_beta
    o_head = i_b * H + i_h + o_g
    m_c = (o_l < L) & (o_g < GROUP)[None, :]
    tl.store(p_c + o_head[None, :] * L + o_l, tl.where(o_l <= i_row, b_c, 0.0), mask=m_c)
    b_factor = _store_theta(b_q, p_theta + (i_b * Hk + i_k) * K, K, ROTATE, HALF, ISA)
    b_gain = exp(tl.sum(b_beta * b_rate[None, :], axis=0)) * b_factor
    tl.store(p_gain + o_head, b_gain, mask=o_g < GROUP)


@triton.jit
def _row_of(b_x, i_t):
    """Row i_t of a tile [n, m]."""
    return tl.sum(tl.where(tl.arange(0, b_x.shape[0])[:, None] == i_t, b_x, 0.0), axis=0)


@triton.jit
def _forward(b_n, b_a, i_t):
    """One row of a forward substitution: row i_t of (I + A)⁻¹ [LP, LP], whose rows before it are done and whose
    others are those of I; b_a [LP] is row i_t of A, zero from i_t on."""
    b_row = tl.sum(b_a[:, None] * b_n, axis=0)
    m_t = tl.arange(0, b_n.shape[0])[:, None] == i_t
    return tl.where(m_t, b_n - b_row[None, :], b_n)


@triton.jit
def _scalar_terms(b_kk, b_qk, b_g, b_beta, p_ring_g, p_g, i_row, H, L: tl.constexpr, LP: tl.constexpr):
    """(I + A)⁻¹ [LP, LP] and B's last row [LP] where each head has one log-decay; b_kk, b_qk are plain dot products."""
    o_l = tl.arange(0, LP)
    o_i, o_j = o_l[:, None], o_l[None, :]
    # transposed: A[t, j] stands at [j, t]; Σ g_i over j < i <= t is a running sum along t of what lies after j
    b_g_row = tl.sum(tl.where(o_i == o_j, b_g[:, None], 0.0), axis=0)
    b_between = tl.cumsum(tl.where(o_j > o_i, b_g_row[None, :], 0.0), axis=1)
    b_beta_row = tl.sum(tl.where(o_i == o_j, b_beta[:, None], 0.0), axis=0)
    b_a = tl.where(o_j > o_i, b_kk * exp(b_between) * b_beta_row[None, :], 0.0)
    b_n = tl.where(o_i == o_j, 1.0, 0.0)
    for i_t in tl.static_range(1, L):
        b_n = _forward(b_n, tl.sum(tl.where(o_j == i_t, b_a, 0.0), axis=1), i_t)
    b_next = tl.load(p_ring_g + (o_l + 1) * H, mask=o_l + 1 < i_row, other=0.0)
    b_next = tl.where(o_l + 1 == i_row, tl.load(p_g).to(tl.float32), b_next)
    return b_n, b_qk * exp(tl.cumsum(b_next, axis=0, reverse=True))


@triton.jit
def _channel_terms(b_khat, b_q, b_g, b_beta, i_row, LP: tl.constexpr):
    """The same where each key column has its own log-decay (KDA), b_g [LP, K].

    Row by row: the keys before token t, decayed to t, are those decayed to t − 1 times e^(g_t). L·K exponentials,
    not L²·K; all factors are at most one, so products neither overflow nor cancel.
    """
    o_l = tl.arange(0, LP)
    b_n = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    b_z = tl.zeros(b_khat.shape, tl.float32)
    b_e = exp(b_g)
    i_t = 0
    while i_t <= i_row:
        b_key = _row_of(b_khat, i_t)
        b_z *= _row_of(b_e, i_t)[None, :]
        b_a = tl.sum(b_z * b_key[None, :], axis=1) * tl.sum(tl.where(o_l == i_t, b_beta, 0.0), axis=0)
        b_n = _forward(b_n, b_a, i_t)
        b_z = tl.where(o_l[:, None] == i_t, b_key[None, :], b_z)
        i_t += 1
    return b_n, tl.sum(b_z * b_q[None, :], axis=1)


@triton.jit
def delta_window(
    p_q, p_k, p_v, p_beta, p_g,  # token: [B, Hk, K] twice, [B, H, V], [B, H], [B, H] or [B, H, K]
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g,
    p_slots, p_row, p_used, p_theta, p_gain, p_c, p_mix,  # mix [B, H, LP, LP]: M of the rows that flush
    s_q, s_k, s_v, s_beta, s_g,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g,
    H, Hk, V,
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, GROUP: tl.constexpr, VP: tl.constexpr,
    CHANNEL: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr, ROTATE: tl.constexpr, HALF: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B, Hk): the GROUP heads of one key head, whose norms and products of keys they share."""
    i_b = tl.program_id(0)
    i_k = tl.program_id(1)
    i_row = tl.load(p_row + i_b)
    if i_row < 0:
        return
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    i_b = i_b.to(tl.int64)
    G: tl.constexpr = K if CHANNEL else 1
    o_k = tl.arange(0, K)
    o_l = tl.arange(0, LP)
    p_k += i_b * s_k + i_k * K
    p_ring_k += i_slot * s_ring_k + i_k * K
    p_ring_v += i_slot * s_ring_v
    p_ring_beta += i_slot * s_ring_beta
    p_ring_g += i_slot * s_ring_g
    _copy(p_k, p_ring_k + i_row * (Hk * K), K, K)

    b_k = load_ring(p_ring_k, p_k, i_row, Hk * K, o_k, o_k < K, LP)
    b_norm = key_norms(b_k, NORM)
    b_khat = b_k * b_norm[:, None]
    b_q = prepared_query(p_q + i_b * s_q + i_k * K, o_k, NORM, SCALE)
    if not CHANNEL:
        # in chunks of columns: the operands of an FP32 product lie in registers for its whole inner dimension
        b_kk = tl.zeros([LP, LP], tl.float32)
        for i_c in range(0, K, BK):
            o_c = i_c + tl.arange(0, BK)
            b_c = load_ring(p_ring_k, p_k, i_row, Hk * K, o_c, o_c < K, LP) * b_norm[:, None]
            b_kk = tl.dot(b_c, tl.trans(b_c), b_kk, input_precision=PRECISION)
        b_qk = tl.sum(b_khat * b_q[None, :], axis=1)

    for i in range(GROUP):
        i_h = i_k * GROUP + i
        p_bt = p_beta + i_b * s_beta + i_h
        p_gt = p_g + i_b * s_g + i_h * G
        _copy(p_v + i_b * s_v + i_h * V, p_ring_v + i_row * (H * V) + i_h * V, V, VP)
        _copy(p_bt, p_ring_beta + i_row * H + i_h, 1, 1)
        _copy(p_gt, p_ring_g + (i_row * H + i_h) * G, G, G)
        b_beta = log_decays(p_ring_beta + i_h, p_bt, i_row, H, o_l)
        if CHANNEL:
            b_g = load_ring(p_ring_g + i_h * G, p_gt, i_row, H * G, o_k, o_k < K, LP)
            b_n, b_last = _channel_terms(b_khat, b_q, b_g, b_beta, i_row, LP)
        else:
            b_g = log_decays(p_ring_g + i_h, p_gt, i_row, H, o_l)
            b_n, b_last = _scalar_terms(b_kk, b_qk, b_g, b_beta, p_ring_g + i_h, p_gt, i_row, H, L, LP)
        b_beta_row = tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_beta[:, None], 0.0), axis=0)
        b_m = b_n * b_beta_row[None, :]  # M [t, j]
        i_head = i_b * H + i_h
        if i_used <= 0:
            tl.store(p_mix + i_head * (LP * LP) + o_l[:, None] * LP + o_l[None, :], b_m)
        else:
            b_last = tl.where(o_l <= i_row, b_last, 0.0)
            b_c = tl.sum(b_last[:, None] * b_m, axis=0)
            tl.store(p_c + i_head * L + o_l, b_c, mask=o_l < L)
            b_cx = tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_c[None, :], 0.0), axis=1)
            if CHANNEL:
                b_x = exp(tl.cumsum(b_g, axis=0)) * b_khat
                b_decay = exp(tl.sum(b_g, axis=0))
            else:
                b_x = exp(tl.cumsum(b_g, axis=0))[:, None] * b_khat
                b_decay = exp(tl.sum(b_g, axis=0))
            b_theta = b_decay * b_q - tl.sum(b_cx[:, None] * b_x, axis=0)
            b_factor = _store_theta(b_theta, p_theta + i_head * K, K, ROTATE, HALF, ISA)
            tl.store(p_gain + i_head, b_factor)
