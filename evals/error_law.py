"""Output errors of read copies, predicted from one FP32 pass.

With an FP32 checkpoint S₀ and a copy Q(S₀) the output error of token t is exactly (Q(S₀) − S₀)·Θ[t]
(docs/window-algebra.md): no arm has to run to know it. So one pass of the reference gives the error of any number of
formats, scale rules, rotations and windows, for each layer and head.

What the prediction leaves out is what errors of earlier layers do to a layer's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..adapters import AttachedLayer
from ..kernels.fold.reference import fold
from ..kernels.inputs import TokenInputs, concat_tokens
from ..kernels.step import folded, scan
from ..kernels.window.reference import FoldTerms, Window, fold_terms, make_window, read_terms
from ..quant.codec import fake_quantize
from ..quant.errors import InvalidValueError
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState

PIECE_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 26}
"""State elements of window starts held at once."""


@dataclass(frozen=True)
class Reads:
    """Windows of one layer: the checkpoints that copies are made of, and the vectors that they are read at.

    ``states`` [W, B, H, V, K] and ``theta`` [W, B, H, L, K] float32. The last query of a window has no read error,
    as the token that flushes reads the FP32 state, unless ``flushes`` is False (a last window that is not full).
    """

    layer: str
    states: Tensor
    theta: Tensor
    flushes: bool


Reader = Callable[[Reads], Tensor]
"""What outputs read in place of ``states``, in the same shape."""


@dataclass(frozen=True)
class PredictedError:
    """Sums over tokens and rows, per head [H] in float64: squared output error, and squared exact output."""

    error: Tensor
    exact: Tensor

    @property
    def layer(self) -> float:
        """The layer's relative output error, ‖error‖ / ‖exact‖."""
        return float((self.error.sum() / self.exact.sum()).sqrt())

    @property
    def heads(self) -> list[float]:
        """The same for each head."""
        return [float(x) for x in (self.error / self.exact).sqrt()]


class ErrorLaw:
    """An observer (``handle.observer``) of a reference pass, that predicts what other ways of reading would cost.

    ``readers`` are decoupled policies with an FP32 checkpoint, or functions of Reads with the window that they are
    for, by name. The reference may run in chunks of any length. Tokens of the ``prompt`` count for the state alone.

    Raises InvalidValueError for a policy whose recurrence is not FP32: its error is fed back, and no sum of reads.
    """

    def __init__(self, readers: Mapping[str, StatePolicy | tuple[int, Reader]], *, prompt: int = 0) -> None:
        self._groups: dict[int, dict[str, Reader]] = {}
        for name, reader in readers.items():
            window, function = (reader.window, reader_of(reader)) if isinstance(reader, StatePolicy) else reader
            self._groups.setdefault(window, {})[name] = function
        self._names = list(readers)
        self._prompt = prompt
        self._tracks: dict[tuple[str, int], _Track] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        first = layer.name not in self._seen
        seen = self._seen.setdefault(layer.name, 0)
        self._seen[layer.name] += inputs.tokens
        for window, readers in self._groups.items():
            if first:
                self._tracks[layer.name, window] = _Track(layer.name, window, readers, state, inputs)
            track = self._tracks[layer.name, window]
            if seen < self._prompt:
                track.skip(inputs)
            else:
                track.add(inputs, y)

    def predictions(self) -> dict[str, dict[str, PredictedError]]:
        """By reader, then by layer in the model's order. Call it once, after the last token."""
        for track in self._tracks.values():
            track.finish()
        found: dict[str, dict[str, PredictedError]] = {name: {} for name in self._names}
        for (layer, _), track in self._tracks.items():
            for name, error in track.error.items():
                found[name][layer] = PredictedError(error.cpu(), track.exact.cpu())
        return found


def reader_of(policy: StatePolicy) -> Reader:
    """What a decoupled policy's outputs read: its copy, made of the FP32 checkpoint."""
    if policy.checkpoint != "fp32":
        raise InvalidValueError(
            f"no error law for {policy.name}: its {policy.checkpoint} recurrence feeds errors back. "
            "It holds for decoupled arms with an FP32 checkpoint"
        )
    read = policy.read or "fp32"
    how = policy.how(read)
    return lambda reads: fake_quantize(reads.states, *how, check_finite=False)


class _Track:
    """One layer under one window length: the FP32 state at the start of the next window, and tokens before its end."""

    def __init__(
        self, layer: str, window: int, readers: Mapping[str, Reader], state: DecodeState, inputs: TokenInputs
    ) -> None:
        self._layer, self._window, self._readers = layer, window, readers
        self._spec: LayerSpec = state.spec
        self._decay_rate = state.decay_rate
        spec = state.spec
        device = inputs.v.device
        self._carried = torch.zeros(inputs.rows, spec.heads, spec.value_dim, spec.key_dim, device=device)
        self._pending: TokenInputs | None = None
        zeros = torch.zeros(spec.heads, dtype=torch.float64, device=device)
        self.exact = zeros
        self.error = {name: zeros for name in readers}

    def skip(self, inputs: TokenInputs) -> None:
        """A prompt: everything is folded, exactly, and the ring is empty after it."""
        exact = DecodeState.allocate(
            self._spec, StatePolicy(window=1), inputs.rows, layer=self._layer, device=inputs.v.device,
            dtype=inputs.v.dtype, decay_rate=self._decay_rate,
        )  # fmt: skip
        exact.renew_(self._carried)
        scan(exact, inputs)
        self._carried = folded(exact)

    def add(self, inputs: TokenInputs, y: Tensor) -> None:
        """Tokens with their exact outputs ``y`` [B, T, H, V]."""
        self.exact = self.exact + _squares(y.transpose(1, 2))
        if self._pending is not None:
            inputs = concat_tokens([self._pending, inputs])
        whole = inputs.tokens - inputs.tokens % self._window
        self._pending = inputs.slice(whole, inputs.tokens) if whole < inputs.tokens else None
        size = PIECE_ELEMENTS.get(inputs.v.device.type, 1 << 20) // (inputs.rows * self._spec.elements)
        piece = max(1, size) * self._window
        for start in range(0, whole, piece):
            self._windows(inputs.slice(start, min(start + piece, whole)))

    def finish(self) -> None:
        """The last window, which is not full: nothing flushes in it."""
        if self._pending is not None:
            window = self._prepared(self._pending.map(lambda t: t[None]))
            self._measure(Reads(self._layer, self._carried[None], read_terms(window).theta, False))
            self._pending = None

    def _windows(self, inputs: TokenInputs) -> None:
        count = inputs.tokens // self._window
        window = self._prepared(inputs.map(lambda t: t.unflatten(1, (count, self._window)).transpose(0, 1)))
        terms = fold_terms(window)
        starts = self._carried.new_empty(count, *self._carried.shape)
        for i in range(count):
            starts[i] = self._carried
            x = None if terms.x is None else terms.x[i]
            self._carried = fold(starts[i], FoldTerms(terms.decay[i], x, terms.p[i]), window.v[i])
        if self._window > 1:
            self._measure(Reads(self._layer, starts, read_terms(window).theta, True))

    def _prepared(self, inputs: TokenInputs) -> Window:
        return make_window(self._spec, inputs, decay_rate=self._decay_rate)

    def _measure(self, reads: Reads) -> None:
        queries = reads.theta[..., :-1, :] if reads.flushes else reads.theta
        for name, reader in self._readers.items():
            self.error[name] = self.error[name] + _squares(queries @ (reader(reads) - reads.states).mT)


def _squares(x: Tensor) -> Tensor:
    """Squares of [*, H, T, V] summed over all but heads, in float64."""
    return x.square().sum(dim=(-1, -2), dtype=torch.float64).flatten(0, -2).sum(0)


def predict(
    handle: Any, ids: Tensor, readers: Mapping[str, StatePolicy | tuple[int, Reader]], *, prompt: int = 0
) -> dict[str, dict[str, PredictedError]]:
    """Run the reference of an attached model over ``ids`` [B, prompt + N], and predict the readers' output errors."""
    from .rollout import CHUNK, Rollout

    law = ErrorLaw(readers, prompt=prompt)
    reference = Rollout(handle, StatePolicy(window=1))
    if prompt:
        reference.prefill(ids[:, :prompt], observer=law)
    for start in range(prompt, ids.shape[1], CHUNK):
        reference.advance(ids[:, start : start + CHUNK], observer=law)
    return law.predictions()
