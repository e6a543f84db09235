"""How transformers calls each family's recurrence, and what it expects back: one small mapping per family.

A mapping replaces a function of a modeling module. It reads that function's arguments into TokenInputs, lets the
running layer do the recurrence, and adds what the function itself would have added.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from ..kernels.inputs import TokenInputs
from ..quant.errors import QuantizeStateError


class RunningLayer(Protocol):
    """The attached layer whose forward is running, as the mappings see it."""

    def decodes(self, initial: Any) -> bool:
        """Whether a chunk that continues from ``initial`` stands for as many decode steps and not for a prompt."""

    def recur(
        self,
        inputs: TokenInputs,
        initial: Any,
        *,
        keep: bool,
        qk_l2norm: bool = False,
        query_scale: float = 1.0,
        decay_rate: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Outputs [B, T, H, V] float32 and, with ``keep``, the state to hand to the cache."""


@dataclass(frozen=True)
class HFFamily:
    """The names under which transformers calls a family's recurrence, and their replacements.

    ``functions`` maps a global name of the modeling module to its replacement, of which the layer's forward must
    use all but those in ``optional``.
    """

    name: str
    functions: dict[str, Callable[..., Any]]
    transposed: bool
    """transformers keeps states as [B, H, K, V]; ours are [B, H, V, K]."""
    optional: frozenset[str] = frozenset()
    as_decoding: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chunk function, where a layer passes them, that make it compute what decode computes."""

    @property
    def required(self) -> set[str]:
        return set(self.functions) - self.optional


def _refuse_packing(**given: Tensor | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise QuantizeStateError(f"packed sequences ({name}) share rows, and states are kept per row; unpack them")


# --- Mamba-2: C, B, x and Δ are q, k, v and the gain -----------------------------------------------------------------


def _mamba2_chunk(
    layer: RunningLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int | None = None,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Any = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] | None = None,
    return_final_states: bool = False,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
    **_: Any,
) -> Any:
    """x [B, T, H, V]; dt [B, T, H]; A, D, dt_bias [H]; B, C [B, T, G, K]. Gives float32, as transformers does."""
    _refuse_packing(cu_seqlens=cu_seqlens, seq_idx=seq_idx)
    delta = _delta(dt, dt_bias, dt_softplus)
    # Decode has no limits on Δ (transformers' and mamba_ssm's single-token functions don't take them), so neither
    # has a chunk that stands for decoding: then scan equals stepping, and a prompt still equals transformers' own.
    if dt_limit is not None and not layer.decodes(initial_states):
        delta = delta.clamp(*dt_limit)
    inputs = TokenInputs(q=C, k=B, v=hidden_states, beta=delta)
    y, state = layer.recur(inputs, initial_states, keep=return_final_states, decay_rate=A)
    y = _skip_and_gate(y, hidden_states, D, z)
    return (y, state) if return_final_states else y


def _mamba2_step(
    layer: RunningLayer,
    state: Any,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    z: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """x, z, dt [B, H, V]; D, dt_bias [H, V]; A [H, V, K] (all but x, z expanded); B, C [B, G, K]. Gives x's dtype."""
    delta = _delta(dt[..., 0], None if dt_bias is None else dt_bias[..., 0], dt_softplus)
    inputs = TokenInputs(q=C[:, None], k=B[:, None], v=hidden_states[:, None], beta=delta[:, None])
    y, _state = layer.recur(inputs, state, keep=True, decay_rate=A[:, 0, 0])
    return _skip_and_gate(y[:, 0], hidden_states, None if D is None else D[:, 0], z).to(hidden_states.dtype)


def _mamba2_fused(layer: RunningLayer, *_: Any, **__: Any) -> None:
    """The training shortcut over the whole layer; None means that there is none, and the layer takes the long way."""


def _delta(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    """Δ in the dtype and order of transformers' functions: bias and softplus in dt's dtype."""
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    return F.softplus(dt) if softplus else dt


def _skip_and_gate(y: Tensor, x: Tensor, D: Tensor | None, z: Tensor | None) -> Tensor:
    """Mamba-2's D·x skip and, where the layer hands it over, the gate, both in float32 [..., H, V]."""
    if D is not None:
        y = y + x.float() * D.float()[:, None]
    return y if z is None else y * F.silu(z.float())


# --- GDN and KDA: one mapping for both forms of both ------------------------------------------------------------------


def _delta_rule(
    layer: RunningLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Any = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Any]:
    """q, k [B, T, Hk, K]; v [B, T, H, V]; beta [B, T, H]; g [B, T, H] or, for KDA, [B, T, H, K]. Gives q's dtype."""
    _refuse_packing(cu_seqlens=cu_seqlens)
    y, state = layer.recur(
        TokenInputs(q=query, k=key, v=value, beta=beta, g=g),
        initial_state,
        keep=output_final_state,
        qk_l2norm=use_qk_l2norm_in_kernel,
        query_scale=query.shape[-1] ** -0.5,
    )
    return y.to(query.dtype), state


HF_FAMILIES = (
    HFFamily(
        "mamba2",
        functions={
            "mamba2_chunk_scan": _mamba2_chunk,
            "mamba2_selective_state_update": _mamba2_step,
            "mamba2_split_conv1d_scan_combined": _mamba2_fused,
        },
        transposed=False,
        optional=frozenset({"mamba2_split_conv1d_scan_combined"}),
        as_decoding={"dt_limit": (0.0, float("inf"))},
    ),
    HFFamily(
        "gdn",
        functions={
            "torch_chunk_gated_delta_rule": _delta_rule,
            "torch_recurrent_gated_delta_rule": _delta_rule,
        },
        transposed=True,
    ),
    HFFamily(
        "kda",
        functions={
            "chunk_kimi_delta_attention": _delta_rule,
            "recurrent_kimi_delta_attention": _delta_rule,
        },
        transposed=True,
    ),
)
