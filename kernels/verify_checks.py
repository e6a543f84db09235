"""Verifications against the references, on whatever device: what has to hold before one is timed or trusted."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..quant.formats import FORMATS
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from . import sequence, speculative
from .cases import forget_unused, random_state, random_tokens
from .checks import FP32, HALF, Check, different_bytes, relative, touched
from .device.targets import INTERPRET
from .inputs import TokenInputs
from .standard import snapshots
from .standard.reference import standard
from .window.accept import accept


def check_verify(
    spec: LayerSpec, policy: StatePolicy, device: torch.device | str, tokens: int, *, early: bool = False, seed: int = 0
) -> list[Check]:
    """A verification of rows that close, are cut at their window's end, read, and are padding; then their counts."""
    return list(_verify(spec, policy, torch.device(device), tokens, early, seed))


def _verify(
    spec: LayerSpec, policy: StatePolicy, device: torch.device, tokens: int, early: bool, seed: int
) -> Iterator[Check]:
    length = policy.window
    fills = [0, length // 2, max(0, length - 2), length - 1, length - 1, 0]
    rows = [4, -1, 1, 3, 0, 2]  # slot 5 is named by none
    state = random_state(spec, policy, 6, seed=seed, device=device)
    forget_unused(state, fills)
    before, clone = state.clone(), state.clone()
    slots = torch.tensor(rows, dtype=torch.int32, device=device)
    inputs = random_tokens(spec, len(rows), tokens, seed=seed + 7, device=device)
    expected = speculative.verify(clone, inputs, slots, early=early)
    w = sequence.Workspace.allocate(state, len(rows), tokens=tokens)
    for t in (w.theta, w.gain, w.c, w.start):
        t.fill_(float("nan"))
    w.top.fill_(0x7E000000)  # of a flush long ago, and enormous
    out = torch.full_like(expected.y, float("nan"))
    _, verified = sequence.verify(state, inputs, slots, early=early, workspace=w, out=out)
    yield Check("verified tokens", float((verified != expected.tokens).sum()), 0)

    closing = (clone.cursor == -1)[slots.long().clamp(min=0)] & (slots >= 0)
    order = torch.arange(tokens, device=device)
    given = order < expected.tokens[:, None]
    folded = closing[:, None] & (order == 0)
    four_bit = FORMATS[state.read_source.format].bits == 4
    reads = HALF if four_bit else FP32
    # of a copy that was renewed just now: codes may differ where the states that they encode differ in their last bit
    renewed = FP32 if policy.exact else HALF
    rows_closed = closing[:, None]
    for name, chosen, limit in (
        ("reads", given & ~rows_closed, reads),
        ("reads of renewed copies", given & rows_closed & ~folded, renewed),
        ("flushes", folded, FP32),
    ):
        if bool(chosen.any()):
            yield Check(f"output of {name}", relative(out[chosen], expected.y[chosen]), limit)
    yield Check("outputs of tokens that were not verified", float((~out[~given].isnan()).sum()), 0)
    counts = torch.tensor([2, 1, tokens, tokens + 1, 1, 0], dtype=torch.int32, device=device)
    accept(state, counts, verified, slots)
    speculative.accept_on_device(clone, counts, expected.tokens, slots)
    yield from _same_states(state, clone)
    live = slots[slots >= 0].long()
    yield Check("states", relative(state.checkpoint.codes[live], clone.checkpoint.codes[live]), FP32)
    yield Check("bytes of a slot that no row names", touched(state, before, 5), 0)
    yield Check("not finite", float(int(w.status)), 0)


def _same_states(a: DecodeState, b: DecodeState) -> Iterator[Check]:
    moved = (a.cursor != b.cursor).sum() + (a.position != b.position).sum()
    yield Check("cursors and positions", float(moved), 0)
    yield Check("ring bytes", sum(different_bytes(t, b.ring[n]) for n, t in a.ring.items()), 0)


def check_counts(spec: LayerSpec, policy: StatePolicy, device: torch.device | str, rounds: int = 6) -> list[Check]:
    """Verifications whose counts change from one to the next, wrong ones among them, against the host's path.

    On a GPU one captured graph is replayed, of which only the contents of its inputs and counts change. A wrong count
    must do what the nearest right one does, and nothing to other slots.
    """
    device, tokens, length = torch.device(device), 3, policy.window
    eager = random_state(spec, policy, 5, seed=0, device=device)
    eager.cursor.copy_(torch.tensor([1, length - 2, length - 1, 0, 0], device=device))
    captured = eager.clone()
    slots = torch.tensor([3, 1, -1, 2], dtype=torch.int32, device=device)
    each = [random_tokens(spec, 4, tokens, seed=i, device=device) for i in range(rounds)]
    static = each[0].map(torch.Tensor.clone)
    counts = torch.ones(4, dtype=torch.int32, device=device)
    shape = (4, tokens, spec.heads, spec.value_dim)
    outs = [torch.zeros(shape, device=device) for _ in range(2)]
    spaces = [sequence.Workspace.allocate(s, 4, tokens=tokens) for s in (eager, captured)]

    def launch(state: DecodeState = captured) -> None:
        _, verified = sequence.verify(state, static, slots, workspace=spaces[1], out=outs[1])
        accept(state, counts, verified, slots)

    replay = _captured(launch, eager.clone()) if device.type == "cuda" and not INTERPRET else launch
    outs[1].zero_()
    outputs, out_of_ring = 0.0, 0.0
    for i, inputs in enumerate(each):
        # from 1 to T, and 0, negative ones and ones beyond T
        given = torch.tensor([(5 * i + 3 * b) % (tokens + 4) - 1 for b in range(4)], dtype=torch.int32, device=device)
        _fill(static, inputs)
        counts.copy_(given)
        replay()
        _, verified = sequence.verify(eager, inputs, slots, workspace=spaces[0], out=outs[0])
        held = torch.minimum(given, verified).clamp(min=1)
        speculative.accept(eager, held, verified.clamp(min=1), slots)
        outputs += different_bytes(outs[1], outs[0])
        out_of_ring += float(((captured.cursor < 0) | (captured.cursor >= length)).sum())
    return [
        Check("output bytes", outputs, 0),
        Check("cursors outside their rings", out_of_ring, 0),
        *_same_states(captured, eager),
        Check("state bytes", sum(touched(captured, eager, s) for s in range(5)), 0),
        Check("not finite", float(int(spaces[1].status)), 0),
    ]


def _captured(launch: Callable[..., None], state: DecodeState) -> Callable[[], None]:
    launch(state)  # compiled before it is captured, on a state that nobody needs
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def _fill(static: TokenInputs, inputs: TokenInputs) -> None:
    for name, t in vars(inputs).items():
        if t is not None:
            getattr(static, name).copy_(t)


def check_snapshots(spec: LayerSpec, device: torch.device | str, tokens: int, seed: int = 0) -> list[Check]:
    """The baseline that writes a state for every token, against the recurrence in float64."""
    device = torch.device(device)
    slots = 2 * tokens + 3
    state = random_state(spec, StatePolicy(window=1), slots, seed=seed, device=device)
    pool, before = state.checkpoint.codes, state.checkpoint.codes.clone()
    source = torch.tensor([0, -1, tokens], dtype=torch.int32, device=device)
    targets = torch.arange(2 * tokens, dtype=torch.int32, device=device).view(2, tokens)
    targets = torch.stack([targets[0], targets[0], targets[1]])
    inputs = random_tokens(spec, 3, tokens, seed=seed + 7, device=device)
    out = torch.full((3, tokens, spec.heads, spec.value_dim), float("nan"), device=device)
    snapshots.verify(spec, pool, inputs, source, targets, decay_rate=state.decay_rate, out=out)
    live = torch.tensor([0, 2], device=device)
    exact, worst, worst_state = before[source[live].long()].double(), 0.0, 0.0
    for t in range(tokens):
        y = standard(spec, exact, inputs.rows_at(live).slice(t, t + 1), state.decay_rate)
        worst = max(worst, relative(out[live, t], y))
        worst_state = max(worst_state, relative(pool[targets[live, t].long()], exact))
    rest = slice(2 * tokens, slots)
    return [
        Check("output", worst, FP32),
        Check("states", worst_state, FP32),
        Check("padded outputs written", float((~out[1].isnan()).sum()), 0),
        Check("bytes of slots that no row names", different_bytes(pool[rest], before[rest]), 0),
    ]
