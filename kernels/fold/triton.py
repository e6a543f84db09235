"""The fold kernel: S_h = S₀·diag(e^G_h) + (Vᵀ − S₀·Xᵀ)·Mᵀ·W for every family.

Reads the FP32 checkpoint once and writes it once (8 bytes per element) and gives the flushing step's output;
renew.py then encodes the read copy, from the caches where few rows flush at a time. Two kernels, since nvfp4 needs
the largest magnitude of a whole head before its first code: so neither has to hold a head, and rows of V, which are
independent, are spread over the machine. Programs take tiles of rows from a list of flushing rows that was made on
the device; the grid does not depend on how many there are.

Every product is as exact as FP32 (device/dot.py), and what a product adds to the state is added by an FP32 addition.
"""

from __future__ import annotations

from ..device.codec import float_bits
from ..device.dot import dot_fp32
from ..device.math import exp, exp_fast, inverse_norm
from ..device.targets import tl, triton


@triton.jit
def _keys(
    p_k, p_g, i_c, s_k, s_g, i_rows,
    LP: tl.constexpr, BK: tl.constexpr, CHANNEL: tl.constexpr, LAST: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Columns i_c to i_c + BK of the keys [LP, BK], as the ring has them where heads have one log-decay; else float32
    and times e^G_j, or with LAST e^(G_h − G_j), the sum of what comes after j. With LAST rows stand from the last token
    backwards, so that both sums run forwards: Triton's backward ones cost ten times as much."""
    o_l = tl.arange(0, LP)[:, None]
    o_j = i_rows - 1 - o_l if LAST else o_l
    o_c = i_c + tl.arange(0, BK)[None, :]
    m_l = (o_j >= 0) & (o_j < i_rows)
    b_k = tl.load(p_k + o_j * s_k + o_c, mask=m_l, other=0.0)
    if CHANNEL:
        o_g = o_j + 1 if LAST else o_j
        b_g = tl.load(p_g + o_g * s_g + o_c, mask=m_l & (o_g < i_rows), other=0.0)
        b_k = b_k.to(tl.float32) * exp_fast(tl.cumsum(b_g, axis=0), ISA)
    return b_k


@triton.jit
def fold_kernel(
    p_state,  # FP32 checkpoint [slots, H, V, K]
    p_ring_k, p_ring_v, p_ring_g,  # p_ring_g where each channel has its log-decay
    p_after, p_start, p_head,  # of the window kernel: what W's keys and X's are multiplied by [B, H, L], e^G_h [B, H]
    p_q, p_mix,  # query of the token [B, Hk, K]; M [slots, H, L, L] (delta rule)
    p_slots, p_list, p_count, p_last,  # last [B]: the ring row of the last token
    p_x, p_d, p_gate, p_y,  # [B, H, V], [H], [B, H, V], [B, H, V]
    p_top,  # int32 [B, H]: the bits of the head's largest magnitude; zero before
    p_status,  # int64 [1]: 1 + slot·H + head of some state that is not finite; never cleared here
    s_state, s_ring_k, s_ring_v, s_ring_g, s_mix, s_q,
    H, Hk, V,
    T: tl.constexpr, K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
    MAMBA2: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    TOP: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Persistent programs over (flushing row, head, tile of R rows); of a row's T tokens the first is its last.
    Columns in chunks of BK, where a tile of all K would not fit into registers: the delta rule then reads them twice,
    since it needs S₀·Xᵀ before the first element is final. TOP: the renewal wants the largest magnitude."""
    o_k = tl.arange(0, K)
    o_l = tl.arange(0, LP)
    s_k = Hk * K
    s_g = H * K
    o_tiles = tl.cdiv(V, R)
    for i_item in range(tl.program_id(0), tl.load(p_count) * H * o_tiles, tl.num_programs(0)):
        i_b = tl.load(p_list + i_item // (H * o_tiles)).to(tl.int64)
        i_h = (i_item // o_tiles) % H
        i_key = i_h // (H // Hk)
        i_slot = tl.load(p_slots + i_b).to(tl.int64)
        i_rows = tl.load(p_last + i_b) + 1
        o_v = (i_item % o_tiles) * R + tl.arange(0, R)
        m_v = o_v < V
        m_l = o_l < i_rows
        p_rows = p_state + i_slot * s_state + i_h * (V * K) + o_v[:, None] * K
        b_s = tl.load(p_rows + tl.arange(0, BK)[None, :], mask=m_v[:, None], other=0.0)
        i_head = i_b * T * H + i_h
        p_k = p_ring_k + i_slot * s_ring_k + i_key * K
        p_g = p_ring_g + i_slot * s_ring_g + i_h * K
        p_query = p_q + i_b * s_q + i_key * K
        b_query = SCALE
        if NORM:
            b_q = tl.load(p_query + o_k).to(tl.float32)
            b_query = SCALE * inverse_norm(tl.sum(b_q * b_q, axis=0))
        o_j = i_rows - 1 - o_l if CHANNEL else o_l  # the tokens as W's rows stand
        b_after = tl.load(p_after + i_head * L + o_j, mask=(o_j >= 0) & m_l, other=0.0)
        b_head = tl.load(p_head + i_head)
        if BK == K:
            b_k = _keys(p_k, p_g, 0, s_k, s_g, i_rows, LP, BK, CHANNEL, False, ISA)

        o_u = (o_j if MAMBA2 else o_l)[None, :]
        m_u = (o_u >= 0) & (o_u < i_rows) & m_v[:, None]
        b_u = tl.load(p_ring_v + i_slot * s_ring_v + i_h * V + o_u * (H * V) + o_v[:, None], mask=m_u, other=0.0)
        b_u = b_u.to(tl.float32)
        if not MAMBA2:
            b_start = tl.load(p_start + (i_b * H + i_h) * L + o_l, mask=m_l, other=0.0)
            b_sx = tl.zeros([R, LP], tl.float32)
            for i_c in tl.range(0, K, BK):
                if BK < K:
                    b_s = tl.load(p_rows + i_c + tl.arange(0, BK)[None, :], mask=m_v[:, None], other=0.0)
                    b_k = _keys(p_k, p_g, i_c, s_k, s_g, i_rows, LP, BK, CHANNEL, False, ISA)
                b_sx += dot_fp32(b_s, tl.trans(b_k), ISA)
            o_m = o_j[:, None] * L + o_l[None, :]  # M [t, j]; u is (Vᵀ − S₀·Xᵀ)·Mᵀ [v, t]
            m_m = m_l[None, :] & ((o_j >= 0) & (o_j < i_rows))[:, None]
            b_m = tl.load(p_mix + i_slot * s_mix + i_h * (L * L) + o_m, mask=m_m, other=0.0)
            b_u = dot_fp32(b_u - b_sx * b_start[None, :], tl.trans(b_m), ISA)
        b_u *= b_after[None, :]

        b_y = tl.zeros([R], tl.float32)
        b_tops = tl.zeros([R], tl.float32)
        for i_c in tl.range(0, K, BK):
            o_c = i_c + tl.arange(0, BK)
            if BK < K:
                b_s = tl.load(p_rows + o_c[None, :], mask=m_v[:, None], other=0.0)
            if BK < K or CHANNEL:
                b_k = _keys(p_k, p_g, i_c, s_k, s_g, i_rows, LP, BK, CHANNEL, CHANNEL, ISA)
            b_new = dot_fp32(b_u, b_k, ISA)
            if CHANNEL:
                b_g = tl.load(p_g + o_l[:, None] * s_g + o_c[None, :], mask=m_l[:, None], other=0.0)
                b_new += b_s * exp(tl.sum(b_g, axis=0))[None, :]
            else:
                b_new += b_s * b_head
            tl.store(p_rows + o_c[None, :], b_new, mask=m_v[:, None])
            b_y += tl.sum(b_new * (tl.load(p_query + o_c).to(tl.float32) * b_query)[None, :], axis=1)
            if TOP:
                b_tops = tl.maximum(b_tops, tl.max(tl.abs(b_new), axis=1))
        if TOP:
            tl.atomic_max(p_top + i_b * H + i_h, float_bits(tl.max(b_tops, axis=0)), sem="relaxed")
        # a state with Inf or NaN has an output with one; an output that overflows is of no further use either
        b_bad = tl.max(tl.where(tl.abs(b_y) < float("inf"), 0, 1), axis=0)
        tl.store(p_status, i_slot * H + i_h + 1, mask=b_bad != 0)

        o_y = i_head * V + o_v
        if SKIP:
            b_y += tl.load(p_d + i_h).to(tl.float32) * tl.load(p_x + o_y, mask=m_v, other=0.0).to(tl.float32)
        if GATE:
            b_z = tl.load(p_gate + o_y, mask=m_v, other=0.0).to(tl.float32)
            b_y *= b_z / (1.0 + tl.exp(-b_z))
        tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_v)
