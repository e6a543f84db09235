"""Decode as a few launches without host synchronisation, so that it can be captured.

``step`` is plan, window, readout, fold: the arithmetic of ``kernels.step.step``, on the same DecodeState in place.
Where replay does not pay, at small batches, it can be one launch of the standard kernel instead (kernels/paths.py).
``verify`` takes drafts too, as kernels/speculative.py's, several queries a row from one reading of the copy: plan,
window, and the fold of rows that close their window beside the readout of all others; then, of the rows that closed,
window and readout of their drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..quant.errors import InvalidValueError, NonFiniteStateError, unknown_name
from ..quant.formats import FORMATS
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from .device import tile
from .device.targets import triton, unavailable
from .device.views import check_outputs, rotation_size, slot_stride
from .fold.renew import needs_top, renew
from .fold.triton import fold_kernel
from .inputs import TokenInputs
from .launch import find_launch, isa_of, run
from .paths import Path, standard_pays
from .readout.triton import readout
from .standard.triton import step as standard_step
from .step import renew_mix
from .window.channel_many import channel_window_many
from .window.delta import delta_window
from .window.delta_many import delta_window_many
from .window.mamba2 import mamba2_window
from .window.plan import plan_kernel, verify_plan_kernel

MAX_WINDOW = 64


def unsupported(state: DecodeState) -> str | None:
    """Why the kernels cannot run this state, or None."""
    return unavailable(state.cursor.device) or unsupported_layer(state.spec, state.policy)


def unsupported_layer(spec: LayerSpec, policy: StatePolicy) -> str | None:
    """Why there are no kernels for such a layer, or None."""
    if policy.checkpoint != "fp32" or policy.stochastic:
        return f"the fold kernel keeps an FP32 checkpoint, not {policy.checkpoint}"
    if reason := tile.lacks(policy):
        return reason
    if policy.window > MAX_WINDOW:
        return f"the window kernels hold up to {MAX_WINDOW} tokens, not {policy.window}"
    if spec.key_dim & (spec.key_dim - 1) or not 32 <= spec.key_dim <= 256:
        return f"key_dim must be a power of two from 32 to 256, not {spec.key_dim}"
    return None


@dataclass(frozen=True)
class Workspace:
    """What the launches of a step hand on, for up to ``batch`` rows of ``tokens`` each; kept between steps under CUDA
    graphs. ``row`` and ``used`` are orders of the plan (kernels/window/plan.py), ``later_row`` and ``later_used``
    those for the drafts of rows that a verification flushes, ``verified`` how many of their tokens rows verified,
    ``done`` zeros that the standard kernel counts in."""

    row: Tensor
    used: Tensor
    later_row: Tensor
    later_used: Tensor
    verified: Tensor
    flushing: Tensor
    done: Tensor
    count: Tensor
    theta: Tensor
    gain: Tensor
    c: Tensor
    start: Tensor
    top: Tensor
    status: Tensor

    @classmethod
    def allocate(cls, state: DecodeState, batch: int, *, tokens: int = 1, half: bool | None = None) -> Workspace:
        """Also makes ``state`` ready for the kernels. ``half``: Θ in float16, the default for 4-bit reads; for them
        alone."""
        if state.spec.rules.delta_rule:
            mixing_of(state)
        spec, window, device = state.spec, state.policy.window, state.cursor.device
        four_bit = FORMATS[state.read_source.format].bits == 4
        half = four_bit if half is None else half
        if half and not four_bit:
            raise InvalidValueError(f"Θ is float16 for 4-bit reads alone, not {state.read_source.format}")

        def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        rows = spec.heads if spec.rules.delta_rule else spec.key_heads
        return cls(
            **{
                name: empty(batch, dtype=torch.int32)
                for name in ("row", "used", "later_row", "later_used", "verified", "flushing")
            },
            done=torch.zeros(batch, dtype=torch.int32, device=device),
            count=torch.zeros(1, dtype=torch.int32, device=device),
            theta=empty(batch, tokens, rows, spec.key_dim, dtype=torch.float16 if half else torch.float32),
            gain=empty(batch, tokens, spec.heads),
            c=empty(batch, tokens, spec.heads, window),
            start=empty(batch, spec.heads, window),
            top=empty(batch, spec.heads, dtype=torch.int32),
            status=torch.zeros(1, dtype=torch.int64, device=device),
        )

    def check_finite(self, state: DecodeState) -> None:
        """Raise NonFiniteStateError if a fold has met Inf or NaN. Waits for the device: call it now and then."""
        if place := int(self.status):
            slot, head = divmod(place - 1, state.spec.heads)
            raise NonFiniteStateError(
                f"the state of layer {state.layer!r}, slot {slot}, head {head} holds Inf or NaN; "
                "its inputs overflowed or were already not finite",
                layer=state.layer,
            )


def columns_of(state: DecodeState, w: Workspace) -> Tensor:
    """The copy's column scales [H, K]; where it has none, anything, which is then not read."""
    columns = state.read_source.columns
    return w.gain if columns is None else columns


def step(
    state: DecodeState,
    inputs: TokenInputs,
    slots: Tensor | None = None,
    *,
    path: Path = "replay",
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    skip: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
) -> Tensor:
    """One token for each row: outputs [B, 1, H, V], of padded rows zeros (or what ``out`` held).

    ``path`` as in kernels/paths.py: ``auto`` is for serving, where nothing asks what the copy's error is.
    ``skip`` (x [B, 1, H, V], D [H]) and ``gate`` [B, 1, H, V] as in ``readout``. Slots are not checked: two rows
    with one slot race.
    """
    if inputs.tokens != 1:
        raise InvalidValueError(f"step takes one token per row and was given {inputs.tokens}")
    slots, w, out = _prepared(state, inputs, slots, workspace, out, skip, gate)
    if takes_standard(state, inputs.rows, path):
        return standard_step(state, inputs, slots, out=out, skip=skip, gate=gate, done=w.done, status=w.status)
    plan(state, slots, w)
    window(state, inputs, slots, w)
    with _beside(slots.device) as join:
        fold(state, inputs, slots, w, out, skip=skip, gate=gate)
        renew_folded(state, slots, w)
    readout(
        state.read_source, state.ring["v"], w.theta[: inputs.rows], w.gain[: inputs.rows], w.c[: inputs.rows], slots,
        w.used, out, skip=skip, gate=gate,
    )  # fmt: skip
    join()
    return out


_side_streams: dict[torch.device, Any] = {}


@contextmanager
def _beside(device: torch.device) -> Iterator[Callable[[], None]]:
    """While a graph is captured, what is launched inside runs beside what is launched after it, until the yielded
    function is called. Folds of few rows wait for memory most of the time, and readouts fill it."""
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        yield lambda: None
        return
    if device not in _side_streams:
        _side_streams[device] = torch.cuda.Stream(device, priority=-1)  # before the readout's many programs
    here, side = torch.cuda.current_stream(device), _side_streams[device]
    side.wait_stream(here)
    with torch.cuda.stream(side):
        yield lambda: here.wait_stream(side)


def takes_standard(state: DecodeState, batch: int, path: Path) -> bool:
    """Whether a step of ``batch`` rows is one of the standard kernel. It depends on nothing on the device, so that a
    captured step stays what it is."""
    if path not in get_args(Path):
        raise unknown_name("path", path, get_args(Path))
    if path != "auto":
        return path == "standard"
    return standard_pays(state.spec, state.policy, isa_of(state.cursor.device), batch)


def verify(
    state: DecodeState,
    inputs: TokenInputs,
    slots: Tensor | None = None,
    *,
    early: bool = False,
    workspace: Workspace | None = None,
    out: Tensor | None = None,
    skip: tuple[Tensor, Tensor] | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A certain token and drafts for each row: outputs [B, T, H, V] and how many tokens of each row are verified.

    As kernels/speculative.py's ``verify``, whose ``accept_on_device`` commits them; outputs of tokens that are not
    verified are zeros, or what ``out`` held. A row whose last verification was not accepted verifies nothing.
    """
    slots, w, out = _prepared(state, inputs, slots, workspace, out, skip, gate)
    batch = inputs.rows
    if state.spec.rules.delta_rule:
        mixing_of(state)
    run(
        verify_plan_kernel, (1,), find_launch("plan", "", 0, 0, isa_of(slots.device), batch),
        slots, state.cursor, w.row, w.used, w.later_row, w.later_used, w.verified, w.flushing, w.count,
        state.cursor.stride(0), batch, inputs.tokens,
        L=state.policy.window, BP=min(1024, triton.next_power_of_2(batch)), EARLY=early,
    )  # fmt: skip

    def read(row: Tensor, used: Tensor, rows: tuple[Tensor, Tensor] | None = None) -> None:
        readout(
            state.read_source, state.ring["v"], w.theta[:batch], w.gain[:batch], w.c[:batch], slots, used, out,
            row=row, rows=rows, skip=skip, gate=gate,
        )  # fmt: skip

    window(state, inputs, slots, w)
    with _beside(slots.device) as join:
        fold(state, inputs, slots, w, out, skip=skip, gate=gate)
        renew_folded(state, slots, w)
    read(w.row, w.used)
    join()
    if inputs.tokens > 1:  # the drafts of the rows that closed, for which rings and copies had to be made first
        window(state, inputs, slots, w, row=w.later_row, used=w.later_used)
        read(w.later_row, w.later_used, (w.flushing, w.count))
    return out, w.verified[:batch]


def _prepared(
    state: DecodeState, inputs: TokenInputs, slots: Tensor | None, workspace: Workspace | None, out: Tensor | None,
    skip: tuple[Tensor, Tensor] | None, gate: Tensor | None,
) -> tuple[Tensor, Workspace, Tensor]:  # fmt: skip
    batch, tokens, device = inputs.rows, inputs.tokens, inputs.v.device
    slots = torch.arange(batch, dtype=torch.int32, device=device) if slots is None else slots.to(torch.int32)
    workspace = Workspace.allocate(state, batch, tokens=tokens) if workspace is None else workspace
    shape = (batch, tokens, state.spec.heads, state.spec.value_dim)
    out = torch.zeros(shape, device=device) if out is None else out
    check_outputs(shape, out, skip, gate)
    return slots, workspace, out


def mixing_of(state: DecodeState) -> Tensor:
    """The rows of M of the tokens in the rings: made from the rings when the kernels first meet a state, then kept."""
    if state.mix is None:
        if state.cursor.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise InvalidValueError(
                f"the state of layer {state.layer!r} meets the kernels for the first time while a graph is captured; "
                "allocate its Workspace, or step once, before that"
            )
        length = state.policy.window
        state.mix = torch.zeros(state.slots, state.spec.heads, length, length, device=state.cursor.device)
        everything = torch.arange(state.slots, device=state.cursor.device)
        renew_mix(state, everything, state.fill(everything))
    return state.mix


def plan(state: DecodeState, slots: Tensor, w: Workspace) -> None:
    """Who reads, who flushes, who is padding; cursors and positions move on."""
    if state.spec.rules.delta_rule:
        mixing_of(state)  # while the cursors still say what the rings hold
    batch = slots.shape[0]
    launch = find_launch("plan", "", 0, 0, isa_of(slots.device), batch)
    run(
        plan_kernel, (1,), launch,
        slots, state.cursor, state.position, w.row, w.used, w.flushing, w.count,
        state.cursor.stride(0), state.position.stride(0), batch,
        L=state.policy.window, BP=min(1024, triton.next_power_of_2(batch)),
    )  # fmt: skip


def window(
    state: DecodeState, inputs: TokenInputs, slots: Tensor, w: Workspace,
    *, row: Tensor | None = None, used: Tensor | None = None,
) -> None:  # fmt: skip
    """Append the tokens to the rings, and their rows to M; Θ, gain and C into the workspace. By other orders than
    the workspace's where ``row`` and ``used`` are given."""
    orders = (slots, w.row if row is None else row, w.used if used is None else used)
    columns = columns_of(state, w)
    spec, ring = state.spec, state.ring
    isa = isa_of(slots.device)
    launch = find_launch("window", spec.family, spec.value_dim, spec.key_dim, isa, inputs.rows)
    length, group = state.policy.window, spec.heads // spec.key_heads
    t = tokens_of(inputs)
    common: dict[str, Any] = {
        "K": spec.key_dim, "L": length, "LP": max(16, triton.next_power_of_2(length)),
        "GROUP": group, "VP": triton.next_power_of_2(spec.value_dim), "NORM": spec.qk_l2norm, "SCALE": spec.query_scale,
        "BALANCED": state.read_source.columns is not None, "ROTATE": rotation_size(state.read_source),
        "HALF": w.theta.element_size() == 2, "ISA": isa,
    }  # fmt: skip
    channel = spec.rules.decay == "channel"
    # columns of the keys that a program takes at a time: 64 registers of a warp
    chunk = min(spec.key_dim, 8192 // (common["LP"] * ring["k"].element_size()))
    # heads of a key that one program takes together: as many as a warp can hold M of, which several tokens change
    per = 1 if channel else math.gcd(group, max(1, (1024 if inputs.tokens == 1 else 512) // common["LP"] ** 2))
    grid: tuple[int, ...] = (inputs.rows, spec.heads // per)
    if not spec.rules.delta_rule:
        grid = (inputs.rows, spec.key_heads, triton.cdiv(inputs.tokens, 8))
    names = ("k", "v", "beta", "g") if spec.rules.delta_rule else ("k", "v", "beta")
    rings = tuple(ring[n] for n in names)
    ring_strides = tuple(slot_stride(ring[n], f"ring {n}") for n in names)
    token_strides = tuple(slot_stride(t[n], n) for n in ("q", *names))
    if spec.rules.delta_rule:
        mix = mixing_of(state)
        common["VP"] = triton.next_power_of_2(per * spec.value_dim)
        # a column of M for a thread; but one token of KDA has its channels cross threads, and one warp waits for none
        warps = launch.warps if channel and inputs.tokens == 1 else max(launch.warps, common["LP"] // 32)
        vector = {"VEC": max(1, spec.key_dim // (32 * warps))}
        own: dict[str, Any] = {"CHANNEL": channel} | vector
        kernel = delta_window
        if inputs.tokens > 1:
            kernel = channel_window_many if channel else delta_window_many
            own = {"T": inputs.tokens} | (vector if channel else {"BK": chunk})
        run(
            kernel, grid, launch,
            t["q"], t["k"], t["v"], t["beta"], t["g"], *rings, mix, *orders,
            w.theta, w.gain, w.c, w.start, w.top, columns,
            *token_strides, *ring_strides, slot_stride(mix, "mix"),
            H=spec.heads, Hk=spec.key_heads, V=spec.value_dim, PER=per, num_warps=warps, **own, **common,
        )  # fmt: skip
    else:
        common["VP"] = triton.next_power_of_2(group * spec.value_dim)
        run(
            mamba2_window, grid, launch,
            t["q"], t["k"], t["v"], t["beta"], state.decay_rate, *rings, *orders, w.theta, w.gain, w.c, w.top, columns,
            *token_strides, *ring_strides, GP=triton.next_power_of_2(group),
            H=spec.heads, Hk=spec.key_heads, V=spec.value_dim,
            T=inputs.tokens, BK=chunk, **common,
        )  # fmt: skip


def fold(
    state: DecodeState, inputs: TokenInputs, slots: Tensor, w: Workspace, out: Tensor,
    *, skip: tuple[Tensor, Tensor] | None = None, gate: Tensor | None = None,
) -> None:  # fmt: skip
    """Fold, and write the first outputs of, the rows that flush, with their rings up to the orders' row."""
    spec, ring = state.spec, state.ring
    isa = isa_of(slots.device)
    channel = spec.rules.decay == "channel"
    length = state.policy.window
    padded = max(16, triton.next_power_of_2(length))
    op = "fold" if padded <= 32 else "fold_long"
    launch = find_launch(op, spec.family, spec.value_dim, spec.key_dim, isa, inputs.rows)
    t = tokens_of(inputs)
    g = ring["g"] if channel else w.gain
    mix = mixing_of(state) if spec.rules.delta_rule else w.gain
    x, d = skip if skip is not None else (out, w.gain)
    rows = min(launch.rows, max(16, triton.next_power_of_2(spec.value_dim)))
    items = inputs.rows * spec.heads * triton.cdiv(spec.value_dim, rows)
    run(
        fold_kernel, (min(launch.programs, items),), launch,
        state.checkpoint.codes, ring["k"], ring["v"], g, w.c, w.start, w.gain, t["q"], mix,
        slots, w.flushing, w.count, w.row, x, d, out if gate is None else gate, out,
        w.top, w.status,
        slot_stride(state.checkpoint.codes, "checkpoint"),
        slot_stride(ring["k"], "ring k"), slot_stride(ring["v"], "ring v"), slot_stride(g, "ring g"),
        slot_stride(mix, "mix"), slot_stride(t["q"], "q"),
        spec.heads, spec.key_heads, spec.value_dim,
        T=inputs.tokens, K=spec.key_dim, BK=min(launch.columns, spec.key_dim), R=rows,
        L=length, LP=padded,
        MAMBA2=not spec.rules.delta_rule, CHANNEL=channel, NORM=spec.qk_l2norm, SCALE=spec.query_scale,
        TOP=needs_top(state.copy), SKIP=skip is not None, GATE=gate is not None, ISA=isa,
    )  # fmt: skip


def renew_folded(state: DecodeState, slots: Tensor, w: Workspace) -> None:
    """Renew the copies of the rows that were folded."""
    renew(state, slots, rows=(w.flushing, w.count), top=w.top)


def tokens_of(inputs: TokenInputs) -> dict[str, Tensor]:
    """The tokens [B, T, heads, ...], by name; any batch stride."""
    return {name: t for name, t in vars(inputs).items() if t is not None}
