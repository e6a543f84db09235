"""Kimi Delta Attention: vLLM's KimiGatedDeltaNetAttention (Kimi-Linear) with a read copy.

vLLM runs this layer on GPUs alone. A batch with a prompt in it goes through chunked prefill as a whole, decode rows
too: their rings are folded in first, and they are exact in that step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.platforms import current_platform

from ...kernels.inputs import TokenInputs
from .calculators import kda_spec
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

    def _forward(self, *args: Any, **kwargs: Any) -> None:
        metadata = (get_forward_context().attn_metadata or {}).get(self.prefix)
        with self.as_stock():
            if self.read_copy is None or metadata is None:
                super()._forward(*args, **kwargs)
                return
            with prefilling(self.read_copy, metadata, 0):
                super()._forward(*args, **kwargs)


def decode_inputs(
    mixed_qkv: Tensor,
    raw_g: Tensor,
    raw_beta: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    heads: int,
    head_dim: int,
) -> TokenInputs:
    """mixed_qkv [B, 3·H·K]; raw_g [1, B, H, K]; raw_beta [1, B, H]; A_log [H]; dt_bias [H·K].

    The log-decay is −e^A·softplus(g + bias), or with a lower bound (Kimi's safe gate) bound·σ(e^A·(g + bias)).
    """
    q, k, v = mixed_qkv.unflatten(-1, (3, heads, head_dim)).unbind(1)
    biased = raw_g[0].float() + dt_bias.float().view(heads, head_dim)
    rate = A_log.float().exp()[:, None]
    g = -rate * F.softplus(biased) if lower_bound is None else lower_bound * torch.sigmoid(rate * biased)
    return TokenInputs(q[:, None], k[:, None], v[:, None], beta=raw_beta[0].float().sigmoid()[:, None], g=g[:, None])


def _packed(original: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """A batch of decode rows alone. Gives [1, B, H, V] and the pool."""
    layer = running.layer
    if layer is None:
        return original(*args, **given)
    spec = layer.spec
    names = ("mixed_qkv", "raw_g", "raw_beta", "A_log", "dt_bias", "lower_bound")
    inputs = decode_inputs(*(given[name] for name in names), spec.heads, spec.key_dim)
    out = torch.empty_like(inputs.v[:, 0], memory_format=torch.contiguous_format)
    layer.decode(inputs, given["state_indices"], out)
    return out[None], given["initial_state"]


def hook() -> None:
    """Wrap the decode function, which vLLM has on GPUs alone."""
    if current_platform.is_cuda():
        from vllm.models.kimi_k3.nvidia.ops.third_party import kda as ops

        wrap(ops, "fused_recurrent_kda_packed_decode", _packed)
    elif current_platform.is_rocm():
        from vllm.models.kimi_k3.amd.ops.third_party import kda as ops

        wrap(ops, "fused_recurrent_kda_packed_decode", _packed)


LAYERS = {"KimiGatedDeltaNetAttention": ReadCopyKimiDeltaAttention}
