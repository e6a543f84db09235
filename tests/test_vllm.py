"""The vLLM plugin in vLLM: engines on a CPU, tiny random models, tokens forced through prefill and decode.

Runs where vLLM is installed (``make test-vllm``); see docs/vllm.md for what only a GPU can show.
"""

import logging
import os
import subprocess
import sys
import types

import pytest
import torch
from vllm_engine import (
    EXACT,
    Seen,
    across_cached_rings,
    engine,
    largest_difference,
    layers_of,
    mean_kl,
    texts,
    through_transformers,
    with_spoiled_copies,
)
from vllm_models import MODELS, VOCABULARY, write_model

from quantize_state.integrations.vllm import PATH_VARIABLE, RAY_VARIABLE, VARIABLE, calculators, checks, register
from quantize_state.integrations.vllm.forcing import forced_logits
from quantize_state.integrations.vllm.plugin import activate, in_force, plugin, replace_layer
from quantize_state.kernels.step import folded
from quantize_state.quant.errors import QuantizeStateError
from quantize_state.quant.model_recipe import ModelRecipe
from quantize_state.quant.policy import parse_arm
from quantize_state.quant.recipe import Recipe

BF16 = 2**-7
"""One unit in the last place of bfloat16, relative to the largest value: vLLM rounds a step's outputs to it."""

STATE = 2**-8
"""Relative difference of a state after a step, between vLLM's CPU kernel of GDN and the folded ring: the kernel itself
is 0.002 away from float64."""

SAME_STORY = 0.05
"""Relative difference of a mean KL through vLLM and through transformers. The same copies, but for a code here and
there that a last bit of the checkpoint has tipped."""


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(name, folder) for name in MODELS}


@pytest.mark.parametrize(("name", "count"), [("mamba2", 2), ("zamba2", 3)])
def test_an_exact_copy_equals_stock_vllm(models, caplog, name, count):
    """Of a model without attention, and of one with shared attention; test_vllm_parallel.py has others."""
    prompts, tokens = texts(5, 1, 40), texts(45, 30, 20, seed=1)
    with engine(models[name], None) as llm:
        assert not layers_of(llm)
        stock = forced_logits(llm, prompts, tokens)
    with caplog.at_level(logging.INFO, "vllm.quantize_state"):
        logging.getLogger("vllm.quantize_state").addHandler(caplog.handler)
        with engine(models[name], "decoupled-fp32") as llm:
            assert len(layers_of(llm)) == count
            exact = forced_logits(llm, prompts, tokens)
    assert largest_difference(exact, stock) < EXACT
    assert f"decoupled-fp32 for {count} layers by the torch reference" in caplog.text
    assert ".mixer" in caplog.text


# --- what a scheduler does -------------------------------------------------------------------------------------------


PROMPTS = texts(33, 17, 1, 220, 240, 235, 5, 64, 2)
FORCED = texts(40, 30, 50, 60, 30, 40, 45, 30, 20, seed=1)
"""Some prompts end in one block of 256 tokens and their requests in the next."""


@pytest.fixture(scope="module")
def calm(models):
    """Stock vLLM's logits of PROMPTS and FORCED, every prompt in one piece; and of a long request."""
    with engine(models["nemotron_h"], None) as llm:
        return forced_logits(llm, PROMPTS, FORCED)


def test_chunks_slot_reuse_preemption_and_mixed_batches(models, calm, monkeypatch):
    """Prompts in chunks of a few tokens beside decode rows, three requests at a time, in 12 pages."""
    crowded = {"max_num_seqs": 3, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 13}
    with engine(models["nemotron_h"], "decoupled-fp32", **crowded) as llm:
        seen = Seen(monkeypatch, llm)
        memory = {layer.read_copy.state.cursor.untyped_storage().data_ptr() for layer in layers_of(llm)}
        found = forced_logits(llm, PROMPTS, FORCED)
        first, _second, _third = layers_of(llm)
        assert (first.kv_cache[1][0] == 0).all(), "the null block was written"
    assert largest_difference(found, calm) < EXACT
    assert len(memory) == 1, "layers no longer share one tensor, which this test is about"
    assert seen.preempted > 0 and seen.mixed > 100 and seen.last_chunks > 0
    assert seen.prefilled > len(seen.pages), "no page was used again"
    assert seen.folded == 0  # a prompt's chunks follow each other: none finds a ring


def test_a_recipe_with_an_untouched_layer(models, calm):
    """Layer 0 stays vLLM's own, in pages that are as large as the others'."""
    recipe = {"default": "decoupled-fp32", "layers": {"0": "reference", "*layers.4.*": "decoupled-fp32-w5"}}
    with engine(models["nemotron_h"], Recipe.from_dict(recipe)) as llm:
        assert [layer.read_copy.policy.window for layer in layers_of(llm)] == [16, 5]
        assert [layer.prefix for layer in layers_of(llm)] == ["model.layers.3.mixer", "model.layers.4.mixer"]
        found = forced_logits(llm, PROMPTS[:4], FORCED[:4])
    assert largest_difference(found, calm[:4]) < EXACT


def test_prefix_caching_takes_a_ring_along(models, monkeypatch):
    """A block that a request completed while decoding is found by another: its state is checkpoint and ring."""
    assert across_cached_rings(models["nemotron_h"], monkeypatch) == 3


# --- what the copy does ----------------------------------------------------------------------------------------------


def test_isolation(models, monkeypatch):
    """Whatever is in the copy of the first layer, its checkpoints stay the same to the bit."""
    with_spoiled_copies(models["nemotron_h"], monkeypatch, PROMPTS[:3], FORCED[:3])


def test_the_same_kl_through_vllm_and_through_transformers(models, calm):
    path, prompts, tokens = models["nemotron_h"], PROMPTS[:6], FORCED[:6]
    reference = through_transformers(path, "reference", prompts, tokens)
    assert largest_difference(calm[:6], reference) < EXACT
    kl = {}
    for arm in ("decoupled-nvfp4", "decoupled-fp8"):
        with engine(path, arm) as llm:
            kl[arm] = mean_kl(calm[:6], forced_logits(llm, prompts, tokens))
        other = mean_kl(reference, through_transformers(path, arm, prompts, tokens))
        assert kl[arm] == pytest.approx(other, rel=SAME_STORY), arm
    assert 3e-6 < kl["decoupled-fp8"] < kl["decoupled-nvfp4"] / 3 < 0.01


@pytest.mark.parametrize(
    ("name", "architecture"), [("qwen3_next", "Qwen3NextForCausalLM"), ("qwen3_5", "Qwen3_5ForCausalLM")]
)
def test_gdn_steps_as_vllms_kernel_does(models, monkeypatch, name, architecture):
    """Every decode step of every layer again by vLLM's CPU kernel, on the folded state, which it keeps as [K, V]."""
    import vllm._custom_ops as ops

    replace_layer("QwenGatedDeltaNetAttention")  # as the first layer of its kind does
    ours = ops.fused_sigmoid_gating_delta_rule_update_cpu
    kernel = ours.__wrapped__
    from quantize_state.integrations.vllm.layer import running

    compared = []

    def both(**given):
        state, slots = running.layer.state, given["initial_state_indices"].long()
        pool = folded(state, slots).mT.contiguous()
        found = ours(**given)
        rows = torch.arange(len(slots), dtype=torch.int32)
        expected = kernel(**given | {"initial_state_source": pool, "initial_state_indices": rows})
        output = (found.flatten() - expected.flatten()).abs().max() / expected.abs().max()
        after = folded(state, slots)
        compared.append((float(output), float((after - pool.mT).norm() / pool.norm())))
        return found

    with engine(models[name], "decoupled-fp32-w5", "bfloat16", max_num_batched_tokens=32) as llm:
        monkeypatch.setattr(ops, "fused_sigmoid_gating_delta_rule_update_cpu", both)
        seen = Seen(monkeypatch, llm)
        forced_logits(llm, PROMPTS[:4], [known[:20] for known in FORCED[:4]])
        assert llm.llm_engine.vllm_config.model_config.architecture == architecture
    output, state = (max(column) for column in zip(*compared, strict=True))
    assert len(compared) > 60 and seen.mixed > 0
    assert output < BF16 and state < STATE


# --- what is refused, and the size of pages --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_replayssm": True}, "--use-replayssm keeps a ring of its own"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"kv_offloading_size": 1}, "KV connector"),
    ],
)
def test_flags_that_do_not_go_together(models, given, message):
    from vllm import EngineArgs

    activate("decoupled-nvfp4")
    try:
        with pytest.raises(Exception, match=message):
            EngineArgs(model=str(models["mamba2"]), skip_tokenizer_init=True, **given).create_engine_config()
    finally:
        activate(None)


def test_auto_and_a_model_without_a_recipe(models):
    from vllm import EngineArgs

    activate("auto")
    try:
        with pytest.raises(Exception, match=r"there is no state_quant_config\.json in"):
            EngineArgs(model=str(models["mamba2"]), skip_tokenizer_init=True).create_engine_config()
    finally:
        activate(None)


def test_layers_that_no_policy_reaches():
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Kind

    unknown = type("JambaMixer", (), {"prefix": "model.layers.1.mamba", "mamba_type": Kind.MAMBA1})()
    with pytest.raises(QuantizeStateError, match=r"model\.layers\.1\.mamba.*JambaMixer.*MambaMixer2"):
        checks.check_layer(unknown)
    checks.check_layer(type("ShortConv", (), {"mamba_type": Kind.SHORT_CONV})())


def test_other_versions_of_vllm(monkeypatch):
    import vllm

    for version in ("0.31.2", "0.33.0", "1.32.0"):
        monkeypatch.setattr(vllm, "__version__", version)
        with pytest.raises(QuantizeStateError, match=f"this is {version}"):
            activate("decoupled-nvfp4")
    for version in ("0.32.0", "0.32.1", "0.32.0+cpu"):
        monkeypatch.setattr(vllm, "__version__", version)
        checks.check_version()


def test_a_worker_that_follows_another_policy_is_no_engine(tmp_path):
    """As on a machine where the variable is not set: its layers would be vLLM's own, and nobody would know."""
    from vllm.v1.executor.abstract import Executor

    followed = []
    config = types.SimpleNamespace(model_config=types.SimpleNamespace(model=str(tmp_path)))
    answers = {"get_kv_cache_spec": ["specs"], in_force: followed}
    executor = types.SimpleNamespace(vllm_config=config, collective_rpc=answers.__getitem__)
    (tmp_path / "config.json").write_text("{}")
    ModelRecipe(Recipe.of("decoupled-nvfp4"), {}).write(tmp_path)
    activate("auto", "replay")
    try:
        ours = (Recipe.of("decoupled-nvfp4"), "replay")
        followed[:] = [ours, ours]
        assert Executor.get_kv_cache_specs(executor) == ["specs"]
        for other in [(None, "auto"), (Recipe.of("decoupled-fp8"), "replay"), (ours[0], "auto")]:
            followed[:] = [ours, other]
            with pytest.raises(QuantizeStateError, match="POLICY=auto is not what worker 1 of the engine follows"):
                Executor.get_kv_cache_specs(executor)
    finally:
        activate(None)
    del answers[in_force]
    assert Executor.get_kv_cache_specs(executor) == ["specs"], "vLLM as it is asks no worker"


def test_processes_on_ray_get_the_variables(monkeypatch):
    """vLLM copies to other machines the variables of its own and those that it is told of."""
    from vllm.ray.ray_env import get_env_vars_to_copy

    monkeypatch.setenv(RAY_VARIABLE, "MINE")
    monkeypatch.setenv(VARIABLE, "decoupled-nvfp4")
    assert VARIABLE not in get_env_vars_to_copy()
    try:
        register()
        register()
    finally:
        activate(None)
    assert os.environ[RAY_VARIABLE] == f"MINE,{VARIABLE},{PATH_VARIABLE}"
    assert {"MINE", VARIABLE, PATH_VARIABLE} <= get_env_vars_to_copy()


@pytest.mark.parametrize("kind", ["is_rocm", "is_xpu"])
def test_other_devices(monkeypatch, kind):
    """There GDN decodes by functions that are not wrapped: its states would be FP32, and beside stale copies."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    monkeypatch.setattr(current_platform, kind, lambda: True)
    with pytest.raises(QuantizeStateError, match="NVIDIA GPUs and CPUs"):
        activate("decoupled-nvfp4")
    monkeypatch.setattr(current_platform, "is_cuda", lambda: True)
    checks.check_platform()


HOOKS = """
import os, sys
from vllm.config import VllmConfig
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.executor.abstract import Executor
from quantize_state.integrations.vllm import register

def hooks():
    return [VllmConfig.__post_init__, PluggableLayer.__new__, MambaBase.get_kv_cache_spec,
            Executor.get_kv_cache_specs,
            mamba_utils.MambaStateShapeCalculator.mamba2_state_shape.__func__,
            mamba_utils.MambaStateDtypeCalculator.kda_state_dtype.__func__]

def settled():  # modules whose part in CUDA graphs is settled as they are imported
    return [n for n, m in sys.modules.items() if n.startswith("vllm.") and hasattr(m, "eager_break_during_capture")
            and n != "vllm.compilation.breakable_cudagraph"]

stock = hooks()
register()
assert hooks() == stock and not op_registry_oot and not settled()
assert "quantize_state.integrations.vllm.plugin" not in sys.modules
os.environ["QUANTIZE_STATE_POLICY"] = "decoupled-nvfp4"
register()
assert all(ours is not theirs for ours, theirs in zip(hooks(), stock, strict=True))
assert not op_registry_oot and not settled(), settled()

# What vLLM does for Kimi-Linear before it imports a layer; then the layer is made.
os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "1"
from quantize_state.integrations.vllm.plugin import replace_layer
replace_layer("KimiGatedDeltaNetAttention")
ours = op_registry_oot["KimiGatedDeltaNetAttention"]
assert list(op_registry_oot) == ["KimiGatedDeltaNetAttention"]
stock_layer = ours.__mro__[2]
assert hasattr(stock_layer._forward, "__wrapped__"), "vLLM's layer is no break in a graph"
assert hasattr(ours._forward, "__wrapped__"), "ours is none: a graph would replay what vLLM's does, without ours"
print("all is well")
"""


def test_nothing_is_touched_without_a_policy_and_no_layer_is_imported_too_early():
    """In a process of its own, as when vLLM loads its plugins: before it has read the model's config."""
    done = subprocess.run([sys.executable, "-c", HOOKS], capture_output=True, text=True, timeout=300, check=False)
    assert "all is well" in done.stdout, done.stderr[-2000:]


def test_a_recipe_that_names_no_layer(models):
    recipe = Recipe.from_dict({"default": "decoupled-fp8", "layers": {"*layers.9.*": "decoupled-nvfp4"}})
    with pytest.raises(QuantizeStateError, match=r"'\*layers\.9\.\*' of the recipe"), engine(models["mamba2"], recipe):
        pass


def test_vllm_finds_the_plugin():
    from importlib.metadata import entry_points

    (found,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "quantize_state")
    assert found.value == "quantize_state.integrations.vllm:register"
    found.load()


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_pages_of_tensor_parallel_ranks(tp):
    """A rank's page is that of a model with its share of the heads, for each family."""
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator as Copies
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateDtypeCalculator as Dtypes
    from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator as Shapes

    activate("decoupled-nvfp4")
    try:
        sizes = {"intermediate_size": 1024, "head_dim": 64, "state_size": 128, "conv_kernel": 4}
        whole = Shapes.mamba2_state_shape(tp_world_size=tp, n_groups=2, num_heads=16, **sizes)
        groups = max(2 // tp, 1)  # four ranks share two groups: each rank has a copy of one
        share = Shapes.mamba2_state_shape(
            tp_world_size=1, n_groups=groups, num_heads=16 // tp, **sizes | {"intermediate_size": 1024 // tp}
        )
        assert whole[1:] == share[1:] and whole[1] == (16 // tp, 64, 128)
        assert whole[2:4] == ((16, 16 // tp, 64), (16, groups, 128))
        gdn = Shapes.gated_delta_net_state_shape(tp, 4, 8, 128, 128, 4)
        assert gdn[1:] == Shapes.gated_delta_net_state_shape(1, 4 // tp, 8 // tp, 128, 128, 4)[1:]
        kda = Shapes.kda_state_shape(tp, 4, 128)
        assert kda[1:] == Shapes.kda_state_shape(1, 4 // tp, 128)[1:]
        dtypes = Dtypes.gated_delta_net_state_dtype("bfloat16", "auto", "bfloat16")
        assert dtypes == (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16, torch.uint8)
        assert len(whole) == len(gdn) == len(kda) == len(dtypes) == len(Copies.kda_state_copy_func()) == 5
        spec = calculators.mamba2_spec(tp_world_size=tp, n_groups=2, num_heads=16, **sizes)
        policy = parse_arm("decoupled-nvfp4")
        codes = spec.elements // 2 + spec.elements // 16  # E2M1 codes and E4M3 scales
        assert whole[4][0] >= codes + 16 * spec.heads * 4 and plugin.policies == (policy,)
    finally:
        activate(None)
    assert len(Shapes.kda_state_shape(tp, 4, 128)) == 2


def test_the_vocabulary_is_small_enough_for_forced_tokens():
    assert max(max(text) for text in PROMPTS + FORCED) < VOCABULARY
