"""The folder of one run: finished arms one by one, so that an interrupted run goes on where it stopped.

run.json          what was asked for, and its fingerprint
arms/NAME.json    each arm as soon as it is finished
shards/NAME/      an arm's finished documents, until the arm is
result.json       all of it, written once, at the end
.lock             held while a process works here; the system frees it when that process ends, however it ends
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal

from ..quant.errors import FileFormatError, QuantizeStateError
from .records import digest, dump, load, write_atomic
from .result import Arm, Result, StoredArm

RUN_SCHEMA: Final = "quantize-state/run/1"


@dataclass(frozen=True)
class _Run:
    fingerprint: str
    configuration: str
    started: str
    schema: Literal["quantize-state/run/1"] = RUN_SCHEMA


class RunDirectory:
    """A folder that one evaluation writes into; use as a context manager, which holds the folder's lock.

    ``configuration`` is everything that decides the numbers of *every* arm (weights and text hashes, tokens, window,
    engine, dtype, seed, version), as plain JSON values. Leave the list of arms out of it: then a later call with
    more arms adds them.

    On entry: a new folder is made; one with the same configuration is resumed (``arms`` holds what is finished);
    one with another configuration, with files that are no run, locked by another process, or not writable raises
    QuantizeStateError before any work is done.
    """

    def __init__(self, out: str | os.PathLike[str], configuration: dict[str, Any]) -> None:
        self.path = Path(out)
        self.configuration = configuration
        self.fingerprint = digest(configuration)
        self.started = datetime.now(UTC).isoformat(timespec="seconds")
        self.arms: dict[str, Arm] = {}
        self._lock: int | None = None

    @property
    def result_path(self) -> Path:
        return self.path / "result.json"

    @property
    def finished(self) -> Result | None:
        """The result of a run that is complete already, else None."""
        return Result.read(self.result_path) if self.result_path.exists() else None

    def __enter__(self) -> RunDirectory:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuantizeStateError(
                f"can't write into {self.path}: {error.strerror or error}; choose another folder with --out"
            ) from error
        self._take_lock()
        try:
            self._begin()
        except BaseException:
            self._release_lock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._release_lock()

    def join(self) -> None:
        """Take part in a run whose folder another process of it has entered, and keeps locked."""
        self._begin()

    def save_arm(self, arm: Arm) -> None:
        """Store a finished arm; from here on an interrupted run need not compute it again."""
        StoredArm(arm, self.fingerprint).write(self._arm_path(arm.name))
        self.arms[arm.name] = arm
        shutil.rmtree(self._shards(arm.name), ignore_errors=True)

    def shard(self, arm: str, first: int) -> Path:
        """Where an arm's documents from number ``first`` on are stored, until all are done."""
        folder = self._shards(arm)
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{first}.npz"

    def finish(self, result: Result) -> Path:
        """Write result.json. A complete one is never overwritten; one that lacks arms of ``result`` is extended."""
        earlier = self.finished
        extends = earlier is not None and {a.name for a in earlier.arms} < {a.name for a in result.arms}
        overwrite = earlier is not None and (earlier.status == "partial" or extends)
        result.write(self.result_path, overwrite=overwrite)
        return self.result_path

    def _begin(self) -> None:
        file = self.path / "run.json"
        if file.exists():
            run = load(_Run, file, RUN_SCHEMA)
            if run.fingerprint != self.fingerprint:
                raise QuantizeStateError(
                    f"{self.path} holds a run of another configuration "
                    f"({_differences(json.loads(run.configuration), self.configuration)}); choose another --out"
                )
            self.started = run.started
        else:
            strangers = sorted(p.name for p in self.path.iterdir() if not p.name.startswith("."))
            if strangers:
                raise QuantizeStateError(
                    f"{self.path} is no run of quantize-state and not empty "
                    f"({', '.join(strangers[:3])}); choose another --out"
                )
            configuration = json.dumps(self.configuration, sort_keys=True)
            write_atomic(file, dump(_Run(self.fingerprint, configuration, self.started)), overwrite=False)
        (self.path / "arms").mkdir(exist_ok=True)
        for path in sorted((self.path / "arms").glob("*.json")):
            stored = StoredArm.read(path)
            if stored.fingerprint != self.fingerprint:
                raise FileFormatError(f"{path} belongs to another run; delete it and that arm is evaluated again")
            self.arms[stored.arm.name] = stored.arm

    def _arm_path(self, name: str) -> Path:
        return self.path / "arms" / f"{_unique(name)}.json"

    def _shards(self, name: str) -> Path:
        return self.path / "shards" / _unique(name)

    def _take_lock(self) -> None:
        import fcntl  # not on Windows, where reports still render

        path = self.path / ".lock"
        while True:
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise QuantizeStateError(
                    f"can't write into {self.path}: {error.strerror or error}; choose another folder with --out"
                ) from error
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                owner = os.read(handle, 200).decode(errors="replace").strip() or "another process"
                os.close(handle)
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise QuantizeStateError(
                        f"{self.path} is in use by {owner}; wait for it, or choose another --out"
                    ) from None
                raise QuantizeStateError(
                    f"the file system of {self.path} can't lock files ({error.strerror}); choose another --out"
                ) from error
            if _same_file(handle, path):
                break
            os.close(handle)  # its last holder deleted it between our open and our lock: take the new one
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()} on {socket.gethostname()}, since {self.started}".encode())
        self._lock = handle

    def _release_lock(self) -> None:
        if self._lock is not None:
            (self.path / ".lock").unlink(missing_ok=True)
            os.close(self._lock)
            self._lock = None


def _same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def fresh_folder(model_name: str) -> Path:
    """runs/TIME-MODEL, a path where nothing is yet."""
    stem = f"{datetime.now():%Y%m%d-%H%M%S}-{_safe(Path(model_name).name or 'model')}"
    number = 1
    while (path := Path("runs") / (stem if number == 1 else f"{stem}-{number}")).exists():
        number += 1
    return path


def _safe(name: str) -> str:
    """A file name made of harmless characters, whatever the model or arm is called."""
    return re.sub(r"[^A-Za-z0-9._+-]+", "_", name).strip("._")[:80] or "unnamed"


def _unique(name: str) -> str:
    safe = _safe(name)
    return safe if safe == name else f"{safe}-{digest(name)[:8]}"


def _differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    keys = [k for k in sorted({*old, *new}) if old.get(k) != new.get(k)]
    shown = [f"{k} was {_brief(old.get(k))}, is {_brief(new.get(k))}" for k in keys[:4]]
    return "; ".join(shown) + (f"; and {len(keys) - 4} more" if len(keys) > 4 else "")


def _brief(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 24 else text[:20] + "…"
