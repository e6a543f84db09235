"""The window algebra (docs/window-algebra.md): from the raw inputs of a window to its read and fold coefficients.

This is all that differs between layer families, and it is small: L × K per head. Everything is written for a
batch of windows with any leading axes ``*``; heads come before tokens here, [*, H, L, …].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...quant.spec import LayerSpec
from ..inputs import TokenInputs

L2_NORM_EPS = 1e-6
"""The epsilon of transformers' and fla's l2norm of queries and keys."""


@dataclass(frozen=True)
class Window:
    """The tokens of a window as the recurrence sees them: normalised, one key per head, log-decays summed.

    ``q``, ``k`` [*, H, L, K]; ``v`` [*, H, L, V]; ``beta`` [*, H, L]; ``from_start`` [*, H, L, 1 or K] is
    e^{G_t}, the decay from the checkpoint to token t, ``to_end`` [*, H, L, 1 or K] is e^{G_h − G_j}, from token j
    to the last. ``b`` [*, H, L, L] is B, the queries' dot products with the decayed keys, zero above the diagonal.
    ``unit_lower`` [*, H, L, L] is I + A with A[t, j] = β_t·k_tᵀ·D_tj·k_j below the diagonal; None for Mamba-2.
    """

    spec: LayerSpec
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    from_start: Tensor
    to_end: Tensor
    b: Tensor
    unit_lower: Tensor | None


@dataclass(frozen=True)
class ReadTerms:
    """y = S₀·Θ + Vᵀ·C for each query: ``theta`` [*, H, T, K], ``c`` [*, H, T, L]."""

    theta: Tensor
    c: Tensor


@dataclass(frozen=True)
class FoldTerms:
    """S_h = S₀·diag(decay) + (Vᵀ − S₀·Xᵀ)·P with P = Mᵀ·W.

    ``decay`` [*, H, 1 or K]; ``x`` [*, H, L, K], None where the write does not look at the state (Mamba-2);
    ``p`` [*, H, L, K].
    """

    decay: Tensor
    x: Tensor | None
    p: Tensor


def make_window(
    spec: LayerSpec,
    inputs: TokenInputs,
    *,
    decay_rate: Tensor | None = None,
    used: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Window:
    """Prepare the tokens of a batch of windows.

    Args:
        inputs: tokens with shapes [*, L, heads, …] (one or more leading axes).
        decay_rate: Mamba-2's A, [H], negative.
        used: how many rows of each window hold tokens, [*]; the rest is ignored whatever it contains.
        dtype: of the arithmetic, float32 or float64.
    """
    beta = inputs.beta.to(dtype)
    if inputs.g is not None:
        g = inputs.g.to(dtype)
    else:
        assert decay_rate is not None, "Mamba-2 needs its decay_rate"
        g = beta * decay_rate.to(dtype)
    q, k, v = inputs.q.to(dtype), inputs.k.to(dtype), inputs.v.to(dtype)
    if used is not None:
        row = torch.arange(beta.shape[-2], device=beta.device)
        live = (row < used[..., None])[..., None]  # [*, L, 1]
        beta, v = torch.where(live, beta, 0), torch.where(live[..., None], v, 0)
        q, k = torch.where(live[..., None], q, 0), torch.where(live[..., None], k, 0)
        g = torch.where(live if g.dim() == beta.dim() else live[..., None], g, 0)
    if spec.qk_l2norm:
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + L2_NORM_EPS)
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + L2_NORM_EPS)
    if spec.query_scale != 1.0:
        q = q * spec.query_scale
    if spec.heads != spec.key_heads:
        repeats = spec.heads // spec.key_heads
        q, k = q.repeat_interleave(repeats, dim=-2), k.repeat_interleave(repeats, dim=-2)
    q, k, v = (t.transpose(-3, -2) for t in (q, k, v))
    beta = beta.transpose(-2, -1)
    g = g.transpose(-2, -1)[..., None] if g.dim() == beta.dim() else g.transpose(-3, -2)
    # Each G_t − G_j is a sum of its own terms, not a difference of two long sums, so a strong decay inside the window
    # costs later tokens no precision and −inf is allowed.
    between = _sums_between(g).exp_()
    unit_lower = None
    if spec.rules.delta_rule:
        b, a = _decayed_dots((q, k), k, between)
        unit_lower = (beta[..., None] * a).tril_(-1).add_(torch.eye(a.shape[-1], dtype=dtype, device=a.device))
    else:
        (b,) = _decayed_dots((q,), k, between)
    return Window(spec, q, k, v, beta, g.cumsum(-2).exp_(), between[..., -1, :, :], b.tril(), unit_lower)


def _sums_between(g: Tensor) -> Tensor:
    """Σ g_i over j < i ≤ t as [*, L(t), L(j), D] from g [*, L, D]; zero where j ≥ t.

    As a product with a matrix of zeros and ones, a window at a time, so that a window's bits do not depend on how
    many are computed with it. A log-decay of −inf becomes −1e30, of which the same is left: nothing.
    """
    length = g.shape[-2]
    index = torch.arange(length, device=g.device)
    inside = (index[None, :, None] < index) & (index <= index[:, None, None])  # [t, j, i]
    flat = g.clamp(min=-1e30).reshape(-1, length, g.shape[-1])
    sums = torch.bmm(inside.to(g.dtype).view(1, length * length, length).expand(len(flat), -1, -1), flat)
    return sums.view(*g.shape[:-2], length, length, g.shape[-1])


def _decayed_dots(lefts: tuple[Tensor, ...], right: Tensor, between: Tensor) -> tuple[Tensor, ...]:
    """left_tᵀ·diag(e^{G_t−G_j})·right_j as [*, L, L] for each of ``lefts``, to be used where j ≤ t."""
    if between.shape[-1] == 1:
        return tuple((left @ right.mT) * between[..., 0] for left in lefts)
    as_seen = between * right[..., None, :, :]  # k_j as token t sees it, [*, t, j, K]
    return (as_seen @ torch.stack(lefts, dim=-1)).unbind(-1)


def read_terms(window: Window, rows: Tensor | None = None) -> ReadTerms:
    """Θ and C of every token of the window, or of the tokens ``rows`` [*, T] of each alone."""
    q, from_start, c = window.q, window.from_start, window.b
    if rows is not None:
        index = rows[..., None, :, None]
        q, from_start, c = (t.take_along_dim(index, dim=-2) for t in (q, from_start, c))
    theta = from_start * q
    if window.unit_lower is None:
        return ReadTerms(theta, c * window.beta[..., None, :])
    c = torch.linalg.solve_triangular(window.unit_lower, c, upper=False, left=False, unitriangular=True)
    c = c * window.beta[..., None, :]
    return ReadTerms(theta - c @ (window.from_start * window.k), c)


def fold_terms(window: Window) -> FoldTerms:
    """What merges the whole window into its checkpoint."""
    p = window.to_end * window.k
    x = None
    if window.unit_lower is not None:
        x = window.from_start * window.k
        p = torch.linalg.solve_triangular(window.unit_lower.mT, p, upper=True, unitriangular=True)
    return FoldTerms(window.from_start[..., -1, :], x, p * window.beta[..., None])


def mixing(window: Window) -> Tensor:
    """M = (I + A)⁻¹·diag(β) of a window of the delta rule, [*, H, L, L]."""
    assert window.unit_lower is not None, "Mamba-2 has no A"
    identity = torch.eye(window.beta.shape[-1], dtype=window.beta.dtype, device=window.beta.device)
    inverse = torch.linalg.solve_triangular(
        window.unit_lower, identity.expand_as(window.unit_lower), upper=False, unitriangular=True
    )
    return inverse * window.beta[..., None, :]
