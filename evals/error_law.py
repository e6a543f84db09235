"""Output errors of read copies, predicted from one FP32 pass.

With an FP32 checkpoint S₀ and a copy Q(S₀) the output error of token t is exactly (Q(S₀) − S₀)·Θ[t]
(docs/window-algebra.md): no arm has to run to know it. So one pass of the reference gives the error of any number of
formats, scale rules, rotations and windows, for each layer and head.

What the prediction leaves out is what errors of earlier layers do to a layer's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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
from ..quant.columns import ColumnScales
from ..quant.errors import InvalidValueError
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from .rollout import CHUNK, Progress, Rollout

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

    def error(self, reader: Reader) -> Tensor:
        """What ``reader`` adds to the outputs, [W, B, H, L, V]: (Q(S₀) − S₀)·Θ, and 0 where the window flushes."""
        error = self.theta @ (reader(self) - self.states).mT
        if self.flushes:
            error[..., -1, :] = 0
        return error


Reader = Callable[[Reads], Tensor]
"""What outputs read in place of ``states``, in the same shape."""


@dataclass(frozen=True)
class PredictedError:
    """Sums over tokens and rows, per head [H] in float64: squared output error, and squared exact output.

    ``elements`` is the size of the layer's state.
    """

    error: Tensor
    exact: Tensor
    elements: int

    @property
    def layer(self) -> float:
        """The layer's relative output error, ‖error‖ / ‖exact‖."""
        return float((self.error.sum() / self.exact.sum()).sqrt())

    @property
    def normalised(self) -> float:
        """Root mean square of the heads' relative errors.

        Norms after the recurrence give every head the same weight, so a layer's divergence follows this more closely
        than ``layer`` (results/LOG.md).
        """
        return float((self.error / self.exact).nan_to_num(0.0).mean().sqrt())

    @property
    def heads(self) -> list[float]:
        """The same for each head."""
        return [float(x) for x in (self.error / self.exact).sqrt()]


class ErrorLaw:
    """An observer (``handle.observer``) of a reference pass, that predicts what other ways of reading would cost.

    ``readers`` are decoupled policies with an FP32 checkpoint, or functions of Reads with the window that they are
    for, by name; ``columns`` are the column scales of balanced ones. The reference may run in chunks of any length.
    Tokens of the ``prompt`` count for the state alone.

    Raises InvalidValueError for a policy whose recurrence is not FP32: its error is fed back, and no sum of reads.
    """

    def __init__(
        self,
        readers: Mapping[str, StatePolicy | tuple[int, Reader]],
        *,
        prompt: int = 0,
        columns: ColumnScales | None = None,
    ) -> None:
        self._groups: dict[int, dict[str, Reader]] = {}
        for name, reader in readers.items():
            if isinstance(reader, StatePolicy):
                reader = reader.window, reader_of(reader, columns)
            window, function = reader
            self._groups.setdefault(window, {})[name] = function
        self._names = list(readers)
        self._prompt = prompt
        self._tracks: dict[tuple[str, int], WindowTrack] = {}
        self._sums: dict[tuple[str, int], _Sums] = {}
        self._seen: dict[str, int] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        seen = self._seen.setdefault(layer.name, 0)
        self._seen[layer.name] += inputs.tokens
        for window, readers in self._groups.items():
            if (layer.name, window) not in self._tracks:
                self._tracks[layer.name, window] = WindowTrack(layer.name, window, state, inputs)
                self._sums[layer.name, window] = _Sums(self._tracks[layer.name, window].spec, readers, y.device)
            track, sums = self._tracks[layer.name, window], self._sums[layer.name, window]
            if seen < self._prompt:
                track.skip(inputs)
            else:
                sums.exact += _squares(y.transpose(1, 2))
                for reads in track.windows(inputs):
                    sums.add(reads)

    def predictions(self) -> dict[str, dict[str, PredictedError]]:
        """By reader, then by layer in the model's order. Call it once, after the last token."""
        found: dict[str, dict[str, PredictedError]] = {name: {} for name in self._names}
        for key, sums in self._sums.items():
            reads = self._tracks[key].rest()
            if reads is not None:
                sums.add(reads)
            for name, error in sums.error.items():
                found[name][key[0]] = PredictedError(error.cpu(), sums.exact.cpu(), sums.elements)
        return found


class _Sums:
    """One layer's squares under one window length, per head."""

    def __init__(self, spec: LayerSpec, readers: Mapping[str, Reader], device: torch.device) -> None:
        self._readers = readers
        self.elements = spec.elements
        self.exact = torch.zeros(spec.heads, dtype=torch.float64, device=device)
        self.error = {name: torch.zeros_like(self.exact) for name in readers}

    def add(self, reads: Reads) -> None:
        for name, reader in self._readers.items():
            self.error[name] += _squares(reads.error(reader))


def reader_of(policy: StatePolicy, columns: ColumnScales | None = None) -> Reader:
    """What a decoupled policy's outputs read: its copy, made of the FP32 checkpoint. ``columns``: if it is balanced."""
    if policy.checkpoint != "fp32":
        raise InvalidValueError(
            f"no error law for {policy.name}: its {policy.checkpoint} recurrence feeds errors back. "
            "It holds for decoupled arms with an FP32 checkpoint"
        )
    read = policy.read or "fp32"
    scales = {} if columns is None else columns.layers
    policy.how(read, next(iter(scales.values()), None))  # raises here, not at the first window

    def reader(reads: Reads) -> Tensor:
        own = scales.get(reads.layer)
        how = policy.how(read, None if own is None else own.to(reads.states.device))
        return fake_quantize(reads.states, *how, check_finite=False)

    return reader


class WindowTrack:
    """One layer under one window length, followed exactly: the FP32 state, and tokens before the next window's end."""

    def __init__(self, layer: str, window: int, state: DecodeState, inputs: TokenInputs) -> None:
        self._layer, self._window = layer, window
        self._decay_rate = state.decay_rate
        self.spec: LayerSpec = state.spec
        shape = (inputs.rows, self.spec.heads, self.spec.value_dim, self.spec.key_dim)
        self.state = torch.zeros(shape, device=inputs.v.device)
        self._pending: TokenInputs | None = None

    def skip(self, inputs: TokenInputs) -> None:
        """A prompt: everything is folded, exactly, and the ring is empty after it."""
        exact = DecodeState.allocate(
            self.spec, StatePolicy(window=1), inputs.rows, layer=self._layer, device=inputs.v.device,
            dtype=inputs.v.dtype, decay_rate=self._decay_rate,
        )  # fmt: skip
        exact.renew_(self.state)
        scan(exact, inputs)
        self.state = folded(exact)

    def windows(self, inputs: TokenInputs) -> Iterator[Reads]:
        """The whole windows that end in ``inputs``, some at a time, in order; what is left waits for more tokens."""
        if self._pending is not None:
            inputs = concat_tokens([self._pending, inputs])
        whole = inputs.tokens - inputs.tokens % self._window
        self._pending = inputs.slice(whole, inputs.tokens) if whole < inputs.tokens else None
        size = PIECE_ELEMENTS.get(inputs.v.device.type, 1 << 20) // (inputs.rows * self.spec.elements)
        piece = max(1, size) * self._window
        for start in range(0, whole, piece):
            yield self._piece(inputs.slice(start, min(start + piece, whole)))

    def rest(self) -> Reads | None:
        """The last window, where it is not full: nothing flushes in it. No tokens may follow."""
        if self._pending is None:
            return None
        window = self._prepared(self._pending.map(lambda t: t[None]))
        self._pending = None
        return Reads(self._layer, self.state[None], read_terms(window).theta, False)

    def _piece(self, inputs: TokenInputs) -> Reads:
        count = inputs.tokens // self._window
        window = self._prepared(inputs.map(lambda t: t.unflatten(1, (count, self._window)).transpose(0, 1)))
        terms = fold_terms(window)
        starts = self.state.new_empty(count, *self.state.shape)
        for i in range(count):
            starts[i] = self.state
            x = None if terms.x is None else terms.x[i]
            self.state = fold(starts[i], FoldTerms(terms.decay[i], x, terms.p[i]), window.v[i])
        return Reads(self._layer, starts, read_terms(window).theta, True)

    def _prepared(self, inputs: TokenInputs) -> Window:
        return make_window(self.spec, inputs, decay_rate=self._decay_rate)


def _squares(x: Tensor) -> Tensor:
    """Squares of [*, H, T, V] summed over all but heads, in float64."""
    return x.square().sum(dim=(-1, -2), dtype=torch.float64).flatten(0, -2).sum(0)


def predict(
    handle: Any,
    ids: Tensor,
    readers: Mapping[str, StatePolicy | tuple[int, Reader]],
    *,
    prompt: int = 0,
    progress: Progress | None = None,
) -> dict[str, dict[str, PredictedError]]:
    """Run the reference of an attached model over ``ids`` [B, prompt + N], and predict the readers' output errors."""
    law = ErrorLaw(readers, prompt=prompt, columns=handle.columns)
    reference = Rollout(handle, StatePolicy(window=1))
    if prompt:
        reference.prefill(ids[:, :prompt], observer=law)
    for start in range(prompt, ids.shape[1], CHUNK):
        reference.advance(ids[:, start : start + CHUNK], observer=law)
        if progress is not None:
            progress("error law", min(start + CHUNK, ids.shape[1]) - prompt, ids.shape[1] - prompt)
    return law.predictions()
