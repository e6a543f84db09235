"""DecodeState advanced by step, scan and prefill: state and output against the float64 recurrence."""

import itertools

import pytest
import torch
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.kernels.step import folded, prefill, scan, step
from quantize_state.quant.codec import encode
from quantize_state.quant.errors import InvalidValueError, NonFiniteStateError
from quantize_state.quant.policy import parse_arm
from quantize_state.quant.state import DecodeState
from quantize_state.quant.storage import load_states, save_states

FP32 = 3e-6
"""Relative error of FP32 sums of up to a few hundred terms against float64 (unit roundoff 6e-8)."""

ARMS = [
    "reference",
    "replay-fp32",
    "replay-fp16",
    "coupled-nvfp4",
    "coupled-nvfp4-w16",
    "coupled-fp8-w4-hadamard",
    "coupled-int8-sr",
    "decoupled-nvfp4",
    "decoupled-nvfp4-w5-four_over_six",
    "decoupled-fp8-hadamard16",
    "decoupled-bf16-nvfp4",
]


def fresh(family, arm, slots, dtype=torch.float32):
    spec, rate = SPECS[family]
    return DecodeState.allocate(spec, parse_arm(arm), slots, layer="layers.3", decay_rate=rate, dtype=dtype)


def inputs_for(family, rows, tokens, seed=0):
    return random_inputs(SPECS[family][0], rows, tokens, seed, dtype=torch.float32)


def truth(family, inputs, start=None):
    spec, rate = SPECS[family]
    if start is None:
        start = torch.zeros(inputs.rows, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    return recurrence(spec, inputs, start, rate)


def close(ours, exact, tolerance=FP32):
    return (ours.double() - exact).norm() <= tolerance * exact.norm()


def same_bytes(a, b):
    """Equality of encoded states to the bit."""
    return all(torch.equal(x.view(torch.uint8), b.tensors()[n].view(torch.uint8)) for n, x in a.tensors().items())


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("window", [1, 5, 16])
def test_step_equals_the_recurrence_over_several_flushes(family, window):
    state = fresh(family, f"replay-fp32-w{window}" if window > 1 else "reference", 2)
    inputs = inputs_for(family, 2, 3 * window + 2)
    outputs, states = truth(family, inputs)
    for t in range(inputs.tokens):
        y = step(state, inputs.slice(t, t + 1))
        assert close(y[:, 0], outputs[:, t])
        assert close(folded(state), states[t])
        assert state.cursor.tolist() == [(t + 1) % window] * 2
        assert state.position.tolist() == [t + 1] * 2


@pytest.mark.parametrize("family", SPECS)
def test_rows_at_different_cursors_with_padding(family):
    """A continuous batch: at each step a random part of the slots takes a token, in random row order."""
    slots, tokens, arm = 5, 40, "replay-fp32-w7"
    state = fresh(family, arm, slots)
    for name, ring in state.ring.items():
        ring.fill_(float("nan"))  # unused ring rows may hold anything
        assert ring.isnan().all(), name
    inputs = inputs_for(family, slots, tokens)
    outputs, states = truth(family, inputs)
    seen = torch.zeros(slots, dtype=torch.long)
    rng = torch.Generator().manual_seed(5)
    for _ in range(tokens):
        order = torch.randperm(slots, generator=rng)
        padded = torch.rand(slots, generator=rng) < 0.3
        rows = torch.where(padded, torch.tensor(-1), order)
        before = state.clone()
        batch = inputs.map(lambda t, o=order: t[o, seen[o]][:, None])
        y = step(state, batch, rows)
        for row, slot in enumerate(order.tolist()):
            if padded[row]:
                assert (y[row] == 0).all()
                assert same_bytes(before.checkpoint[[slot]], state.checkpoint[[slot]])
                assert before.cursor[slot] == state.cursor[slot]
            else:
                assert close(y[row, 0], outputs[slot, seen[slot]])
                seen[slot] += 1
    for slot in range(slots):
        assert close(folded(state)[slot], states[int(seen[slot]) - 1][slot])
    assert state.position.tolist() == seen.tolist()


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ["decoupled-nvfp4", "decoupled-fp8", "decoupled-int8-hadamard"])
def test_the_error_law(family, arm):
    """With a copy the output error is (Q(S₀) − S₀)·Θ, so an exact copy of a rounded start gives it back."""
    spec, _ = SPECS[family]
    policy = parse_arm(arm)
    start = torch.randn(2, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(2))
    state = fresh(family, arm, 2)
    state.renew_(start)
    inputs = inputs_for(family, 2, policy.window)
    copy = encode(start, policy.read, policy.scale_rule, policy.rotation).decode()
    zero_start = truth(family, inputs)[0]
    exact, _ = truth(family, inputs, start.double())
    from_copy, _ = truth(family, inputs, copy.double())
    y = torch.cat([step(state, inputs.slice(t, t + 1)) for t in range(policy.window)], dim=1)
    reads = slice(0, policy.window - 1)
    assert close(y[:, reads], from_copy[:, reads])
    assert close(y[:, -1], exact[:, -1]), "the flushing step reads the FP32 state"
    assert not close(y[:, reads], exact[:, reads], 1e-4), "a check that can't fail: the copy has no error"
    assert not close(y[:, reads], zero_start[:, reads], 1e-2)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ["decoupled-nvfp4", "decoupled-fp8", "decoupled-bf16-mxfp4"])
def test_isolation(family, arm):
    """Random bytes in the copy at every step leave the checkpoints of 200 tokens bit-identical, once of 1,000."""
    clean, garbage = fresh(family, arm, 2), fresh(family, arm, 2)
    inputs = inputs_for(family, 2, 1000 if (family, arm) == ("gdn", "decoupled-nvfp4") else 200)
    rng = torch.Generator().manual_seed(7)
    different = False
    for t in range(inputs.tokens):
        for tensor in garbage.copy.tensors().values():
            raw = tensor.view(torch.uint8)
            raw.copy_(torch.randint(0, 256, raw.shape, generator=rng, dtype=torch.uint8))
        token = inputs.slice(t, t + 1)
        different |= not torch.equal(step(clean, token), step(garbage, token))
        if t % 100 == 99 or inputs.tokens - t < 10:
            assert same_bytes(clean.checkpoint, garbage.checkpoint)
    assert different, "a check that can't fail: the copy was not read"


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ARMS)
def test_scan_equals_stepping(family, arm):
    """Same checkpoints and copies to the bit, same outputs to FP32 rounding, from any ring fill."""
    inputs = inputs_for(family, 2, 83)
    stepped, scanned = fresh(family, arm, 2), fresh(family, arm, 2)
    y_step = torch.cat([step(stepped, inputs.slice(t, t + 1)) for t in range(inputs.tokens)], dim=1)
    cuts = [0, 3, 16, 17, 60, 83]
    y_scan = torch.cat([scan(scanned, inputs.slice(a, b)) for a, b in itertools.pairwise(cuts)], dim=1)
    assert close(y_scan, y_step.double())
    assert torch.equal(stepped.cursor, scanned.cursor) and torch.equal(stepped.position, scanned.position)
    if arm == "reference":  # computed in chunks of 64: the same sums in another order
        assert close(folded(scanned), folded(stepped).double())
    else:
        assert same_bytes(stepped.checkpoint, scanned.checkpoint)
        assert stepped.copy is None or same_bytes(stepped.copy, scanned.copy)


@pytest.mark.parametrize("arm", ["decoupled-nvfp4-w5", "coupled-fp8"])
def test_scan_of_rows_at_different_cursors(arm):
    scanned, stepped = fresh("gdn", arm, 3), fresh("gdn", arm, 3)
    for state in (scanned, stepped):
        for slot, lead in ((0, 2), (1, 4), (2, 2)):
            scan(state, inputs_for("gdn", 1, lead, seed=slot), torch.tensor([slot]))
    inputs = inputs_for("gdn", 4, 13, seed=9)
    rows = torch.tensor([2, -1, 0, 1])
    y = scan(scanned, inputs, rows)
    z = torch.cat([step(stepped, inputs.slice(t, t + 1), rows) for t in range(13)], dim=1)
    assert close(y, z.double()) and (y[1] == 0).all()
    assert same_bytes(scanned.checkpoint, stepped.checkpoint)
    assert torch.equal(scanned.cursor, stepped.cursor)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ["replay-fp32", "decoupled-nvfp4", "coupled-fp8-w16"])
def test_prefill_is_exact_and_renews_the_copy(family, arm):
    state = fresh(family, arm, 2)
    first, second = inputs_for(family, 2, 70, seed=1), inputs_for(family, 2, 90, seed=2)
    outputs, states = truth(family, first)
    assert close(prefill(state, first), outputs)
    middle = state.checkpoint.decode()
    if arm != "coupled-fp8-w16":
        assert close(middle, states[-1])
    scan(state, second.slice(0, 3))  # some tokens wait in the ring
    more = second.slice(3, 90)
    outputs, states = truth(family, second, middle.double())
    assert close(prefill(state, more), outputs[:, 3:])
    assert state.cursor.tolist() == [0, 0] and state.position.tolist() == [160, 160]
    if state.copy is not None:
        policy = state.policy
        assert same_bytes(
            state.copy, encode(state.checkpoint.decode(), policy.read, policy.scale_rule, policy.rotation)
        )


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ["decoupled-nvfp4-w5", "coupled-int8-w5-sr", "decoupled-bf16-mxfp8-w5"])
def test_saved_anywhere_continues_exactly(family, arm, tmp_path):
    inputs = inputs_for(family, 2, 14)
    whole = fresh(family, arm, 2)
    for t in range(inputs.tokens):
        path = tmp_path / f"{t}.safetensors"
        save_states({"layers.3": whole, "layers.3/x": whole.clone()}, path)
        loaded = load_states(path)["layers.3"]
        assert loaded.policy == whole.policy and loaded.spec == whole.spec
        token = inputs.slice(t, t + 1)
        assert torch.equal(step(whole, token), step(loaded, token))
        assert same_bytes(whole.checkpoint, loaded.checkpoint)
        assert whole.copy is None or same_bytes(whole.copy, loaded.copy)


def test_reset_forgets_everything_of_a_slot():
    arm = "decoupled-nvfp4-w5"
    used, new = fresh("kda", arm, 3), fresh("kda", arm, 3)
    scan(used, inputs_for("kda", 3, 12))
    kept = used.clone()
    used.reset_(torch.tensor([1]))
    inputs = inputs_for("kda", 1, 11, seed=3)
    slot = torch.tensor([1])
    assert torch.equal(scan(used, inputs, slot), scan(new, inputs, slot))
    assert same_bytes(used.checkpoint[slot], new.checkpoint[slot])
    used.reset_(slot)
    assert all((ring[1] == 0).all() for ring in used.ring.values()) and used.position[1] == 0
    others = torch.tensor([0, 2])
    assert same_bytes(used.checkpoint[others], kept.checkpoint[others])


def test_a_state_that_is_not_finite_names_layer_slot_and_head():
    state = fresh("gdn", "decoupled-nvfp4-w2", 3)
    inputs = inputs_for("gdn", 3, 2)
    inputs.v[1, 1, 2] = float("inf")
    before = state.clone()
    step(state, inputs.slice(0, 1))
    with pytest.raises(NonFiniteStateError, match=r"'layers\.3', slot 1, head 2 .* 2 tokens"):
        step(state, inputs.slice(1, 2))
    assert same_bytes(state.checkpoint, before.checkpoint)
    with pytest.raises(NonFiniteStateError, match="slot 1, head 2"):
        scan(before, inputs)


@pytest.mark.parametrize(
    ("rows", "slots"), [(2, None), (3, [0, 1, 3]), (3, [0, 1, 1]), (3, [0, -2, 1]), (2, [0, 1, 2])]
)
def test_bad_slots(rows, slots):
    state = fresh("gdn", "decoupled-nvfp4", 3)
    with pytest.raises(InvalidValueError, match="slot"):
        step(state, inputs_for("gdn", rows, 1), None if slots is None else torch.tensor(slots))


def test_scan_reads_the_copy_as_it_is():
    """Until the first flush; also a copy that is not the checkpoint's, as the isolation test makes it."""
    scanned, stepped = fresh("gdn", "decoupled-fp8-w8", 2), fresh("gdn", "decoupled-fp8-w8", 2)
    inputs = inputs_for("gdn", 2, 21)
    for state in (scanned, stepped):
        scan(state, inputs_for("gdn", 2, 8, seed=1))
        state.copy.codes.view(torch.uint8).copy_(state.copy.codes.view(torch.uint8).flip(-1))
    y = torch.cat([step(stepped, inputs.slice(t, t + 1)) for t in range(inputs.tokens)], dim=1)
    assert close(scan(scanned, inputs), y.double())


def test_every_rounding_has_a_seed_of_its_own():
    """Noise that repeats, from token to token or from head to head, would not average out."""
    state = fresh("gdn", "coupled-int8-sr", 2)
    seeds = state.rounding_seeds(torch.arange(50))
    assert seeds.shape == (50, state.spec.heads) and seeds.unique().numel() == seeds.numel()
    state.layer = "layers.4"
    assert not torch.isin(state.rounding_seeds(torch.arange(50)), seeds).any()


def test_stochastic_rounding_does_not_depend_on_the_batch():
    """A slot's rounding is seeded by policy, layer, position and head alone."""
    arm, inputs = "coupled-int8-sr", inputs_for("gdn", 3, 20)
    together, alone = fresh("gdn", arm, 3), fresh("gdn", arm, 1)
    scan(together, inputs)
    scan(alone, inputs.map(lambda t: t[2:]))
    assert same_bytes(together.checkpoint[[2]], alone.checkpoint)


def test_fp32_checkpoint_over_ten_thousand_tokens():
    """The FP32 recurrence stays at FP32 rounding of float64 although it is never renewed."""
    inputs = inputs_for("gdn", 1, 10_000)
    state = fresh("gdn", "decoupled-nvfp4", 1)
    scan(state, inputs)
    assert close(folded(state), truth("gdn", inputs)[1][-1])


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("arm", ["coupled-nvfp4", "coupled-fp8", "coupled-mxfp4-hadamard16"])
def test_coupled_is_the_rounded_recurrence(family, arm):
    """Round the state after every token and go on from it: written out with encode, token by token."""
    spec, rate = SPECS[family]
    policy, tokens = parse_arm(arm), 24
    inputs = inputs_for(family, 1, tokens)
    state = torch.zeros(1, spec.heads, spec.value_dim, spec.key_dim)
    scanned = fresh(family, arm, 1)
    differing = 0.0
    for t in range(tokens):
        token = inputs.slice(t, t + 1)
        outputs, states = recurrence(spec, token, state.double(), rate)
        assert close(scan(scanned, token), outputs)
        # From our bytes: a last bit of FP32 may decide a rounding, and the states would part company.
        expected = encode(states[0].float(), policy.checkpoint, policy.scale_rule, policy.rotation)
        codes, ours = (e.codes.view(torch.uint8) for e in (expected, scanned.checkpoint))
        differing += float((codes != ours).float().mean())
        state = scanned.checkpoint.decode()
    assert differing / tokens < 1e-3, "more than a few codes in a thousand differ, too many for last bits"
