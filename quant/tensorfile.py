"""safetensors files written piece by piece, so that one larger than memory can be made; and what they hold.

safetensors' own writer wants all tensors at once. The format is an 8-byte length, a JSON header with the place of
each tensor, and their bytes: with shapes known beforehand the header comes first and the bytes as they are made.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .errors import FileFormatError, InvalidValueError
from .files import replacing

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""safetensors' names of the dtypes that states and what travels with them have."""

UNSEALED = "0" * 64
"""What stands for a file's SHA-256 until it is known."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}

PIECE = 8 << 20
"""Bytes of a tensor that are in memory at once."""


@dataclass(frozen=True)
class Slot:
    """Dtype and shape of one tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorWriter:
    """An open file whose tensors take their bytes in any order, each from its front to its back."""

    def __init__(self, file: BinaryIO, slots: Mapping[str, Slot], metadata: Mapping[str, str]) -> None:
        # Wide dtypes first, as safetensors does, so that every tensor is aligned to its items.
        order = sorted(slots, key=lambda name: (-slots[name].dtype.itemsize, name))
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        self._next: dict[str, int] = {}
        self._end: dict[str, int] = {}
        at = 0
        for name in order:
            slot = slots[name]
            if slot.dtype not in NAMES:
                raise InvalidValueError(f"tensor {name!r} is {slot.dtype}, which is not written to safetensors files")
            stop = at + slot.nbytes
            header[name] = {"dtype": NAMES[slot.dtype], "shape": list(slot.shape), "data_offsets": [at, stop]}
            self._next[name], self._end[name] = at, stop
            at = stop
        text = json.dumps(header, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 8)
        self._file, self._slots, self._start = file, slots, 8 + len(text)
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(self._start + at)

    def append(self, name: str, tensor: Tensor) -> None:
        """The next bytes of ``name``: a piece of it along its first axis, or all of it."""
        slot = self._slots[name]
        if tensor.dtype != slot.dtype:
            raise InvalidValueError(f"tensor {name!r} is {slot.dtype} in the header and {tensor.dtype} in the data")
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        if self._next[name] + data.numel() > self._end[name]:
            raise InvalidValueError(f"tensor {name!r} has more data than its header says")
        self._file.seek(self._start + self._next[name])
        self._file.write(data.numpy().data)
        self._next[name] += data.numel()

    def check_complete(self) -> None:
        """Raise InvalidValueError naming a tensor whose bytes did not all come."""
        for name, at in self._next.items():
            if at != self._end[name]:
                raise InvalidValueError(f"tensor {name!r} lacks {self._end[name] - at:,} of its bytes")


@contextmanager
def writing(
    path: str | os.PathLike[str],
    slots: Mapping[str, Slot],
    metadata: Mapping[str, str],
    *,
    overwrite: bool = False,
    seal: Callable[[Mapping[str, Tensor]], str] | None = None,
) -> Iterator[TensorWriter]:
    """Write a safetensors file with the given tensors; it appears whole, read back by safetensors, or not at all.

    ``seal`` gives the metadata's ``sha256`` from the tensors, once they are all written: it stands in front of them.
    """
    if seal is not None:
        metadata = {**metadata, "sha256": UNSEALED}
    with replacing(path, overwrite=overwrite) as temporary:
        with open(temporary, "xb") as file:
            writer = TensorWriter(file, slots, metadata)
            yield writer
            writer.check_complete()
        with TensorFile(temporary) as written:
            if dict(written.slots) != dict(slots):
                raise FileFormatError(f"{path} did not read back as it was written; is the disk sound?")
            sealed = None if seal is None else seal(_Lazy(written))
        if sealed is not None:
            with open(temporary, "rb+") as file:
                header = file.read(8 + int.from_bytes(file.read(8), "little"))
                file.seek(8 + header.index(UNSEALED.encode()))
                file.write(sealed.encode())


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a file, read one at a time."""

    def __init__(self, file: TensorFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        return self._file.read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.slots)

    def __len__(self) -> int:
        return len(self._file.slots)


class TensorFile:
    """A safetensors file open for reading, tensor by tensor and row by row.

    Raises InvalidValueError where it does not exist and FileFormatError where it is no such file, or damaged.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from safetensors import SafetensorError, safe_open

        self.path = path
        try:
            self._file = safe_open(os.fspath(path), framework="pt")
            self.metadata: dict[str, str] = self._file.metadata() or {}
            self.slots: dict[str, Slot] = {}
            for name in self._file.keys():  # noqa: SIM118 - not a mapping
                piece = self._file.get_slice(name)
                kind = piece.get_dtype()
                if kind not in DTYPES:
                    raise FileFormatError(f"{path}: tensor {name!r} has dtype {kind}; known are {', '.join(DTYPES)}")
                self.slots[name] = Slot(DTYPES[kind], tuple(piece.get_shape()))
        except FileNotFoundError:
            raise InvalidValueError(f"{path} does not exist") from None
        except (SafetensorError, OSError) as error:
            raise FileFormatError(f"{path} is no safetensors file, or damaged: {error}") from error

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """A tensor, or ``rows`` of its first axis."""
        if rows is None:
            return self._file.get_tensor(name)
        return self._file.get_slice(name)[rows]

    def close(self) -> None:
        """Forget the file; reading ends here."""
        self._file.__exit__(None, None, None)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pieces(shape: Sequence[int], row_bytes: int) -> Iterator[slice]:
    """Slices along the first axis, each of at most PIECE bytes where a row is ``row_bytes``; at least a row."""
    step = max(1, PIECE // max(row_bytes, 1))
    for start in range(0, shape[0], step):
        yield slice(start, min(start + step, shape[0]))
