"""The scan on a GPU: three launches for a piece of windows, of which one alone is sequential.

1. ``window_terms`` (terms.py): the window algebra, all windows and heads at once.
2. ``carry_kernel``: the recurrence. A program holds V rows of one head in registers through all windows of the piece,
   folds, rounds where the checkpoint is not FP32, and writes the state that each window starts from, and the outputs
   of the tokens that flush. Rows of V are independent, so a head is cut into tiles that run side by side, but where
   nvfp4 has one scale for all of them.
3. ``read_kernel``: the outputs of all other tokens, from these states as the read copy would hold them, all windows
   and heads at once. A read copy never enters the recurrence, so none of this waits for the window before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...quant.policy import StatePolicy
from ...quant.rounding import stream_keys
from ...quant.spec import LayerSpec
from ...quant.state import DecodeState
from ..device import tile
from ..device.codec import hadamard, tile_amax, turned
from ..device.dot import dot_fp32
from ..device.fake import fake_quantize, uniform
from ..device.targets import tl, triton, unavailable
from ..device.views import rotation_size
from ..inputs import TokenInputs
from ..launch import find_launch, isa_of, run
from .terms import token_terms, window_terms

PIECE_BYTES = 1 << 30
"""Bound of what a piece holds at once: coefficients of its windows, and the states that they start from."""

MAX_WINDOW = 64

EXACT_CHUNK = 16
"""Tokens per fold of an FP32 recurrence that keeps no ring: the window that the kernels are quickest at."""


@triton.jit
def _checkpoint(
    b_s, o_s, p_keys, FORMAT: tl.constexpr, RULE: tl.constexpr, ROTATE: tl.constexpr, STOCHASTIC: tl.constexpr
):  # fmt: skip
    """What a checkpoint in FORMAT holds of b_s [R, K], whose elements have the numbers o_s in their head."""
    if ROTATE > 1:
        b_s = hadamard(b_s, ROTATE)
    b_random = 0.0
    if STOCHASTIC:
        b_random = uniform(o_s, tl.load(p_keys), tl.load(p_keys + 1))
    b_top = tile_amax(b_s) if FORMAT == "nvfp4" else 0.0
    b_s = fake_quantize(b_s, b_top, b_random, FORMAT, RULE, STOCHASTIC)
    if ROTATE > 1:
        b_s = hadamard(b_s, ROTATE)
    return b_s


@triton.jit
def _rows_dot(b_s, p_x, o_l, L, ISA: tl.constexpr):
    """b_s [R, K] times rows o_l of p_x [L, K], zero from L on: [R, LP]. A large tile by halves of its columns: the
    parts of a whole one would not fit into registers beside it."""
    R: tl.constexpr = b_s.shape[0]
    K: tl.constexpr = b_s.shape[1]
    if R * K > 8192:
        b_a, b_b = tl.split(tl.permute(tl.reshape(b_s, [R, 2, K // 2]), (0, 2, 1)))
        o_x = o_l[:, None] * K + tl.arange(0, K // 2)[None, :]
        b_x = tl.load(p_x + o_x, mask=(o_l < L)[:, None], other=0.0)
        b_y = dot_fp32(b_a, tl.trans(b_x), ISA)
        b_x = tl.load(p_x + K // 2 + o_x, mask=(o_l < L)[:, None], other=0.0)
        return b_y + dot_fp32(b_b, tl.trans(b_x), ISA)
    else:
        o_x = o_l[:, None] * K + tl.arange(0, K)[None, :]
        return dot_fp32(b_s, tl.trans(tl.load(p_x + o_x, mask=(o_l < L)[:, None], other=0.0)), ISA)


@triton.jit(do_not_specialize=["W", "I", "T", "L"])
def carry_kernel(
    p_state, p_ended,  # [B, H, V, K] float32, one tensor: the state at the start; at the end the last folded one
    p_starts,  # [W, B, H, V, K] float32
    p_decay, p_x, p_p, p_query,  # terms.py
    p_v,  # [B, T, H, V]
    p_keys,  # [W, B, H, 2] int32: keys of the stochastic rounding that comes before each window
    p_y,  # [B, T, H, V] float32
    s_vb, s_vt, s_yb, s_yt,
    W, I, T, L, H, V, BH,
    K: tl.constexpr, LP: tl.constexpr, R: tl.constexpr, MAMBA2: tl.constexpr, CHANNEL: tl.constexpr,
    FORMAT: tl.constexpr, RULE: tl.constexpr, ROTATE: tl.constexpr, STOCHASTIC: tl.constexpr,
    STAGES: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B · H, V / R), R >= V for nvfp4. LP: L padded to at least 16, or 1 for windows of one token, which store
    no starts. The state is rounded to the checkpoint's FORMAT before every window from I on: before the first window
    of all it is a checkpoint already."""
    i_bh = tl.program_id(0)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    o_v = tl.program_id(1) * R + tl.arange(0, R)
    o_k = tl.arange(0, K)
    o_l = tl.arange(0, LP)
    m_v = o_v < V
    m_s = m_v[:, None]
    o_s = o_v[:, None] * K + o_k[None, :]
    p_v += i_b * s_vb + i_h * V
    p_y += i_b * s_yb + i_h * V
    b_s = tl.load(p_state + i_bh.to(tl.int64) * (V * K) + o_s, mask=m_s, other=0.0)
    for i_w in tl.range(0, W, num_stages=STAGES):
        i_w = tl.cast(i_w, tl.int64)
        i = i_w * BH + i_bh
        i_start = i_w * L
        if FORMAT != "fp32":  # noqa: SIM102 (known at compile time, which the next is not)
            if i_w >= I:
                b_s = _checkpoint(b_s, o_s, p_keys + 2 * i, FORMAT, RULE, ROTATE, STOCHASTIC)
        b_decay = tl.load(p_decay + i * K + o_k)[None, :] if CHANNEL else tl.load(p_decay + i)
        if LP == 1:
            b_u = tl.load(p_v + i_start * s_vt + o_v, mask=m_v, other=0.0).to(tl.float32)
            if not MAMBA2:
                b_u -= tl.sum(b_s * tl.load(p_x + i * K + o_k)[None, :], axis=1)
            b_new = b_u[:, None] * tl.load(p_p + i * K + o_k)[None, :]
        else:
            tl.store(p_starts + i * (V * K) + o_s, b_s, mask=m_s)
            o_lk = i * (L * K) + o_l[:, None] * K + o_k[None, :]
            m_l = (o_l < L) & (i_start + o_l < T)
            o_u = (i_start + o_l[None, :]) * s_vt + o_v[:, None]
            b_u = tl.load(p_v + o_u, mask=m_l[None, :] & m_s, other=0.0).to(tl.float32)
            if not MAMBA2:
                b_u -= _rows_dot(b_s, p_x + i * (L * K), o_l, L, ISA)
            b_new = dot_fp32(b_u, tl.load(p_p + o_lk, mask=(o_l < L)[:, None], other=0.0), ISA)
        b_s = tl.fma(b_s, tl.broadcast_to(b_decay, b_s.shape), b_new)
        b_y = tl.sum(b_s * tl.load(p_query + i * K + o_k)[None, :], axis=1)
        tl.store(p_y + (tl.minimum(i_start + L, T) - 1) * s_yt + o_v, b_y, mask=m_v)
    tl.store(p_ended + i_bh.to(tl.int64) * (V * K) + o_s, b_s, mask=m_s)


@triton.jit(do_not_specialize=["T", "L"])
def read_kernel(
    p_starts,  # [W, B, H, V, K] float32
    p_theta, p_c,  # [W, B, H, L, K], [W, B, H, L, L] float32
    p_columns,  # column scales of the copy [H, K]
    p_v, p_y,  # [B, T, H, V]
    s_vb, s_vt, s_yb, s_yt,
    T, L, H, V, BH,
    K: tl.constexpr, LP: tl.constexpr, R: tl.constexpr,
    FORMAT: tl.constexpr, RULE: tl.constexpr, BALANCED: tl.constexpr, ROTATE: tl.constexpr,
    ENCODED: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (B · H, W): y = Q(S₀)·Θ + Vᵀ·C of all tokens but the last of each window. ENCODED: starts are Q(S₀)
    already, in the copy's units."""
    i_bh = tl.program_id(0)
    i_w = tl.program_id(1)
    i_b = (i_bh // H).to(tl.int64)
    i_h = i_bh % H
    i = i_w.to(tl.int64) * BH + i_bh
    i_start = i_w.to(tl.int64) * L
    i_used = tl.minimum(L, T - i_w * L)
    o_l = tl.arange(0, LP)
    o_k = tl.arange(0, K)
    m_l = o_l < i_used
    p_starts += i * (V * K)
    p_v += i_b * s_vb + i_start * s_vt + i_h * V
    p_y += i_b * s_yb + i_start * s_yt + i_h * V
    p_columns += i_h * K
    b_top = 0.0
    if FORMAT == "nvfp4" and not ENCODED:
        for i_v in range(0, V, R):
            o_v = i_v + tl.arange(0, R)
            b_s = tl.load(p_starts + o_v[:, None] * K + o_k[None, :], mask=(o_v < V)[:, None], other=0.0)
            b_top = tl.maximum(b_top, tile_amax(turned(b_s, p_columns, BALANCED, ROTATE)))
    m_lk = (o_l < L)[:, None]
    b_theta = tl.load(p_theta + i * (L * K) + o_l[:, None] * K + o_k[None, :], mask=m_lk, other=0.0)
    if BALANCED:
        b_theta *= tl.load(p_columns + o_k)[None, :]
    if ROTATE > 1:
        b_theta = hadamard(b_theta, ROTATE)
    m_c = (o_l < L)[:, None] & (o_l < L)[None, :]
    b_c = tl.load(p_c + i * (L * L) + o_l[:, None] * L + o_l[None, :], mask=m_c, other=0.0)
    for i_v in range(0, V, R):
        o_v = i_v + tl.arange(0, R)
        m_v = o_v < V
        b_s = tl.load(p_starts + o_v[:, None] * K + o_k[None, :], mask=m_v[:, None], other=0.0)
        if not ENCODED:
            b_s = turned(b_s, p_columns, BALANCED, ROTATE)
            b_s = fake_quantize(b_s, b_top, 0.0, FORMAT, RULE, False)
        b_v = tl.load(p_v + o_l[:, None] * s_vt + o_v[None, :], mask=m_l[:, None] & m_v[None, :], other=0.0)
        b_y = dot_fp32(b_theta, tl.trans(b_s), ISA) + dot_fp32(b_c, b_v.to(tl.float32), ISA)
        m_y = (o_l < i_used - 1)[:, None] & m_v[None, :]
        tl.store(p_y + o_l[:, None] * s_yt + o_v[None, :], b_y, mask=m_y)


def unsupported(state: DecodeState) -> str | None:
    """Why the scan of this state needs the reference, or None."""
    return unavailable(state.cursor.device) or unsupported_layer(state.spec, state.policy)


def unsupported_layer(spec: LayerSpec, policy: StatePolicy) -> str | None:
    """Why there is no scan kernel for such a layer, or None."""
    if reason := tile.lacks(policy):
        return reason
    if policy.window > MAX_WINDOW:
        return f"the scan kernels hold windows of up to {MAX_WINDOW} tokens, not {policy.window}"
    if spec.key_dim & (spec.key_dim - 1) or not 32 <= spec.key_dim <= 256:
        return f"key_dim must be a power of two from 32 to 256, not {spec.key_dim}"
    return None


@dataclass(frozen=True)
class Terms:
    """Coefficients of ``windows`` windows of ``length`` tokens; kernels/scan/terms.py."""

    decay: Tensor
    x: Tensor
    p: Tensor
    theta: Tensor
    c: Tensor
    query: Tensor

    @classmethod
    def allocate(cls, spec: LayerSpec, windows: int, length: int, rows: int, device: torch.device) -> Terms:
        def empty(*shape: int) -> Tensor:
            return torch.empty(windows, rows, spec.heads, *shape, device=device)

        key_dim = spec.key_dim
        keys = (length, key_dim)
        nothing = torch.empty(1, device=device)
        reads = length > 1
        return cls(
            decay=empty(key_dim if spec.rules.decay == "channel" else 1),
            x=empty(*keys) if spec.rules.delta_rule else nothing,
            p=empty(*keys),
            theta=empty(*keys) if reads else nothing,
            c=empty(length, length) if reads else nothing,
            query=empty(key_dim),
        )


def piece_windows(spec: LayerSpec, length: int, rows: int) -> int:
    """Windows of a piece: what they hold stays below PIECE_BYTES, and a grid takes no more than 65,535."""
    start = spec.value_dim * spec.key_dim if length > 1 else 0
    per_window = start + length * (3 * spec.key_dim + length) + 2 * spec.key_dim
    return min(max(1, PIECE_BYTES // (4 * rows * spec.heads * per_window)), 65_535)


def scan_windows(state: DecodeState, inputs: TokenInputs, slots: Tensor) -> Tensor:
    """``reference.scan_windows`` by kernels: the same arguments, results and changes of ``state``."""
    spec, policy = state.spec, state.policy
    length = EXACT_CHUNK if policy.exact and policy.window == 1 else policy.window
    inputs = inputs.map(_rows_contiguous)
    carried = state.checkpoint[slots].decode()
    copy = None if state.copy is None or length == 1 else state.copy[slots].decode(unrotate=False)
    y = torch.empty(inputs.v.shape, dtype=torch.float32, device=carried.device)
    piece = length * piece_windows(spec, length, inputs.rows)
    for start in range(0, inputs.tokens, piece):
        stop = min(start + piece, inputs.tokens)
        part = inputs.slice(start, stop)
        _piece(state, part, slots, length, carried, copy, y[:, start:stop], first=start == 0)
    state.renew_(carried, slots)
    return y


def _rows_contiguous(t: Tensor) -> Tensor:
    """``t`` with any strides of rows and tokens, what one token holds being contiguous."""
    inner = t[0, 0]
    return t if inner.is_contiguous() else t.contiguous()


def _piece(
    state: DecodeState, inputs: TokenInputs, slots: Tensor, length: int,
    carried: Tensor, copy: Tensor | None, y: Tensor, first: bool,
) -> None:  # fmt: skip
    """A few windows of ``length`` tokens: ``carried`` [B, H, V, K] becomes the last folded state, and ``y``
    [B, T, H, V] is written. The ``first`` piece starts from a checkpoint and reads ``copy`` in its first window."""
    spec, policy, device = state.spec, state.policy, carried.device
    value_dim, key_dim, heads, tokens = spec.value_dim, spec.key_dim, spec.heads, inputs.tokens
    isa, lanes, windows = isa_of(device), inputs.rows * heads, -(-tokens // length)
    padded = 1 if length == 1 else max(16, triton.next_power_of_2(length))
    terms = Terms.allocate(spec, windows, length, inputs.rows, device)
    q, k, v, beta = inputs.q, inputs.k, inputs.v, inputs.beta
    g = beta if inputs.g is None else inputs.g
    rate = beta if state.decay_rate is None else state.decay_rate
    mamba2, channel = not spec.rules.delta_rule, spec.rules.decay == "channel"
    sizes: dict[str, Any] = {"K": key_dim, "MAMBA2": mamba2, "CHANNEL": channel}
    prepare: dict[str, Any] = {"NORM": spec.qk_l2norm, "SCALE": spec.query_scale}
    strides = tuple(t.stride(i) for t in (q, k, beta, g) for i in (0, 1))
    if length == 1:
        launch = find_launch("scan_token_terms", "", value_dim, key_dim, isa, lanes)
        run(
            token_terms, (lanes, triton.cdiv(tokens, launch.rows)), launch,
            q, k, beta, g, rate, terms.decay, terms.x, terms.p, terms.query, *strides,
            tokens, heads, spec.key_heads, lanes, R=launch.rows, **sizes, **prepare,
        )  # fmt: skip
    else:
        launch = find_launch("scan_terms", str(padded), value_dim, key_dim, isa, lanes)
        run(
            window_terms, (lanes, windows), launch,
            q, k, beta, g, rate, terms.decay, terms.x, terms.p, terms.theta, terms.c, terms.query, *strides,
            tokens, length, heads, spec.key_heads, lanes, LP=padded,
            BK=min(launch.columns, key_dim), ISA=isa, **sizes, **prepare,
        )  # fmt: skip

    format, rule, *_ = policy.how(policy.checkpoint)
    launch = find_launch("scan_token_carry" if length == 1 else "scan_carry", format, value_dim, key_dim, isa, lanes)
    whole = padded_rows(value_dim)
    tile = whole if format == "nvfp4" else min(launch.rows, whole)
    position = state.position[slots]
    keys = position
    if policy.stochastic:
        begins = position + torch.arange(windows, device=device)[:, None] * length
        keys = torch.stack(stream_keys(state.rounding_seeds(begins.flatten())), dim=-1)
    starts = carried.new_empty(windows, *carried.shape) if length > 1 else carried
    run(
        carry_kernel, (lanes, triton.cdiv(value_dim, tile)), launch,
        carried, carried, starts, terms.decay, terms.x, terms.p, terms.query, v, keys, y,
        v.stride(0), v.stride(1), y.stride(0), y.stride(1),
        windows, int(first), tokens, length, heads, value_dim, lanes, LP=padded, R=tile,
        FORMAT=format, RULE=rule, ROTATE=rotation_size(state.checkpoint),
        STOCHASTIC=policy.stochastic, STAGES=launch.stages, ISA=isa,
        enable_fp_fusion=format == "fp32", **sizes,
    )  # fmt: skip
    state.position[slots] = position + tokens
    if length == 1:
        return
    _read(state, inputs, length, starts, terms, y)
    if first and copy is not None:  # after the launch above, which has quantised the first window's start as well
        _read(state, inputs.slice(0, length), length, copy, terms, y, encoded=True)


def _read(
    state: DecodeState, inputs: TokenInputs, length: int, starts: Tensor, terms: Terms, y: Tensor, encoded: bool = False
) -> None:
    """Outputs of the windows of ``inputs`` from ``starts`` [W, B, H, V, K], or ``encoded`` ones (decoded, in the copy's
    units)."""
    spec, source = state.spec, state.read_source
    lanes, v = inputs.rows * spec.heads, inputs.v
    isa = isa_of(y.device)
    format = "fp32" if state.copy is None else source.format
    columns = None if state.copy is None else state.copy.columns
    size = "long" if length > 16 else "fp32" if encoded else format
    launch = find_launch("scan_read", size, spec.value_dim, spec.key_dim, isa, lanes)
    run(
        read_kernel, (lanes, -(-inputs.tokens // length)), launch,
        starts, terms.theta, terms.c, terms.c if columns is None else columns,
        v, y, v.stride(0), v.stride(1), y.stride(0), y.stride(1),
        inputs.tokens, length, spec.heads, spec.value_dim, lanes,
        K=spec.key_dim, LP=max(16, triton.next_power_of_2(length)), R=min(launch.rows, padded_rows(spec.value_dim)),
        FORMAT=format, RULE=source.scale_rule,
        BALANCED=columns is not None, ROTATE=rotation_size(state.copy), ENCODED=encoded, ISA=isa,
        enable_fp_fusion=False,
    )  # fmt: skip


def padded_rows(value_dim: int) -> int:
    return max(16, triton.next_power_of_2(value_dim))
