"""What a file of states holds, head by head: sizes, ranges, zeros, saturation, and the error against the original."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .encoded import EncodedState
from .errors import InvalidValueError
from .formats import FORMATS, find_format
from .packed import SCHEMA as PACKED_SCHEMA
from .packed import PackedFile, Source, find_states
from .state import STALE, DecodeState
from .storage import SCHEMA as STATE_SCHEMA
from .storage import load_states
from .tensorfile import NAMES, TensorFile, pieces

BINS = 48
"""Bins of a histogram that are shown, the last of them holding the largest magnitude."""

BINS_PER_OCTAVE = 2


@dataclass
class Head:
    """One head of one state, over all slots. ``saturated`` and ``error`` are None where they mean nothing."""

    amax: float
    zeros: float
    saturated: float | None
    error: float | None


@dataclass
class StateReport:
    """One state of a file. ``nbytes`` counts codes and scales; ``heads`` is one entry where there is no head axis.

    ``histogram``: the share of elements at each code (``codes`` names their values) or, where there are more than
    16 codes, in each bin of log2(magnitude), the last of them holding the largest; zeros are in none.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    heads: list[Head]
    histogram: list[float]
    codes: list[float] = field(default_factory=list)

    @property
    def error(self) -> float | None:
        """The largest of its heads'."""
        return max((head.error for head in self.heads if head.error is not None), default=None)


def inspect(
    file: str | os.PathLike[str] | Source, original: str | os.PathLike[str] | None = None
) -> Iterator[StateReport]:
    """Report every state in a packed file, a DecodeState file, or any file with float tensors [..., V, K].

    Errors are relative, ‖decoded − original‖ / ‖original‖. ``original`` is the file that a packed one was made from;
    a DecodeState's copy is compared with its own checkpoint, but for slots in which it is stale. Reads a few megabytes
    at a time.
    """
    source = TensorFile(file) if isinstance(file, str | os.PathLike) else file
    schema = source.metadata.get("schema")
    if original is not None and schema != PACKED_SCHEMA:
        raise InvalidValueError("an original is compared with a packed file, and this is none")
    if schema == PACKED_SCHEMA:
        assert isinstance(source, TensorFile)
        yield from _packed(PackedFile(source.path), None if original is None else TensorFile(original))
    elif schema == STATE_SCHEMA:
        assert isinstance(source, TensorFile)
        for name, state in load_states(source.path).items():
            yield _report(f"{name}/checkpoint", [(state.checkpoint, None)])
            if state.copy is not None:
                yield _report(f"{name}/copy", _copies(state))
    else:
        for found in find_states(source):
            slot = source.slots[found.tensor]
            parts = pieces(slot.shape, slot.nbytes // max(slot.shape[0], 1)) if len(slot.shape) > 2 else [None]
            yield _report(found.name, ((source.read(found.tensor, rows), None) for rows in parts))


def _copies(state: DecodeState) -> Iterator[tuple[EncodedState, Tensor | None]]:
    """The copies of a state's slots beside what they encode, and those that are STALE beside nothing."""
    assert state.copy is not None
    stale = state.cursor == STALE
    for chosen, compared in ((~stale, True), (stale, False)):
        if bool(chosen.any()) or (compared and not state.slots):
            yield state.copy[chosen], state.checkpoint[chosen].decode() if compared else None


def _packed(file: PackedFile, original: TensorFile | None) -> Iterator[StateReport]:
    for name, entry in file.entries.items():
        if original is not None and entry.tensor not in original.slots:
            raise InvalidValueError(f"{original.path} has no {entry.tensor!r}: it is not what this was made from")
        if original is not None and original.slots[entry.tensor].shape != entry.shape:
            raise InvalidValueError(f"{original.path}: {entry.tensor!r} has another shape than what this was made from")

        def parts(name=name, entry=entry) -> Iterator[tuple[EncodedState, Tensor | None]]:
            at = 0
            for encoded in file.pieces(name):
                rows = slice(at, at := at + encoded.shape[0]) if len(entry.shape) > 2 else None
                dense = None if original is None else original.read(entry.tensor, rows)
                yield encoded, dense if dense is None or entry.layout == "vk" else dense.mT

        yield _report(name, parts())


class _Meter:
    """Sums over the pieces of one state, per head."""

    def __init__(self, heads: int, codes: list[float]) -> None:
        self.amax = torch.zeros(heads)
        self.elements = self.bytes = 0
        self.zeros, self.full, self.wrong, self.norm = (torch.zeros(heads, dtype=torch.float64) for _ in range(4))
        self.compared = False
        self.counts = torch.zeros(len(codes) or 256 * BINS_PER_OCTAVE, dtype=torch.int64)
        self.codes = torch.tensor(codes)

    def add(self, value: Tensor, element: Tensor | None, top: float, dense: Tensor | None) -> None:
        """``value`` [n, H, V, K]; ``element`` the same in units of its scales."""
        dims = (0, 2, 3)
        self.elements += value[:, 0].numel()
        self.amax = torch.maximum(self.amax, value.abs().amax(dims))
        self.zeros += ((value if element is None else element) == 0).sum(dims)
        if element is not None:
            self.full += (element.abs() == top).sum(dims)
        if dense is not None:
            self.compared = True
            self.wrong += (value - dense.float()).double().square().sum(dims)
            self.norm += dense.double().square().sum(dims)
        if len(self.codes):
            assert element is not None
            self.counts += torch.bincount(torch.bucketize(element.flatten(), self.codes), minlength=len(self.codes))
        else:
            octave = (value[value != 0].abs().log2() * BINS_PER_OCTAVE).floor().long() + 128 * BINS_PER_OCTAVE
            self.counts += torch.bincount(octave.clamp_(0, len(self.counts) - 1), minlength=len(self.counts))


def _report(name: str, parts) -> StateReport:
    meter: _Meter | None = None
    shape: list[int] = []
    spelled, scaled, top = "", False, 0.0
    for held, dense in parts:
        encoded = isinstance(held, EncodedState)
        if meter is None:
            shape = [0, *held.shape[1:]] if len(held.shape) > 2 else list(held.shape)
            spelled = held.format if encoded else NAMES[held.dtype].lower()
            fmt = FORMATS[held.format] if encoded else None
            scaled = fmt is not None and fmt.scaling is not None
            codes = _code_values(spelled) if scaled and fmt is not None and fmt.bits == 4 else []
            top = fmt.element.grid.max if scaled and fmt is not None and fmt.element.grid is not None else 0.0
            meter = _Meter(held.shape[-3] if len(held.shape) > 2 else 1, codes)
        value = held.decode() if encoded else held.float()
        element = find_format(held.format).element.load(held.codes)[..., : held.shape[-1]] if scaled else None
        four = (-1, meter.amax.shape[0], *held.shape[-2:])
        meter.add(
            value.reshape(four),
            None if element is None else element.reshape(four),
            top,
            None if dense is None else dense.reshape(four),
        )
        meter.bytes += held.nbytes
        if len(shape) > 2:
            shape[0] += held.shape[0]
    assert meter is not None
    heads = [
        Head(
            amax=float(meter.amax[h]),
            zeros=float(meter.zeros[h]) / meter.elements,
            saturated=float(meter.full[h]) / meter.elements if scaled else None,
            error=float((meter.wrong[h] / meter.norm[h]).sqrt()) if meter.compared and meter.norm[h] else None,
        )
        for h in range(len(meter.amax))
    ]
    return StateReport(name, tuple(shape), spelled, meter.bytes, heads, *_histogram(meter))


def _code_values(name: str) -> list[float]:
    """Every value of a 4-bit element, in order; zero once."""
    both = FORMATS[name].element.load(torch.tensor([[c | c << 4] for c in range(16)], dtype=torch.uint8))
    return sorted(set(both.flatten().tolist()))


def _histogram(meter: _Meter) -> tuple[list[float], list[float]]:
    total = meter.elements * len(meter.amax)
    share = (meter.counts.double() / total).tolist()
    if len(meter.codes):
        return share, meter.codes.tolist()
    filled = [i for i, n in enumerate(share) if n]
    stop = filled[-1] + 1 if filled else len(share)
    return share[max(0, stop - BINS) : stop], []
