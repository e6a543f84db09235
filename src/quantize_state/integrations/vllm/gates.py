"""From what vLLM's layers hand to their decode step to the inputs of the recurrence: gains and decays in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.inputs import TokenInputs


def mamba2_inputs(x: Tensor, dt: Tensor, B: Tensor, C: Tensor, dt_bias: Tensor) -> TokenInputs:
    """One token per row: x [B, H, V]; dt [B, H] before bias and softplus; B, C [B, G, K]; dt_bias [H]."""
    delta = F.softplus(dt.float() + dt_bias.float())
    return _tokens(q=C, k=B, v=x, beta=delta)


def gdn_inputs(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> TokenInputs:
    """One token per row: q, k [B, Hk, K]; v [B, H, V]; a, b [B, H] raw; A_log, dt_bias [H]."""
    g = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return _tokens(q, k, v, beta=b.float().sigmoid(), g=g)


def kda_inputs(
    q: Tensor, k: Tensor, v: Tensor, raw_g: Tensor, raw_beta: Tensor, A_log: Tensor, dt_bias: Tensor,
    lower_bound: float | None = None,
) -> TokenInputs:  # fmt: skip
    """One token per row: q, k, v, raw_g [B, H, K]; raw_beta [B, H]; A_log [H]; dt_bias [H·K].

    The log-decay is −e^A·softplus(g + bias); with a lower bound (a safe gate) it is bound·σ(e^A·(g + bias)).
    """
    biased = raw_g.float() + dt_bias.float().view(raw_g.shape[1:])
    rate = A_log.float().exp()[:, None]
    g = -rate * F.softplus(biased) if lower_bound is None else lower_bound * torch.sigmoid(rate * biased)
    return _tokens(q, k, v, beta=raw_beta.float().sigmoid(), g=g)


def _tokens(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None) -> TokenInputs:
    return TokenInputs(q[:, None], k[:, None], v[:, None], beta[:, None], None if g is None else g[:, None])
