"""What a low-precision state does to each layer, apart from what earlier layers do to its inputs."""

from __future__ import annotations

from torch import Tensor

from ..adapters import AttachedLayer, Observer
from ..kernels.inputs import TokenInputs
from ..kernels.step import folded, scan
from ..quant.policy import StatePolicy
from ..quant.state import DecodeState
from .layer_errors import LayerErrorMeter


class ExactShadow:
    """An observer (``handle.observer``) that runs the exact FP32 recurrence on each layer's own inputs.

    The errors go into ``meter``. Tokens of the ``prompt`` count for the state and are not evaluated.
    """

    def __init__(self, meter: LayerErrorMeter, prompt: int) -> None:
        self._meter = meter
        self._prompt = prompt
        self._exact: dict[str, DecodeState] = {}
        self._arm: dict[str, DecodeState] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        exact = self._exact.get(layer.name)
        if exact is None:
            exact = self._exact[layer.name] = DecodeState.allocate(
                state.spec,
                StatePolicy(window=1),
                state.slots,
                layer=layer.name,
                device=state.cursor.device,
                dtype=inputs.v.dtype,
                decay_rate=state.decay_rate,
            )
        position = int(exact.position[0]) - self._prompt
        expected = scan(exact, inputs)
        if position >= 0:
            self._meter.update_output(layer.name, position, y, expected)
        self._arm[layer.name] = state

    def end_of_chunk(self, position: int) -> None:
        """Compare the states, rings folded in, after the token at ``position``."""
        for name, state in self._arm.items():
            self._meter.update_state(name, position, folded(state), folded(self._exact[name]))


class InjectedShadow:
    """An observer around one that changes outputs in place: what it changes is the layer's error."""

    def __init__(self, change: Observer, meter: LayerErrorMeter, prompt: int) -> None:
        self._change, self._meter, self._prompt = change, meter, prompt
        self._seen: dict[str, int] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        position = self._seen.get(layer.name, 0) - self._prompt
        self._seen[layer.name] = position + self._prompt + inputs.tokens
        exact = y.clone()
        self._change(layer, inputs, y, state)
        if position >= 0:
            self._meter.update_output(layer.name, position, y, exact)

    def end_of_chunk(self, position: int) -> None:
        """The recurrence is exact; there is nothing to compare."""
