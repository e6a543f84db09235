"""Kimi Delta Attention: vLLM's KimiGatedDeltaNetAttention (Kimi-Linear) with a read copy.

vLLM runs this layer on GPUs alone. A batch with a prompt in it goes through chunked prefill as a whole, decode rows
too: their rings are folded in first, and they are exact in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.platforms import current_platform

from .calculators import kda_spec
from .gates import kda_inputs
from .gdn import prefilling
from .layer import ReadCopyLayer, running
from .plugin import wrap
from .setup import adopt, bound


class ReadCopyKimiDeltaAttention(ReadCopyLayer, KimiGatedDeltaNetAttention):
    """Prefill is vLLM's; decode steps go to the layer's ReadCopy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        adopt(self, kda_spec(self.tp_size, self.num_heads, self.head_dim))

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        bound(self, self.kv_cache[1])

    @eager_break_during_capture  # as vLLM's own: else a graph would replay that without what is around it here
    def _forward(self, *args: Any, **kwargs: Any) -> None:
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        with self.as_stock():
            if self.read_copy is None or metadata is None:
                super()._forward(*args, **kwargs)
                return
            with prefilling(self.read_copy, metadata, 0):
                super()._forward(*args, **kwargs)


def _packed(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """A batch of decode rows alone: mixed_qkv [B, 3·H·K]; raw_g [1, B, H, K]; raw_beta [1, B, H].

    Gives [1, B, H, V] and the pool.
    """
    layer = running.layer
    if layer is None:
        return original(*args, **given)
    q, k, v = given["mixed_qkv"].unflatten(-1, (3, layer.spec.heads, layer.spec.key_dim)).unbind(1)
    gates = given["raw_g"][0], given["raw_beta"][0], given["A_log"], given["dt_bias"], given["lower_bound"]
    inputs = kda_inputs(q, k, v, *gates)
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    layer.decode(inputs, given["state_indices"], out)
    return out[None], given["initial_state"]


def hook() -> None:
    """Wrap the decode function, which vLLM has on GPUs alone."""
    if current_platform.is_cuda():
        wrap(operations(), "fused_recurrent_kda_packed_decode", _packed)


def operations() -> Any:
    """The module from which vLLM's layer takes its kernels."""
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda as ops

    return ops


LAYER = ReadCopyKimiDeltaAttention
