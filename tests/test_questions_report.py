"""Results on questions: they read back, merge where they belong together, and say no more than the answers do."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys

import numpy as np
import pytest
from fake_questions import fake_questions

from quantize_state.cli import main
from quantize_state.cli.report import report
from quantize_state.evals.questions import result as r
from quantize_state.evals.questions.assemble import Cell, answer_word, arms_of, cells_of, merge
from quantize_state.evals.questions.result import RESEEDED, QuestionsResult
from quantize_state.evals.questions.verdict import judge
from quantize_state.evals.questions.view import arm_rows, flip_rows, method
from quantize_state.evals.report import read_result, render_html, render_markdown
from quantize_state.evals.result import Policy
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError

HOSTILE = "</title><script>alert(1)</script><img src=x onerror=alert(2)> {{ 7*7 }} | `x` \"'&"


@pytest.fixture(scope="module")
def result() -> QuestionsResult:
    return fake_questions()


def of(*arms: tuple[str, str], questions: int | None = None) -> QuestionsResult:
    """A result whose arms have these answers, one letter per question; A is always right."""
    base = fake_questions(len(arms[0][1]), 1, arms=("reference", "decoupled-nvfp4", "coupled-nvfp4", "reference-again"))
    asked = [dataclasses.replace(question, target="A") for question in base.questions]
    given = []
    for name, letters in arms:
        cells = {(q.sha256, 0): Cell(float(x == "A"), x, 10, x == "-") for q, x in zip(asked, letters, strict=True)}
        arm = base.arm(name)
        given.append(arms_cells(arm, cells))
    return dataclasses.replace(base, questions=asked, arms=arms_of(asked, given, 0))


def arms_cells(arm, cells):
    from quantize_state.evals.questions.assemble import ArmCells

    return ArmCells(arm.name, arm.policy, arm.policy_sha256, arm.seconds, cells)


# numbers


def test_counts_by_hand():
    made = of(("reference", "AAAAABBBBB"), ("decoupled-nvfp4", "AAB-AABCBB"))
    arm = made.arm("decoupled-nvfp4")
    d = arm.difference
    assert (d.lost, d.gained, d.changed, d.pairs) == (2, 1, 4, 10)
    assert (d.better, d.worse) == (1, 2)
    assert d.mean == pytest.approx(-0.1) and d.mcnemar_p == 1.0 and d.at_least
    assert (arm.accuracy.mean, arm.accuracy.unparsed, arm.accuracy.cut_off) == (0.4, 1, 1)
    assert made.reference.difference is None and made.reference.accuracy.mean == 0.5


def test_lengths_by_hand(result):
    """Mean and median over all answers; the difference question by question, with the interval of its mean."""
    own = r.matrix(result.reference, "tokens")
    for arm in result.arms:
        tokens = r.matrix(arm, "tokens")
        assert (arm.lengths.mean, arm.lengths.median) == pytest.approx((tokens.mean(), np.median(tokens)))
        if arm is result.reference:
            assert arm.lengths.difference is None and arm.lengths.ci95 is None
            continue
        longer = (tokens - own).mean(1)
        assert arm.lengths.difference == pytest.approx(longer.mean())
        if arm.name == "coupled-nvfp4":  # whose answers nearly all changed: the normal formula is near the bootstrap
            half = 1.96 * longer.std(ddof=1) / np.sqrt(len(longer))
            expected = (longer.mean() - half, longer.mean() + half)
            assert arm.lengths.ci95 == pytest.approx(expected, abs=0.15 * half)


def test_an_answer_of_no_letter_is_kept_as_a_hash():
    assert [answer_word(a) for a in ("(B)", " b. ", "C", None, "  ")] == ["B", "B", "C", "-", "-"]
    assert re.fullmatch(r"[0-9a-f]{8}", answer_word("1,234")) and answer_word("1,234") != answer_word("1,235")
    assert " " not in answer_word("two words")


def test_a_result_reads_back_what_was_written(result, tmp_path):
    path = tmp_path / "result.json"
    result.write(path)
    assert QuestionsResult.read(path) == result == read_result(tmp_path)
    assert cells_of(result, result.arms[0])[result.questions[0].sha256, 3].tokens > 0
    with pytest.raises(QuantizeStateError, match="never overwritten"):
        result.write(path)
    text = path.read_text()
    path.write_text(text.replace('"answers": "', '"answers": "A ', 1))
    with pytest.raises(FileFormatError, match="damaged or was edited"):
        read_result(path)


def test_a_result_of_the_wrong_length_is_refused(result, tmp_path):
    arm = result.arms[0]
    short = dataclasses.replace(arm.repeats[0], answers="A B")
    broken = dataclasses.replace(arm, repeats=[short, *arm.repeats[1:]])
    dataclasses.replace(result, arms=[broken]).write(tmp_path / "result.json")
    with pytest.raises(FileFormatError, match="another number of answers"):
        read_result(tmp_path)


def test_the_result_holds_no_text_of_questions_or_answers(result, tmp_path):
    """Letters, hashes and numbers: the questions may not be published."""
    for arm in result.arms:
        for repeat in arm.repeats:
            assert all(re.fullmatch(r"[A-Z]|[0-9a-f]{8}|-|\.", word) for word in r.words(repeat.answers))
    for question in result.questions:
        assert re.fullmatch(r"[0-9a-f]{64}", question.sha256 + "") and len(question.prompt_sha256) == 64


# verdicts


def test_a_loss_is_a_loss():
    verdict = judge(of(("reference", "A" * 100), ("decoupled-nvfp4", "A" * 80 + "B" * 20)))
    assert verdict.tone == "against" and "it loses 20.0 points" in verdict.sentence


def test_no_difference_is_not_called_equal():
    verdict = judge(of(("reference", "A" * 150 + "B" * 48), ("decoupled-nvfp4", "A" * 148 + "B" * 50)))
    assert verdict.tone == "open"
    assert "can't be told from none" in verdict.sentence
    assert re.search(r"A loss of more than [23]\.\d points is excluded at 95 %, a smaller one is not", verdict.sentence)
    assert any("in 8 of 10 cases" in fact and "at least" in fact for fact in verdict.facts)


def test_only_a_narrow_interval_is_clear():
    letters = "A" * 1500 + "B" * 500
    assert judge(of(("reference", letters), ("decoupled-nvfp4", letters))).tone == "clear"
    verdict = judge(of(("reference", letters[1400:1598]), ("decoupled-nvfp4", letters[1400:1598])))
    assert verdict.tone == "open" and any("No answer changed in any arm" in fact for fact in verdict.facts)


def test_few_questions_claim_nothing():
    verdict = judge(of(("reference", "AAAA"), ("decoupled-nvfp4", "BBBB")))
    assert "too few questions" in verdict.sentence and verdict.tone == "open"
    assert (
        "No verdict"
        in judge(
            of(
                ("reference", "AAAA"),
            )
        ).sentence
    )


def test_an_arm_above_the_reference_is_named_too():
    right, wrong = "A" * 40, "A" * 10 + "B" * 30
    verdict = judge(of(("reference", wrong), ("decoupled-nvfp4", wrong), ("coupled-nvfp4", right)))
    assert any(
        re.search(r"Above the reference: coupled-nvfp4 \+75\.0 points .*no sign of precision", f) for f in verdict.facts
    )
    assert not any("Not to be told" in f for f in verdict.facts)


def test_facts_name_the_other_arms_the_floor_and_the_cap(result):
    verdict = judge(result)
    text = " ".join(verdict.facts)
    assert re.search(r"Below the reference: coupled-nvfp4 −\d+\.\d points", text)
    assert "Noise floor: the reference with other seeds" in text and "The untouched model" in text
    assert "The cap of 4,500 tokens cut off" in text
    assert re.search(r"another mean length than the reference's: .*\bcoupled-nvfp4 \+\d+\.\d tokens \(\+\d", text)
    longer = text.partition("another mean length")[2]
    assert "replay-fp32 +" not in longer and "decoupled-nvfp4 +" not in longer, "zero is inside; said before"
    greedy = dataclasses.replace(result, task=dataclasses.replace(result.task, temperature=0.0))
    without = dataclasses.replace(greedy, arms=[arm for arm in result.arms if arm.name != RESEEDED])
    assert "Nothing was sampled" in " ".join(judge(without).facts)
    stand_in = dataclasses.replace(result, task=dataclasses.replace(result.task, stand_in=True))
    assert "198 stand-in questions, not GPQA, tiny-gdn with" in judge(stand_in).sentence


# reports


def test_flips_are_those_of_the_answers(result):
    rows = flip_rows(of(("reference", "AAAAABBBBB"), ("decoupled-nvfp4", "AAB-AABCBB"), ("coupled-nvfp4", "A" * 10)))
    assert len(rows) == 7 and rows[0]["changed"] >= rows[-1]["changed"]
    assert {tuple(a["text"] for c in row["cells"] for a in c["answers"]) for row in rows} >= {("A", "–", "A")}
    assert all(a["right"] == (a["text"] == "A") for row in rows for c in row["cells"] for a in c["answers"])
    for row in rows:
        own, *others = row["cells"]
        assert all(c["flipped"] == (c["answers"][0]["right"] != own["answers"][0]["right"]) for c in others)
    shown = {row["name"]: row for row in arm_rows(result)}
    assert shown["reference"]["difference"] == "" and shown[RESEEDED]["policy"].startswith("the reference with other")
    for row in shown.values():
        if row["forest"]:
            assert 0 <= row["forest"]["low"] <= row["forest"]["mean"] <= row["forest"]["low"] + row["forest"]["width"]


def test_a_report_without_flips_does_not_speak_for_other_seeds(result):
    like = dataclasses.replace(result.arm("decoupled-fp8"), repeats=result.reference.repeats)
    same = dataclasses.replace(result, arms=[result.reference, like, result.arm(RESEEDED)])
    for text in (render_html(same), render_markdown(same)):
        assert "None: every arm with the reference" in text and "seeds was right exactly where" in text
    alone = dataclasses.replace(same, arms=same.arms[:2])
    assert "None: every arm was right exactly" in render_markdown(alone)


def test_the_method_says_what_ends_an_answer(result):
    task = dataclasses.replace(result.task, until=["</s>", "\n"])
    text = " ".join(method(dataclasses.replace(result, task=task)))
    assert 'end-of-text token or "</s>" or "\\n", and has at most 4,500 tokens' in text


def test_reports_show_the_numbers_and_escape_what_others_named(result):
    page, text = render_html(result), render_markdown(result)
    for row in arm_rows(result):
        assert row["accuracy"] in page and row["accuracy"] in text
        assert row["span"] in page and row["span"] in text
    recipe = Policy("fp32", "nvfp4", 16, recipe=HOSTILE)
    hostile = dataclasses.replace(
        result,
        model=dataclasses.replace(result.model, name=HOSTILE),
        task=dataclasses.replace(result.task, name=HOSTILE, source=HOSTILE, filter=HOSTILE, metric=HOSTILE),
        arms=[result.arms[0], *(dataclasses.replace(a, name=HOSTILE + a.name, policy=recipe) for a in result.arms[1:])],
        runs=[dataclasses.replace(result.runs[0], command=HOSTILE)],
        questions=[dataclasses.replace(question, target=HOSTILE) for question in result.questions],
    )
    page, text = render_html(hostile), render_markdown(hostile)
    assert "<script" not in page and "<img" not in page and "49" not in re.findall(r"\{\{.*?\}\}", page)
    assert not re.search(r"(?<!\\)<(script|img)", text)
    assert page.count("&lt;script&gt;") > 5 and "http" not in page.replace("http-equiv", "")


def test_a_report_needs_neither_torch_nor_lm_eval(result, tmp_path):
    result.write(tmp_path / "result.json")
    code = (
        "import sys; sys.modules['torch'] = sys.modules['lm_eval'] = sys.modules['transformers'] = None\n"
        f"from quantize_state.cli import main; sys.exit(main(['report', {str(tmp_path)!r}]))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert (tmp_path / "report.html").exists() and (tmp_path / "report.md").exists()


def test_several_results_are_reported_one_by_one(result, tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        result.write(tmp_path / name / "result.json")
    assert len(report([tmp_path / "a", tmp_path / "b"])) == 4
    with pytest.raises(InvalidValueError, match="--merge"):
        report([tmp_path / "a", tmp_path / "b"], tmp_path)


# merging


def part(result: QuestionsResult, *, arms=None, index: int = 0, count: int = 1) -> QuestionsResult:
    """What one of ``count`` machines has answered: some arms, or every ``count``-th question."""
    given = []
    for arm in result.arms:
        if arms is None or arm.name in arms:
            mine = {q.sha256 for q in result.questions[index::count]}
            given.append(arms_cells(arm, {key: c for key, c in cells_of(result, arm).items() if key[0] in mine}))
    made = arms_of(result.questions, given, result.task.seed)
    return dataclasses.replace(result, arms=made, status="partial" if count > 1 else result.status)


def comparable(result: QuestionsResult) -> dict[str, object]:
    return {arm.name: dataclasses.replace(arm, seconds=0.0) for arm in result.arms}


def test_shards_merge_into_the_whole(result):
    merged = merge([part(result, index=i, count=3) for i in range(3)])
    assert comparable(merged) == comparable(result) and merged.status == "complete"
    assert len(merged.runs) == 3
    some = merge([part(result, index=i, count=3) for i in range(2)])
    assert some.status == "partial" and some.arms[0].accuracy.answers == 4 * 132


def test_arms_of_two_machines_merge_and_the_shared_reference_must_agree(result):
    one, two = part(result, arms=["reference", "decoupled-fp8"]), part(result, arms=["reference", "coupled-fp8"])
    merged = merge([one, two])
    assert [arm.name for arm in merged.arms] == ["reference", "decoupled-fp8", "coupled-fp8"]
    assert merged.arm("coupled-fp8").difference == result.arm("coupled-fp8").difference
    assert merged.arm("reference").seconds == result.arm("reference").seconds
    arm = two.reference
    column = "0 " + arm.repeats[0].scores.partition(" ")[2]
    column = column if column != arm.repeats[0].scores else "1 " + column.partition(" ")[2]
    other = dataclasses.replace(arm, repeats=[dataclasses.replace(arm.repeats[0], scores=column), *arm.repeats[1:]])
    with pytest.raises(InvalidValueError, match="the machines compute differently"):
        merge([one, dataclasses.replace(two, arms=[other, *two.arms[1:]])])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: dataclasses.replace(x, configuration=json.dumps({"seed": 1})), "does not belong to the first"),
        (
            lambda x: dataclasses.replace(
                x, questions=[dataclasses.replace(x.questions[0], prompt_sha256="0" * 64), *x.questions[1:]]
            ),
            "another prompt",
        ),
        (
            lambda x: dataclasses.replace(x, arms=[dataclasses.replace(a, policy_sha256="0") for a in x.arms]),
            "another policy",
        ),
    ],
)
def test_runs_that_do_not_belong_together_are_not_merged(result, change, says):
    with pytest.raises(InvalidValueError, match=says):
        merge([result, change(result)])
    with pytest.raises(InvalidValueError, match="two results or more"):
        merge([result])


def test_the_command_merges(result, tmp_path, capsys):
    for i in range(2):
        (tmp_path / str(i)).mkdir()
        part(result, index=i, count=2).write(tmp_path / str(i) / "result.json")
    out = tmp_path / "both"
    assert main(["report", "--merge", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(out)]) == 0
    assert comparable(QuestionsResult.read(out)) == comparable(result)
    assert capsys.readouterr().out.split() == [str(out / n) for n in ("result.json", "report.html", "report.md")]
    assert main(["report", "--merge", str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(out)]) == 2


# the command line


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["gpqa", "tiny-gdn"], "GPQA is gated"),
        (["gpqa", "tiny-gdn", "--data", "gone.csv"], "gone.csv does not exist"),
        (["gpqa", "tiny-gdn", "--data", "stand-in", "--arms", "decoupled-nvfp5"], "nvfp5"),
        (["gpqa", "tiny-gdn", "--data", "stand-in", "--arms", ","], "names no arm"),
        (["gpqa", "tiny-gdn", "--data", "stand-in", "--shard", "two"], "--shard"),
        (["gpqa", "tiny-gdn", "--data", "stand-in", "--repeats", "2"], "temperature"),
        (["tasks", "tiny-gdn", "--tasks", ","], "names no task"),
        (["tasks", "tiny-gdn", "--tasks", "gsm8k", "--include-path", "gone"], "is no folder"),
    ],
)
def test_a_command_that_can_not_be_run_says_why(arguments, says, capsys):
    assert main(arguments) == 2
    assert says in capsys.readouterr().err


def test_numbers_of_the_fake_are_alive(result):
    """The fake must not be so dull that a broken statistic goes unnoticed."""
    means = {arm.name: arm.difference.mean for arm in result.arms if arm.difference}
    assert means["coupled-nvfp4"] < means["coupled-fp8"] < 0 and len(set(means.values())) > 4
    assert np.isfinite(list(means.values())).all() and isinstance(result.arms[0].policy, Policy)
