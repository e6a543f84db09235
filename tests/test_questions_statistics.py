"""Statistics of answers: against scipy, against cases done by hand, and by simulation under no difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from quantize_state.evals.questions import statistics as s

CLOSE = 1e-12  # the same formulas in float64
BOOTSTRAP = 0.1  # relative: an interval's width from 4,000 resamples against the normal formula, with 200 questions
COVERAGE = (0.93, 0.985)  # of nominal 0.95, in 500 simulated runs (standard error 0.01); slightly wide by design


def scores(*rows: list[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float64)


# accuracy


@pytest.mark.parametrize(("right", "n"), [(0, 20), (7, 20), (20, 20), (121, 198)])
def test_accuracy_of_one_repeat_is_wilsons_interval(right, n):
    table = np.array([[1.0]] * right + [[0.0]] * (n - right))
    expected = stats.binomtest(right, n).proportion_ci(method="wilson")
    assert s.accuracy_interval(table) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_repeats_that_always_agree_are_worth_one():
    one = np.array([[1.0]] * 30 + [[0.0]] * 20)
    four = np.repeat(one, 4, axis=1)
    low, high = s.accuracy_interval(four)
    expected = stats.binomtest(30, 50).proportion_ci(method="wilson")
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=1e-9)


def test_repeats_that_vary_within_questions_are_worth_more():
    random = np.random.default_rng(0)
    table = (random.random((100, 16)) < 0.6).astype(float)
    low, high = s.accuracy_interval(table)
    independent = stats.binomtest(int(table.sum()), table.size).proportion_ci(method="wilson")
    assert high - low == pytest.approx(independent.high - independent.low, rel=0.25)


def test_missing_answers_are_left_out_and_few_questions_have_no_interval():
    table = np.array([[1.0, math.nan], [0.0, 1.0], [math.nan, math.nan]])
    assert s.of_questions(table)[:2].tolist() == [1.0, 0.5]
    assert math.isnan(s.of_questions(table)[2])
    assert s.accuracy_interval(table) is None
    assert s.difference_interval(np.zeros(s.MIN_QUESTIONS - 1)) is None
    assert s.mean_interval(np.zeros(s.MIN_QUESTIONS - 1)) is None
    assert s.spread(np.zeros((s.MIN_QUESTIONS - 1, 1))) is None


# McNemar


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 0), (6, 0), (3, 11), (40, 60), (7, 7)])
def test_mcnemar_is_scipys_exact_binomial(better, worse):
    expected = stats.binomtest(better, better + worse).pvalue if better + worse else 1.0
    assert s.mcnemar(better, worse) == pytest.approx(expected, abs=CLOSE)


def test_mcnemar_by_hand():
    assert s.mcnemar(1, 4) == 2 * (1 + 5) / 32  # no more than 1 of 5 coins, twice


# differences


def test_the_interval_of_one_repeat_has_the_width_of_bonett_and_price():
    better, worse, n = 12, 30, 200
    d = np.array([1.0] * better + [-1.0] * worse + [0.0] * (n - better - worse))
    p, q = (better + 1) / (n + 2), (worse + 1) / (n + 2)
    half = s.Z975 * math.sqrt((p + q - (p - q) ** 2) / (n + 2))
    low, high = s.difference_interval(d)
    assert (high - low) / 2 == pytest.approx(half, rel=BOOTSTRAP)
    assert (high + low) / 2 == pytest.approx((better - worse) / n, abs=half * BOOTSTRAP)


def test_no_change_in_any_answer_is_not_certainty():
    low, high = s.difference_interval(np.zeros(198))
    assert low < -0.005 < 0.005 < high
    four = s.difference_interval(np.zeros(198), 4)
    assert four == pytest.approx((low / 4, high / 4), rel=BOOTSTRAP)
    one = np.zeros(198)
    one[0] = -0.25  # one answer of four: no narrower than none
    assert s.difference_interval(one, 4)[0] < four[0]
    assert s.unseen_share(198) == pytest.approx(1 - 0.05 ** (1 / 198))


def test_the_interval_agrees_with_exact_mcnemar_where_few_answers_changed():
    """Five against none is p = 0.06 and six p = 0.03; plain resampling calls three against none significant."""
    for worse, excluded in ((3, False), (4, False), (5, False), (7, True), (9, True)):
        d = np.array([-1.0] * worse + [0.0] * (198 - worse))
        assert (s.difference_interval(d)[1] < 0) == excluded, worse


def test_repeats_belong_to_their_question():
    """A question with all its repeats is one draw: repeats that agree narrow nothing."""
    random = np.random.default_rng(1)
    one = random.choice([-1.0, 0.0, 1.0], p=[0.1, 0.8, 0.1], size=(200, 1))
    many = np.repeat(one, 8, axis=1)
    assert s.difference_interval(s.of_questions(many)) == s.difference_interval(one[:, 0])
    assert s.spread(many).standard_error == pytest.approx(s.spread(one).standard_error)


@pytest.mark.parametrize(("repeats", "changing"), [(1, 0.02), (1, 0.15), (4, 0.05)])
def test_under_no_difference_95_of_100_intervals_cover_zero(repeats, changing):
    """198 questions of different difficulty; each answer changes with a probability, either way alike."""
    random, covered, runs = np.random.default_rng(2), 0, 500
    for run in range(runs):
        difficulty = random.beta(0.3, 2.0, (198, 1))  # most questions hardly ever change, some often do
        flips = random.random((198, repeats)) < difficulty * changing / 0.13
        d = np.where(flips, random.choice([-1.0, 1.0], size=(198, repeats)), 0.0)
        low, high = s.difference_interval(s.of_questions(d), resamples=800, seed=run)
        covered += low <= 0 <= high
    assert COVERAGE[0] <= covered / runs <= (COVERAGE[1] if changing > 0.02 else 1.0)


def test_the_detectable_difference_is_found_in_8_of_10_runs():
    random = np.random.default_rng(3)
    n, changing, runs = 400, 0.2, 400
    blank = random.choice([-1.0, 0.0, 1.0], p=[changing / 2, 1 - changing, changing / 2], size=(n, 1))
    effect = s.spread(blank).detectable
    p = [changing / 2 + effect / 2, 1 - changing, changing / 2 - effect / 2]
    found = 0
    for run in range(runs):
        d = random.choice([-1.0, 0.0, 1.0], p=p, size=n)
        found += s.difference_interval(d, resamples=500, seed=run)[1] < 0
    assert 0.72 <= found / runs <= 0.88


def test_questions_that_differ_are_not_taken_for_many_answers():
    """An arm that helps some questions and harms others: answers of one question go together, and are one draw."""
    random, runs, n, repeats = np.random.default_rng(6), 400, 60, 8
    clustered = naive = 0
    for run in range(runs):
        chance = random.choice([0.0, 0.5], p=[0.7, 0.3], size=(n, 1)) * random.choice([-1, 1], size=(n, 1))
        d = np.sign(chance) * (random.random((n, repeats)) < np.abs(chance))
        low, high = s.difference_interval(s.of_questions(d), repeats, resamples=500, seed=run)
        clustered += low <= 0 <= high
        low, high = s.difference_interval(d.reshape(-1), resamples=500, seed=run)
        naive += low <= 0 <= high
    assert COVERAGE[0] <= clustered / runs <= COVERAGE[1]
    assert naive / runs < 0.8, "a check that can't fail: answers taken one by one cover as well"


def test_under_no_difference_mcnemar_errs_in_at_most_5_of_100():
    random, runs = np.random.default_rng(7), 4000
    changed = random.binomial(198, 0.2, runs)
    better = random.binomial(changed, 0.5)
    errs = sum(s.mcnemar(b, n - b) < 0.05 for b, n in zip(better.tolist(), changed.tolist(), strict=True)) / runs
    assert 0.015 < errs <= 0.05, "an exact test is careful, but not asleep"


@pytest.mark.parametrize("repeats", [1, 4])
def test_95_of_100_intervals_cover_the_accuracy_of_all_such_questions(repeats):
    random, covered, runs = np.random.default_rng(8), 0, 1000
    for _ in range(runs):
        chance = random.beta(1.0, 0.8, (100, 1))  # questions of all difficulties, from a set with mean 1 / 1.8
        low, high = s.accuracy_interval((random.random((100, repeats)) < chance).astype(float))
        covered += low <= 1 / 1.8 <= high
    assert COVERAGE[0] <= covered / runs <= COVERAGE[1]


def test_with_as_many_repeats_as_it_says_a_point_is_found_in_8_of_10_runs():
    random, n, between, within, runs = np.random.default_rng(9), 198, 0.001, 0.05, 400

    def answers(mean: float, repeats: int) -> np.ndarray:
        of_question = random.normal(mean, math.sqrt(between), (n, 1))
        return of_question + random.normal(0, math.sqrt(within), (n, repeats))

    exact = s.Spread(0.0, between, within, n, 4.0).repeats_to_detect(0.01)
    asked = [s.spread(answers(0, 8)).repeats_to_detect(0.01) for _ in range(40)]
    assert 0.6 * exact <= np.median([x or math.inf for x in asked]) <= 1.6 * exact
    found = 0
    for run in range(runs):
        _, high = s.difference_interval(s.of_questions(answers(-0.01, exact)), exact, resamples=500, seed=run)
        found += high < 0
    assert 0.74 <= found / runs <= 0.86


def test_the_spread_tells_questions_from_repeats():
    random = np.random.default_rng(4)
    between, within, n, repeats = 0.04, 0.25, 4000, 5
    d = random.normal(0, math.sqrt(between), (n, 1)) + random.normal(0, math.sqrt(within), (n, repeats))
    found = s.spread(d)
    assert found.between == pytest.approx(between, rel=0.15)
    assert found.within == pytest.approx(within, rel=0.05)
    assert found.standard_error == pytest.approx(math.sqrt((between + within / repeats) / n), rel=0.03)
    ragged = d.copy()
    ragged[::2, 1:] = math.nan  # half of the questions have one repeat
    assert s.spread(ragged).within == pytest.approx(within, rel=0.05)
    assert s.spread(ragged).repeats == pytest.approx(1 / (0.5 + 0.5 / repeats), rel=1e-6)


def test_repeats_to_detect_by_hand():
    wanted = 198 * (0.01 / (s.Z975 + s.Z800)) ** 2  # variance per question at which one point is detectable
    few = s.Spread(1.0, between=0.0, within=wanted * 7.5, questions=198, repeats=4)
    assert few.repeats_to_detect(0.01) == 8
    half = s.Spread(1.0, between=wanted / 2, within=wanted, questions=198, repeats=4)
    assert half.repeats_to_detect(0.01) == 2
    never = s.Spread(1.0, between=wanted * 1.01, within=0.1, questions=198, repeats=4)
    assert never.repeats_to_detect(0.01) is None
    one = s.Spread(1.0, between=wanted * 2.5, within=None, questions=198, repeats=1)
    assert one.repeats_to_detect(0.01) == 3
    assert few.detectable == pytest.approx(s.Z975 + s.Z800)


def test_lengths_are_compared_question_by_question():
    random = np.random.default_rng(5)
    reference = random.lognormal(5, 1, 300)
    arm = reference + random.normal(12, 30, 300)
    low, high = s.mean_interval(arm - reference)
    expected = stats.t.interval(0.95, 299, (arm - reference).mean(), stats.sem(arm - reference))
    assert (low, high) == pytest.approx(expected, abs=0.5)
    assert s.mean_interval(np.zeros(50)) == (0.0, 0.0)


def test_a_few_longer_answers_are_no_finding():
    """As for scores: five against none is p = 0.06, and plain resampling calls four of them significant."""
    for longer, excluded in ((3, False), (5, False), (6, True), (8, True)):
        d = np.array([40.0] * longer + [0.0] * (198 - longer))
        assert (s.mean_interval(d)[0] > 0.05) == excluded, longer  # a tenth of a token is what reports show


@pytest.mark.parametrize("changing", [0.05, 0.5])
def test_under_no_difference_95_of_100_intervals_of_lengths_cover_zero(changing):
    random, covered, runs = np.random.default_rng(10), 0, 1000
    for run in range(runs):
        size = random.lognormal(3, 0.6, 198) * random.choice([-1.0, 1.0], 198)  # some answers grow or shrink a lot
        low, high = s.mean_interval(np.where(random.random(198) < changing, size, 0.0), resamples=1000, seed=run)
        covered += low <= 0 <= high
    assert COVERAGE[0] <= covered / runs <= (COVERAGE[1] if changing > 0.1 else 1.0)
