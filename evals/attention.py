"""Attention over a long cache without a mask or scores of chunk × length.

transformers gives SDPA a mask of 1,024 × 131,072 booleans, which kernels turn into half a gigabyte of floats, for every
chunk and layer. Here a plain causal mask is never made: on CUDA the kernels know it, on a CPU queries go in slices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

NAME = "quantize_state_bounded"

MASK_ELEMENTS = 1 << 22
"""Elements of the mask of one slice of queries."""


@contextmanager
def bounded_attention(model: Any) -> Iterator[None]:
    """Let the SDPA attention of ``model`` run in bounded memory; other kinds of attention are left as they are."""
    if getattr(model.config, "_attn_implementation", None) != "sdpa":
        yield
        return
    _register()
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """Attention of the last ``query.shape[2]`` positions over all of ``key``: [B, H, T, D] each; memory as said."""
    tokens, length = query.shape[2], key.shape[2]
    if tokens == 1:
        return scaled_dot_product_attention(query, key, value, scale=scale)
    if tokens == length:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    if query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        return scaled_dot_product_attention(query, key, value, causal_lower_right(tokens, length), scale=scale)  # type: ignore[arg-type]
    size = max(1, MASK_ELEMENTS // length)
    seen = torch.arange(length, device=query.device)
    parts = []
    for start in range(0, tokens, size):
        part = query[:, :, start : start + size]
        last = length - tokens + start + part.shape[2]  # keys after the slice's last query are never seen
        at = torch.arange(length - tokens + start, last, device=query.device)
        mask = seen[:last] <= at[:, None]
        parts.append(scaled_dot_product_attention(part, key[:, :, :last], value[:, :, :last], mask, scale=scale))
    return torch.cat(parts, dim=2)


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
    from transformers.masking_utils import causal_mask_function, sdpa_mask

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> Any:
        unusual = any(kwargs.get(name) for name in ("softcap", "dropout")) or kwargs.get("position_bias") is not None
        if attention_mask is not None or unusual or kwargs.get("is_causal") is False:
            return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        groups = getattr(module, "num_key_value_groups", 1)
        out = causal_attention(query, repeat_kv(key, groups), repeat_kv(value, groups), kwargs.get("scaling"))
        return out.transpose(1, 2).contiguous(), None

    def mask(**kwargs: Any) -> Any:
        plain = kwargs.get("mask_function", causal_mask_function) is causal_mask_function
        if plain and kwargs.get("attention_mask") is None and not kwargs.get("local_size"):
            return None
        # attend() takes "no mask" for a plain causal one, so nothing may be skipped here
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return sdpa_mask(**kwargs)

    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
