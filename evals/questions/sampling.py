"""Sampling whose random numbers belong to a question and repeat, and stops that belong to a row.

A token is drawn by the Gumbel-max trick: the largest of logit/temperature + noise is a draw from the softmax. The
noise at each step comes from the row's own seed, so an answer does not depend on the batch around it, and two arms
see the same noise: they differ only where their logits do, which is what makes a paired difference small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, TopKLogitsWarper, TopPLogitsWarper

from ...quant.rounding import derive_seeds, uniform


class SeededSampling(LogitsProcessor):
    """Add a row's noise to its scores, so that greedy decoding of the sum is sampling at ``temperature``.

    ``seeds``: int64 [B]; ``prompt`` is the number of tokens before the first one generated.
    """

    def __init__(self, seeds: Tensor, prompt: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
        self.seeds = seeds
        self.prompt = prompt
        self.temperature = temperature
        self.warpers: list[Any] = [TopKLogitsWarper(top_k)] if top_k else []
        self.warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.float() / self.temperature
        for warp in self.warpers:
            scores = warp(input_ids, scores)
        step = derive_seeds(self.seeds, input_ids.shape[1] - self.prompt)
        # A multiple of 2**-24, moved off zero by half a unit; its double logarithm needs float64.
        u = uniform(step, scores.shape[1]).double() + 2.0**-25
        return scores.double() - torch.log(-torch.log(u))


class RowStops(StoppingCriteria):
    """Stop each row at its own end-of-text token or stop text, and remember after how many tokens.

    lm-eval's criterion stops a batch when all its rows have met the same stop text; until then finished rows run on.
    """

    def __init__(self, tokenizer: Any, texts: Sequence[str], eos: Sequence[int], prompt: int, rows: int) -> None:
        self.tokenizer = tokenizer
        self.texts = [text for text in texts if text]
        self.eos = set(eos)
        self.prompt = prompt
        self.ends: list[int | None] = [None] * rows
        # A token holds a byte or more, so the last of a stop text is never further back than this.
        self.lookback = max((len(text.encode()) for text in self.texts), default=0) + 1

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # type: ignore[override]
        length = input_ids.shape[1]
        tails = input_ids[:, max(self.prompt, length - self.lookback) :].tolist()
        for row, (tail, end) in enumerate(zip(tails, self.ends, strict=True)):
            if end is None and self._ended(tail):
                self.ends[row] = length - self.prompt
        return torch.tensor([end is not None for end in self.ends], device=input_ids.device)

    def _ended(self, tail: list[int]) -> bool:
        if tail[-1] in self.eos:
            return True
        text = self.tokenizer.decode(tail)
        return any(stop in text for stop in self.texts)
