"""Advancing a DecodeState: one token, many tokens as decode would, or a prompt.

Every function takes raw inputs of shape [B, T, …] and returns outputs [B, T, H, V] in float32, without
Mamba-2's D·x skip and without gates. Row b of the batch works on slot ``slots[b]``; −1 marks a padded row,
whose output is zero and which changes nothing. Without ``slots``, row b is slot b.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..quant.errors import InvalidValueError
from ..quant.policy import StatePolicy
from ..quant.state import PADDING, STALE, DecodeState
from .fold.reference import fold
from .inputs import TokenInputs, concat_tokens
from .readout.reference import readout
from .scan.reference import scan_windows
from .window.reference import Window, fold_terms, make_window, mixing, read_terms


def step(state: DecodeState, inputs: TokenInputs, slots: Tensor | None = None) -> Tensor:
    """One token for each row: append it to the ring, then read, or flush where the window is full or the copy stale.

    A row that flushes takes its output from the FP32 state that it has just folded.
    """
    if inputs.tokens != 1:
        raise InvalidValueError(f"step takes one token per row and was given {inputs.tokens}; use scan or prefill")
    slots, live = _live_rows(state, inputs, slots)
    y = inputs.v.new_zeros(inputs.rows, state.spec.heads, state.spec.value_dim, dtype=torch.float32)
    inputs = inputs if live is None else inputs.rows_at(live)
    row = state.fill(slots)
    flushing = (row + 1 == state.policy.window) | (state.cursor[slots] == STALE)
    _append(state, inputs, slots, row)
    window = _ring_window(state, slots, inputs, row)
    # Rows that flush come first: they alone can raise, and then no row has moved on.
    parts = [(flushing, _flush), (~flushing, _read)]
    out = y if live is None else y[live]
    with _moving(state, slots):
        state.position[slots] += 1
        for chosen, action in parts:
            if bool(chosen.all()):
                out = action(state, window, slots, row)
                break
            if bool(chosen.any()):
                out[chosen] = action(state, _rows(window, chosen), slots[chosen], row[chosen])
    if live is None:
        y = out
    else:
        y[live] = out
    return y[:, None]


def _flush(state: DecodeState, window: Window, slots: Tensor, row: Tensor) -> Tensor:
    folded = fold(state.checkpoint[slots].decode(), fold_terms(window), window.v)
    query = window.q.take_along_dim(row[:, None, None, None], dim=-2)
    state.renew_(folded, slots)
    return (query @ folded.mT)[:, :, 0]


def _read(state: DecodeState, window: Window, slots: Tensor, row: Tensor) -> Tensor:
    state.cursor[slots] += 1
    return readout(state.read_source[slots].decode(), read_terms(window, row[:, None]), window.v)[:, :, 0]


def scan(state: DecodeState, inputs: TokenInputs, slots: Tensor | None = None) -> Tensor:
    """The arithmetic of ``inputs.tokens`` steps, window by window: teacher forcing (docs/window-algebra.md)."""
    slots, live = _live_rows(state, inputs, slots)
    shape = (inputs.rows, inputs.tokens, state.spec.heads, state.spec.value_dim)
    y = inputs.v.new_zeros(shape, dtype=torch.float32)
    if not inputs.tokens:
        return y
    rows = torch.arange(inputs.rows, device=y.device) if live is None else live.nonzero()[:, 0]
    cursor = state.cursor[slots]
    for fill in cursor.unique().tolist():  # rows whose windows end at the same token go together
        together = cursor == fill
        chosen, own = rows[together], slots[together]
        first = 0
        if fill == STALE:  # the first token flushes, and a window begins behind it
            first, fill = 1, 0
            y[chosen, :1] = step(state, inputs.rows_at(chosen).slice(0, 1), own)
        if first < inputs.tokens:
            y[chosen, first:] = _scan_aligned(state, inputs.rows_at(chosen).slice(first, inputs.tokens), own, fill)
    return y


def _scan_aligned(state: DecodeState, inputs: TokenInputs, slots: Tensor, fill: int) -> Tensor:
    """Scan rows whose rings all hold ``fill`` tokens, which come before the new ones in their first window."""
    length = state.policy.window
    if fill:
        inputs = concat_tokens([_ring_inputs(state, slots, fill, like=inputs), inputs])
    whole = inputs.tokens - inputs.tokens % length
    outputs = []
    with _moving(state, slots):
        state.position[slots] -= fill
        if whole:
            outputs.append(_windows_engine(state)(state, inputs.slice(0, whole), slots))
    state.position[slots] += inputs.tokens - whole
    if whole < inputs.tokens:
        rest = inputs.slice(whole, inputs.tokens)
        state.cursor[slots] = rest.tokens
        _append(state, rest, slots, torch.zeros_like(slots))
        window = make_window(state.spec, rest, decay_rate=state.decay_rate)
        y = readout(state.read_source[slots].decode(), read_terms(window), window.v)
        outputs.append(y.transpose(1, 2))
    return torch.cat(outputs, dim=1)[:, fill:]


def _windows_engine(state: DecodeState) -> Callable[[DecodeState, TokenInputs, Tensor], Tensor]:
    """What runs whole windows: on a GPU the kernels, unless ``scan.triton.unsupported`` says why not."""
    if state.cursor.device.type == "cuda":
        from .scan import triton as kernels  # loads Triton, which nothing else here needs

        if kernels.unsupported(state) is None:
            return kernels.scan_windows
    return scan_windows


def prefill(state: DecodeState, inputs: TokenInputs, slots: Tensor | None = None) -> Tensor:
    """A prompt, or more of one: exact FP32 outputs, then everything folded, the copy renewed, the ring empty."""
    slots, live = _live_rows(state, inputs, slots)
    shape = (inputs.rows, inputs.tokens, state.spec.heads, state.spec.value_dim)
    y = inputs.v.new_zeros(shape, dtype=torch.float32)
    inputs = inputs if live is None else inputs.rows_at(live)
    exact = DecodeState.allocate(
        state.spec,
        StatePolicy(window=1),
        len(slots),
        layer=state.layer,
        device=inputs.v.device,
        dtype=inputs.v.dtype,
        decay_rate=state.decay_rate,
    )
    exact.renew_(folded(state, slots))
    out = scan(exact, inputs)
    with _moving(state, slots):
        state.position[slots] += inputs.tokens
        state.renew_(folded(exact), slots)
    if live is None:
        return out
    y[live] = out
    return y


def folded(state: DecodeState, slots: Tensor | None = None) -> Tensor:
    """The states [n, H, V, K] float32 with their rings folded in; nothing is changed."""
    index = state.index(slots, repeats=True)
    _check_cursors(state, index)
    checkpoint = state.checkpoint[index].decode()
    if not bool(state.fill(index).any()):
        return checkpoint
    window = _ring_window(state, index)
    return fold(checkpoint, fold_terms(window), window.v)


def _live_rows(state: DecodeState, inputs: TokenInputs, slots: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Slots of the rows that are not padding, and the mask of these rows where some are."""
    inputs.check(state.spec)
    everything = slots is None
    slots = state.index(slots, padding=True)
    if len(slots) != inputs.rows:
        raise InvalidValueError(f"{inputs.rows} rows of input for {len(slots)} slots; pass the slot of each row")
    live = slots != PADDING
    chosen = slots if everything or bool(live.all()) else slots[live]
    _check_cursors(state, chosen)
    return chosen, None if chosen is slots else live


def _check_cursors(state: DecodeState, slots: Tensor) -> None:
    """Raise InvalidValueError for a count that stepping never leaves: rows outside the ring would be hit."""
    cursor, window = state.cursor[slots], state.policy.window
    wrong = ((cursor < 0) & (cursor != state.emptied)) | (cursor >= window)
    if bool(wrong.any()):
        i = int(wrong.nonzero()[0])
        raise InvalidValueError(
            f"slot {int(slots[i])} of layer {state.layer!r} says that its ring holds {int(cursor[i])} tokens; between "
            f"steps a ring of {window} holds 0 to {window - 1}, so something else wrote into this state"
        )


@contextmanager
def _moving(state: DecodeState, slots: Tensor) -> Iterator[None]:
    """Positions change inside, and go back where the body raises: it has then changed nothing else."""
    before = state.position[slots]
    try:
        yield
    except BaseException:
        state.position[slots] = before
        raise


def _append(state: DecodeState, inputs: TokenInputs, slots: Tensor, row: Tensor) -> None:
    """Write the tokens of ``inputs`` into the ring from row ``row`` [n] on."""
    rows = row[:, None] + torch.arange(inputs.tokens, device=row.device)
    for name, ring in state.ring.items():
        ring[slots[:, None], rows] = getattr(inputs, name).to(ring.dtype)
    if state.mix is not None:
        renew_mix(state, slots, row + inputs.tokens)


def renew_mix(state: DecodeState, slots: Tensor, used: Tensor) -> None:
    """Make the rows of M in ``state.mix`` those of the first ``used`` [n] tokens in the rings of ``slots`` [n]."""
    assert state.mix is not None
    rows = {name: ring[slots] for name, ring in state.ring.items()}
    window = make_window(state.spec, TokenInputs(q=torch.zeros_like(rows["k"]), **rows), used=used)
    state.mix[slots] = mixing(window)


def _ring_inputs(state: DecodeState, slots: Tensor, fill: int, like: TokenInputs) -> TokenInputs:
    """The first ``fill`` ring rows as inputs, in the dtypes of ``like``; their queries are gone, and zero."""
    rows = {name: ring[slots, :fill].to(getattr(like, name).dtype) for name, ring in state.ring.items()}
    return TokenInputs(q=torch.zeros_like(rows["k"]), **rows)


def _ring_window(
    state: DecodeState, slots: Tensor, inputs: TokenInputs | None = None, row: Tensor | None = None
) -> Window:
    """The window of each slot's ring; with ``inputs``, their one token's query stands at ``row``."""
    rows = {name: ring[slots] for name, ring in state.ring.items()}
    q = torch.zeros_like(rows["k"])
    used = state.fill(slots)
    if inputs is not None and row is not None:
        q = q.to(inputs.q.dtype)
        q[torch.arange(len(slots), device=row.device), row] = inputs.q[:, 0]
        used = row + 1
    return make_window(state.spec, TokenInputs(q=q, **rows), decay_rate=state.decay_rate, used=used)


def _rows(window: Window, chosen: Tensor) -> Window:
    """The windows of the chosen rows."""
    tensors: dict[str, Any] = {name: t[chosen] for name, t in vars(window).items() if isinstance(t, Tensor)}
    return replace(window, **tensors)
