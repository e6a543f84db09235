"""The window algebra of many whole windows at once: every window and head on its own, before the scan begins.

Log-decays and gains are FP32, exponentials are of sums of log-decays between two tokens, never of differences, so
that −∞ is an ordinary log-decay; forward substitution as in window/reference.py.
"""

from __future__ import annotations

from ..device.dot import dot_fp32, dot_raw
from ..device.math import exp, inverse_norm
from ..device.targets import tl, triton


@triton.jit
def _norms(b_x, NORM: tl.constexpr):
    """What raw keys or queries [L, K] are multiplied by, [L]."""
    if NORM:
        b_x = b_x.to(tl.float32)
        return inverse_norm(tl.sum(b_x * b_x, axis=1))
    else:
        return tl.full([b_x.shape[0]], 1.0, tl.float32)


@triton.jit
def _vector(p_x, o_k, NORM: tl.constexpr):
    """One key or query [K] as the recurrence sees it."""
    b_x = tl.load(p_x + o_k).to(tl.float32)
    if NORM:
        b_x *= inverse_norm(tl.sum(b_x * b_x, axis=0))
    return b_x


@triton.jit
def _log_decays(p_g, o_g, m_g, b_rate):
    """Log-decays at offsets o_g as float32; zero, no decay, where there is no token."""
    return tl.load(p_g + o_g, mask=m_g, other=0.0).to(tl.float32) * b_rate


@triton.jit(do_not_specialize=["T"])
def token_terms(
    p_q, p_k, p_beta, p_g, p_rate,  # as in window_terms
    p_decay, p_x, p_p, p_query,  # [T, B, H, 1 or K] and [T, B, H, K], float32
    s_qb, s_qt, s_kb, s_kt, s_bb, s_bt, s_gb, s_gt,
    T, H, Hk, BH,
    K: tl.constexpr, R: tl.constexpr, MAMBA2: tl.constexpr, CHANNEL: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Windows of one token. Grid (B · H, T / R)."""
    i_bh = tl.program_id(0)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    i_key = i_h // (H // Hk)
    o_t = (tl.program_id(1) * R + tl.arange(0, R)).to(tl.int64)
    m_t = o_t < T
    o_k = tl.arange(0, K)
    b_k = tl.load(p_k + i_b * s_kb + i_key * K + o_t[:, None] * s_kt + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_k = b_k.to(tl.float32) * _norms(b_k, NORM)[:, None]
    b_q = tl.load(p_q + i_b * s_qb + i_key * K + o_t[:, None] * s_qt + o_k[None, :], mask=m_t[:, None], other=0.0)
    b_q = b_q.to(tl.float32) * (_norms(b_q, NORM) * SCALE)[:, None]
    b_beta = tl.load(p_beta + i_b * s_bb + i_h + o_t * s_bt, mask=m_t, other=0.0).to(tl.float32)
    i_t = o_t * BH + i_bh
    o_out = i_t[:, None] * K + o_k[None, :]
    tl.store(p_query + o_out, b_q, mask=m_t[:, None])
    tl.store(p_p + o_out, b_k * b_beta[:, None], mask=m_t[:, None])
    p_g += i_b * s_gb
    if CHANNEL:
        b_e = exp(_log_decays(p_g, o_t[:, None] * s_gt + i_h * K + o_k[None, :], m_t[:, None], 1.0))
        tl.store(p_decay + o_out, b_e, mask=m_t[:, None])
        tl.store(p_x + o_out, b_k * b_e, mask=m_t[:, None])
    else:
        b_rate = tl.load(p_rate + i_h) if MAMBA2 else 1.0
        b_e = exp(_log_decays(p_g, o_t * s_gt + i_h, m_t, b_rate))
        tl.store(p_decay + i_t, b_e, mask=m_t)
        if not MAMBA2:
            tl.store(p_x + o_out, b_k * b_e[:, None], mask=m_t[:, None])


@triton.jit
def _inverse(b_a, i_used):
    """(I + A)⁻¹ [LP, LP] of a strictly lower triangular A, row by row."""
    o_l = tl.arange(0, b_a.shape[0])
    b_n = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    for i_t in range(1, i_used):
        m_t = o_l[:, None] == i_t
        b_row = tl.sum(tl.where(m_t, b_a, 0.0), axis=0)  # [j]
        b_row = tl.sum(b_row[:, None] * b_n, axis=0)
        b_n = tl.where(m_t, b_n - b_row[None, :], b_n)
    return b_n


@triton.jit
def _channel_products(
    p_q, p_k, p_g, b_beta, s_qt, s_kt, s_gt, i_used, K: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr
):  # fmt: skip
    """(I + A)⁻¹ and B·(I + A)⁻¹ where each key column has its own log-decay (KDA).

    Row by row: the keys before token t, decayed to t, are those decayed to t − 1 times e^(g_t). L·K exponentials,
    not L²·K; all factors are at most one, so products neither overflow nor cancel.
    """
    LP: tl.constexpr = b_beta.shape[0]
    o_l = tl.arange(0, LP)
    o_k = tl.arange(0, K)
    b_n = tl.where(o_l[:, None] == o_l[None, :], 1.0, 0.0)
    b_bn = tl.zeros([LP, LP], tl.float32)
    b_z = tl.zeros([LP, K], tl.float32)
    for i_t in range(0, i_used):
        m_t = o_l[:, None] == i_t
        b_key = _vector(p_k + i_t * s_kt, o_k, NORM)
        b_query = _vector(p_q + i_t * s_qt, o_k, NORM) * SCALE
        b_z = b_z * exp(tl.load(p_g + i_t * s_gt + o_k).to(tl.float32))[None, :]
        b_gain = tl.sum(tl.where(o_l == i_t, b_beta, 0.0), axis=0)
        b_a = tl.sum(b_z * b_key[None, :], axis=1) * b_gain
        b_n = tl.where(m_t, b_n - tl.sum(b_a[:, None] * b_n, axis=0)[None, :], b_n)
        b_z = tl.where(m_t, b_key[None, :], b_z)
        b_b = tl.sum(b_z * b_query[None, :], axis=1)
        b_bn = tl.where(m_t, tl.sum(b_b[:, None] * b_n, axis=0)[None, :], b_bn)
    return b_n, b_bn


@triton.jit
def _columns(p_x, o_l, s_t, o_c, m_l):
    """Columns o_c of keys, queries or log-decays [LP, n]; zeros where there is no token."""
    return tl.load(p_x + o_l[:, None] * s_t + o_c[None, :], mask=m_l[:, None], other=0.0)


@triton.jit(do_not_specialize=["T", "L"])
def window_terms(
    p_q, p_k, p_beta, p_g, p_rate,  # [B, T, Hk, K] twice, [B, T, H], [B, T, H] or [B, T, H, K] (Mamba-2: beta), [H]
    p_decay, p_x, p_p, p_theta, p_c, p_query,  # [W, B, H, ...]: 1 or K; [L, K] three times; [L, L]; K. float32
    s_qb, s_qt, s_kb, s_kt, s_bb, s_bt, s_gb, s_gt,  # strides of rows and tokens
    T, L, H, Hk, BH,
    K: tl.constexpr, LP: tl.constexpr, BK: tl.constexpr, MAMBA2: tl.constexpr, CHANNEL: tl.constexpr,
    NORM: tl.constexpr, SCALE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B · H, W): windows of L tokens, the last one maybe shorter, LP: L padded. Columns in chunks of BK.

    decay, X and P of the fold (kernels/window/reference.py), Θ and C of every token, and the query of the last, which
    reads the folded state.
    """
    i_bh = tl.program_id(0)
    i_w = tl.program_id(1)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    i_key = i_h // (H // Hk)
    i_start = i_w.to(tl.int64) * L
    i_used = tl.minimum(L, T - i_w * L)
    i_out = i_w.to(tl.int64) * BH + i_bh
    o_l = tl.arange(0, LP)
    o_k = tl.arange(0, K)
    m_l = o_l < i_used
    o_i, o_j = o_l[:, None], o_l[None, :]
    p_q += i_b * s_qb + i_start * s_qt + i_key * K
    p_k += i_b * s_kb + i_start * s_kt + i_key * K
    p_beta += i_b * s_bb + i_start * s_bt + i_h
    p_g += i_b * s_gb + i_start * s_gt + i_h * (K if CHANNEL else 1)
    b_rate = tl.load(p_rate + i_h) if MAMBA2 else 1.0
    b_beta = tl.load(p_beta + o_l * s_bt, mask=m_l, other=0.0).to(tl.float32)

    b_norm = _norms(_columns(p_k, o_l, s_kt, o_k, m_l), NORM)
    b_norm_q = _norms(_columns(p_q, o_l, s_qt, o_k, m_l), NORM) * SCALE
    m_next = o_l + 1 < i_used
    if CHANNEL:
        b_n, b_c = _channel_products(p_q, p_k, p_g, b_beta, s_qt, s_kt, s_gt, i_used, K, NORM, SCALE)
    else:
        b_c = tl.zeros([LP, LP], tl.float32)
        b_a = tl.zeros([LP, LP], tl.float32)
        for i_c in range(0, K, BK):
            o_c = i_c + tl.arange(0, BK)
            b_k = _columns(p_k, o_l, s_kt, o_c, m_l)
            b_c += dot_raw(_columns(p_q, o_l, s_qt, o_c, m_l), tl.trans(b_k), ISA)
            if not MAMBA2:
                b_a += dot_raw(b_k, tl.trans(b_k), ISA)
        b_g = _log_decays(p_g, o_l * s_gt, m_l, b_rate)
        # Σ g_i over j < i <= t, at [t, j], is a running sum along t of what lies after j
        b_between = exp(tl.cumsum(tl.where(o_i > o_j, b_g[:, None], 0.0), axis=0)) * b_norm[None, :]
        b_c = tl.where(o_i >= o_j, b_c * b_norm_q[:, None] * b_between, 0.0)
        if not MAMBA2:
            b_n = _inverse(tl.where(o_i > o_j, b_a * (b_norm * b_beta)[:, None] * b_between, 0.0), i_used)
            b_c = dot_fp32(b_c, b_n, ISA)
        b_from = exp(tl.cumsum(b_g, axis=0))[:, None]
        b_next = _log_decays(p_g, (o_l + 1) * s_gt, m_next, b_rate)
        b_after = exp(tl.cumsum(b_next, axis=0, reverse=True))[:, None]
        tl.store(p_decay + i_out, exp(tl.sum(b_g, axis=0)))
    b_c *= b_beta[None, :]
    tl.store(p_c + i_out * (L * L) + o_i * L + o_j, b_c, mask=(o_i < L) & (o_j < L))
    tl.store(p_query + i_out * K + o_k, _vector(p_q + (i_used - 1) * s_qt, o_k, NORM) * SCALE)

    for i_c in range(0, K, BK):
        o_c = i_c + tl.arange(0, BK)
        o_out = i_out * (L * K) + o_l[:, None] * K + o_c[None, :]
        m_out = (o_l < L)[:, None]
        if CHANNEL:
            b_g = _log_decays(p_g, o_l[:, None] * s_gt + o_c[None, :], m_l[:, None], 1.0)
            tl.store(p_decay + i_out * K + o_c, exp(tl.sum(b_g, axis=0)))
            b_from = exp(tl.cumsum(b_g, axis=0))
            b_next = _log_decays(p_g, (o_l[:, None] + 1) * s_gt + o_c[None, :], m_next[:, None], 1.0)
            b_after = exp(tl.cumsum(b_next, axis=0, reverse=True))  # what comes after each token
        b_k = _columns(p_k, o_l, s_kt, o_c, m_l).to(tl.float32) * b_norm[:, None]
        b_theta = _columns(p_q, o_l, s_qt, o_c, m_l).to(tl.float32) * b_norm_q[:, None] * b_from
        b_w = b_k * b_after
        if not MAMBA2:
            b_x = b_k * b_from
            tl.store(p_x + o_out, b_x, mask=m_out)
            b_theta -= dot_fp32(b_c, b_x, ISA)
            b_w = dot_fp32(tl.trans(b_n), b_w, ISA)
        tl.store(p_theta + o_out, b_theta, mask=m_out)
        tl.store(p_p + o_out, b_w * b_beta[:, None], mask=m_out)
