"""Tensor and pipeline parallelism in vLLM: an engine whose model is shared by two processes, as on two GPUs."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import vllm_standins
from vllm_engine import EXACT, engine, largest_difference, texts
from vllm_models import as_published, write_model

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


CASES = {
    "mamba2 tensor": ("granitemoehybrid", {}),
    "mamba2 pipeline": ("falcon_h1", {}),
    "gdn tensor": ("qwen3_next", {}),
    # Each stage with attention, or vLLM finds that they disagree about layouts.
    "gdn pipeline": ("qwen3_5", {"layer_types": ["linear_attention", "full_attention"] * 2}),
    "kda tensor": ("kimi_linear", {}),
}
LAYERS = {
    "mamba2 tensor": [["model.layers.0.mixer", "model.layers.2.mixer"]] * 2,
    "mamba2 pipeline": [["model.2.mixer"], ["model.3.mixer"]],
    "gdn tensor": [[f"model.layers.{i}.linear_attn" for i in (0, 2, 3)]] * 2,
    "gdn pipeline": [["model.layers.0.linear_attn"], ["model.layers.2.linear_attn"]],
    "kda tensor": [[f"model.layers.{i}.self_attn" for i in (0, 1)]] * 2,
}
"""With a read copy, of each worker."""
PAGES = {  # 8 heads of 16 × 32 and two groups in all; 4 of 128 × 128 and two of keys; 2 of 32 × 32
    "mamba2 tensor": (4, (4, 16, 32), (5, 4, 16), (5, 1, 32)),
    "gdn tensor": (2, (2, 128, 128), (5, 2, 128), (5, 1, 128)),
    "kda tensor": (1, (1, 32, 32), (5, 1, 32), (5, 1, 32)),
}
"""One rank's heads, and of its page the state and the ring's values and keys."""


@pytest.mark.parametrize("case", CASES)
def test_two_processes_serve_as_one(case, tmp_path, monkeypatch):
    """GDN and KDA run the code that they run on a GPU: vllm_standins.py."""
    (family, kind), (model, changed) = case.split(), CASES[case]
    path = served = write_model(model, tmp_path, dtype="float32", changed=changed)
    given = {f"{kind}_parallel_size": 2, "distributed_executor_backend": "mp", "max_num_batched_tokens": 24}
    given["worker_extension_cls"] = "vllm_engine.Worker"
    if family != "mamba2":
        vllm_standins.use(monkeypatch)
        given["worker_extension_cls"] = "vllm_standins_worker.StandIns"
    if family == "kda":
        served = as_published(path, tmp_path / "published")
    with engine(served, None) as llm:
        stock = forced_logits(llm, PROMPTS, FORCED)
    monkeypatch.setenv(VARIABLE, POLICY)  # by which the plugin of the workers knows
    with engine(served, POLICY, **given) as llm:
        assert layers_with_copies(llm) == LAYERS[case]
        pages = llm.collective_rpc(_pages)
        if kind == "pipeline":
            llm.collective_rpc(_take_what_comes)
        exact = forced_logits(llm, PROMPTS, FORCED)
        called = [] if family == "mamba2" else llm.collective_rpc("called_stand_ins")
    assert largest_difference(exact, stock) < EXACT
    if kind == "tensor":
        assert pages == [[PAGES[case]] * len(LAYERS[case][0])] * 2
    prompts = {"gdn": "prompts", "kda": "kda prompts"}.get(family)
    assert all(set(counts) == {prompts} for counts in called), "a decode step of vLLM's own ran, or no stand-in did"
