"""The code of vLLM's GDN and KDA layers that only a GPU runs, on a CPU: their kernels are stand-ins of torch.

The engine, its scheduler, the pages and the layers are vLLM's own. So is what the plugin hooks into: GDN's two decode
functions (a batch of decode rows alone, and decode rows beside prompts) and KDA's, which vLLM has on no CPU.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm.envs
import vllm_standins
from vllm_engine import (
    EXACT,
    Seen,
    across_cached_rings,
    engine,
    largest_difference,
    layers_of,
    mean_kl,
    preempt_all_at,
    texts,
    through_transformers,
    with_spoiled_copies,
)
from vllm_models import as_published, write_model

from quantize_state.integrations.vllm.forcing import forced_logits

SAME_STORY = 0.02
"""Relative difference of a mean KL through vLLM and through transformers, both in float32."""

PROMPTS = texts(33, 17, 1, 5)
FORCED = texts(18, 24, 20, 21, seed=1)
MODELS = {"qwen3_next": 3, "qwen3_5": 3, "kimi_linear": 2}
"""Layers with a recurrent state. The first two differ in how their projections are ordered, and here in their path."""

CROWDED = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
"""Prompts in chunks, beside decode rows."""


SMALL = {"linear_key_head_dim": 32, "linear_value_head_dim": 64}
"""With heads of GDN that vLLM's CPU kernels do not take, so that a block of the cache is 416 tokens and not 2432."""


@pytest.fixture
def model(request, tmp_path, monkeypatch):
    """Name, directory as transformers reads it and as vLLM does, and how often each stand-in has run."""
    name, small = request.param if isinstance(request.param, tuple) else (request.param, {})
    path = served = write_model(name, tmp_path, dtype="float32", changed=small)
    if name == "kimi_linear":
        served = as_published(path, tmp_path / "published")
    return name, path, served, vllm_standins.use(monkeypatch)


@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_the_layers_code_for_gpus(model, monkeypatch):
    name, path, served, called = model
    decodes = {"qwen3_next": {"packed", "beside prompts"}, "qwen3_5": {"beside prompts"}, "kimi_linear": {"kda"}}[name]
    if name == "qwen3_5":  # one function for all decode rows, whatever is beside them
        monkeypatch.setitem(vars(vllm.envs), "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE", False)
    with engine(served, None, **CROWDED) as llm:
        stock = forced_logits(llm, PROMPTS, FORCED)
    # Whatever is said about the plugin, first the stand-ins must be what the model's layers compute.
    reference = through_transformers(path, "reference", PROMPTS, FORCED)
    assert largest_difference(stock, reference) < EXACT
    assert set(called) == decodes | {"kda prompts" if name == "kimi_linear" else "prompts"}, "not all code has run"

    called.clear()
    with engine(served, "decoupled-fp32-w5", **CROWDED) as llm:
        assert len(layers_of(llm)) == MODELS[name]
        seen = Seen(monkeypatch, llm)
        preempt_all_at(monkeypatch, llm, 9, 30)
        exact = forced_logits(llm, PROMPTS, FORCED)
        assert all((layer.kv_cache[1][0] == 0).all() for layer in layers_of(llm)), "the null block was written"
    assert largest_difference(exact, stock) < EXACT
    assert not decodes & set(called), "a decode step of vLLM's own ran"
    assert seen.preempted > 3 and seen.last_chunks > 0
    assert seen.prefilled > len(seen.pages), "no page was used again"
    assert seen.folded > 0 if name == "kimi_linear" else seen.mixed > 10  # KDA's decode rows become prompts

    if name == "qwen3_5":
        return
    # All prompts in one batch: beside a prompt KDA's rows are folded and their copies renewed, which no other does.
    kl = {}
    for arm in ("decoupled-nvfp4", "decoupled-fp8"):
        with engine(served, arm, max_num_seqs=len(PROMPTS)) as llm:
            kl[arm] = mean_kl(reference, forced_logits(llm, PROMPTS, FORCED))
        other = mean_kl(reference, through_transformers(path, arm, PROMPTS, FORCED))
        assert kl[arm] == pytest.approx(other, rel=SAME_STORY), arm
    assert 3e-6 < kl["decoupled-fp8"] < kl["decoupled-nvfp4"] / 3 < 0.03


@pytest.mark.parametrize("model", [("qwen3_next", SMALL), "kimi_linear"], indirect=True, ids=["gdn", "kda"])
def test_prefix_caching_takes_a_ring_along(model, monkeypatch):
    """As for Mamba-2 in test_vllm.py."""
    name, _path, served, _called = model
    assert across_cached_rings(served, monkeypatch, max_model_len=2048) == MODELS[name]


@pytest.mark.parametrize("model", [("qwen3_next", SMALL), "kimi_linear"], indirect=True, ids=["gdn", "kda"])
def test_isolation(model, monkeypatch):
    """As for Mamba-2 in test_vllm.py."""
    _name, _path, served, _called = model
    with_spoiled_copies(served, monkeypatch, PROMPTS[:3], FORCED[:3])
