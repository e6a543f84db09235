"""Attention in bounded memory is attention."""

import resource

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from quantize_state.adapters import cache_argument
from quantize_state.evals import attention
from quantize_state.evals.attention import bounded_attention, causal_attention
from quantize_state.evals.models import load_model

CLOSE = 1e-5
"""Absolute, on outputs of size 1: the same sums in another order."""


@pytest.mark.parametrize(("tokens", "length"), [(1, 40), (40, 40), (7, 40), (33, 100)])
def test_it_is_causal_attention(tokens, length, monkeypatch):
    monkeypatch.setattr(attention, "MASK_ELEMENTS", 5 * length)
    rng = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8, generator=rng) for n in (tokens, length, length))
    mask = torch.arange(length) <= torch.arange(length - tokens, length)[:, None]
    expected = scaled_dot_product_attention(q, k, v, mask, scale=0.3)
    assert torch.allclose(causal_attention(q, k, v, 0.3), expected, atol=CLOSE)


@pytest.mark.parametrize("name", ["tiny-gdn", "tiny-mamba2", "tiny-kda"])
def test_models_compute_the_same_and_are_restored(name, monkeypatch):
    calls = []
    real = attention.causal_attention
    monkeypatch.setattr(attention, "causal_attention", lambda *a, **k: calls.append(1) or real(*a, **k))
    model = load_model(name, device="cpu").model
    ids = torch.arange(96)[None] * 7 % 256

    def logits():
        out = model(input_ids=ids[:, :64], use_cache=True)
        key = cache_argument(model)
        return model(input_ids=ids[:, 64:], use_cache=True, **{key: getattr(out, key)}).logits

    with torch.inference_mode():
        expected = logits()
        assert not calls
        with bounded_attention(model):
            found = logits()
        assert len(calls) == 4, "two attention layers, two calls"
        assert model.config._attn_implementation == "sdpa"
        padded = torch.ones_like(ids)
        padded[:, :5] = 0
        plain = model(input_ids=ids, attention_mask=padded).logits
        with bounded_attention(model):
            assert torch.allclose(model(input_ids=ids, attention_mask=padded).logits, plain, atol=100 * CLOSE)
    assert torch.allclose(found, expected, atol=100 * CLOSE)


def test_memory_is_bounded_by_the_slice():
    """One chunk of 256 queries over 131,072 keys: a mask in floats would be 128 MiB, the scores as much."""
    q, kv = torch.randn(1, 1, 256, 16), torch.randn(1, 1, 131072, 16)
    causal_attention(q, kv[:, :, :4096], kv[:, :, :4096])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    causal_attention(q, kv, kv)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 96 * 1024
