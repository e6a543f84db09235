"""How fast an error grows with position: the slope of a power law. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .result import ErrorBucket, ErrorPoint, Exponent, Exponents


def fit_exponent(points: Sequence[tuple[float, float | None]]) -> Exponent | None:
    """Least squares of log error on log position over (position, error) points.

    None where there are fewer than three points, an error is zero or unknown (its logarithm is no number), or all
    positions are one. The standard error is that of the slope under equal, independent scatter of the log errors.
    """
    if len(points) < 3 or any(position <= 0 or not error for position, error in points):
        return None
    x = np.log([position for position, _ in points])
    y = np.log([float(error or 0.0) for _, error in points])
    spread = float(((x - x.mean()) ** 2).sum())
    if spread == 0:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    residual = y - y.mean() - slope * (x - x.mean())
    return Exponent(slope, math.sqrt(float((residual**2).sum()) / (len(points) - 2) / spread), len(points))


def layer_exponents(outputs: Sequence[ErrorBucket], states: Sequence[ErrorPoint], window: int) -> Exponents:
    """Exponents of a layer's errors from ``window`` on, where the first read copy or rounded state is used: before,
    errors are those of FP32's last bits, and no growth."""
    return Exponents(
        state=fit_exponent([(p.position, p.error) for p in states if p.position >= window]),
        output=fit_exponent([(b.middle, b.error) for b in outputs if b.start >= window]),
    )
