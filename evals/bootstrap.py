"""Confidence intervals for the mean of correlated per-token values (numpy alone).

Neighbouring tokens of one text are not independent: an interval that treats them so is too narrow, by a factor
of three and more at the correlations seen here. So whole blocks of neighbouring tokens are resampled, never
across the border of two documents, and the block is made as long as the data's own autocorrelation asks for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_BLOCK = 32
"""Tokens. Two default windows: inside one window the read error is one draw, so tokens of it belong together."""

MIN_BLOCKS = 8
"""With fewer independent blocks than this there is no honest interval, and none is given."""

_DRAWS_AT_ONCE = 1 << 22


def detrended(documents: Sequence[Floats], positions: Sequence[Floats]) -> list[Floats]:
    """The documents less their common trend over position, fitted on 1, log2(position + 16) and position.

    Divergence grows with position in some arms. Growth is no sampling error: every text is read from the same
    position on. Left in, it looks like a very long correlation and makes the interval several times too wide.
    """
    values, at = np.concatenate(documents), np.concatenate(positions)
    if len(values) < 16:
        return [d - values.mean() for d in documents]
    basis = np.stack([np.ones_like(at), np.log2(at + 16.0), at / max(float(at.max()), 1.0)], axis=1)
    residual = values - basis @ np.linalg.lstsq(basis, values, rcond=None)[0]
    return list(np.split(residual, np.cumsum([len(d) for d in documents])[:-1]))


def block_length(documents: Sequence[Floats], minimum: int = MIN_BLOCK) -> int:
    """Tokens per block for documents of mean zero: twice Politis and White's automatic choice.

    Politis and White (2004; corrected by Patton, Politis and White, 2009) balance bias against variance for the
    circular block bootstrap. Their length is doubled, because divergences have a heavy tail and an interval
    slightly too wide misleads nobody. At least ``minimum``; at most a document, and at most an eighth of all tokens
    so that there are blocks to draw from.
    """
    total, longest = sum(len(d) for d in documents), max(len(d) for d in documents)
    cap = max(1, min(longest, total // 8))
    lags = min(longest - 1, 3 * math.ceil(math.sqrt(total)))
    covariance = _autocovariance(documents, lags)
    if lags < 2 or covariance[0] <= 0:
        return min(minimum, cap)
    quiet = np.abs(covariance[1:] / covariance[0]) < 2 * math.sqrt(math.log10(total) / total)
    run_needed, run, last_loud = max(5, math.ceil(math.sqrt(math.log10(total)))), 0, lags
    for lag, is_quiet in enumerate(quiet, start=1):
        run = run + 1 if is_quiet else 0
        if run == run_needed:
            last_loud = max(lag - run_needed, 1)
            break
    bandwidth = min(2 * last_loud, lags)
    k = np.arange(1, bandwidth + 1)
    weight = np.where(k / bandwidth <= 0.5, 1.0, 2 * (1 - k / bandwidth))
    spectrum = covariance[0] + 2 * float((weight * covariance[1 : bandwidth + 1]).sum())
    slope = 2 * float((weight * k * covariance[1 : bandwidth + 1]).sum())
    if spectrum <= 0:
        return min(minimum, cap)
    length = (2 * slope**2 / (4 / 3 * spectrum**2)) ** (1 / 3) * total ** (1 / 3)
    return min(max(2 * math.ceil(length), minimum), cap)


def interval_of_mean(
    documents: Sequence[Floats], block: int, *, resamples: int = 1000, seed: int = 0, mean: float | None = None
) -> tuple[float, float] | None:
    """The 95 % percentile interval of the mean by circular block bootstrap inside each document.

    ``documents`` may be residuals; ``mean`` is then the mean they belong to. The spread is widened by Student's t
    for the number of blocks, as few blocks underestimate it. None where fewer than MIN_BLOCKS blocks fit.
    """
    documents = [d for d in documents if len(d)]
    total = sum(len(d) for d in documents)
    if not total or round(total / block) < MIN_BLOCKS:
        return None
    blocks = round(total / block)
    means = np.concatenate([_circular_block_means(d, min(block, len(d))) for d in documents])
    centre = float(np.concatenate(documents).mean())
    random = np.random.default_rng(seed)
    drawn: list[Floats] = []
    at_once = max(1, _DRAWS_AT_ONCE // blocks)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        drawn.append(means[random.integers(0, len(means), (rows, blocks))].mean(axis=1))
    low, high = np.quantile(np.concatenate(drawn), [0.025, 0.975]) - centre
    widen = _student_975(blocks - 1) / 1.959964 * math.sqrt(blocks / (blocks - 1))
    around = centre if mean is None else mean
    return float(around + low * widen), float(around + high * widen)


def _autocovariance(documents: Sequence[Floats], lags: int) -> Floats:
    sums, total = np.zeros(max(lags, 0) + 1), 0
    for document in documents:
        size = 1 << (2 * len(document)).bit_length()
        spectrum = np.fft.rfft(document, size)
        part = np.fft.irfft(spectrum * spectrum.conj(), size)[: min(lags + 1, len(document))]
        sums[: len(part)] += part
        total += len(document)
    return sums / total


def _circular_block_means(document: Floats, block: int) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(np.concatenate([document, document[:block]]))])
    return (running[block : block + len(document)] - running[: len(document)]) / block


def _student_975(freedom: int) -> float:
    """The 97.5 % quantile of Student's t (Cornish and Fisher's expansion; within 2 % from 3 degrees of freedom)."""
    z, n = 1.959964, float(freedom)
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )
