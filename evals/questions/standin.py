"""A stand-in for GPQA, which can't be shipped: questions in its columns that an embedded model can partly answer.

It is NOT GPQA and says nothing about knowledge. Each question is a list of notes, and the letter of the right option
stands in the notes under the words that the prompt ends with. So it can be answered by copying from the context,
which is what a recurrent state is for: it shows that the pipeline runs, and lets a damaged state do damage.

    python -m quantize_state.evals.questions.standin FILE.csv [--questions 198] [--seed 0]
"""

from __future__ import annotations

import argparse
import csv
import io
import random
import sys
from pathlib import Path

from ...quant.errors import InvalidValueError, QuantizeStateError
from ..records import write_atomic
from .pairing import question_random

NAME = "stand-in, not GPQA"

PROMPT_ENDS = ("Answer:", "Let's think step by step:")
"""What the prompts of lm-eval's GPQA tasks end with; the notes under these words hold the right answer."""

_WORDS = "amber birch cedar delta ember fjord grove heron inlet jetty knoll larch mango north oaken pearl quill river"


def stand_in(questions: int = 198, seed: int = 0) -> list[dict[str, str]]:
    """``questions`` rows in GPQA's columns; the same arguments give the same ones."""
    if questions < 1:
        raise InvalidValueError(f"questions is {questions}; it must be 1 or more")
    return [_question(random.Random(f"{NAME} {seed} {number}"), number) for number in range(questions)]


def _question(chance: random.Random, number: int) -> dict[str, str]:
    names = _WORDS.split()
    while True:
        right, *wrong = chance.sample(names, 4)
        keys = chance.sample([f"{a}_{b}" for a in names for b in names if a != b], len(wrong))
        letter = chance.choice("ABCD")
        notes = [f"{key}: {word}</s>" for key, word in zip(keys, wrong, strict=True)]
        notes += [f"{end} ({letter}) {right}</s>" for end in PROMPT_ENDS]
        chance.shuffle(notes)
        question = {
            "Question": "Notes\n" + "\n".join(notes) + "\n",
            "Correct Answer": right,
            **{f"Incorrect Answer {i}": word for i, word in enumerate(wrong, start=1)},
        }
        # The order of options follows from a hash of the question, letter included: draw until they agree.
        if _letter(question) == letter:
            about = {"High-level domain": NAME, "Subdomain": "copying from the context"}
            return question | about | {"Record ID": f"{NAME} {number}"}


def _letter(question: dict[str, str]) -> str:
    """The letter that the right option will have: lm-eval shuffles three wrong ones and the right one, in order."""
    options = [question[f"Incorrect Answer {i}"] for i in (1, 2, 3)] + [question["Correct Answer"]]
    question_random(question).shuffle(options)
    return "ABCD"[options.index(question["Correct Answer"])]


def write_csv(path: Path, rows: list[dict[str, str]]) -> None:
    """Write rows as a CSV file with GPQA's columns; an existing file is never overwritten."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomic(path, text.getvalue(), overwrite=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a stand-in set of questions. It is not GPQA.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--questions", type=int, default=198)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    try:
        write_csv(args.file, stand_in(args.questions, args.seed))
    except QuantizeStateError as error:
        print(error, file=sys.stderr)
        return 2
    print(args.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
