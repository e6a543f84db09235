"""Torch in place of the kernels that vLLM's GDN and KDA layers call on a GPU, so that their code runs on a CPU.

The layers are vLLM's own, with all that they do around their kernels: which rows of a batch go to which function, from
which pages, in which order. A kernel here is the recurrence, one token at a time, written down without the plugin.
"""

from collections import Counter
from unittest import mock

import torch
import torch.nn.functional as F
from recurrence import recurrence

from quantize_state.integrations.vllm import gdn, kda
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.quant.spec import LayerSpec

CALLED: Counter[str] = Counter()
"""How often each stand-in ran. Those of decode steps do not, for a layer with a read copy."""


def _spec(family, q, v, *, normalised):
    heads, key_heads = v.shape[-2], q.shape[-2]
    return LayerSpec(family, heads, key_heads, v.shape[-1], q.shape[-1], not normalised, q.shape[-1] ** -0.5)


def _sequences(family, q, k, v, g, beta, states, starts, *, normalised=False):
    """[1, T, …] of sequences that begin at ``starts`` [n + 1]: outputs [1, T, H, V], and states after [n, H, V, K]."""
    spec = _spec(family, q, v, normalised=normalised)
    outputs, after = [], []
    for i, (a, b) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        inputs = TokenInputs(*(t[:, a:b].float() for t in (q, k, v, beta, g)))
        y, kept = recurrence(spec, inputs, states[i : i + 1].float())
        outputs.append(y)
        after.append(kept[-1])
    return torch.cat(outputs, dim=1).to(v.dtype), torch.cat(after)


def _one_token(family, q, k, v, g, beta, pool, slots, out):
    """One token [1, B, …] for each row, in place on the pages ``slots`` [B]; rows of page 0 are padding."""
    live = (slots[: q.shape[1]] > 0).nonzero()[:, 0]
    pages = slots[live].long()
    q, k, v, g, beta = (t[:, live] for t in (q, k, v, g, beta))
    y, states = _sequences(family, q, k, v, g, beta, pool[pages], torch.arange(len(live) + 1))
    pool[pages] = states.to(pool.dtype)
    out[live] = y[0].to(out.dtype)


def _gdn_gates(a, b, A_log, dt_bias):
    return -A_log.float().exp() * F.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def _gdn_packed(*, mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, **_):
    CALLED["packed"] += 1
    _, heads, value, key = initial_state.shape
    q, k, v = mixed_qkv.split([(mixed_qkv.shape[1] - heads * value) // 2] * 2 + [heads * value], dim=1)
    q, k, v = (t.unflatten(1, (-1, size))[None] for t, size in ((q, key), (k, key), (v, value)))
    g, beta = _gdn_gates(a, b, A_log, dt_bias)
    _one_token("gdn", q, k, v, g[None], beta[None], initial_state, ssm_state_indices, out[:, 0])
    return out, initial_state


def _gdn_unpacked(*, A_log, a, b, dt_bias, q, k, v, initial_state, ssm_state_indices, **_):
    CALLED["beside prompts"] += 1
    g, beta = _gdn_gates(a, b, A_log, dt_bias)
    out = torch.zeros_like(v[0])
    _one_token("gdn", q, k, v, g[None], beta[None], initial_state, ssm_state_indices, out)
    return out[None], initial_state


def _after_convolution(*, conv_output, a, b, A_log, dt_bias, num_k_heads, head_k_dim, head_v_dim, **_):
    width = num_k_heads * head_k_dim
    q, k, v = conv_output.split([width, width, conv_output.shape[1] - 2 * width], dim=1)
    q, k = (t.unflatten(1, (num_k_heads, head_k_dim)).float() for t in (q, k))
    q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    return q, k, v.unflatten(1, (-1, head_v_dim)), *_gdn_gates(a, b, A_log, dt_bias)


def _gdn_chunked(*, q, k, v, g, beta, initial_state, cu_seqlens, **_):
    CALLED["prompts"] += 1
    return _sequences("gdn", q, k, v, g, beta, initial_state, cu_seqlens, normalised=True)


def _kda_gates(raw_g, raw_beta, A_log, dt_bias, lower_bound):
    biased = raw_g.float() + dt_bias.float().view(raw_g.shape[-2:])
    rate = A_log.float().exp()[:, None]
    g = -rate * F.softplus(biased) if lower_bound is None else lower_bound * torch.sigmoid(rate * biased)
    return g, raw_beta.float().sigmoid()


def _kda_packed(
    *, mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices, scale=None, out=None
):
    CALLED["kda"] += 1
    q, k, v = (t[None] for t in mixed_qkv.unflatten(1, (3, *raw_g.shape[-2:])).unbind(1))
    out = torch.zeros_like(v[0])
    gates = _kda_gates(raw_g, raw_beta, A_log, dt_bias, lower_bound)
    _one_token("kda", q, k, v, *gates, initial_state, state_indices, out)
    return out[None], initial_state


def _kda_chunked(*, q, k, v, raw_g, raw_beta, A_log, g_bias, lower_bound, initial_state, cu_seqlens, **_):
    CALLED["kda prompts"] += 1
    gates = _kda_gates(raw_g, raw_beta, A_log, g_bias, lower_bound)
    return _sequences("kda", q, k, v, *gates, initial_state, cu_seqlens)


def _gather(state, indices, has_state):
    return state[indices.long()] * has_state[:, None, None, None]


def use(monkeypatch):
    """Have layers made from now on run the code that they run on a GPU, the plugin's wrappers around stand-ins.

    Returns how often each of these was called.
    """
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as kimi
    from vllm.model_executor.layers.mamba.gdn import qwen_gdn_linear_attn as qwen

    from quantize_state.integrations.vllm.plugin import replace_layer

    for name in ("QwenGatedDeltaNetAttention", "KimiGatedDeltaNetAttention"):
        replace_layer(name)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)  # weights are packed for it
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    monkeypatch.setattr(qwen, "fused_recurrent_gated_delta_rule_packed_decode", _wrapped(gdn._packed, _gdn_packed))
    monkeypatch.setattr(qwen, "fused_sigmoid_gating_delta_rule_update", _wrapped(gdn._unpacked, _gdn_unpacked))
    monkeypatch.setattr(qwen, "fused_post_conv_prep", _after_convolution)
    monkeypatch.setattr(qwen.ChunkGatedDeltaRule, "forward", lambda self, **given: _gdn_chunked(**given))
    monkeypatch.setattr(qwen.QwenGatedDeltaNetAttention, "forward", qwen.QwenGatedDeltaNetAttention.forward_cuda)
    # Pages on a GPU hold [V, K].
    monkeypatch.setattr(gdn, "current_platform", mock.Mock(is_cpu=lambda: False))
    operations = kda.operations()
    # Imports numba, whose library object vLLM then takes for one with a dictionary, when the next engine starts.
    from llvmlite.binding import ffi

    ffi._lib_fn_wrapper.get = lambda self, name: None
    monkeypatch.setattr(operations, "fused_recurrent_kda_packed_decode", _wrapped(kda._packed, _kda_packed))
    monkeypatch.setattr(operations, "chunk_kda_with_fused_gate", _kda_chunked)
    monkeypatch.setattr(kimi, "gather_initial_states", _gather)
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")
    monkeypatch.setattr(torch.cuda, "Stream", mock.Mock())
    CALLED.clear()
    return CALLED


def _wrapped(wrapper, original):
    return lambda *args, **given: wrapper(original, *args, **given)
