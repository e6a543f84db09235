"""A stand-in for GPQA, which can't be shipped: questions in its columns that an embedded model can partly answer.

It is NOT GPQA and says nothing about knowledge. Each question asks what a function of Python's standard library does,
after notes that hold the answer. The letter and text of the right option stand in the notes under the words that the
prompt ends with, and in three questions of four other text lies between the notes and the question. So a model without
knowledge can answer by carrying the notes across that distance, which is what a recurrent state is for, and a damaged
state does damage. Answers are a line long, that is several windows.

The questions are made from the docstrings and help texts of the Python that runs this, and so are not the same in each
of its versions; a result holds their hash.

    python -m quantize_state.evals.questions.standin FILE.csv [--questions 198] [--seed 0]
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import io
import random
import sys
import sysconfig
from pathlib import Path

from ...quant.errors import InvalidValueError, QuantizeStateError
from ..records import write_atomic
from ..text import load_text
from .pairing import question_random

NAME = "stand-in, not GPQA"

PROMPT_ENDS = ("Answer:", "Let's think step by step:")
"""What the prompts of lm-eval's GPQA tasks end with; the notes under these words hold the right answer."""

UNTIL = ("\n",)
"""Ends an answer: a model that was never taught to stop ends its line."""

DISTANCES = (0, 50, 150, 450)
"""Characters of other text between notes and question, for one question in four each."""

_MODULES = """
ast base64 bdb bisect calendar code codeop compileall copy difflib dis doctest filecmp fileinput fnmatch functools
genericpath getpass glob gzip heapq imaplib inspect linecache locale mimetypes ntpath operator os pickle pickletools
pkgutil plistlib posixpath pprint pyclbr pydoc quopri runpy shlex shutil site smtplib socket ssl stat statistics
subprocess symtable sysconfig tarfile tempfile textwrap threading timeit tokenize traceback types typing uuid warnings
webbrowser zipapp zipfile
"""
_LENGTHS = range(25, 71)
"""Characters of a sentence that is taken: longer than a window, shorter than five."""


def stand_in(questions: int = 198, seed: int = 0) -> list[dict[str, str]]:
    """``questions`` rows in GPQA's columns; the same arguments give the same ones on the same Python."""
    if questions < 1:
        raise InvalidValueError(f"questions is {questions}; it must be 1 or more")
    return [_question(random.Random(f"{NAME} {seed} {number}"), number) for number in range(questions)]


@functools.cache
def facts() -> tuple[tuple[str, str], ...]:
    """Functions of the standard library, each with the sentence that its docstring begins with; all sentences differ.

    They are read from the library's sources: modules that are imported may have been changed by others.
    Raises QuantizeStateError where Python came without its sources.
    """
    found: dict[str, str] = {}
    for module in _MODULES.split():
        path = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
        for node in ast.parse(path.read_text(encoding="utf-8")).body if path.is_file() else ():
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                text = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                sentence = text.split(". ")[0].rstrip(".")
                plain = sentence.isascii() and sentence[:1].isupper()
                if plain and len(sentence) in _LENGTHS and not any(x in sentence for x in ("(", "--", "->")):
                    found.setdefault(f"{sentence}.", f"{module}.{node.name}")
    if len(found) < 4:
        raise QuantizeStateError("the stand-in questions are made from the standard library's sources; this has none")
    return tuple(sorted((name, sentence) for sentence, name in found.items()))


@functools.cache
def _other_text() -> str:
    """Python's help texts, without brackets, which mark options: ``(A)`` must stand in the notes and options alone."""
    text = load_text("pydoc").text.encode("ascii", "ignore").decode()
    return text.replace("(", "[").replace(")", "]")


def _question(chance: random.Random, number: int) -> dict[str, str]:
    right, *wrong = chance.sample(facts(), 4)
    distance = DISTANCES[number % len(DISTANCES)]
    start = chance.randrange(len(_other_text()) - distance)
    between = f"{_other_text()[start : start + distance]}\n\n" if distance else ""
    order = [sentence for _, sentence in (right, *wrong)]
    while True:
        chance.shuffle(order)
        letters = dict(zip(order, "ABCD", strict=True))
        notes = [f"{key}: ({letters[sentence]}) {sentence}" for key, sentence in wrong]
        notes += [f"{end} ({letters[right[1]]}) {right[1]}" for end in PROMPT_ENDS]
        chance.shuffle(notes)
        question = {
            "Question": "Notes\n" + "\n".join(notes) + f"\n\n{between}What does {right[0]} do?",
            "Correct Answer": right[1],
            **{f"Incorrect Answer {i}": sentence for i, (_, sentence) in enumerate(wrong, start=1)},
        }
        # The order of options follows from a hash of the question, letters included: draw until they agree.
        if _options(question) == order:
            about = {"High-level domain": NAME, "Subdomain": f"across {distance} characters"}
            return question | about | {"Record ID": f"{NAME} {number}"}


def _options(question: dict[str, str]) -> list[str]:
    """The options in the order they will have: lm-eval shuffles three wrong ones and the right one, in order."""
    options = [question[f"Incorrect Answer {i}"] for i in (1, 2, 3)] + [question["Correct Answer"]]
    question_random(question).shuffle(options)
    return options


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
