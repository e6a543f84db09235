"""Column scales of a model's read copies, from one FP32 pass over a text (docs/formats.md)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..adapters import AttachedLayer, attach
from ..kernels.inputs import TokenInputs
from ..quant.columns import ColumnScales, balanced, sharing
from ..quant.errors import InvalidValueError
from ..quant.policy import StatePolicy
from ..quant.state import DecodeState
from . import provenance
from .attention import bounded_attention
from .error_law import WindowTrack
from .models import LoadedModel, input_device
from .rollout import Progress, Rollout, chunks
from .text import TextSource, load_text, tokenise

TOKENS = 4096
"""Scales from three times as many tokens predict divergences 4 % lower, from a text like the one evaluated 10 %."""

WINDOW = 16
"""Scales of one window serve all: they follow from what is written and read, hardly from how often it is folded."""


class ColumnMeter:
    """An observer of a reference pass that sums, per layer and head, the squares of what reads multiply.

    S_k² over the windows' start states and rows, Θ_k² over all queries but those that flush.
    """

    def __init__(self) -> None:
        self._tracks: dict[str, WindowTrack] = {}
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: AttachedLayer, inputs: TokenInputs, y: Tensor, state: DecodeState) -> None:
        if layer.name not in self._tracks:
            self._tracks[layer.name] = WindowTrack(layer.name, WINDOW, state, inputs)
            zeros = torch.zeros(state.spec.heads, state.spec.key_dim, dtype=torch.float64, device=y.device)
            self._sums[layer.name] = zeros, zeros.clone()
        written, read = self._sums[layer.name]
        for reads in self._tracks[layer.name].windows(inputs):
            written += reads.states.square().mean(-2, dtype=torch.float64).sum((0, 1))
            read += reads.theta[..., :-1, :].square().mean(-2, dtype=torch.float64).sum((0, 1))

    def scales(self) -> dict[str, Tensor]:
        """c [H, K] by layer, on the CPU."""
        return {
            name: balanced(written.cpu(), read.cpu(), shared=sharing(self._tracks[name].spec))
            for name, (written, read) in self._sums.items()
        }


def column_scales(
    handle: Any,
    loaded: LoadedModel,
    *,
    text: str | TextSource = "stdlib",
    tokens: int = TOKENS,
    seed: int = 0,
    progress: Progress | None = None,
) -> ColumnScales:
    """Measure the column scales of an attached model on ``tokens`` tokens of ``text``.

    Raises InvalidValueError for a text that is too short, or fewer tokens than two windows.
    """
    if tokens < 2 * WINDOW:
        raise InvalidValueError(f"tokens is {tokens}; column scales need at least {2 * WINDOW}, and {TOKENS} do well")
    source = load_text(text) if isinstance(text, str) else text
    ids = torch.tensor(tokenise(loaded.tokenizer, source.text, tokens + 1, 1, seed), device=input_device(loaded.model))
    meter, reference = ColumnMeter(), Rollout(handle, StatePolicy(window=1))
    for start, inputs, _ in chunks(ids, vocabulary=loaded.model.config.get_text_config().vocab_size):
        reference.advance(inputs, observer=meter)
        if progress is not None:
            progress("column scales", start + inputs.shape[1], tokens)
    about = {
        "model": loaded.name,
        "weights_sha256": loaded.sha256,
        "text": source.name,
        "text_sha256": source.sha256,
        "tokens": f"{tokens:,}",
        "seed": str(seed),
        "quantize_state": provenance.version("quantize-state"),
    }
    return ColumnScales(meter.scales(), about)


def calibrate(loaded: LoadedModel, **options: Any) -> ColumnScales:
    """``column_scales`` of a model that is not attached."""
    with bounded_attention(loaded.model), attach(loaded.model, "reference", path="replay") as handle:
        return column_scales(handle, loaded, **options)


def other_text(evaluated: TextSource) -> str:
    """A text to calibrate on that is not the one evaluated."""
    return "stdlib" if evaluated.name.startswith("pydoc") else "pydoc"
