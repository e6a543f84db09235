"""Training text found on the machine, and the held-out text.

Nothing is downloaded and no text is shipped: the corpus is the Python sources, docstrings and documentation of
whatever machine trains the models. Held out are the Python language reference topics (``pydoc_data``) and every
document that shares more than a few lines with them.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import multiprocessing
import os
import sysconfig
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

SEPARATOR = b"\0"  # between documents
PROSE_SUFFIXES = {".rst", ".md", ".txt", ".pod", ".rest", ".adoc"}
SOURCE_SUFFIXES = {".py", ".pyi"}
# Parts of lower-case paths. CPython's own documentation is the source of the held-out topics.
EXCLUDED_PARTS = ("/pydoc_data/", "/doc/library/", "/doc/reference/", "/doc/python3", "license", "copying")
MAX_FILE = 1 << 20
SHARED_LINES = 3


@dataclass
class Corpus:
    """Two streams of documents and the held-out text, all as bytes in uint8 arrays."""

    prose: np.ndarray
    source: np.ndarray
    heldout: np.ndarray
    documents: dict[str, int]

    def save(self, path: Path) -> None:
        counts: dict[str, Any] = {f"documents_{kind}": np.array(count) for kind, count in self.documents.items()}
        np.savez(path, prose=self.prose, source=self.source, heldout=self.heldout, **counts)

    @classmethod
    def load(cls, path: Path) -> Corpus:
        data = np.load(path)
        counts = {key.removeprefix("documents_"): int(data[key]) for key in data if key.startswith("documents_")}
        return cls(data["prose"], data["source"], data["heldout"], counts)


def heldout_text() -> str:
    """The Python language reference topics of the running interpreter, one after the other."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


@cache
def heldout_lines() -> frozenset[str]:
    """Lines long enough to recognise the held-out text by."""
    lines = (line.strip() for line in heldout_text().splitlines())
    return frozenset(line for line in lines if len(line) >= 40)


def leaks(text: str) -> bool:
    """Whether a document contains held-out text."""
    known = heldout_lines()
    return sum(line.strip() in known for line in text.splitlines()) > SHARED_LINES


def is_prose(text: str) -> bool:
    """Tell running text from tables of numbers, word lists and minified data."""
    if len(text) < 400:
        return False
    sample = text[:20000]
    letters = sum(character.isalpha() or character == " " for character in sample) / len(sample)
    spaces = sample.count(" ") / len(sample)
    return letters > 0.7 and spaces > 0.08 and sample.isascii() and max(map(len, sample.split("\n"))) < 2000


def docstrings(source: str) -> str:
    """The docstrings of a module in order, each under the name that it documents."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    parts = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and len(text) >= 120:
                parts.append(f"{node.name}\n\n{text}" if hasattr(node, "name") else text)
    return "\n\n\n".join(parts)


def read_documents(path: str) -> list[tuple[str, bytes]]:
    """The documents of one file as (kind, text); several kinds for a Python file, none for an unfit one."""
    suffix = Path(path).suffix
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return []
    if leaks(text):
        return []
    if suffix not in SOURCE_SUFFIXES:
        return [("prose", text.encode())] if is_prose(text) else []
    found = [("source", text.encode())] if max(map(len, text.split("\n"))) < 2000 else []
    try:
        prose = docstrings(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        prose = ""
    if len(prose) >= 400:
        found.append(("prose", inspect.cleandoc(prose).encode()))
    return found


def candidate_files() -> list[str]:
    """Sources and documentation under the interpreter's library folders and the system's documentation."""
    paths = sysconfig.get_paths()
    roots = {paths["stdlib"], paths["purelib"], paths["platlib"], "/usr/lib/python3", "/usr/share", "/usr/local/lib"}
    found: set[str] = set()
    for root in sorted(roots):
        for folder, _, names in os.walk(root):
            for name in names:
                path = os.path.realpath(os.path.join(folder, name))
                suffix = os.path.splitext(name)[1]
                if suffix not in PROSE_SUFFIXES | SOURCE_SUFFIXES and name != "METADATA":
                    continue
                if any(part in path.lower() for part in EXCLUDED_PARTS):
                    continue
                if os.path.isfile(path) and 400 <= os.path.getsize(path) <= MAX_FILE:
                    found.add(path)
    return sorted(found)


def build_corpus(files: list[str] | None = None) -> Corpus:
    """Read, filter and deduplicate everything; deterministic for a given machine."""
    files = candidate_files() if files is None else files
    seen: set[bytes] = set()
    streams: dict[str, list[bytes]] = {"prose": [], "source": []}
    with multiprocessing.Pool(min(16, os.cpu_count() or 1)) as pool:
        for documents in pool.imap(read_documents, files, chunksize=64):
            for kind, text in documents:
                digest = hashlib.blake2b(text, digest_size=16).digest()
                if digest not in seen:
                    seen.add(digest)
                    streams[kind].append(text)
    counts = Counter({kind: len(texts) for kind, texts in streams.items()})
    arrays = {kind: as_array(SEPARATOR.join(texts)) for kind, texts in streams.items()}
    return Corpus(arrays["prose"], arrays["source"], as_array(heldout_text().encode()), dict(counts))


def as_array(text: bytes) -> np.ndarray:
    """Bytes as an array of token ids."""
    return np.frombuffer(text, dtype=np.uint8)


WORDS = "amber birch cedar delta ember fjord grove heron inlet jetty knoll larch mango north oaken pearl quill river"


def recall_table(rng: np.random.Generator, filler: np.ndarray, gap: int) -> tuple[bytes, list[int]]:
    """A table of random numbers, ``gap`` bytes of other text, and the table again in another order.

    Only what carries the rows across the gap predicts the digits of the second table, whose positions are
    given back.
    """
    names = WORDS.split()
    keys = {f"{rng.choice(names)}_{rng.choice(names)}" for _ in range(rng.integers(2, 17))}
    rows = [f"{key} = {rng.integers(1000, 10000)}\n".encode() for key in sorted(keys)]
    rng.shuffle(rows)
    start = int(rng.integers(max(1, len(filler) - gap)))
    text = b"Table\n" + b"".join(rows) + b"\n" + filler[start : start + gap].tobytes() + b"\nRecall\n"
    rng.shuffle(rows)
    answers: list[int] = []
    for row in rows:
        text += row
        answers += range(len(text) - 5, len(text) - 1)
    return text, answers


def recall_document(rng: np.random.Generator, filler: np.ndarray, length: int) -> bytes:
    """Recall tables one after another, with gaps drawn log-uniformly up to 8,000 bytes."""
    text = b""
    while len(text) < length:
        gap = int(np.exp(rng.uniform(np.log(16), np.log(8000))))
        text += recall_table(rng, filler, gap)[0] + SEPARATOR
    return text[:length]


if __name__ == "__main__":
    import sys

    corpus = build_corpus()
    corpus.save(Path(sys.argv[1]))
    print({"prose": corpus.prose.size, "source": corpus.source.size, "heldout": corpus.heldout.size}, corpus.documents)
