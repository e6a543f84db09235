"""Tiny random models of every supported class, whose states matter: decays are drawn as the papers draw them.

Hugging Face's own initialisation forgets within a token or two (``dt_bias`` = 1, A up to 16), which would let a wrong
state pass unnoticed. Value and key dimensions differ wherever the class allows it, so that a wrong transpose can't
hide, and heads share keys wherever it can.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
from collections.abc import Callable

import torch
import transformers
from packaging.version import Version

VOCABULARY = 64

_COMMON = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_ATTENTION = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512}
_MOE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_QWEN = dict(
    **_ATTENTION,
    head_dim=16,
    layer_types=["linear_attention", "linear_attention", "full_attention"],
    num_hidden_layers=3,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=32,
    linear_value_head_dim=24,
)
_QWEN_MOE = _QWEN | _MOE | {"shared_expert_intermediate_size": 16, "num_experts": 4}
_MLA = dict(
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_hidden_layers=3,
    intermediate_size=48,
    kv_lora_rank=8,
    v_head_dim=16,
    qk_nope_head_dim=16,
    mlp_layer_types=["dense", "dense", "sparse"],
    **_MOE,
    n_shared_experts=1,
    n_group=1,
    topk_group=1,
)
_KDA_LAYERS = ["linear_attention", "linear_attention", "full_attention"]
_BAMBA = dict(
    **_ATTENTION,
    intermediate_size=48,
    mamba_n_heads=4,
    mamba_d_head=16,
    mamba_n_groups=2,
    mamba_d_state=32,
    mamba_chunk_size=16,
)


def _mamba2():
    config = transformers.Mamba2Config(
        **_COMMON,
        num_heads=4,
        head_dim=16,
        hidden_size=32,
        state_size=32,
        num_hidden_layers=2,
        n_groups=2,
        chunk_size=16,
    )
    return transformers.Mamba2ForCausalLM(config)


def _nemotron_h():
    config = transformers.NemotronHConfig(
        **_COMMON,
        **_ATTENTION,
        head_dim=16,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "moe"],
        intermediate_size=48,
        ssm_state_size=32,
        mamba_num_heads=4,
        mamba_head_dim=16,
        n_groups=2,
        chunk_size=16,
        n_routed_experts=4,
        moe_shared_expert_intermediate_size=16,
        **_MOE,
    )
    return transformers.NemotronHForCausalLM(config)


def _bamba():
    return transformers.BambaForCausalLM(
        transformers.BambaConfig(**_COMMON, **_BAMBA, num_hidden_layers=3, attn_layer_indices=[1])
    )


def _falcon_h1():
    config = transformers.FalconH1Config(**_COMMON, **_BAMBA, head_dim=16, mamba_d_ssm=64, num_hidden_layers=2)
    return transformers.FalconH1ForCausalLM(config)


def _falcon_h1_norm():
    config = transformers.FalconH1Config(
        **_COMMON, **_BAMBA, head_dim=16, mamba_d_ssm=64, num_hidden_layers=2, mamba_rms_norm=True
    )
    return transformers.FalconH1ForCausalLM(config)


def _granitemoehybrid():
    config = transformers.GraniteMoeHybridConfig(
        **_COMMON,
        **_BAMBA,
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=16,
    )
    return transformers.GraniteMoeHybridForCausalLM(config)


def _zamba2():
    config = transformers.Zamba2Config(
        **_COMMON | {"tie_word_embeddings": True},
        hidden_size=32,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        num_mem_blocks=1,
        mamba_d_state=32,
        mamba_ngroups=2,
        n_mamba_heads=4,
        chunk_size=16,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=512,
        use_shared_attention_adapter=True,
        adapter_rank=4,
        use_mem_rope=True,
    )
    return transformers.Zamba2ForCausalLM(config)


def _qwen3_next():
    config = transformers.Qwen3NextConfig(**_COMMON, **_QWEN_MOE, intermediate_size=48)
    return transformers.Qwen3NextForCausalLM(config)


def _qwen3_5():
    config = transformers.Qwen3_5TextConfig(**_COMMON, **_QWEN, intermediate_size=48)
    return transformers.Qwen3_5ForCausalLM(config)


def _qwen3_5_moe():
    return transformers.Qwen3_5MoeForCausalLM(transformers.Qwen3_5MoeTextConfig(**_COMMON, **_QWEN_MOE))


def _olmo_hybrid():
    config = transformers.OlmoHybridConfig(
        **_COMMON, **{k: v for k, v in _QWEN.items() if k != "head_dim"}, intermediate_size=48
    )
    return transformers.OlmoHybridForCausalLM(config)


def _lara_mini():
    config = transformers.LaraMiniConfig(
        **_COMMON, **_QWEN_MOE | {"layer_types": ["linear_attention", "sliding_attention", "linear_attention"]}
    )
    return transformers.LaraMiniForCausalLM(config)


def _kimi_linear():
    config = transformers.KimiLinearConfig(
        **_COMMON,
        **_MLA,
        qk_rope_head_dim=8,
        layer_types=_KDA_LAYERS,
        linear_head_dim=32,
        linear_num_heads=2,
        num_local_experts=4,
    )
    return transformers.KimiLinearForCausalLM(config)


def _bailing_hybrid():
    config = transformers.BailingHybridConfig(
        **_COMMON,
        **_MLA,
        qk_rope_head_dim=8,
        head_dim=32,
        layer_types=_KDA_LAYERS,
        num_local_experts=4,
        num_mtp_layers=0,
    )
    return transformers.BailingHybridForCausalLM(config)


def _qwen4_exp():
    config = transformers.Qwen4ExpTextConfig(
        **_COMMON | {"eos_token_id": 1},
        **_QWEN_MOE | {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        hc_count=2,
        hc_lowrank=8,
        ple_layer_ids=[2],
        heads_per_ngram=2,
        ngram_vocab_size_base=50,
        split_ngram_parts=1,
        make_ngram_vocab_size_divisible_by=1,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=16,
        indexer_budget=256,
        indexer_compress_ratio=4,
    )
    return transformers.Qwen4ExpForCausalLM(config)


def _glm5_next():
    text = dict(
        **_COMMON,
        **_MLA | {"n_routed_experts": 4},
        q_lora_rank=16,
        qk_rope_head_dim=0,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
        indexer_types=["full", "full", "full"],
        index_topk=256,
        index_head_dim=16,
        index_n_heads=2,
        index_kpool=4,
        linear_head_dim=32,
        linear_num_heads=2,
        hc_mult=2,
    )
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16}
    vision |= {"projection_intermediate_size": 16, "patch_size": 4, "image_size": 8}
    tokens = {f"{kind}_token_id": 50 + i for i, kind in enumerate(("image", "video"))}
    tokens |= {
        f"{kind}_{end}_token_id": 52 + i
        for i, (kind, end) in enumerate((kind, end) for kind in ("image", "video") for end in ("start", "end"))
    }
    config = transformers.Glm5NextConfig(text_config=text, vision_config=vision, **tokens)
    return transformers.Glm5NextForConditionalGeneration(config)


_BUILDERS: dict[str, Callable[[], torch.nn.Module]] = {
    "mamba2": _mamba2,
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_h1-rms_norm": _falcon_h1_norm,
    "granitemoehybrid": _granitemoehybrid,
    "zamba2": _zamba2,
    "qwen3_next": _qwen3_next,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": _qwen3_5_moe,
    "olmo_hybrid": _olmo_hybrid,
    "lara_mini": _lara_mini,
    "kimi_linear": _kimi_linear,
    "bailing_hybrid": _bailing_hybrid,
    "qwen4_exp": _qwen4_exp,
    "glm5_next": _glm5_next,
}

FAMILY = {
    name: "mamba2" if i < 7 else "kda" if name in ("kimi_linear", "bailing_hybrid", "glm5_next") else "gdn"
    for i, name in enumerate(_BUILDERS)
}

_BROKEN_BEFORE = {"falcon_h1-rms_norm": Version("5.24")}
"""Where transformers itself is wrong: this norm loses the token axis when several rows decode."""


def _runs(name: str) -> bool:
    if Version(transformers.__version__) < _BROKEN_BEFORE.get(name, Version("0")):
        return False
    return importlib.util.find_spec(f"transformers.models.{name.split('-')[0]}") is not None


TINY_MODELS = [name for name in _BUILDERS if _runs(name)]
"""Names of the classes that the installed transformers has and can run."""


def build(name: str, *, seed: int = 0) -> torch.nn.Module:
    """A fresh tiny model in float32 and evaluation mode; the same seed gives the same weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _BUILDERS[name]().eval()
        for module in model.modules():
            if hasattr(module, "A_log") and hasattr(module, "dt_bias"):
                _initialise_decay(module)
    return model


@torch.no_grad()
def _initialise_decay(module: torch.nn.Module) -> None:
    """Δ log-uniform in 0.001 to 0.1 and A in 1 to 16; a bounded gate gets log-decays of about the same size.

    Mamba-2's skip D is made small, or it would hide what comes from the state.
    """
    if hasattr(module, "D"):
        module.D.fill_(0.1)
    bounded = getattr(module, "safe_gate_lower_bound", None) is not None or getattr(module, "safe_gate", False)
    if bounded:
        module.A_log.zero_()
        module.dt_bias.uniform_(-7.0, -2.0)
        return
    step = torch.exp(torch.empty_like(module.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
    module.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))
    module.A_log.copy_(torch.empty_like(module.A_log).uniform_(1.0, 16.0).log())


def tokens(rows: int, length: int, *, seed: int = 0) -> torch.Tensor:
    """Random token ids [rows, length], none of them padding or a special token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 48, (rows, length), generator=generator)


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What transformers calls a cache, from 5.24 on and before."""


def cache_of(output):
    """The cache in a model's or ``generate``'s output."""
    return next(output[name] for name in CACHE_NAMES if output.get(name) is not None)


@torch.no_grad()
def run(model: torch.nn.Module, *chunks: torch.Tensor, cache=None):
    """Feed chunks of token ids one after the other into one cache: logits [rows, all tokens, V], and the cache."""
    parameters = inspect.signature(type(model).forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    logits = []
    for ids in chunks:
        options = {} if cache is None else {name: cache}
        if cache is not None and "position_ids" in parameters:
            # Bamba counts positions from 0 in every call that doesn't say them.
            options["position_ids"] = (cache.get_seq_length() + torch.arange(ids.shape[1])).expand(ids.shape)
        output = model(ids, use_cache=True, **options)
        cache = cache_of(output)
        logits.append(output.logits)
    return torch.cat(logits, dim=1), cache


def steps(ids: torch.Tensor) -> list[torch.Tensor]:
    """Token ids [rows, n] as n chunks of one token."""
    return list(ids.split(1, dim=1))


def states(cache) -> dict[int, torch.Tensor]:
    """The recurrent states that a cache holds as plain tensors, by layer number."""
    held = {i: getattr(layer, "recurrent_states", None) for i, layer in enumerate(cache.layers)}
    return {i: s[0] for i, s in held.items() if s is not None and isinstance(s[0], torch.Tensor)}
