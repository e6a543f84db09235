"""Arms that are no policies, in a whole model: the exact recurrence with its outputs replaced, layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..adapters import AttachedLayer
from ..kernels.fold.reference import fold
from ..kernels.inputs import TokenInputs
from ..kernels.readout.reference import readout
from ..kernels.window.reference import fold_terms, make_window, read_terms
from ..quant.errors import InvalidValueError
from ..quant.state import DecodeState
from .error_law import Reader, WindowTrack

Rounding = Callable[[Tensor], Tensor]


class ReadError:
    """An observer that adds to each layer's exact outputs what ``reader`` costs: (Q(S₀) − S₀)·Θ, exactly.

    So the model computes what it would with such a read copy. Chunks but the last must be whole windows.
    """

    def __init__(self, window: int, reader: Reader, prompt: int = 0) -> None:
        self._window, self._reader, self._prompt = window, reader, prompt
        self._tracks: dict[str, WindowTrack] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        track = self._tracks.get(layer.name)
        if track is None:
            track = self._tracks[layer.name] = WindowTrack(layer.name, self._window, state, inputs)
        seen = self._seen.get(layer.name, 0)
        self._seen[layer.name] = seen + inputs.tokens
        if seen < self._prompt:
            return track.skip(inputs)
        if (seen - self._prompt) % self._window:
            raise InvalidValueError(f"a chunk begins inside a window of {self._window}; chunks must be whole windows")
        at = 0
        for reads in track.windows(inputs):
            error = reads.error(self._reader).permute(1, 0, 3, 2, 4).flatten(1, 2)  # [B, T, H, V]
            y[:, at : at + error.shape[1]] += error
            at += error.shape[1]
        if at < inputs.tokens and (rest := track.rest()) is not None:
            y[:, at:] += rest.error(self._reader).permute(1, 0, 3, 2, 4).flatten(1, 2)
        return None


class CoupledFeedback:
    """An observer that replaces each layer's outputs by those of a coupled recurrence with error feedback.

    What rounding leaves out is a residual r, kept in a format of its own and carried through the window as the state
    is, x = fold(S) + fold(r) without new values, S = Q(x), r = R(x − S). Outputs see S alone, but for the token that
    flushes, which sees x. With ``residual`` None there is no feedback. (A residual that is not carried along makes
    things worse: it outlives what it corrects.)
    """

    def __init__(self, window: int, rounding: Rounding, residual: Rounding | None, prompt: int = 0) -> None:
        self._window, self._rounding, self._residual, self._prompt = window, rounding, residual, prompt
        self._tracks: dict[str, WindowTrack] = {}
        self._held: dict[str, tuple[Tensor, Tensor | None]] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        track = self._tracks.get(layer.name)
        if track is None:
            track = self._tracks[layer.name] = WindowTrack(layer.name, self._window, state, inputs)
        seen = self._seen.get(layer.name, 0)
        self._seen[layer.name] = seen + inputs.tokens
        if seen < self._prompt:
            track.skip(inputs)
            self._held[layer.name] = self._round(track.state)
            return
        if (seen - self._prompt) % self._window:
            raise InvalidValueError(f"a chunk begins inside a window of {self._window}; chunks must be whole windows")
        held, left = self._held.get(layer.name, (torch.zeros_like(track.state), None))
        for start in range(0, inputs.tokens, self._window):
            tokens = inputs.slice(start, min(start + self._window, inputs.tokens))
            window = make_window(state.spec, tokens, decay_rate=state.decay_rate)
            out = readout(held, read_terms(window), window.v)
            if tokens.tokens == self._window:
                terms = fold_terms(window)
                whole = fold(held, terms, window.v)
                if left is not None:  # carried through the window too, as the recurrence is linear in the state
                    whole = whole + fold(left, terms, torch.zeros_like(window.v))
                out[..., -1:, :] = window.q[..., -1:, :] @ whole.mT
                held, left = self._round(whole)
            y[:, start : start + tokens.tokens] = out.transpose(1, 2)
        self._held[layer.name] = held, left

    def _round(self, state: Tensor) -> tuple[Tensor, Tensor | None]:
        held = self._rounding(state)
        return held, None if self._residual is None else self._residual(state - held)


@dataclass(frozen=True)
class Injected:
    """An arm that is no policy. ``observer(prompt)`` makes one for each pass; bytes are per state element."""

    observer: Callable[[int], Callable[[AttachedLayer, TokenInputs, Tensor, DecodeState], None]]
    window: int
    resident: float
    moved: float

    @classmethod
    def read(cls, window: int, reader: Callable[[], Reader], copy: float) -> Injected:
        """A read copy of ``copy`` bytes per element beside an FP32 checkpoint."""
        moved = ((window - 1) * copy + 2 * 4.0 + copy) / window
        return cls(lambda prompt: ReadError(window, reader(), prompt), window, 4.0 + copy, moved)

    @classmethod
    def coupled(cls, window: int, rounding: Rounding, residual: Rounding | None, state: float, kept: float) -> Injected:
        """A carried state of ``state`` bytes per element, and a residual of ``kept``, which only flushes move."""
        moved = ((window - 1) * state + 2 * state + 2 * kept) / window
        return cls(lambda prompt: CoupledFeedback(window, rounding, residual, prompt), window, state + kept, moved)
