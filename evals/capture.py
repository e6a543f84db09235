"""The FP32 states that a model really has along a text, saved for study."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import torch

from ..adapters import attach
from ..kernels.step import folded
from ..quant.errors import InvalidValueError
from ..quant.packed import CAPTURE_SCHEMA
from ..quant.policy import StatePolicy
from ..quant.tensorfile import Slot, TensorWriter, writing
from . import provenance
from .models import LoadedModel, input_device
from .rollout import Rollout, chunks
from .text import load_text, tokenise


def capture(
    loaded: LoadedModel,
    out: str | os.PathLike[str],
    *,
    text: str = "pydoc",
    tokens: int = 4096,
    every: int = 512,
    sequences: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Slot]:
    """Save each SSM layer's state after every ``every`` tokens of ``text``, as tensors ``LAYER@TOKENS``.

    States are float32 [sequences, H, V, K], of the exact recurrence teacher-forced on the text. They are written as
    they are made, so memory does not grow with the text. Returns what was written, by name.

    Raises InvalidValueError for numbers that do not fit, and QuantizeStateError where ``out`` exists.
    """
    if every < 1 or tokens < every:
        raise InvalidValueError(f"every is {every} and tokens {tokens}; every must be from 1 to tokens")
    source = load_text(text)
    count = tokens // every
    ids = torch.tensor(tokenise(loaded.tokenizer, source.text, count * every + 1, sequences, seed))
    ids = ids.to(input_device(loaded.model))
    with attach(loaded.model, "reference", path="replay") as handle:
        # A short run of its own says which layers there are and what their states look like.
        probe = Rollout(handle, StatePolicy(window=1))
        probe.advance(ids[:, :1])
        shapes = {name: tuple(folded(s).shape) for name, s in handle.states(probe.cache).items()}
        slots = {
            f"{name}@{i * every}": Slot(torch.float32, s) for i in range(1, count + 1) for name, s in shapes.items()
        }
        metadata = {
            "schema": CAPTURE_SCHEMA,
            "model": loaded.name,
            "weights_sha256": loaded.sha256,
            "text": source.name,
            "text_sha256": source.sha256,
            "families": json.dumps({layer.name: layer.family for layer in handle.layers}),
            "seed": str(seed),
            "quantize_state": str(provenance.version("quantize-state")),
        }
        with writing(out, slots, metadata) as writer:
            run = Rollout(handle, StatePolicy(window=1))
            for start, inputs, _ in chunks(ids, every):
                run.advance(inputs)
                _write(writer, handle.states(run.cache), start + inputs.shape[1])
                if progress is not None:
                    progress(start + inputs.shape[1], count * every)
    return slots


def _write(writer: TensorWriter, states, position: int) -> None:
    for name, state in states.items():
        writer.append(f"{name}@{position}", folded(state))
