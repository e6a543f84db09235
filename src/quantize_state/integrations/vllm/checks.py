"""What the plugin refuses, before a request is served, and what it says that it has changed."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

from ...quant.errors import QuantizeStateError
from .layer import ReadCopyLayer

TESTED = ("0.32",)
"""Minor versions of vLLM that the tests have run with."""

log = logging.getLogger("vllm.quantize_state")


def check_version() -> None:
    """Raise QuantizeStateError unless the installed vLLM is one that the plugin was tested with."""
    import vllm

    version = vllm.__version__
    if not any(version == minor or version.startswith(f"{minor}.") for minor in TESTED):
        raise QuantizeStateError(
            f"quantize-state {metadata.version('quantize-state')} was tested with vLLM {', '.join(TESTED)} and this is "
            f"{version}; it reaches into vLLM's layers, so install a tested one or unset QUANTIZE_STATE_POLICY"
        )


def check_platform() -> None:
    """Raise QuantizeStateError unless vLLM runs on a CPU or an NVIDIA GPU: elsewhere it decodes by other functions."""
    from vllm.platforms import current_platform

    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise QuantizeStateError(
            f"the plugin serves on NVIDIA GPUs and CPUs, and vLLM has found a {type(current_platform).__name__} here; "
            "unset QUANTIZE_STATE_POLICY"
        )


def check_workers(plugin: Any, ours: Any, followed: list[Any]) -> None:
    """Raise QuantizeStateError where a worker of the engine does not follow what this process does.

    ``ours`` and, of each worker, ``followed``: recipe and path. A process without the variable would serve FP32.
    """
    lost = [str(rank) for rank, theirs in enumerate(followed) if theirs != ours]
    if lost:
        raise QuantizeStateError(
            f"QUANTIZE_STATE_POLICY={plugin.asked} is not what worker {', '.join(lost)} of the engine follows. Each "
            "process reads the variable, and the file that it names, for itself: have quantize-state installed and "
            "the variable set alike on every machine, and quantize_state in VLLM_PLUGINS where that is set"
        )


def check_config(config: Any, plugin: Any) -> None:
    """Raise QuantizeStateError for an engine configuration under which a read copy can't be kept."""
    reasons = {
        "--use-replayssm keeps a ring of its own; a policy has one already (replay-fp32 is what the flag does)": (
            config.cache_config.use_replayssm
        ),
        "speculative decoding keeps several states per request and rolls back by choosing one; a ring can't": (
            config.speculative_config is not None
        ),
        "a KV connector, which --kv-offloading-size is too, moves states without their rings": (
            (config.kv_transfer_config is not None and config.kv_transfer_config.is_kv_transfer_instance)
            or config.cache_config.kv_offloading_size is not None  # of which vLLM makes a connector later
        ),
        "stochastic rounding is for FP16 states of vLLM's own; the policy's checkpoint is rounded to nearest": (
            config.mamba_config.enable_stochastic_rounding
        ),
        "a recipe that numbers layers needs a rank that sees them all; with pipeline parallelism, name them": (
            config.parallel_config.pipeline_parallel_size > 1
            and plugin.recipe is not None
            and any(pattern.isdigit() for pattern in plugin.recipe.layers)
        ),
    }
    found = [reason for reason, present in reasons.items() if present]
    if found:
        raise QuantizeStateError(
            f"QUANTIZE_STATE_POLICY={plugin.asked} can't be served like this: {'; '.join(found)}. Leave that out, or "
            "unset the variable"
        )


def check_layer(layer: Any) -> None:
    """Raise QuantizeStateError for a layer with a recurrent state that no policy reaches."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    if isinstance(layer, ReadCopyLayer) or layer.mamba_type == MambaAttentionBackendEnum.SHORT_CONV:
        return
    from .plugin import LAYERS

    raise QuantizeStateError(
        f"layer {getattr(layer, 'prefix', '?')!r} is a {type(layer).__name__}, whose state no policy reaches; the "
        f"plugin knows {', '.join(LAYERS)}. Unset QUANTIZE_STATE_POLICY to serve this model"
    )


def report(layers: list[ReadCopyLayer]) -> None:
    """Log what was changed, for which layers: one line per policy."""
    groups: dict[str, list[ReadCopyLayer]] = {}
    for layer in layers:
        groups.setdefault(
            "untouched (FP32, every token)" if layer.read_copy is None else layer.read_copy.policy.name, []
        ).append(layer)
    for policy, members in groups.items():
        copies = [m.read_copy for m in members if m.read_copy is not None]
        how = ""
        if copies:
            state = copies[0].spec.elements * members[0].kv_cache[1].element_size()
            page = sum(t[0].numel() * t.element_size() for t in members[0].kv_cache)
            code = "Triton kernels" if members[0].kv_cache[1].is_cuda else "torch reference"
            how = f" by the {code}; a page holds {page / 1024:.0f} KiB, of which {state / 1024:.0f} are the state"
        log.info("quantize-state: %s for %d layers%s: %s", policy, len(members), how, names(members))


def names(layers: list[ReadCopyLayer]) -> str:
    """``model.layers.{0,2,5}.mixer`` for layers that differ in one number, else all names."""
    parts = [layer.prefix.split(".") for layer in layers]
    differing = [i for i, column in enumerate(zip(*parts, strict=False)) if len(set(column)) > 1]
    if len({len(p) for p in parts}) == 1 and len(differing) == 1:
        (i,) = differing
        numbers = "{" + ",".join(p[i] for p in parts) + "}"
        return ".".join([*parts[0][:i], numbers, *parts[0][i + 1 :]])
    return ", ".join(layer.prefix for layer in layers)
