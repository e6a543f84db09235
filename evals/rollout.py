"""Driving a model through tokens that are already known, one chunk at a time, under one arm."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..adapters import cache_argument

Progress = Callable[[str, int, int], None]
"""Called as (what is running, tokens done, tokens in all)."""

CHUNK = 1024
"""Tokens per forward call of the scan engine. Memory is bounded by this, not by the length of the text."""

CUDA_CHUNK = 16384
"""On a GPU, where a call takes as long as its launches, of a model with a small vocabulary."""

LOGITS = 1 << 28
"""Logits of a call on a GPU, at most: 1 GB in float32."""


class Rollout:
    """One arm's pass over the text: a cache, and the policy that its states follow.

    ``policy=None`` is the untouched model: transformers' own functions on plain tensors.
    ``engine`` is ``scan`` (a chunk at a time) or ``step`` (a token at a time, as decode runs).
    """

    def __init__(self, handle: Any, policy: Any, engine: str = "scan") -> None:
        self._handle, self._policy, self._engine = handle, policy, engine
        self._cache_name = cache_argument(handle.model)
        # Some models (Bamba) number a later chunk's tokens from zero again unless they are told.
        self._positions = "position_ids" in inspect.signature(handle.model.forward).parameters
        self._seen = 0
        self.cache: Any = None

    def prefill(self, ids: Tensor, observer: Any = None) -> None:
        """Run a prompt [B, T] exactly, as serving does; its outputs are not evaluated."""
        self._forward(ids, False, observer)

    def advance(self, ids: Tensor, observer: Any = None) -> Tensor:
        """Logits [B, T, vocabulary] of the next tokens ``ids`` [B, T], computed with decode's arithmetic."""
        if self._engine == "scan":
            return self._forward(ids, True, observer)
        return torch.cat([self._forward(ids[:, t : t + 1], True, observer) for t in range(ids.shape[1])], dim=1)

    @torch.inference_mode()
    def _forward(self, ids: Tensor, teacher_forced: bool, observer: Any) -> Tensor:
        handle = self._handle
        handle.use(self._policy)
        handle.teacher_forced = teacher_forced
        given = {} if self.cache is None else {self._cache_name: self.cache}
        if self._positions:
            stop = self._seen + ids.shape[1]
            given["position_ids"] = torch.arange(self._seen, stop, device=ids.device).expand_as(ids)
        self._seen += ids.shape[1]
        handle.observer = observer
        try:
            out = handle.model(input_ids=ids, use_cache=True, **given)
        finally:
            handle.observer = None
        self.cache = getattr(out, self._cache_name)
        return out.logits


def chunks(ids: Tensor, size: int | None = None, vocabulary: int = 0) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Position, inputs [B, T] and next-token targets [B, T] of each chunk of ``ids`` [B, N + 1]; ``size`` tokens each.

    By default CHUNK; on a GPU they double from there on while logits stay below LOGITS. They end at powers of two then,
    which is where a growth over positions wants to be looked at.
    """
    last = ids.shape[1] - 1
    most = CHUNK if size is None else size
    if size is None and ids.is_cuda:
        most = max(CHUNK, min(CUDA_CHUNK, LOGITS // (max(1, vocabulary) * ids.shape[0]) // CHUNK * CHUNK))
    start = 0
    while start < last:
        stop = min(start + min(max(start, CHUNK if size is None else size), most), last)
        yield start, ids[:, start:stop], ids[:, start + 1 : stop + 1]
        start = stop
