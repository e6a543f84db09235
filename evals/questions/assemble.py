"""From single answers to a result: the same for a run that ends and for results that are merged. No torch."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ...quant.errors import InvalidValueError
from ..result import Policy
from . import statistics as s
from .pairing import text_hash
from .result import (
    MISSING,
    NOTHING,
    Accuracy,
    Arm,
    Difference,
    Lengths,
    Question,
    QuestionsResult,
    Repeat,
    column,
    words,
)

POINT = 0.01


@dataclass(frozen=True)
class Cell:
    """One answer as a result keeps it."""

    score: float
    answer: str
    tokens: int
    cut_off: bool


@dataclass(frozen=True)
class ArmCells:
    """An arm's answers by (question, repeat), and what the arm is."""

    name: str
    policy: Policy | None
    policy_sha256: str
    seconds: float
    cells: Mapping[tuple[str, int], Cell]


def answer_word(answer: str | None) -> str:
    """An answer as one word: the letter of an option, else the start of a hash; ``-`` for none."""
    if answer is None or not answer.strip():
        return NOTHING
    letter = re.fullmatch(r"[\s(]*([A-Za-z])[\s).]*", answer)
    return letter.group(1).upper() if letter else text_hash(answer.strip())[:8]


def arms_of(questions: Sequence[Question], given: Sequence[ArmCells], seed: int) -> list[Arm]:
    """Arms with their statistics, in the order given."""
    tables = {arm.name: _Table(questions, arm) for arm in given}
    reference = tables.get("reference")
    return [table.arm(None if table is reference else reference, seed) for table in tables.values()]


def status_of(questions: Sequence[Question], arms: Sequence[Arm]) -> Literal["complete", "partial"]:
    """Complete where every arm has answered every question, all equally often."""
    missing = any(MISSING in words(repeat.scores) for arm in arms for repeat in arm.repeats)
    uneven = len({len(arm.repeats) for arm in arms}) > 1
    return "partial" if missing or uneven or not arms or not questions else "complete"


class _Table:
    """An arm's answers as matrices [questions, repeats]."""

    def __init__(self, questions: Sequence[Question], arm: ArmCells) -> None:
        self.given = arm
        repeats = 1 + max((repeat for _, repeat in arm.cells), default=-1)
        self.rows = [[arm.cells.get((q.sha256, r)) for r in range(repeats)] for q in questions]
        shape = (len(questions), repeats)
        self.scores = self._numbers(shape, "score")
        self.tokens = self._numbers(shape, "tokens")
        self.cut = self._numbers(shape, "cut_off")
        self.answers = np.array([[MISSING if c is None else c.answer for c in row] for row in self.rows]).reshape(shape)

    def _numbers(self, shape: tuple[int, int], name: str) -> s.Floats:
        values = [[math.nan if c is None else float(getattr(c, name)) for c in row] for row in self.rows]
        return np.array(values, dtype=np.float64).reshape(shape)

    def arm(self, reference: _Table | None, seed: int) -> Arm:
        given = self.given
        return Arm(
            name=given.name,
            policy=given.policy,
            policy_sha256=given.policy_sha256,
            accuracy=Accuracy(
                mean=_mean(s.of_questions(self.scores)),
                ci95=s.accuracy_interval(self.scores),
                answers=int((~np.isnan(self.scores)).sum()),
                unparsed=int((self.answers == NOTHING).sum()),
                cut_off=int(np.nansum(self.cut)),
            ),
            difference=None if reference is None else self._difference(reference, seed),
            lengths=self._lengths(reference, seed) if np.nansum(self.tokens) > 0 else None,
            seconds=given.seconds,
            repeats=self._repeats(),
        )

    def _difference(self, reference: _Table, seed: int) -> Difference | None:
        mine, theirs = _paired(self.scores, reference.scores)
        differences = mine - theirs
        pairs = int((~np.isnan(differences)).sum())
        if not pairs:
            return None
        means = s.of_questions(differences)
        better, worse = int((means > 0).sum()), int((means < 0).sum())
        repeats = differences.shape[1]
        both = ~np.isnan(differences)
        changed = (self.answers[:, :repeats] != reference.answers[:, :repeats]) & both
        spread = s.spread(differences)
        return Difference(
            mean=_mean(means),
            ci95=s.difference_interval(means, repeats, seed=seed),
            pairs=pairs,
            better=better,
            worse=worse,
            lost=int((differences < 0).sum()),
            gained=int((differences > 0).sum()),
            changed=int(changed.sum()),
            mcnemar_p=s.mcnemar(better, worse),
            standard_error=None if spread is None else spread.standard_error,
            detectable=None if spread is None else spread.detectable,
            repeats_for_point=None if spread is None else spread.repeats_to_detect(POINT),
            at_least=spread is not None and spread.within is None,
        )

    def _lengths(self, reference: _Table | None, seed: int) -> Lengths:
        known = self.tokens[~np.isnan(self.tokens)]
        difference = interval = None
        if reference is not None:
            mine, theirs = _paired(self.tokens, reference.tokens)
            means = s.of_questions(mine - theirs)
            if not np.isnan(means).all():
                difference, interval = _mean(means), s.mean_interval(means, seed=seed)
        return Lengths(float(known.mean()), float(np.median(known)), difference, interval)

    def _repeats(self) -> list[Repeat]:
        repeats = []
        for r in range(self.scores.shape[1]):
            cells = [row[r] for row in self.rows]
            repeats.append(
                Repeat(
                    scores=column(MISSING if c is None else f"{c.score:.6g}" for c in cells),
                    answers=column(MISSING if c is None else c.answer for c in cells),
                    tokens=column(MISSING if c is None else c.tokens for c in cells),
                    cut_off=column(MISSING if c is None else int(c.cut_off) for c in cells),
                )
            )
        return repeats


def cells_of(result: QuestionsResult, arm: Arm) -> dict[tuple[str, int], Cell]:
    """A result's answers, one by one again."""
    cells = {}
    for r, repeat in enumerate(arm.repeats):
        columns = map(words, (repeat.scores, repeat.answers, repeat.tokens, repeat.cut_off))
        for question, score, answer, tokens, cut in zip(result.questions, *columns, strict=True):
            if score != MISSING:
                cells[question.sha256, r] = Cell(float(score), answer, int(tokens), cut == "1")
    return cells


def merge(results: Sequence[QuestionsResult]) -> QuestionsResult:
    """One result of several runs that asked the same thing: other arms, or other questions (``--shard``).

    Raises InvalidValueError, naming what differs, where the runs do not belong together: another model, data,
    prompt, seed or setting, an arm of another policy, or another answer to the same question.
    """
    if len(results) < 2:
        raise InvalidValueError("--merge needs two results or more")
    first = results[0]
    for i, other in enumerate(results[1:], start=2):
        difference = _configuration_difference(first.configuration, other.configuration)
        if difference:
            raise InvalidValueError(f"result {i} does not belong to the first one: {difference}")
    questions: dict[str, Question] = {}
    arms: dict[str, ArmCells] = {}
    for i, result in enumerate(results, start=1):
        for question in result.questions:
            if questions.setdefault(question.sha256, question) != question:
                raise InvalidValueError(f"result {i} asked question {question.sha256[:12]} with another prompt")
        for arm in result.arms:
            cells, earlier = cells_of(result, arm), arms.get(arm.name)
            if earlier is None:
                arms[arm.name] = ArmCells(arm.name, arm.policy, arm.policy_sha256, arm.seconds, cells)
                continue
            if earlier.policy_sha256 != arm.policy_sha256:
                raise InvalidValueError(f"result {i} has another policy under the name {arm.name}")
            shared = [key for key in cells if key in earlier.cells]
            for key in shared:
                if cells[key] != earlier.cells[key]:
                    raise InvalidValueError(
                        f"result {i} has another answer of {arm.name} to question {key[0][:12]}, repeat {key[1]}: the "
                        "machines compute differently. Merge runs of which each question and arm is in one only"
                    )
            seconds = earlier.seconds + arm.seconds * (1 - len(shared) / max(len(cells), 1))
            arms[arm.name] = dataclasses.replace(earlier, cells={**earlier.cells, **cells}, seconds=seconds)
    asked = list(questions.values())
    merged = arms_of(asked, list(arms.values()), first.task.seed)
    return dataclasses.replace(
        first,
        questions=asked,
        arms=merged,
        runs=[run for result in results for run in result.runs],
        status=status_of(asked, merged),
        notes=sorted({note for result in results for note in result.notes}),
    )


def _configuration_difference(a: str, b: str) -> str:
    import json

    if a == b:
        return ""
    one, two = json.loads(a), json.loads(b)
    keys = [key for key in sorted({*one, *two}) if one.get(key) != two.get(key)]
    return "; ".join(f"{key} is {two.get(key)!r} and not {one.get(key)!r}" for key in keys[:4]) or "its configuration"


def _paired(a: s.Floats, b: s.Floats) -> tuple[s.Floats, s.Floats]:
    repeats = min(a.shape[1], b.shape[1])
    return a[:, :repeats], b[:, :repeats]


def _mean(values: s.Floats) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else 0.0
