"""The result of asking questions: a typed, versioned JSON document beside evals/result.py. Loads without torch.

Scores are 0 to 1, differences are arm − reference in the same unit, lengths are in tokens. Questions are named by
hash and answers by option letter, as the questions themselves may not be published.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Final, Literal

import numpy as np

from ...quant.errors import FileFormatError, unknown_name
from ..records import dump, load, write_atomic
from ..result import Model, Policy, Provenance
from .statistics import Floats

SCHEMA: Final = "quantize-state/questions/1"

RESEEDED = "reference-reseeded"
"""The arm that is the reference with other sampling seeds: what two runs of one model differ by."""

NOTHING, MISSING = "-", "."
"""In place of an answer: none could be parsed; not answered yet."""

Interval = tuple[float, float]


@dataclass(frozen=True)
class Task:
    """What was asked and how. ``cap`` is the most tokens that an answer could have, 0 for log-likelihoods.
    An answer ends at one of the texts in ``until``, at the model's end-of-text token, or there.

    ``data_sha256`` is over the questions before any option was moved; empty where lm-eval loaded them itself.
    """

    name: str
    version: str
    form: Literal["generate", "likelihood"]
    filter: str
    metric: str
    source: str
    data_sha256: str
    prompts_sha256: str
    num_fewshot: int
    chat_template: bool
    cap: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    stand_in: bool = False
    until: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Question:
    """``target`` is the letter of the right option, or the start of a hash where the answer is no letter."""

    sha256: str
    prompt_sha256: str
    target: str


@dataclass(frozen=True)
class Repeat:
    """One repeat of all questions, one word for each in their order: ``.`` where it was not asked yet.

    ``answers`` are letters, the start of a hash where the answer is no letter, or ``-`` where none could be parsed.
    """

    scores: str
    answers: str
    tokens: str
    cut_off: str


@dataclass(frozen=True)
class Accuracy:
    mean: float
    ci95: Interval | None
    answers: int
    unparsed: int
    cut_off: int


@dataclass(frozen=True)
class Lengths:
    """Tokens per answer. ``difference`` is to the reference, question by question; None for the reference itself."""

    mean: float
    median: float
    difference: float | None
    ci95: Interval | None


@dataclass(frozen=True)
class Difference:
    """Arm − reference on the same questions, seeds and repeats.

    ``better`` and ``worse`` count questions that the arm answered right more or less often; ``lost`` and ``gained``
    count answers that went from right to wrong and back, ``changed`` those that became another answer.
    ``detectable`` is the difference that 8 of 10 such runs would find. ``repeats_for_point`` resolve a difference
    of one point on these questions: None where no number does; with ``at_least``, one repeat tells no more.
    """

    mean: float
    ci95: Interval | None
    pairs: int
    better: int
    worse: int
    lost: int
    gained: int
    changed: int
    mcnemar_p: float
    standard_error: float | None
    detectable: float | None
    repeats_for_point: int | None
    at_least: bool


@dataclass(frozen=True)
class Arm:
    name: str
    policy: Policy | None
    policy_sha256: str
    accuracy: Accuracy
    difference: Difference | None
    lengths: Lengths | None
    seconds: float
    repeats: list[Repeat]
    weights: ClassVar[None] = None
    """Questions are asked of the model's own weights; the verdicts of evaluations look here."""


@dataclass(frozen=True)
class QuestionsResult:
    """One model, one set of questions, several arms beside one reference; ``runs`` are several after a merge.

    ``configuration`` is all that decides an answer, as JSON; results with another one can't be merged.
    """

    model: Model
    task: Task
    questions: list[Question]
    arms: list[Arm]
    runs: list[Provenance]
    configuration: str
    status: Literal["complete", "partial"] = "complete"
    kind: Literal["questions"] = "questions"
    schema: Literal["quantize-state/questions/1"] = SCHEMA
    notes: list[str] = field(default_factory=list)

    def arm(self, name: str) -> Arm:
        """The arm called ``name``; raises InvalidValueError with close matches where there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise unknown_name("arm", name, [arm.name for arm in self.arms])

    @property
    def reference(self) -> Arm | None:
        return next((arm for arm in self.arms if arm.name == "reference"), None)

    @property
    def repeats(self) -> int:
        """The most repeats that an arm has."""
        return max((len(arm.repeats) for arm in self.arms), default=0)

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write atomically; an existing file is replaced only with ``overwrite``."""
        write_atomic(Path(path), dump(self), overwrite=overwrite)

    @classmethod
    def read(cls, path: str | Path) -> QuestionsResult:
        """Read and check a result.json. Raises FileFormatError naming file, what was found and what to do."""
        path = Path(path)
        path = path / "result.json" if path.is_dir() else path
        result = load(cls, path, SCHEMA)
        for arm in result.arms:
            for repeat in arm.repeats:
                columns = (repeat.scores, repeat.answers, repeat.tokens, repeat.cut_off)
                if any(len(words(column)) != len(result.questions) for column in columns):
                    raise FileFormatError(f"{path}: {arm.name} has another number of answers than of questions")
        return result


def words(column: str) -> list[str]:
    return column.split(" ") if column else []


def column(values: Iterable[object]) -> str:
    return " ".join(map(str, values))


def matrix(arm: Arm, name: str) -> Floats:
    """``scores``, ``tokens`` or ``cut_off`` of an arm as numbers [questions, repeats], NaN where there is none."""
    columns = [[np.nan if w == MISSING else float(w) for w in words(getattr(r, name))] for r in arm.repeats]
    return np.array(columns, dtype=np.float64).T


def answers(arm: Arm) -> list[list[str]]:
    """The answers of each repeat as letters and other words."""
    return [words(repeat.answers) for repeat in arm.repeats]
