"""Column scales of read copies: constants of a layer, measured once and kept in a file (docs/formats.md)."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from .errors import FileFormatError, InvalidValueError
from .files import replacing
from .spec import LayerSpec

SCHEMA = "quantize-state/columns/1"

FLOOR = 1e-3
"""Of a head's mean square, added to every column's: one that is hardly written or read gets no extreme scale."""


@dataclass(frozen=True, eq=False)
class ColumnScales:
    """The column scales c of a model's layers: a read copy holds Q((S / c)·R), and outputs read it at (c ⊙ Θ)·R.

    ``layers``: c by layer name, float32 [H, K] on the CPU, positive. ``about``: what they were measured on, in words.
    ``path``: the file that they were read from or written to.
    """

    layers: Mapping[str, Tensor]
    about: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None

    @cached_property
    def sha256(self) -> str:
        """Over names, shapes and values."""
        digest = hashlib.sha256()
        for name, columns in sorted(self.layers.items()):
            digest.update(f"\n{name} {list(columns.shape)}\n".encode())
            digest.update(columns.contiguous().numpy().astype("<f4").tobytes())
        return digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ColumnScales) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __repr__(self) -> str:
        return f"ColumnScales({len(self.layers)} layers, sha256 {self.sha256})"

    @property
    def measured_on(self) -> str:
        """One phrase for a report."""
        return self.about.get("text", "unknown text") + (f", {n} tokens" if (n := self.about.get("tokens")) else "")

    def check(self, names: Iterable[str]) -> None:
        """Raise InvalidValueError naming the layers that these scales lack."""
        if lost := [name for name in names if name not in self.layers]:
            where = "the column scales" if self.path is None else str(self.path)
            raise InvalidValueError(
                f"{where} have none for {', '.join(lost)}; they were measured for {', '.join(self.layers)}. "
                "Measure them on this model: `quantize-state calibrate MODEL --out FILE.safetensors`"
            )

    def write(self, path: str | os.PathLike[str]) -> ColumnScales:
        """Write a safetensors file, which must not exist; returns these scales with its path."""
        from safetensors.torch import save_file

        metadata = {"schema": SCHEMA, "sha256": self.sha256, "about": json.dumps(dict(self.about))}
        with replacing(path, overwrite=False) as temporary:
            save_file({name: t.contiguous().clone() for name, t in self.layers.items()}, temporary, metadata)
        return ColumnScales(self.layers, self.about, Path(path))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ColumnScales:
        """Read what ``write`` wrote. Raises InvalidValueError where there is none, FileFormatError where the file is
        something else or damaged."""
        from .tensorfile import TensorFile

        with TensorFile(path) as file:
            if (found := file.metadata.get("schema")) != SCHEMA:
                raise FileFormatError(f"{path} has schema {found!r}; `quantize-state calibrate` writes {SCHEMA!r}")
            layers = {name: file.read(name).clone() for name in file.slots}
            try:
                scales = cls(layers, json.loads(file.metadata["about"]), Path(path))
            except (KeyError, ValueError) as error:
                raise FileFormatError(f"{path} has a damaged header: {type(error).__name__}: {error}") from error
        for name, columns in layers.items():
            if columns.dtype != torch.float32 or columns.dim() != 2:
                raise FileFormatError(f"{path}: {name} is {columns.dtype} {list(columns.shape)}, not float32 [H, K]")
        if scales.sha256 != file.metadata.get("sha256"):
            raise FileFormatError(f"{path} is damaged: its contents don't fit its checksum. Copy it again.")
        return scales


def balanced(written: Tensor, read: Tensor, *, shared: int = 1) -> Tensor:
    """c = (E[S_k²] / E[Θ_k²])^¼, float32 [H, K], each head's with a geometric mean of 1.

    ``written`` and ``read`` [H, K] are the mean squares of the state's columns and of what reads them, in any unit.
    Noise that a rotation spreads evenly over columns costs Σ c_k²·E[Θ_k²] · mean_j(E[S_j²]/c_j²), which by Cauchy and
    Schwarz is least at this c. ``shared`` consecutive heads get one c, that of their mean profile.
    """
    parts = []
    for squares in (written.double(), read.double()):
        squares = squares / squares.mean(-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        squares = squares.unflatten(0, (-1, shared)).mean(1)
        parts.append((squares + FLOOR).log())
    log = (parts[0] - parts[1]) / 4
    return (log - log.mean(-1, keepdim=True)).exp().repeat_interleave(shared, 0).float()


def sharing(spec: LayerSpec) -> int:
    """Consecutive heads whose column scales are one: those of a Mamba-2 group, which the kernels read at one Θ."""
    return 1 if spec.rules.delta_rule else spec.heads // spec.key_heads


def unit_columns(spec: LayerSpec) -> Tensor:
    """Column scales that change nothing, for states whose sizes alone matter."""
    return torch.ones(spec.heads, spec.key_dim)


def check_columns(columns: Tensor, spec: LayerSpec, layer: str) -> None:
    """Raise InvalidValueError where ``columns`` can't be the column scales of such a layer."""
    if columns.shape != (spec.heads, spec.key_dim):
        raise InvalidValueError(
            f"layer {layer!r}: column scales are [H, K] = {[spec.heads, spec.key_dim]}, not {list(columns.shape)}; "
            "measure them on this model"
        )
    if not bool((torch.isfinite(columns) & (columns > 0)).all()):
        raise InvalidValueError(f"layer {layer!r}: column scales must be positive and finite")
    groups = columns.unflatten(0, (-1, sharing(spec)))
    if not torch.equal(groups, groups[:, :1].expand_as(groups)):
        raise InvalidValueError(
            f"layer {layer!r}: the {sharing(spec)} heads of a {spec.rules.title} group must share their column scales"
        )
