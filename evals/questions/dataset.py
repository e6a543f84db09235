"""The user's own copy of GPQA, as the task definitions of lm-eval want it. Never downloads; loads without torch."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from ...quant.errors import FileFormatError, InvalidValueError

COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
"""Of GPQA's columns those that its tasks read; a copy may have the others too."""

HOW_TO_GET_IT = (
    "GPQA is gated: its authors ask that it is not published in plain text, so it is neither shipped nor downloaded "
    "here. Accept the terms of the dataset Idavidrein/gpqa on the hub, download gpqa_diamond.csv, and pass it with "
    "--data. To try the command without it: quantize-state gpqa MODEL --data stand-in"
)


def read_questions(path: str | Path) -> list[dict[str, str]]:
    """The questions in a CSV or JSONL file with GPQA's columns, or in a folder that ``datasets`` saved.

    All values are text, also where a column holds only numbers: lm-eval's task calls text methods on them.
    Raises InvalidValueError where there is no such file, FileFormatError naming the row that does not fit.
    """
    path = Path(path)
    if not path.exists():
        raise InvalidValueError(f"--data {path} does not exist. {HOW_TO_GET_IT}")
    rows = _read(path)
    if not rows:
        raise FileFormatError(f"{path} holds no question")
    missing = [column for column in COLUMNS if column not in rows[0]]
    if missing:
        raise FileFormatError(
            f"{path} has no column {' or '.join(map(repr, missing))}; it needs GPQA's own columns: {', '.join(COLUMNS)}"
        )
    questions = [_question(row, f"{path}, question {i}") for i, row in enumerate(rows, start=1)]
    seen: dict[tuple[str, ...], int] = {}
    for i, question in enumerate(questions, start=1):
        first = seen.setdefault(tuple(question.values()), i)
        if first != i:
            raise FileFormatError(f"{path} holds a question twice, as number {first} and {i}; remove one of them")
    return questions


def _question(row: dict[str, Any], where: str) -> dict[str, str]:
    question = {}
    for column in COLUMNS:
        value = row.get(column)
        text = "" if value is None else str(value)
        if not text.strip():
            raise FileFormatError(f"{where} has no text in column {column!r}")
        question[column] = text
    answers = [question[column].strip() for column in COLUMNS[1:]]
    if answers[0] in answers[1:]:
        raise FileFormatError(f"{where} gives its correct answer among the incorrect ones as well")
    return question


def _read(path: Path) -> list[dict[str, Any]]:
    if path.is_dir():
        return _read_folder(path)
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix.lower() not in readers:
        raise InvalidValueError(
            f"--data {path} is neither .csv nor .jsonl nor a folder that datasets saved; GPQA's own file is a .csv"
        )
    try:
        return readers[path.suffix.lower()](path)
    except OSError as error:
        raise InvalidValueError(f"can't read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is no UTF-8 text: byte {error.start} does not fit. Convert it first.") from None


def _read_csv(path: Path) -> list[dict[str, Any]]:
    csv.field_size_limit(1 << 24)  # an explanation in another column may be long
    with path.open(encoding="utf-8-sig", newline="") as stream:
        try:
            rows = list(csv.DictReader(stream, strict=True))
        except csv.Error as error:
            raise FileFormatError(f"{path} is no whole CSV file: {error}. Copy it again from its source.") from None
    return rows


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1):
        if not line.strip():
            continue
        try:  # numbers stay the text that they are: 1e-3 is an answer, and not 0.001
            row = json.loads(line, parse_int=str, parse_float=str)
        except json.JSONDecodeError as error:
            raise FileFormatError(f"{path}, line {number}: {error.msg}; expected one JSON object per line") from None
        if not isinstance(row, dict):
            raise FileFormatError(f"{path}, line {number} holds no JSON object; expected one question per line")
        rows.append(row)
    return rows


def _read_folder(path: Path) -> list[dict[str, Any]]:
    import datasets

    try:
        saved: Any = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError, OSError) as error:
        files = sorted(p.name for p in path.iterdir() if p.suffix.lower() in (".csv", ".jsonl"))
        hint = f"; did you mean {path / files[0]}?" if files else ""
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileFormatError(f"{path} is no folder that datasets saved ({reason}){hint}") from None
    if isinstance(saved, datasets.DatasetDict):
        if "train" not in saved:
            raise FileFormatError(f"{path} has the splits {', '.join(saved)}; GPQA's only split is called train")
        saved = saved["train"]
    return list(saved)
