"""What makes two arms a pair: the same questions, prompts byte for byte, option order and random numbers.

lm-eval shuffles the options with Python's global random state, so they depend on what ran before. Here they depend
on the question alone: each question is prepared with a random state seeded from its own hash.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..records import digest


def question_hash(question: Mapping[str, Any]) -> str:
    """SHA-256 over a question's fields, whatever their order."""
    return digest({key: str(value) for key, value in question.items()})


def question_random(question: Mapping[str, Any]) -> random.Random:
    """Random numbers that belong to a question: those that its options are shuffled with."""
    return random.Random(_seed(question))


def _seed(question: Mapping[str, Any]) -> int:
    return int(question_hash(question)[:16], 16)


def text_hash(text: str) -> str:
    """SHA-256 over UTF-8 text: of a prompt, or of an answer that has no letter."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def by_question(process_docs: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The task's own ``process_docs``, whose work on each question gets random numbers from the question's hash.

    So neither the order of questions nor a limit, a shard or an earlier task changes the order of options.
    """
    return lambda dataset: process_docs(_EachOnItsOwn(dataset))


class _EachOnItsOwn:
    """A dataset as a task's ``process_docs`` sees it: what it maps over the questions is seeded for each of them."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def map(self, function: Callable[[Any], Any]) -> Any:
        import datasets

        rows = []
        for row in self._dataset:
            with seeded(function, _seed(row)):
                rows.append(row | function(dict(row)))
        return datasets.Dataset.from_list(rows)


@contextmanager
def seeded(function: Callable[..., Any], seed: int) -> Iterator[None]:
    """Seed Python's global generator, and those among the globals of ``function``; the former is put back after."""
    before = random.getstate()
    for generator in getattr(function, "__globals__", {}).values():
        if isinstance(generator, random.Random):
            generator.seed(seed)
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(before)
