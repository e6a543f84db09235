"""Whole windows in sequence: what decode computes over many tokens, without its steps (docs/window-algebra.md)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.codec import fake_quantize
from ...quant.state import DecodeState
from ..fold.reference import fold
from ..inputs import TokenInputs
from ..readout.reference import readout
from ..window.reference import FoldTerms, Window, fold_terms, make_window, read_terms

PIECE_TOKENS = 1024
PIECE_ELEMENTS = 1 << 20
"""Bounds of what is held at once: tokens whose coefficients are kept, and elements of window starts or of decays."""

EXACT_CHUNK = {"head": 64, "channel": 16}
"""Tokens per fold of an FP32 recurrence that keeps no ring, by kind of decay: the same sums in another order, far fewer
of them. A decay per channel costs chunk × K exponentials a token, hence the shorter one."""


def scan_windows(state: DecodeState, inputs: TokenInputs, slots: Tensor) -> Tensor:
    """Run whole windows from empty rings: outputs [B, T, H, V]; checkpoint, copy and position advance.

    The first window reads the copy as it is, later ones what their flush would have encoded. A recurrence
    that folds every token in FP32 is computed in chunks instead, which differs by rounding alone.
    """
    chunked = state.policy.exact and state.policy.window == 1
    length = EXACT_CHUNK[state.spec.rules.decay] if chunked else state.policy.window
    spec = state.spec
    pairs = length * length * spec.heads * (spec.key_dim if spec.rules.decay == "channel" else 1)
    elements = inputs.rows * max(spec.elements, pairs)
    piece = length * max(1, min(PIECE_TOKENS // length, PIECE_ELEMENTS // (elements or 1)))
    carried = state.checkpoint[slots].decode()
    read: Tensor | None = state.read_source[slots].decode()
    outputs = []
    for start in range(0, inputs.tokens, piece):
        tokens = inputs.slice(start, min(start + piece, inputs.tokens))
        whole = tokens.tokens - tokens.tokens % length
        for part, window_length in ((tokens.slice(0, whole), length), (tokens.slice(whole, tokens.tokens), 0)):
            if part.tokens:  # only the chunked recurrence can leave a shorter last window
                y, ended, carried = _piece(state, part, slots, window_length or part.tokens, carried, read)
                outputs.append(y)
                read = None
    state.renew_(ended, slots)
    return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]


def _piece(
    state: DecodeState, inputs: TokenInputs, slots: Tensor, length: int, carried: Tensor, read: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """A few windows of ``length`` tokens, from the checkpoint ``carried`` and the copy ``read`` (None: its own).

    Returns outputs [B, T, H, V], the last folded state in FP32, and what the checkpoint holds of it.
    """
    windows = inputs.tokens // length
    split = inputs.map(lambda t: t.unflatten(1, (windows, length)).transpose(0, 1))  # windows first
    window = make_window(state.spec, split, decay_rate=state.decay_rate)
    folds = fold_terms(window)
    starts = carried.new_empty(windows + 1, *carried.shape)
    starts[0] = carried
    position = state.position[slots]
    rounds = state.policy.checkpoint != "fp32"
    ends = torch.empty_like(starts[1:]) if rounds else starts[1:]
    for i in range(windows):
        fold(
            starts[i],
            FoldTerms(folds.decay[i], None if folds.x is None else folds.x[i], folds.p[i]),
            window.v[i],
            ends[i],
        )
        if rounds:
            starts[i + 1] = _rounded(state, ends[i], position + (i + 1) * length)
    if rounds:  # low precision may saturate Inf: then what is folded later looks well
        _check_ends(state, ends, slots, position, length)
    state.position[slots] = position + inputs.tokens
    flushed = window.q[..., -1:, :] @ ends.mT
    if length == 1:
        y = flushed
    else:
        y = _read_windows(state, window, starts[:-1], read)
        y[..., -1:, :] = flushed
    return y.permute(1, 0, 3, 2, 4).flatten(1, 2), ends[-1], starts[-1]


def _read_windows(state: DecodeState, window: Window, starts: Tensor, read: Tensor | None) -> Tensor:
    """Outputs [windows, B, H, L, V] of all tokens from each window's read source; the flushing ones are replaced later.

    ``starts`` [windows, B, H, V, K] are the checkpoints, ``read`` the copy of the first where it is given.
    """
    terms = read_terms(window)
    if state.copy is not None:
        starts = fake_quantize(starts, *state.copy.how, check_finite=False)
        if read is not None:
            starts[0] = read
    return readout(starts, terms, window.v)


def _rounded(state: DecodeState, ended: Tensor, position: Tensor) -> Tensor:
    """What a checkpoint in the policy's format holds of the state folded at ``position`` [B]."""
    policy = state.policy
    seeds = state.rounding_seeds(position) if policy.stochastic else None
    return fake_quantize(ended, *policy.how(policy.checkpoint), seeds=seeds, check_finite=False)


def _check_ends(state: DecodeState, ends: Tensor, slots: Tensor, position: Tensor, length: int) -> None:
    """Raise NonFiniteStateError where a folded state [windows, B, H, V, K] holds Inf or NaN."""
    if bool(torch.isfinite(ends.sum(dtype=torch.float64))):
        return
    for i, ended in enumerate(ends):
        state.position[slots] = position + (i + 1) * length
        state.check_finite(ended, slots)
