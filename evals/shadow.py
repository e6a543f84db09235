"""What a low-precision state does to each layer, apart from what earlier layers do to its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..adapters import AttachedLayer
from ..kernels.inputs import TokenInputs
from ..kernels.step import folded, scan
from ..quant.policy import StatePolicy
from ..quant.state import DecodeState
from .layer_errors import LayerErrorMeter
from .result import Layer


class ExactShadow:
    """An observer (``handle.observer``) that runs the exact FP32 recurrence on each layer's own inputs.

    Tokens of the ``prompt`` count for the state and are not evaluated. Buckets of positions start at ``window``.
    """

    def __init__(self, window: int, prompt: int) -> None:
        self._meter = LayerErrorMeter(window, window=window)
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

    def layers(self, handle: Any, states: Mapping[str, DecodeState]) -> list[Layer]:
        families = {layer.name: layer.family for layer in handle.layers}
        return self._meter.result(families, {name: state.policy.name for name, state in states.items()})
