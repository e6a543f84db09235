"""What the window kernels load and store: rows of a ring and new tokens as one, tokens into the ring, and Θ.

The ring's rows come before the tokens, which are read from the inputs: so nothing that a kernel appends to the ring
is read from there again, and no barrier is needed.
"""

from __future__ import annotations

from ..device.codec import bits_float, float_bits, hadamard
from ..device.fp4 import THETA_BITS_CONVERTED, THETA_BITS_MOVED
from ..device.targets import tl, triton


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
