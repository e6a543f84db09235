"""Errors of layers against exact ones: outputs by position, states at sampled positions."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..quant.errors import InvalidValueError
from .bootstrap import Floats
from .buckets import doubling_edges
from .growth import layer_exponents
from .result import ErrorBucket, ErrorPoint, Layer


class LayerErrorMeter:
    """Accumulates relative errors of one arm's layers: outputs by position bucket, states at sampled positions."""

    def __init__(self, first_bucket: int = 16, *, window: int = 16) -> None:
        self._first_bucket, self._window = first_bucket, window
        self._output: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._state: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._stop = 0

    def update_output(self, layer: str, position_start: int, y_arm: Tensor, y_exact: Tensor) -> None:
        """Add outputs [B, T, H, V] whose first token is at ``position_start``."""
        length = y_arm.shape[1]
        squares = _squares(y_arm, y_exact, keep=1)
        self._stop = max(self._stop, position_start + length)
        for low, high in doubling_edges(position_start + length, self._first_bucket):
            first, last = max(low, position_start) - position_start, min(high, position_start + length) - position_start
            if first < last:
                _add(self._output[layer], low, squares[:, first:last].sum(dim=1))

    def update_state(self, layer: str, position: int, S_arm: Tensor, S_exact: Tensor) -> None:
        """Add states [B, H, V, K] as they are after the token at ``position``."""
        _add(self._state[layer], position, _squares(S_arm, S_exact, keep=None))

    def snapshot(self) -> LayerErrorMeter:
        """A meter with the same sums, which what comes later does not change. Copies no tensor."""
        other = LayerErrorMeter(self._first_bucket, window=self._window)
        for mine, theirs in ((self._output, other._output), (self._state, other._state)):
            theirs.update({layer: dict(by) for layer, by in mine.items()})
        other._stop = self._stop
        return other

    def sums(self) -> dict[str, Any]:
        """All that is held, as plain JSON values; ``add_sums`` takes it in again."""
        kinds = {"output": self._output, "state": self._state}
        return {"stop": self._stop} | {
            kind: {layer: {str(at): _numbers(s).tolist() for at, s in by.items()} for layer, by in held.items()}
            for kind, held in kinds.items()
        }

    def add_sums(self, sums: Mapping[str, Any]) -> None:
        """Take in what was measured on other documents."""
        self._stop = max(self._stop, sums["stop"])
        for kind, held in (("output", self._output), ("state", self._state)):
            for layer, by in sums[kind].items():
                for at, values in by.items():
                    _add(held[layer], int(at), torch.tensor(values, dtype=torch.float64))

    def add(self, other: LayerErrorMeter) -> None:
        """``add_sums`` of another meter."""
        self.add_sums(other.sums())

    def result(self, families: Mapping[str, str], policies: Mapping[str, str], window: int = 1) -> list[Layer]:
        """One Layer per layer updated, in that order; ``families`` and ``policies`` name each layer's, ``window`` is
        the arm's, where that is longer than the run's."""
        ends = dict(doubling_edges(self._stop, self._first_bucket))
        layers = []
        for name in dict.fromkeys([*self._output, *self._state]):
            output = {low: _numbers(s) for low, s in sorted(self._output.get(name, {}).items())}
            state = {at: _numbers(s) for at, s in sorted(self._state.get(name, {}).items())}
            outputs = [ErrorBucket(low, ends[low], _relative(s)) for low, s in output.items()]
            states = [ErrorPoint(at, _relative(s)) for at, s in state.items()]
            total = np.sum(list(output.values()), axis=0) if output else None
            layers.append(
                Layer(
                    name=name,
                    family=families.get(name, "unknown"),
                    policy=policies.get(name, "unknown"),
                    output_error=None if total is None else _relative(total),
                    state_error=states[-1].error if states else None,
                    output_error_by_position=outputs,
                    state_error_by_position=states,
                    exponents=layer_exponents(outputs, states, max(window, self._window)),
                )
            )
        return layers


def _squares(arm: Tensor, exact: Tensor, keep: int | None) -> Tensor:
    """Sums of squared error and of squared exact values, over all axes but ``keep``; [2, …] in float64."""
    if arm.shape != exact.shape:
        raise InvalidValueError(f"shapes differ: arm {tuple(arm.shape)}, exact {tuple(exact.shape)}")
    exact = exact.double()
    both = ((arm.double() - exact).square(), exact.square())
    if keep is None:
        return torch.stack([x.sum() for x in both])
    axes = [i for i in range(arm.dim()) if i != keep]
    return torch.stack([x.sum(dim=axes) for x in both])


def _add(sums: dict[int, Tensor], key: int, value: Tensor) -> None:
    sums[key] = value if key not in sums else sums[key] + value


def _numbers(sums: Tensor) -> Floats:
    return sums.detach().cpu().numpy().astype(np.float64)


def _relative(sums: Floats) -> float | None:
    """Square root of error over norm; None where the exact value is zero and the error is not, or either overflows."""
    error, norm = (float(x) for x in sums)
    if error == 0:
        return 0.0
    ratio = math.sqrt(error / norm) if norm > 0 else math.inf
    return ratio if math.isfinite(ratio) else None
