"""The folder of a bench: cases from the moment that each is finished, so that a run that was cut short goes on, and
what there is of its result until then, for a run that can't."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ...quant.errors import QuantizeStateError
from .. import provenance
from ..records import dump, load, write_atomic
from ..result import Provenance


class CaseFolder:
    """The cases below ``out``, where a run will write ``result``, which must not exist.

    ``case_file`` is the dataclass of a stored case: device, git_commit, case, schema. Cases are taken up again on the
    same device and commit alone. Raises QuantizeStateError where ``out`` can't be written, or holds a result.
    """

    def __init__(self, out: Path, result: str, case_file: type[Any], device: torch.device) -> None:
        self.result = out / result
        self.unfinished = self.result.with_suffix(".unfinished.json")
        if self.result.exists():
            raise QuantizeStateError(f"{self.result} exists and is never overwritten; choose another folder with --out")
        self._folder, self._case_file = out / "cases", case_file
        self._cuda = device.type == "cuda"
        self._device = torch.cuda.get_device_name(device) if self._cuda else provenance.processor()
        self._started = provenance.now()
        self._commit, self._dirty = provenance.git_state(Path(__file__).resolve().parent)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise QuantizeStateError(f"can't write into {out}: {error.strerror or error}") from error

    def find(self, stem: str) -> Any | None:
        """A case that an earlier run has timed or refused."""
        path = self._path(stem)
        if self._dirty or self._commit is None or not path.exists():
            return None
        found = load(self._case_file, path, self._case_file.schema)
        return found.case if (found.device, found.git_commit) == (self._device, self._commit) else None

    def keep(self, stem: str, case: Any) -> None:
        write_atomic(self._path(stem), dump(self._case_file(self._device, self._commit, case)), overwrite=True)

    def write(self, result: Any, *, finished: bool) -> None:
        """A result at its place, for good; or of the cases so far beside it, which the tables read as well."""
        write_atomic(self.result if finished else self.unfinished, dump(result), overwrite=not finished)
        if finished:
            self.unfinished.unlink(missing_ok=True)

    def made_by(self, window: int, seeds: Mapping[str, int], versions: Mapping[str, str]) -> Provenance:
        """The provenance of a run that ends now; ``versions``: of packages beside the usual ones."""
        found = provenance.collect(
            device=self._device, threads=torch.get_num_threads(), dtype="bfloat16 activations, float32 gates and state",
            engine="kernels", window=window, seeds=dict(seeds), sha256={}, started=self._started,
        )  # fmt: skip
        found.versions.update(versions)
        if self._cuda:
            found.versions["cuda"] = str(torch.version.cuda)
        return found

    def _path(self, stem: str) -> Path:
        return self._folder / (re.sub(r"[^A-Za-z0-9._+-]+", "_", stem) + ".json")
