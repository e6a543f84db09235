"""What a model keeps for each request: state shapes, convolutions and keys and values, from its config alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.inputs import TokenInputs
from ..quant.errors import UnsupportedModelError
from ..quant.spec import LayerSpec
from .attached import attach
from .models import cache_argument

PROBE_TOKENS = 8


@dataclass
class RequestShapes:
    """What one request takes, in elements. ``specs`` are the SSM layers' by name.

    ``convolution`` counts the inputs that the layers' short convolutions keep. ``keys_values`` has an entry per
    attention layer: elements per token, and the tokens after which it stops growing (None: never).
    """

    specs: dict[str, LayerSpec] = field(default_factory=dict)
    convolution: int = 0
    keys_values: list[tuple[int, int | None]] = field(default_factory=list)

    @property
    def state_elements(self) -> int:
        return sum(spec.elements for spec in self.specs.values())

    def keys_values_at(self, context: int) -> int:
        """Elements of keys and values at ``context`` tokens."""
        return sum(each * (context if limit is None else min(context, limit)) for each, limit in self.keys_values)


def request_shapes(model: nn.Module) -> RequestShapes:
    """Run ``model``, which is on the meta device, on a few tokens that have shapes and no values.

    Raises UnsupportedModelError where that can't be done.
    """
    shapes = RequestShapes()
    ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.long, device="meta")
    with attach(model, "reference") as handle, torch.no_grad(), _no_values():
        for layer in handle.layers:
            layer.recur = partial(_record, layer, shapes.specs)  # type: ignore[method-assign, assignment]
        try:
            out = model(input_ids=ids, use_cache=True)
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} can't be run without values to see what it keeps: {str(error)[:160]}"
            ) from error
    for layer in getattr(out, cache_argument(model)).layers:
        for kept in (getattr(layer, "conv_states", None) or {}).values():
            if isinstance(kept, Tensor):
                # transformers keeps a column for the token at hand, which serving engines do not.
                shapes.convolution += math.prod(kept.shape[1:-1]) * (kept.shape[-1] - 1)
        tensors = [t for t in (getattr(layer, "keys", None), getattr(layer, "values", None)) if isinstance(t, Tensor)]
        if tensors:
            each = sum(t.numel() for t in tensors) // PROBE_TOKENS
            limit = getattr(layer, "sliding_window", None)
            shapes.keys_values.append((each, limit if isinstance(limit, int) else None))
    return shapes


def _record(
    layer: Any,
    specs: dict[str, LayerSpec],
    inputs: TokenInputs,
    initial: Any,
    *,
    keep: bool,
    qk_l2norm: bool = False,
    query_scale: float = 1.0,
    decay_rate: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """In place of a layer's recurrence: note its shapes, and give tensors of the right ones."""
    spec = specs[layer.name] = layer._spec(inputs, qk_l2norm, query_scale)
    matrix = (spec.key_dim, spec.value_dim) if layer._transposed else (spec.value_dim, spec.key_dim)
    state = torch.empty(inputs.v.shape[0], spec.heads, *matrix, device="meta") if keep else None
    return torch.empty(inputs.v.shape, device="meta"), state


@contextmanager
def _no_values() -> Iterator[None]:
    """Let a mixture of experts, which looks where its tokens go, take every expert for every token."""
    from torch.fx.experimental import _config as module

    _config: Any = module
    if not hasattr(_config, "meta_nonzero_assume_all_nonzero"):
        yield
        return
    with _config.patch(meta_nonzero_assume_all_nonzero=True):
        yield
