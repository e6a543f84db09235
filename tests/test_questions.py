"""Questions through lm-eval: the real tasks, paired arms, padding, stops and seeds, resuming, merging, ranks."""

from __future__ import annotations

import copy
import csv
import dataclasses
import importlib
import inspect
import json
import os
import random
import re
import signal
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("lm_eval", reason="the extra gpqa is not installed")
import datasets

from quantize_state.adapters import attach
from quantize_state.cli import _questions, main
from quantize_state.evals.embedded import EMBEDDED
from quantize_state.evals.injected import Injected
from quantize_state.evals.models import load_model
from quantize_state.evals.questions import harness as h
from quantize_state.evals.questions import pairing, standin
from quantize_state.evals.questions.ask import ask
from quantize_state.evals.questions.dataset import COLUMNS, read_questions
from quantize_state.evals.questions.lm import PairedLM, Sampling
from quantize_state.evals.questions.plan import Plan, Source
from quantize_state.evals.questions.result import RESEEDED, QuestionsResult
from quantize_state.evals.questions.sampling import RowStops, SeededSampling
from quantize_state.evals.questions.store import Answer, AnswerStore, read_answers
from quantize_state.evals.team import Team
from quantize_state.quant.errors import FileFormatError, InvalidValueError, QuantizeStateError
from quantize_state.quant.rounding import derive_seeds

SAMPLING_ERROR = 0.02  # of a probability from 20,000 draws: 5 standard errors of one near 0.3

COT, LETTERS = "gpqa_diamond_cot_zeroshot", "gpqa_diamond_zeroshot"


def rows(count: int = 8) -> list[dict[str, str]]:
    return [{column: row[column] for column in COLUMNS} for row in standin.stand_in(count)]


def short(count: int = 4) -> list[dict[str, str]]:
    """Questions of a few bytes, each longer than the one before: for tests that read no sense in them."""
    return [
        dict(zip(COLUMNS, (f"{'x ' * 4 * i}{i}?", "pear", "plum", "quince", "fig"), strict=True)) for i in range(count)
    ]


@pytest.fixture(scope="module")
def loaded():
    return load_model("tiny-gdn", device="cpu")


@pytest.fixture
def attached(loaded):
    with attach(loaded.model, "reference") as handle:
        yield handle


def asked(loaded, out, arms=("reference", "decoupled-nvfp4"), *, task=COT, count=4, **plan):
    plan = {"cap": 5, "batch_size": 8} | plan
    return ask(loaded, task, list(arms), Source("short", short(count)), Plan(**plan), out)


# the user's data


def test_a_copy_in_any_form_gives_the_same_questions(tmp_path):
    full = standin.stand_in(5)
    standin.write_csv(tmp_path / "a.csv", full)
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row) for row in full) + "\n\n")
    datasets.DatasetDict({"train": datasets.Dataset.from_list(full)}).save_to_disk(tmp_path / "both")
    datasets.Dataset.from_list(full).save_to_disk(tmp_path / "one")
    expected = [{column: row[column] for column in COLUMNS} for row in full]
    for name in ("a.csv", "a.jsonl", "both", "one"):
        assert read_questions(tmp_path / name) == expected, name


def test_columns_of_numbers_are_text(tmp_path, attached, loaded):
    """lm-eval calls text methods on every answer, and a data set of numbers has none."""
    numbers = [dict(zip(COLUMNS, (f"{i} + {i}?", 2 * i, 2 * i + 1, 1e-3, 7.5), strict=True)) for i in range(10, 13)]
    with (tmp_path / "n.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(numbers)
    (tmp_path / "n.jsonl").write_text("\n".join(json.dumps(row) for row in numbers))
    datasets.Dataset.from_list(numbers).save_to_disk(tmp_path / "n")
    for name in ("n.csv", "n.jsonl", "n"):
        read = read_questions(tmp_path / name)
        assert [row["Correct Answer"] for row in read] == ["20", "22", "24"], name
        assert all(type(value) is str for row in read for value in row.values())
        assert read[0]["Incorrect Answer 2"] == "0.001"
    (tmp_path / "e.jsonl").write_text(json.dumps(numbers[0]).replace("0.001", "1e-3").replace("7.5", "7.50"))
    literal = read_questions(tmp_path / "e.jsonl")[0]
    assert (literal["Incorrect Answer 2"], literal["Incorrect Answer 3"]) == ("1e-3", "7.50")
    lm = PairedLM(attached, loaded.tokenizer, batch_size=1)
    assert "(A) " in h.load_task(COT, lm, rows=read, cap=4).questions[0].prompt


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gone.csv", None, "gated"),
        ("a.txt", "Question", "neither .csv nor .jsonl"),
        ("a.csv", "Question,Answer\n1,2\n", "no column 'Correct Answer'"),
        ("a.csv", ",".join(COLUMNS) + "\n", "holds no question"),
        ("a.csv", ",".join(COLUMNS) + "\nq,a,b,,d\n", "question 1 has no text in column 'Incorrect Answer 2'"),
        ("a.csv", ",".join(COLUMNS) + "\nq,a,b,c,a\n", "among the incorrect ones"),
        ("a.csv", ",".join(COLUMNS) + "\nq,a,b,c,d\nq,a,b,c,d\n", "twice, as number 1 and 2"),
        ("a.csv", ",".join(COLUMNS) + '\n"q,a,b,c,d\n', "no whole CSV"),
        ("a.jsonl", "{}\n[1]\n", "line 2 holds no JSON object"),
        ("a.jsonl", "{", "line 1"),
    ],
)
def test_a_copy_that_does_not_fit_is_named(tmp_path, name, content, says):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(QuantizeStateError, match=says) as error:
        read_questions(path)
    assert str(path) in str(error.value)


def test_a_folder_that_is_no_saved_data_set_names_the_csv_in_it(tmp_path):
    (tmp_path / "gpqa_diamond.csv").write_text("x")
    with pytest.raises(FileFormatError, match=r"did you mean .*gpqa_diamond\.csv"):
        read_questions(tmp_path)


# the stand-in


def test_the_stand_in_says_what_it_is_and_holds_its_answers():
    full = standin.stand_in(30)
    assert full == standin.stand_in(40)[:30] and full != standin.stand_in(30, seed=1)
    for row in full:
        assert "not GPQA" in row["High-level domain"] and "not GPQA" in row["Record ID"]
        assert len({row[column] for column in COLUMNS[1:]}) == 4
        asked, sentence = row["Question"].rpartition("What does ")[2].removesuffix(" do?"), row["Correct Answer"]
        module, function = asked.split(".")
        source = " ".join(inspect.getsource(importlib.import_module(module)).split())
        assert re.search(rf'def {function}\b.*?"""\s*{re.escape(sentence[:-1])}', source), "true in itself"
    assert len({row["Question"] for row in full}) == 30
    assert all(row["Question"].count("(") == 5 for row in standin.stand_in(80)), "brackets mark options alone"
    far = [len(row["Question"]) for row in full]
    assert min(far[3::4]) > max(far[2::4]) > max(far[0::4]), "one in four across each distance"


@pytest.mark.parametrize("task", [COT, LETTERS, "gpqa_diamond_generative_n_shot", "gpqa_main_n_shot"])
def test_the_letter_in_the_notes_is_that_of_the_right_option(attached, loaded, task):
    lm = PairedLM(attached, loaded.tokenizer, batch_size=1)
    given = rows(12)
    made = h.load_task(task, lm, rows=given, cap=4)
    assert made.likelihood == ("generative" not in task and "cot" not in task)
    for row, question in zip(given, made.questions, strict=True):
        ending = next(end for end in standin.PROMPT_ENDS if question.prompt.rstrip().endswith(end))
        notes, choices = question.prompt.rsplit("Choices:", 1)
        assert f"{ending} {question.target} {row['Correct Answer']}\n" in notes
        assert f"{question.target} {row['Correct Answer']}\n" in choices
        for wrong in [row[f"Incorrect Answer {i}"] for i in (1, 2, 3)]:
            (letter,) = re.findall(rf"\((.)\) {re.escape(wrong)}\n", choices)
            assert f": ({letter}) {wrong}\n" in notes and f"({letter})" != question.target
        shown = re.findall(r"\(.\)", question.prompt)
        assert set(shown) == {"(A)", "(B)", "(C)", "(D)"} and len(shown) == 9, "no other brackets mislead"


# pairing


def test_options_depend_on_the_question_alone(attached, loaded):
    lm = PairedLM(attached, loaded.tokenizer, batch_size=1)
    given = rows(10)
    for task in (COT, "gpqa_diamond_n_shot"):  # whose code uses Python's generator, and one of its own
        random.seed(1)
        first = {q.id: q.prompt_sha256 for q in h.load_task(task, lm, rows=given, cap=4).questions}
        random.seed(2)
        again = {q.id: q.prompt_sha256 for q in h.load_task(task, lm, rows=given[::-1], cap=4).questions}
        part = {q.id: q.prompt_sha256 for q in h.load_task(task, lm, rows=given[3:5], cap=4).questions}
        assert first == again and part.items() <= first.items()
    assert len({pairing.question_random(row).random() for row in given}) == len(given)


def test_random_numbers_of_others_are_put_back():
    random.seed(3)
    state = random.getstate()
    with pairing.seeded(rows, 7):
        drawn = random.random()
    assert random.getstate() == state and drawn == random.Random(7).random()


def test_few_shot_prompts_do_not_depend_on_a_limit(loaded, tmp_path):
    plan = {"task": "gpqa_diamond_n_shot", "count": 6, "num_fewshot": 2, "cap": 1}
    some = asked(loaded, tmp_path / "some", ["reference"], limit=2, **plan)
    more = asked(loaded, tmp_path / "more", ["reference"], limit=3, **plan)
    assert some.questions == more.questions[:2] and len(more.questions) == 3
    assert some.task.prompts_sha256 == more.task.prompts_sha256


# sampling and stops


def test_noise_makes_greedy_decoding_a_draw_from_the_softmax():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    seeds = derive_seeds(torch.arange(20_000))
    noisy = SeededSampling(seeds, prompt=3, temperature=0.7)(torch.zeros(20_000, 5), logits.expand(20_000, 4))
    drawn = torch.bincount(noisy.argmax(-1), minlength=4) / 20_000
    assert (drawn - (logits / 0.7).softmax(-1)).abs().max() < SAMPLING_ERROR
    nucleus = SeededSampling(seeds, 3, 1.0, top_p=0.8)(torch.zeros(20_000, 5), logits.expand(20_000, 4))
    assert set(nucleus.argmax(-1).tolist()) == {0, 2}
    only = SeededSampling(seeds, 3, 1.0, top_k=1)(torch.zeros(20_000, 5), logits.expand(20_000, 4))
    assert set(only.argmax(-1).tolist()) == {2}


def test_noise_belongs_to_a_row_and_step():
    flat = torch.zeros(2, 50)
    a, b = derive_seeds(torch.tensor([1, 2]))
    one = SeededSampling(torch.stack([a, b]), 3, 1.0)(torch.zeros(2, 5), flat)
    two = SeededSampling(torch.stack([b, a]), 7, 1.0)(torch.zeros(2, 9), flat)
    assert torch.equal(one[0], two[1]) and torch.equal(one[1], two[0]) and not torch.equal(one[0], one[1])
    later = SeededSampling(torch.stack([a, b]), 3, 1.0)(torch.zeros(2, 6), flat)
    assert not torch.equal(one[0], later[0])


def test_each_row_stops_at_its_own_text(loaded):
    stops = RowStops(loaded.tokenizer, ["</s>", "Question:"], eos=[0], prompt=4, rows=3)
    texts = ["a</s>xxxxxxxx", "b Question:x", "cccc\0xxxxxxx"]
    ids = torch.tensor([list(b"</s>" + text.encode())[:16] for text in texts])
    finished = [stops(ids[:, :n], None).tolist() for n in range(5, 17)]
    assert stops.ends == [5, 11, 5]
    assert finished[-1] == [True, True, True] and finished[0] == [False, False, False]


# the model


@pytest.mark.parametrize("name", EMBEDDED)
def test_batches_of_1_and_8_give_the_same_answers(name):
    """Prompts of other lengths are padded on the left, and the state must not see the padding."""
    model = load_model(name, device="cpu")
    for arm in ("decoupled-nvfp4", "coupled-nvfp4"):
        with attach(model.model, arm) as handle:
            found = []
            for size in (1, 8):
                lm = PairedLM(handle, model.tokenizer, batch_size=size, sampling=Sampling(0.7))
                questions = h.load_task(COT, lm, rows=short(3), cap=8).questions
                batches = [questions[i : i + size] for i in range(0, len(questions), size)]
                found.append([r for b in batches for r in lm.respond([(q, lm.seed_of(q, 0)) for q in b])])
        assert found[0] == found[1]
        assert len({r.text for r in found[0]}) > 1


def test_scores_are_those_of_lm_eval_itself(loaded, tmp_path):
    """The reference arm, question by question, against lm-eval's own evaluation of the same task and model."""
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM

    tokenizer = copy.deepcopy(loaded.tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.convert_ids_to_tokens(0)  # HFLM can't do without
    model = dataclasses.replace(loaded, tokenizer=tokenizer)
    arms, long = ["reference", "reference-again"], Source("stand-in", rows(3), True)
    brief = [dict(zip(COLUMNS, (f"Answer: ({x})\n" * 3, "pear", "plum", "quince", "fig"), strict=True)) for x in "ABCD"]
    # whose letters the model repeats: answers that are all the same would fit any question
    for task, cap, source in ((COT, 12, long), (LETTERS, 1, Source("letters", brief))):
        result = ask(model, task, arms, source, Plan(cap=cap, batch_size=3), tmp_path / task)
        with h.quiet():
            lm = HFLM(pretrained=loaded.model, tokenizer=tokenizer, batch_size=2)
            made = h.load_task(task, lm, rows=source.rows, cap=cap)
            theirs = evaluator.evaluate(lm, {task: made.task}, bootstrap_iters=0, log_samples=True)
        samples = [s for s in theirs["samples"][task] if s["filter"] == made.scoring.filter]
        expected = {pairing.question_hash(s["doc"]): s[made.scoring.metric] for s in samples}
        for name in arms:
            scores = result.arm(name).repeats[0].scores.split(" ")
            assert [float(s) for s in scores] == [expected[q.sha256] for q in result.questions]
        assert sum(expected.values()) > 0, "a score of zero throughout would agree with anything"
    assert result.arm("reference").repeats[0].answers == "A B C D"


def test_each_response_is_scored_on_its_own(attached, loaded):
    """lm-eval's filters end in take_first: given all repeats at once, they would score the first one each time."""
    lm = PairedLM(attached, loaded.tokenizer, batch_size=1)
    made = h.load_task(COT, lm, rows=short(1), cap=1)
    (question,) = made.questions
    wrong = next(f"({letter})" for letter in "ABCD" if f"({letter})" != question.target)
    expected = [(question.target, 1.0, question.target), (wrong, 0.0, wrong), ("hm", 0.0, None)]
    scores = made.score([(question, [f"so it is {response}"]) for response, _, _ in expected])
    assert [(scored.score, scored.answer) for scored in scores] == [(score, answer) for _, score, answer in expected]
    assert all(set(scored.metrics) == {"strict-match/exact_match", "flexible-extract/exact_match"} for scored in scores)


def test_options_are_read_as_decode_reads_them(loaded, tmp_path):
    """A prompt that is prefilled exactly would give every arm the same log-likelihoods."""
    seen = {}
    for arm in ("reference", "coupled-nvfp4"):
        with attach(loaded.model, arm) as handle:
            lm = PairedLM(handle, loaded.tokenizer, batch_size=2)
            made = h.load_task(LETTERS, lm, rows=short(2), cap=1)
            seen[arm] = [value for options in lm.choose(made.questions) for value, _ in options]
            assert not handle.teacher_forced
    assert max(abs(a - b) for a, b in zip(*seen.values(), strict=True)) > 1e-3


def test_repeats_differ_and_arms_share_their_seeds(loaded, tmp_path):
    arms = ["reference", RESEEDED, "reference-again"]
    result = asked(loaded, tmp_path, arms, count=2, repeats=2, temperature=1.5, cap=8)
    stored = read_answers(tmp_path / "arms")
    texts = {arm: [stored[arm, q.sha256, r].text for q in result.questions for r in (0, 1)] for arm in arms}
    assert texts["reference"] == texts["reference-again"]
    assert texts["reference"] != texts[RESEEDED]
    assert any(a != b for a, b in zip(texts["reference"][::2], texts["reference"][1::2], strict=True))
    assert result.arm("reference-again").difference.changed == 0


def test_cut_off_and_unparsed_answers_are_counted_apart(loaded, tmp_path):
    result = asked(loaded, tmp_path, ["reference"], cap=1)
    accuracy = result.arm("reference").accuracy
    assert (accuracy.cut_off, accuracy.unparsed, accuracy.mean) == (4, 4, 0.0)
    assert result.arm("reference").repeats[0].answers == "- - - -"
    assert result.arm("reference").lengths.mean == 1.0 and result.task.cap == 1


def test_an_answer_ends_at_the_texts_that_were_given(loaded, tmp_path):
    """A model that was never taught to stop would run every answer into the cap."""
    on = asked(loaded, tmp_path / "on", ["reference"], count=1, cap=12)
    (running,) = read_answers(tmp_path / "on" / "arms").values()
    end = next(c for c in running.text[2:] if c not in running.text[:2])
    ended = asked(loaded, tmp_path / "ended", ["reference"], count=1, cap=12, until=(end,))
    (answer,) = read_answers(tmp_path / "ended" / "arms").values()
    assert running.cut_off and running.tokens == 12
    assert not answer.cut_off and answer.text == running.text[: running.text.index(end)]
    assert answer.tokens == len(answer.text.encode()) + 1, "the length counts the token that ended it"
    assert on.task.until == ["</s>"] and ended.task.until == ["</s>", end]
    with pytest.raises(QuantizeStateError, match="another configuration"):
        asked(loaded, tmp_path / "on", ["reference"], count=1, cap=12, until=(end,))
    with pytest.raises(InvalidValueError, match="until is empty"):
        Plan(until=("",))


def test_the_stand_in_ends_with_its_line_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(_questions, "ask_and_report", lambda args, tasks, plan: seen.append(plan.until) or 0)
    assert main(["gpqa", "tiny-gdn", "--data", "stand-in"]) == 0
    assert main(["gpqa", "tiny-gdn", "--data", "stand-in", "--until", r"\n\n", "--until", "Question:"]) == 0
    assert main(["tasks", "tiny-gdn", "--tasks", "gsm8k"]) == 0
    assert seen == [("\n",), ("\n\n", "Question:"), ()]


@pytest.mark.parametrize(
    ("plan", "arms", "says"),
    [
        ({"repeats": 2}, ("reference",), "at temperature 0"),
        ({"task": LETTERS, "temperature": 0.5}, ("reference",), "log-likelihoods"),
        ({}, ("reference", RESEEDED), "without sampling"),
        ({}, ("decoupled-nvfp4",), "need the one called reference"),
        ({"cap": 131072}, ("reference",), "--max-gen-toks is 131,072"),
        ({"cap": 131000}, ("reference",), "leaves room for 72"),
        ({"task": "gpqa_diamond_cot_zeroshoot"}, ("reference",), "did you mean gpqa_diamond_cot_zeroshot"),
        ({"filter": "strict"}, ("reference",), "Did you mean 'strict-match'"),
        ({"metric": "acc"}, ("reference",), "metric"),
        ({"shard": (3, 2)}, ("reference",), "I/N"),
        ({"temperature": -1.0}, ("reference",), "temperature"),
        ({"top_p": 0.0}, ("reference",), "top-p"),
    ],
)
def test_what_can_not_be_asked_is_refused_before_anything_is_written(loaded, tmp_path, plan, arms, says):
    with pytest.raises(InvalidValueError, match=says):
        asked(loaded, tmp_path / "run", arms, **plan)
    assert not (tmp_path / "run").exists()


# what is kept


def an_answer(number: int, **changes) -> Answer:
    answer = Answer(
        "reference", "p", f"q{number}", 0, "h", 1.0, "(A)", 3, False, 0.1, "text € \u2028 (A)", {"a/b": 1.0}
    )
    return dataclasses.replace(answer, **changes)


def test_a_line_that_a_kill_cut_is_dropped_and_others_are_not(tmp_path):
    with AnswerStore(tmp_path, 1) as store:
        store.append([an_answer(1), an_answer(2)])
    path = tmp_path / "rank-1.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert list(read_answers(tmp_path)) == [an_answer(1).key]
    with AnswerStore(tmp_path, 1) as store:
        assert list(store.answers) == [an_answer(1).key]
        store.append([an_answer(3)])
    assert set(read_answers(tmp_path)) == {an_answer(1).key, an_answer(3).key}
    path.write_bytes(whole.replace(b'"score": 1.0', b'"score": "1"', 1))
    with pytest.raises(FileFormatError, match=r"rank-1\.jsonl, line 1 is no answer"):
        read_answers(tmp_path)


def test_two_answers_to_one_question_must_agree(tmp_path):
    for rank, score in ((0, 1.0), (1, 1.0), (2, 0.0)):
        (tmp_path / f"rank-{rank}.jsonl").write_text(json.dumps(dataclasses.asdict(an_answer(1, score=score))) + "\n")
        if rank < 2:
            assert len(read_answers(tmp_path)) == 1
    with pytest.raises(FileFormatError, match="another answer of reference"):
        read_answers(tmp_path)


def test_a_finished_run_takes_in_arms_questions_and_repeats(loaded, tmp_path):
    plan = {"count": 3, "temperature": 0.7, "cap": 3}
    first = asked(loaded, tmp_path, ["reference"], limit=2, **plan)
    lines = (tmp_path / "arms" / "rank-0.jsonl").read_bytes()
    written = (tmp_path / "result.json").read_bytes()
    assert asked(loaded, tmp_path, ["reference"], limit=2, **plan) == first
    assert (tmp_path / "result.json").read_bytes() == written
    more = asked(loaded, tmp_path, ["reference", "replay-fp32"], repeats=2, **plan)
    assert (tmp_path / "arms" / "rank-0.jsonl").read_bytes().startswith(lines)
    assert [arm.accuracy.answers for arm in more.arms] == [6, 6] and more.status == "complete"
    assert more.arm("reference").repeats[0].answers.startswith(first.arm("reference").repeats[0].answers)
    assert len((tmp_path / "arms" / "rank-0.jsonl").read_bytes().splitlines()) == 12, "nothing was asked twice"
    partial = asked(loaded, tmp_path, ["reference"], limit=1, **plan)
    assert [arm.name for arm in partial.arms] == ["reference", "replay-fp32"], "nothing is lost by asking less"
    with pytest.raises(QuantizeStateError, match="another configuration"):
        asked(loaded, tmp_path, ["reference"], **plan | {"cap": 4})
    assert QuestionsResult.read(tmp_path) == more == partial


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "quantize_state", "gpqa", "tiny-gdn", *arguments]


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_a_killed_run_goes_on_without_repeating_or_losing_an_answer(tmp_path, capsys):
    out = tmp_path / "run"
    standin.write_csv(tmp_path / "short.csv", short(3))
    settings = "--arms decoupled-nvfp4 --temperature 0.7 --repeats 2 --max-gen-toks 4 --batch-size 1"
    arguments = ["--data", str(tmp_path / "short.csv"), *settings.split()]
    process = subprocess.Popen(command(*arguments, "--out", str(out)), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    path, deadline = out / "arms" / "rank-0.jsonl", time.monotonic() + 240
    while not (path.exists() and path.read_bytes().count(b"\n") >= 3):
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before it could be killed"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = path.read_bytes()
    kept = before[: before.rfind(b"\n") + 1]
    assert kept.count(b"\n") < 12 and not (out / "result.json").exists()
    assert main(["gpqa", "tiny-gdn", *arguments, "--out", str(out)]) == 0
    after = path.read_bytes()
    assert after.startswith(kept)
    keys = [(a["arm"], a["question"], a["repeat"]) for a in map(json.loads, after.splitlines())]
    assert len(keys) == len(set(keys)) == 12
    result = QuestionsResult.read(out)
    assert result.status == "complete" and (out / "report.html").exists()
    assert "decoupled-nvfp4" in capsys.readouterr().out


def test_two_processes_share_the_questions_and_give_what_one_gives(loaded, tmp_path):
    settings = "--data stand-in --arms reference --limit 3 --temperature 0.7 --max-gen-toks 4 --batch-size 2"
    arguments = settings.split()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    launch += command(*arguments, "--out", str(tmp_path / "two"))[2:]
    done = subprocess.run(launch, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = [len(p.read_bytes().splitlines()) for p in sorted((tmp_path / "two" / "arms").glob("rank-*.jsonl"))]
    assert counts == [2, 1]
    two = QuestionsResult.read(tmp_path / "two")
    full = rows(198)
    source = Source("stand-in", full, True)
    plan = Plan(limit=3, temperature=0.7, cap=4, until=standin.UNTIL)
    one = ask(loaded, COT, ["reference"], source, plan, tmp_path / "one")
    assert two.arms[0].repeats == one.arms[0].repeats and two.questions == one.questions
    assert done.stdout.count("result.json") == 1, "the first process alone reports"
    assert two.task.stand_in and "this is not GPQA" in (tmp_path / "two" / "report.html").read_text()


def test_processes_share_what_all_have_read_before_one_answers(loaded, tmp_path, monkeypatch):
    """A process that read the answers later than another began would share out fewer questions, and lose some."""
    events = []
    enter, append = AnswerStore.__enter__, AnswerStore.append
    monkeypatch.setattr(AnswerStore, "__enter__", lambda self: (events.append("read"), enter(self))[1])
    monkeypatch.setattr(AnswerStore, "append", lambda self, answers: (events.append("answer"), append(self, answers)))
    monkeypatch.setattr(Team, "wait", lambda self: events.append("wait"))
    asked(loaded, tmp_path, ["reference"], count=2, cap=1, batch_size=1)
    assert events == ["read", "wait", "answer", "answer", "wait"]


# other tasks


def test_any_question_task_of_lm_eval_can_be_asked(loaded, tmp_path):
    (tmp_path / "data.jsonl").write_text(
        "\n".join(json.dumps({"q": f"{i} plus 1 is", "a": str(i + 1)}) for i in range(3))
    )
    (tmp_path / "sums.yaml").write_text(
        f"task: own_sums\ndataset_path: json\ndataset_kwargs: {{data_files: {tmp_path}/data.jsonl}}\n"
        'test_split: train\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\noutput_type: generate_until\n'
        'generation_kwargs: {until: ["\\n"], max_gen_toks: 900}\nmetric_list: [{metric: exact_match}]\n'
    )
    plan = Plan(cap=3, include_path=tmp_path)
    result = ask(loaded, "own_sums", ["reference", "decoupled-fp8"], Source("own"), plan, tmp_path / "run")
    assert len(result.questions) == 3 and result.task.data_sha256 == "" and result.task.filter == "none"
    assert result.arm("decoupled-fp8").accuracy.answers == 3
    assert max(map(int, result.arms[0].repeats[0].tokens.split(" "))) <= 3


def test_an_injected_arm_is_refused(loaded, tmp_path):
    """Its observer follows known text; asked, it would answer as FP32 does under its name."""
    arms = {"reference": "reference", "mine": Injected(lambda prompt: None, 16, 8.0, 4.0)}
    with pytest.raises(InvalidValueError, match="'mine' is injected, which evaluate alone runs"):
        ask(loaded, "gpqa", arms, Source("short", short()), Plan(), tmp_path / "run")
