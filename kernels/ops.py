"""The decode step as one torch operator, so that torch.compile and CUDA graphs see a single mutation of a pool.

An operator takes tensors and numbers alone: what is constant of a layer (spec, policy, names) is registered once and
goes by a number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.encoded import EncodedState
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from . import sequence
from .inputs import TokenInputs
from .paths import Path
from .step import step as reference_step


@dataclass(frozen=True)
class _Layer:
    """What is constant of a layer, and where each tensor of the pool belongs."""

    spec: LayerSpec
    policy: StatePolicy
    name: str
    parts: tuple[str, ...]


_layers: list[_Layer] = []


def register_layer(state: DecodeState) -> int:
    """The number by which ``decode_step`` knows the layer of ``state``; the same for equal layers."""
    layer = _Layer(state.spec, state.policy, state.layer, tuple(_named(state)))
    if layer not in _layers:
        _layers.append(layer)
    return _layers.index(layer)


def pool_of(state: DecodeState) -> list[Tensor]:
    """The tensors of ``state`` in the order that ``decode_step`` takes them."""
    return list(_named(state).values())


def _named(state: DecodeState) -> dict[str, Tensor]:
    named = {f"checkpoint/{n}": t for n, t in state.checkpoint.tensors().items()}
    if state.copy is not None:
        named |= {f"copy/{n}": t for n, t in state.copy.tensors().items()}
        if state.copy.columns is not None:
            named["columns"] = state.copy.columns
    named |= {f"ring/{n}": t for n, t in state.ring.items()}
    named |= {"cursor": state.cursor, "position": state.position}
    if state.decay_rate is not None:
        named["decay_rate"] = state.decay_rate
    if state.spec.rules.delta_rule:
        named["mix"] = sequence.mixing_of(state)
    return named


def _state(pool: list[Tensor], layer: _Layer) -> DecodeState:
    named = dict(zip(layer.parts, pool, strict=True))

    def under(prefix: str) -> dict[str, Tensor]:
        return {n.removeprefix(prefix): t for n, t in named.items() if n.startswith(prefix)}

    def encoded(part: str, format: str) -> EncodedState:
        how = layer.policy.how(format, named.get("columns"))
        return EncodedState.from_tensors(under(f"{part}/"), *how, key_dim=layer.spec.key_dim)

    read = layer.policy.read
    return DecodeState(
        layer.spec,
        layer.policy,
        layer.name,
        checkpoint=encoded("checkpoint", layer.policy.checkpoint),
        copy=None if read is None else encoded("copy", read),
        ring=under("ring/"),
        cursor=named["cursor"],
        position=named["position"],
        decay_rate=named.get("decay_rate"),
        mix=named.get("mix"),
    )


@torch.library.custom_op(
    "quantize_state::decode_step",
    mutates_args=("pool",),
    schema="(Tensor(a!)[] pool, Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor slots, int layer,"
    ' str path="replay")'
    " -> Tensor",
)
def decode_step(
    pool: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    slots: Tensor,
    layer: int,
    path: Path = "replay",
) -> Tensor:
    """``step`` on the tensors of a DecodeState (``pool_of``), which change in place: outputs [B, 1, H, V] float32.

    By the kernels where they can (``path`` as in ``sequence.step``), else by the reference, which waits for the device.
    """
    state = _state(pool, _layers[layer])
    inputs = TokenInputs(q, k, v, beta, g)
    if sequence.unsupported(state):
        return reference_step(state, inputs, slots)
    return sequence.step(state, inputs, slots, path=path)


@decode_step.register_fake
def _(
    pool: list[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor | None,
    slots: Tensor,
    layer: int,
    path: Path = "replay",
) -> Tensor:
    return v.new_empty(v.shape, dtype=torch.float32)
