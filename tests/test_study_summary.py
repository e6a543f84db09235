"""The study's tables say what its results say, missed goals included."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from fake_results import ARMS, fake_result

from quantize_state.evals.result import Policy
from quantize_state.evals.study.__main__ import main
from quantize_state.evals.study.grid import GROUPS, arms, reads
from quantize_state.evals.study.summary import (
    Law,
    LawEntry,
    collect,
    findings,
    pareto,
    rank_correlation,
    rows,
    write_summary,
)
from quantize_state.quant.errors import InvalidValueError
from quantize_state.quant.policy import StatePolicy, parse_arm


@pytest.fixture
def folder(tmp_path):
    """A study of two groups; the second has a control that beats plain NVFP4 reads at equal bytes."""
    control = ("balanced", Policy("fp32", None, 16, recipe="balanced"), 0.00010, 0.0, 0.02, 0.0, 4.57, 1.07)
    better = ("decoupled-nvfp4-mse", Policy("fp32", "nvfp4", 16, "mse"), 0.0005, 0.0, 0.04, 0.0, 4.5625, 1.0625)
    for name, group in (("base", ARMS), ("controls", (control, better))):
        (tmp_path / name).mkdir()
        fake_result(sequences=1, tokens=512, layers=2, arms=group).write(tmp_path / name / "result.json")
    entry = lambda x: {"model.layers.0.mixer": LawEntry(x, x, [x])}  # noqa: E731
    predicted = {"decoupled-nvfp4": 0.04, "decoupled-fp8": 0.01, "decoupled-nvfp4-mse": 0.045}
    Law("tiny-gdn", "ab" * 32, 512, {name: entry(x) for name, x in predicted.items()}).write(tmp_path / "law.json")
    return tmp_path


def test_findings_are_those_of_the_numbers(folder):
    result = collect(folder)
    assert len(result.arms) == len(ARMS) + 2
    told = " ".join(findings(result, Law.read(folder / "law.json")))
    kl = {arm.name: arm.kl.mean for arm in result.arms}
    assert kl["coupled-nvfp4"] / kl["decoupled-nvfp4"] > 36 and "(goal 36: met)" in told
    assert kl["coupled-nvfp4-w16"] / kl["decoupled-nvfp4"] > 8 and "(goal 8: met)" in told
    assert "best 4-bit read format is decoupled-nvfp4-mse" in told and "(goal 0.5: MISSED)" in told
    share = kl["balanced"] / kl["decoupled-nvfp4"]
    assert share < 0.5 and f"no format yet, is balanced: {share:.2f} of the KL" in told
    assert "3 decoupled arms: rank correlation 1.000" in told
    slow = dataclasses.replace(
        result,
        arms=[a if a.name != "coupled-nvfp4" else dataclasses.replace(a, kl=result.arms[5].kl) for a in result.arms],
    )
    assert "(goal 36: MISSED)" in " ".join(findings(slow, None))


def test_other_windows_have_a_line_and_exponents_of_their_own(tmp_path):
    """A copy that is first read at token 64: before, its error is that of FP32's last bits."""
    longer = ("decoupled-nvfp4-w64", Policy("fp32", "nvfp4", 64), 0.00010, 0.0, 0.03, 0.0, 4.5625, 0.6875)
    (tmp_path / "base").mkdir()
    fake_result(sequences=1, tokens=4096, layers=1, arms=(*ARMS, longer)).write(tmp_path / "base" / "result.json")
    result = collect(tmp_path)
    told = " ".join(findings(result, None))
    assert "4-bit read format with another window is decoupled-nvfp4-w64" in told

    def exponent(result, name):
        layer = next(a for a in result.arms if a.name == name).layers[0]
        return layer.exponents.output.points

    assert exponent(result, "decoupled-nvfp4") - exponent(result, "decoupled-nvfp4-w64") == 2
    kept = dataclasses.replace(
        result,
        arms=[
            dataclasses.replace(a, layers=[dataclasses.replace(x, output_error_by_position=[]) for x in a.layers])
            for a in result.arms
        ],
    )
    (tmp_path / "kept" / "base").mkdir(parents=True)
    kept.write(tmp_path / "kept" / "base" / "result.json")
    assert exponent(collect(tmp_path / "kept"), "decoupled-nvfp4-w64") == exponent(result, "decoupled-nvfp4-w64")


def test_shares_are_written_as_numbers(folder):
    result = collect(folder)
    by = {row[0]: row[2] for row in rows(result)}
    plain = next(a.kl.mean for a in result.arms if a.name == "decoupled-nvfp4")
    assert by["decoupled-nvfp4"] == "1" and not any("e" in share for share in by.values())
    for a in result.arms:
        if a.kl.mean > 100 * plain:
            assert by[a.name] == f"{float(f'{a.kl.mean / plain:.3g}'):,.0f}"


def test_the_front_is_what_no_other_arm_beats(folder):
    result = collect(folder)
    points = {a.name: (a.bytes_per_element.moved_per_step, a.kl.mean) for a in result.arms}
    front = [a.name for a in pareto(result)]
    for name, (moved, kl) in points.items():
        beaten = any(
            (m <= moved and k < kl) or (m < moved and k <= kl) for n, (m, k) in points.items() if not n.startswith("re")
        )
        assert (name in front) == (not beaten and not name.startswith("re")), name
    assert rank_correlation([(1, 10), (2, 20), (3, 30), (4, 25)]) == pytest.approx(0.8)


def test_tables_are_written_from_results_alone(folder, capsys):
    assert main(["tiny-gdn", "--report-only", "--out", str(folder)]) == 0
    text, page = ((folder / f"study.{ending}").read_text() for ending in ("md", "html"))
    assert capsys.readouterr().out.split() == [str(folder / "study.md"), str(folder / "study.html")]
    assert text.count("\n| ") >= len(ARMS) + 2 and "balanced" in page and page.count("<svg") >= 4
    assert "mathdefault" not in page, "ticks are labelled by matplotlib, whose formulas are not drawn here"
    other = fake_result(model="tiny-kda", sequences=1, tokens=256, layers=2)
    (folder / "other").mkdir()
    other.write(folder / "other" / "result.json")
    with pytest.raises(InvalidValueError, match="not of one study"):
        collect(folder)
    assert main(["tiny-gdn", "--report-only", "--out", str(folder / "nowhere")]) == 2
    assert main(["tiny-gdn", "--groups", "contols", "--out", str(folder)]) == 2
    assert "unknown group 'contols'" in capsys.readouterr().err


def test_the_grid_has_every_combination_that_means_something():
    copies = reads()
    assert len(copies) == 3 * 3 + 4 * 2 * 3 + 2  # nvfp4; mxfp4, mxfp8, fp8, int8; bf16, fp16
    for group in GROUPS:
        found = arms(group)
        assert found, group
        for name, arm in found.items():
            if isinstance(arm, StatePolicy):
                assert parse_arm(name) == arm
    assert {p.window for p in arms("windows", full=True).values()} == {4, 8, 32, 64}
    assert {"coupled-nvfp4", "coupled-nvfp4-w16", "coupled-nvfp4-sr", "coupled-nvfp4-w16-sr"} <= set(arms("coupled"))


STUDIES = sorted((Path(__file__).parent.parent / "results" / "accuracy").glob("*/study.md"))


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.parent.name)
def test_stored_pages_show_what_their_results_hold(page, tmp_path):
    shutil.copytree(page.parent, tmp_path / "study")
    write_summary(tmp_path / "study")
    assert (tmp_path / "study" / "study.md").read_text() == page.read_text(), "run `make report`"
