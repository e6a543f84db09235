"""The Triton kernels, run by its interpreter, against the torch references: outputs and state."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from kernel_cases import SPECS, as_bytes, gaps_untouched, make_far, make_state, pools, read_case, token
from recurrence import random_inputs, recurrence

from quantize_state.kernels import launch, ops, sequence
from quantize_state.kernels.compile import SHAPES, record
from quantize_state.kernels.device.math import inverse_norm
from quantize_state.kernels.device.targets import INTERPRET, TARGETS, tl, triton, unavailable
from quantize_state.kernels.device.views import slot_stride
from quantize_state.kernels.fold.renew import renew
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.launch import Entry, Launch
from quantize_state.kernels.readout.triton import readout
from quantize_state.kernels.step import step as reference_step
from quantize_state.kernels.window.reference import make_window, read_terms
from quantize_state.quant.codec import encode
from quantize_state.quant.errors import InvalidValueError, NonFiniteStateError
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")


@triton.jit
def norm_kernel(p_x, p_y, N: tl.constexpr):
    o = tl.arange(0, N)
    tl.store(p_y + o, inverse_norm(tl.load(p_x + o)))


FP32 = 2e-6
"""Relative error of FP32 sums in another order."""
HALF = 2e-3
"""Of block sums in float16, which the interpreter rounds twice per product."""


def error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


@pytest.mark.parametrize("format", [*FORMATS, "nvfp4-half", "mxfp4-half"])
def test_readout(format):
    format, _, half = format.partition("-")
    state, arguments, out, y = read_case(format, half=bool(half))
    readout(state.read_source, state.ring["v"], *arguments, out)
    live = [0, 2, 3]
    assert error(out[live], y[live]) < (HALF if half else FP32)
    assert out[1].isnan().all(), "a padded row was written"


@pytest.mark.parametrize("half", [False, True])
def test_readout_of_several_queries_and_a_shared_theta(half):
    state, arguments, out, y = read_case("nvfp4", queries=3, half=half, shared=2, window=5, fills=(0, 3, 4, 1, 5))
    readout(state.read_source, state.ring["v"], *arguments, out)
    assert error(out[[0, 2, 3]], y[[0, 2, 3]]) < (HALF if half else FP32)


def test_readout_skip_and_gate():
    state, arguments, out, y = read_case("bf16")
    rng = torch.Generator().manual_seed(5)
    x, z = torch.randn(y.shape, generator=rng), torch.randn(y.shape, generator=rng)
    d = torch.randn(state.spec.heads, generator=rng)
    readout(state.read_source, state.ring["v"], *arguments, out, skip=(x, d), gate=z)
    expected = (y + d[:, None] * x) * torch.nn.functional.silu(z)
    assert error(out[[0, 2, 3]], expected[[0, 2, 3]]) < FP32


SLOTS = [3, -1, 1, 4, 0]


def both_step(state, inputs, slots, tokens=1, half=None):
    """One step by the reference on a clone, and by the kernels with poisoned outputs: (expected, ours, clone)."""
    clone = state.clone()
    expected = reference_step(clone, inputs, torch.tensor(slots))
    workspace = sequence.Workspace.allocate(state, len(slots), half=half)
    for t in (workspace.theta, workspace.gain, workspace.c, workspace.start):
        t.fill_(float("nan"))
    workspace.top.fill_(0x7E000000)  # of a flush long ago, and enormous
    out = torch.full_like(expected, float("nan"))
    sequence.step(state, inputs, torch.tensor(slots), workspace=workspace, out=out)
    workspace.check_finite(state)
    return expected, out, clone


def check_state(state, clone, exact_copy=True):
    """Rings, cursors and positions equal to the bit, checkpoints to rounding, the copy that of our checkpoint."""
    assert torch.equal(state.cursor, clone.cursor) and torch.equal(state.position, clone.position)
    for name, ring in state.ring.items():
        assert torch.equal(ring.nan_to_num(7e7), clone.ring[name].nan_to_num(7e7)), name
    assert error(state.checkpoint.codes, clone.checkpoint.codes) < FP32
    if state.copy is not None:
        again = encode(state.checkpoint.codes, *state.copy.how)
        for name, t in again.tensors().items():
            ours = state.copy.tensors()[name].contiguous()
            assert torch.equal(t.view(torch.uint8), ours.view(torch.uint8)), name


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("read", [None, "nvfp4"])
def test_step(family, read):
    """Rows that read, one that flushes, one that is padding, and a slot that no row names."""
    state = make_state(family, read=read, window=4, fills=[2, 1, 1, 3, 0])
    before = state.clone()
    inputs = token(family, len(SLOTS))
    expected, out, clone = both_step(state, inputs, SLOTS, half=False if read else None)
    live = [b for b, s in enumerate(SLOTS) if s >= 0]
    for b in live:
        assert error(out[b], expected[b]) < 2 * FP32, f"row {b} of slot {SLOTS[b]}"
    assert out[1].isnan().all(), "a padded row was written"
    check_state(state, clone)
    for name, pool in pools(state).items():
        assert torch.equal(as_bytes(pool[2]), as_bytes(pools(before)[name][2])), f"{name}: an unnamed slot was written"
        assert gaps_untouched(pool), f"{name}: something was written between slots"


@pytest.mark.parametrize("family", SPECS)
def test_rings_longer_than_one_piece(family):
    """KDA's window kernel takes eight tokens at a time, and the fold pads rings of up to 16 alike."""
    state = make_state(family, read=None, window=12, slots=4, fills=[7, 8, 10, 11])
    expected, out, clone = both_step(state, token(family, 4), [0, 1, 2, 3])
    for b in range(4):
        assert error(out[b], expected[b]) < 2 * FP32, b
    check_state(state, clone)


@pytest.mark.parametrize("heads, key_heads", [(3, 1), (6, 1), (8, 2), (8, 1)])
def test_heads_that_share_a_key(heads, key_heads, monkeypatch):
    """A program of the window kernel takes one, two or four of them: those of a key are so many programs'."""
    spec = LayerSpec("gdn", heads, key_heads, 16, 32, qk_l2norm=True, query_scale=32**-0.5)
    monkeypatch.setitem(SPECS, "shared", (spec, None))
    state = make_state("shared", read="fp8_e4m3", window=4, fills=[3, 2, 0], slots=3)
    for seed in (9, 10):  # the second step flushes with the row of M that the first one left
        expected, out, clone = both_step(state, token("shared", 2, seed=seed), [0, 1])
        for b in range(2):
            assert error(out[b], expected[b]) < 2 * FP32, (seed, b)
        check_state(state, clone)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_tokens_of_another_type_than_the_ring(family):
    """Then a row's address cannot be chosen between both, and each is loaded by itself."""
    state = make_state(family, read=None, window=4, fills=[3, 2], slots=2, dtype=torch.float32)
    inputs = token(family, 2)
    assert inputs.k.dtype == torch.bfloat16 != state.ring["k"].dtype
    expected, out, clone = both_step(state, inputs, [0, 1])
    for b in range(2):
        assert error(out[b], expected[b]) < 2 * FP32, b
    check_state(state, clone)


def test_the_norm_of_keys_and_queries():
    """One over the root of what torch takes the root of, to two units in the last place; of what overflowed, zero."""
    rng = torch.Generator().manual_seed(0)
    square = torch.cat([torch.rand(60, generator=rng) * 10.0 ** torch.arange(-30, 30), torch.tensor([0.0, 3e38])])
    out = torch.empty(64)
    norm_kernel[(1,)](torch.cat([square, torch.tensor([float("inf"), float("nan")])]), out, N=64)
    assert ((out[:62].double() * (square.double() + 1e-6).sqrt()) - 1).abs().max() < 2**-22
    assert out[62] == 0 and out[63].isnan()


@pytest.mark.parametrize("read", [f for f in FORMATS if f != "nvfp4"])
def test_the_fold_renews_every_copy(read):
    state = make_state("gdn", read=read, window=4, fills=[3, 1], slots=2)
    expected, out, clone = both_step(state, token("gdn", 2), [0, 1])
    assert error(out[0], expected[0]) < FP32 and error(out[1], expected[1]) < (HALF if read == "mxfp4" else 2 * FP32)
    check_state(state, clone)


@pytest.mark.parametrize(
    "policy", [{"scale_rule": "four_over_six"}, {"rotation": "hadamard16"}, {"rotation": "hadamard"}], ids=str
)
@pytest.mark.parametrize("family", ["mamba2", "kda"])
def test_scale_rules_and_rotations(family, policy):
    state = make_state(family, window=4, fills=[3, 2], slots=2, **policy)
    expected, out, clone = both_step(state, token(family, 2), [1, 0])
    assert error(out[1], expected[1]) < FP32 and error(out[0], expected[0]) < HALF
    check_state(state, clone)


@pytest.mark.parametrize(
    "family, policy",
    [
        ("mamba2", {"scale_rule": "four_over_six", "rotation": "hadamard"}),
        ("gdn", {"rotation": "hadamard16"}),
        ("gdn", {"read": "fp8_e4m3"}),
        ("kda", {}),
        ("kda", {"read": "mxfp4", "rotation": "hadamard"}),
    ],
    ids=str,
)
def test_column_scales(family, policy):
    """Θ takes the scales that the fold's encoder divides by: outputs as the reference's, codes to the bit."""
    state = make_state(family, window=4, fills=[3, 2], slots=2, balanced=True, **policy)
    expected, out, clone = both_step(state, token(family, 2), [1, 0])
    half = FORMATS[state.copy.format].bits == 4
    assert error(out[1], expected[1]) < 2 * FP32 and error(out[0], expected[0]) < (HALF if half else 2 * FP32)
    check_state(state, clone)


@pytest.mark.parametrize("family", SPECS)
def test_window_terms(family):
    """Θ and C of rows at every fill, each against the reference."""
    length = 5
    state = make_state(family, read="fp8_e4m3", window=length, slots=4, fills=[0, 1, 2, 3], dtype=torch.float32)
    inputs, slots = token(family, 4, dtype=torch.float32), torch.arange(4, dtype=torch.int32)
    w = sequence.Workspace.allocate(state, 4)
    sequence.plan(state, slots, w)
    sequence.window(state, inputs, slots, w)
    theta = w.theta.repeat_interleave(state.spec.heads // w.theta.shape[2], 2) * w.gain[..., None]
    row = torch.arange(4)
    q = torch.zeros_like(state.ring["k"])
    q[row, row] = inputs.q[:, 0]
    window = make_window(
        state.spec, TokenInputs(q=q, **state.ring), decay_rate=state.decay_rate, used=row + 1, dtype=torch.float64
    )
    terms = read_terms(window, row[:, None])
    for b in range(4):
        assert error(theta[b, 0], terms.theta[b, :, 0]) < FP32, b
        assert error(w.c[b, 0], terms.c[b, :, 0]) < FP32, b


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("decay", [float("-inf"), 0.0])
def test_extreme_gates(family, decay):
    """Identical keys and gains of 2: the triangular system at its worst; −∞ forgets everything."""
    state = make_state(family, read=None, window=4, fills=[3, 2], slots=2, dtype=torch.float32)
    inputs = token(family, 2, dtype=torch.float32)
    state.ring["k"][:] = inputs.k
    state.ring["beta"][:, :3] = 2.0
    state.ring["g"][:, 1] = decay
    expected, out, clone = both_step(state, inputs, [0, 1])
    assert error(out, expected) < 3e-5  # the system's condition number is 3**3
    assert error(state.checkpoint.codes, clone.checkpoint.codes) < 3e-5


@pytest.mark.parametrize("family", SPECS)
def test_many_tokens_stay_close_to_float64(family):
    """Several flushes of a window that is no power of two: the checkpoint stays within FP32 rounding."""
    tokens = 6
    spec, rate = SPECS[family]
    state = make_state(family, read="nvfp4", window=3, slots=1, fills=[0], dtype=torch.float32)
    start = state.checkpoint.codes.double()
    inputs = random_inputs(spec, 1, tokens, 7, dtype=torch.float32)
    _, states = recurrence(spec, inputs, start, rate)
    for t in range(tokens):
        sequence.step(state, inputs.slice(t, t + 1))
        if int(state.cursor) == 0:
            assert error(state.checkpoint.codes, states[t]) < FP32, t
    assert int(state.cursor) == 0 and int(state.position) == 100 + tokens


@pytest.mark.parametrize("family", SPECS)
def test_isolation(family):
    """The checkpoint that a fold leaves does not depend on a bit of the read copy."""
    state = make_state(family, window=4, fills=[3], slots=1)
    other = state.clone()
    other.copy.codes.random_(0, 256)
    inputs = token(family, 1)
    for s in (state, other):
        sequence.step(s, inputs)
    assert torch.equal(as_bytes(state.checkpoint.codes), as_bytes(other.checkpoint.codes))
    assert torch.equal(state.copy.codes, other.copy.codes)


def test_skip_and_gate_of_rows_that_flush():
    state = make_state("mamba2", window=4, fills=[3, 1], slots=2)
    inputs = token("mamba2", 2)
    clone = state.clone()
    rng = torch.Generator().manual_seed(5)
    z, d = torch.randn(inputs.v.shape, generator=rng), torch.randn(state.spec.heads, generator=rng)
    expected = (reference_step(clone, inputs) + d[:, None] * inputs.v) * torch.nn.functional.silu(z)
    ours = sequence.step(state, inputs, skip=(inputs.v.contiguous(), d), gate=z)
    assert error(ours[0], expected[0]) < FP32 and error(ours[1], expected[1]) < HALF


def test_a_state_that_is_not_finite_is_named():
    state = make_state("gdn", window=4, fills=[3, 3], slots=2)
    inputs = token("gdn", 2)
    inputs.v[1, 0, 2] = float("nan")
    w = sequence.Workspace.allocate(state, 2)
    sequence.step(state, inputs, workspace=w)
    with pytest.raises(NonFiniteStateError, match="slot 1, head 2"):
        w.check_finite(state)


def test_slots_beyond_two_billion_elements():
    """Offsets pass 2**31 although strides do not: pools of address space without memory behind it."""
    state = make_state("gdn", window=4, slots=4, fills=[0, 3, 3, 1])
    far = make_far(state)
    inputs = token("gdn", 2)
    slots = torch.tensor([3, 2])
    assert torch.equal(sequence.step(far, inputs, slots), sequence.step(state, inputs, slots))
    for name, pool in pools(state).items():
        assert torch.equal(as_bytes(pools(far)[name][2:]), as_bytes(pool[2:])), name


def test_what_the_kernels_refuse():
    def reason(**policy):
        spec, _ = SPECS["gdn"]
        return sequence.unsupported(DecodeState.allocate(spec, StatePolicy(**policy), 1))

    assert reason(read="nvfp4") is None
    assert "bf16" in reason(checkpoint="bf16")
    assert "mse" in reason(read="fp8_e4m3", scale_rule="mse") and reason(read="nvfp4", scale_rule="mse") is None
    assert "128" in reason(window=128)
    odd = DecodeState.allocate(LayerSpec("gdn", 1, 1, 16, 48), StatePolicy(), 1)
    assert "48" in sequence.unsupported(odd)
    with pytest.raises(InvalidValueError, match="contiguous"):
        slot_stride(torch.zeros(2, 4, 6)[:, :, ::2], "ring")
    state, inputs = make_state("gdn", window=4, fills=[3, 1], slots=2), token("gdn", 2)
    slice_ = torch.zeros(2, 3, state.spec.heads, state.spec.value_dim)[:, 1:2]
    own = slice_.contiguous()
    for wrong in ({"out": slice_}, {"gate": slice_}, {"skip": (slice_, own)}, {"out": own[:1]}):
        with pytest.raises(InvalidValueError, match="contiguous"):
            sequence.step(state, inputs, **({"out": own} | wrong))
    assert state.cursor.tolist() == [3, 1] and state.position.tolist() == state.clone().position.tolist()


def test_the_step_is_one_operator_that_torch_compile_traces():
    state = make_state("gdn", window=4, fills=[3, 1], slots=2)
    inputs, slots = token("gdn", 2), torch.tensor([1, 0])
    clone = state.clone()
    expected = sequence.step(clone, inputs, slots)
    layer = ops.register_layer(state)

    def model(pool, q, k, v, beta, g, slots):
        return ops.decode_step(pool, q, k, v, beta, g, slots, layer) + 1.0

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = compiled(ops.pool_of(state), *vars(inputs).values(), slots)
    assert torch.equal(y, expected + 1.0)
    assert torch.equal(state.checkpoint.codes, clone.checkpoint.codes) and torch.equal(state.cursor, clone.cursor)


def test_without_triton_the_modules_load_and_say_why_they_cannot_run():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from quantize_state.kernels import compile, ops, sequence\n"
        "from quantize_state.quant.spec import LayerSpec\n"
        "from quantize_state.quant.state import DecodeState\n"
        "from quantize_state.quant.policy import StatePolicy\n"
        "print(sequence.unsupported(DecodeState.allocate(LayerSpec('gdn', 1, 1, 16, 32), StatePolicy(), 1)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Triton does not load")


def test_a_plan_of_several_pieces():
    """More rows than one piece of the plan holds: whose list of flushing rows goes on where the last piece's ended."""
    spec, rows = LayerSpec("gdn", 1, 1, 16, 32), 2500
    state = DecodeState.allocate(spec, StatePolicy(read="nvfp4", window=4), rows)
    state.cursor.copy_(torch.randint(0, 4, (rows,), generator=torch.Generator().manual_seed(0)))
    slots = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).int()
    slots[::7] = -1
    live, fills = slots >= 0, state.cursor[slots.clamp(min=0).long()]
    w = sequence.Workspace.allocate(state, rows)
    sequence.plan(state, slots, w)
    flushing = torch.nonzero(live & (fills == 3)).flatten()
    assert w.flushing[: int(w.count)].tolist() == flushing.tolist() and len(flushing) > 200
    assert torch.equal(w.used[live], torch.where(fills == 3, 0, fills + 1)[live]) and not w.used[~live].any()
    assert torch.equal(state.cursor[slots[live].long()], w.used[live])


@pytest.mark.parametrize("programs", [1, 5, 1000])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8_e4m3"])
def test_tiles_are_shared_out_among_programs(monkeypatch, format, programs):
    """Whole heads of several tiles, the last one not full; some of the tiles of a head; one tile for each program."""
    shared = Launch(rows=64, warps=1, programs=programs)
    monkeypatch.setattr(launch, "TABLE", (Entry(shared, "renew"), *launch.TABLE))
    spec = replace(SPECS["gdn"][0], value_dim=40)
    state = DecodeState.allocate(spec, StatePolicy(read=format, window=3), 4)
    state.checkpoint.codes.copy_(torch.randn(state.checkpoint.codes.shape, generator=torch.Generator().manual_seed(0)))
    before = {n: as_bytes(t)[3].clone() for n, t in state.copy.tensors().items()}
    renew(state, torch.tensor([2, -1, 0, 1], dtype=torch.int32))
    for name, t in encode(state.checkpoint.codes, *state.copy.how).tensors().items():
        ours = as_bytes(state.copy.tensors()[name])
        assert torch.equal(ours[:3], as_bytes(t)[:3]), name
        assert torch.equal(ours[3], before[name]), name


@pytest.mark.parametrize("window,stages", [(32, 3), (33, 1), (64, 1)])
def test_long_windows_are_folded_without_copies_ahead(window, stages):
    """Which Triton 3.6 miscompiles on sm_90: only a GPU shows it, as NaN in the states."""
    calls = record(SHAPES["glm-5.3-flash"], StatePolicy(read="nvfp4", window=window), TARGETS["90a"])
    folds = [c for c in calls if c.kernel.fn.__name__ == "fold_kernel"]
    assert folds and {c.keywords["num_stages"] for c in folds} == {stages}
