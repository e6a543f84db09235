"""Position buckets that double in length: 0–16, 16–32, 32–64, … No torch."""

from __future__ import annotations

from ..quant.errors import InvalidValueError


def doubling_edges(stop: int, first: int = 16) -> list[tuple[int, int]]:
    """Buckets [low, high) that cover 0 to ``stop``: ``first`` long, then each as long as all before it.

    The last one ends at ``stop``.
    """
    if first < 1:
        raise InvalidValueError(f"the first bucket is {first} tokens long; it must be 1 or more")
    edges, low, high = [], 0, first
    while low < stop:
        edges.append((low, min(high, stop)))
        low, high = high, 2 * high
    return edges
