"""Verifying drafts on a DecodeState: rollback by cursor, no copies of states (docs/speculative.md).

A verification takes T tokens for each row: one that is certain, the last one sampled, and T − 1 drafts. ``verify``
appends their inputs to the ring and reads an output for each, without moving the cursor; ``accept`` then moves it by
as many tokens as were accepted. Rejected tokens are simply overwritten by the next step. The first token being
certain, a verification may close the window with it: fold, renew the copy, and put the drafts into the fresh ring.
Until that is accepted, the cursor stands at −1, the ring row of a token that is in the checkpoint already.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.columns import unit_columns
from ..quant.errors import InvalidValueError
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import PADDING, STALE, DecodeState
from .inputs import TokenInputs
from .readout.reference import readout
from .step import _append, _flush, _live_rows, _ring_window, _rows
from .window.reference import make_window, read_terms


@dataclass(frozen=True)
class Verified:
    """What a verification gives: ``y`` [B, T, H, V] float32 and ``tokens`` [B] int32, how many of them are verified.

    Outputs from ``tokens`` on, and those of padded rows, are zero and mean nothing.
    """

    y: Tensor
    tokens: Tensor


def plan(cursor: Tensor, window: int, tokens: int, *, early: bool = False) -> tuple[Tensor, Tensor]:
    """For rows with ``cursor`` [B] committed ring rows: who closes its window, and how many tokens are verified.

    A row whose copy is STALE closes, as it would flush in plain decoding. Tensor arithmetic alone, as a kernel does
    it. See ``verify`` for ``early``.
    """
    stale = cursor == STALE
    if early:
        closing = (cursor + tokens >= window) | stale
        room = torch.full_like(cursor, window)
    else:
        closing = (cursor + 1 == window) | stale
        room = torch.where(closing, window, window - 1 - cursor)
    return closing, room.clamp(max=tokens)


def verify(state: DecodeState, inputs: TokenInputs, slots: Tensor | None = None, *, early: bool = False) -> Verified:
    """Outputs of T tokens for each row, of which the first is certain and the others are drafts.

    Windows end where they end in plain decoding, so every verified token has the output that ``step`` would have
    given it, and checkpoints and copies are the same to the bit: a draft that would be the last token of a window,
    or lie beyond it, is not verified in this call. With ``early`` no draft is cut: a window whose ring lacks room for
    all tokens is closed with the first of them, before its end. Outputs then are those of plain decoding with the
    same flushes. For one token both are ``step``, once it is accepted.

    Raises InvalidValueError for slots that step would refuse, and with ``early`` for more tokens than the window has.
    """
    length = state.policy.window
    if early and inputs.tokens > length:
        raise InvalidValueError(
            f"{inputs.tokens} tokens to verify in windows of {length}; use a longer window or fewer drafts"
        )
    slots, live = _live_rows(state, inputs, slots)
    y = inputs.v.new_zeros(inputs.rows, inputs.tokens, state.spec.heads, state.spec.value_dim, dtype=torch.float32)
    inputs = inputs if live is None else inputs.rows_at(live)
    cursor = state.cursor[slots].long()
    if bool(((cursor < 0) & (cursor != STALE)).any()):
        raise InvalidValueError(f"slots {slots[cursor < 0].tolist()} hold verified tokens that were not accepted yet")
    closing, tokens = plan(cursor, length, inputs.tokens, early=early)
    out = y if live is None else y[live]
    if bool(closing.any()):
        out[closing, 0] = _close(state, inputs.slice(0, 1), slots, cursor.clamp(min=0), closing)
    reading = (tokens > 1) | ~closing
    if bool(reading.any()):
        rows = reading.nonzero()[:, 0]
        first = state.cursor[slots[rows]].long()
        out[rows] += _read(state, inputs.rows_at(rows), slots[rows], first, tokens[rows])
    counts = torch.zeros(len(y), dtype=torch.int32, device=y.device)
    if live is None:
        return Verified(out, tokens.to(torch.int32))
    y[live], counts[live] = out, tokens.to(torch.int32)
    return Verified(y, counts)


def _close(state: DecodeState, inputs: TokenInputs, slots: Tensor, row: Tensor, closing: Tensor) -> Tensor:
    """Fold ring and certain token of the ``closing`` rows, as step does, but leave it to accept to count the token.

    As in step, all rows share the products of the window algebra, whose last bits depend on what else is in a batch.
    """
    _append(state, inputs, slots, row)
    window = _rows(_ring_window(state, slots, inputs, row), closing)
    slots = slots[closing]
    state.position[slots] += 1  # stochastic rounding is seeded by the position of the fold
    y = _flush(state, window, slots, row[closing])
    state.position[slots] -= 1
    state.cursor[slots] = -1
    return y


def _read(state: DecodeState, inputs: TokenInputs, slots: Tensor, cursor: Tensor, tokens: Tensor) -> Tensor:
    """Append and read the tokens that are in no checkpoint: from 0, or from 1 where the cursor is −1, to ``tokens``."""
    token = torch.arange(inputs.tokens, device=cursor.device)
    rows = cursor[:, None] + token
    used = (rows >= 0) & (token < tokens[:, None])
    where = used.nonzero(as_tuple=True)
    ring = {}
    for name, held in state.ring.items():
        held[slots[where[0]], rows[where]] = getattr(inputs, name)[where].to(held.dtype)
        ring[name] = held[slots]
    q = torch.zeros_like(ring["k"], dtype=inputs.q.dtype)
    q[where[0], rows[where]] = inputs.q[where]
    window = make_window(
        state.spec, TokenInputs(q=q, **ring), decay_rate=state.decay_rate, used=cursor + tokens.to(cursor.dtype)
    )
    terms = read_terms(window, rows.clamp(0, state.policy.window - 1))
    y = readout(state.read_source[slots].decode(), terms, window.v).transpose(1, 2)
    return torch.where(used[..., None, None], y, 0)


def accept(state: DecodeState, counts: Tensor, verified: Tensor, slots: Tensor | None = None) -> None:
    """Commit the first ``counts`` [B] of the ``verified`` [B] tokens of each row; the others never were.

    Raises InvalidValueError where a count is not from 1 to what was verified; nothing is changed then.
    """
    everything = slots is None
    slots = torch.arange(state.slots, device=state.cursor.device) if slots is None else slots
    if not counts.shape == verified.shape == slots.shape or bool(
        (slots < PADDING).any() | (slots >= state.slots).any()
    ):
        raise InvalidValueError(
            f"counts {counts.tolist()} of verified {verified.tolist()} tokens for "
            f"{f'all {state.slots} slots' if everything else f'slots {slots.tolist()}'}; one each, slots −1 to "
            f"{state.slots - 1}"
        )
    wrong = ((counts < 1) | (counts > verified)) & (slots != PADDING)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InvalidValueError(
            f"row {row} (slot {int(slots[row])}) accepts {int(counts[row])} of {int(verified[row])} verified tokens; "
            "the first token of a verification is certain and the others can't be more than were verified"
        )
    accept_on_device(state, counts, verified, slots)


def accept_on_device(state: DecodeState, counts: Tensor, verified: Tensor, slots: Tensor) -> None:
    """``accept`` without waiting for the device: nothing is raised, and no cursor leaves its ring.

    Counts are brought into 1 to ``verified``; a row whose slot does not exist changes nothing. After that the worst
    that a wrong count can do is a wrong continuation of its own sequence.
    """
    exists = (slots >= 0) & (slots < state.slots)
    index = torch.where(exists, slots, 0).long()
    counts = torch.where(exists, torch.minimum(counts, verified).clamp(min=1), 0)
    # Added, not assigned: a row without a slot adds nothing to slot 0, which another row may own.
    state.cursor.index_add_(0, index, counts.to(state.cursor.dtype))
    state.position.index_add_(0, index, counts.to(state.position.dtype))


def sequence_bytes(
    spec: LayerSpec, policy: StatePolicy, drafts: int, *, dtype: torch.dtype = torch.bfloat16
) -> dict[str, int]:
    """Bytes of one sequence in one layer that must be there to verify ``drafts`` tokens.

    ``snapshots`` is an FP32 state for the certain token and for each draft, as engines keep them; ``state`` is
    checkpoint and copy, ``ring`` the raw inputs (keys and values in ``dtype``) with cursor and position, ``total``
    both of the latter, whatever the number of drafts.
    """
    rate = torch.zeros(spec.heads) if spec.rules.gain_sets_decay else None
    held = DecodeState.allocate(spec, policy, 1, dtype=dtype, decay_rate=rate, columns=unit_columns(spec)).state_bytes()
    return {
        "snapshots": 4 * spec.elements * (1 + drafts),
        "state": held["checkpoint"] + held["copy"],
        "ring": held["ring"],
        "total": held["total"],
    }
