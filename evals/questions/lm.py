"""lm-eval's HFLM around an attached model, with sampling, stops and lengths of its own for every row."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ...quant.errors import InvalidValueError
from ...quant.rounding import derive_seeds
from .harness import Question, quiet
from .sampling import RowStops, SeededSampling


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. At temperature 0 the likeliest one, and seeds don't matter."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Response:
    """A response, its length in tokens with the token that ended it, and whether the cap ended it."""

    text: str
    tokens: int
    cut_off: bool


class PairedLM(HFLM):
    """HFLM for a model that is loaded and attached already.

    ``respond`` takes a batch of questions with a seed each. Everything around the model's ``generate`` (padding on
    the left, decoding, cutting at stop texts, thinking tokens) is HFLM's.
    """

    def __init__(
        self,
        handle: Any,
        tokenizer: Any,
        *,
        batch_size: int,
        sampling: Sampling | None = None,
        think_end_token: str | None = None,
    ) -> None:
        tokenizer = copy.deepcopy(tokenizer)  # the caller's stays as it is
        if tokenizer.pad_token_id is None and tokenizer.eos_token_id is None and tokenizer.unk_token_id is None:
            # HFLM would add a token, for which the model has no embedding; what stands in padding is masked anyway.
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(0)
        prefix = None
        if tokenizer.bos_token_id is None and tokenizer.eos_token_id is None:
            prefix = tokenizer.pad_token_id
        with quiet():
            super().__init__(
                pretrained=handle.model,
                tokenizer=tokenizer,
                batch_size=batch_size,
                prefix_token_id=prefix,
                think_end_token=think_end_token,
            )
        self.handle = handle
        self.sampling = sampling or Sampling()
        self._seeds: list[Tensor] = []
        self._ends: list[int | None] = []
        self._generated = 0

    def respond(self, batch: Sequence[tuple[Question, Tensor]]) -> list[Response]:
        """Responses to at most ``batch_size`` questions, in their order."""
        order = sorted(range(len(batch)), key=lambda i: self._sort_key(batch[i][0].prompt))
        self._seeds = [batch[i][1] for i in order]
        with quiet():
            texts = self.generate_until([batch[i][0].requests[0] for i in order], disable_tqdm=True)
        responses: list[Any] = [None] * len(batch)
        for i, text, end in zip(order, texts, self._ends, strict=True):
            responses[i] = Response(text, self._generated if end is None else end, end is None)
        return responses

    def choose(self, batch: Sequence[Question]) -> list[list[tuple[float, bool]]]:
        """For each question the log-likelihood of every option, and whether it is what greedy decoding gives.

        Prompt and option are read with the arithmetic of decoding. Read as a prompt they would be exact in every arm.
        """
        requests = [request for question in batch for request in question.requests]
        self.handle.teacher_forced = True
        try:
            with quiet():
                values = iter(self.loglikelihood(requests, disable_tqdm=True))
        finally:
            self.handle.teacher_forced = False
        return [[next(values) for _ in question.requests] for question in batch]

    def seed_of(self, question: Question, repeat: int, stream: str = "answer") -> Tensor:
        """The seed [] int64 of one answer: the same in every arm, on every machine, in every batch."""
        return derive_seeds(self.sampling.seed, stream, question.id, repeat)

    def check_lengths(self, questions: Sequence[Question], cap: int) -> None:
        """HFLM cuts off the start of prompts that do not fit; raise InvalidValueError instead."""
        room = self.max_length - cap
        if room < 1:
            raise InvalidValueError(
                f"--max-gen-toks is {cap:,}, and the model's context {self.max_length:,} tokens; ask for fewer"
            )
        lengths = [len(self.tok_encode(question.prompt)) for question in questions]
        length = max(lengths)
        longest = questions[lengths.index(length)]
        if length > room:
            raise InvalidValueError(
                f"question {longest.id[:12]} has {length:,} tokens, and with --max-gen-toks {cap:,} the model's "
                f"context of {self.max_length:,} leaves room for {max(room, 0):,}; ask for fewer tokens"
            )

    @property
    def eos_ids(self) -> list[int]:
        """The tokens that end a text, as the model's generation configuration and the tokenizer say."""
        config = getattr(self.model, "generation_config", None)
        given = getattr(config, "eos_token_id", None)
        ids = set(given if isinstance(given, list) else [given]) | {self.tokenizer.eos_token_id}
        return sorted(i for i in ids if i is not None)

    def tok_decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        """As in HFLM; a tokenizer without an end-of-text token has no text for it."""
        return "" if tokens is None else super().tok_decode(tokens, skip_special_tokens=skip_special_tokens)

    def _sort_key(self, prompt: str) -> tuple[int, str]:
        # that of HFLM.generate_until, whose sort is stable: what comes in this order stays in it
        return -len(self.tok_encode(prompt)), prompt

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        rows, prompt = context.shape
        assert rows == len(self._seeds), "one batch of requests is one call"
        stops = RowStops(self.tokenizer, stop, self.eos_ids, prompt, rows)
        processors = LogitsProcessorList()
        if self.sampling.temperature > 0:
            seeds = torch.stack(self._seeds).to(context.device)
            how = self.sampling
            processors.append(SeededSampling(seeds, prompt, how.temperature, how.top_k, how.top_p))
        with torch.no_grad():
            out = self.model.generate(
                input_ids=context,
                attention_mask=kwargs["attention_mask"],
                max_length=max_length,
                do_sample=False,
                logits_processor=processors,
                stopping_criteria=StoppingCriteriaList([stops]),
                pad_token_id=self.tokenizer.pad_token_id,
                use_cache=True,
            )
        self._ends, self._generated = stops.ends, out.shape[1] - prompt
        return out
