"""Renewing the read copy from the checkpoint: the second half of a flush, and all of it where nothing is folded.

After a fold of few rows the checkpoint comes from the caches; by itself it reads 4 bytes per element.
"""

from __future__ import annotations

from torch import Tensor

from ...quant.encoded import EncodedState
from ...quant.formats import FORMATS
from ...quant.state import DecodeState
from ..device.codec import bits_float, tile_amax, turned
from ..device.targets import tl, triton
from ..device.tile import load_blocks, store_e2m1, store_tile
from ..device.views import has_quads, has_words, kernel_views, rotation_size, slot_stride
from ..launch import find_launch, isa_of, run


@triton.jit
def renew_kernel(
    p_state,  # FP32 checkpoint [slots, H, V, K]
    p_codes, p_row, p_block, p_total, p_columns,  # the read copy; its column scales [H, K]
    p_slots, p_list, p_count,  # batch rows to renew, in LIST; else all B
    p_top,  # int32 [B, H]: the bits of the largest magnitude of every head, where TOP
    s_state, s_codes, s_row, s_block, s_total,
    B, H, V,
    K: tl.constexpr, R: tl.constexpr, RT: tl.constexpr, WHOLE: tl.constexpr, WORDS: tl.constexpr,
    FORMAT: tl.constexpr, RULE: tl.constexpr, BALANCED: tl.constexpr, ROTATE: tl.constexpr,
    BLOCKS: tl.constexpr, LIST: tl.constexpr, TOP: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Persistent programs over (row, head, some tiles of RT rows of V): at most R rows, and no more than give every
    program something to do. nvfp4 without TOP goes over the head once more. WHOLE: V is a multiple of RT. BLOCKS: the
    state is read by blocks of 16."""
    N: tl.constexpr = K // 16
    o_r = tl.arange(0, RT)[:, None]
    o_x = o_r * K + tl.arange(0, K)[None, :]
    i_rows = tl.load(p_count) if LIST else B
    o_tiles = tl.cdiv(V, RT)
    i_share = tl.minimum(tl.minimum(R // RT, o_tiles), tl.cdiv(i_rows * H * o_tiles, tl.num_programs(0))) * RT
    o_parts = tl.cdiv(V, tl.maximum(i_share, RT))
    for i_item in range(tl.program_id(0), i_rows * H * o_parts, tl.num_programs(0)):
        i_b = i_item // (H * o_parts)
        if LIST:
            i_b = tl.load(p_list + i_b)
        i_h = (i_item // o_parts) % H
        i_slot = tl.load(p_slots + i_b).to(tl.int64)
        if i_slot >= 0:
            p_s = p_state + i_slot * s_state + i_h * (V * K)
            b_top = 0.0
            if TOP:
                b_top = bits_float(tl.load(p_top + i_b * H + i_h))
            elif FORMAT == "nvfp4":
                b_tops = tl.zeros([RT, K], tl.float32)
                for i_v in range(0, V, RT):
                    b_x = tl.load(p_s + i_v * K + o_x, mask=o_r < V - i_v, other=0.0)
                    b_tops = tl.maximum(b_tops, tl.abs(turned(b_x, p_columns + i_h * K, BALANCED, ROTATE)))
                b_top = tile_amax(b_tops)
            i_first = (i_item % o_parts) * i_share
            for i_v in range(i_first, tl.minimum(i_first + i_share, V), RT):
                i_row = (i_h * V + i_v).to(tl.int64)
                if BLOCKS:
                    p_x = p_s + i_v * K + tl.arange(0, RT * N) * 16
                    store_e2m1(
                        load_blocks(p_x, tl.arange(0, RT * N) < (V - i_v) * N, WHOLE), b_top,
                        p_codes + i_slot * s_codes, p_block + i_slot * s_block, p_total + i_slot * s_total + i_h,
                        i_row * N, (V - i_v) * N, RT * N, FORMAT, RULE, WHOLE, WORDS, ISA,
                    )  # fmt: skip
                else:
                    m_v = None if WHOLE else o_r < V - i_v
                    b_x = tl.load(p_s + i_v * K + o_x, mask=m_v, other=None if WHOLE else 0.0)
                    b_x = turned(b_x, p_columns + i_h * K, BALANCED, ROTATE)
                    store_tile(
                        b_x, b_top, p_codes + i_slot * s_codes, p_row + i_slot * s_row, p_block + i_slot * s_block,
                        p_total + i_slot * s_total + i_h, i_row, V - i_v, FORMAT, RULE, WHOLE, WORDS, ISA,
                    )  # fmt: skip


def renew(
    state: DecodeState, slots: Tensor, *, rows: tuple[Tensor, Tensor] | None = None, top: Tensor | None = None
) -> None:
    """Encode the checkpoints of ``slots`` [B] (−1 is skipped) into their copies. No host waits.

    ``rows``: a list of batch rows and how many of them count, int32 [B] and [1]; all by default. ``top`` int32 [B, H]:
    the bits of the largest magnitude of every head, where a fold has found them.
    """
    copy = state.copy
    if copy is None:
        return
    spec, views, batch = state.spec, kernel_views(copy), slots.shape[0]
    isa = isa_of(slots.device)
    launch = find_launch("renew", copy.format, spec.value_dim, spec.key_dim, isa, batch)
    listed, count = (slots, slots) if rows is None else rows
    # of 4-bit formats a thread takes one block at a time, of others 32 elements
    block = FORMATS[copy.format].block if FORMATS[copy.format].bits == 4 else 32
    tile = min(32 * launch.warps * block // spec.key_dim, launch.rows, triton.next_power_of_2(spec.value_dim))
    tile = max(1, tile)
    items = batch * spec.heads * triton.cdiv(spec.value_dim, tile)
    run(
        renew_kernel, (min(launch.programs, items),), launch,
        state.checkpoint.codes, views.codes, views.row, views.block, views.total,
        state.checkpoint.codes if copy.columns is None else copy.columns,
        slots, listed, count, slots if top is None else top,
        slot_stride(state.checkpoint.codes, "checkpoint"),
        views.codes_stride, views.row_stride, views.block_stride, views.total_stride,
        batch, spec.heads, spec.value_dim,
        K=spec.key_dim, R=launch.rows, RT=tile, WHOLE=spec.value_dim % tile == 0, WORDS=has_words(copy),
        FORMAT=copy.format, RULE=copy.scale_rule, BALANCED=copy.columns is not None, ROTATE=rotation_size(copy),
        BLOCKS=isa >= 90 and copy.format == "nvfp4" and plain(copy) and has_quads(state.checkpoint.codes),
        LIST=rows is not None, TOP=needs_top(copy) and top is not None, ISA=isa,
        enable_fp_fusion=False,  # quant/scales.py rounds squares before it adds them
    )  # fmt: skip


def needs_top(copy: EncodedState | None) -> bool:
    """Whether a fold can spare the renewal a reading of the head: nvfp4's scale is that of the largest magnitude."""
    return copy is not None and copy.format == "nvfp4" and plain(copy)


def plain(copy: EncodedState) -> bool:
    """Whether what is encoded is the state as it is, neither over column scales nor rotated."""
    return copy.columns is None and rotation_size(copy) <= 1
