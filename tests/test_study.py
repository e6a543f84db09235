"""Controls of the study: each does what its docstring says, and injected arms are the arms that they stand for."""

import pytest
import torch

from quantize_state import evaluate
from quantize_state.evals.error_law import Reads
from quantize_state.evals.injected import Injected
from quantize_state.evals.models import load_model
from quantize_state.evals.study import controls as c
from quantize_state.quant.codec import fake_quantize
from quantize_state.quant.errors import InvalidValueError

SAME = 0.03
"""Relative, in KL over four windows: the same arithmetic summed in another order flips a code now and then."""


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-gdn", device="cpu")


@pytest.fixture(scope="module")
def reads():
    """States of low rank plus noise whose columns differ in size, read along few directions."""
    rng = torch.Generator().manual_seed(3)
    randn = lambda *shape: torch.randn(*shape, generator=rng)  # noqa: E731
    size = torch.logspace(-0.5, 0.5, 64)[torch.randperm(64, generator=rng)]
    states = (randn(6, 1, 2, 32, 3) @ randn(6, 1, 2, 3, 64) + randn(6, 1, 2, 32, 64)) * size
    theta = (randn(6, 1, 2, 16, 4) @ randn(2, 4, 64) + 0.3 * randn(6, 1, 2, 16, 64)) / size
    return Reads("layer", states, theta, True)


def error(reads, reader):
    return float(reads.error(reader).square().sum())


PLAIN = c.rounded(c.plain("nvfp4"))
BEST = c.plain("nvfp4", "mse")


def test_each_control_helps_where_it_should(reads):
    best = error(reads, c.rounded(BEST))
    assert error(reads, c.two_axis(BEST)) < 0.7 * best, "columns differ tenfold in size"
    ranks = [error(reads, c.low_rank(BEST, rank)) for rank in (1, 3)]
    assert ranks[1] < ranks[0] < best and ranks[1] < 0.5 * best
    assert error(reads, c.weighted(c.levels(c.E2M1))) < error(reads, c.rounded(c.levels(c.E2M1)))
    assert error(reads, c.feedback()) < 0.5 * best, "reads look along four directions of 64"


def test_sixteen_levels_suit_normal_numbers():
    states = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))[None, None, None]
    loss = {
        name: float((rounding(states, None) - states).square().mean())
        for name, rounding in {
            "nvfp4": c.plain("nvfp4"),
            "e2m1": c.levels(c.E2M1),
            "int4": c.levels(c.INT4, signed=True),
            "nl4": c.levels(c.NL4),
            "one scale": c.levels(c.NL4, shifts=(1.0,)),
        }.items()
    }
    assert loss["nl4"] < 0.6 * loss["nvfp4"]
    assert loss["nl4"] < loss["int4"] < loss["e2m1"] < loss["nvfp4"]
    assert loss["nl4"] < loss["one scale"]


def test_no_control_beats_the_levels_it_rounds_to(reads):
    """All but low rank and scales per row or column end on the format's own values."""
    grid = torch.tensor(c.E2M1)
    for reader in (c.feedback(), c.weighted(c.levels(c.E2M1))):
        blocks = reader(reads).unflatten(-1, (-1, 16))
        top = blocks.abs().amax(-1, keepdim=True)
        fits = torch.stack(
            [(blocks / (top / t) - c._nearest(blocks / (top / t), grid)).abs().amax(-1) for t in grid[8:]]
        )
        assert float(fits.amin(0).max()) < 1e-4


def test_rotations_undo_themselves_and_scales_fold_back(reads):
    exact = lambda states, weights: states  # noqa: E731
    for reader in (
        c.rounded(c.rotated(exact)),
        c.rounded(c.rotated_values(exact)),
        c.low_rank(exact, 2),
        c.two_axis(exact),
        c.two_axis(exact, rows=True, balanced=False),
    ):
        assert torch.allclose(reader(reads), reads.states, atol=1e-4 * float(reads.states.abs().max()))


def test_read_weights_know_earlier_windows_alone(reads):
    moments = c.ReadWeights()
    first = moments(reads)
    theta = reads.theta[..., :-1, :]
    expected = torch.einsum("wbhlk,wbhlj->hkj", theta, theta) / (6 * 15)
    assert torch.allclose(first, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(moments(Reads("layer", reads.states, 100 * reads.theta, True)), first)
    both = (first + 100**2 * first) / 2
    assert torch.allclose(moments(reads), both, rtol=1e-4, atol=1e-2), "the mean of both calls before"


def test_injected_arms_are_the_arms_they_stand_for(loaded):
    nvfp4 = lambda x: fake_quantize(x, "nvfp4", check_finite=False)  # noqa: E731
    arms = {
        "decoupled-nvfp4": "decoupled-nvfp4",
        "read": Injected.read(16, lambda: PLAIN, 0.5625),
        "coupled-nvfp4-w16": "coupled-nvfp4-w16",
        "coupled": Injected.coupled(16, nvfp4, None, 0.5625, 0.0),
        "feedback": Injected.coupled(16, nvfp4, nvfp4, 0.5625, 0.5625),
        "all kept": Injected.coupled(16, nvfp4, lambda x: x, 0.5625, 4.0),
    }
    value = {arm.name: arm for arm in evaluate(loaded, arms, tokens=72, together=6).arms}
    for injected, real in (("read", "decoupled-nvfp4"), ("coupled", "coupled-nvfp4-w16")):
        assert value[injected].kl.mean == pytest.approx(value[real].kl.mean, rel=SAME)
        assert value[injected].bytes_per_element == value[real].bytes_per_element
        first = [value[name].layers[0].output_error for name in (injected, real)]
        assert first[0] == pytest.approx(first[1], rel=1e-3)
    kept, read = (value[name].layers[0].output_error for name in ("all kept", "decoupled-nvfp4"))
    assert kept == pytest.approx(read, rel=0.01), "with all that rounding left out, the recurrence is exact"
    late = {name: value[name].layers[0].output_error_by_position[-1].error for name in ("coupled", "feedback")}
    assert late["feedback"] < 0.8 * late["coupled"], "without feedback errors grow from window to window"


def test_injected_windows_start_with_chunks(loaded):
    with pytest.raises(InvalidValueError, match="begins inside a window of 48"):
        evaluate(loaded, {"read": Injected.read(48, lambda: PLAIN, 0.5625)}, tokens=1100)
