"""Verification of drafts against plain decoding: outputs, states to the bit, wrong counts, rows that differ."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.kernels.speculative import accept, accept_on_device, plan, sequence_bytes, verify
from quantize_state.kernels.step import scan, step
from quantize_state.quant.errors import InvalidValueError
from quantize_state.quant.policy import parse_arm
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

torch.set_num_threads(1)

FP32 = 3e-6
"""Relative error of FP32 sums of up to a few hundred terms (unit roundoff 6e-8): T queries run as one product."""

ARMS = [
    "replay-fp32-w7",
    "decoupled-nvfp4-w16",
    "decoupled-fp8-w5",
    "decoupled-mxfp4-w8-hadamard16",
    "decoupled-mxfp8-w6",
    "decoupled-int8-w9",
    "decoupled-bf16-nvfp4-w8-four_over_six",
    "coupled-nvfp4-w16",
    "coupled-int8-w6-sr",
]
LONG = "decoupled-nvfp4-w16"
"""Thousands of tokens with this arm, hundreds with the others."""


def fresh(family, arm, slots):
    spec, rate = SPECS[family]
    return DecodeState.allocate(spec, parse_arm(arm), slots, layer="layers.3", decay_rate=rate)


def inputs_for(family, rows, tokens, seed=0):
    return random_inputs(SPECS[family][0], rows, tokens, seed, dtype=torch.float32)


def close(ours, exact, tolerance=FP32):
    return bool((ours.double() - exact.double()).norm() <= tolerance * exact.double().norm())


def tensors(state):
    """Everything that a state holds, by name."""
    copy = {} if state.copy is None else state.copy.tensors()
    parts = {"checkpoint": state.checkpoint.tensors(), "copy": copy, "ring": state.ring}
    named = {f"{part}.{name}": t for part, held in parts.items() for name, t in held.items()}
    return named | {"cursor": state.cursor, "position": state.position}


def same(a, b, slot=None):
    """Equality to the bit, of one slot or all; ring rows from the cursor on may hold anything."""
    for name, t in tensors(a).items():
        for i in range(a.slots) if slot is None else [slot]:
            rows = slice(int(a.cursor[i]) if name.startswith("ring") else None)
            x, y = t[i][rows] if t[i].dim() else t[i], tensors(b)[name][i]
            if not torch.equal(_bytes(x), _bytes(y[rows] if y.dim() else y)):
                return False
    return True


def _bytes(t):
    return t.contiguous().reshape(-1).view(torch.uint8)


def poison(state):
    """NaN in every ring row that holds no committed token."""
    for ring in state.ring.values():
        for slot, fill in enumerate(state.cursor.tolist()):
            ring[slot, fill:] = float("nan")


def drafted(inputs, seen, order, counts, tokens, rng):
    """The next tokens of each slot's sequence in ``inputs``, those from the row's count on replaced by others."""
    at = seen[order][:, None] + torch.arange(tokens)
    wrong = torch.arange(tokens) >= counts[:, None]

    def draft(t):
        right = t[order[:, None], at]
        other = right.flatten(1)[:, torch.randperm(right[0].numel(), generator=rng)].view_as(right)
        return torch.where(wrong.view(wrong.shape + (1,) * (right.dim() - 2)), other, right)

    return inputs.map(draft)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", SPECS)
def test_random_patterns_equal_plain_decoding(family, arm):
    """Rows at different cursors, some of them padding, with 1 to 6 tokens of which a random number is accepted.

    Beside each verification another state takes the accepted tokens one by one. Its rows go together as they go in
    the verification, since the last bits of torch's products depend on what else is in a batch.
    """
    slots, rounds = 4, 200 if arm == LONG else 30
    state, plain, window = fresh(family, arm, slots), fresh(family, arm, slots), parse_arm(arm).window
    inputs = inputs_for(family, slots, 7 * rounds)
    rng = torch.Generator().manual_seed(11)
    seen, kinds = torch.zeros(slots, dtype=torch.long), set()
    for _ in range(rounds):
        tokens = int(torch.randint(1, 7, (), generator=rng))
        order = torch.randperm(slots, generator=rng)
        padded = torch.rand(slots, generator=rng) < 0.2
        rows = torch.where(padded, -1, order)
        _, room = plan(state.cursor[order], window, tokens)
        counts = 1 + (torch.rand(slots, generator=rng) * room).long()
        poison(state)
        before = state.clone()
        batch = drafted(inputs, seen, order, counts, tokens, rng)
        verified = verify(state, batch, rows)
        assert torch.equal(verified.tokens.long(), room.where(~padded, 0))
        used = torch.arange(tokens) < verified.tokens[:, None]
        assert (verified.y[~used] == 0).all()
        accept(state, torch.where(padded, 0, counts), verified.tokens, rows)
        for t in range(int(counts.max())):
            taking = ~padded & (t < counts)
            y = step(plain, batch.slice(t, t + 1), torch.where(taking, order, -1))
            assert not taking.any() or close(verified.y[taking, t], y[taking, 0])
        seen[order[~padded]] += counts[~padded]
        assert torch.equal(state.position, seen)
        assert same(state, plain), "checkpoint, copy, ring, cursor and position are those of plain decoding"
        assert all(same(before, state, slot) for slot in order[padded].tolist())
        for row in (~padded).nonzero()[:, 0].tolist():
            cut, rejects = bool(room[row] < tokens), bool(counts[row] < room[row])
            kinds.add((int(before.cursor[order[row]]) + 1 == window, cut, rejects))
    assert {(True, False, True), (False, True, False), (False, True, True), (False, False, True)} <= kinds


@pytest.mark.parametrize("arm", ["replay-fp32-w7", LONG, "decoupled-bf16-nvfp4-w8-four_over_six"])
@pytest.mark.parametrize("family", SPECS)
def test_early_flushes(family, arm):
    """Against the float64 recurrence: from the copy for reads, from the checkpoint for the fold and its output."""
    spec, rate = SPECS[family]
    slots, window = 3, parse_arm(arm).window
    state = fresh(family, arm, slots)
    inputs = inputs_for(family, slots, 200)
    rng = torch.Generator().manual_seed(3)
    seen = torch.zeros(slots, dtype=torch.long)
    flushed, early = seen.clone(), 0
    for _ in range(60):
        tokens = int(torch.randint(1, min(window, 5), (), generator=rng))
        counts = torch.randint(1, tokens + 1, (slots,), generator=rng)
        order = torch.randperm(slots, generator=rng)
        before = state.clone()
        poison(state)
        verified = verify(state, drafted(inputs, seen, order, counts, tokens, rng), order, early=True)
        assert (verified.tokens == tokens).all()
        for row, slot in enumerate(order.tolist()):
            start, n = int(seen[slot]), int(counts[row])
            y = verified.y[row, :n]

            def exact(source, first, last, slot=slot):
                held = inputs.map(lambda t: t[slot : slot + 1, first:last])
                return recurrence(spec, held, source.decode()[slot : slot + 1].double(), rate)

            if state.cursor[slot] == -1:
                early += start + 1 - int(flushed[slot]) < window
                outputs, states = exact(before.checkpoint, int(flushed[slot]), start + 1)
                assert close(y[:1], outputs[0, -1:])
                if state.policy.checkpoint == "fp32":
                    assert close(state.checkpoint.decode()[slot], states[-1][0])
                flushed[slot] = start + 1
                y = y[1:]
            if len(y):
                outputs, _ = exact(state.read_source, int(flushed[slot]), start + n)
                assert close(y, outputs[0, -len(y) :])
        accept(state, counts, verified.tokens, order)
        seen[order] += counts
    assert early > 5, "a check that can't fail: no window was closed before its end"
    assert torch.equal(state.position, seen) and torch.equal(state.cursor.long(), seen - flushed)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("arm", [*ARMS, "reference", "coupled-nvfp4"])
def test_one_token_is_a_step(arm, early):
    verifying, stepping = fresh("gdn", arm, 3), fresh("gdn", arm, 3)
    inputs = inputs_for("gdn", 3, 40)
    rows = torch.tensor([2, -1, 0])
    for t in range(inputs.tokens):
        token = inputs.slice(t, t + 1)
        verified = verify(verifying, token, rows, early=early)
        accept(verifying, torch.tensor([1, 0, 1]), verified.tokens, rows)
        assert torch.equal(verified.y, step(stepping, token, rows))
        assert same(verifying, stepping)


@pytest.mark.parametrize(
    ("cursor", "tokens", "closing", "exact", "early"),
    [
        (0, 4, False, 4, False),
        (3, 4, False, 4, False),
        (4, 4, False, 3, True),
        (6, 4, False, 1, True),
        (7, 4, True, 4, True),
        (7, 1, True, 1, True),
        (7, 12, True, 8, None),
        (0, 8, False, 7, True),
        (0, 7, False, 7, False),
    ],
)
def test_who_closes_and_how_many_are_verified(cursor, tokens, closing, exact, early):
    """In windows of 8."""
    closes, room = plan(torch.tensor([cursor]), 8, tokens)
    assert (bool(closes), int(room)) == (closing, exact)
    if early is not None:
        closes, room = plan(torch.tensor([cursor]), 8, tokens, early=True)
        assert (bool(closes), int(room)) == (early, tokens)


@pytest.mark.parametrize("counts", [[1, 0, 1], [1, 5, 1], [1, -1, 1], [1, 3, 9]])
@pytest.mark.parametrize("fill", [0, 7])
def test_counts_that_cannot_be_are_refused(fill, counts):
    state = fresh("gdn", "decoupled-nvfp4-w8", 3)
    if fill:
        scan(state, inputs_for("gdn", 3, fill))
    verified = verify(state, inputs_for("gdn", 3, 4, seed=1))
    before = state.clone()
    with pytest.raises(InvalidValueError, match=r"row [12] \(slot [12]\) accepts (0|5|-1|9) of 4 verified tokens"):
        accept(state, torch.tensor(counts), verified.tokens)
    assert torch.equal(before.cursor, state.cursor) and torch.equal(before.position, state.position)
    accept(state, torch.tensor([4, 1, 2]), verified.tokens)
    assert state.cursor.tolist() == ([4, 1, 2] if not fill else [3, 0, 1])


@pytest.mark.parametrize(("counts", "slots"), [([1, 1], None), ([1, 1, 1], [0, 1, 3]), ([1, 1, 1], [0, -2, 1])])
def test_counts_and_slots_must_fit(counts, slots):
    state = fresh("gdn", "decoupled-nvfp4-w8", 3)
    verified = verify(state, inputs_for("gdn", 3, 2))
    with pytest.raises(InvalidValueError, match="slots"):
        accept(state, torch.tensor(counts), verified.tokens, None if slots is None else torch.tensor(slots))


@pytest.mark.parametrize("fill", [0, 5, 7])
def test_wrong_counts_on_the_device_stay_inside_their_slot(fill):
    """Whatever a sampler hands over, cursors stay in their rings and nothing else changes."""
    state = fresh("gdn", "decoupled-nvfp4-w8", 5)
    if fill:
        scan(state, inputs_for("gdn", 5, fill))
    slots = torch.tensor([3, -1, 0, 7, 1])
    verified = verify(state, inputs_for("gdn", 5, 4, seed=1), slots.where(slots < 5, -1))
    before = state.clone()
    accept_on_device(state, torch.tensor([-(2**31), 99, 0, 5, 2**31 - 1]), verified.tokens, slots)
    room = int(verified.tokens[0])
    moved = torch.tensor([1, room, 0, 1, 0])
    assert torch.equal(state.cursor, before.cursor + moved) and torch.equal(state.position, before.position + moved)
    assert ((state.cursor >= 0) & (state.cursor < 8) | (moved == 0)).all()
    unchanged = {"cursor", "position"} ^ tensors(state).keys()
    assert all(torch.equal(_bytes(tensors(state)[name]), _bytes(tensors(before)[name])) for name in unchanged)


def test_the_device_is_not_waited_for():
    """Fake tensors have no values: any look at one raises, as a look would break the capture of a CUDA graph."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = SimpleNamespace(slots=4, cursor=torch.zeros(4, dtype=torch.int32), position=torch.zeros(4).long())
        for early in (False, True):
            _, verified = plan(state.cursor, 8, 4, early=early)
            accept_on_device(state, torch.ones(4).int(), verified, torch.arange(4))
        with pytest.raises(Exception, match=r"_local_scalar_dense|data-dependent"):
            accept(state, torch.ones(4).int(), verified)


def test_drafts_that_nobody_accepts_never_were():
    state, plain = fresh("kda", "decoupled-nvfp4-w8", 2), fresh("kda", "decoupled-nvfp4-w8", 2)
    inputs = inputs_for("kda", 2, 7)
    for t in range(inputs.tokens):
        verify(state, inputs_for("kda", 2, 5, seed=t + 1))
        token = inputs.slice(t, t + 1)
        assert torch.equal(step(state, token), step(plain, token))
        assert same(state, plain)
    verify(state, inputs_for("kda", 2, 5), torch.tensor([-1, 1]))
    with pytest.raises(InvalidValueError, match="1"):  # slot 1 has closed its window
        verify(state, inputs_for("kda", 2, 5))


def test_more_tokens_than_an_early_window_holds():
    state = fresh("gdn", "decoupled-nvfp4-w8", 2)
    with pytest.raises(InvalidValueError, match="9 tokens to verify in windows of 8"):
        verify(state, inputs_for("gdn", 2, 9), early=True)
    assert verify(state, inputs_for("gdn", 2, 9)).tokens.tolist() == [7, 7]


DOCUMENTED = {
    "GDN, 32 heads of 128 × 128, 16 key heads": LayerSpec("gdn", 32, 16, 128, 128),
    "KDA, 32 heads of 128 × 128": LayerSpec("kda", 32, 32, 128, 128),
    "Mamba-2, 128 heads of 64 × 128, 8 groups": LayerSpec("mamba2", 128, 8, 64, 128),
}


@pytest.mark.parametrize("layer", DOCUMENTED)
def test_memory_of_a_sequence_is_as_documented(layer):
    spec, policies = DOCUMENTED[layer], [parse_arm("replay-fp32"), parse_arm("decoupled-nvfp4")]
    sizes = [sequence_bytes(spec, policies[0], drafts)["snapshots"] for drafts in (1, 3, 5, 7)]
    sizes += [sequence_bytes(spec, policy, 3)["total"] for policy in policies]
    cells = " | ".join(f"{size / 1024:,.0f}" for size in sizes)
    assert f"| {layer} | {cells} |" in (Path(__file__).parents[1] / "docs/speculative.md").read_text(encoding="utf-8")
    assert sizes[1] == 4 * 4 * spec.elements
    for policy in policies:
        rate = torch.zeros(spec.heads) if spec.family == "mamba2" else None
        state = DecodeState.allocate(spec, policy, 3, dtype=torch.bfloat16, decay_rate=rate)
        assert 3 * sequence_bytes(spec, policy, 5)["total"] == state.state_bytes()["total"]
