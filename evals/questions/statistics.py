"""What answers to questions allow one to say (numpy alone).

Answers come as matrices [questions, repeats] of scores in 0 to 1, NaN where there is none. Repeats of one question
are not independent, so a question with all its repeats is what is resampled. lm-eval's own standard error is that of
one arm's accuracy; two arms that answer the same questions are compared by their differences question by question,
whose spread is much smaller.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

MIN_QUESTIONS = 8
"""With fewer independent questions there is no honest interval, and none is given."""

Z975, Z800 = 1.959963984540054, 0.8416212335729143
"""Normal quantiles: of 95 % intervals, and of 80 % power."""

_DRAWS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Spread:
    """Where a paired difference's variance comes from, per question and answer, and what follows for its size.

    ``between``: variance of the questions' true differences. ``within``: variance of one repeat around its
    question's; None with one repeat, when the two can't be told apart.
    """

    standard_error: float
    between: float
    within: float | None
    questions: int
    repeats: float

    @property
    def detectable(self) -> float:
        """The difference that a run of this size finds in 8 of 10 runs, at 5 % two-sided."""
        return (Z975 + Z800) * self.standard_error

    def repeats_to_detect(self, difference: float) -> int | None:
        """Repeats with which ``difference`` is ``detectable`` on these questions; None where no number suffices.

        With one repeat, all variance is taken to be that of repeats, and the number is the least possible.
        """
        wanted = self.questions * (difference / (Z975 + Z800)) ** 2
        between, within = (self.between, self.within) if self.within is not None else (0.0, self.between)
        if within == 0.0 and between <= wanted:
            return 1
        return None if between >= wanted else max(1, math.ceil(within / (wanted - between)))


def of_questions(scores: Floats) -> Floats:
    """The mean over repeats of each question [questions]; NaN for a question without an answer."""
    answered = ~np.isnan(scores)
    count = answered.sum(axis=1)
    total = np.where(answered, scores, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def accuracy_interval(scores: Floats) -> tuple[float, float] | None:
    """The 95 % interval of the mean score: Wilson's, for as many independent answers as the repeats are worth.

    The number is that at which independent answers would vary as the questions' means do (Kish's effective sample
    size), between questions and questions × repeats. With one repeat this is Wilson's interval itself.
    """
    means = of_questions(scores)
    means = means[~np.isnan(means)]
    n = len(means)
    if n < MIN_QUESTIONS:
        return None
    answers = int((~np.isnan(scores)).sum())
    mean = float(means.mean())
    variance = float(means.var(ddof=1)) / n
    worth = float(answers) if variance == 0 else min(max(mean * (1 - mean) / variance, n), answers)
    centre = (mean + Z975**2 / (2 * worth)) / (1 + Z975**2 / worth)
    half = Z975 / (1 + Z975**2 / worth) * math.sqrt(max(mean * (1 - mean), 0) / worth + Z975**2 / (4 * worth**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def difference_interval(
    differences: Floats, repeats: int = 1, *, resamples: int = 4000, seed: int = 0
) -> tuple[float, float] | None:
    """The 95 % interval of the mean of per-question differences of scores [questions]: bootstrap over questions.

    Where hardly an answer changed, resampling what changed says too little: with none it would say that none can.
    So two questions are added before resampling, one better and one worse, each by as much as changed questions
    changed (root mean square; by one answer of ``repeats`` where none did). With one repeat the variance is then that
    of Bonett and Price's adjusted interval for paired proportions (2012).
    """
    values = differences[~np.isnan(differences)]
    if len(values) < MIN_QUESTIONS:
        return None
    values = _with_two_more(values, repeats)
    low, high = _bootstrap(values, resamples, seed)
    return max(-1.0, low), min(1.0, high)


def mean_interval(values: Floats, *, resamples: int = 4000, seed: int = 0) -> tuple[float, float] | None:
    """The 95 % interval of the mean of per-question differences of any size, such as lengths: bootstrap over questions.

    Two questions are added here too, as far above the mean and below it as those are that changed: otherwise four
    answers that grew, and none that shrank, would be a finding. Where nothing changed, the interval is zero wide.
    """
    values = values[~np.isnan(values)]
    if len(values) < MIN_QUESTIONS:
        return None
    mean, changed = values.mean(), values[values != 0]
    size = math.sqrt(float(((changed - mean) ** 2).mean())) if len(changed) else 0.0
    return _bootstrap(np.concatenate([values, [mean + size, mean - size]]), resamples, seed)


def mcnemar(better: int, worse: int) -> float:
    """The exact two-sided p-value: how often a fair coin would fall at least this unevenly. 1 where nothing changed.

    Over repeats, ``better`` and ``worse`` count questions that an arm answered right more often and less often.
    """
    n, k = better + worse, min(better, worse)
    tail = sum(math.comb(n, i) for i in range(k + 1))
    return min(1.0, 2 * tail / 2**n)


def spread(differences: Floats) -> Spread | None:
    """The spread of paired differences [questions, repeats]; None with fewer than MIN_QUESTIONS questions."""
    counts = (~np.isnan(differences)).sum(axis=1)
    differences = differences[counts > 0]
    counts = counts[counts > 0]
    n = len(differences)
    if n < MIN_QUESTIONS:
        return None
    means = of_questions(differences)
    variance = float(_with_two_more(means, differences.shape[1]).var(ddof=1))
    repeated = counts > 1
    if not repeated.any():
        return Spread(math.sqrt(variance / n), variance, None, n, 1.0)
    deviations = differences[repeated] - means[repeated, None]
    within = float(np.nansum(deviations**2) / (counts[repeated] - 1).sum())
    repeats = float(n / (1 / counts).sum())  # harmonic: what divides the variance within, on average
    return Spread(math.sqrt(variance / n), max(0.0, variance - within / repeats), within, n, repeats)


def unseen_share(questions: int) -> float:
    """The largest share of questions that may change, at 95 %, where none of ``questions`` did."""
    return 1 - 0.05 ** (1 / questions)


def _with_two_more(values: Floats, repeats: int) -> Floats:
    changed = values[values != 0]
    size = math.sqrt(float((changed**2).mean())) if len(changed) else 1.0 / repeats
    return np.concatenate([values, [size, -size]])


def _bootstrap(values: Floats, resamples: int, seed: int) -> tuple[float, float]:
    """2.5 % and 97.5 % quantiles of resampled means."""
    random, n = np.random.default_rng(seed), len(values)
    means = []
    at_once = max(1, _DRAWS_AT_ONCE // n)
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        means.append(values[random.integers(0, n, (rows, n))].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
