"""NVIDIA ModelOpt: one mtq.quantize call for weights and states, with our codec where ModelOpt needs a GPU."""

import copy

import pytest
import torch
from tiny_models import TINY_MODELS, build, run, tokens

from quantize_state import QuantizeStateError, StatePolicy, attach, export_recipe, resolve_recipe
from quantize_state.adapters import find_layers
from quantize_state.quant import fake_quantize
from quantize_state.quant.errors import InvalidValueError

pytest.importorskip("modelopt")
from quantize_state.integrations import modelopt as ours

mtq = ours.mtq
OFF = {"quantizer_name": "*", "enable": False}


def state(cfg=None, name="*state_read_quantizer", **entry):
    return {"quantizer_name": name, **({} if cfg is None else {"cfg": cfg}), **entry}


def quantize(model, *entries, config=None, forward=None):
    ours.register()
    config = copy.deepcopy(config or {"quant_cfg": [OFF], "algorithm": "max"})
    config["quant_cfg"] += entries
    return mtq.quantize(model, config, forward)


@pytest.mark.parametrize("name", TINY_MODELS)
def test_every_class_takes_its_policy_from_the_config(name):
    quantized, ids = quantize(build(name), state(ours.NVFP4)), tokens(1, 20)
    with attach(quantized, StatePolicy(read="nvfp4")):
        want, _ = run(quantized, ids[:, :3], *ids[:, 3:].split(1, 1))
    names = [layer.name for layer in find_layers(quantized)]
    assert resolve_recipe(quantized).for_layers(names) == [StatePolicy(read="nvfp4")] * len(names)
    with attach(quantized, "auto"):
        got, _ = run(quantized, ids[:, :3], *ids[:, 3:].split(1, 1))
    assert torch.equal(got, want)
    assert not any("bmm" in n for layer in find_layers(quantized) for n, _ in layer.module.named_children())


@pytest.mark.parametrize(
    ("cfg", "policy"),
    [
        (ours.NVFP4, StatePolicy(read="nvfp4")),
        (
            {"num_bits": (2, 1), "block_sizes": {-1: 16, "scale_bits": (4, 3), "type": "dynamic"}},
            StatePolicy(read="nvfp4"),
        ),
        (ours.MXFP4, StatePolicy(read="mxfp4")),
        (ours.MXFP8, StatePolicy(read="mxfp8")),
        (ours.FP8, StatePolicy(read="fp8_e4m3")),
        ({"num_bits": (4, 3)}, StatePolicy(read="fp8_e4m3")),
        (ours.INT8, StatePolicy(read="int8")),
        ({**ours.NVFP4, "rotate": True}, StatePolicy(read="nvfp4", rotation="hadamard")),
        (
            {**ours.NVFP4, "rotate": {"enable": True, "block_size": 16}},
            StatePolicy(read="nvfp4", rotation="hadamard16"),
        ),
        (
            {**ours.NVFP4, "block_sizes": {**ours.NVFP4["block_sizes"], "four_over_six": True}},
            StatePolicy(read="nvfp4", scale_rule="four_over_six"),
        ),
        (
            {**ours.NVFP4, "backend": ours.BACKEND, "backend_extra_args": {"window": 8, "checkpoint": "bf16"}},
            StatePolicy(read="nvfp4", window=8, checkpoint="bf16"),
        ),
    ],
)
def test_config_entries_and_the_policies_they_spell(cfg, policy):
    model = quantize(build("qwen3_next"), state(cfg))
    first = find_layers(model)[0]
    quantizer = first.module.state_read_quantizer
    assert quantizer.policy() == policy
    x = torch.randn(2, 4, 24, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(quantizer(x), fake_quantize(x, *policy.how(policy.read)))
    mtq.disable_quantizer(model, "*state_read_quantizer")
    assert quantizer.policy() == StatePolicy() and torch.equal(quantizer(x), x)


def test_wildcards_order_and_disabling_are_modelopts(capsys):
    model = build("nemotron_h")
    names = [layer.name for layer in find_layers(model)]
    quantized = quantize(
        model, state(ours.NVFP4), state(ours.FP8, f"{names[0]}.state*"), state(name=f"*{names[1]}*", enable=False)
    )
    assert resolve_recipe(quantized).for_layers(names) == [StatePolicy(read="fp8_e4m3"), StatePolicy()]
    untouched = quantize(build("nemotron_h"))
    assert resolve_recipe(untouched).for_layers(names) == [StatePolicy(), StatePolicy()]


@pytest.mark.parametrize(
    ("cfg", "says"),
    [
        ({"num_bits": 4, "block_sizes": {-1: 32}}, "has num_bits 4 and block_sizes"),
        ({"num_bits": (2, 1), "block_sizes": {-1: 8, "type": "dynamic", "scale_bits": (4, 3)}}, "has num_bits"),
        ({**ours.NVFP4, "rotate": {"enable": True, "block_size": 64}}, "block_size 64; it must be 16 or None"),
        ({**ours.FP8, "backend": ours.BACKEND, "backend_extra_args": {"widnow": 8}}, "'widnow'.*Did you mean 'window'"),
        ([ours.NVFP4, ours.FP8], "is a SequentialQuantizer: a state has one format"),
    ],
)
def test_what_a_state_has_not_is_named(cfg, says):
    with pytest.raises(InvalidValueError, match=says):
        attach(quantize(build("qwen3_next"), state(cfg)), "auto")


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("nemotron_h", "NVFP4_DEFAULT_CFG"),
        ("kimi_linear", "W4A16_NVFP4_CFG"),
        ("qwen3_next", "FP8_DEFAULT_CFG"),
        ("qwen3_next", "INT8_DEFAULT_CFG"),
    ],
)
def test_weights_and_states_in_one_call(name, preset):
    """ModelOpt's weight presets, NVFP4 too, run on a CPU with the states' entries; nothing of it changes the states."""
    ids = tokens(2, 12)
    before = copy.deepcopy(getattr(mtq, preset))
    config = ours.on_any_device(getattr(mtq, preset))
    assert getattr(mtq, preset) == before, "the preset itself is left alone"
    assert (config != before) == ("NVFP4" in preset)
    model = quantize(build(name), state(ours.NVFP4), config=config, forward=lambda m: m(ids))
    plain = quantize(build(name), config=config, forward=lambda m: m(ids))
    names = [layer.name for layer in find_layers(model)]
    assert resolve_recipe(model).for_layers(names) == [StatePolicy(read="nvfp4")] * len(names)
    want, _ = run(plain, ids)
    assert torch.equal(run(model, ids)[0], want), "not attached, the states are transformers' own"
    assert not torch.equal(want, run(build(name), ids)[0])
    with attach(model, "auto") as handle, attach(plain, "decoupled-nvfp4"):
        chunks = [ids[:, :4], *ids[:, 4:].split(1, 1)]
        got, cache = run(model, *chunks)
        assert {s.copy.format for s in handle.states(cache).values()} == {"nvfp4"}
        assert torch.equal(got, run(plain, *chunks)[0])


def test_nvfp4_on_a_cpu_is_modelopts_own_real_quantisation():
    """Bit for bit what NVFP4QTensor stores and gives back, for weights and for calibrated activations."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def theirs(x, amax):
        q, block, total = NVFP4QTensor.quantize(x.clone(), 16, weights_scaling_factor_2=amax / 2688)
        return q.dequantize(torch.float32, scale=block, double_scale=total, block_sizes={-1: 16})

    model = quantize(
        build("qwen3_next"), config=ours.on_any_device(mtq.NVFP4_DEFAULT_CFG), forward=lambda m: m(tokens(2, 9))
    )
    linear = next(
        m for n, m in model.named_modules() if n.endswith("layers.0.mlp.gate_proj") or n.endswith("in_proj_qkvz")
    )
    weight = linear.weight.detach()
    got = linear.weight_quantizer(weight)
    assert torch.equal(got, theirs(weight, linear.weight_quantizer.amax))
    assert not torch.equal(got, weight)
    amax = linear.input_quantizer.amax
    x = torch.randn(3, 5, weight.shape[1], generator=torch.Generator().manual_seed(1)) * amax / 2
    assert x.abs().max() > amax, "some of it must saturate"
    got = linear.input_quantizer(x)
    assert torch.equal(got.view(15, -1), theirs(x.view(15, -1).clamp(-amax, amax), amax))
    small = x[:1] / 50
    assert small.abs().max() < amax / 2, "the calibrated scale counts, not that of these values"
    assert torch.equal(linear.input_quantizer(small)[0], theirs(small[0], amax))
    assert not torch.equal(linear.input_quantizer(small)[0], fake_quantize(small[0], "nvfp4"))
    half = linear.input_quantizer(x.to(torch.bfloat16))
    assert half.dtype == torch.bfloat16 and half.shape == x.shape


def test_fake_quantisation_passes_gradients():
    model = quantize(build("qwen3_next"), config=ours.on_any_device(mtq.W4A16_NVFP4_CFG))
    linear = next(m for m in model.modules() if hasattr(m, "weight_quantizer") and m.weight_quantizer.is_enabled)
    weight = linear.weight.detach().clone().requires_grad_()
    out = linear.weight_quantizer(weight)
    (out * 3).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 3)) and not torch.equal(out, weight)


def test_mx_formats_and_what_the_backend_has_not():
    from modelopt.torch.quantization.config import QuantizerAttributeConfig

    ours.register()
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(2))
    for cfg, name in ((ours.MXFP4, "mxfp4"), (ours.MXFP8, "mxfp8")):
        quantizer = mtq.nn.TensorQuantizer(QuantizerAttributeConfig(**cfg, backend=ours.BACKEND))
        assert torch.equal(quantizer(x), fake_quantize(x, name))
    other = mtq.nn.TensorQuantizer(QuantizerAttributeConfig(num_bits=8, backend=ours.BACKEND))
    with pytest.raises(InvalidValueError, match="has NVFP4, MXFP4 and MXFP8, and the quantizer says num_bits 8"):
        other(x)


@pytest.mark.parametrize("format", ours.WEIGHTS)
def test_quantized_weights_are_a_copy(format, capsys):
    model = build("qwen3_next")
    before = {name: p.clone() for name, p in model.named_parameters()}
    quantized = ours.quantize_weights(model, format)
    assert capsys.readouterr().out == ""
    after = dict(quantized.named_parameters())
    changed = [n for n, p in before.items() if not torch.equal(p, after[n])]
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert any("linear_attn.out_proj" in n for n in changed) and not any("lm_head" in n or "norm" in n for n in changed)
    for name in changed:
        w, got = before[name].float(), after[name]
        if w.dim() == 2 and format != "fp8":
            # ModelOpt may share the largest magnitude among fused projections, so not always that of this tensor.
            alone = fake_quantize(w, "nvfp4" if format == "nvfp4" else "int8")
            assert (got - w).norm() < 1.5 * (alone - w).norm()
    assert run(quantized, tokens(1, 8))[0].isfinite().all()
    with pytest.raises(InvalidValueError, match="unknown weight format 'nvfp5'"):
        ours.quantize_weights(model, "nvfp5")


def test_policies_survive_modelopts_save_and_restore(tmp_path):
    import modelopt.torch.opt as mto

    model = quantize(build("qwen3_next"), state({**ours.NVFP4, "rotate": True}))
    mto.save(model, tmp_path / "model.pth")
    restored = mto.restore(build("qwen3_next", seed=1), tmp_path / "model.pth")
    assert resolve_recipe(restored) == resolve_recipe(model)
    assert (
        resolve_recipe(restored).for_layers([layer.name for layer in find_layers(restored)])[0].rotation == "hadamard"
    )


def test_what_modelopt_took_for_attention_becomes_ours():
    """Its plugin registers KDA, whose class is called Attention, whenever it runs before ours."""
    from modelopt.torch.quantization.plugins.huggingface import _QuantAttention

    kind = type(find_layers(build("kimi_linear"))[0].module)
    registry = ours.QuantModuleRegistry
    if kind in registry:
        registry.unregister(kind)
    mtq.register(original_cls=kind, quantized_cls=_QuantAttention)
    model = quantize(build("kimi_linear"), state(ours.NVFP4))
    assert {policy.read for policy in resolve_recipe(model).layers.values()} == {"nvfp4"}


@pytest.mark.filterwarnings("ignore")
def test_a_recipe_goes_beside_modelopts_own_export(tmp_path):
    """ModelOpt exports NVFP4 weights and hf_quant_config.json; ours is one more file, and neither knows the other."""
    from modelopt.torch.export import export_hf_checkpoint

    config = ours.on_any_device(mtq.NVFP4_DEFAULT_CFG)
    entries = (state(ours.NVFP4), state(ours.FP8, "*layers.1.*state_read_quantizer"))
    model = build("qwen3_next")
    model.config.architectures = [type(model).__name__]  # as from_pretrained sets it; ModelOpt wants it
    model = quantize(model, *entries, config=config, forward=lambda m: m(tokens(1, 9)))
    wanted = resolve_recipe(model)
    export_hf_checkpoint(model, export_dir=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert b"NVFP4" in before["hf_quant_config.json"] and b"state_read" not in before["hf_quant_config.json"]
    described = export_recipe(model, "auto", tmp_path)
    assert resolve_recipe(tmp_path) == wanted == described.recipe
    assert list(described.layers.values()) == ["decoupled-nvfp4", "decoupled-fp8_e4m3"]
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before and len(after) == len(before) + 1


def test_a_layer_that_another_toolkit_subclassed_is_found():
    model, ids = build("kimi_linear"), tokens(1, 10)
    with attach(model, "decoupled-nvfp4"):
        want, _ = run(model, *ids.split(1, 1))
    for layer in find_layers(model):
        kind = type(layer.module)
        layer.module.__class__ = type(
            "Wrapped", (kind,), {"forward": lambda self, *a, k=kind, **o: k.forward(self, *a, **o)}
        )
    with attach(model, "decoupled-nvfp4"):
        assert torch.equal(run(model, *ids.split(1, 1))[0], want)


def test_without_modelopt_the_message_says_what_to_do():
    import subprocess
    import sys

    code = "import sys; sys.modules['modelopt'] = None; import quantize_state.integrations.modelopt"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert QuantizeStateError.__name__ in done.stderr and "pip install 'quantize-state[modelopt]'" in done.stderr
