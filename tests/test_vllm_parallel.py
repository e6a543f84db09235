"""Tensor and pipeline parallelism in vLLM: an engine whose model is shared by two processes, as on two GPUs."""

import pytest
from vllm_engine import EXACT, engine, largest_difference, texts
from vllm_models import write_model

from quantize_state.integrations.vllm import VARIABLE
from quantize_state.integrations.vllm.forcing import forced_logits, layers_with_copies

PROMPTS, FORCED = texts(33, 1, 17), texts(30, 24, 20, seed=1)
POLICY = "decoupled-fp32-w5"


def _pages(worker):
    """The heads of each layer with a read copy, and the shapes of its page: state, and the ring's values and keys."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    copies = [layer for layer in layers if getattr(layer, "read_copy", None) is not None]
    return [(x.read_copy.spec.heads, *(tuple(t.shape[1:]) for t in x.kv_cache[1:4])) for x in copies]


def _take_what_comes(worker):
    """What warming up does for a later stage of a pipeline, which vLLM 0.32 leaves out for eager models on a CPU."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
    )


@pytest.mark.parametrize(("kind", "model"), [("tensor", "granitemoehybrid"), ("pipeline", "falcon_h1")])
def test_two_processes_serve_as_one(kind, model, tmp_path, monkeypatch):
    path = write_model(model, tmp_path)
    with engine(path, None) as llm:
        stock = forced_logits(llm, PROMPTS, FORCED)
    monkeypatch.setenv(VARIABLE, POLICY)  # by which the plugin of the workers knows
    given = {f"{kind}_parallel_size": 2, "distributed_executor_backend": "mp", "max_num_batched_tokens": 24}
    with engine(path, POLICY, **given) as llm:
        first, second = layers_with_copies(llm)
        pages = llm.collective_rpc(_pages)
        if kind == "pipeline":
            llm.collective_rpc(_take_what_comes)
        exact = forced_logits(llm, PROMPTS, FORCED)
    assert largest_difference(exact, stock) < EXACT
    if kind == "tensor":  # 8 heads of 16 × 32 and two groups in all
        assert first == second == ["model.layers.0.mixer", "model.layers.2.mixer"]
        assert pages == [[(4, (4, 16, 32), (5, 4, 16), (5, 1, 32))] * 2] * 2
    else:
        assert (first, second) == (["model.2.mixer"], ["model.3.mixer"])
