"""What is to be asked, and how: settings alone, checked without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...quant.errors import InvalidValueError
from ..records import digest


@dataclass(frozen=True)
class Plan:
    """How to ask. ``limit`` questions (0: all), of which ``shard`` (i, n) takes every n-th from the i-th on.

    ``until`` are texts that end an answer, beside the task's own.
    """

    repeats: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    cap: int = 16384
    until: tuple[str, ...] = ()
    limit: int = 0
    shard: tuple[int, int] = (1, 1)
    batch_size: int = 8
    seed: int = 0
    window: int = 16
    num_fewshot: int | None = None
    chat_template: bool = False
    system_instruction: str | None = None
    think_end_token: str | None = None
    filter: str | None = None
    metric: str | None = None
    include_path: str | Path | None = None

    def __post_init__(self) -> None:
        for name, value in (("repeats", self.repeats), ("batch-size", self.batch_size), ("max-gen-toks", self.cap)):
            if value < 1:
                raise InvalidValueError(f"{name} is {value}; it must be 1 or more")
        if self.temperature < 0:
            raise InvalidValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or more")
        if self.limit < 0 or self.top_k < 0:
            raise InvalidValueError("limit and top-k must be 0 (no limit) or more")
        if not 0 < self.top_p <= 1:
            raise InvalidValueError(f"top-p is {self.top_p}; it must be above 0 and at most 1")
        if not all(self.until):
            raise InvalidValueError("a text in until is empty, which would end every answer at once")
        index, count = self.shard
        if not 1 <= index <= count:
            raise InvalidValueError(f"shard is {index}/{count}; it must be I/N with I from 1 to N")
        if self.repeats > 1 and self.temperature == 0:
            raise InvalidValueError(
                f"{self.repeats} repeats at temperature 0 would be the same answer {self.repeats} times; "
                "give a --temperature, such as the one the model is served with"
            )


@dataclass(frozen=True)
class Source:
    """Where questions come from. Without ``rows``, lm-eval loads the task's own data set."""

    name: str
    rows: Sequence[Mapping[str, str]] | None = None
    stand_in: bool = False

    @property
    def sha256(self) -> str:
        return "" if self.rows is None else digest([dict(row) for row in self.rows])
