"""Other people's kernels for the same recurrence, timed beside ours where their package is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from ...kernels.cases import random_tokens
from ...kernels.checks import Check, relative
from ...kernels.inputs import TokenInputs
from ...kernels.standard.reference import standard
from ...kernels.timing import Launcher
from ...quant.spec import LayerSpec

THEIRS = 1e-2
"""Relative error that a peer may have: their outputs are BF16, and their arithmetic is their own."""


class Peer(Protocol):
    note: str

    def missing(self) -> str | None: ...
    def check(self, device: torch.device) -> list[Check]: ...
    def launches(self, batch: int, groups: int, device: torch.device) -> list[Launcher]: ...


class Fla:
    """flash-linear-attention's recurrent kernels, one token from an FP32 state to another.

    They take contiguous states of a batch, not paged slots, and write the new state to another place: the same
    bytes. For Mamba-2 the nearest is simple GLA, with keys and queries repeated for each head and gains multiplied
    into the values beforehand, which is not timed.
    """

    NOTES = {  # noqa: RUF012
        "mamba2": ", in two halves of K, whose outputs a second launch adds",
        "gdn": "",
        "kda": "; a launch of its own clears the outputs first",
    }
    """What fla-core 0.6.0 does besides, which is timed: it is part of their function."""

    FUNCTIONS = {  # noqa: RUF012
        "mamba2": ("fla.ops.simple_gla", "fused_recurrent_simple_gla"),
        "gdn": ("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule"),
        "kda": ("fla.ops.kda", "fused_recurrent_kda"),
    }

    def __init__(self, spec: LayerSpec) -> None:
        self.spec = spec
        self.note = f"contiguous states, written to another place{self.NOTES[spec.family]}"

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        try:
            self._function()
        except (ImportError, AttributeError) as error:
            return f"flash-linear-attention is not usable here ({error}); install the package fla-core"
        return None

    def _function(self) -> Callable[..., Any]:
        module, name = self.FUNCTIONS[self.spec.family]
        return getattr(importlib.import_module(module), name)

    def _call(self, inputs: TokenInputs, state: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs [B, 1, H, V] and the new state [B, H, K, V] of states [B, H, K, V]."""
        keywords = {"initial_state": state, "output_final_state": True, "scale": self.spec.query_scale}
        if self.spec.rules.delta_rule:
            keywords |= {"g": inputs.g, "beta": inputs.beta, "use_qk_l2norm_in_kernel": self.spec.qk_l2norm}
            return self._function()(inputs.q, inputs.k, inputs.v, **keywords)
        return self._function()(inputs.q, inputs.k, inputs.v, g=inputs.g, **keywords)

    def _prepared(self, inputs: TokenInputs, rate: Tensor | None) -> TokenInputs:
        if self.spec.rules.delta_rule:
            return inputs
        assert rate is not None
        repeats = self.spec.heads // self.spec.key_heads
        q, k = (t.repeat_interleave(repeats, 2).contiguous() for t in (inputs.q, inputs.k))
        v = (inputs.v.float() * inputs.beta[..., None]).to(inputs.v.dtype)
        return TokenInputs(q, k, v, inputs.beta, inputs.beta * rate)

    def _rate(self, device: torch.device) -> Tensor | None:
        return -torch.logspace(-1, 0.8, self.spec.heads, device=device) if self.spec.rules.gain_sets_decay else None

    def _states(self, rows: int, seed: int, device: torch.device) -> Tensor:
        shape = (rows, self.spec.heads, self.spec.key_dim, self.spec.value_dim)
        return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device)

    def check(self, device: torch.device) -> list[Check]:
        """Output and state of four rows against the recurrence in float64."""
        inputs, rate = random_tokens(self.spec, 4, seed=3, device=device), self._rate(device)
        state = self._states(4, 0, device)
        exact = state.mT.double().contiguous()
        expected = standard(self.spec, exact, inputs, rate)
        out, new = self._call(self._prepared(inputs, rate), state)
        return [Check("output", relative(out[:, 0], expected), THEIRS), Check("state", relative(new.mT, exact), THEIRS)]

    def launches(self, batch: int, groups: int, device: torch.device) -> list[Launcher]:
        rate = self._rate(device)
        inputs = self._prepared(random_tokens(self.spec, batch, seed=1, device=device), rate)
        kept: dict[int, Any] = {}  # or every launch would write the same memory, which small ones leave in the cache

        def launch(group: int, state: Tensor) -> None:
            kept[group] = self._call(inputs, state)

        return [partial(launch, group, self._states(batch, group, device)) for group in range(groups)]


PEERS: dict[str, Callable[[LayerSpec], Peer]] = {"fla": Fla}
