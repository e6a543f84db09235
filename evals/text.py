"""The text that models are evaluated on, and its tokens. Loads without torch."""

from __future__ import annotations

import hashlib
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..quant.errors import FileFormatError, InvalidValueError, unknown_name

_CHARACTERS_PER_TOKEN = 12  # generous: English is near 4, byte-level models 1
_LARGEST_MODULE = 400_000  # bytes; larger ones are tables that a program wrote
_SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "lib2to3",
    "__pycache__",
    "ensurepip",
}
_SKIPPED_MODULES = {"pydoc_data/topics.py"}  # the text of `pydoc`


@dataclass(frozen=True)
class TextSource:
    """A text, what it is called, and the SHA-256 of its UTF-8 bytes."""

    name: str
    text: str
    sha256: str


def load_text(source: str) -> TextSource:
    """The text called ``pydoc`` or ``stdlib``, or that of a UTF-8 file.

    ``pydoc`` is Python's own language reference as pydoc shows it (held out of the embedded models' training),
    ``stdlib`` the sources of the standard library without tests and generated tables. Both depend on the Python
    version; the hash tells. Raises InvalidValueError or FileFormatError.
    """
    if source in SOURCES:
        text = SOURCES[source]()
        return TextSource(source, text, _sha256(text))
    path = Path(source)
    if not path.is_file():
        if path.is_dir():
            raise InvalidValueError(f"--text {source} is a folder; give one UTF-8 file, or {' or '.join(SOURCES)}")
        if path.suffix or len(path.parts) > 1:
            raise InvalidValueError(f"text file {source} does not exist; give a UTF-8 file, or {' or '.join(SOURCES)}")
        raise unknown_name("text", source, SOURCES)
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidValueError(f"can't read {source}: {error.strerror or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{source} is no UTF-8 text: byte {error.start} does not fit. Convert it first."
        ) from None
    if "\0" in text:
        raise FileFormatError(f"{source} is no text: it holds a NUL at character {text.index(chr(0))}")
    if not text.strip():
        raise FileFormatError(f"{source} is empty")
    return TextSource(path.name, text, _sha256(text))


def part_of(source: TextSource, part: int, parts: int) -> TextSource:
    """Part number ``part`` of a text that is cut into ``parts`` equal ones, at the ends of lines."""
    edges = [0, *(source.text.find("\n", len(source.text) * i // parts) + 1 for i in range(1, parts)), len(source.text)]
    text = source.text[edges[part] : edges[part + 1]]
    if not text.strip():
        raise InvalidValueError(f"{source.name} is too short to be cut into {parts} parts; give a longer text")
    return TextSource(f"{source.name}, part {part + 1} of {parts}", text, _sha256(text))


def tokenise(tokenizer: Any, text: str, tokens: int, sequences: int = 1, seed: int = 0) -> list[list[int]]:
    """``sequences`` spans of ``tokens`` token ids each: contiguous, without overlap, in the text's order.

    The same arguments give the same spans; another ``seed`` gives others where the text is longer than needed.
    No special tokens are added. Raises InvalidValueError where the text is too short, naming what it does give.
    """
    for name, value in (("tokens", tokens), ("sequences", sequences)):
        if value < 1:
            raise InvalidValueError(f"{name} is {value}; it must be 1 or more")
    chooser = random.Random(f"quantize-state text {seed}")
    needed = tokens * sequences
    ids = _encode(tokenizer, _excerpt(text, needed * _CHARACTERS_PER_TOKEN, chooser))
    if len(ids) < needed:
        ids = _encode(tokenizer, text)
    if len(ids) < needed:
        per_sequence = len(ids) // sequences
        advice = f"ask for {per_sequence:,} or fewer" if per_sequence else f"ask for fewer than {sequences:,} sequences"
        raise InvalidValueError(
            f"the text gives {len(ids):,} tokens, fewer than the {needed:,} asked for "
            f"({sequences:,} × {tokens:,}); {advice}, or give a longer text"
        )
    gaps = sorted(int(chooser.random() * (len(ids) - needed + 1)) for _ in range(sequences))
    return [ids[gap + i * tokens : gap + (i + 1) * tokens] for i, gap in enumerate(gaps)]


def _excerpt(text: str, characters: int, chooser: random.Random) -> str:
    """A stretch of a long text, from the start of a line, so that tokenising 20 MB for 4K tokens is not needed."""
    characters = max(characters, 1 << 20)
    if len(text) <= characters:
        return text
    start = int(chooser.random() * (len(text) - characters))
    start = text.rfind("\n", 0, start) + 1
    return text[start : start + characters]


def _encode(tokenizer: Any, text: str) -> list[int]:
    # verbose=False: a text longer than the model's maximum is what we want here, and no reason for a warning
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _pydoc() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name].strip() for name in sorted(topics)) + "\n"


def _stdlib() -> str:
    root = Path(sysconfig.get_path("stdlib"))
    parts = []
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        relative = path.relative_to(root)
        if _SKIPPED_FOLDERS.intersection(relative.parts) or relative.as_posix() in _SKIPPED_MODULES:
            continue
        if relative.name.startswith("_sysconfigdata") or path.stat().st_size > _LARGEST_MODULE:
            continue
        try:
            parts.append(path.read_text(encoding="utf-8").strip())
        except (UnicodeDecodeError, OSError):
            continue  # a few modules are in other encodings, to test the parser
    return "\n\n".join(part for part in parts if part) + "\n"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


SOURCES: dict[str, Callable[[], str]] = {"pydoc": _pydoc, "stdlib": _stdlib}
