"""The readout: y = Q(S₀)·Θ + Vᵀ·C for every family and read format.

Here one query by plain FP32 arithmetic; one program reads one tile of value rows of one head. 4-bit copies with a Θ in
float16 go to ``pairs``, several queries and 8-bit copies to ``many``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.encoded import EncodedState
from ...quant.formats import FORMATS
from ..device.dot import weighted_rows
from ..device.targets import tl, triton
from ..device.tile import load_block_scales, load_e2m1, load_plain
from ..device.views import has_words, kernel_views, slot_stride
from ..launch import find_launch, isa_of, run
from .many import readout_many_kernel
from .pairs import readout_pairs_kernel

VALUE_PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
"""How many bfloat16 parts a number of the ring has."""


@triton.jit
def _dot_theta(b_x, b_theta, b_scale, BLOCK: tl.constexpr):
    """Rows of b_x [R, K] times b_theta [K]; with blocks, each block's sum times its scale b_scale [R, K / BLOCK]."""
    R: tl.constexpr = b_x.shape[0]
    K: tl.constexpr = b_x.shape[1]
    b_p = b_x * b_theta[None, :]
    if BLOCK:
        return tl.sum(tl.sum(tl.reshape(b_p, [R, K // BLOCK, BLOCK]), axis=2) * b_scale, axis=1)
    else:
        return tl.sum(b_p, axis=1)


@triton.jit
def readout_kernel(
    p_codes, p_row, p_block, p_total,  # the read copy: codes, scales
    p_v,  # ring [slots, L, H, V]
    p_theta, p_gain, p_c,  # [B, H / SHARED, K] float32; [B, H]; [B, H, L]
    p_slots, p_used,  # [B] int32: slot of each row; ring rows it reads, 0 for rows that are not read
    p_first,  # [B] int32, of a verification: the token's ring row, −1 where it has its output already
    p_x, p_d, p_gate,  # [B, H, V] inputs of the skip, [H], [B, H, V]
    p_y,  # [B, H, V]
    s_codes, s_row, s_block, s_total, s_v,  # slot strides in elements
    H, V,
    K: tl.constexpr, L: tl.constexpr, LP: tl.constexpr, R: tl.constexpr,
    SHARED: tl.constexpr, FORMAT: tl.constexpr, SKIP: tl.constexpr, GATE: tl.constexpr, SOME: tl.constexpr,
    ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B · H · V tiles). LP: L padded to a power of two; SHARED: heads that share one Θ (Mamba-2's groups)."""
    o_tiles = tl.cdiv(V, R)
    i_b = tl.program_id(0) // (H * o_tiles)
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_used = tl.load(p_used + i_b)
    if i_used <= 0:
        return
    i_h = (tl.program_id(0) // o_tiles) % H
    o_v = (tl.program_id(0) % o_tiles) * R + tl.arange(0, R)
    m_v = o_v < V
    o_rows = i_h * V + o_v
    p_codes += i_slot * s_codes
    p_row += i_slot * s_row
    p_block += i_slot * s_block
    BLOCK: tl.constexpr = 16 if FORMAT == "nvfp4" else 32 if FORMAT == "mxfp4" or FORMAT == "mxfp8" else 0

    b_scale = tl.full([R, 1], 1.0, tl.float32)
    if BLOCK:
        b_scale = load_block_scales(p_block, o_rows, m_v, K // BLOCK, FORMAT)
    if FORMAT == "nvfp4" or FORMAT == "mxfp4":
        b_s = load_e2m1(p_codes, o_rows, m_v, K)
    else:
        b_s = load_plain(p_codes, o_rows, m_v, K, FORMAT, ISA)
    b_unit = tl.full([R], 1.0, tl.float32)
    if FORMAT == "nvfp4":
        b_unit *= tl.load(p_total + i_slot * s_total + i_h)
    elif FORMAT == "fp8_e4m3" or FORMAT == "int8":
        b_unit = tl.load(p_row + o_rows, mask=m_v, other=0.0)

    o_l = tl.arange(0, LP)
    # rows from used on are never loaded: they may hold anything, NaN too
    m_l = o_l < i_used
    o_ring = i_slot * s_v + i_h * V
    b_v = tl.load(p_v + o_ring + o_l[:, None] * (H * V) + o_v[None, :], mask=m_l[:, None] & m_v[None, :], other=0.0)

    i_head = i_b * H + i_h
    p_q = p_theta + (i_b * (H // SHARED) + i_h // SHARED).to(tl.int64) * K
    b_y = _dot_theta(b_s, tl.load(p_q + tl.arange(0, K)), b_scale, BLOCK)
    b_y *= b_unit * tl.load(p_gain + i_head)
    b_c = tl.load(p_c + i_head.to(tl.int64) * L + o_l, mask=m_l, other=0.0)
    b_y += weighted_rows(b_v, b_c, ISA)
    o_y = i_head.to(tl.int64) * V + o_v
    if SKIP:
        b_y += tl.load(p_d + i_h).to(tl.float32) * tl.load(p_x + o_y, mask=m_v, other=0.0).to(tl.float32)
    if GATE:
        b_z = tl.load(p_gate + o_y, mask=m_v, other=0.0).to(tl.float32)
        b_y *= b_z / (1.0 + tl.exp(-b_z))
    m_y = m_v
    if SOME:
        i_row = tl.load(p_first + i_b)
        m_y = o_v < tl.where((i_row >= 0) & (i_row < i_used), V, 0)
    tl.store(p_y + o_y, b_y.to(p_y.dtype.element_ty), mask=m_y)


LISTED_PROGRAMS = 132 * 16
"""Programs of a readout of listed rows, at most: what a large GPU holds at a time."""


def single_by_products(source: EncodedState, isa: int) -> bool:
    """Whether single queries of ``source``, too, take the tensor cores' kernel, which decodes two codes at a time and
    wants them in words. A step without a flush of FP8 and 256 rows of Nemotron-3-Super takes 111 µs on an H200, and
    189 by the kernel above (2026-11-30); the other 8-bit formats have not been timed."""
    return isa >= 90 and source.format in ("fp8_e4m3", "mxfp8", "int8") and has_words(source)


def readout(
    source: EncodedState,
    ring_v: Tensor,
    theta: Tensor,
    gain: Tensor,
    c: Tensor,
    slots: Tensor,
    used: Tensor,
    out: Tensor,
    *,
    row: Tensor | None = None,
    rows: tuple[Tensor, Tensor] | None = None,
    skip: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
) -> None:
    """Write y of every row that reads (``used`` > 0) into ``out`` [B, T, H, V] float32 or a 16-bit float.

    Args:
        source: the read copy, [slots, H, V, K]; any slot stride.
        ring_v: [slots, L, H, V]; any slot stride.
        theta: [B, T, H or key heads, K], float32, or float16 in pair order (4-bit formats alone).
        gain: [B, T, H] float32; Θ of a head is gain · theta. ``c``: [B, T, H, L] float32.
        slots, used: [B] int32. ``row``: [B] int32, where rows have different numbers of queries: the ring row of the
            first query; those at a negative row, or from ``used`` on, are left alone.
        rows: of several queries, a list of batch rows and how many of them count, int32 [B] and [1]; all by default.
            For few rows: then most programs have nothing to do, and a list has few programs.
        skip: (x [B, T, H, V], D [H]): adds D·x. ``gate`` [B, T, H, V]: multiplies by silu(gate), last.
    """
    batch, queries, heads, value_dim = out.shape
    key_dim, window = theta.shape[-1], ring_v.shape[1]
    half = theta.element_size() == 2
    isa = isa_of(out.device)
    x, d = skip if skip is not None else (out, gain)
    products = queries > 1 or single_by_products(source, isa)
    views = kernel_views(source, words=half or products)
    if products:
        op = "readout_many" if queries > 1 else "readout"
        launch = find_launch(op, source.format, value_dim, key_dim, isa, batch)
        warps = min(launch.warps, launch.rows // 16, triton.next_power_of_2(triton.cdiv(value_dim, 16)))
        tiles = min(launch.rows // (16 * warps), triton.cdiv(value_dim, 16 * warps))  # of sixteen rows, of each warp
        grid = (heads * triton.cdiv(value_dim, 16 * tiles * warps), batch)
        listed, count = (slots, slots) if rows is None else rows
        if rows is not None:
            grid = (grid[0], max(1, min(batch, LISTED_PROGRAMS // grid[0])))
        run(
            readout_many_kernel, grid, launch,
            views.codes, views.row, views.block, views.total, ring_v, theta.view(torch.int64), gain, c,
            slots, used, listed, count, used if row is None else row, x, d, out if gate is None else gate, out,
            views.codes_stride, views.row_stride, views.block_stride, views.total_stride, slot_stride(ring_v, "ring v"),
            H=heads, V=value_dim, K=key_dim, L=window, T=queries, M=tiles, WARPS=warps,
            SHARED=heads // theta.shape[2], FORMAT=source.format, BITS=FORMATS[source.format].bits, HALF=half,
            VALUE_PARTS=VALUE_PARTS[ring_v.dtype], SKIP=skip is not None, GATE=gate is not None,
            SOME=row is not None, LIST=rows is not None, ISA=isa, num_warps=warps,
        )  # fmt: skip
        return
    launch = find_launch("readout", source.format, value_dim, key_dim, isa, batch)
    if half:
        tile = 8 * launch.warps * (quads := max(1, launch.rows // (32 * launch.warps)))
        run(
            readout_pairs_kernel, (batch * triton.cdiv(heads * triton.cdiv(value_dim, 4), tile),), launch,
            views.codes, views.block, views.total, ring_v, theta.view(torch.int64), gain, c,
            slots, used, used if row is None else row, x, d, out if gate is None else gate, out,
            views.codes_stride, views.block_stride, views.total_stride, slot_stride(ring_v, "ring v"),
            H=heads, V=value_dim, K=key_dim, L=window, M=quads, WARPS=launch.warps,
            SHARED=heads // theta.shape[2], FORMAT=source.format, SKIP=skip is not None, GATE=gate is not None,
            SOME=row is not None, ISA=isa,
        )  # fmt: skip
        return
    run(
        readout_kernel, (batch * heads * triton.cdiv(value_dim, launch.rows),), launch,
        views.codes, views.row, views.block, views.total, ring_v,
        theta, gain, c, slots, used, used if row is None else row,
        x, d, out if gate is None else gate, out,
        views.codes_stride, views.row_stride, views.block_stride, views.total_stride, slot_stride(ring_v, "ring v"),
        heads, value_dim,
        K=key_dim, L=window, LP=max(16, triton.next_power_of_2(window)), R=launch.rows,
        SHARED=heads // theta.shape[2], FORMAT=source.format, SKIP=skip is not None, GATE=gate is not None,
        SOME=row is not None, ISA=isa,
    )  # fmt: skip
