"""Architecture and initialisation of the embedded models.

Every model has six state-space layers with the state shape of the real models of its family and two attention
layers early in the stack. Attention is kept weak on purpose (one head of 32, see also ``train.py``): a hybrid
that can look everything up in a KV cache leaves its state unused, and would make every state format look perfect.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

HIDDEN = 256
MAX_POSITIONS = 131072
# S = state-space layer, A = attention layer; each is followed by an MLP.
PATTERN = "SASASSSS"

# Decay at initialisation is rate = A * dt per token. The papers draw A from 1 to 16 and dt log-uniformly from 0.001
# to 0.1. A model with two dozen heads cannot leave that to chance, and only the product matters: here A = 1 and the
# heads of a layer spread evenly, on a log scale, over half-lives from 2 to 2,300 tokens.
DT_RANGE = (0.0003, 0.3)


def build_config(name: str) -> PreTrainedConfig:
    """The Hugging Face config of an embedded model. Imports lazily: Kimi-Linear needs a recent transformers."""
    common: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": HIDDEN,
        "max_position_embeddings": MAX_POSITIONS,
        "tie_word_embeddings": False,
        # Byte models have no special tokens: generation stops at the requested length, not at a byte.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    layer_types = [{"S": "linear_attention", "A": "full_attention"}[kind] for kind in PATTERN]
    if name == "tiny-mamba2":
        from transformers import NemotronHConfig

        return NemotronHConfig(
            **common,
            layers_block_type=[block for layer in layer_types for block in (layer, "mlp")],
            mamba_num_heads=8,
            mamba_head_dim=64,
            ssm_state_size=128,
            n_groups=2,
            chunk_size=64,
            time_step_min=1e-5,  # NemotronH clamps dt here; the default of 0.001 would cap every half-life at 693 / A
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=896,
        )
    if name == "tiny-gdn":
        from transformers import Qwen3NextConfig

        return Qwen3NextConfig(
            **common,
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=128,
            linear_value_head_dim=128,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=32,
            intermediate_size=640,
            mlp_only_layers=list(range(len(layer_types))),
            num_experts=0,
        )
    if name == "tiny-kda":
        from transformers import KimiLinearConfig

        return KimiLinearConfig(
            **common,
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
            mlp_layer_types=["dense"] * len(layer_types),
            linear_num_heads=4,
            linear_head_dim=128,
            num_attention_heads=1,
            num_key_value_heads=1,
            qk_nope_head_dim=16,
            qk_rope_head_dim=16,
            v_head_dim=32,
            kv_lora_rank=32,
            intermediate_size=512,
        )
    raise KeyError(name)


def build_model(name: str, seed: int) -> PreTrainedModel:
    """A freshly initialised float32 model."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(build_config(name), dtype=torch.float32)
    initialise(model)
    return model


@torch.no_grad()
def initialise(model: nn.Module) -> None:
    """Set what Hugging Face's default initialisation gets wrong for training from scratch.

    Its defaults serve fine-tuning: they make short convolutions nearly zero, and for Gated DeltaNet they draw
    decays (dt_bias = 1, A up to 16) that forget within a token. Called after construction, because
    transformers' own ``_init_weights`` runs there and would overwrite these values.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            module.reset_parameters()
        elif isinstance(module, nn.Linear) and module_name.rsplit(".", 1)[-1] in ("out_proj", "o_proj", "down_proj"):
            # Branches start small against the residual stream that they add to.
            nn.init.normal_(module.weight, std=0.02 / math.sqrt(2 * len(PATTERN)))
        elif hasattr(module, "A_log"):
            initialise_decay(module)


def initialise_decay(module: Any) -> None:
    """Spread decay rates from a few tokens to a few thousand over the heads (for KDA: channels) of a layer."""
    heads = module.A_log.numel()
    channels = module.dt_bias.numel() // heads  # 1 for Mamba-2 and GDN, the key dimension for KDA
    low, high = (math.log10(dt) for dt in DT_RANGE)
    dt = torch.logspace(low, high, heads) if channels == 1 else torch.logspace(low, high, channels).repeat(heads)
    inverse_softplus = dt + torch.log(-torch.expm1(-dt))
    module.A_log.zero_()
    module.dt_bias.copy_(inverse_softplus.view_as(module.dt_bias))
