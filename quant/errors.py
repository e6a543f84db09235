"""Errors that a user can cause, and the one way to suggest a close match."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class QuantizeStateError(Exception):
    """Base of every error a user can cause. The command line prints it as one line and exits with 2."""


class InvalidValueError(QuantizeStateError, ValueError):
    """A value outside what is allowed: unknown name, bad window, wrong shape."""


class NonFiniteStateError(QuantizeStateError, ValueError):
    """A recurrent state holds Inf or NaN; the message names layer, slot and head, ``layer`` the layer where known."""

    def __init__(self, message: str, layer: str | None = None) -> None:
        super().__init__(message)
        self.layer = layer


class NonFiniteLogitsError(InvalidValueError):
    """An arm's logits hold Inf or NaN where the reference's are finite; the message names sequence and position."""


class UnsupportedModelError(QuantizeStateError, ValueError):
    """The model has no layer that an adapter knows."""


class FileFormatError(QuantizeStateError, ValueError):
    """A file is truncated, damaged, of another version, or not what its name says."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> InvalidValueError:
    """The error for a name that is not in a registry, with close matches and the whole list."""
    names = sorted(known)
    close = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
    return InvalidValueError(f"unknown {kind} {given!r}.{hint} Known: {', '.join(names)}.")
