"""plan: the choice is optimal, the recipe is verified on other text, and what is printed is what was measured."""

import itertools
import random

import pytest

from quantize_state import Recipe
from quantize_state.cli import main
from quantize_state.evals.knapsack import choose
from quantize_state.evals.plan import Plan, folder_of, plan
from quantize_state.evals.plan_report import verdict
from quantize_state.evals.text import load_text, part_of
from quantize_state.quant.errors import InvalidValueError, QuantizeStateError

ROUNDED = 1 + 1e-4
"""Costs are kept in steps of 0.005 % of the largest total, per item at most one step too high."""


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_the_best_of_all(seed):
    rng = random.Random(seed)
    items = [[(rng.uniform(0.1, 4), rng.uniform(0, 1) ** 3) for _ in range(rng.randint(1, 4))] for _ in range(6)]
    every = [tuple(map(sum, zip(*pick, strict=True))) for pick in itertools.product(*items)]
    budget = rng.uniform(min(c for c, _ in every), max(c for c, _ in every))
    total = lambda picked: tuple(map(sum, zip(*(o[i] for o, i in zip(items, picked, strict=True)), strict=True)))  # noqa: E731
    cost, loss = total(choose(items, max_cost=budget))
    assert cost <= budget * (1 + 1e-9) and loss <= min(x for c, x in every if c <= budget / ROUNDED**6)
    allowed = rng.uniform(min(x for _, x in every), max(x for _, x in every))
    cost, loss = total(choose(items, max_loss=allowed))
    assert loss <= allowed and cost <= min(c for c, x in every if x <= allowed) * ROUNDED**6


def test_many_layers_are_quick_and_budgets_may_be_impossible():
    rng = random.Random(1)
    items = [[(c, rng.uniform(0, 1) / c**4) for c in (1.06, 1.53, 2.5, 4.25)] for _ in range(96)]
    picked = choose(items, max_cost=1.5 * 96)
    assert sum(o[i][0] for o, i in zip(items, picked, strict=True)) <= 1.5 * 96
    with pytest.raises(InvalidValueError, match=r"the cheapest costs 101\.76"):
        choose(items, max_cost=1.0 * 96)
    with pytest.raises(InvalidValueError, match="the best loses"):
        choose(items, max_loss=1e-9)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    out = tmp_path_factory.mktemp("plan") / "recipe.yaml"
    found = plan(
        "tiny-gdn", out=out, budget_bytes=1.3, candidate_names=["nvfp4", "int8-hadamard", "fp32"], tokens=96,
        device="cpu", every_format=True, together=6,
    )  # fmt: skip
    return found, out


def test_the_recipe_is_in_budget_and_beats_the_uniform_format(planned):
    found, out = planned
    assert Recipe.from_yaml(out) == Recipe.from_yaml(found.recipe)
    assert found.checked.bytes_moved <= 1.3 and found.within_budget
    counts = [layer.chosen for layer in found.layers]
    assert counts.count("int8-hadamard") == 3 and counts.count("nvfp4") == 3, "0.24 bytes over 1.0625 pay for three"
    exact = {layer.name: layer.expected["fp32"] for layer in found.layers}
    assert set(exact.values()) == {0.0}
    worst = sorted(found.layers, key=lambda layer: layer.probe_kl)[3:]
    assert {layer.name for layer in found.layers if layer.chosen != "nvfp4"} == {layer.name for layer in worst}
    assert found.best_uniform == "nvfp4" and found.beats_uniform
    assert "times less than the best uniform format at no more bytes, nvfp4" in verdict(found)
    assert found.rank_correlation is not None and -1 <= found.rank_correlation <= 1


def test_expectation_is_measurement_for_the_probe_and_close_for_the_rest(planned):
    found, _ = planned
    for layer in found.layers:
        assert layer.expected["nvfp4"] == pytest.approx(layer.measured["nvfp4"]) == pytest.approx(layer.probe_kl)
        ratio = layer.expected["int8-hadamard"] / layer.probe_kl
        assert ratio == pytest.approx((layer.error["int8-hadamard"] / layer.error["nvfp4"]) ** 2)
        assert 1 / 8 < layer.expected["int8-hadamard"] / layer.measured["int8-hadamard"] < 8
    assert 1 / 4 < found.checked.expected / found.checked.measured < 4


def test_the_halves_are_other_text(planned):
    found, _ = planned
    assert found.measured_on.sha256 != found.verified_on.sha256
    assert (found.measured_on.source, found.verified_on.source) == ("pydoc, part 1 of 2", "pydoc, part 2 of 2")
    source = load_text("pydoc")
    halves = [part_of(source, i, 2).text for i in (0, 1)]
    assert "".join(halves) == source.text and halves[0].endswith("\n")


def test_it_is_stored_reported_and_never_overwritten(planned, capsys):
    found, out = planned
    (stored,) = folder_of(out).glob("recipe-for-*.json")
    assert Plan.read(stored) == found
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        plan("tiny-gdn", out=out, budget_bytes=1.3)
    out.unlink()
    arguments = (
        f"plan tiny-gdn --budget-bytes 1.3 --formats nvfp4,int8-hadamard,fp32 --tokens 96 --device cpu --out {out}"
    )
    assert main([*arguments.split(), "--every-format"]) == 0, "measurements of the first call are taken up"
    printed = capsys.readouterr().out
    assert "recipe.plan/report.html" in printed.replace("\n", "") and "times less than the best uniform" in printed
    page = (folder_of(out) / "report.html").read_text()
    assert "<svg" in page and "int8-hadamard" in page and "{{" not in page
    assert "mathdefault" not in page, "ticks are labelled by matplotlib, whose formulas are not drawn here"
    text = (folder_of(out) / "report.md").read_text()
    assert "version: 1" in text and "**recipe**" in text
    assert out.read_text() == found.recipe


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"budget_kl": 1.0, "budget_bytes": 1.0}, "one of them"),
        ({}, "one of them"),
        ({"budget_kl": -1.0}, "above 0"),
        ({"budget_kl": 1.0, "probe": "fp8x"}, "probe 'fp8x'"),
        ({"budget_kl": 1.0, "candidate_names": ["nvfp5"]}, "nvfp5"),
        ({"budget_kl": 1.0, "candidate_names": []}, "no read formats"),
    ],
)
def test_what_can_not_be_planned(arguments, says, tmp_path):
    with pytest.raises(InvalidValueError, match=says):
        plan("tiny-gdn", out=tmp_path / "recipe.yaml", **arguments)


def test_it_is_no_work_for_several_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidValueError, match="without torchrun"):
        plan("tiny-gdn", out=tmp_path / "recipe.yaml", budget_kl=1.0)
