"""Verifying drafts as engines do it natively: an FP32 state written for every token, of which the accepted one goes on.

The baseline of speculative decoding (docs/speculative.md). T steps of the recurrence in one launch: the state is read
once and stays on chip, and after each token it is written to a slot of its own. The next verification reads the slot of
the last accepted token, so rollback costs nothing but memory and T writes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.errors import InvalidValueError
from ...quant.spec import LayerSpec
from ..device.math import inverse_norm
from ..device.targets import tl, triton
from ..device.views import slot_stride
from ..inputs import TokenInputs
from ..launch import find_launch, isa_of, run
from .triton import decayed, unsupported_layer


@triton.jit
def snapshots_kernel(
    p_state,  # pool of FP32 states [slots, H, V, K]
    p_q, p_k, p_v, p_beta, p_g, p_rate,  # [B, T, Hk, K] twice, [B, T, H, V], [B, T, H], [B, T, H] or [.., K]; A [H]
    p_from, p_to,  # [B], [B, T] int32: slots that are read and written; negative ones are neither
    p_y,  # [B, T, H, V]
    s_state, s_q, s_k, s_v, s_beta, s_g,
    H, Hk,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, T: tl.constexpr,
    MAMBA2: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """Grid (H · V tiles, B): R rows of one head's state, through all T tokens."""
    i_b = tl.program_id(1).to(tl.int64)
    i_from = tl.load(p_from + i_b).to(tl.int64)
    if i_from < 0:
        return
    TILES: tl.constexpr = (V + R - 1) // R
    i_h = tl.program_id(0) // TILES
    i_key = i_h // (H // Hk)
    o_k = tl.arange(0, K)
    o_v = (tl.program_id(0) % TILES) * R + tl.arange(0, R)
    m_v = o_v < V
    o_s = i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_s = tl.load(p_state + i_from * s_state + o_s, mask=m_v[:, None], other=0.0)
    for i_t in tl.static_range(T):
        b_k = tl.load(p_k + i_b * s_k + (i_t * Hk + i_key) * K + o_k)
        b_q = tl.load(p_q + i_b * s_q + (i_t * Hk + i_key) * K + o_k).to(tl.float32)
        b_v = tl.load(p_v + i_b * s_v + (i_t * H + i_h) * V + o_v, mask=m_v, other=0.0)
        b_beta = tl.load(p_beta + i_b * s_beta + i_t * H + i_h)
        if NORM:
            b_q *= inverse_norm(tl.sum(b_q * b_q, axis=0))
        b_q *= SCALE
        if CHANNEL:
            b_g = tl.load(p_g + i_b * s_g + (i_t * H + i_h) * K + o_k)
        elif MAMBA2:
            b_g = tl.load(p_rate + i_h)
        else:
            b_g = tl.load(p_g + i_b * s_g + i_t * H + i_h)
        b_s, b_k, b_u = decayed(b_s, b_k, b_v, b_beta, b_g, MAMBA2, CHANNEL, NORM)
        # the sum is of the decayed state, so that it does not wait for the update: S·q = S'·q + u·(k·q)
        b_y = tl.sum(b_s * b_q[None, :], axis=1) + b_u * tl.sum(b_k * b_q, axis=0)
        b_s += b_u[:, None] * b_k[None, :]
        i_to = tl.load(p_to + i_b * T + i_t).to(tl.int64)
        m_s = o_v < tl.where(i_to >= 0, V, 0)
        tl.store(p_state + i_to * s_state + o_s, b_s, mask=m_s[:, None])
        tl.store(p_y + ((i_b * T + i_t) * H + i_h) * V + o_v, b_y.to(p_y.dtype.element_ty), mask=m_v)


def verify(
    spec: LayerSpec,
    pool: Tensor,
    inputs: TokenInputs,
    source: Tensor,
    targets: Tensor,
    *,
    decay_rate: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """T tokens for each row: outputs [B, T, H, V], of padded rows zeros (or what ``out`` held). Nothing waits.

    Args:
        pool: FP32 states [slots, H, V, K]; any slot stride.
        source: [B] int32, the slot that each row goes on from; −1 for padding.
        targets: [B, T] int32, the slots that get the state after each token; a row's source may be among them, other
            rows' slots must not. A negative one is not written.
    """
    if reason := unsupported_layer(spec, "fp32"):
        raise InvalidValueError(reason)
    batch, tokens = inputs.rows, inputs.tokens
    if targets.shape != (batch, tokens) or source.shape != (batch,):
        raise InvalidValueError(
            f"source {list(source.shape)} and targets {list(targets.shape)} for {batch} rows of {tokens} tokens; "
            f"they must be [{batch}] and [{batch}, {tokens}]"
        )
    if out is None:
        out = torch.zeros(batch, tokens, spec.heads, spec.value_dim, device=inputs.v.device)
    mamba2 = spec.rules.gain_sets_decay
    g = inputs.beta if inputs.g is None else inputs.g
    rate = inputs.beta if decay_rate is None else decay_rate
    launch = find_launch("standard", "", spec.value_dim, spec.key_dim, isa_of(pool.device), batch)
    rows = min(launch.rows, max(16, triton.next_power_of_2(spec.value_dim)))
    run(
        snapshots_kernel, (spec.heads * triton.cdiv(spec.value_dim, rows), batch), launch,
        pool, inputs.q, inputs.k, inputs.v, inputs.beta, g, rate, source, targets.contiguous(), out,
        slot_stride(pool, "states"),
        *(slot_stride(t, n) for t, n in ((inputs.q, "q"), (inputs.k, "k"), (inputs.v, "v"), (inputs.beta, "beta"))),
        slot_stride(g, "g"), spec.heads, spec.key_heads,
        V=spec.value_dim, K=spec.key_dim, R=rows, T=tokens, MAMBA2=mamba2, CHANNEL=spec.rules.decay == "channel",
        NORM=spec.qk_l2norm, SCALE=spec.query_scale,
    )  # fmt: skip
    return out
