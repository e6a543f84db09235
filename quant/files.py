"""Files that appear whole or not at all. Needs no torch."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import QuantizeStateError


@contextmanager
def replacing(path: str | os.PathLike[str], *, overwrite: bool) -> Iterator[Path]:
    """A path beside ``path`` to write a file at; it becomes ``path`` when the block ends without an exception.

    At every moment ``path`` is either the old file or the whole new one, and nothing half-written is left.
    Raises QuantizeStateError where ``path`` exists and ``overwrite`` is False (before the block, where it can), or
    the disk is full or not writable.
    """
    path = Path(path)
    if not overwrite and path.exists():
        raise _exists(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with open(temporary, "rb+") as stream:
            os.fsync(stream.fileno())
        if overwrite:
            os.replace(temporary, path)
        else:
            _name_once(temporary, path)
        _sync_folder(path.parent)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        kept = "the old file is unchanged" if path.exists() else "nothing was written"
        raise QuantizeStateError(f"can't write {path}: {error.strerror or error}; {kept}") from error
    finally:
        with suppress(OSError):  # where it could not be made, it may not be looked for either
            temporary.unlink()


def _exists(path: Path) -> QuantizeStateError:
    return QuantizeStateError(f"{path} exists and is never overwritten; choose another place")


def _name_once(temporary: Path, path: Path) -> None:
    """Give the finished file its name unless the name is taken, also by a process that came in between."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        if path.exists():  # a file system without hard links
            raise FileExistsError(path) from None
        os.replace(temporary, path)


def _sync_folder(folder: Path) -> None:
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
