"""Dataclasses to JSON and back, with every type checked; no torch.

A result that is read years later, or after a bad copy, must give the numbers that were written or a clear error.
So reading is strict: each field has the declared type, unknown keys are refused, and numbers are finite.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import math
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from ..quant.errors import FileFormatError, QuantizeStateError
from ..quant.files import replacing

Record = TypeVar("Record")

_WORDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "an object",
}


class Mismatch(Exception):
    """A value of the wrong type; the message says where in the document."""


def from_plain(kind: Any, value: Any, where: str = "") -> Any:
    """``value``, as json.loads gives it, as an instance of ``kind``. Raises Mismatch naming the place."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (inner,) = [a for a in arguments if a is not type(None)]
        return from_plain(inner, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise Mismatch(f"{_at(where)} is {_shown(value)}; expected {' or '.join(map(repr, arguments))}")
        return value
    if dataclasses.is_dataclass(kind):
        return _record(kind, value, where)
    if origin is list:
        _expect(value, list, where)
        return [from_plain(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin is tuple:
        _expect(value, list, where)
        if len(value) != len(arguments):
            raise Mismatch(f"{_at(where)} has {len(value)} entries; expected {len(arguments)}")
        return tuple(
            from_plain(a, item, f"{where}[{i}]") for i, (a, item) in enumerate(zip(arguments, value, strict=True))
        )
    if origin is dict:
        _expect(value, dict, where)
        return {key: from_plain(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise Mismatch(f"{_at(where)} is {_shown(value)}; expected a number")
        if not math.isfinite(value):
            raise Mismatch(f"{_at(where)} is {value}; expected a finite number")
        return float(value)
    _expect(value, kind, where)
    return value


def to_plain(value: Any) -> Any:
    """A dataclass, list, tuple or dict as what json.dumps takes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    return value


def digest(plain: Any) -> str:
    """SHA-256 over the canonical JSON of ``plain``: the same for the same content, whatever the layout."""
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def dump(record: Any) -> str:
    """A record as JSON text with a ``checksum`` over all the rest, so that damage can't pass for a number."""
    plain = to_plain(record)
    try:
        plain["checksum"] = digest(plain)
        return json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False) + "\n"
    except ValueError as error:
        raise QuantizeStateError(f"a result holds NaN or Inf and was not written ({error})") from error


def load(kind: type[Record], path: Path, schema: str) -> Record:
    """Read a record that ``dump`` wrote. Raises FileFormatError naming the file, what was found and what to do."""
    plain = _read_object(path)
    found = plain.get("schema")
    if found != schema:
        family, _, version = schema.rpartition("/")
        if isinstance(found, str) and found.rpartition("/")[0] == family:
            raise FileFormatError(
                f"{path} has schema {found!r}; this version of quantize-state reads version {version}. "
                "Read it with the version that wrote it, or evaluate again."
            )
        what = "no schema" if found is None else f"schema {_shown(found)}"
        raise FileFormatError(f"{path} has {what}; expected {schema!r}. It is no file of this kind: check the path.")
    checksum = plain.pop("checksum", None)
    if not _fits(checksum, plain):
        said = "it has no checksum" if checksum is None else "its checksum does not fit its content"
        raise FileFormatError(
            f"{path} is damaged or was edited: {said}. Copy it again from its source, or evaluate again."
        )
    try:
        return typing.cast(Record, from_plain(kind, plain))
    except Mismatch as error:
        raise FileFormatError(f"{path}: {error}. The file does not follow {schema!r}; evaluate again.") from None


def write_atomic(path: Path, text: str, *, overwrite: bool) -> None:
    """``write_atomic_bytes`` of ``text`` in UTF-8, as it is: no line end is changed."""
    # a file name that is no UTF-8 comes as half a surrogate pair, whose escape is JSON for the same
    write_atomic_bytes(path, text.encode("utf-8", errors="backslashreplace"), overwrite=overwrite)


def write_atomic_bytes(path: Path, content: bytes, *, overwrite: bool) -> None:
    """Write ``content`` so that ``path`` is at every moment either the old file or the whole new one.

    Raises QuantizeStateError where ``path`` exists and ``overwrite`` is False, or the disk is full or not writable;
    the old file is then as it was, and no half-written file is left.
    """
    with replacing(path, overwrite=overwrite) as temporary, open(temporary, "xb") as out:
        out.write(content)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise FileFormatError(f"{path} does not exist") from None
    except OSError as error:
        raise FileFormatError(f"can't read {path}: {error.strerror or error}") from None
    try:
        plain = json.loads(raw.decode("utf-8"), parse_constant=_refuse)
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not JSON: byte {error.start} is not UTF-8. Was it damaged?") from None
    except (json.JSONDecodeError, RecursionError) as error:
        place = f"line {error.lineno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise FileFormatError(
            f"{path} is not whole JSON ({len(raw):,} bytes; {place}). "
            "It is truncated or damaged: copy it again, or evaluate again."
        ) from None
    if not isinstance(plain, dict):
        raise FileFormatError(f"{path} holds {_shown(plain)}; expected an object with a schema")
    return plain


def _fits(checksum: Any, plain: Any) -> bool:
    try:
        return bool(checksum == digest(plain))
    except (ValueError, RecursionError):  # a number such as 1e999, or nesting that no result has
        return False


def _refuse(constant: str) -> Any:
    raise json.JSONDecodeError(f"{constant} is no JSON number", "", 0)


def _record(kind: Any, value: Any, where: str) -> Any:
    _expect(value, dict, where)
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            close = difflib.get_close_matches(key, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise Mismatch(f"{_at(where)} has the unknown key {key!r}{hint}")
    read: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            read[name] = from_plain(hints[name], value[name], f"{where}.{name}".lstrip("."))
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise Mismatch(f"{_at(where)} lacks the key {name!r}")
    return kind(**read)


def _expect(value: Any, kind: type, where: str) -> None:
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise Mismatch(f"{_at(where)} is {_shown(value)}; expected {_WORDS[kind]}")


def _at(where: str) -> str:
    return where or "the document"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if not isinstance(value, dict | list) else _WORDS[type(value)]
    return text if len(text) <= 60 else text[:57] + "…"
