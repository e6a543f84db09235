"""The standard FP32 kernel: one token, the state read once and written once, 8 bytes per element.

The baseline of every speed claim, and what a step runs where replay does not pay: at batch 1 to 8 a step is launches
and latency, and this is one launch. It works on the same DecodeState as replay: tokens that a ring holds are applied
first, one after another, in registers. After it the ring is empty and the read copy stale, which the cursor says, so
that the next step by replay renews it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.errors import InvalidValueError
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState
from ..device.math import exp, inverse_norm
from ..device.targets import tl, triton
from ..device.views import check_outputs, slot_stride
from ..inputs import TokenInputs
from ..launch import find_launch, isa_of, run


@triton.jit
def decayed(
    b_s, b_k, b_v, b_beta, b_g,
    MAMBA2: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """The tile b_s [R, K] after a token's decay, its key [K], and u [R], what the key is multiplied by for each row.
    b_g: the token's log-decay, [K] or one number; Mamba-2: A."""
    b_k = b_k.to(tl.float32)
    b_u = b_v.to(tl.float32)
    b_beta = b_beta.to(tl.float32)
    if NORM:
        b_k *= inverse_norm(tl.sum(b_k * b_k, axis=0))
    if CHANNEL:
        b_s *= exp(b_g.to(tl.float32))[None, :]
    elif MAMBA2:
        b_s *= exp(b_beta * b_g)
    else:
        b_s *= exp(b_g.to(tl.float32))
    if not MAMBA2:
        b_u -= tl.sum(b_s * b_k[None, :], axis=1)
    return b_s, b_k, b_beta * b_u


@triton.jit
def standard_kernel(
    p_state,  # FP32 checkpoint [slots, H, V, K]
    p_q, p_k, p_v, p_beta, p_g, p_rate,  # [B, Hk, K] twice, [B, H, V], [B, H], [B, H] or [B, H, K]; Mamba-2: A [H]
    p_ring_k, p_ring_v, p_ring_beta, p_ring_g,
    p_slots, p_cursor, p_position, p_done,  # done [B]: zeros, and zeros again afterwards
    p_x, p_d, p_gate, p_y,  # [B, H, V], [H], [B, H, V], [B, H, V]
    p_status,  # int64 [1]: 1 + slot·H + head of some state that is not finite; never cleared here
    s_state, s_q, s_k, s_v, s_beta, s_g, s_ring_k, s_ring_v, s_ring_beta, s_ring_g, s_cursor, s_position,
    H,
    V: tl.constexpr, K: tl.constexpr, R: tl.constexpr, GROUP: tl.constexpr, EMPTIED: tl.constexpr,
    MAMBA2: tl.constexpr, CHANNEL: tl.constexpr, NORM: tl.constexpr, SCALE: tl.constexpr,
    SKIP: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Grid (H · V tiles, B): R rows of one head's state. Padding returns. EMPTIED: the cursor of a ring afterwards."""
    TILES: tl.constexpr = (V + R - 1) // R
    i_b = tl.program_id(1).to(tl.int64)
    i_slot = tl.load(p_slots + i_b).to(tl.int64)
    i_h = tl.program_id(0) // TILES
    i_key = i_h // GROUP  # a constant: dividing by what is known at the launch alone takes longer than the arithmetic
    o_k = tl.arange(0, K)
    o_v = (tl.program_id(0) % TILES) * R + tl.arange(0, R)
    m_v = o_v < V
    G: tl.constexpr = K if CHANNEL else 1
    o_g = i_h * G + o_k if CHANNEL else i_h
    # the token's inputs are on their way before the state is
    b_q = tl.load(p_q + i_b * s_q + i_key * K + o_k)
    b_k = tl.load(p_k + i_b * s_k + i_key * K + o_k)
    b_v = tl.load(p_v + i_b * s_v + i_h * V + o_v, mask=m_v, other=0.0)
    b_beta = tl.load(p_beta + i_b * s_beta + i_h)
    b_g = tl.load(p_rate + i_h) if MAMBA2 else tl.load(p_g + i_b * s_g + o_g)
    if i_slot < 0:
        return
    p_s = p_state + i_slot * s_state + i_h * (V * K) + o_v[:, None] * K + o_k[None, :]
    b_s = tl.load(p_s, mask=m_v[:, None], other=0.0)

    i_cursor = tl.load(p_cursor + i_slot * s_cursor)
    p_ring_k += i_slot * s_ring_k + i_key * K
    p_ring_v += i_slot * s_ring_v + i_h * V
    p_ring_beta += i_slot * s_ring_beta + i_h
    p_ring_g += i_slot * s_ring_g
    for i_t in tl.range(0, i_cursor, disable_licm=True):  # else every pointer has a register, at no use to most rows
        b_rk = tl.load(p_ring_k + i_t * (H // GROUP * K) + o_k)
        b_rv = tl.load(p_ring_v + i_t * (H * V) + o_v, mask=m_v, other=0.0)
        b_rbeta = tl.load(p_ring_beta + i_t * H)
        b_rg = b_g if MAMBA2 else tl.load(p_ring_g + i_t * (H * G) + o_g)
        b_s, b_rk, b_u = decayed(b_s, b_rk, b_rv, b_rbeta, b_rg, MAMBA2, CHANNEL, NORM)
        b_s += b_u[:, None] * b_rk[None, :]

    b_s, b_k, b_u = decayed(b_s, b_k, b_v, b_beta, b_g, MAMBA2, CHANNEL, NORM)
    b_q = b_q.to(tl.float32)
    if NORM:
        b_q *= inverse_norm(tl.sum(b_q * b_q, axis=0))
    b_q *= SCALE
    # both sums are of the decayed state, so that neither waits for the other: S·q = S'·q + u·(k·q)
    b_y = tl.sum(b_s * b_q[None, :], axis=1) + b_u * tl.sum(b_k * b_q, axis=0)
    b_s += b_u[:, None] * b_k[None, :]
    tl.store(p_s, b_s, mask=m_v[:, None])

    o_y = (i_b * H + i_h) * V + o_v
    b_out = b_y
    if SKIP:
        b_out += tl.load(p_d + i_h).to(tl.float32) * tl.load(p_x + o_y, mask=m_v, other=0.0).to(tl.float32)
    if GATE:
        b_z = tl.load(p_gate + o_y, mask=m_v, other=0.0).to(tl.float32)
        b_out *= b_z / (1.0 + tl.exp(-b_z))
    tl.store(p_y + o_y, b_out.to(p_y.dtype.element_ty), mask=m_v)

    if tl.program_id(0) == 0:
        tl.store(p_position + i_slot * s_position, tl.load(p_position + i_slot * s_position) + 1)
    if i_cursor != EMPTIED:
        # All programs of a row read its cursor, so the last of them changes it: once, when a row comes from replay.
        tl.debug_barrier()
        if tl.atomic_add(p_done + i_b, 1) == tl.num_programs(0) - 1:
            tl.store(p_cursor + i_slot * s_cursor, EMPTIED)
            tl.store(p_done + i_b, 0)
    # Inf and NaN times anything, zero too, are not finite: a bad state shows in the outputs, at no cost
    if (tl.sum(tl.abs(b_y), axis=0) < float("inf")) == 0:
        b_sum = tl.sum(tl.sum(tl.abs(b_s), axis=1), axis=0)
        tl.store(p_status, i_slot * H + i_h + 1, mask=(b_sum < float("inf")) == 0)


def unsupported_layer(spec: LayerSpec, checkpoint: str) -> str | None:
    """Why the kernel cannot run such a layer, or None. Window and read format do not matter to it."""
    if checkpoint != "fp32":
        return f"the standard kernel works on an FP32 checkpoint, not {checkpoint}"
    if spec.key_dim & (spec.key_dim - 1) or not 16 <= spec.key_dim <= 256:
        return f"key_dim must be a power of two from 16 to 256, not {spec.key_dim}"
    return None


def step(
    state: DecodeState,
    inputs: TokenInputs,
    slots: Tensor | None = None,
    *,
    out: Tensor | None = None,
    skip: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
    done: Tensor | None = None,
    status: Tensor | None = None,
) -> Tensor:
    """One token for each row, by the recurrence itself: outputs [B, 1, H, V], of padded rows zeros (or what ``out``
    held).

    Checkpoint and position move on, past the tokens in the ring too, which is then empty; the copy is stale until the
    row's next step by replay. Nothing waits for the device, so it can be captured.

    Args:
        slots: [B], −1 for padding; not checked: two rows with one slot race.
        skip: (x [B, 1, H, V], D [H]): adds D·x. ``gate`` [B, 1, H, V]: multiplies by silu(gate), last.
        done, status: int32 [B] zeros and int64 [1], as in ``sequence.Workspace``; the latter names a state that is not
            finite.
    """
    spec, ring, batch, device = state.spec, state.ring, inputs.rows, inputs.v.device
    if reason := unsupported_layer(spec, state.policy.checkpoint):
        raise InvalidValueError(reason)
    if inputs.tokens != 1:
        raise InvalidValueError(f"step takes one token per row and was given {inputs.tokens}")
    slots = torch.arange(batch, dtype=torch.int32, device=device) if slots is None else slots.to(torch.int32)
    shape = (batch, 1, spec.heads, spec.value_dim)
    out = torch.zeros(shape, device=device) if out is None else out
    check_outputs(shape, out, skip, gate)
    done = torch.zeros(batch, dtype=torch.int32, device=device) if done is None else done
    status = torch.zeros(1, dtype=torch.int64, device=device) if status is None else status
    token = {name: t[:, 0] for name, t in vars(inputs).items() if t is not None}
    mamba2 = spec.rules.gain_sets_decay
    names = ("k", "v", "beta", "beta" if mamba2 else "g")
    rate = state.decay_rate if mamba2 else token["beta"]
    x, d = skip if skip is not None else (out, token["beta"])
    launch = find_launch("standard", "", spec.value_dim, spec.key_dim, isa_of(device), batch)
    rows = min(launch.rows, max(16, triton.next_power_of_2(spec.value_dim)))
    checkpoint = state.checkpoint.codes
    run(
        standard_kernel, (spec.heads * triton.cdiv(spec.value_dim, rows), batch), launch,
        checkpoint, token["q"], *(token[n] for n in names), rate, *(ring[n] for n in names),
        slots, state.cursor, state.position, done, x, d, out if gate is None else gate, out, status,
        slot_stride(checkpoint, "checkpoint"), slot_stride(token["q"], "q"),
        *(slot_stride(token[n], n) for n in names), *(slot_stride(ring[n], f"ring {n}") for n in names),
        state.cursor.stride(0), state.position.stride(0), spec.heads,
        V=spec.value_dim, K=spec.key_dim, R=rows, GROUP=spec.heads // spec.key_heads, EMPTIED=state.emptied,
        MAMBA2=mamba2, CHANNEL=spec.rules.decay == "channel", NORM=spec.qk_l2norm, SCALE=spec.query_scale,
        SKIP=skip is not None, GATE=gate is not None,
    )  # fmt: skip
    return out
