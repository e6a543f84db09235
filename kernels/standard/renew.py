"""Renewing the read copy from the checkpoint alone, for a state that returns from the standard path to replay.

A flush does the same while it folds; this is for rows whose ring is empty and whose copy is some tokens old. It reads
4 bytes per element, and does no harm where the copy is fresh already.
"""

from __future__ import annotations

from torch import Tensor

from ...quant.rotation import ROTATIONS
from ...quant.state import DecodeState
from ..device.codec import hadamard, tile_amax
from ..device.targets import tl, triton
from ..device.tile import store_tile
from ..device.views import kernel_views, slot_stride
from ..launch import Launch, isa_of, run


@triton.jit
def renew_kernel(
    p_state, p_codes, p_row, p_block, p_total, p_slots,
    s_state, s_codes, s_row, s_block, s_total,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, FOUR_OVER_SIX: tl.constexpr, ROTATE: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (H, B): one head, in tiles of R rows; nvfp4 goes over it twice, first for its largest magnitude."""
    i_slot = tl.load(p_slots + tl.program_id(1)).to(tl.int64)
    if i_slot < 0:
        return
    i_h = tl.program_id(0)
    p_s = p_state + i_slot * s_state + i_h * (V * K) + tl.arange(0, K)[None, :]
    b_top = 0.0
    if FORMAT == "nvfp4":
        for i_t in range((V + R - 1) // R):
            o_v = i_t * R + tl.arange(0, R)
            b_s = tl.load(p_s + o_v[:, None] * K, mask=(o_v < V)[:, None], other=0.0)
            if ROTATE > 1:
                b_s = hadamard(b_s, ROTATE)
            b_top = tl.maximum(b_top, tile_amax(b_s))
    for i_t in range((V + R - 1) // R):
        o_v = i_t * R + tl.arange(0, R)
        m_v = o_v < V
        b_s = tl.load(p_s + o_v[:, None] * K, mask=m_v[:, None], other=0.0)
        if ROTATE > 1:
            b_s = hadamard(b_s, ROTATE)
        store_tile(
            b_s, b_top, p_codes + i_slot * s_codes, p_row + i_slot * s_row, p_block + i_slot * s_block,
            p_total + i_slot * s_total + i_h, i_h * V + o_v, m_v, FORMAT, FOUR_OVER_SIX, ISA,
        )  # fmt: skip


def renew(state: DecodeState, slots: Tensor) -> None:
    """Encode the checkpoints of ``slots`` [B] (−1 is skipped) into their copies, as a flush does. No host waits."""
    copy = state.copy
    if copy is None:
        return
    spec, views = state.spec, kernel_views(copy)
    rotation = 0 if copy.rotation is None else min(spec.key_dim, ROTATIONS[copy.rotation] or spec.key_dim)
    run(
        renew_kernel, (spec.heads, slots.shape[0]), Launch(warps=4),
        state.checkpoint.codes, views.codes, views.row, views.block, views.total, slots,
        slot_stride(state.checkpoint.codes, "checkpoint"),
        views.codes_stride, views.row_stride, views.block_stride, views.total_stride,
        V=spec.value_dim, K=spec.key_dim, R=16,
        FORMAT=copy.format, FOUR_OVER_SIX=copy.scale_rule == "four_over_six", ROTATE=rotation,
        ISA=isa_of(slots.device), enable_fp_fusion=False,  # quant/scales.py rounds squares before it adds them
    )  # fmt: skip
