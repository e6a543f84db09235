"""Answers on disk as soon as they are there: one JSON line for each, only ever appended.

A run's folder holds one file for each process that answers (``arms/rank-0.jsonl`` …), so that processes need not
talk to each other. The lines hold the responses in full; result.json and reports hold hashes and option letters.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...quant.errors import FileFormatError, QuantizeStateError
from ..records import Mismatch, from_plain, to_plain

Key = tuple[str, str, int]
"""Arm, question and repeat."""


@dataclass(frozen=True)
class Answer:
    """One answer. ``answer`` is what the task's filter found in ``text``, None where it found nothing.

    ``policy`` and ``prompt`` are hashes: answers under one arm's name must be of one policy, and all to one prompt.
    ``overflow`` says what made an answer end: the arm's state held Inf or NaN. It counts as wrong, and not parsed.
    """

    arm: str
    policy: str
    question: str
    repeat: int
    prompt: str
    score: float
    answer: str | None
    tokens: int
    cut_off: bool
    seconds: float
    text: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    overflow: str = ""

    @property
    def key(self) -> Key:
        return self.arm, self.question, self.repeat


class AnswerStore:
    """The answers in ``folder``; new ones go to the file of ``rank``. Use as a context manager.

    A line that a killed process left unfinished is dropped, and that answer is made again.
    Raises FileFormatError for any other line that is no answer, and for two different answers to one question.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.folder = folder
        self.path = folder / f"rank-{rank}.jsonl"
        self.answers: dict[Key, Answer] = {}
        self._stream: IO[bytes] | None = None

    def __enter__(self) -> AnswerStore:
        self.answers = read_answers(self.folder)
        try:
            self._stream = self.path.open("ab")
            whole = _whole_lines(self.path.read_bytes())
            self._stream.truncate(len(whole))
        except OSError as error:
            raise QuantizeStateError(f"can't write {self.path}: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            self._stream.close()

    def append(self, answers: Iterable[Answer]) -> None:
        """Add answers; when this returns they are on the disk."""
        assert self._stream is not None
        new = list(answers)
        lines = "".join(json.dumps(to_plain(answer), ensure_ascii=False, allow_nan=False) + "\n" for answer in new)
        try:
            self._stream.write(lines.encode("utf-8", "replace"))
            self._stream.flush()
            os.fsync(self._stream.fileno())
        except OSError as error:
            raise QuantizeStateError(f"can't write {self.path}: {error.strerror or error}") from error
        self.answers.update({answer.key: answer for answer in new})


def read_answers(folder: Path) -> dict[Key, Answer]:
    """All answers in a run's folder, whichever process wrote them."""
    answers: dict[Key, Answer] = {}
    for path in sorted(folder.glob("rank-*.jsonl")):
        for number, line in enumerate(_whole_lines(path.read_bytes()).splitlines(), start=1):
            try:
                answer: Answer = from_plain(Answer, json.loads(line))
            except (ValueError, Mismatch) as error:
                raise FileFormatError(f"{path}, line {number} is no answer ({error}); delete the line") from None
            earlier = answers.setdefault(answer.key, answer)
            if (earlier.score, earlier.answer, earlier.policy) != (answer.score, answer.answer, answer.policy):
                raise FileFormatError(
                    f"{path}, line {number} is another answer of {answer.arm} to question {answer.question[:12]}, "
                    f"repeat {answer.repeat}, than one before it; delete one of the two"
                )
    return answers


def _whole_lines(raw: bytes) -> bytes:
    return raw[: raw.rfind(b"\n") + 1]
