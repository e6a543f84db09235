"""The recurrence as it is usually served: the FP32 state read and written at every token."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.spec import LayerSpec
from ...quant.state import PADDING, DecodeState
from ..inputs import TokenInputs
from ..step import folded
from ..window.reference import L2_NORM_EPS


def standard(spec: LayerSpec, state: Tensor, inputs: TokenInputs, decay_rate: Tensor | None = None) -> Tensor:
    """S ← S·diag(e^g)·(I − e·β·k·kᵀ) + β·v·kᵀ of one token, in place; returns y = S·q, [B, H, V].

    ``state`` [B, H, V, K] in float32 or float64, which is then the precision of all arithmetic; ``inputs`` of B rows
    and one token.
    """
    q, k, v, beta = (t[:, 0].to(state.dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.beta))
    if inputs.g is not None:
        g = inputs.g[:, 0].to(state.dtype)
    else:
        assert decay_rate is not None, "Mamba-2 needs its decay_rate"
        g = beta * decay_rate.to(state.dtype)
    if spec.qk_l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + L2_NORM_EPS) for t in (q, k))
    repeats = spec.heads // spec.key_heads
    q, k = ((q * spec.query_scale).repeat_interleave(repeats, 1), k.repeat_interleave(repeats, 1))
    state *= (g[..., None] if g.dim() == beta.dim() else g).exp()[..., None, :]
    if spec.rules.delta_rule:
        v = v - (state @ k[..., None])[..., 0]
    state += (beta[..., None] * v)[..., None] * k[..., None, :]
    return (state @ q[..., None])[..., 0]


def step(state: DecodeState, inputs: TokenInputs, slots: Tensor) -> Tensor:
    """One token for each row on a state that replay shares, as ``standard.triton.step``: outputs [B, 1, H, V]."""
    y = inputs.v.new_zeros(inputs.v.shape, dtype=torch.float32)
    live = slots != PADDING
    index = slots[live].long()
    matrix = folded(state, index)
    y[live, 0] = standard(state.spec, matrix, inputs.rows_at(live), state.decay_rate)
    state.checkpoint.codes[index] = matrix
    state.cursor[index] = state.emptied
    state.position[index] += 1
    return y
