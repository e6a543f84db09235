"""Slots, rings, counts and shapes: what is out of range is an error, what is in range is right, whatever was there."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hardening import LAYER, bounded, error, fresh, inputs_for, parts, same_state, truth
from hypothesis import given
from hypothesis import strategies as st
from kernel_cases import make_far, make_state, token
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.kernels.step import folded, prefill, scan, step
from quantize_state.quant.errors import InvalidValueError, NonFiniteStateError
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

TOLERANCES = {
    # name: (value, why the result is not exact)
    "fp32": (3e-6, "float32 sums of up to a few hundred terms"),
    "unit": (1e-6, "float32 sums of a few terms, in a state of one number"),
}
ADVANCE = {"step": step, "scan": scan, "prefill": prefill}


def close(ours, exact, tolerance="fp32"):
    return error(ours, exact) <= TOLERANCES[tolerance][0]


# ---- slots


BAD_SLOTS = {
    "past the end": [0, 3],
    "minus two": [-2, 0],
    "far away": [0, 1 << 40],
    "one twice": [1, 1],
    "a mask": [True, False],
    "fractions": [0.0, 1.0],
    "a column": [[0], [1]],
}


@pytest.mark.parametrize("advance", ADVANCE)
@pytest.mark.parametrize("bad", BAD_SLOTS)
def test_slots_out_of_range_change_nothing(advance, bad):
    state = fresh("gdn", "decoupled-nvfp4-w4", 3)
    scan(state, inputs_for("gdn", 3, 6))
    before = state.clone()
    with pytest.raises(InvalidValueError, match="slots"):
        ADVANCE[advance](state, inputs_for("gdn", 2, 1), torch.tensor(BAD_SLOTS[bad]))
    assert same_state(state, before)


@pytest.mark.parametrize("bad", [*BAD_SLOTS, "padding"])
def test_padding_and_bad_slots_are_nothing_to_renew_reset_select_or_fold(bad):
    """−1 is no slot here, and indexing would take it for the last one. Only ``select`` may name a slot twice."""
    slots = torch.tensor([-1, 0] if bad == "padding" else BAD_SLOTS[bad])
    state = fresh("gdn", "decoupled-nvfp4-w4", 3)
    scan(state, inputs_for("gdn", 3, 6))
    before, spec = state.clone(), state.spec
    tiles = torch.ones(2, spec.heads, spec.value_dim, spec.key_dim)
    calls = [lambda: state.renew_(tiles, slots), lambda: state.reset_(slots)]
    calls += [] if bad == "one twice" else [lambda: state.select(slots), lambda: folded(state, slots)]
    for call in calls:
        with pytest.raises(InvalidValueError, match="slots"):
            call()
    assert same_state(state, before)


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("advance", ADVANCE)
def test_all_rows_padded_and_no_rows_at_all(family, advance):
    state = fresh(family, "decoupled-nvfp4-w4", 3)
    scan(state, inputs_for(family, 3, 6))
    before = state.clone()
    for slots in ([-1, -1, -1], []):
        y = ADVANCE[advance](state, inputs_for(family, len(slots), 1), torch.tensor(slots, dtype=torch.int32))
        assert y.shape == (len(slots), 1, state.spec.heads, state.spec.value_dim) and not y.any()
        assert same_state(state, before)
    empty = fresh(family, "decoupled-nvfp4-w4", 0)
    assert ADVANCE[advance](empty, inputs_for(family, 0, 1)).shape[0] == 0 and empty.state_bytes()["total"] == 0


@pytest.mark.parametrize("family", SPECS)
def test_no_tokens(family):
    state = fresh(family, "decoupled-nvfp4-w4", 2)
    scan(state, inputs_for(family, 2, 6))
    before = state.clone()
    nothing = inputs_for(family, 2, 0)
    assert scan(state, nothing).shape == (2, 0, state.spec.heads, state.spec.value_dim)
    assert same_state(state, before)
    with pytest.raises(InvalidValueError, match="one token"):
        step(state, nothing)
    assert prefill(state, nothing).shape == (2, 0, state.spec.heads, state.spec.value_dim)
    assert close(state.checkpoint.decode(), folded(before)) and not state.cursor.any()


@pytest.mark.parametrize("byte", [0xFF, 0x7F, 0x00])
@pytest.mark.parametrize("arm", ["decoupled-nvfp4-w5", "coupled-mxfp4-w5", "coupled-int8-w5-sr"])
def test_a_reused_slot_is_a_new_one_whatever_the_memory_held(arm, byte):
    """0xFF is NaN in every float of the pool and a count of −1; other slots stay as they are."""
    used, new = fresh("kda", arm, 3), fresh("kda", arm, 3)
    for raw in parts(used).values():  # views: contiguous tensors of the pool
        raw.fill_(byte)
    before = used.clone()
    slot = torch.tensor([1])
    used.reset_(slot)
    inputs = inputs_for("kda", 1, 13, seed=3)
    assert torch.equal(scan(used, inputs, slot), scan(new, inputs, slot))
    assert same_state(used.select(slot), new.select(slot))
    others = [0, 2]
    assert all(torch.equal(t[others], parts(before)[n][others]) for n, t in parts(used).items())


def test_the_reference_steps_slots_beyond_two_billion_elements():
    near = make_state("gdn", window=4, slots=4, fills=[0, 3, 3, 1])
    far = make_far(near)
    assert far.checkpoint.codes.stride(0) * 3 > 1 << 31
    slots = torch.tensor([3, 2])
    assert torch.equal(step(far, token("gdn", 2), slots), step(near, token("gdn", 2), slots))
    assert torch.equal(far.checkpoint.codes[2], near.checkpoint.codes[2])
    assert torch.equal(far.copy.codes[2], near.copy.codes[2])


# ---- counts and rings


@pytest.mark.parametrize("advance", [*ADVANCE, "folded"])
@pytest.mark.parametrize("count", [-1, 4, 1 << 20])
def test_a_count_outside_the_ring_is_an_error(advance, count):
    state = fresh("gdn", "decoupled-nvfp4-w4", 3)
    state.cursor[1] = count
    before = state.clone()
    with pytest.raises(InvalidValueError, match=f"slot 1 of layer '{LAYER}' .* {count} tokens"):
        folded(state) if advance == "folded" else ADVANCE[advance](state, inputs_for("gdn", 3, 1))
    assert same_state(state, before)
    slots = torch.tensor([0, -1, 2])
    if advance != "folded":  # the others can go on
        ADVANCE[advance](state, inputs_for("gdn", 3, 1), slots)


@pytest.mark.parametrize("family", SPECS)
def test_unused_ring_rows_may_be_nan_at_every_fill(family):
    """Of folding, scanning, prefilling and selecting; stepping is in test_decode.py."""
    window = 5
    for fill in range(window):
        clean = fresh(family, f"decoupled-nvfp4-w{window}", 2)
        scan(clean, inputs_for(family, 2, window + fill))
        poisoned = clean.clone()
        for ring in poisoned.ring.values():
            ring[:, fill:] = float("nan")
        assert torch.equal(folded(poisoned), folded(clean))
        more = inputs_for(family, 2, 4, seed=1)
        for advance in (scan, prefill):
            a, b = poisoned.select(torch.tensor([1, 0])), clean.select(torch.tensor([1, 0]))
            assert torch.equal(advance(a, more), advance(b, more))
            assert torch.equal(folded(a), folded(b)) and torch.isfinite(folded(a)).all()


@pytest.mark.parametrize("family", SPECS)
def test_copies_at_every_fill_go_on_by_themselves(family):
    state, window = fresh(family, "decoupled-fp8-w5", 2), 5
    for t in range(window + 1):
        now = inputs_for(family, 2, 1, seed=t)
        twins = {
            "clone": state.clone(),
            "deepcopy": copy.deepcopy(state),
            "pickle": pickle.loads(pickle.dumps(state)),
            "select": state.select(torch.tensor([0, 1])),
            "to": state.to("cpu").clone(),
        }
        before = state.clone()
        y = step(state, now)
        for name, twin in twins.items():
            assert same_state(twin, before), name
            assert torch.equal(step(twin, now), y), name
            assert same_state(twin, state), name


@pytest.mark.parametrize("family", SPECS)
def test_flush_at_every_fill(family):
    """A prefill without tokens folds whatever the ring holds, and renews the copy."""
    window = 5
    inputs = inputs_for(family, 1, 2 * window)
    _, states = truth(family, inputs)
    for tokens in range(1, inputs.tokens):
        state = fresh(family, f"decoupled-nvfp4-w{window}", 1)
        scan(state, inputs.slice(0, tokens))
        prefill(state, inputs.slice(0, 0))
        assert close(state.checkpoint.decode(), states[tokens - 1]) and not state.cursor.any()
        assert int(state.position) == tokens
        if tokens + 1 < inputs.tokens:
            y = scan(state, inputs.slice(tokens, tokens + 1))
            assert error(y[:, 0], truth(family, inputs)[0][:, tokens]) < 0.5  # one read from the copy


@pytest.mark.parametrize("window", [1, 2, 255, 256])
def test_windows_at_their_limits(window):
    inputs = inputs_for("gdn", 1, window + 3)
    outputs, states = truth("gdn", inputs)
    state = fresh("gdn", f"replay-fp32-w{window}" if window > 1 else "reference", 1)
    assert close(scan(state, inputs), outputs) and close(folded(state), states[-1])
    assert int(state.cursor) == inputs.tokens % window
    for beyond in (0, 257, -1, 1.0, True):
        with pytest.raises(InvalidValueError, match="window"):
            StatePolicy(window=beyond)


# ---- inputs


@pytest.mark.parametrize("advance", ADVANCE)
@pytest.mark.parametrize("family", SPECS)
@given(st.sampled_from(["q", "k", "v", "beta", "g"]), st.integers(0, 3), st.sampled_from(["one", "more", "missing"]))
@bounded(25)
def test_inputs_of_another_shape_do_not_broadcast(advance, family, name, axis, how):
    state = fresh(family, "decoupled-nvfp4", 2)
    good = inputs_for(family, 2, 1)
    t = getattr(good, name)
    if t is None:  # Mamba-2 has no log-decays of its own
        wrong = good.beta
    elif how == "missing":
        if name != "g":
            return
        wrong = None
    else:
        axis %= t.dim()
        wrong = t.narrow(axis, 0, 1) if how == "one" else torch.cat([t, t], dim=axis)
        if wrong.shape == t.shape:
            return
    before = state.clone()
    with pytest.raises(InvalidValueError, match=r"input|one token|rows of input"):
        ADVANCE[advance](state, dataclasses.replace(good, **{name: wrong}))
    assert same_state(state, before)


def test_states_of_another_shape_do_not_broadcast():
    state = fresh("gdn", "decoupled-nvfp4", 3)
    good = torch.ones(3, 4, 24, 32)
    for wrong in (good[:1], good[:, :1], good[:, :, :1], good[..., :1], good.mT, good[0]):
        with pytest.raises(InvalidValueError, match="states of 3 slots"):
            state.renew_(wrong)
    assert not state.checkpoint.decode().any()
    spec = SPECS["mamba2"][0]
    for rate in (None, torch.ones(1), torch.ones(4, 1)):
        with pytest.raises(InvalidValueError, match="decay_rate"):
            DecodeState.allocate(spec, StatePolicy(), 1, decay_rate=rate)
    with pytest.raises(InvalidValueError, match="slots"):
        DecodeState.allocate(SPECS["gdn"][0], StatePolicy(), -1)


ARMS = ["replay-fp32-w4", "decoupled-nvfp4-w4", "coupled-nvfp4", "coupled-fp8-w4", "coupled-bf16", "coupled-fp16-w4",
        "coupled-int8-sr", "coupled-mxfp4-hadamard", "decoupled-bf16-mxfp8-w4", "reference"]  # fmt: skip


def advance_by(state, inputs, stepping):
    if not stepping:
        return scan(state, inputs)
    return torch.cat([step(state, inputs.slice(t, t + 1)) for t in range(inputs.tokens)], dim=1)


@given(
    st.sampled_from(sorted(SPECS)),
    st.sampled_from(ARMS),
    st.sampled_from(["k", "v", "beta", "g"]),
    st.sampled_from([float("inf"), float("-inf"), float("nan")]),
    st.integers(0, 11),
    st.booleans(),
)
@bounded(60)
def test_inf_and_nan_never_pass_for_numbers(family, arm, name, value, at, stepping):
    """One bad number anywhere in three windows: an error that names the slot, also where a format would saturate it."""
    state = fresh(family, arm, 2)
    inputs = inputs_for(family, 2, 12)
    if name == "g" and (family == "mamba2" or value == float("-inf")):
        return  # a log-decay of −Inf forgets, which is right: test_hardening_gates.py
    getattr(inputs, name)[1, at, 1] = value
    with pytest.raises(NonFiniteStateError, match=f"layer '{LAYER}', slot 1, head "):
        advance_by(state, inputs, stepping)


@given(
    st.sampled_from(sorted(SPECS)),
    st.sampled_from(["k", "v", "beta"]),
    st.floats(10, 38.4).map(lambda e: 10.0**e),
    st.integers(0, 11),
    st.booleans(),
)
@bounded(40)
def test_huge_inputs_are_right_or_an_error(family, name, value, at, stepping):
    """Arms whose recurrence is FP32: overflow is named, and what does not overflow is right."""
    state = fresh(family, "decoupled-nvfp4-w4", 2)
    inputs = inputs_for(family, 2, 12)
    getattr(inputs, name)[1, at, 1] = value
    try:
        advance_by(state, inputs, stepping)
    except NonFiniteStateError as raised:
        assert f"layer '{LAYER}', slot 1, head " in str(raised)
        return
    _, states = truth(family, inputs)
    # a key or gain that large magnifies what rounding left behind by as much again at every write
    assert error(folded(state)[0], states[-1][0]) < TOLERANCES["fp32"][0]
    if name == "v":
        assert close(folded(state)[1], states[-1][1])


def test_a_step_that_fails_has_moved_no_row():
    """Slot 1 overflows at its flush: what the others hold can be stepped again, with or without it."""
    arm, inputs = "coupled-int8-w4-sr", inputs_for("gdn", 3, 9)  # stochastic: seeded by position
    state, expected = fresh("gdn", arm, 3), fresh("gdn", arm, 3)
    for each in (state, expected):
        scan(each, inputs.slice(0, 2).map(lambda t: t[:1]), torch.tensor([0]))  # cursors 2, 0, 0
        scan(each, inputs.slice(0, 3).map(lambda t: t[1:]), torch.tensor([1, 2]))  # 2, 3, 3
    bad = inputs.slice(3, 4).map(torch.clone)
    bad.v[1] = float("inf")
    before = state.clone()
    for advance in (step, lambda s, i: scan(s.select(torch.tensor([0, 1, 2])), i)):
        with pytest.raises(NonFiniteStateError, match="slot 1"):
            advance(state, bad)
        assert torch.equal(state.cursor, before.cursor) and torch.equal(state.position, before.position)
        assert torch.equal(folded(state), folded(before))
    slots = torch.tensor([0, -1, 2])
    rest = inputs.slice(3, 9)
    assert torch.equal(scan(state, rest, slots), scan(expected, rest, slots))
    kept = torch.tensor([0, 2])
    assert torch.equal(folded(state, kept), folded(expected, kept))


# ---- shapes


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("key_dim", [1, 15, 17, 60, 100, 127])
def test_odd_key_dimensions(family, key_dim):
    """With every read format: scan is stepping, and the state that of the recurrence. V is 1 here."""
    spec = LayerSpec(family, 2, 1 if family != "kda" else 2, 1, key_dim)
    rate = -torch.tensor([0.5, 2.0]) if family == "mamba2" else None
    inputs = random_inputs(spec, 1, 7, key_dim, dtype=torch.float32)
    outputs, states = recurrence(spec, inputs, torch.zeros(1, 2, 1, key_dim, dtype=torch.float64), rate)
    for read in (None, *FORMATS):
        rotation = "hadamard" if read and FORMATS[read].scaling else None
        policy = StatePolicy(read=read, window=3, rotation=rotation)
        stepped, scanned = (DecodeState.allocate(spec, policy, 1, layer=LAYER, decay_rate=rate) for _ in range(2))
        y = torch.cat([step(stepped, inputs.slice(t, t + 1)) for t in range(7)], dim=1)
        assert close(scan(scanned, inputs), y), read
        assert close(scanned.checkpoint.codes, stepped.checkpoint.codes)
        assert close(folded(stepped), states[-1]), read
        assert error(y, outputs) < (TOLERANCES["fp32"][0] if read in (None, "fp32") else 0.5), read


def test_seventy_thousand_tiny_sequences():
    """More than 65,535 rows, the limit of two of a GPU's three grid axes. A state is one number: S ← S·e^g + Δ·v·k."""
    rows = 70_000
    spec = LayerSpec("mamba2", 1, 1, 1, 1)
    rate = torch.tensor([-0.5])
    state = DecodeState.allocate(spec, parse_arm("decoupled-bf16-w2"), rows, layer=LAYER, decay_rate=rate)
    inputs = random_inputs(spec, rows, 3, 1, dtype=torch.float32)
    exact, slots = torch.zeros(rows, dtype=torch.float64), torch.randperm(rows)
    slots[::7] = -1
    live = slots >= 0
    for t in range(3):
        now = inputs.slice(t, t + 1)
        y = step(state, now, slots)[:, 0, 0, 0]
        b, q, k, v = (x.double().reshape(rows) for x in (now.beta, now.q, now.k, now.v))
        exact = exact * torch.exp(-0.5 * b) + b * v * k
        if t == 1:  # this one flushed
            assert close(y[live], (exact * q)[live], "unit")
    assert not y[~live].any()
    assert close(folded(state, slots[live])[:, 0, 0, 0], exact[live], "unit")
    untouched = torch.ones(rows, dtype=torch.bool)
    untouched[slots[live]] = False
    assert not state.position[untouched].any() and int(untouched.sum()) == int((~live).sum())
