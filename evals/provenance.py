"""What a result needs beside its numbers so that somebody else can get them again. Loads without torch."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from .result import Provenance

PACKAGES = ("torch", "transformers", "triton", "safetensors", "numpy")


def collect(
    *,
    device: str,
    threads: int,
    dtype: str,
    engine: str,
    window: int,
    seeds: Mapping[str, int],
    sha256: Mapping[str, str],
    started: str,
    command: str | None = None,
    processes: int = 1,
    columns: str | None = None,
) -> Provenance:
    """Gather versions, commit and times; the caller gives what only it knows. ``started`` is as ``now()`` gives it."""
    commit, dirty = git_state(Path(__file__).resolve().parent)
    return Provenance(
        quantize_state=version("quantize-state"),
        git_commit=commit,
        git_dirty=dirty,
        versions={"python": platform.python_version(), "platform": platform.platform()}
        | {name: version(name) for name in PACKAGES},
        device=device,
        threads=threads,
        dtype=dtype,
        engine=engine,
        window=window,
        seeds=dict(seeds),
        sha256=dict(sha256),
        command=command if command is not None else command_line(),
        started=started,
        finished=now(),
        processes=processes,
        columns=columns,
    )


def now() -> str:
    """The time in UTC, to the second, in ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def version(package: str) -> str:
    """The installed version, without importing the package; ``not installed`` where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def processor() -> str:
    """What the operating system calls the CPU, and how many of its cores this process may use."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def command_line() -> str:
    """How this process was started, with the program's name without its folder."""
    program, *arguments = sys.orig_argv if not sys.argv or not sys.argv[0] else sys.argv
    name = Path(program).name
    if name in ("__main__.py", "-c", "-m"):
        name = "python -m quantize_state"
        return " ".join([name, shlex.join(arguments)]).strip()
    return shlex.join([name, *arguments])


def git_state(folder: Path) -> tuple[str | None, bool | None]:
    """Commit and whether tracked files were changed; (None, None) outside a checkout of quantize-state."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not (Path(top) / "src" / "quantize_state").is_dir():
        return None, None  # installed into an environment that lies in somebody else's repository
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return commit, None if changed is None else bool(changed)


def sha256_of_files(paths: Iterable[Path]) -> dict[str, str]:
    """SHA-256 of each file, by its name."""
    hashes = {}
    for path in sorted(paths):
        with path.open("rb") as stream:
            hashes[path.name] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
