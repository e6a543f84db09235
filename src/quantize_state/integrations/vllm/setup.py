"""What every layer class does when it is made, and when vLLM hands it its pages."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.platforms import current_platform

from ...quant.spec import LayerSpec
from .checks import report
from .layer import ReadCopy, ReadCopyLayer
from .pages import EXTRA_STATES
from .plugin import plugin


def adopt(layer: ReadCopyLayer, spec: LayerSpec) -> None:
    """Give a new layer what its policy asks for."""
    if plugin.asked is None:
        return
    config = get_current_vllm_config()
    plugin.resolve(config.model_config.model)
    layer.siblings = config.compilation_config.static_forward_context
    index = len(_family(layer)) - 1  # layers are made in order, and this one is among them already
    policy = plugin.policy_of(layer.prefix, index)
    if policy is not None:
        rows = config.scheduler_config.max_num_seqs
        layer.read_copy = ReadCopy(layer.prefix, spec, policy, rows, plugin.path)
    layer.stages = config.parallel_config.pipeline_parallel_size


def bound(layer: ReadCopyLayer, checkpoint: Tensor, decay_rate: Tensor | None = None) -> None:
    """Take up the pages of a layer; with the last one, say what all layers of the model do."""
    if plugin.asked is None:
        return
    if layer.read_copy is not None:
        layer.read_copy.bind(checkpoint, layer.kv_cache[-EXTRA_STATES:], decay_rate)
    first = not layer.bound
    layer.bound = True
    family = _family(layer)
    if first and all(member.bound for member in family):
        if layer.stages == 1:
            plugin.check_layers([member.prefix for member in family])
        report(family)


def spec_for_cpu(spec: Any) -> Any:
    """On a CPU, vLLM 0.32 can't leave the state at a block boundary inside of a prompt (it needs Triton, and fails):
    there, prompts are split at the boundaries instead."""
    if plugin.asked is None or not current_platform.is_cpu() or spec is None:
        return spec
    return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


def _family(layer: ReadCopyLayer) -> list[ReadCopyLayer]:
    return [member for member in layer.siblings.values() if isinstance(member, ReadCopyLayer)]
