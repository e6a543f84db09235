"""Slots that go from replay to the standard path and back: outputs, state and copy are those of the references."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import ast
from pathlib import Path

import pytest
import torch
from kernel_cases import SPECS, as_bytes, make_state, token
from recurrence import random_inputs, recurrence
from tiny_models import build

from quantize_state.adapters import attach
from quantize_state.adapters.cached import CachedState
from quantize_state.kernels import ops, paths, sequence
from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.paths import Crossover, standard_pays
from quantize_state.kernels.shapes import SHAPES
from quantize_state.kernels.speculative import accept, accept_on_device
from quantize_state.kernels.speculative import verify as reference_verify
from quantize_state.kernels.standard.reference import step as standard_step
from quantize_state.kernels.standard.triton import step as standard_kernel_step
from quantize_state.kernels.step import folded, prefill, scan
from quantize_state.kernels.step import step as reference_step
from quantize_state.quant import load_states, save_states
from quantize_state.quant.codec import encode
from quantize_state.quant.errors import FileFormatError, InvalidValueError
from quantize_state.quant.inspection import inspect
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.state import STALE

ROOT = Path(__file__).resolve().parent.parent
FP32 = 2e-6
"""Relative error of FP32 sums in another order, over a few tokens."""
HALF = 2e-3
"""Of block sums in float16, of 4-bit reads."""
SLOTS = [3, -1, 1, 2, 0]
FILLS = [0, 1, 2, STALE, 1]
"""Of slots 0 to 4 in windows of 3: every count that a ring can have between steps."""

interpreted = pytest.mark.skipif(
    not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1"
)


def error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def make(family, fills, window=4, **options):
    """A state whose rings hold ``fills``; unused rows are NaN, and a stale copy that of another checkpoint."""
    state = make_state(family, fills=[max(f, 0) for f in fills], slots=len(fills), window=window, **options)
    if state.copy is not None:
        for slot, fill in enumerate(fills):
            if fill == STALE:
                other = torch.randn(1, *state.checkpoint.shape[1:], generator=torch.Generator().manual_seed(100 + slot))
                index = torch.tensor([slot])
                state.copy.write_(index, encode(other, *state.policy.how(state.policy.read)))
                state.cursor[slot] = STALE
    return state


def fresh_copies(state, slots):
    """Whether the copies of ``slots`` are, to the bit, the encoding of their checkpoints."""
    copy = state.copy
    again = encode(state.checkpoint.codes, copy.format, copy.scale_rule, copy.rotation).tensors()
    return all(torch.equal(as_bytes(copy.tensors()[n][slots]), as_bytes(t[slots])) for n, t in again.items())


@interpreted
@pytest.mark.parametrize("family", SPECS)
def test_a_slot_goes_from_replay_to_standard_and_back(family):
    """From every fill: two tokens by the standard kernel, then replay past a flush, padding and all."""
    state = make(family, FILLS, window=3, read="nvfp4")
    clone, slots = state.clone(), torch.tensor(SLOTS)
    live = [b for b, s in enumerate(SLOTS) if s >= 0]
    held = [SLOTS[b] for b in live]
    w = sequence.Workspace.allocate(state, len(SLOTS))
    for t, path in enumerate(["standard", "standard", *["replay"] * 4]):
        inputs = token(family, len(SLOTS), seed=t)
        expected = (standard_step if path == "standard" else reference_step)(clone, inputs, slots)
        out = torch.full_like(expected, float("nan"))
        sequence.step(state, inputs, slots, path=path, workspace=w, out=out)
        flushed = path == "standard" or t in (2, 5)
        for b in live:
            assert error(out[b], expected[b]) < (FP32 if flushed else HALF), (t, b)
        assert out[1].isnan().all(), "a padded row was written"
        assert torch.equal(state.cursor, clone.cursor) and torch.equal(state.position, clone.position), t
        assert error(state.checkpoint.codes[held], clone.checkpoint.codes[held]) < FP32, t
        assert not w.done.any()
        if path == "standard":
            assert state.cursor[held].tolist() == [STALE] * len(held)
            assert not fresh_copies(state, held)
        else:
            assert fresh_copies(state, held), "the first step by replay renews the copy"
    w.check_finite(state)
    assert int(state.cursor[4]) == 1 and int(state.position[4]) == 100, "a slot that no row names"


@interpreted
@pytest.mark.parametrize("family", SPECS)
def test_the_state_is_that_of_the_recurrence(family):
    """Whatever the path of each token, with nothing to round but FP32: against float64, token by token."""
    spec, rate = SPECS[family]
    walk = ["replay", "standard", "replay", "replay", "replay", "standard", "standard", "replay", "standard"]
    state = make(family, read=None, fills=[0], dtype=torch.float32)
    inputs = random_inputs(spec, 1, len(walk), 7, dtype=torch.float32)
    expected, states = recurrence(spec, inputs, state.checkpoint.codes.double(), rate)
    for t, path in enumerate(walk):
        y = sequence.step(state, inputs.slice(t, t + 1), path=path)
        assert error(y[:, 0], expected[:, t]) < FP32 and error(folded(state), states[t]) < FP32, t
        assert int(state.cursor) >= 0, "without a copy nothing is stale"


@interpreted
@pytest.mark.parametrize(("family", "early"), [*((f, False) for f in SPECS), ("gdn", True)])
def test_a_stale_copy_is_renewed_before_drafts_are_read(family, early):
    state = make(family, fills=[0, STALE, 2, STALE], read="nvfp4")
    clone, slots = state.clone(), torch.tensor([1, 3, -1, 0])
    inputs = random_inputs(SPECS[family][0], 4, 3, 3, dtype=torch.float32)
    inputs = inputs.map(lambda t: t.bfloat16() if t.dim() == 4 and t.shape != inputs.beta.shape else t)
    expected = reference_verify(clone, inputs, slots, early=early)
    out, verified = sequence.verify(state, inputs, slots, early=early)
    assert torch.equal(verified, expected.tokens) and error(out, expected.y) < HALF
    assert error(out[:2, 0], expected.y[:2, 0]) < FP32, "the certain token flushed"
    counts = torch.tensor([1, 3, 1, 2], dtype=torch.int32)
    accept_on_device(state, counts, verified, slots)
    accept(clone, counts, expected.tokens.clamp(min=1), slots)
    assert torch.equal(state.cursor, clone.cursor) and torch.equal(state.position, clone.position)
    assert fresh_copies(state, [1, 3]) and error(state.checkpoint.codes, clone.checkpoint.codes) < FP32


@interpreted
def test_the_operator_takes_a_path():
    state = make("gdn", fills=[3, STALE])
    inputs, slots = token("gdn", 2), torch.tensor([1, 0])
    clone = state.clone()
    expected = sequence.step(clone, inputs, slots, path="standard")
    layer = ops.register_layer(state)

    def model(pool, q, k, v, beta, g, slots):
        return ops.decode_step(pool, q, k, v, beta, g, slots, layer, "standard") + 1.0

    y = torch.compile(model, backend="aot_eager", fullgraph=True)(ops.pool_of(state), *vars(inputs).values(), slots)
    assert torch.equal(y, expected + 1.0) and state.cursor.tolist() == clone.cursor.tolist() == [STALE, STALE]
    assert torch.equal(state.checkpoint.codes, clone.checkpoint.codes)


@interpreted
def test_auto_asks_the_table(monkeypatch):
    taken = []
    monkeypatch.setattr(sequence, "standard_step", lambda *a, **k: taken.append(standard_kernel_step(*a, **k)))
    monkeypatch.setattr(paths, "CROSSOVERS", (Crossover(4, "gdn", isa=90), Crossover(8, "gdn")))
    for rows, standard in ((1, True), (2, True), (3, False)):  # of 4 heads
        state = make("gdn", fills=[0] * rows)
        sequence.step(state, token("gdn", rows), path="auto")
        assert bool(taken) == standard and (int(state.cursor[0]) == STALE) == standard, rows
        taken.clear()
    sequence.step(make("gdn", fills=[0]), token("gdn", 1))
    assert not taken, "replay is what is done unless something else is asked for"
    with pytest.raises(InvalidValueError, match="unknown path 'fast'"):
        sequence.step(make("gdn", fills=[0]), token("gdn", 1), path="fast")


def test_the_first_crossover_that_fits_counts(monkeypatch):
    nvfp4, exact = StatePolicy(read="nvfp4"), StatePolicy()
    table = (Crossover(256, "gdn", "nvfp4", isa=90), Crossover(512, "gdn", "fp32"), Crossover(64, "gdn"))
    monkeypatch.setattr(paths, "CROSSOVERS", table)
    spec = SHAPES["qwen3.5-4b"]
    for policy, isa, most in ((nvfp4, 90, 8), (exact, 90, 16), (nvfp4, 100, 2), (StatePolicy(read="int8"), 90, 2)):
        assert [b for b in (1, 2, 4, 8, 16, 32) if standard_pays(spec, policy, isa, b)][-1] == most
    assert not standard_pays(SHAPES["glm-5.3-flash"], nvfp4, 90, 1), "nothing is known of it"
    assert standard_pays(SHAPES["glm-5.3-flash"], StatePolicy(read="nvfp4", window=1), 90, 512)


@pytest.mark.parametrize("family", SPECS)
def test_the_reference_flushes_a_stale_copy_first(family):
    """Stepping, scan and prefill of rows that are stale, beside others."""
    spec = SPECS[family][0]
    state = make(family, fills=[STALE, 2, STALE, 0], dtype=torch.float32)
    before = state.clone()
    inputs = random_inputs(spec, 4, 6, 5, dtype=torch.float32)
    stepped, scanned = state.clone(), state.clone()
    y = torch.cat([reference_step(stepped, inputs.slice(t, t + 1)) for t in range(6)], 1)
    assert error(scan(scanned, inputs), y) < FP32
    assert torch.equal(scanned.cursor, stepped.cursor) and stepped.cursor.tolist() == [1, 0, 1, 2]
    assert torch.equal(scanned.position, stepped.position)
    assert error(scanned.checkpoint.codes, stepped.checkpoint.codes) < FP32
    assert torch.equal(folded(before)[0], before.checkpoint.codes[0])
    one = state.clone()
    scan(one, inputs.slice(0, 1))
    assert one.cursor.tolist() == [0, 3, 0, 1] and fresh_copies(one, [0, 2])
    exact, _ = recurrence(spec, inputs, folded(before).double(), SPECS[family][1])
    assert error(y[:, 0][[0, 2]], exact[:, 0][[0, 2]]) < FP32, "a token that flushes has its output from FP32"
    assert error(prefill(state, inputs), exact) < FP32 and not state.cursor.any() and fresh_copies(state, [0, 1, 2, 3])


def test_verification_by_the_reference_is_plain_decoding():
    spec = SPECS["gdn"][0]
    state = make("gdn", fills=[STALE, 1], dtype=torch.float32)
    plain, inputs = state.clone(), random_inputs(spec, 2, 3, 5, dtype=torch.float32)
    found = reference_verify(state, inputs)
    assert found.tokens.tolist() == [3, 2] and state.cursor.tolist() == [-1, 1]
    accept(state, found.tokens, found.tokens)
    y = torch.cat([reference_step(plain, inputs.slice(t, t + 1)) for t in range(3)], 1)
    assert error(found.y[0], y[0]) < FP32 and error(found.y[1, :2], y[1, :2]) < FP32
    assert state.cursor.tolist() == [2, 3] and int(plain.cursor[0]) == 2
    assert torch.equal(as_bytes(state.copy.codes[0]), as_bytes(plain.copy.codes[0]))


def test_a_slot_that_waits_for_its_count_is_not_stale():
    state = make("gdn", fills=[0, 0])
    for cursor in (-1, -3):
        state.cursor[1] = cursor
        with pytest.raises(InvalidValueError, match=f"holds {cursor} tokens"):
            reference_step(state, token("gdn", 2))
    exact = make("gdn", read=None, fills=[0])
    exact.cursor[0] = STALE
    with pytest.raises(InvalidValueError, match=f"holds {STALE} tokens"):
        reference_step(exact, token("gdn", 1))


def test_files_keep_what_is_stale(tmp_path):
    state = make("kda", fills=[STALE, 1])
    state.ring = {name: ring.nan_to_num().contiguous() for name, ring in state.ring.items()}
    file = tmp_path / "states.safetensors"
    save_states({"a": state}, file)
    (back,) = load_states(file).values()
    assert back.cursor.tolist() == [STALE, 1]
    inputs = token("kda", 2)
    assert torch.equal(reference_step(back, inputs), reference_step(state.clone(), inputs))
    copy = {r.name: r for r in inspect(file)}["a/copy"]
    assert copy.shape[0] == 2 and 0.05 < copy.error < 0.2, "of the slot whose copy is that of its checkpoint"
    exact = make("kda", read=None, fills=[0])
    exact.cursor[0] = STALE
    save_states({"a": exact}, file)
    with pytest.raises(FileFormatError, match="claims to hold other counts"):
        load_states(file)


def test_drafts_on_a_stale_state_change_nothing_until_they_are_kept():
    state = make("gdn", fills=[STALE, STALE], dtype=torch.float32)
    plain, before = state.clone(), state.clone()
    held = CachedState(state, False, None, {})
    inputs = random_inputs(SPECS["gdn"][0], 2, 3, 5, dtype=torch.float32)
    y = torch.cat([held.verify(inputs.slice(0, 1)), held.verify(inputs.slice(1, 3))], 1)
    assert torch.equal(held.state.cursor, before.cursor) and torch.equal(
        held.state.checkpoint.codes, before.checkpoint.codes
    )
    expected = torch.cat([reference_step(plain, inputs.slice(t, t + 1)) for t in range(2)], 1)
    assert error(y[:, :2], expected) < FP32
    held.crop(1)
    assert held.state.cursor.tolist() == [1, 1] and error(held.tensor(), folded(plain)) < FP32


def test_a_handle_tells_its_layers_the_path(monkeypatch):
    seen = []
    real = CachedState.step
    monkeypatch.setattr(
        CachedState, "step", lambda self, inputs, path: (seen.append(path), real(self, inputs, path))[1]
    )
    model = build("qwen3_next")
    ids = torch.tensor([[1, 2, 3]])
    for asked in (None, "replay"):
        with attach(model, "decoupled-nvfp4", **({} if asked is None else {"path": asked})) as handle, torch.no_grad():
            cache = model(ids, use_cache=True).past_key_values
            model(ids[:, :1], past_key_values=cache)
            handle.path = "standard"
            model(ids[:, :1], past_key_values=cache)
        assert set(seen[: len(seen) // 2]) == {asked or "auto"} and set(seen[len(seen) // 2 :]) == {"standard"}
        seen.clear()
    with pytest.raises(InvalidValueError, match="unknown path"):
        attach(model, "decoupled-nvfp4", path="fp32")


def test_whatever_measures_accuracy_replays():
    """By the source: no evaluation may take the standard path, whose outputs are FP32, because a batch is small."""
    found = 0
    for file in [*(ROOT / "evals").rglob("*.py"), ROOT / "src/quantize_state/cli/generate.py"]:
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("attach", "activate"):
                given = {k.arg: ast.literal_eval(k.value) for k in call.keywords if k.arg == "path"}
                exact = [a.value for a in call.args if isinstance(a, ast.Constant)] == ["reference"]
                assert given == {"path": "replay"} or (exact and file.name == "generate.py"), f"{file}:{call.lineno}"
                found += 1
    assert found >= 10
