"""The one function of each family that runs a chunk of tokens through the state, and ways to replace it.

transformers' state-space layers call a module-level function with all tokens of a sequence. Training replaces
it by a fast kernel, the checks replace it by variants that forget or that record: the model code stays the
library's own in every case.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ChunkFunction = Callable[..., Any]

# family -> (module, name of the chunk function in it)
CHUNK_FUNCTIONS = {
    "mamba2": ("transformers.models.nemotron_h.modeling_nemotron_h", "mamba2_chunk_scan"),
    "gdn": ("transformers.models.qwen3_next.modeling_qwen3_next", "torch_chunk_gated_delta_rule"),
    "kda": ("transformers.models.kimi_linear.modeling_kimi_linear", "chunk_kimi_delta_attention"),
}


def modeling_module(family: str) -> Any:
    """The transformers module that holds a family's layers."""
    return importlib.import_module(CHUNK_FUNCTIONS[family][0])


def torch_chunk_function(family: str) -> ChunkFunction:
    """transformers' own torch implementation, also where a faster package stands in front of it."""
    return inspect.unwrap(getattr(modeling_module(family), CHUNK_FUNCTIONS[family][1]))


@contextmanager
def replaced(family: str, function: ChunkFunction, name: str | None = None) -> Iterator[None]:
    """Put ``function`` in the place of the chunk function (or of ``name``) and always put the old one back."""
    module, name = modeling_module(family), name or CHUNK_FUNCTIONS[family][1]
    original = getattr(module, name)
    setattr(module, name, function)
    try:
        yield
    finally:
        setattr(module, name, original)


@contextmanager
def silenced_attention(model: nn.Module) -> Iterator[None]:
    """Let every attention layer of a model contribute nothing inside the context."""
    layers = [module for module in model.modules() if getattr(module, "is_causal", False)]
    handles = [layer.register_forward_hook(lambda _, __, out: (out[0] * 0, *out[1:])) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_chunk(function: ChunkFunction, size: int) -> ChunkFunction:
    """The same function with another internal chunk size, which changes its cost and not its result."""
    parameter = list(inspect.signature(function).parameters).index("chunk_size")

    def run(*args: Any, **kwargs: Any) -> Any:
        if len(args) > parameter:
            args = (*args[:parameter], size, *args[parameter + 1 :])
        else:
            kwargs["chunk_size"] = size
        return function(*args, **kwargs)

    return run


def forgetting(function: ChunkFunction, every: int = 16) -> ChunkFunction:
    """A chunk function whose state is zero again at every ``every``-token boundary.

    Each piece of the sequence becomes a sequence of its own, without an initial state. Convolutions and
    attention run elsewhere and keep their memory, so what the loss gains is what the state was worth.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["query"]
        batch, length = first.shape[:2]
        if length % every:
            raise ValueError(f"{length} tokens do not divide into pieces of {every}")

        def fold(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.ndim >= 3 and value.shape[:2] == (batch, length):
                return value.reshape(batch * length // every, every, *value.shape[2:])
            return value

        result = function(*map(fold, args), **{key: fold(value) for key, value in kwargs.items()})
        output = result[0] if isinstance(result, tuple) else result
        output = output.reshape(batch, length, *output.shape[2:])
        return (output, None) if isinstance(result, tuple) else output

    return run


def recording_decay(function: ChunkFunction, sink: list[torch.Tensor]) -> ChunkFunction:
    """A chunk function that also appends each layer's log-decays [batch, tokens, heads(, channels)] to ``sink``."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if "g" in kwargs:
            sink.append(kwargs["g"].detach().float())
        else:
            dt, a = args[1], args[2]
            sink.append((mamba2_step(dt, kwargs["dt_bias"], kwargs["dt_limit"]) * a).detach())
        return function(*args, **kwargs)

    return run


def mamba2_step(dt: torch.Tensor, dt_bias: torch.Tensor, limit: tuple[float, float]) -> torch.Tensor:
    """Mamba-2's step size Δ in float32, as its layers define it."""
    return F.softplus(dt.float() + dt_bias.float()).clamp(*limit)
