"""Gated DeltaNet: vLLM's QwenGatedDeltaNetAttention (Qwen3-Next, Qwen3.5) with a read copy.

Its decode step is called in several places, by functions that know nothing of layers. They are wrapped by name, and
look at which layer is running.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen
from vllm.platforms import current_platform

from .calculators import gdn_spec
from .gates import gdn_inputs
from .layer import ReadCopy, ReadCopyLayer, running
from .plugin import wrap
from .setup import adopt, bound, spec_for_cpu


class ReadCopyGatedDeltaNet(ReadCopyLayer, qwen.QwenGatedDeltaNetAttention):
    """Prefill is vLLM's; decode steps go to the layer's ReadCopy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self, gdn_spec(self.tp_size, self.num_k_heads, self.num_v_heads, self.head_k_dim, self.head_v_dim))

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        state = self.kv_cache[1]
        if current_platform.is_cpu():  # whose kernels keep [K, V] in what is shaped [V, K]
            state = state.view(*state.shape[:2], self.head_k_dim, self.head_v_dim).mT
        bound(self, state)

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        return spec_for_cpu(super().get_kv_cache_spec(vllm_config))

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        dtypes = super().get_state_dtype()
        return dtypes[:2] if self._as_stock else dtypes

    def _fused_gdn_decode_unsupported_reason(self, vllm_config: Any) -> str | None:
        with self.as_stock():
            return super()._fused_gdn_decode_unsupported_reason(vllm_config)

    def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
        with self.as_stock():
            super()._warmup_prefill_kernels(*args, **kwargs)

    def _forward_core(self, *args: Any, **kwargs: Any) -> None:
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        if self.read_copy is None or metadata is None:
            super()._forward_core(*args, **kwargs)
            return
        with prefilling(self.read_copy, metadata, metadata.num_decodes):
            super()._forward_core(*args, **kwargs)


def prefilling(copy: ReadCopy, metadata: Any, first: int) -> Any:
    """``ReadCopy.prefill`` for a batch whose rows from ``first`` on go through vLLM's chunked prefill."""
    if not metadata.num_prefills:
        return copy.prefill(torch.empty(0), None)
    rows = slice(first, metadata.num_decodes + metadata.num_prefills)
    return copy.prefill(metadata.non_spec_state_indices_tensor[rows], metadata.has_initial_state[rows])


def _decode(given: dict[str, Any], q: Tensor, k: Tensor, v: Tensor, slots: Tensor, out: Tensor) -> None:
    """q, k [B, Hk, K]; v, out [B, H, V]; the rest by the names that vLLM's functions give them."""
    assert running.layer is not None
    inputs = gdn_inputs(q, k, v, *(given[name] for name in ("a", "b", "A_log", "dt_bias")))
    running.layer.decode(inputs, slots[: len(q)], out)


def _packed(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """GPU, a batch of decode rows alone: mixed_qkv [B, (2·Hk·K + H·V)]; out [B, 1, H, V]."""
    layer = running.layer
    if layer is None:
        return original(*args, **given)
    spec, mixed = layer.spec, given["mixed_qkv"]
    width = spec.key_heads * spec.key_dim
    q, k, v = mixed.split([width, width, spec.heads * spec.value_dim], dim=-1)
    q, k = (t.unflatten(-1, (spec.key_heads, spec.key_dim)) for t in (q, k))
    v = v.unflatten(-1, (spec.heads, spec.value_dim))
    out, slots = given["out"], given["ssm_state_indices"]
    _decode(given, q, k, v, slots, out[:, 0])
    return out, given["initial_state"]


def _unpacked(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """GPU, decode rows beside prefill rows: q, k [1, B, Hk, K]; v [1, B, H, V]. Gives [1, B, H, V] and the pool."""
    if running.layer is None:
        return original(*args, **given)
    q, k, v = (given[name][0] for name in ("q", "k", "v"))
    out = torch.empty_like(v)
    _decode(given, q, k, v, given["ssm_state_indices"], out)
    return out[None], given["initial_state"]


def _on_cpu(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """CPU: q, k [1, B, Hk, K]; v [1, B, H, V]. Gives [B, 1, H, V]."""
    if running.layer is None:
        return original(*args, **given)
    q, k, v = (given[name][0] for name in ("q", "k", "v"))
    out = torch.empty_like(v)
    _decode(given, q, k, v, given["initial_state_indices"], out)
    return out[:, None]


def _core_on_cpu(original: Callable[..., Any], layer: Any, metadata: Any, *args: Any) -> Any:
    copy = getattr(layer, "read_copy", None)
    if copy is None:
        return original(layer, metadata, *args)
    with prefilling(copy, metadata, metadata.num_decodes):
        return original(layer, metadata, *args)


def hook() -> None:
    """Wrap the functions by which the layer decodes, on a GPU and on a CPU."""
    wrap(qwen, "fused_recurrent_gated_delta_rule_packed_decode", _packed)
    wrap(qwen, "fused_sigmoid_gating_delta_rule_update", _unpacked)
    if current_platform.is_cpu():
        import vllm._custom_ops as ops
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        wrap(ops, "fused_sigmoid_gating_delta_rule_update_cpu", _on_cpu)
        wrap(gdn_attention, "_cpu_gdn_attention_nonspec", _core_on_cpu)


LAYER = ReadCopyGatedDeltaNet
