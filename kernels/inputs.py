"""What a layer hands to its recurrence: the raw inputs of a few tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..quant.errors import InvalidValueError
from ..quant.spec import LayerSpec


@dataclass(frozen=True)
class TokenInputs:
    """Raw inputs of T tokens for B rows, before any normalisation.

    Shapes (B rows, T tokens, H heads, Hk key heads): ``q``, ``k`` [B, T, Hk, K]; ``v`` [B, T, H, V];
    ``beta`` [B, T, H] (Mamba-2: Δ after softplus, bias and limits); ``g`` log-decay, [B, T, H] for GDN,
    [B, T, H, K] for KDA, None for Mamba-2, whose log-decay is ``decay_rate``·Δ. Mamba-2 calls q C, k B
    and v x.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.v.shape[1]

    @property
    def rows(self) -> int:
        return self.v.shape[0]

    def check(self, spec: LayerSpec) -> None:
        """Raise InvalidValueError where a tensor lacks the shape that ``spec`` asks for: it would broadcast instead."""
        rows, tokens = self.v.shape[:2]
        key, value = (spec.key_heads, spec.key_dim), (spec.heads, spec.value_dim)
        wanted: dict[str, tuple[int, ...] | None] = {"q": key, "k": key, "v": value, "beta": (spec.heads,), "g": None}
        if not spec.rules.gain_sets_decay:
            wanted["g"] = (spec.heads, spec.key_dim) if spec.rules.decay == "channel" else (spec.heads,)
        for name, inner in wanted.items():
            given = getattr(self, name)
            shape = None if inner is None else (rows, tokens, *inner)
            if (None if given is None else tuple(given.shape)) != shape:
                what = "missing" if given is None else f"{list(given.shape)}"
                raise InvalidValueError(
                    f"input {name} of a {spec.rules.title} layer is {what}; it must be "
                    + ("left out" if shape is None else f"{list(shape)}, rows and tokens being those of v")
                )

    def map(self, fn: Callable[[Tensor], Tensor]) -> TokenInputs:
        """The same inputs with ``fn`` applied to every tensor."""
        g = None if self.g is None else fn(self.g)
        return TokenInputs(fn(self.q), fn(self.k), fn(self.v), fn(self.beta), g)

    def rows_at(self, index: Tensor) -> TokenInputs:
        """Rows at ``index``, row numbers or a mask."""
        return self.map(lambda t: t[index])

    def slice(self, start: int, stop: int) -> TokenInputs:
        """Tokens ``start`` to ``stop`` (exclusive)."""
        return self.map(lambda t: t[:, start:stop])


def concat_tokens(parts: list[TokenInputs]) -> TokenInputs:
    """Join inputs along the token axis."""
    if len(parts) == 1:
        return parts[0]
    g = None if parts[0].g is None else torch.cat([p.g for p in parts], dim=1)  # type: ignore[misc]
    q, k, v, beta = (torch.cat([getattr(p, name) for p in parts], dim=1) for name in ("q", "k", "v", "beta"))
    return TokenInputs(q, k, v, beta, g)
