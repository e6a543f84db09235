"""Divergences, intervals, growth: against hand computation, SciPy, and simulations whose truth is known."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
from fake_results import correlated
from scipy.special import rel_entr
from scipy.stats import linregress
from torch.nn.functional import cross_entropy

from quantize_state.evals.bootstrap import block_length, detrended, interval_of_mean
from quantize_state.evals.buckets import doubling_edges
from quantize_state.evals.growth import fit_exponent, layer_exponents
from quantize_state.evals.metrics import KLMeter, LayerErrorMeter
from quantize_state.evals.result import ErrorBucket, ErrorPoint
from quantize_state.quant.errors import InvalidValueError


def logits(
    batch: int, tokens: int, vocabulary: int, noise: float = 0.3, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    reference = 3 * torch.randn(batch, tokens, vocabulary, generator=random)
    return reference, reference + noise * torch.randn(batch, tokens, vocabulary, generator=random)


def measured(
    reference: torch.Tensor, arm: torch.Tensor, targets: torch.Tensor | None = None, chunk: int = 0
) -> KLMeter:
    meter = KLMeter(resamples=50)
    chunk = chunk or reference.shape[1]
    for start in range(0, reference.shape[1], chunk):
        part = slice(start, start + chunk)
        meter.update(reference[:, part], arm[:, part], None if targets is None else targets[:, part], start)
    return meter


# divergence


def test_kl_by_hand():
    p, q = [0.5, 0.25, 0.25], [0.25, 0.25, 0.5]
    meter = measured(torch.tensor(p).log().view(1, 1, 3), torch.tensor(q).log().view(1, 1, 3))
    by_hand = 0.5 * math.log(2) + 0.25 * math.log(0.5)
    assert meter.per_token("kl")[0][0] == pytest.approx(by_hand, rel=1e-6)
    skewed = measured(torch.tensor([0.9, 0.1]).log().view(1, 1, 2), torch.tensor([0.5, 0.5]).log().view(1, 1, 2))
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    reverse = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert skewed.per_token("kl")[0][0] == pytest.approx(forward, rel=1e-6)
    assert skewed.per_token("reverse")[0][0] == pytest.approx(reverse, rel=1e-6)


@pytest.mark.parametrize("noise", [3.0, 0.1, 1e-3])
def test_kl_and_its_reverse_agree_with_scipy(noise):
    reference, arm = logits(2, 40, 97, noise)
    meter = measured(reference, arm, chunk=16)
    p, q = (torch.softmax(x.double(), -1).numpy() for x in (reference, arm))
    np.testing.assert_allclose(np.stack(meter.per_token("kl")), rel_entr(p, q).sum(-1), rtol=1e-7)
    np.testing.assert_allclose(np.stack(meter.per_token("reverse")), rel_entr(q, p).sum(-1), rtol=1e-7)


def test_tiny_divergences_are_right_and_never_negative():
    """Far below float32's rounding, where Σ p·(log p − log q) is noise around zero and half of it negative."""
    random = torch.Generator().manual_seed(1)
    reference = torch.randn(1, 200, 50, generator=random, dtype=torch.float64)
    shift = 1e-9 * torch.randn(1, 200, 50, generator=random, dtype=torch.float64)
    kl = measured(reference, reference + shift).per_token("kl")[0]
    p = torch.softmax(reference, -1)
    expected = (0.5 * ((p * shift**2).sum(-1) - (p * shift).sum(-1) ** 2))[0].numpy()
    assert (kl > 0).all()
    np.testing.assert_allclose(kl, expected, rtol=1e-4)


def test_identical_logits_diverge_by_exactly_zero():
    reference, _ = logits(2, 30, 11)
    evidence = measured(reference, reference.clone()).result()
    assert evidence.kl.mean == evidence.kl.max == evidence.kl.reverse_mean == 0.0
    assert evidence.kl.ci95 == (0.0, 0.0)
    assert evidence.top1_agreement.rate == 1.0


def test_extreme_and_ruled_out_tokens():
    inf = math.inf
    reference = torch.tensor([[[0.0, -inf, 1.0], [900.0, 0.0, -900.0]]])
    arm = torch.tensor([[[0.5, -inf, 1.0], [-900.0, 0.0, 900.0]]])
    kl = measured(reference, arm).per_token("kl")[0]
    p, q = torch.softmax(reference[0, 0], -1).double().numpy(), torch.softmax(arm[0, 0], -1).double().numpy()
    assert kl[0] == pytest.approx(rel_entr(p, q).sum(), rel=1e-5)
    assert kl[1] == pytest.approx(1800.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_are_an_error_that_says_where(bad):
    reference, arm = logits(2, 20, 7)
    arm[1, 13, 3] = bad
    with pytest.raises(InvalidValueError, match="sequence 1 at position 113"):
        KLMeter().update(reference, arm, None, 100)


def test_a_token_that_only_the_arm_rules_out_is_an_error():
    reference, arm = logits(1, 4, 7)
    arm[0, 2, 1] = -math.inf
    with pytest.raises(InvalidValueError, match="rule out different tokens"):
        KLMeter().update(reference, arm, None, 0)


def test_shapes_that_do_not_fit():
    reference, arm = logits(2, 20, 7)
    with pytest.raises(InvalidValueError, match="batch, tokens, vocabulary"):
        KLMeter().update(reference, arm[:, :10], None, 0)
    with pytest.raises(InvalidValueError, match="targets"):
        KLMeter().update(reference, arm, torch.zeros(2, 19, dtype=torch.long), 0)
    with pytest.raises(InvalidValueError, match="no token"):
        KLMeter().result()


def test_chunks_in_any_order_and_batches_apart_give_the_same():
    reference, arm = logits(4, 64, 13)
    whole = measured(reference, arm).result().kl
    meter = KLMeter(resamples=50)
    for row in (2, 0):
        for start in (32, 0):
            part = (slice(row, row + 2), slice(start, start + 32))
            meter.update(reference[part], arm[part], None, start, sequence=row)
    assert meter.result().kl == whole


def test_a_missing_chunk_is_noticed():
    reference, arm = logits(1, 64, 13)
    meter = KLMeter()
    meter.update(reference[:, :16], arm[:, :16], None, 0)
    meter.update(reference[:, 32:], arm[:, 32:], None, 32)
    with pytest.raises(InvalidValueError, match="position 32; 16 was expected"):
        meter.result()


# agreement, perplexity


def test_ties_are_counted_apart():
    reference = torch.tensor([[[1.0, 0, 0], [1.0, 1.0, 0], [1.0, 0, 0], [0, 0, 1.0]]])
    arm = torch.tensor([[[2.0, 0, 0], [1.0, 0, 0], [3.0, 3.0, 0], [0, 1.0, 0]]])
    top1 = measured(reference, arm).result().top1_agreement
    assert (top1.rate, top1.ties, top1.tokens) == (0.5, 2, 2)
    all_tied = measured(torch.zeros(1, 3, 2), torch.zeros(1, 3, 2)).result().top1_agreement
    assert (all_tied.rate, all_tied.ties, all_tied.tokens) == (None, 3, 0)


def test_ties_are_seen_in_the_logits_own_precision():
    """Two logits that differ in float32 and not in bfloat16 are a tie for a bfloat16 model."""
    close = torch.tensor([[[1.0, 1.001, 0.0]]])
    assert measured(close, close).result().top1_agreement.ties == 0
    assert measured(close.bfloat16(), close.bfloat16()).result().top1_agreement.ties == 1


def test_perplexity_ratio_and_bits():
    reference, arm = logits(2, 50, 17)
    targets = torch.randint(0, 17, (2, 50), generator=torch.Generator().manual_seed(3))
    targets[:, -1] = -100
    ppl = measured(reference, arm, targets, chunk=20).result(bytes_per_token=2.0).ppl
    scored = [cross_entropy(x[:, :-1].double().flatten(0, 1), targets[:, :-1].flatten()) for x in (reference, arm)]
    assert ppl.reference == pytest.approx(scored[0].exp().item(), rel=1e-9)
    assert ppl.arm == pytest.approx(scored[1].exp().item(), rel=1e-9)
    assert ppl.ratio == pytest.approx((scored[1] - scored[0]).exp().item(), rel=1e-9)
    assert ppl.bits_per_token == pytest.approx(scored[1].item() / math.log(2), rel=1e-9)
    assert ppl.bits_per_byte == pytest.approx(ppl.bits_per_token / 2)
    assert ppl.ratio_ci95 is None or ppl.ratio_ci95[0] <= ppl.ratio <= ppl.ratio_ci95[1]
    assert measured(reference, arm).result().ppl is None


def test_quantiles_and_buckets():
    reference, arm = logits(3, 100, 9)
    meter = measured(reference, arm)
    kl, values = meter.result().kl, np.stack(meter.per_token("kl"))
    assert (kl.mean, kl.max, kl.tokens) == (pytest.approx(values.mean()), values.max(), 300)
    assert kl.p999 == pytest.approx(np.quantile(values, 0.999))
    assert [(b.start, b.stop, b.count) for b in kl.by_position] == [
        (0, 16, 48),
        (16, 32, 48),
        (32, 64, 96),
        (64, 100, 108),
    ]
    assert [b.mean for b in kl.by_position] == [
        pytest.approx(values[:, b.start : b.stop].mean()) for b in kl.by_position
    ]


def test_doubling_edges():
    assert doubling_edges(0) == []
    assert doubling_edges(5, 16) == [(0, 5)]
    assert doubling_edges(64, 16) == [(0, 16), (16, 32), (32, 64)]
    assert doubling_edges(4, 1) == [(0, 1), (1, 2), (2, 4)]


# intervals


def coverage(
    block: int | None, *, phi: float, repeats: int = 240, tokens: int = 3000, skewed: bool = False
) -> tuple[float, float]:
    """How often the interval holds the truth, and its median length; ``block=None`` lets the data choose."""
    random = np.random.default_rng(7)
    texts, truth = correlated(random, (repeats, tokens), phi), 0.0
    if skewed:
        texts, truth = np.exp(texts - 0.5), 1.0
    held, lengths = 0, []
    for values in texts:
        residuals = detrended([values], [np.arange(tokens, dtype=float)])
        chosen = block or block_length(residuals)
        low, high = interval_of_mean(residuals, chosen, resamples=300, mean=float(values.mean()))
        held += low <= truth <= high
        lengths.append(high - low)
    return held / repeats, float(np.median(lengths))


def test_block_interval_covers_where_one_for_independent_tokens_does_not():
    blocks, _ = coverage(None, phi=0.9)
    independent, _ = coverage(1, phi=0.9)
    assert 0.88 <= blocks <= 0.99
    assert independent < 0.55


def test_block_interval_of_independent_tokens_is_not_wasteful():
    covered, length = coverage(None, phi=0.0)
    assert 0.90 <= covered <= 0.99
    assert length < 1.15 * 2 * 1.96 / math.sqrt(3000)


def test_block_interval_of_skewed_correlated_tokens():
    covered, _ = coverage(None, phi=0.8, skewed=True)
    assert covered >= 0.87


def test_growth_with_position_does_not_widen_the_interval():
    random = np.random.default_rng(3)
    noise, position = random.standard_normal(4096), np.arange(4096.0)
    flat = interval_of_mean(*_chosen(noise, position))
    growing = interval_of_mean(*_chosen(noise + 20 * position / 4096, position))
    assert growing[1] - growing[0] == pytest.approx(flat[1] - flat[0], rel=0.25)


def _chosen(values, position):
    residuals = detrended([values], [position])
    return residuals, block_length(residuals)


def test_documents_are_kept_apart():
    """Blocks never cross a border: flat documents of 0 and 1 give whole blocks of either and nothing between."""
    documents = [np.full(50, float(i % 2)) for i in range(64)]
    low, high = interval_of_mean(documents, 50, resamples=4000)
    coins = 2 * 1.96 * math.sqrt(0.25 / 64)  # blocks across borders would spread less, by the square root of three
    assert high - low == pytest.approx(coins, rel=0.1)
    assert block_length([d - 0.5 for d in documents]) == 50  # and the data ask for whole documents


def test_the_meter_takes_blocks_as_long_as_its_divergences_are_correlated():
    """Logits that differ by a slowly varying amount: the interval must be that of few independent pieces."""
    size = torch.from_numpy(correlated(np.random.default_rng(0), (1, 4096), 0.98)).exp()
    reference = torch.zeros(1, 4096, 2, dtype=torch.float64)
    meter = KLMeter()
    meter.update(reference, reference + size.unsqueeze(-1) * torch.tensor([0.05, -0.05]), None, 0)
    kl, values = meter.result().kl, meter.per_token()[0]
    as_if_independent = 2 * 1.96 * values.std() / math.sqrt(len(values))
    assert kl.bootstrap.block >= 100
    assert kl.bootstrap.blocks == round(4096 / kl.bootstrap.block)
    assert kl.ci95[0] < kl.mean < kl.ci95[1]
    assert kl.ci95[1] - kl.ci95[0] > 4 * as_if_independent


def test_same_seed_same_interval_and_too_few_blocks_none():
    values = [np.random.default_rng(0).standard_normal(1000)]
    assert interval_of_mean(values, 50, seed=4) == interval_of_mean(values, 50, seed=4)
    assert interval_of_mean(values, 50, seed=4) != interval_of_mean(values, 50, seed=5)
    assert interval_of_mean(values, 400) is None
    assert interval_of_mean([], 10) is None


def test_bootstrap_of_16k_tokens_takes_less_than_a_second():
    values = correlated(np.random.default_rng(0), (4, 4096), 0.9)
    began = time.perf_counter()
    residuals = detrended(list(values), [np.arange(4096.0)] * 4)
    interval_of_mean(residuals, block_length(residuals), resamples=1000)
    assert time.perf_counter() - began < 1.0


# growth and layers


@pytest.mark.parametrize("power", [-0.5, 0.0, 0.5, 1.0])
def test_exponent_of_a_power_law(power):
    fitted = fit_exponent([(x, 3e-4 * x**power) for x in (16, 32, 64, 128, 256)])
    assert fitted.value == pytest.approx(power, abs=1e-12)
    assert fitted.stderr == pytest.approx(0, abs=1e-12)
    assert fitted.points == 5


def test_exponent_and_its_error_agree_with_scipy():
    random = np.random.default_rng(0)
    x = np.array([16.0, 32, 64, 128, 256, 512])
    y = 1e-3 * x**0.4 * np.exp(0.2 * random.standard_normal(6))
    fitted, expected = fit_exponent(list(zip(x, y, strict=True))), linregress(np.log(x), np.log(y))
    assert fitted.value == pytest.approx(expected.slope)
    assert fitted.stderr == pytest.approx(expected.stderr)


def test_no_exponent_without_growth_to_fit():
    assert fit_exponent([(16, 1.0), (32, 2.0)]) is None
    assert fit_exponent([(16, 1.0), (32, 0.0), (64, 2.0)]) is None
    assert fit_exponent([(16, 1.0), (32, None), (64, 2.0)]) is None
    assert fit_exponent([(16, 1.0), (16, 2.0), (16, 3.0)]) is None


def test_layer_errors_by_bucket_whatever_the_chunks():
    random = torch.Generator().manual_seed(0)
    exact = torch.randn(2, 100, 3, 5, generator=random)
    arm = exact + 0.01 * torch.randn(2, 100, 3, 5, generator=random)
    meters = []
    for chunk in (100, 7):
        meter = LayerErrorMeter()
        for start in range(0, 100, chunk):
            meter.update_output("layers.0", start, arm[:, start : start + chunk], exact[:, start : start + chunk])
        meters.append(meter.result({"layers.0": "gdn"}, {"layers.0": "decoupled-nvfp4"})[0])
    for layer in meters:
        assert (layer.name, layer.family, layer.policy) == ("layers.0", "gdn", "decoupled-nvfp4")
        assert layer.output_error == pytest.approx(((arm - exact).norm() / exact.norm()).item(), rel=1e-5)
        assert [(b.start, b.stop) for b in layer.output_error_by_position] == doubling_edges(100)
        for b in layer.output_error_by_position:
            part = slice(b.start, b.stop)
            expected = (arm[:, part] - exact[:, part]).norm() / exact[:, part].norm()
            assert b.error == pytest.approx(expected.item(), rel=1e-5)


def test_state_errors_and_their_growth():
    random = torch.Generator().manual_seed(0)
    meter = LayerErrorMeter(window=16)
    for position in (8, 16, 32, 64, 128):
        exact, direction = (torch.randn(1, 2, 4, 6, generator=random) for _ in range(2))
        direction = direction / direction.norm() * exact.norm()
        size = 1e-3 * position**0.5 if position >= 16 else 5.0  # the first window is left out of the fit
        meter.update_state("a", position, exact + size * direction, exact)
        meter.update_state("b", position, exact, exact)
    a, b = meter.result({}, {})
    assert [p.error for p in a.state_error_by_position[1:]] == [
        pytest.approx(1e-3 * x**0.5, rel=1e-4) for x in (16, 32, 64, 128)
    ]
    assert a.exponents.state.value == pytest.approx(0.5, abs=1e-4)
    assert b.state_error == 0.0 and b.exponents.state is None


def test_an_error_against_zero_or_nan_is_unknown_not_a_number():
    meter = LayerErrorMeter()
    meter.update_state("a", 1, torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    meter.update_state("b", 1, torch.full((1, 1, 2, 2), math.nan), torch.ones(1, 1, 2, 2))
    meter.update_state("c", 1, torch.zeros(1, 1, 2, 2), torch.zeros(1, 1, 2, 2))
    assert [layer.state_error for layer in meter.result({}, {})] == [None, None, 0.0]


def test_growth_is_looked_for_from_the_arms_own_window_on() -> None:
    outputs = [ErrorBucket(n, 2 * n, 1e-7 if n < 64 else 0.01) for n in (16, 32, 64, 128, 256, 512)]
    states = [ErrorPoint(n, 1e-7 if n < 64 else 0.02) for n in (16, 64, 128, 256)]
    found = layer_exponents(outputs, states, 64)
    assert found.output is not None and found.state is not None
    assert abs(found.output.value) < 1e-9 > abs(found.state.value)
    blurred = layer_exponents(outputs, states, 16)
    assert blurred.output is not None and blurred.output.value > 1
