"""Engines of vLLM on a CPU for tests, and what is done with them. Importing this skips where vLLM is missing."""

import gc
import os
import sys
from contextlib import contextmanager
from unittest import mock

import pytest

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-vllm` makes an environment that has it")

import torch
import vllm.model_executor.models.registry as registry
from vllm import LLM

from quantize_state.integrations.vllm.forcing import Forced
from quantize_state.integrations.vllm.plugin import activate

# Qwen3.5's module imports what handles pictures, and no torchvision of the package index loads beside a CPU's torch.
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
    sys.modules.setdefault(name, mock.MagicMock())

# A subprocess per architecture, which takes longer than the engine; there is no GPU here to be kept uninitialised.
registry._run_in_subprocess = lambda function: function()

EXACT = 2e-4
"""Largest difference of a logit (their standard deviation is about 1.6) between vLLM's FP32 step and an exact copy:
the same sums in another order, through up to three layers."""


@contextmanager
def engine(path, policy, dtype="float32", **given):
    """An engine of vLLM under ``policy``, None for vLLM as it is."""
    activate(policy)
    options = {
        "model": str(path),
        "dtype": dtype,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "async_scheduling": False,
        "logits_processors": [Forced],
        "disable_log_stats": True,
    }
    llm = LLM(**options | given)
    try:
        yield llm
    finally:
        activate(None)
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def layers_of(llm):
    context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
    return [layer for layer in context.values() if getattr(layer, "read_copy", None) is not None]


def texts(*lengths, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(2, 48, (n,), generator=rng).tolist() for n in lengths]


def largest_difference(found, expected):
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def mean_kl(reference, other):
    p, q = (torch.cat(logits).double().log_softmax(-1) for logits in (reference, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def through_transformers(path, arm, prompts, tokens, dtype=torch.float32):
    """The logits of ``forced_logits`` by an attached model of transformers: prompts exactly, then decode."""
    import transformers

    from quantize_state import attach

    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    # Of a model without attention transformers can't say by itself where a token stands, or what it may see.
    given = {"attention_mask": {"linear_attention": None}} if model.config.model_type == "kimi_linear" else {}
    logits = []
    with torch.no_grad(), attach(model, arm):
        for prompt, known in zip(prompts, tokens, strict=True):
            rows, cache, seen = [], None, 0
            for chunk in (prompt, *([token] for token in known[:-1])):
                given["position_ids"] = torch.arange(seen, seen + len(chunk))[None]
                out = model(torch.tensor([chunk]), past_key_values=cache, use_cache=True, **given)
                cache, seen = out.past_key_values, seen + len(chunk)
                rows.append(out.logits[:, -1:])
            logits.append(torch.cat(rows, dim=1)[0].float())
    return logits
