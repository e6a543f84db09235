"""Engines of vLLM on a CPU for tests, and what is done with them. Importing this skips where vLLM is missing."""

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
from vllm.distributed import cleanup_dist_env_and_memory

from quantize_state.integrations.vllm.forcing import Forced, forced_logits
from quantize_state.integrations.vllm.layer import ReadCopy
from quantize_state.integrations.vllm.plugin import activate

# Qwen3.5's module imports what handles pictures, and no torchvision of the package index loads beside a CPU's torch.
for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
    sys.modules.setdefault(name, mock.MagicMock())

# A subprocess per architecture, which takes longer than the engine; there is no GPU here to be kept uninitialised.
registry._run_in_subprocess = lambda function: function()

EXACT = 2e-4
"""Largest difference of a logit (their standard deviation is about 1.6) between vLLM's FP32 step and an exact copy:
the same sums in another order, through up to three layers."""


class Worker:
    """To be named as an engine's ``worker_extension_cls``: what is done above is then done in its workers too."""


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
    llm = None
    try:
        llm = LLM(**options | given)
        yield llm
    finally:
        activate(None)
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        # of engines that were refused, too: vLLM keeps its groups, and a model with experts then misses its own
        cleanup_dist_env_and_memory()


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


def scheduler_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler


class Seen:
    """What happened to read copies while an engine ran."""

    def __init__(self, monkeypatch, llm):
        self.mixed = self.folded = self.preempted = self.last_chunks = self.padded_or_fresh = 0
        self.pages, self.prefilled = set(), 0
        scheduler, seen = scheduler_of(llm), self
        prefill, fold_rings, decode = ReadCopy.prefill, ReadCopy._fold_rings, ReadCopy.decode
        preempt, schedule = scheduler._preempt_request, scheduler.schedule
        rows = {"prefill": 0}

        @contextmanager
        def counted_prefill(copy, slots, has_state, also=None):
            rows["prefill"] = slots.numel()
            seen.prefilled += slots.numel()
            seen.pages |= {(copy.name, int(slot)) for slot in slots}
            with prefill(copy, slots, has_state, also):
                yield

        def counted_decode(copy, inputs, slots, out, **given):
            seen.mixed += bool(rows["prefill"])
            decode(copy, inputs, slots, out, **given)

        def counted_fold(copy, slots):
            seen.folded += int((copy.state.cursor[slots] > 0).sum())
            fold_rings(copy, slots)

        def counted_preempt(*args, **kwargs):
            seen.preempted += 1
            return preempt(*args, **kwargs)

        def watched_schedule(*args, **kwargs):
            before = {key: request.num_computed_tokens for key, request in scheduler.requests.items()}
            output = schedule(*args, **kwargs)
            for key, count in output.num_scheduled_tokens.items():
                prompt = scheduler.requests[key].num_prompt_tokens
                seen.last_chunks += count == 1 and prompt > 1 and before.get(key) == prompt - 1
            return output

        monkeypatch.setattr(ReadCopy, "prefill", counted_prefill)
        monkeypatch.setattr(ReadCopy, "decode", counted_decode)
        monkeypatch.setattr(ReadCopy, "_fold_rings", counted_fold)
        monkeypatch.setattr(scheduler, "_preempt_request", counted_preempt)
        monkeypatch.setattr(scheduler, "schedule", watched_schedule)


def preempt_all_at(monkeypatch, llm, *steps):
    """Have the engine preempt all of its running requests in ``steps``, which are counted from 1."""
    scheduler = scheduler_of(llm)
    schedule, step = scheduler.schedule, iter(range(1, 10**6))

    def interrupted(*args, **kwargs):
        if next(step) in steps:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        return schedule(*args, **kwargs)

    monkeypatch.setattr(scheduler, "schedule", interrupted)


def across_cached_rings(path, monkeypatch, **given):
    """Assert that requests which take up a cached block with a ring in it are served as stock vLLM serves them.

    Returns how many rings were taken up: by the second request, that is one for each layer.
    """
    # By default vLLM keeps the states at the ends of prompts alone; None keeps all.
    cached = {"enable_prefix_caching": True, "prefix_cache_retention_interval": None, "max_num_batched_tokens": 96}
    with engine(path, "decoupled-fp32", **cached | given) as llm:
        block = llm.llm_engine.vllm_config.cache_config.mamba_block_size
        end = -(-64 // block) * block  # of a block, which the first request passes with its 42nd token
        (prompt,), (tokens,) = texts(end - 42), texts(130, seed=5)
        seen = Seen(monkeypatch, llm)
        first = forced_logits(llm, [prompt], [tokens])
        assert seen.folded == 0
        again = forced_logits(llm, [prompt + tokens[:70]], [tokens[70:]])
        rings, computed = seen.folded, seen.prefilled
        # A prompt whose first block was filled by prefill; and both cached blocks again, side by side.
        (other,) = texts(end + 30, seed=6)
        alone = forced_logits(llm, [other], [tokens[:20]])
        both = forced_logits(llm, [other, prompt + tokens[:70]], [tokens[:20], tokens[70:90]])
        assert seen.folded == 2 * rings, "the block was not found the second time"
    chunks = -(-len(prompt) // cached["max_num_batched_tokens"]) + 2
    assert computed <= chunks * rings, "the second request was prefilled from its beginning"
    with engine(path, None, **given) as llm:
        stock, other_stock = forced_logits(llm, [prompt, other], [tokens, tokens[:20]])
    assert largest_difference(first, [stock]) < EXACT
    assert largest_difference(again, [stock[70:]]) < EXACT
    assert largest_difference([alone[0], both[0]], [other_stock, other_stock]) < EXACT
    assert largest_difference(both[1:], [stock[70:90]]) < EXACT
    return rings


def with_spoiled_copies(path, monkeypatch, prompts, tokens, **given):
    """Assert that the first layer's checkpoints stay the same to the bit, and its outputs not, if its copy is noise."""
    decode, kept, first, noise = ReadCopy.decode, [], "", None

    def watched(copy, inputs, slots, out, **rest):
        if copy.name == first and noise is not None:
            # Digits alone: with scales of NaN the layers after this one would have nothing to compute with.
            shape = copy.state.copy.codes[slots].shape
            copy.state.copy.codes[slots] = torch.randint(0, 256, shape, dtype=torch.uint8, generator=noise)
        decode(copy, inputs, slots, out, **rest)
        if copy.name == first:
            kept.append((copy.state.checkpoint.codes[slots].clone(), out.clone()))

    monkeypatch.setattr(ReadCopy, "decode", watched)
    runs = []
    for noise in (None, torch.Generator().manual_seed(0)):  # noqa: B007
        with engine(path, "decoupled-nvfp4-w5", **given) as llm:
            first = layers_of(llm)[0].prefix
            kept = []
            forced_logits(llm, prompts, tokens)
        runs.append(kept)
    clean, spoiled = runs
    assert len(clean) == len(spoiled) > 15
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(clean, spoiled, strict=True))
    assert not all(torch.equal(a, b) for (_, a), (_, b) in zip(clean, spoiled, strict=True))
