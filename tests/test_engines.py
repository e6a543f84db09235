"""What a request takes, from a config alone, and what serving engines can do of a policy."""

import json

import pytest
import torch
from tiny_models import FAMILY, TINY_MODELS, build, run, tokens

from quantize_state import StatePolicy, attach, parse_arm
from quantize_state.adapters.shapes import request_shapes
from quantize_state.cli import main
from quantize_state.cli.export_flags import parse_size
from quantize_state.evals.embedded import embedded_path
from quantize_state.integrations.engines import ENGINES, concurrency, nearest, request_bytes, ring_bytes
from quantize_state.quant import LayerSpec
from quantize_state.quant.errors import InvalidValueError


@pytest.mark.parametrize("name", TINY_MODELS)
def test_shapes_without_weights_are_those_of_a_run(name):
    """Specs, convolutions, and keys and values per token, against the cache of the real model."""
    model = build(name)
    with torch.device("meta"):
        empty = type(model)(model.config).eval().to(torch.bfloat16)
    shapes = request_shapes(empty)
    with attach(model, "decoupled-nvfp4") as handle:
        _, cache = run(model, tokens(1, 12))
        states = handle.states(cache)
        assert shapes.specs == {layer: state.spec for layer, state in states.items()}
        policies = {layer: state.policy for layer, state in states.items()}
        sizes = request_bytes(shapes, policies, 12, width=4)
        parts = [state.state_bytes() for state in states.values()]
        cursors = 12 * len(states)  # cursor and position of each layer, which engines keep once
        assert sizes.states == sum(p["checkpoint"] + p["copy"] for p in parts)
        assert sizes.ring == sum(p["ring"] for p in parts) - cursors
        kept = [c for layer in cache.layers for c in (getattr(layer, "conv_states", None) or {}).values()]
        convolutions = [c for c in kept if isinstance(c, torch.Tensor)]
        assert sizes.convolution == sum(4 * c.numel() // c.shape[-1] * (c.shape[-1] - 1) for c in convolutions)
        held = [t for layer in cache.layers for k in ("keys", "values") if (t := getattr(layer, k, None)) is not None]
        assert sizes.keys_values == sum(4 * t.numel() for t in held if isinstance(t, torch.Tensor))


NEAREST = """
vllm         | mamba2 | decoupled-nvfp4        | replay-fp32     | float32 --use-replayssm --replayssm-buffer-len 16 | copy in nvfp4
vllm         | gdn    | decoupled-nvfp4        | reference       | --mamba-ssm-cache-dtype float32          | window of 16 for Gated
vllm         | gdn    | coupled-bf16           | coupled-bf16    | --mamba-ssm-cache-dtype bfloat16         |
vllm         | mamba2 | coupled-fp16-sr        | coupled-fp16-sr | float16 --enable-mamba-cache-stochastic-rounding |
vllm         | gdn    | coupled-fp16-sr        | coupled-fp16    | --mamba-ssm-cache-dtype float16          | stochastic rounding
sglang       | gdn    | replay-fp32-w32        | replay-fp32-w32 | --linear-replayssm-cache-len 32          |
sglang       | kda    | decoupled-bf16-nvfp4   | replay-bf16     | bfloat16 --enable-linear-replayssm       | copy in nvfp4
sglang       | mamba2 | replay-fp32            | reference       | --mamba-ssm-dtype float32                | window of 16 for Mamba
tensorrt-llm | mamba2 | coupled-nvfp4-hadamard | coupled-fp16    | mamba_ssm_cache_dtype: float16           | nvfp4 state
tensorrt-llm | mamba2 | coupled-nvfp4-hadamard | coupled-fp16    | mamba_ssm_cache_dtype: float16           | a rotation
tensorrt-llm | kda    | reference              | reference       | mamba_ssm_cache_dtype: float32           |
"""  # noqa: E501 - a table


@pytest.mark.parametrize("row", NEAREST.strip().splitlines())
def test_nearest_policies(row):
    engine, family, arm, policy, flags, missing = (cell.strip() for cell in row.split("|"))
    best = nearest(ENGINES[engine], {"a": parse_arm(arm), "b": parse_arm(arm)}, {"a": family, "b": family})
    assert best.policy.name == policy
    assert flags in " ".join(best.flags)
    if not missing:
        assert best.missing == ()
    else:
        assert any(missing in text for text in best.missing), best.missing


def test_layers_that_differ_are_said_not_to_be_possible():
    policies = {"a": parse_arm("coupled-bf16"), "b": parse_arm("coupled-bf16"), "c": parse_arm("reference")}
    best = nearest(ENGINES["vllm"], policies, dict.fromkeys(policies, "gdn"))
    assert best.policy.name == "coupled-bf16" and "a policy per layer" in best.missing[0]


def test_bytes_and_concurrency_by_hand():
    spec = LayerSpec("gdn", heads=4, key_heads=2, value_dim=24, key_dim=32)
    assert ring_bytes(spec, 16) == 16 * (2 * (4 * 24 + 2 * 32) + 4 * (4 + 4))
    kda = LayerSpec("kda", heads=4, key_heads=4, value_dim=24, key_dim=32)
    assert ring_bytes(kda, 16) == 16 * (2 * (4 * 24 + 4 * 32) + 4 * (4 + 4 * 32))
    from quantize_state.adapters.shapes import RequestShapes

    shapes = RequestShapes({"a": spec}, convolution=100, keys_values=[(64, None), (64, 50)])
    size = request_bytes(shapes, {"a": StatePolicy(read="nvfp4")}, 1000)
    nvfp4 = 4 * (24 * 16 + 24 * 2 + 4)
    assert size.states == 4 * 4 * 24 * 32 + nvfp4
    assert size.convolution == 200 and size.keys_values == 2 * 64 * (1000 + 50)
    assert concurrency(10 * size.total + 7, 7, size) == 10 and concurrency(10 * size.total + 6, 7, size) == 9
    assert concurrency(5, 7, size) == 0


@pytest.mark.parametrize("name", ["tiny-mamba2", "tiny-gdn", "tiny-kda"])
def test_the_command_from_a_config_alone(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text((embedded_path(name) / "config.json").read_text())
    for engine in ENGINES:
        command = ["export-flags", "config.json", "--engine", engine, "--memory", "1GiB", "--context", "100"]
        assert main(command) == 0
        out = capsys.readouterr().out
        assert "393,216 state elements" in out and "can't do yet" in out and "a read-only copy in nvfp4" in out
        assert main([*command, "--json", "--weights", "100MB"]) == 0
        plain = json.loads(capsys.readouterr().out)
        size = plain["bytes_per_request"]["engine"]
        assert size["total"] == size["states"] + size["ring"] + size["convolution"] + size["keys_values"]
        assert plain["requests"]["engine"] == (2**30 - 10**8) // size["total"]
        assert main([*command, "--policy", "reference"]) == 0
        assert f"⌋ = ⌊({2**30:,} − " in capsys.readouterr().out


def test_the_models_own_recipe_is_what_is_asked_for(tmp_path, capsys):
    (tmp_path / "config.json").write_text((embedded_path("tiny-gdn") / "config.json").read_text())
    assert main(["export-recipe", str(tmp_path), "--policy", "coupled-bf16"]) == 0
    assert main(["export-flags", str(tmp_path), "--engine", "vllm"]) == 0
    assert "asked for: coupled-bf16" in capsys.readouterr().out


def test_sizes():
    assert [parse_size("--memory", t) for t in ("80GiB", "1.5gb", "7", "7B", "2 KiB", "3g")] == [
        80 << 30, 1_500_000_000, 7, 7, 2048, 3_000_000_000,
    ]  # fmt: skip
    for bad in ("80XB", "", "-1GB", "GiB"):
        with pytest.raises(InvalidValueError, match="give a size such as 80GiB"):
            parse_size("--memory", bad)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("export-flags tiny-gnd --engine vllm", "unknown model 'tiny-gnd'"),
        ("export-flags tiny-gdn --engine vllm --memory much", "--memory is 'much'"),
        ("export-flags tiny-gdn --engine vllm --context 0", "--context is 0"),
        ("export-flags tiny-gdn --engine vllm --policy decoupled-nvfp8", "'nvfp8'"),
    ],
)
def test_bad_input_is_one_clear_line(command, says, capsys):
    assert main(command.split()) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err


def test_every_family_is_in_the_models():
    assert set(FAMILY.values()) == {"mamba2", "gdn", "kda"}
