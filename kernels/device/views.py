"""Tensors of a DecodeState as kernels take them: raw bytes, and one stride per slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.encoded import EncodedState
from ...quant.errors import InvalidValueError
from ...quant.rotation import ROTATIONS


@dataclass(frozen=True)
class KernelViews:
    """The tensors of an EncodedState, absent scales as ``codes``, and their slot strides in elements."""

    codes: Tensor
    row: Tensor
    block: Tensor
    total: Tensor
    codes_stride: int
    row_stride: int
    block_stride: int
    total_stride: int


def kernel_views(state: EncodedState, *, words: bool = False) -> KernelViews:
    """One-byte floats as uint8, bfloat16 as int16; with ``words`` codes as int64, eight bytes of them.

    Raises InvalidValueError where a slot's data is not contiguous, or words do not fit the slot stride.
    """
    codes = raw_view(state.codes)
    if words:
        width = codes.element_size()
        if not has_words(state):
            raise InvalidValueError(
                f"codes with slot stride {width * codes.stride(0)} bytes are not whole 8-byte words; "
                "pad slots to 8 bytes"
            )
        slot_stride(codes, "codes")
        codes = codes.view(torch.int64)
    scales = {name: raw_view(t) for name, t in state.scales.items()}
    row, block, total = (scales.get(name, codes) for name in ("row", "block", "global"))
    strides = {name: slot_stride(t, f"{name} scales") for name, t in scales.items()}
    return KernelViews(
        codes,
        row,
        block,
        total,
        slot_stride(codes, "codes"),
        *(strides.get(name, 0) for name in ("row", "block", "global")),
    )


def has_words(state: EncodedState) -> bool:
    """Whether codes of every row of every slot are whole aligned words of eight bytes."""
    t = state.codes
    return not any(n * t.element_size() % 8 for n in (t.stride(0), t.storage_offset(), t.shape[-1]))


def has_quads(t: Tensor) -> bool:
    """Whether every slot of float32 ``t`` [slots, ..., K] starts at a multiple of sixteen bytes; rows then do too."""
    return not any(n % 4 for n in (t.stride(0), t.storage_offset(), t.shape[-1]))


def raw_view(t: Tensor) -> Tensor:
    """One-byte floats as uint8, bfloat16 as int16: the device codec works on bits."""
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16)
    return t if t.element_size() > 1 or t.dtype in (torch.uint8, torch.int8) else t.view(torch.uint8)


def slot_stride(t: Tensor, name: str) -> int:
    """Elements between slots of a pool [slots, ...] whose slots are each contiguous."""
    expected = 1
    for size, stride in zip(reversed(t.shape[1:]), reversed(t.stride()[1:]), strict=True):
        if size > 1 and stride != expected:
            raise InvalidValueError(
                f"{name} {list(t.shape)} with strides {list(t.stride())}: a slot must be contiguous"
            )
        expected *= size
    return t.stride(0)


def check_outputs(shape: tuple[int, ...], out: Tensor, skip: tuple[Tensor, Tensor] | None, gate: Tensor | None) -> None:
    """Raise InvalidValueError where ``out``, the skip's x or the gate are not contiguous tensors of ``shape``
    [B, T, H, V]: kernels go through them as one block."""
    for name, t in (("out", out), ("the skip's x", None if skip is None else skip[0]), ("gate", gate)):
        if t is not None and (t.shape != shape or not t.is_contiguous()):
            raise InvalidValueError(
                f"{name} {list(t.shape)} with strides {list(t.stride())}: must be {list(shape)}, contiguous; "
                "give a tensor of its own, not a slice"
            )


def rotation_size(state: EncodedState | None) -> int:
    """Columns that the rotation of ``state`` mixes; 0 for none."""
    if state is None or state.rotation is None:
        return 0
    return min(state.shape[-1], ROTATIONS[state.rotation] or state.shape[-1])
