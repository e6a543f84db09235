"""The fold kernel: S_h = S₀·diag(e^G_h) + (Vᵀ − S₀·Xᵀ)·Mᵀ·W for every family.

Reads the FP32 checkpoint from memory once and writes it once (8 bytes per element), renews the read copy and gives
the flushing step's output. A program takes whole heads, from a list of flushing rows that was made on the device;
the grid does not depend on how many there are. It goes over a head up to three times, the second and third time in
the caches (a head is 32 or 64 KB): the delta rule needs S₀·Xᵀ before the first element is final, and nvfp4 the
head's largest magnitude before the first code.

All products are FP32 fused multiply-adds (PRECISION "ieee"). Tensor cores would add them into the state with
truncation, a bias that a state with a long memory adds up. Operands of such a product lie in registers for its
whole inner dimension, so columns go in chunks of BK.
"""

from __future__ import annotations

from ..device.codec import hadamard, tile_amax
from ..device.math import exp, inverse_norm
from ..device.targets import tl, triton
from ..device.tile import store_tile
from ..window.triton import key_norms


@triton.jit
def _running_decay(p_g, o_g, m_g, m_next, s_g, b_rate, LAST: tl.constexpr):
    """e^G_j of ring rows, or with LAST e^(G_h − G_j), the sum of what comes after j: log-decays b_rate · ring.

    Rows first; o_g are offsets of [LP] or [LP, n] log-decays, s_g leads to the next row, m_next says where it exists.
    """
    if LAST:
        b_g = tl.load(p_g + o_g + s_g, mask=m_next, other=0.0) * b_rate
        return exp(tl.cumsum(b_g, axis=0, reverse=True))
    else:
        b_g = tl.load(p_g + o_g, mask=m_g, other=0.0) * b_rate
        return exp(tl.cumsum(b_g, axis=0))


@triton.jit
def _keys(
    p_k, p_g, b_norm, b_decay, i_c, s_k, s_g,
    L: tl.constexpr, LP: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Columns i_c to i_c + BK of X, or with LAST of W, [LP, BK]; b_decay [LP] is theirs unless CHANNEL."""
    o_l = tl.arange(0, LP)[:, None]
    o_c = i_c + tl.arange(0, BK)[None, :]
    b_k = tl.load(p_k + o_l * s_k + o_c, mask=o_l < L, other=0.0).to(tl.float32) * b_norm[:, None]
    if CHANNEL:
        return b_k * _running_decay(p_g, o_l * s_g + o_c, o_l < L, o_l + 1 < L, s_g, 1.0, LAST)
    else:
        return b_k * b_decay[:, None]


@triton.jit
def fold_kernel(
    p_state,  # FP32 checkpoint [slots, H, V, K]
    p_codes, p_row, p_block, p_total,  # the read copy
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g, p_rate,  # Mamba-2: p_ring_g is the ring of gains, g = rate · gain
    p_q, p_mix,  # query of the token [B, Hk, K]; M [B, H, LP, LP] (delta rule)
    p_slots, p_list, p_count,
    p_x, p_d, p_gate, p_y,  # [B, H, V], [H], [B, H, V], [B, H, V]
    p_status,  # int64 [1]: 1 + slot·H + head of some state that is not finite; never cleared here
    s_state, s_codes, s_row, s_block, s_total,
    s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_q,
    H, Hk,
    V: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr,
    R: tl.constexpr, BK: tl.constexpr, RE: tl.constexpr,
    MAMBA2: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    FORMAT: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, ROTATE: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr, PRECISION: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Persistent programs over (flushing row, head). R × BK: the fold's tile; RE × K: the encoder's.
    FORMAT "none": no copy."""
    o_k = tl.arange(0, K)
    o_l = tl.arange(0, LP)
    m_l = o_l < L
    i_item = tl.program_id(0)
    i_items = tl.load(p_count) * H
    while i_item < i_items:
        i_b = tl.load(p_list + i_item // H).to(tl.int64)
        i_h = i_item % H
        i_key = i_h // (H // Hk)
        i_slot = tl.load(p_slots + i_b).to(tl.int64)
        i_head = i_b * H + i_h
        p_s = p_state + i_slot * s_state + i_h * (V * K)
        p_v = p_ring_v + i_slot * s_ring_v + i_h * V
        p_k = p_ring_k + i_slot * s_ring_k + i_key * K
        p_g = p_ring_g + i_slot * s_ring_g + i_h * (K if CHANNEL else 1)
        s_k = Hk * K
        s_g = H * (K if CHANNEL else 1)

        b_k = tl.load(p_k + o_l[:, None] * s_k + o_k[None, :], mask=m_l[:, None], other=0.0).to(tl.float32)
        b_norm = key_norms(b_k, NORM)
        b_rate = 1.0
        if MAMBA2:
            b_rate = tl.load(p_rate + i_h)
        b_from = tl.full([LP], 1.0, tl.float32)
        b_after = tl.full([LP], 1.0, tl.float32)
        b_head = 1.0
        if not CHANNEL:
            b_from = _running_decay(p_g, o_l * s_g, m_l, m_l, s_g, b_rate, False)
            b_after = _running_decay(p_g, o_l * s_g, m_l, o_l + 1 < L, s_g, b_rate, True)
            b_head = exp(tl.sum(tl.load(p_g + o_l * s_g, mask=m_l, other=0.0) * b_rate, axis=0))

        b_norm_q = 1.0
        if NORM:
            b_raw = tl.load(p_q + i_b * s_q + i_key * K + o_k).to(tl.float32)
            b_norm_q = inverse_norm(tl.sum(b_raw * b_raw, axis=0))
        b_top = tl.zeros([1, 1], tl.float32)
        b_status = 0.0
        for i_t in range((V + R - 1) // R):
            o_v = i_t * R + tl.arange(0, R)
            m_v = o_v < V
            p_rows = p_s + o_v[:, None] * K
            b_u = tl.load(p_v + o_l[None, :] * (H * V) + o_v[:, None], mask=m_l[None, :] & m_v[:, None], other=0.0)
            b_u = b_u.to(tl.float32)
            if MAMBA2:
                b_beta = tl.load(p_ring_beta + i_slot * s_ring_beta + i_h + o_l * H, mask=m_l, other=0.0)
                b_u *= b_beta[None, :]
            else:
                b_sx = tl.zeros([R, LP], tl.float32)
                for i_c in range(0, K, BK):
                    b_s = tl.load(p_rows + i_c + tl.arange(0, BK)[None, :], mask=m_v[:, None], other=0.0)
                    b_x = _keys(p_k, p_g, b_norm, b_from, i_c, s_k, s_g, L, LP, BK, CHANNEL, False)
                    b_sx = tl.dot(b_s, tl.trans(b_x), b_sx, input_precision=PRECISION)
                o_m = i_head * (LP * LP) + o_l[None, :] * LP + o_l[:, None]  # Mᵀ [j, t]
                b_u = tl.dot(b_u - b_sx, tl.load(p_mix + o_m), input_precision=PRECISION)

            b_y = tl.zeros([R], tl.float32)
            for i_c in range(0, K, BK):
                o_c = i_c + tl.arange(0, BK)
                b_s = tl.load(p_rows + o_c[None, :], mask=m_v[:, None], other=0.0)
                if CHANNEL:
                    b_g = tl.load(p_g + o_l[:, None] * s_g + o_c[None, :], mask=m_l[:, None], other=0.0)
                    b_s *= exp(tl.sum(b_g, axis=0))[None, :]
                else:
                    b_s *= b_head
                b_w = _keys(p_k, p_g, b_norm, b_after, i_c, s_k, s_g, L, LP, BK, CHANNEL, True)
                b_s = tl.dot(b_u, b_w, b_s, input_precision=PRECISION)
                tl.store(p_rows + o_c[None, :], b_s, mask=m_v[:, None])
                b_q = tl.load(p_q + i_b * s_q + i_key * K + o_c).to(tl.float32) * b_norm_q * SCALE
                b_y += tl.sum(b_s * b_q[None, :], axis=1)
                # a NaN is lost in a maximum, not in a sum; one that overflows is of no further use either
                b_status += tl.sum(tl.sum(tl.abs(b_s), axis=1), axis=0)
                b_top = tl.maximum(b_top, tile_amax(b_s))

            o_y = i_head * V + o_v
            if SKIP:
                b_y += tl.load(p_d + i_h).to(tl.float32) * tl.load(p_x + o_y, mask=m_v, other=0.0).to(tl.float32)
            if GATE:
                b_z = tl.load(p_gate + o_y, mask=m_v, other=0.0).to(tl.float32)
                b_y *= b_z / (1.0 + tl.exp(-b_z))
            tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_v)
        tl.store(p_status, i_slot * H + i_h + 1, mask=(b_status < float("inf")) == 0)

        if FORMAT != "none":
            tl.debug_barrier()  # other threads of this program wrote what is read back now
            if FORMAT == "nvfp4" and ROTATE > 1:
                b_top = tl.zeros([1, 1], tl.float32)
                for i_t in range((V + RE - 1) // RE):
                    o_v = i_t * RE + tl.arange(0, RE)
                    b_s = tl.load(p_s + o_v[:, None] * K + o_k[None, :], mask=(o_v < V)[:, None], other=0.0)
                    b_top = tl.maximum(b_top, tile_amax(hadamard(b_s, ROTATE)))
            for i_t in range((V + RE - 1) // RE):
                o_v = i_t * RE + tl.arange(0, RE)
                m_v = o_v < V
                b_s = tl.load(p_s + o_v[:, None] * K + o_k[None, :], mask=m_v[:, None], other=0.0)
                if ROTATE > 1:
                    b_s = hadamard(b_s, ROTATE)
                store_tile(
                    b_s, b_top, p_codes + i_slot * s_codes, p_row + i_slot * s_row, p_block + i_slot * s_block,
                    p_total + i_slot * s_total + i_h, i_h * V + o_v, m_v, FORMAT, FOUR_OVER_SIX, ISA,
                )  # fmt: skip
        i_item += tl.num_programs(0)
