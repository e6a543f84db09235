"""Hugging Face caches, and any nesting of tensors, that ``torch.save`` wrote: read without running what is in them."""

from __future__ import annotations

import inspect
import os
import pickle
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..quant.errors import FileFormatError, InvalidValueError
from ..quant.tensorfile import Slot
from .cached import _identity

STATES = "*recurrent_states*"
"""Of a cache's tensors, those that are recurrent states."""


class SavedTensors:
    """The tensors in a file of ``torch.save``, by their path in it, such as ``layers.0.recurrent_states.0``.

    Read with ``weights_only`` and mapped into memory, not copied. Allowed are tensors in dicts, lists and tuples, and
    the cache classes of the installed transformers, whose objects are made without running their code; whatever else
    a pickle may hold is refused.

    Raises InvalidValueError where the file does not exist, FileFormatError where it is refused, damaged, or without
    tensors.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        try:
            with torch.serialization.safe_globals(_cache_classes()):
                content = torch.load(os.fspath(path), weights_only=True, map_location="cpu", mmap=True)
        except FileNotFoundError:
            raise InvalidValueError(f"{path} does not exist") from None
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError, TypeError, OSError) as error:
            raise FileFormatError(_refusal(path, error)) from None
        self._tensors = dict(_walk(content, "", set()))
        if not self._tensors:
            raise FileFormatError(f"{path} holds no tensor")
        self.slots: Mapping[str, Slot] = {name: Slot(t.dtype, tuple(t.shape)) for name, t in self._tensors.items()}

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or ``rows`` of its first axis; a view."""
        return self._tensors[name] if rows is None else self._tensors[name][rows]


def _cache_classes() -> list[Any]:
    from transformers import cache_utils

    classes = [c for _, c in inspect.getmembers(cache_utils, inspect.isclass) if c.__module__ == cache_utils.__name__]
    return [*classes, _identity]  # in a cache that was saved while its model was attached


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path or "tensor", value
        return
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(i), item) for i, item in enumerate(value)]
    elif type(value).__module__.startswith("transformers."):
        items = list(vars(value).items())
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, item in items:
        yield from _walk(item, f"{path}.{key}".lstrip("."), seen)


def _refusal(path: str | os.PathLike[str], error: Exception) -> str:
    # torch's own message advises to read the file unsafely, which is no advice to pass on.
    if named := re.search(r"GLOBAL ([\w.]+)", str(error)):
        return (
            f"{path} holds an object of {named[1]}, and is not read: unpickling could run any code. Save the tensors "
            "alone, torch.save({name: tensor, …}), or a transformers cache"
        )
    if not _is_zip(path):
        return (
            f"{path} is no file of torch.save: a plain pickle can run any code when it is read, and is refused. "
            "Save tensors with torch.save or safetensors"
        )
    return f"{path} is truncated or damaged, or holds more than tensors ({type(error).__name__})"


def _is_zip(path: str | os.PathLike[str]) -> bool:
    with open(path, "rb") as file:
        return file.read(2) == b"PK"
