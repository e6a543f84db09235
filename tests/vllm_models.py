"""Tiny random models that vLLM's CPU backend can run, written to disk as it reads them.

As in tiny_models.py their decays are drawn as the papers draw them. vLLM's CPU attention wants heads of 32 and more,
its GDN kernels blocks of 64 or more, and its mixtures of experts are left out.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_models import _initialise_decay

VOCABULARY = 64

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_ATTENTION = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
_BAMBA: dict[str, Any] = dict(
    **_ATTENTION,
    intermediate_size=48,
    mamba_n_heads=8,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=32,
    mamba_chunk_size=16,
)
_QWEN: dict[str, Any] = dict(
    **_ATTENTION,
    head_dim=32,
    layer_types=["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    intermediate_size=48,
)


@dataclasses.dataclass(frozen=True)
class TinyModel:
    """``model``: its class in transformers. ``dtype``: vLLM's CPU kernels of GDN take bfloat16 alone."""

    model: str
    config: str
    given: dict[str, Any]
    dtype: str = "float32"


MODELS = {
    "mamba2": TinyModel(
        "Mamba2ForCausalLM",
        "Mamba2Config",
        {
            "num_heads": 8,
            "head_dim": 16,
            "hidden_size": 64,
            "state_size": 32,
            "num_hidden_layers": 2,
            "n_groups": 2,
            "chunk_size": 16,
        },
    ),
    "nemotron_h": TinyModel(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        dict(
            **_ATTENTION,
            head_dim=32,
            layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "linear_attention"],
            intermediate_size=48,
            ssm_state_size=32,
            mamba_num_heads=8,
            mamba_head_dim=16,
            n_groups=2,
            chunk_size=16,
            time_step_min=1e-9,  # below which transformers clamps Δ in prompts, and vLLM does not
        ),
    ),
    "falcon_h1": TinyModel(
        "FalconH1ForCausalLM", "FalconH1Config", _BAMBA | {"head_dim": 32, "mamba_d_ssm": 128, "num_hidden_layers": 2}
    ),
    "granitemoehybrid": TinyModel(
        "GraniteMoeHybridForCausalLM",
        "GraniteMoeHybridConfig",
        _BAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 48,
        },
    ),
    "zamba2": TinyModel(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "hybrid", "mamba"],
            "num_mem_blocks": 1,
            "use_shared_attention_adapter": True,
            "adapter_rank": 8,
            "intermediate_size": 48,
            "mamba_d_state": 32,
            "mamba_ngroups": 2,
            "n_mamba_heads": 8,
            "mamba_headdim": 16,
            "chunk_size": 16,
        },
    ),
    "qwen3_next": TinyModel(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        # vLLM looks for a layer with experts, and finds one here.
        _QWEN
        | {
            "mlp_only_layers": [0, 1, 2],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
        },
        dtype="bfloat16",
    ),
    "qwen3_5": TinyModel("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _QWEN, dtype="bfloat16"),
    # Without a full-attention layer: vLLM's Kimi-Linear has them for GPUs alone.
    "kimi_linear": TinyModel(
        "KimiLinearForCausalLM",
        "KimiLinearConfig",
        {
            "hidden_size": 64,
            "num_attention_heads": 2,
            "num_hidden_layers": 2,
            "intermediate_size": 48,
            "layer_types": ["linear_attention"] * 2,
            "mlp_layer_types": ["dense"] * 2,
            "linear_head_dim": 32,
            "linear_num_heads": 2,
        },
    ),
}


def write_model(
    name: str, folder: Path, *, seed: int = 0, dtype: str | None = None, changed: dict[str, Any] | None = None
) -> Path:
    """A fresh tiny model in ``folder``/``name``; the same seed gives the same weights.

    ``dtype``: another than what vLLM's CPU kernels take. ``changed``: other values in its configuration.
    """
    tiny = MODELS[name]
    target = folder / name
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config = getattr(transformers, tiny.config)(**_COMMON | tiny.given | (changed or {}))
        model = getattr(transformers, tiny.model)(config)
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "dt_bias"):
                _initialise_decay(module)
    model.to(getattr(torch, dtype or tiny.dtype)).save_pretrained(target)
    return target


def as_published(source: Path, target: Path) -> Path:
    """The tiny Kimi-Linear in the layout of published ones, which vLLM reads and transformers writes but in part."""
    given = json.loads((source / "config.json").read_text())
    kept = ("architectures", "model_type", "vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")
    kept += ("intermediate_size", "rms_norm_eps", "bos_token_id", "eos_token_id", "pad_token_id")
    config = {name: given[name] for name in kept} | {
        "linear_attn_config": {
            "kda_layers": list(range(1, given["num_hidden_layers"] + 1)),
            "full_attn_layers": [],
            "head_dim": given["linear_head_dim"],
            "num_heads": given["linear_num_heads"],
            "short_conv_kernel_size": given["linear_conv_kernel_dim"],
        }
    }
    target.mkdir()
    (target / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    renamed = {name.replace("block_sparse_moe", "mlp"): weight for name, weight in weights.items()}
    save_file(renamed, target / "model.safetensors", {"format": "pt"})
    return target


def with_experts(source: Path, target: Path) -> Path:
    """A dense Qwen3-Next model, the embedded tiny-gdn, so that vLLM loads it: it wants a layer with experts.

    The last layer's MLP becomes two equal experts, which compute the same whatever the router says.
    """
    old = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    config = copy.deepcopy(old.config)
    config.mlp_only_layers = list(range(config.num_hidden_layers - 1))
    config.num_experts = config.num_experts_per_tok = 2
    config.moe_intermediate_size = config.intermediate_size
    new = transformers.Qwen3NextForCausalLM(config)
    dense, experts = old.model.layers[-1].mlp, new.model.layers[-1].mlp
    new.load_state_dict(old.state_dict(), strict=False)
    with torch.no_grad():
        experts.experts.gate_up_proj.copy_(torch.cat([dense.gate_proj.weight, dense.up_proj.weight]))
        experts.experts.down_proj.copy_(dense.down_proj.weight)
        for weight in (*experts.gate.parameters(), *experts.shared_expert.parameters()):
            weight.zero_()
    new.to(torch.bfloat16).save_pretrained(target)
    for file in source.glob("tokenizer*"):
        shutil.copy(file, target)
    return target
