"""What encode returns: a state as it is stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .errors import InvalidValueError
from .formats import find_format
from .rotation import rotate

How = tuple[str, str, str | None, Tensor | None]
"""Format, scale rule, rotation and column scales, in the order that ``encode`` takes them."""


@dataclass(frozen=True, eq=False)
class EncodedState:
    """A state [..., V, K] as it is stored. All tensors share its leading axes (slot, head).

    codes: [..., V, stored K], see docs/formats.md; scales by name: ``row`` [..., V], ``block``
    [..., V, blocks], ``global`` [...]. ``shape``: that of the state itself, before padding. ``columns``: column scales
    c, float32, broadcast to [..., K] (usually [H, K]): the bytes are those of (S / c)·R. They are a constant of the
    layer and no part of a slot: indexing, writing and counting bytes leave them alone.
    """

    codes: Tensor
    scales: dict[str, Tensor]
    format: str
    scale_rule: str
    rotation: str | None
    shape: torch.Size
    columns: Tensor | None = None

    @property
    def how(self) -> How:
        """What ``encode`` takes to encode another state like this one."""
        return self.format, self.scale_rule, self.rotation, self.columns

    def decode(self, dtype: torch.dtype = torch.float32, unrotate: bool = True) -> Tensor:
        """The state [..., V, K] that the bytes stand for, exact in float32, then cast to ``dtype``.

        ``unrotate=False`` leaves it rotated, and over its column scales, for readers that do both to the query instead.
        """
        fmt = find_format(self.format)
        values = fmt.element.load(self.codes)
        if fmt.scaling is not None:
            multiplier = fmt.scaling.multiplier(self.scales).unsqueeze(-1)
            blocks = multiplier.shape[-2]
            values = values.view(*values.shape[:-1], blocks, values.shape[-1] // blocks).mul_(multiplier).flatten(-2)
        values = values[..., : self.shape[-1]]
        if unrotate:
            values = unturned(values, self.rotation, self.columns)
        return values.contiguous().to(dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, padding included; without ``columns``, which are there once for all slots."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    @property
    def device(self) -> torch.device:
        return self.codes.device

    def tensors(self) -> dict[str, Tensor]:
        """Everything stored per slot, by name (``codes``, ``scales.row``, …); ``from_tensors`` reads it back."""
        return {"codes": self.codes, **{f"scales.{name}": t for name, t in self.scales.items()}}

    @classmethod
    def from_tensors(
        cls,
        tensors: dict[str, Tensor],
        format: str,
        scale_rule: str,
        rotation: str | None,
        columns: Tensor | None = None,
        *,
        key_dim: int,
    ) -> EncodedState:
        """The state whose ``tensors()`` these are. ``key_dim``: K before padding."""
        codes = tensors["codes"]
        scales = {name.removeprefix("scales."): t for name, t in tensors.items() if name.startswith("scales.")}
        return cls(codes, scales, format, scale_rule, rotation, torch.Size((*codes.shape[:-1], key_dim)), columns)

    def __reduce__(self) -> tuple:
        # Pickled as bytes: torch cannot unpickle tensors of 8-bit floats outside torch.save.
        parts = {name: (_as_bytes(t), t.dtype) for name, t in self.tensors().items()}
        return _unpickle, (parts, self.how, self.shape[-1])

    def __getitem__(self, index: Any) -> EncodedState:
        """Index the leading axes, as a tensor of that shape; views where torch gives views."""
        index = self._leading(index)
        lead = self._probe()[index].shape
        taken = self._map(lambda t: _as_bytes(t)[index].view(t.dtype))
        columns = self.columns
        if columns is not None and _axes(index) == len(self.shape) - 2:  # heads are chosen too
            columns = columns.expand(*self.shape[:-2], self.shape[-1])[index]
        return replace(taken, shape=torch.Size((*lead, *self.shape[-2:])), columns=columns)

    def write_(self, index: Any, other: EncodedState) -> EncodedState:
        """``self[index] = other``, in place; ``other`` must have the same format, rotation, V, K and column scales."""
        mine = (self.format, self.rotation, *self.shape[-2:])
        theirs = (other.format, other.rotation, *other.shape[-2:])
        if mine != theirs:
            raise InvalidValueError(f"cannot write (format, rotation, V, K) = {theirs} into {mine}")
        if not _same(self.columns, other.columns):
            raise InvalidValueError("cannot write a state with other column scales: its codes are in other units")
        index = self._leading(index)
        lead = self._probe()[index].shape
        if torch.broadcast_shapes(lead, other.shape[:-2]) != lead:
            raise InvalidValueError(f"cannot write leading axes {list(other.shape[:-2])} into {list(lead)}")
        sources = other.tensors()
        for name, tensor in self.tensors().items():
            _as_bytes(tensor)[index] = _as_bytes(sources[name])
        return self

    def to(self, device: torch.device | str) -> EncodedState:
        columns = None if self.columns is None else self.columns.to(device)
        return replace(self._map(lambda t: t.to(device)), columns=columns)

    def clone(self) -> EncodedState:
        return self._map(lambda t: t.clone())

    def _map(self, function: Callable[[Tensor], Tensor]) -> EncodedState:
        scales = {name: function(t) for name, t in self.scales.items()}
        return replace(self, codes=function(self.codes), scales=scales)

    def _probe(self) -> Tensor:
        """A tensor of the leading shape without memory of its own: indexing it fails where V or K would be hit."""
        return torch.zeros((), dtype=torch.bool, device=self.codes.device).expand(self.shape[:-2])

    def _leading(self, index: Any) -> tuple:
        """``index`` as a tuple without an ellipsis, which would otherwise reach V and K."""
        parts = index if isinstance(index, tuple) else (index,)
        where = [i for i, part in enumerate(parts) if part is Ellipsis]
        if not where:
            return parts
        if len(where) > 1:
            raise IndexError("an index can have only one ellipsis")
        rest = [part for part in parts if part is not Ellipsis]
        fill = (slice(None),) * (len(self.shape) - 2 - _axes(rest))
        return (*parts[: where[0]], *fill, *parts[where[0] + 1 :])


def unturned(values: Tensor, rotation: str | None, columns: Tensor | None) -> Tensor:
    """From the units of a copy back to those of the state: rotated back, times the column scales."""
    values = rotate(values, rotation)
    return values if columns is None else values * columns[..., None, :]


def _axes(index: Any) -> int:
    """How many axes an index without an ellipsis reaches."""
    return sum(p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else p is not None for p in index)


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _unpickle(parts: dict[str, tuple[Tensor, torch.dtype]], how: How, key_dim: int) -> EncodedState:
    return EncodedState.from_tensors({n: t.view(dtype) for n, (t, dtype) in parts.items()}, *how, key_dim=key_dim)


def _as_bytes(t: Tensor) -> Tensor:
    """Eight-bit floats as uint8: on a CPU not every indexing kernel knows them."""
    return t.view(torch.uint8) if t.element_size() == 1 else t
