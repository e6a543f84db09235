"""Committing verified tokens on the device, by one small launch: kernels/speculative.py's ``accept_on_device``."""

from __future__ import annotations

from torch import Tensor

from ...quant.state import DecodeState
from ..device.targets import tl, triton
from ..launch import find_launch, isa_of, run


@triton.jit
def accept_kernel(
    p_slots, p_counts, p_verified, p_cursor, p_position, s_cursor, s_position, B, SLOTS, BP: tl.constexpr,
):  # fmt: skip
    """One program. Counts are brought into 1 to what was verified; rows whose slot does not exist change nothing."""
    o_b = tl.arange(0, BP)
    m_b = o_b < B
    i_slot = tl.load(p_slots + o_b, mask=m_b, other=-1).to(tl.int64)
    m_live = (i_slot >= 0) & (i_slot < SLOTS)
    i_count = tl.minimum(tl.load(p_counts + o_b, mask=m_b, other=0), tl.load(p_verified + o_b, mask=m_b, other=0))
    i_count = tl.maximum(i_count, 1).to(tl.int32)
    p_cursor += i_slot * s_cursor
    p_position += i_slot * s_position
    tl.store(p_cursor, tl.load(p_cursor, mask=m_live, other=0) + i_count, mask=m_live)
    tl.store(p_position, tl.load(p_position, mask=m_live, other=0) + i_count, mask=m_live)


def accept(state: DecodeState, counts: Tensor, verified: Tensor, slots: Tensor) -> None:
    """Commit the first ``counts`` [B] of the ``verified`` [B] tokens of each row; nothing waits, nothing is raised.

    ``slots`` [B] must differ, but for those that do not exist, which change nothing. Counts below 1 are 1, and those
    above what was verified are that: the worst that a wrong one does is a wrong continuation of its own sequence.
    """
    batch = slots.shape[0]
    run(
        accept_kernel, (1,), find_launch("plan", "", 0, 0, isa_of(slots.device), batch),
        slots, counts, verified, state.cursor, state.position, state.cursor.stride(0), state.position.stride(0),
        batch, state.slots, BP=triton.next_power_of_2(batch),
    )  # fmt: skip
