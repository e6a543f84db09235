"""The code of vLLM's GDN and KDA layers that only a GPU runs, on a CPU: their kernels are stand-ins of torch.

The engine, its scheduler, the pages and the layers are vLLM's own. So is what the plugin hooks into: GDN's two decode
functions (a batch of decode rows alone, and decode rows beside prompts) and KDA's, which vLLM has on no CPU.
"""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm_standins
from vllm_engine import EXACT, engine, largest_difference, layers_of, mean_kl, texts, through_transformers
from vllm_models import as_published, write_model

from quantize_state.integrations.vllm.forcing import forced_logits

SAME_STORY = 0.02
"""Relative difference of a mean KL through vLLM and through transformers, both in float32."""

PROMPTS = texts(33, 17, 1, 5)
FORCED = texts(18, 24, 20, 21, seed=1)
MODELS = {"qwen3_next": 3, "qwen3_5": 3, "kimi_linear": 2}
"""Layers with a recurrent state. The first two differ in how their projections are ordered."""

CROWDED = {"max_num_seqs": 3, "max_num_batched_tokens": 16}
"""Prompts in chunks, beside decode rows."""


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_code_for_gpus(name, tmp_path, monkeypatch):
    path = served = write_model(name, tmp_path, dtype="float32")
    if name == "kimi_linear":
        served = as_published(path, tmp_path / "published")
    called = vllm_standins.use(monkeypatch)
    with engine(served, None, **CROWDED) as llm:
        stock = forced_logits(llm, PROMPTS, FORCED)
    # Whatever is said about the plugin, first the stand-ins must be what the model's layers compute.
    reference = through_transformers(path, "reference", PROMPTS, FORCED)
    assert largest_difference(stock, reference) < EXACT
    decodes = {"kda"} if name == "kimi_linear" else {"packed", "beside prompts"}
    assert set(called) == decodes | {"kda prompts" if name == "kimi_linear" else "prompts"}, "not all code has run"

    called.clear()
    with engine(served, "decoupled-fp32-w5", **CROWDED) as llm:
        assert len(layers_of(llm)) == MODELS[name]
        exact = forced_logits(llm, PROMPTS, FORCED)
        assert all((layer.kv_cache[1][0] == 0).all() for layer in layers_of(llm)), "the null block was written"
    assert largest_difference(exact, stock) < EXACT
    assert not decodes & set(called), "a decode step of vLLM's own ran"

    if name == "qwen3_5":
        return
    # All prompts in one batch: beside a prompt KDA's rows are folded and their copies renewed, which no other does.
    with engine(served, "decoupled-nvfp4", max_num_seqs=len(PROMPTS)) as llm:
        kl = mean_kl(reference, forced_logits(llm, PROMPTS, FORCED))
    assert kl == pytest.approx(
        mean_kl(reference, through_transformers(path, "decoupled-nvfp4", PROMPTS, FORCED)), rel=SAME_STORY
    )
    assert 1e-4 < kl < 0.1
