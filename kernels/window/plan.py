"""The plan kernels decide, on the device, which rows read, which flush and which are padding; they alone move cursors.

Their orders to the other kernels: ``row`` [B], the ring row of a batch row's first token (−1: it is in the checkpoint
already; NOTHING: leave this batch row alone), and ``used`` [B], how many ring rows it then reads, 0 where it flushes.
"""

from __future__ import annotations

from ...quant import state as states
from ..device.targets import tl, triton

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
