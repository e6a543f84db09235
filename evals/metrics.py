"""From logits to evidence: divergence, agreement and perplexity, chunk by chunk.

Nothing of size tokens × vocabulary is kept; a meter holds a few float64 numbers per token.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..quant.errors import InvalidValueError, NonFiniteLogitsError
from .bootstrap import MIN_BLOCK, Floats, block_length, detrended, interval_of_mean
from .buckets import doubling_edges
from .layer_errors import LayerErrorMeter
from .result import KL, Bootstrap, Bucket, Perplexity, TopOne

__all__ = ["Evidence", "KLMeter", "LayerErrorMeter"]

SPANS = 128
"""About how many spans a result keeps the means of, over all its sequences."""

_ELEMENTS_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 26}
_COLUMNS = ("kl", "reverse", "agree", "tied", "nll_reference", "nll_arm")


@dataclass(frozen=True)
class Evidence:
    """What one arm's logits say, in the form that a Result stores."""

    kl: KL
    top1_agreement: TopOne
    ppl: Perplexity | None

    @classmethod
    def nothing(cls) -> Evidence:
        """That of an arm of which no token could be measured: 0 tokens, and 0 for what can't be absent."""
        none = Bootstrap("none", 0, 0, 0, 0)
        kl = KL(mean=0.0, ci95=None, p999=0.0, max=0.0, reverse_mean=0.0, by_position=[], tokens=0, bootstrap=none)
        return cls(kl, TopOne(rate=None, ties=0, tokens=0), None)


class KLMeter:
    """Accumulates one arm's divergence from the reference.

    Log-probabilities are taken in float64 from the logits as they come (pass float32 or better). In float32 the
    rounding of log_softmax's own normaliser, about 1e-7, would pass for a divergence; noise floors lie far below.
    With d = log q − log p, each vocabulary entry adds p·(e^d − 1 − d), which sums to KL(p ‖ q) because p and q sum
    to one, and is never negative: no small negative values arise, so none has to be clipped away.

    ``first_bucket`` is the length of the first position bucket; each further one is twice as long as all before.
    """

    def __init__(self, first_bucket: int = 16, *, resamples: int = 1000, seed: int = 0) -> None:
        self._first_bucket, self._resamples, self._seed = first_bucket, resamples, seed
        self._chunks: dict[int, list[tuple[int, dict[str, Floats]]]] = defaultdict(list)

    def update(
        self, reference_logits: Tensor, arm_logits: Tensor, targets: Tensor | None, start: int, *, sequence: int = 0
    ) -> None:
        """Add a chunk: logits [B, T, vocabulary], targets [B, T] (next tokens; negative or None: not scored).

        ``start`` is the position of the chunk's first token, ``sequence`` the number of the batch's first row.
        Raises InvalidValueError for shapes that do not fit, NaN logits, or an infinite divergence, and its subclass
        NonFiniteLogitsError where the arm's logits are to blame. Nothing of the chunk is then added.
        """
        if reference_logits.shape != arm_logits.shape or arm_logits.dim() != 3:
            raise InvalidValueError(
                f"logits are {tuple(reference_logits.shape)} and {tuple(arm_logits.shape)}; "
                "both must be [batch, tokens, vocabulary]"
            )
        batch, length, vocabulary = arm_logits.shape
        if targets is not None and targets.shape != (batch, length):
            raise InvalidValueError(f"targets are {tuple(targets.shape)}; expected {(batch, length)}")
        reference, arm = reference_logits.reshape(-1, vocabulary), arm_logits.reshape(-1, vocabulary)
        wanted = None if targets is None else targets.reshape(-1).to(arm.device)
        rows = max(1, _ELEMENTS_AT_ONCE.get(arm.device.type, 1 << 21) // max(vocabulary, 1))
        parts = [
            _per_token(reference[i : i + rows], arm[i : i + rows], None if wanted is None else wanted[i : i + rows])
            for i in range(0, batch * length, rows)
        ]
        if not parts:
            return
        table = torch.cat(parts).cpu().numpy().reshape(batch, length, len(_COLUMNS))
        bad = np.argwhere(~np.isfinite(table[:, :, :2]).all(axis=2))
        if len(bad):
            row, at = (int(i) for i in bad[0])
            expected, found = reference_logits[row, at], arm_logits[row, at]
            overflowed = bool((expected.isfinite() & ~found.isfinite()).any() & ~expected.isnan().any())
            kind = NonFiniteLogitsError if overflowed and not bool((expected == math.inf).any()) else InvalidValueError
            raise kind(
                f"the KL divergence of sequence {sequence + row} at position {start + at} is not finite: "
                "the reference's or the arm's logits hold NaN, Inf, or rule out different tokens"
            )
        for row in range(batch):
            columns = {name: np.ascontiguousarray(table[row, :, i]) for i, name in enumerate(_COLUMNS)}
            self._chunks[sequence + row].append((start, columns))

    @property
    def empty(self) -> bool:
        """Whether no token was added."""
        return not self._chunks

    def tables(self) -> dict[int, Floats]:
        """Everything held, [tokens, columns] per sequence, for ``add_table``. Raises where chunks do not join up."""
        self._positions()
        return {
            sequence: np.concatenate(
                [np.stack([columns[name] for name in _COLUMNS], axis=1) for _, columns in sorted(chunks, key=_by_start)]
            )
            for sequence, chunks in self._chunks.items()
        }

    def add_table(self, sequence: int, table: Floats, start: int = 0) -> None:
        """Take in a whole sequence, as ``tables`` gave it."""
        columns = {name: np.ascontiguousarray(table[:, i]) for i, name in enumerate(_COLUMNS)}
        self._chunks[sequence].append((start, columns))

    def add(self, other: KLMeter) -> None:
        """Take in the sequences of another meter."""
        for sequence, chunks in other._chunks.items():
            self._chunks[sequence] += chunks

    def per_token(self, name: str = "kl") -> list[Floats]:
        """One column, per sequence: kl, reverse, agree, tied, nll_reference or nll_arm (NaN where not scored)."""
        return [
            np.concatenate([columns[name] for _, columns in sorted(chunks, key=_by_start)])
            for _, chunks in sorted(self._chunks.items())
        ]

    def result(self, *, bytes_per_token: float | None = None) -> Evidence:
        """The evidence so far. ``bytes_per_token`` of the text (1 for a byte-level model) gives bits per byte."""
        if self.empty:
            raise InvalidValueError("no token was evaluated")
        agree, tied = np.concatenate(self.per_token("agree")), np.concatenate(self.per_token("tied")) > 0
        untied = int((~tied).sum())
        top1 = TopOne(rate=float(agree[~tied].mean()) if untied else None, ties=int(tied.sum()), tokens=untied)
        return Evidence(self._kl(), top1, self._perplexity(bytes_per_token))

    def _positions(self) -> list[Floats]:
        positions = []
        for sequence, chunks in sorted(self._chunks.items()):
            ordered = sorted(chunks, key=_by_start)
            following = ordered[0][0]
            for start, columns in ordered:
                if start != following:
                    raise InvalidValueError(
                        f"sequence {sequence} has a chunk at position {start}; {following} was expected"
                    )
                following += len(columns["kl"])
            positions.append(np.arange(ordered[0][0], following, dtype=np.float64))
        return positions

    def _kl(self) -> KL:
        documents, positions = self.per_token("kl"), self._positions()
        values = np.concatenate(documents)
        residuals = detrended(documents, positions)
        block = block_length(residuals)
        mean = float(values.mean())
        span = max(MIN_BLOCK, -(-len(values) // SPANS))
        return KL(
            mean=mean,
            ci95=_not_below_zero(self._interval(residuals, block, mean)),
            p999=float(np.quantile(values, 0.999)),
            max=float(values.max()),
            reverse_mean=float(np.concatenate(self.per_token("reverse")).mean()),
            by_position=self._by_position(documents, positions, block),
            tokens=len(values),
            by_document=[float(d.mean()) for d in documents],
            span=span,
            by_span=[[float(d[i : i + span].mean()) for i in range(0, len(d), span)] for d in documents],
            bootstrap=Bootstrap(
                "circular blocks within a sequence, of residuals around the trend over position",
                block,
                round(len(values) / block),
                self._resamples,
                self._seed,
            ),
        )

    def _by_position(self, documents: Sequence[Floats], positions: Sequence[Floats], block: int) -> list[Bucket]:
        stop = int(max(p[-1] for p in positions)) + 1
        buckets = []
        for low, high in doubling_edges(stop, self._first_bucket):
            inside = [d[(p >= low) & (p < high)] for d, p in zip(documents, positions, strict=True)]
            inside = [d for d in inside if len(d)]
            if not inside:
                continue
            values = np.concatenate(inside)
            interval = self._interval(inside, min(block, max(len(d) for d in inside)))
            buckets.append(Bucket(low, high, float(values.mean()), _not_below_zero(interval), len(values)))
        return buckets

    def _perplexity(self, bytes_per_token: float | None) -> Perplexity | None:
        scored = [~np.isnan(d) for d in self.per_token("nll_arm")]
        if not any(s.any() for s in scored):
            return None
        reference, arm = (
            [d[s] for d, s in zip(self.per_token(name), scored, strict=True)] for name in ("nll_reference", "nll_arm")
        )
        reference_mean, arm_mean = (float(np.concatenate(d).mean()) for d in (reference, arm))
        extra = [a - r for a, r in zip(arm, reference, strict=True) if len(a)]
        centred = [d - (arm_mean - reference_mean) for d in extra]
        interval = self._interval(extra, block_length(centred))
        bits, reference_bits = arm_mean / math.log(2), reference_mean / math.log(2)
        return Perplexity(
            arm=_exp(arm_mean),
            reference=_exp(reference_mean),
            ratio=_exp(arm_mean - reference_mean),
            ratio_ci95=None if interval is None else (_exp(interval[0]), _exp(interval[1])),
            bits_per_token=bits,
            reference_bits_per_token=reference_bits,
            bits_per_byte=None if bytes_per_token is None else bits / bytes_per_token,
            reference_bits_per_byte=None if bytes_per_token is None else reference_bits / bytes_per_token,
        )

    def _interval(
        self, documents: Sequence[Floats], block: int, mean: float | None = None
    ) -> tuple[float, float] | None:
        return interval_of_mean(documents, block, resamples=self._resamples, seed=self._seed, mean=mean)


@torch.inference_mode()
def _per_token(reference: Tensor, arm: Tensor, targets: Tensor | None) -> Tensor:
    """[rows, vocabulary] twice to [rows, len(_COLUMNS)] in float64."""
    log_p, log_q = (torch.log_softmax(x.double(), dim=-1) for x in (reference, arm))
    tied = [(x == x.amax(-1, keepdim=True)).sum(-1) > 1 for x in (reference, arm)]
    agree = reference.argmax(-1) == arm.argmax(-1)
    if targets is None:
        nll = [torch.full_like(log_p[:, 0], math.nan)] * 2
    else:
        at = targets.clamp(min=0).long().unsqueeze(-1)
        nll = [torch.where(targets < 0, math.nan, -x.gather(-1, at).squeeze(-1)) for x in (log_p, log_q)]
    columns = [_divergence(log_p, log_q), _divergence(log_q, log_p), agree.double(), (tied[0] | tied[1]).double(), *nll]
    return torch.stack(columns, dim=-1)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p ‖ q) over the last axis, each entry as p·(e^d − 1 − d) ≥ 0 with d = log q − log p."""
    p, q = log_p.exp(), log_q.exp()
    d = torch.where(log_p == log_q, 0.0, log_q - log_p)  # the same token ruled out (−Inf) on both sides adds nothing
    series = d * d * (1 / 2 + d * (1 / 6 + d * (1 / 24 + d / 120)))  # below 1e-3, where e^d − 1 − d would cancel
    near = p * torch.where(d.abs() < 1e-3, series, torch.expm1(d) - d)
    far = q - p - torch.where(p > 0, p * d, 0.0)
    return torch.where(d.abs() < 1, near, far).sum(-1)


def _not_below_zero(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (max(interval[0], 0.0), interval[1])


def _exp(value: float) -> float:
    return math.exp(min(value, 700.0))


def _by_start(chunk: tuple[int, dict[str, Floats]]) -> int:
    return chunk[0]
