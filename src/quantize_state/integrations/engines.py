"""Serving engines: the flags for the nearest policy that they have, what they lack, and what fits into memory.

The facts were read in the engines' sources; each says where. They change with versions: check `--help` of yours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..adapters.shapes import RequestShapes
from ..quant.packed import stored_bytes
from ..quant.policy import StatePolicy
from ..quant.spec import FAMILIES, LayerSpec


@dataclass(frozen=True)
class Engine:
    """What one engine has. ``replay`` are the families with a ring of recent inputs in ordinary decode."""

    name: str
    title: str
    version: str
    source: str
    launch: str
    dtype_flag: str
    replay: dict[str, str]
    replay_note: str
    stochastic: str
    stochastic_note: str
    yaml: bool = False
    notes: tuple[str, ...] = ()


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The formats of a state that all three engines have, and what they call them."""

ENGINES: dict[str, Engine] = {
    e.name: e
    for e in (
        Engine(
            "vllm",
            "vLLM",
            "0.28 and main at 002f10e0",
            "vllm/config/cache.py, vllm/config/mamba.py",
            "vllm serve {model}",
            "--mamba-ssm-cache-dtype {dtype}",
            {"mamba2": "--use-replayssm --replayssm-buffer-len {window}"},
            "its ReplaySSM is for Mamba-2 in ordinary decode (Kimi's KDA has one for speculative decoding alone)",
            "--enable-mamba-cache-stochastic-rounding",
            "on float16 states; with --mamba-backend triton on compute capability 10.0 alone, else with flashinfer",
            notes=("--use-replayssm needs --mamba-backend triton or flashinfer, and no speculative decoding.",),
        ),
        Engine(
            "sglang",
            "SGLang",
            "0.5.20 and main at 01d795f8",
            "python/sglang/srt/arg_groups/fields/exec_.py",
            "python -m sglang.launch_server --model-path {model}",
            "--mamba-ssm-dtype {dtype}",
            dict.fromkeys(
                ("gdn", "kda"),
                "--enable-linear-replayssm --linear-replayssm-cache-len {window} "
                "--linear-attn-decode-backend triton --mamba-radix-cache-strategy no_buffer",
            ),
            "its ReplaySSM is for GDN and KDA",
            "--enable-mamba-cache-stochastic-rounding",
            "on float16 states; with --mamba-backend triton on compute capability 10.0",
            notes=(
                "--enable-int8-mamba-checkpoint packs states in the prefix cache, not those of running requests.",
                "SGLang itself calls its ring for KDA usually slower than plain decode: measure it.",
            ),
        ),
        Engine(
            "tensorrt-llm",
            "TensorRT-LLM",
            "1.3.0rc9",
            "tensorrt_llm/llmapi/llm_args.py (KvCacheConfig)",
            "trtllm-serve {model} --extra_llm_api_options FILE",
            "mamba_ssm_cache_dtype: {dtype}",
            {},
            "its replay of recent inputs serves speculative decoding alone",
            "mamba_ssm_stochastic_rounding: true",
            "on float16 states; mamba_ssm_philox_rounds sets the quality of its random numbers",
            yaml=True,
        ),
    )
}


@dataclass(frozen=True)
class Nearest:
    """The policy that an engine can do, the flags for it, and what it cannot do of what was asked."""

    policy: StatePolicy
    flags: tuple[str, ...]
    missing: tuple[str, ...]
    notes: tuple[str, ...] = ()


def nearest(engine: Engine, policies: Mapping[str, StatePolicy], families: Mapping[str, str]) -> Nearest:
    """The nearest policy to ``policies`` (of each layer, whose family is in ``families``) that ``engine`` has."""
    missing, notes = [], []
    asked, _ = Counter(policies.values()).most_common(1)[0]
    if len(set(policies.values())) > 1:
        missing.append(f"a policy per layer: one dtype holds for all of them; these flags are for {asked.name}")
    if asked.read not in (None, asked.checkpoint):
        missing.append(f"a read-only copy in {asked.read}: outputs read the {asked.checkpoint} state itself")
    checkpoint = asked.checkpoint
    if checkpoint not in DTYPES:
        # The half-precision format with more mantissa; the engines can also round it stochastically.
        missing.append(f"a {checkpoint} state: the smallest dtypes are float16 and bfloat16")
        checkpoint = "fp16"
    used = list(dict.fromkeys(families.values()))
    # The engines' kernels that round stochastically are Mamba-2's.
    stochastic = asked.stochastic and checkpoint == "fp16" and used == ["mamba2"]
    if asked.stochastic and not stochastic:
        titles = ", ".join(FAMILIES[family].title for family in used)
        missing.append(f"stochastic rounding of a {checkpoint} state of {titles}: it has that for Mamba-2 in float16")
    options = {
        "scale rule": asked.scale_rule != "amax",
        "rotation": asked.rotation is not None,
        "column scale": asked.balanced,
    }
    for rule, given in options.items():
        if given:
            missing.append(f"a {rule}: its states have no scales")
    flags = [engine.dtype_flag.format(dtype=DTYPES[checkpoint])]
    window = 1
    if asked.window > 1:
        lost = [family for family in used if family not in engine.replay]
        if lost:
            titles = ", ".join(FAMILIES[family].title for family in lost)
            missing.append(f"a window of {asked.window} for {titles} layers: {engine.replay_note}")
        else:
            window = asked.window
            flags += dict.fromkeys(engine.replay[family].format(window=window) for family in used)
            notes += [note for note in engine.notes if ("ring" in note and "kda" in used) or "--use-replayssm" in note]
    if stochastic:
        flags.append(engine.stochastic)
        notes.append(f"Stochastic rounding works {engine.stochastic_note}.")
    notes += [note for note in engine.notes if "prefix cache" in note]
    policy = StatePolicy(checkpoint=checkpoint, window=window, stochastic=stochastic, seed=asked.seed)
    return Nearest(policy, tuple(flags), tuple(missing), tuple(dict.fromkeys(notes)))


@dataclass(frozen=True)
class RequestBytes:
    """Bytes of one request: the states as they are stored, the ring, convolutions, and keys and values."""

    states: int
    ring: int
    convolution: int
    keys_values: int

    @property
    def total(self) -> int:
        return self.states + self.ring + self.convolution + self.keys_values


def request_bytes(
    shapes: RequestShapes, policies: Mapping[str, StatePolicy], context: int, width: int = 2
) -> RequestBytes:
    """What a request of ``context`` tokens takes under ``policies``; ``width`` is bytes per activation."""
    states = ring = 0
    for name, spec in shapes.specs.items():
        policy = replace(policies[name], balanced=False)  # column scales are there once for all requests
        for part in (policy.checkpoint, policy.read):
            if part is not None:
                states += stored_bytes(policy.how(part)[:3], (spec.heads, spec.value_dim, spec.key_dim))
        ring += ring_bytes(spec, policy.window, width) if policy.window > 1 else 0
    return RequestBytes(states, ring, width * shapes.convolution, width * shapes.keys_values_at(context))


def ring_bytes(spec: LayerSpec, window: int, width: int = 2) -> int:
    """The ring of one layer: keys and values in ``width`` bytes, gains and log-decays in FP32."""
    decays = {"head": spec.heads, "channel": spec.heads * spec.key_dim}[spec.rules.decay]
    scalars = spec.heads + (0 if spec.rules.gain_sets_decay else decays)
    return window * (width * (spec.heads * spec.value_dim + spec.key_heads * spec.key_dim) + 4 * scalars)


def concurrency(memory: int, weights: int, request: RequestBytes) -> int:
    """Requests that fit at once: floor((memory − weights) / bytes per request), at least 0."""
    return max(0, (memory - weights) // request.total)
