"""Loss in bits per byte and half-lives: the two things that training logs and the checks gate on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from .mixers import CHUNK_FUNCTIONS, modeling_module, recording_decay, replaced


def sequences(text: np.ndarray, tokens: int, length: int) -> torch.Tensor:
    """The first ``tokens`` bytes of a text as rows of ``length`` bytes."""
    rows = min(tokens, len(text)) // length
    if rows == 0:
        raise ValueError(f"{min(tokens, len(text))} bytes do not fill one sequence of {length}")
    return torch.from_numpy(text[: rows * length].astype(np.int64)).view(rows, length)


def token_loss(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Nats per byte [rows, length - 1], each predicted from the bytes before it in its row."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(ids), -1)


@torch.no_grad()
def bits_per_byte(model: nn.Module, ids: torch.Tensor, rows: int = 1) -> float:
    """Mean loss over all rows, ``rows`` of them at a time, with dropping of attention and the like switched off."""
    training = model.training
    model.eval()
    total = sum(token_loss(model, part).double().sum().item() for part in ids.split(rows))
    model.train(training)
    return total / ids[:, 1:].numel() / math.log(2)


@torch.no_grad()
def half_lives(model: nn.Module, family: str, ids: torch.Tensor) -> torch.Tensor:
    """Tokens until a head (KDA: a channel) has forgotten half, from its mean log-decay on a text: [layers, heads]."""
    decays: list[torch.Tensor] = []
    current: Any = getattr(modeling_module(family), CHUNK_FUNCTIONS[family][1])
    with replaced(family, recording_decay(current, decays)):
        bits_per_byte(model, ids[:1])
    means = torch.stack([decay.double().mean(dim=(0, 1)).flatten() for decay in decays])
    return math.log(2) / -means.clamp(max=-1e-9)
