"""Choosing one option for each item so that the total cost or the total loss stays within a budget. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..quant.errors import InvalidValueError

STEPS = 20_000
"""Costs are kept in this many steps of the largest total, rounded up: choices are exact to 0.005 % of the cost."""

Option = tuple[float, float]
"""(cost, loss), both at least zero."""


def choose(
    items: Sequence[Sequence[Option]], *, max_cost: float | None = None, max_loss: float | None = None
) -> list[int]:
    """The option of each item: the least loss within ``max_cost``, or the least cost within ``max_loss``.

    Exact, by dynamic programming over all totals that no other total beats in both cost and loss. Of equal losses the
    cheaper counts. Raises InvalidValueError where no choice meets the budget, naming what would.
    """
    if (max_cost is None) == (max_loss is None):
        raise InvalidValueError("give a budget for the cost or for the loss, one of them")
    largest = sum(max(cost for cost, _ in options) for options in items)
    step = max(largest, 1e-300) / STEPS
    costs: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)
    losses = np.zeros(1)
    trail: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []  # per item: option, place in the list before
    for options in items:
        units = np.array([np.ceil(cost / step - 1e-9) for cost, _ in options], dtype=np.int64)
        lost = np.array([loss for _, loss in options])
        cost = (costs[None, :] + units[:, None]).ravel()
        loss = (losses[None, :] + lost[:, None]).ravel()
        order = np.lexsort((loss, cost))
        best = np.minimum.accumulate(loss[order])
        better = np.concatenate([[True], best[1:] < best[:-1]])
        kept = order[better]
        trail.append((kept // len(costs), kept % len(costs)))
        costs, losses = cost[kept], loss[kept]
    if max_cost is not None:
        fits = np.flatnonzero(costs * step <= max_cost * (1 + 1e-9) + len(items) * step)
        fits = fits[[_cost(items, _path(trail, int(i))) <= max_cost * (1 + 1e-9) for i in fits]] if len(fits) else fits
        if not len(fits):
            least = sum(min(cost for cost, _ in options) for options in items)
            raise InvalidValueError(f"no choice costs {max_cost:.6g} or less; the cheapest costs {least:.6g}")
        return _path(trail, int(fits[-1]))
    assert max_loss is not None
    fits = np.flatnonzero(losses <= max_loss)
    if not len(fits):
        raise InvalidValueError(f"no choice loses {max_loss:.3g} or less; the best loses {losses[-1]:.3g}")
    return _path(trail, int(fits[0]))


def _path(trail: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]], place: int) -> list[int]:
    chosen = []
    for option, before in reversed(trail):
        chosen.append(int(option[place]))
        place = int(before[place])
    return chosen[::-1]


def _cost(items: Sequence[Sequence[Option]], chosen: Sequence[int]) -> float:
    return sum(options[i][0] for options, i in zip(items, chosen, strict=True))
