"""Saved states as packed codes and scales, and back: file to file, a few megabytes at a time (docs/states-on-disk.md).

A source is anything with ``slots``, ``metadata`` and ``read``: a TensorFile, or what an adapter makes of a
torch.save. Tensors of it that are no states are taken over as they are.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .codec import encode
from .encoded import EncodedState
from .errors import FileFormatError, InvalidValueError, NonFiniteStateError, unknown_name
from .formats import FORMATS
from .policy import StatePolicy
from .recipe import Recipe
from .storage import SCHEMA as STATE_SCHEMA
from .storage import digest
from .tensorfile import NAMES, Slot, TensorFile, TensorWriter, pieces, writing

SCHEMA = "quantize-state/packed/1"
CAPTURE_SCHEMA = "quantize-state/capture/1"

LAYOUTS = ("vk", "kv")
"""How a source's states lie: [..., V, K], or [..., K, V] as transformers keeps those of GDN and KDA."""

How = tuple[str, str, str | None]
"""Format, scale rule and rotation."""

Progress = Callable[[int, int], None]
"""Called as (bytes done, bytes in all), of the source."""


class Source(Protocol):
    """Tensors by name that can be read a few rows at a time."""

    @property
    def slots(self) -> Mapping[str, Slot]:
        """Dtype and shape of every tensor."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The file's metadata."""

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or ``rows`` of its first axis."""


@dataclass(frozen=True)
class SavedState:
    """One state in a source: its name in a packed file, the tensor that holds it, the layer that recipes know."""

    name: str
    tensor: str
    layer: str


@dataclass(frozen=True)
class Entry:
    """What a packed file says about one state. ``shape`` and ``dtype`` are those of ``tensor`` in the source."""

    tensor: str
    format: str
    scale_rule: str
    rotation: str | None
    shape: tuple[int, ...]
    dtype: str
    layout: str = "vk"

    @property
    def how(self) -> How:
        return self.format, self.scale_rule, self.rotation

    @property
    def state_shape(self) -> tuple[int, ...]:
        """[..., V, K]."""
        return _as_vk(self.shape, self.layout)


@dataclass(frozen=True)
class Summary:
    """What a conversion did: states by format, tensors taken over as they are, bytes of the states before and after."""

    states: dict[str, int]
    kept: tuple[str, ...]
    bytes_before: int
    bytes_after: int


def layer_of(name: str) -> str:
    """The layer of a state called ``name``: without ``/checkpoint`` of a DecodeState and ``@position`` of a capture."""
    return name.removesuffix("/checkpoint").partition("@")[0]


def find_states(source: Source, patterns: Sequence[str] = ()) -> list[SavedState]:
    """The states in ``source`` whose names match one of ``patterns`` (all by default), in the file's order.

    A DecodeState file's states are its checkpoints; in any other file, every float tensor with two axes or more.
    Raises InvalidValueError where a pattern matches none, and FileFormatError for a file that is packed already.
    """
    schema = source.metadata.get("schema")
    if schema == SCHEMA:
        raise FileFormatError("the states of this file are packed already; decode it first")
    if schema == STATE_SCHEMA:
        layers = json.loads(source.metadata["layers"])
        dense = [n for n, entry in layers.items() if FORMATS[entry["encoded"]["checkpoint"]["format"]].scaling is None]
        states = [SavedState(f"{name}/checkpoint", f"{name}/checkpoint/codes", name) for name in dense]
    else:
        states = [
            SavedState(name, name, layer_of(name))
            for name, slot in source.slots.items()
            if slot.dtype.is_floating_point and slot.dtype.itemsize > 1 and len(slot.shape) >= 2
        ]
    known = [state.name for state in states]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            shown = ", ".join(known[:8]) + (f" and {len(known) - 8} more" if len(known) > 8 else "")
            raise InvalidValueError(f"no state matches {pattern!r}; there are {shown or 'none'}")
    if not states:
        raise InvalidValueError("the file holds no state: no float tensor [..., V, K]")
    return [s for s in states if not patterns or any(fnmatchcase(s.name, p) for p in patterns)]


def how_by_recipe(states: Sequence[SavedState], recipe: Recipe) -> list[How]:
    """How a recipe encodes each state: as its layer's read copy, or as the checkpoint where there is no copy."""
    layers = list(dict.fromkeys(state.layer for state in states))
    policies: dict[str, StatePolicy] = dict(zip(layers, recipe.for_layers(layers), strict=True))
    for name, policy in policies.items():
        if policy.balanced:
            raise InvalidValueError(
                f"packed files have no column scales, and the recipe's policy of {name} is {policy.name}; leave "
                "balanced out"
            )
    return [p.how(p.read or p.checkpoint)[:3] for p in (policies[state.layer] for state in states)]


def pack(
    source: Source,
    out: str | os.PathLike[str],
    states: Sequence[SavedState],
    how: Sequence[How],
    *,
    layout: str = "vk",
    progress: Progress | None = None,
) -> Summary:
    """Write ``source`` to ``out`` with ``states`` encoded, each as ``how`` says. ``out`` must not exist.

    Copies in a DecodeState file are left out: decoding makes them anew from the checkpoint.
    Raises InvalidValueError for what does not fit, NonFiniteStateError naming the tensor with Inf or NaN.
    """
    if layout not in LAYOUTS:
        raise unknown_name("layout", layout, LAYOUTS)
    entries = {
        state.name: Entry(state.tensor, *how_, shape=slot.shape, dtype=NAMES[slot.dtype], layout=layout)
        for state, how_ in zip(states, how, strict=True)
        for slot in (source.slots[state.tensor],)
    }
    packed = {entry.tensor for entry in entries.values()}
    dropped = {f"{state.layer}/copy/" for state in states} if source.metadata.get("schema") == STATE_SCHEMA else set()
    kept = [n for n in source.slots if n not in packed and not any(n.startswith(d) for d in dropped)]
    slots = {name: source.slots[name] for name in kept}
    for name, entry in entries.items():
        for part, slot in stored(entry).items():
            if slots.setdefault(f"{name}.{part}", slot) is not slot:
                raise InvalidValueError(f"the file already has a tensor {name}.{part}")
    metadata = {
        "schema": SCHEMA,
        "states": json.dumps({name: asdict(entry) for name, entry in entries.items()}),
        "source": json.dumps(dict(source.metadata)),
    }
    tally = _Tally(sum(source.slots[n].nbytes for n in (*packed, *kept)), progress)
    with writing(out, slots, metadata) as writer:
        for name in kept:
            _copy(source, name, name, writer, tally)
        for name, entry in entries.items():
            for rows, dense in _parts(source, entry.tensor, len(entry.shape) > 2):
                for key, tensor in _encode(name, rows, _as_vk_tensor(dense, layout), entry.how).items():
                    writer.append(f"{name}.{key}", tensor)
                tally.add(dense.numel() * dense.element_size())
    return _summary(entries, kept, source.slots, slots)


def unpack(file: PackedFile, out: str | os.PathLike[str], *, progress: Progress | None = None) -> Summary:
    """Write the file that ``file`` was made from, its states as they decode. ``out`` must not exist."""
    source, entries = file.file, file.entries
    parts = {f"{name}.{part}" for name, entry in entries.items() for part in stored(entry)}
    kept = [name for name in source.slots if name not in parts]
    origin: dict[str, str] = json.loads(source.metadata["source"])
    copies = _copies(entries, origin)
    slots = {name: source.slots[name] for name in kept}
    for name, entry in entries.items():
        slots[entry.tensor] = Slot(_dtype(entry.dtype), entry.shape)
        if name in copies:
            slots |= {f"{_copy_of(name)}/{k}": s for k, s in _slots_of(copies[name], entry.state_shape).items()}
    tally = _Tally(sum(slots[entry.tensor].nbytes for entry in entries.values()), progress)
    # what is decoded is not what was saved: a DecodeState file gets the checksum of its new contents
    stateful = origin.get("schema") == STATE_SCHEMA
    with writing(out, slots, origin, seal=partial(digest, origin["layers"]) if stateful else None) as writer:
        for name in kept:
            _copy(source, name, name, writer, None)
        for name, entry in entries.items():
            for encoded in file.pieces(name):
                state = encoded.decode()
                dense = _as_vk_tensor(state, entry.layout).to(_dtype(entry.dtype))
                writer.append(entry.tensor, dense)
                tally.add(dense.numel() * dense.element_size())
                if name in copies:
                    constant = f"{layer_of(name)}/columns"
                    columns = source.read(constant) if constant in source.slots else None
                    for key, tensor in encode(state, *copies[name], columns).tensors().items():
                        writer.append(f"{_copy_of(name)}/{key}", tensor)
    return _summary(entries, kept, slots, source.slots)


class PackedFile:
    """A packed file open for reading. ``entries`` says what there is, by state."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.file = TensorFile(path)
        found = self.file.metadata.get("schema")
        if found != SCHEMA:
            raise FileFormatError(f"{path} has schema {found!r}; `quantize-state convert` writes {SCHEMA!r}")
        try:
            plain = json.loads(self.file.metadata["states"])
            self.entries = {name: Entry(**{**e, "shape": tuple(e["shape"])}) for name, e in plain.items()}
            for name, entry in self.entries.items():
                for part, slot in stored(entry).items():
                    if self.file.slots.get(f"{name}.{part}") != slot:
                        raise FileFormatError(f"{path}: {name}.{part} is not {slot}, as its header implies")
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, FileFormatError):
                raise
            raise FileFormatError(f"{path} has a damaged header: {type(error).__name__}: {error}") from error

    def encoded(self, name: str, rows: slice | None = None) -> EncodedState:
        """The state called ``name``, or ``rows`` of its first axis, as it is stored."""
        if name not in self.entries:
            raise unknown_name("state", name, self.entries)
        entry = self.entries[name]
        codes = self.file.read(f"{name}.codes", rows)
        scales = {
            part.removesuffix("_scale"): self.file.read(f"{name}.{part}", rows)
            for part in stored(entry)
            if part != "codes"
        }
        *lead, value_dim, key_dim = entry.state_shape
        lead = lead if rows is None else [len(range(*rows.indices(lead[0]))), *lead[1:]]
        return EncodedState(codes, scales, *entry.how, torch.Size((*lead, value_dim, key_dim)))

    def pieces(self, name: str) -> Iterator[EncodedState]:
        """The state called ``name``, a few rows of its first axis at a time."""
        shape = self.entries[name].state_shape
        if len(shape) == 2:
            yield self.encoded(name)
            return
        for rows in pieces(shape, 4 * math.prod(shape[1:])):
            yield self.encoded(name, rows)


def stored(entry: Entry) -> dict[str, Slot]:
    """The tensors of one packed state by the suffixes of their names: ``codes`` and what scales the format has."""
    return {_suffix(key): slot for key, slot in _slots_of(entry.how, entry.state_shape).items()}


def stored_bytes(how: How, shape: Sequence[int]) -> int:
    """Bytes of a state [..., V, K] encoded as ``how`` says, scales and padding included."""
    return sum(slot.nbytes for slot in _slots_of(how, shape).values())


def _slots_of(how: How, shape: Sequence[int]) -> dict[str, Slot]:
    """Under the names of EncodedState.tensors()."""
    probe = encode(torch.zeros(0, *shape[-2:]), *how).tensors()
    return {key: Slot(t.dtype, (*shape[:-2], *t.shape[1:])) for key, t in probe.items()}


def _suffix(key: str) -> str:
    return key if key == "codes" else f"{key.removeprefix('scales.')}_scale"


def _encode(name: str, rows: slice | None, state: Tensor, how: How) -> dict[str, Tensor]:
    try:
        return {_suffix(key): tensor for key, tensor in encode(state, *how).tensors().items()}
    except NonFiniteStateError as error:
        where = "" if rows is None or not rows.start else f", counted from row {rows.start} of it"
        raise NonFiniteStateError(f"tensor {name!r}{where}: {error}") from None


def _parts(source: Source, name: str, by_rows: bool) -> Iterator[tuple[slice | None, Tensor]]:
    slot = source.slots[name]
    if not by_rows or not slot.shape:
        yield None, source.read(name)
        return
    for rows in pieces(slot.shape, slot.nbytes // max(slot.shape[0], 1)):
        yield rows, source.read(name, rows)


def _copy(source: Source, name: str, to: str, writer: TensorWriter, tally: _Tally | None) -> None:
    for _, part in _parts(source, name, True):
        writer.append(to, part)
        if tally is not None:
            tally.add(part.numel() * part.element_size())


def _copies(entries: Mapping[str, Entry], origin: Mapping[str, str]) -> dict[str, How]:
    """Of a DecodeState file, the read copies that its states had, and how they were encoded."""
    if origin.get("schema") != STATE_SCHEMA:
        return {}
    layers: dict[str, Any] = json.loads(origin["layers"])
    found = {name: layers[layer_of(name)]["encoded"].get("copy") for name in entries}
    return {name: (e["format"], e["scale_rule"], e["rotation"]) for name, e in found.items() if e is not None}


def _copy_of(name: str) -> str:
    return f"{layer_of(name)}/copy"


def _as_vk(shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    return shape if layout == "vk" else (*shape[:-2], shape[-1], shape[-2])


def _as_vk_tensor(tensor: Tensor, layout: str) -> Tensor:
    return tensor if layout == "vk" else tensor.mT


def _dtype(name: str) -> torch.dtype:
    return next(dtype for dtype, known in NAMES.items() if known == name)


class _Tally:
    def __init__(self, total: int, progress: Progress | None) -> None:
        self.done, self.total, self.progress = 0, total, progress

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _summary(
    entries: Mapping[str, Entry], kept: Sequence[str], dense: Mapping[str, Slot], packed: Mapping[str, Slot]
) -> Summary:
    formats: dict[str, int] = {}
    for entry in entries.values():
        formats[entry.format] = formats.get(entry.format, 0) + 1
    return Summary(
        formats,
        tuple(kept),
        sum(dense[entry.tensor].nbytes for entry in entries.values()),
        sum(packed[f"{name}.{part}"].nbytes for name, entry in entries.items() for part in stored(entry)),
    )
