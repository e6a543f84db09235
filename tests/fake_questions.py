"""A result on questions without a model: answers that change where a state of that kind would change them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
from fake_results import fake_result

from quantize_state.evals.questions.assemble import ArmCells, Cell, arms_of, status_of
from quantize_state.evals.questions.pairing import text_hash
from quantize_state.evals.questions.result import RESEEDED, Question, QuestionsResult, Task
from quantize_state.evals.result import Policy

ARMS = {
    "reference": (Policy("fp32", None, 1), 0.0),
    RESEEDED: (Policy("fp32", None, 1), 0.3),
    "reference-again": (None, 0.004),
    "replay-fp32": (Policy("fp32", None, 16), 0.006),
    "coupled-nvfp4": (Policy("nvfp4", None, 1), 0.8),
    "coupled-fp8": (Policy("fp8_e4m3", None, 1), 0.25),
    "decoupled-nvfp4": (Policy("fp32", "nvfp4", 16), 0.05),
    "decoupled-fp8": (Policy("fp32", "fp8_e4m3", 16), 0.02),
}
"""Policy, and the share of answers that are drawn anew."""


def fake_questions(count: int = 198, repeats: int = 4, *, seed: int = 0, arms=tuple(ARMS), **task) -> QuestionsResult:
    """``count`` questions, each right with a probability of its own; an arm's new answers are right less often."""
    random = np.random.default_rng(seed)
    questions = [Question(text_hash(f"question {i}"), text_hash(f"prompt {i}"), "ABCD"[i % 4]) for i in range(count)]
    chance = random.beta(1.5, 1.0, count)
    right = random.random((count, repeats)) < chance[:, None]
    tokens = random.integers(200, 4000, (count, repeats))
    given = []
    for name, (policy, share) in ARMS.items():
        anew = random.random((count, repeats)) < share
        fresh = random.random((count, repeats)) < chance[:, None] * (0.6 if name.startswith("coupled") else 1.0)
        mine = np.where(anew, fresh, right)
        longer = tokens + np.where(anew, random.integers(0, 1500, (count, repeats)), 0)
        cells = {}
        for i, question in enumerate(questions):
            for r in range(repeats):
                wrong = "-" if (i + r) % 7 == 0 else "ABCD"[(i + 1 + (r + i // 4) % 3) % 4]
                answer = question.target if mine[i, r] else wrong
                cells[question.sha256, r] = Cell(float(mine[i, r]), answer, int(longer[i, r]), longer[i, r] > 4500)
        if name in arms:
            given.append(ArmCells(name, policy, text_hash(name), 60.0, cells))
    about = Task(
        name="gpqa_diamond_cot_zeroshot",
        version="2.2",
        form="generate",
        filter="flexible-extract",
        metric="exact_match",
        source="gpqa_diamond.csv",
        data_sha256=text_hash("data"),
        prompts_sha256=text_hash("prompts"),
        num_fewshot=0,
        chat_template=False,
        cap=4500,
        temperature=0.7,
        top_k=0,
        top_p=1.0,
        seed=seed,
    )
    about = dataclasses.replace(about, **task)
    other = fake_result(sequences=1, tokens=64, layers=1)
    made = arms_of(questions, given, seed)
    configuration = json.dumps({"weights": other.model.sha256, "prompts": about.prompts_sha256, "seed": seed})
    return QuestionsResult(
        model=other.model,
        task=about,
        questions=questions,
        arms=made,
        runs=[other.provenance],
        configuration=configuration,
        status=status_of(questions, made),
    )
