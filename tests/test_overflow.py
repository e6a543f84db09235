"""An arm whose state overflows is a finding about that arm: the others, and all other documents, go on."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from fake_results import fake_result

from quantize_state import StatePolicy, evaluate
from quantize_state.evals import rollout
from quantize_state.evals.compare import arm_names, difference
from quantize_state.evals.measure import Measured
from quantize_state.evals.metrics import Evidence, KLMeter
from quantize_state.evals.models import load_model
from quantize_state.evals.plots import kl_by_bytes, kl_by_position
from quantize_state.evals.report import render_html, render_markdown
from quantize_state.evals.result import Overflow, Result
from quantize_state.evals.study.summary import findings, pareto, rows
from quantize_state.evals.table import markdown_table, print_table
from quantize_state.evals.verdict import at_floor, judge, kl_text, overflow_text
from quantize_state.evals.view import arm_rows, axis_floor, split_at_floor
from quantize_state.quant.errors import InvalidValueError, NonFiniteLogitsError, NonFiniteStateError, QuantizeStateError

BAD = "coupled-nvfp4-w16"
CHUNK = 64
LAYER = "model.layers.2.linear_attn"
ARMS = ["reference", BAD, "decoupled-nvfp4"]


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-gdn", device="cpu")


@pytest.fixture(scope="module")
def alone(loaded):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout, "CHUNK", CHUNK)
        return {arm.name: arm for name in ARMS for arm in evaluate(loaded, [name], tokens=3 * CHUNK).arms}


@pytest.fixture
def overflowing(monkeypatch):
    """From token ``after`` on, the next fold of LAYER overflows in rollouts of the policy ``name``, where ``which`` of
    the policy's rollouts says so."""
    monkeypatch.setattr(rollout, "CHUNK", CHUNK)
    advance, wanted = rollout.Rollout.advance, SimpleNamespace(name=BAD, after=CHUNK, which=lambda n: True, seen=[])

    def overflow(self, ids, observer=None):
        if getattr(self._policy, "name", None) == wanted.name:
            if self not in wanted.seen:
                wanted.seen.append(self)
            if self._seen == wanted.after and wanted.which(wanted.seen.index(self)):
                if self.cache is None:
                    raise NonFiniteStateError("the state holds Inf", layer=LAYER)
                state = self._handle.states(self.cache)[LAYER]
                huge = torch.full((*state.checkpoint.shape[:2], state.spec.value_dim, state.spec.key_dim), 3e38)
                with torch.inference_mode():
                    state.renew_(huge)
        return advance(self, ids, observer)

    monkeypatch.setattr(rollout.Rollout, "advance", overflow)
    return wanted


def same_numbers(a, b):
    return dataclasses.replace(a, seconds=0.0) == dataclasses.replace(b, seconds=0.0)


@pytest.mark.parametrize("together", (1, 3))
def test_the_other_arms_go_on_and_have_the_numbers_they_have_alone(loaded, alone, overflowing, tmp_path, together):
    value = evaluate(loaded, ARMS, tokens=3 * CHUNK, together=together, out=tmp_path / "run")
    assert Result.read(tmp_path / "run" / "result.json") == value and value.status == "complete"
    (overflow,) = value.arm(BAD).overflows
    assert (overflow.documents, overflow.tokens, overflow.layer) == ([0], CHUNK, LAYER)
    assert "Inf or NaN" in overflow.reason and LAYER in overflow.reason
    for name in ("reference", "decoupled-nvfp4"):
        assert same_numbers(value.arm(name), alone[name])
    # what came before is that of a run that ends there, the layers' errors in full, and so are the bytes
    whole = alone[BAD]
    assert value.arm(BAD).kl.tokens == CHUNK < whole.kl.tokens
    assert value.arm(BAD).kl.by_position == [
        dataclasses.replace(theirs, ci95=mine.ci95)
        for mine, theirs in zip(value.arm(BAD).kl.by_position, whole.kl.by_position, strict=False)
    ]
    assert value.arm(BAD).bytes_per_element == whole.bytes_per_element
    for mine, theirs in zip(value.arm(BAD).layers, whole.layers, strict=True):
        assert mine.output_error_by_position == theirs.output_error_by_position[: len(mine.output_error_by_position)]
        assert mine.output_error_by_position[-1].stop == CHUNK


def test_an_arm_that_overflows_at_once_has_no_number(loaded, overflowing):
    overflowing.after = 0
    value = evaluate(loaded, ARMS, tokens=2 * CHUNK, together=3)
    arm = value.arm(BAD)
    assert arm.kl.tokens == 0 and arm.overflows[0].tokens == 0 and not arm.layers
    assert arm.bytes_per_element.resident == StatePolicy(checkpoint="nvfp4", window=16).bytes_resident
    assert kl_text(arm) == "–"
    assert value.arm("decoupled-nvfp4").kl.tokens == 2 * CHUNK
    assert BAD not in {a.name for arms in split_at_floor(value) for a in arms}
    assert f"{BAD} overflowed after 0 tokens in {LAYER}" in " ".join(judge(value).facts)
    render_html(value)


def test_documents_go_on_resume_and_merge(loaded, overflowing, tmp_path):
    class Killed(Exception):
        pass

    overflowing.which = lambda n: n == 1
    done = []

    def stop(what, at, total):
        done.append(at)
        if len(done) == 7:
            raise Killed  # in the third document, when two are stored

    options = {"tokens": 3 * CHUNK, "sequences": 3, "together": 3}
    with pytest.raises(Killed):
        evaluate(loaded, ARMS, out=tmp_path / "run", progress=stop, **options)
    shards = sorted((tmp_path / "run" / "shards" / BAD).glob("*.npz"))
    assert [path.stem for path in shards] == ["0", "1"]
    fingerprint = json.loads((tmp_path / "run" / "run.json").read_text())["fingerprint"]
    kept = Measured.load(shards[1], fingerprint, 16, 0)
    assert [o.tokens for o in kept.overflows] == [CHUNK] and kept.documents == [1]
    overflowing.which = lambda n: False  # the document that overflowed is not run again
    value = evaluate(loaded, ARMS, out=tmp_path / "run", **options)
    arm = value.arm(BAD)
    assert [(o.documents, o.tokens) for o in arm.overflows] == [([1], CHUNK)]
    assert arm.kl.tokens == 7 * CHUNK and value.arm("decoupled-nvfp4").kl.tokens == 9 * CHUNK
    assert overflow_text(arm) == f"overflowed after 64 tokens in {LAYER} (1 document stopped early)"


def test_a_document_without_a_token_is_stored_too(tmp_path):
    measured = Measured.empty(16, 0)
    measured.documents = [3, 4]
    measured.overflows = [Overflow([3, 4], 0, None, "why")]
    measured.save(tmp_path / "3.npz", "f")
    again = Measured.load(tmp_path / "3.npz", "f", 16, 0)
    assert again.overflows == measured.overflows and again.kl.empty
    measured.overflows = []
    measured.save(tmp_path / "3.npz", "f")
    with pytest.raises(QuantizeStateError, match="damaged"):
        Measured.load(tmp_path / "3.npz", "f", 16, 0)


def test_a_batch_stops_as_a_whole(loaded, overflowing):
    value = evaluate(loaded, ARMS, tokens=2 * CHUNK, sequences=2, batch=2, together=3)
    assert value.arm(BAD).overflows[0].documents == [0, 1]
    assert "2 documents stopped early" in overflow_text(value.arm(BAD))


@pytest.mark.parametrize("window", (1, 16), ids=("reference", "replay"))
def test_where_nothing_rounds_it_is_the_run_that_failed(loaded, overflowing, window):
    overflowing.name = StatePolicy(window=window).name
    with pytest.raises(NonFiniteStateError, match=LAYER):
        evaluate(loaded, ["replay-fp32", BAD], tokens=2 * CHUNK)


def test_logits_that_overflow(loaded, monkeypatch):
    monkeypatch.setattr(rollout, "CHUNK", CHUNK)
    advance = rollout.Rollout.advance

    def overflow(self, ids, observer=None):
        logits = advance(self, ids, observer)
        if getattr(self._policy, "name", None) == BAD and self._seen > CHUNK:
            logits = logits.clone()
            logits[:, 3, 5] = float("inf")
        return logits

    monkeypatch.setattr(rollout.Rollout, "advance", overflow)
    value = evaluate(loaded, ARMS, tokens=3 * CHUNK, together=3)
    (found,) = value.arm(BAD).overflows
    assert (found.tokens, found.layer) == (CHUNK, None) and value.arm(BAD).kl.tokens == CHUNK
    assert value.arm(BAD).layers[0].output_error_by_position[-1].stop == CHUNK
    assert overflow_text(value.arm(BAD)) == "overflowed after 64 tokens in its logits"


@pytest.mark.parametrize("side", ("reference", "both"))
@pytest.mark.parametrize("what", (float("nan"), float("inf")))
def test_a_reference_that_overflows_is_no_finding_about_an_arm(side, what):
    reference, arm = torch.randn(2, 1, 4, 7)
    reference[0, 2, 1] = what
    if side == "both":
        arm[0, 2, 1:3] = what
    with pytest.raises(InvalidValueError) as raised:
        KLMeter().update(reference, arm, None, 0)
    assert not isinstance(raised.value, NonFiniteLogitsError)


def test_a_token_ruled_out_by_both_does_not_hide_an_arm_that_overflows():
    reference, arm = torch.randn(2, 1, 4, 7)
    reference[..., 0] = arm[..., 0] = -float("inf")
    KLMeter().update(reference, arm, None, 0)
    arm[0, 2, 1] = float("nan")
    with pytest.raises(NonFiniteLogitsError, match="position 2"):
        KLMeter().update(reference, arm, None, 0)
    arm[0, 2, 1], reference[0, 2, 1] = 0.0, -float("inf")
    with pytest.raises(InvalidValueError) as raised:
        KLMeter().update(reference, arm, None, 0)
    assert not isinstance(raised.value, NonFiniteLogitsError), "the reference alone rules it out"


# what is said


def overflowed(result, name="coupled-nvfp4", *, tokens=1024, layer=LAYER, documents=(0,), nothing=False):
    """``result`` in which the arm called ``name`` overflowed."""
    arms = []
    for arm in result.arms:
        if arm.name == name:
            arm = dataclasses.replace(arm, overflows=[Overflow(list(documents), tokens, layer, "why")])
            arm = dataclasses.replace(arm, kl=Evidence.nothing().kl, layers=[], ppl=None) if nothing else arm
        arms.append(arm)
    return dataclasses.replace(result, arms=arms)


SAID = f"overflowed after 1,024 tokens in {LAYER}"


@pytest.fixture(scope="module")
def one():
    return fake_result(sequences=1)


def test_a_rival_that_overflows(one):
    verdict = judge(overflowed(one))
    assert verdict.tone == "clear" and f"coupled-nvfp4 (NVFP4 fed back every token) {SAID}." in verdict.sentence
    assert "times less than coupled-nvfp4-w16 (" in verdict.sentence
    assert verdict.sentence.count("coupled-nvfp4 (") == 1, "nothing is compared with a mean that is none"
    assert (
        f"coupled-nvfp4 {SAID}: its numbers are those of the tokens before, its mean KL a lower bound." in verdict.facts
    )
    everything = overflowed(overflowed(one), "coupled-nvfp4-w16")
    assert judge(everything).sentence.count(SAID) == 2 and judge(everything).tone == "clear"


def test_the_first_overflow_of_several_is_named(one):
    later, first = Overflow([0], 2048, LAYER, "why"), Overflow([2], 1024, None, "why")
    arm = dataclasses.replace(one.arm("coupled-nvfp4"), overflows=[later, first])
    assert overflow_text(arm) == "overflowed after 1,024 tokens in its logits (2 documents stopped early)"


def test_a_subject_that_overflows_is_never_safe(one):
    tiny = dataclasses.replace(
        one,
        arms=[
            dataclasses.replace(a, kl=dataclasses.replace(a.kl, mean=1e-13, ci95=(0.0, 1e-13)))
            if a.name == "decoupled-nvfp4"
            else a
            for a in one.arms
        ],
    )
    assert "noise floor itself" in judge(tiny).sentence
    for result in (overflowed(one, "decoupled-nvfp4"), overflowed(tiny, "decoupled-nvfp4")):
        verdict = judge(result)
        assert verdict.tone == "against" and SAID in verdict.sentence
        assert not at_floor(result.arm("decoupled-nvfp4"), result.arm("reference-again"))
        row = next(row for row in arm_rows(result) if row["name"] == "decoupled-nvfp4")
        assert row["note"] == SAID and row["kl"].startswith("≥ ") and row["mean"].startswith("≥ ")
        assert arm_rows(result)[-1]["name"] == "decoupled-nvfp4", "last, however small its mean was up to there"


def test_page_markdown_and_console_say_it(one, tmp_path, capsys):
    result = overflowed(one)
    page, markdown = render_html(result), render_markdown(result)
    assert SAID in page and "≥ " in page and "↑ overflowed" in page and "A line that ends early" in page
    assert "↑ overflowed" not in render_html(one) and "A line that ends early" not in render_html(one)
    (row,) = [line for line in markdown.splitlines() if line.startswith("| coupled-nvfp4 |") and "1,024" in line]
    assert "≥ " in row and SAID.replace("_", r"\_") in row
    print_table(result)
    shown = capsys.readouterr().out
    assert " ".join(SAID.split()) in " ".join(shown.split()) and "≥ " in shown
    result.write(tmp_path / "result.json")
    assert SAID.replace("_", r"\_") in markdown_table([tmp_path / "result.json"])
    empty = overflowed(one, nothing=True)
    assert "blocks of 0 to" not in render_markdown(empty)
    for width in (700, 358):
        assert kl_by_bytes(empty, width) and kl_by_position(empty, width)
    assert SAID in render_html(empty) and "| coupled-nvfp4 | –, overflowed" in render_markdown(empty)


def test_a_comparison_does_not_pair_it(one):
    other = overflowed(one)
    assert difference(one.arm("coupled-nvfp4"), other.arm("coupled-nvfp4")) is None
    text = render_markdown([one, other])
    assert f"no pair: {SAID}".replace("_", r"\_") in text
    assert text.count(SAID.replace("_", r"\_")) >= 3, "in the verdict, the matrix and the section"
    assert arm_names([one, overflowed(one, "decoupled-fp8")])[-1] == "decoupled-fp8"
    page = render_html([other, one])
    assert f"no pair: {SAID}" in page and "↑ overflowed" in page


def test_a_study_counts_it_as_at_least(one):
    said = " ".join(findings(overflowed(one), None))
    assert f"coupled-nvfp4 {SAID}; its KL up to there, " in said and "(goal 36: met, at least)" in said
    w16 = "coupled-nvfp4-w16"
    assert w16 in [arm.name for arm in pareto(one)]
    best = dataclasses.replace(one.arm("decoupled-nvfp4"), name="decoupled-nvfp4-mse")
    best = dataclasses.replace(one, arms=[*one.arms, best])
    assert "is decoupled-nvfp4-mse: " in " ".join(findings(best, None))
    assert "is decoupled-nvfp4-mse: " not in " ".join(findings(overflowed(best, "decoupled-nvfp4-mse"), None))
    assert axis_floor(overflowed(one, "decoupled-fp8")) > 2 * axis_floor(one)
    assert w16 not in [arm.name for arm in pareto(overflowed(one, w16))]
    said = " ".join(findings(overflowed(one, nothing=True), None))
    assert "before anything of it was measured (goal 36: met, at least)" in said
    said = " ".join(findings(overflowed(one, "decoupled-nvfp4"), None))
    assert f"decoupled-nvfp4 {SAID}, so nothing is compared with it (all goals: MISSED)." in said
    assert "goal 36" not in said and "met, at least" not in said
    last = rows(overflowed(one, "decoupled-nvfp4"))[-1]
    assert last[0] == f"decoupled-nvfp4, {SAID}" and last[1].startswith("≥ ") and last[2] == "–"


def test_results_of_earlier_versions_still_load(one, tmp_path):
    from quantize_state.evals.records import digest

    one.write(tmp_path / "result.json")
    plain = json.loads((tmp_path / "result.json").read_text())
    for arm in plain["arms"]:
        assert arm.pop("overflows") == []
    del plain["checksum"]
    plain["checksum"] = digest(plain)
    (tmp_path / "old.json").write_text(json.dumps(plain))
    assert Result.read(tmp_path / "old.json") == one


# plans and questions


@pytest.fixture
def lost(monkeypatch):
    """The names of arms that every evaluation says overflowed."""
    names: set[str] = set()

    def marked(*args, **options):
        value = evaluate(*args, **options)
        for name in names & {arm.name for arm in value.arms}:
            value = overflowed(value, name)
        return value

    monkeypatch.setattr("quantize_state.evals.evaluate.evaluate", marked)
    return names


def test_a_candidate_that_overflows_is_out(tmp_path, lost):
    from quantize_state.evals.plan import plan

    options = {"budget_bytes": 1.3, "candidate_names": ["nvfp4", "int8-hadamard", "fp32"], "every_format": True}
    options |= {"tokens": 32, "together": 12, "device": "cpu", "out": tmp_path / "recipe.yaml"}
    label = "recipe for bytes 1.3"
    lost |= {"nvfp4 in layer 1"}
    with pytest.raises(QuantizeStateError, match=r"the probe nvfp4 in layer 1 overflowed .* choose another --probe"):
        plan("tiny-gdn", **options)
    lost.clear()
    lost |= {"int8-hadamard in layer 0", label}
    with pytest.raises(QuantizeStateError, match=rf"the {label} overflowed .* none is written"):
        plan("tiny-gdn", **options)
    assert not options["out"].exists()
    lost.remove(label)
    found = plan("tiny-gdn", **options)
    assert {layer.chosen for layer in found.layers} <= {"nvfp4", "fp32"}
    assert [checked.name for checked in found.uniform] == ["nvfp4"]
    options["out"] = tmp_path / "again" / "recipe.yaml"
    lost.clear()
    lost |= {"nvfp4 everywhere"}
    assert [u.name for u in plan("tiny-gdn", **options).uniform] == ["int8-hadamard"]


@pytest.mark.parametrize("task", ("gpqa_diamond_cot_zeroshot", "gpqa_diamond_zeroshot"))
def test_answers_that_an_overflow_ends_count_as_wrong_and_the_others_stay(loaded, tmp_path, monkeypatch, task):
    pytest.importorskip("lm_eval", reason="the extra gpqa is not installed")
    from quantize_state.evals.questions.ask import ask
    from quantize_state.evals.questions.dataset import COLUMNS
    from quantize_state.evals.questions.lm import PairedLM
    from quantize_state.evals.questions.plan import Plan, Source
    from quantize_state.evals.questions.result import words

    questions = [dict(zip(COLUMNS, (f"{'x ' * i}?", "pear", "plum", "quince", "fig"), strict=True)) for i in range(3)]
    arms = ["reference", BAD]
    run = lambda out: ask(loaded, task, arms, Source("short", questions), Plan(cap=2, batch_size=8), tmp_path / out)  # noqa: E731
    whole = run("whole")
    bad, method = whole.questions[1].sha256, "respond" if whole.task.form == "generate" else "choose"
    real, policy = getattr(PairedLM, method), {"name": BAD}

    def overflow(self, batch):
        asked = [question[0] if isinstance(question, tuple) else question for question in batch]
        if bad in [question.id for question in asked] and self.handle.layers[0].policy.name == policy["name"]:
            raise NonFiniteStateError("the state of layer 'a' holds Inf", layer="a")
        return real(self, batch)

    monkeypatch.setattr(PairedLM, method, overflow)
    result = run("overflowed")
    assert result.status == "complete"
    assert dataclasses.replace(result.arms[0], seconds=0) == dataclasses.replace(whole.arms[0], seconds=0)
    mine, theirs = (words(r.arm(BAD).repeats[0].answers) for r in (result, whole))
    assert mine[1] == "-" and [*mine[:1], *mine[2:]] == [*theirs[:1], *theirs[2:]]
    assert words(result.arm(BAD).repeats[0].scores)[1] == "0" and result.arm(BAD).accuracy.answers == 3
    (note,) = result.notes
    assert f"{BAD} overflowed in 1 answer, first to question {bad[:12]}" in note and "holds Inf" in note
    assert f"{BAD} overflowed in 1 answer" in render_markdown(result)
    assert run("overflowed") == result
    policy["name"] = StatePolicy(window=1).name
    with pytest.raises(NonFiniteStateError):
        run("reference")
