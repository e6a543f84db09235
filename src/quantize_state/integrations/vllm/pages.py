"""Where the parts of a DecodeState lie in a page of vLLM's state pool.

vLLM's page of a layer holds its convolution state and its recurrent state. Behind them the plugin puts three more
tensors: the ring's values, its keys, and one of bytes for everything else (gains, log-decays, cursor, position, codes
and scales of the copy, and what the kernels keep of the delta rule between tokens). All are part of the page, so they
are copied, reused and freed with it.

Pages of all layers are alike, also where a recipe gives them different policies: each of the three is as large as the
largest layer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import torch
from torch import Tensor

from ...quant.encoded import EncodedState
from ...quant.errors import QuantizeStateError
from ...quant.formats import FORMATS
from ...quant.policy import StatePolicy
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState

ALIGNMENT = 16
"""Bytes to which every part is aligned within a page, for vector loads; 8 where the page itself is no multiple."""

EXTRA_STATES = 3


@dataclass(frozen=True)
class Part:
    """One tensor [slots, *shape] of a DecodeState among the bytes of a page."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, pages: Tensor, start: int) -> Tensor:
        """``pages`` [slots, bytes] uint8, whose parts begin at ``start``."""
        begin = start + self.offset
        return pages[:, begin : begin + self.nbytes].view(self.dtype).view(-1, *self.shape)


@lru_cache
def parts(spec: LayerSpec, policy: StatePolicy) -> tuple[Part, ...]:
    """What lies among the bytes: all of a DecodeState but its checkpoint and the ring's keys and values."""
    rate = torch.zeros(spec.heads) if spec.rules.gain_sets_decay else None
    state = DecodeState.allocate(spec, policy, 1, decay_rate=rate)
    tensors = {f"ring.{name}": t for name, t in state.ring.items() if name not in ("k", "v")}
    tensors |= {"cursor": state.cursor, "position": state.position}
    if state.copy is not None:
        tensors |= {f"copy.{name}": t for name, t in state.copy.tensors().items()}
    if spec.rules.delta_rule:
        tensors["mix"] = torch.zeros(1, spec.heads, policy.window, policy.window)
    found, offset = [], 0
    for name, tensor in tensors.items():
        found.append(Part(name, offset, tuple(tensor.shape[1:]), tensor.dtype))
        offset += -(-found[-1].nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(found)


def extra_shapes(spec: LayerSpec, policies: Sequence[StatePolicy]) -> tuple[tuple[int, ...], ...]:
    """Shapes of the three tensors that ``policies``, the different ones of a model's layers, need in a page."""
    window = max(policy.window for policy in policies)
    last = [parts(spec, policy)[-1] for policy in policies]
    size = max(part.offset + -(-part.nbytes // ALIGNMENT) * ALIGNMENT for part in last)
    # The spare bytes let the parts begin at a multiple, wherever the tensors before them end.
    return (
        (window, spec.heads, spec.value_dim),
        (window, spec.key_heads, spec.key_dim),
        (size + ALIGNMENT,),
    )


def extra_dtypes(model_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes of the three tensors; keys and values have the model's."""
    return (model_dtype, model_dtype, torch.uint8)


def checkpoint_dtype(policy: StatePolicy) -> torch.dtype:
    """That of vLLM's recurrent state."""
    dtype = FORMATS[policy.checkpoint].element.dtype
    assert dtype is not None  # check_servable: plain numbers
    return dtype


def state_in_pages(
    spec: LayerSpec,
    policy: StatePolicy,
    layer: str,
    *,
    checkpoint: Tensor,
    extra: Sequence[Tensor],
    decay_rate: Tensor | None = None,
) -> DecodeState:
    """The DecodeState whose tensors are views of a pool; slot s is page s.

    ``checkpoint`` [pages, H, V, K] with any strides; ``extra``: the three tensors [pages, …] of ``extra_shapes``.
    Raises QuantizeStateError where pages are not aligned to 8 bytes.
    """
    values, keys, rest = extra
    start = _start(rest, layer)
    found = {part.name: part.view(rest, start) for part in parts(spec, policy)}

    def under(prefix: str) -> dict[str, Tensor]:
        return {name.removeprefix(prefix): t for name, t in found.items() if name.startswith(prefix)}

    copy = None
    if policy.read is not None:
        copy = EncodedState.from_tensors(under("copy."), *policy.how(policy.read), key_dim=spec.key_dim)
    return DecodeState(
        spec,
        policy,
        layer,
        checkpoint=EncodedState.from_tensors(
            {"codes": checkpoint}, *policy.how(policy.checkpoint), key_dim=spec.key_dim
        ),
        copy=copy,
        ring={"v": values[:, : policy.window], "k": keys[:, : policy.window]} | under("ring."),
        cursor=found["cursor"],
        position=found["position"],
        decay_rate=decay_rate,
        mix=found.get("mix"),
    )


def _start(rest: Tensor, layer: str) -> int:
    """The first byte of ``rest`` from which parts are aligned in every page."""
    for alignment in (ALIGNMENT, 8):
        if rest.stride(0) % alignment == 0:
            return -rest.data_ptr() % alignment
    raise QuantizeStateError(
        f"layer {layer!r}: pages of {rest.stride(0)} bytes are no multiple of 8, so a page's cursor and scales can't "
        "be addressed; the model's convolution state has an odd size that the plugin does not support"
    )
