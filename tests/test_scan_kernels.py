"""The scan's kernels, run by Triton's interpreter, against the reference scan: outputs and everything a state holds."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

from types import SimpleNamespace

import pytest
import torch
from recurrence import random_inputs, recurrence

from quantize_state.kernels import step as steps
from quantize_state.kernels.cases import random_columns
from quantize_state.kernels.device import codec, fake
from quantize_state.kernels.device.targets import INTERPRET, tl, triton, unavailable
from quantize_state.kernels.scan import triton as kernels
from quantize_state.kernels.scan.reference import scan_windows as reference
from quantize_state.quant.codec import fake_quantize
from quantize_state.quant.errors import NonFiniteStateError
from quantize_state.quant.formats import FORMATS
from quantize_state.quant.policy import StatePolicy, parse_arm
from quantize_state.quant.rounding import stream_keys
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FP32 = 2e-6
"""Relative error of FP32 sums in another order."""
FLIPS = 5e-3
"""Share of codes that may differ: those whose FP32 value, off by FP32, lies on the other side of a tie. Seen: none."""
FLIPPED = 2e-3
"""Relative error that so many codes, each a step apart, leave in a state and in what reads it."""

SPECS = {
    "mamba2": (LayerSpec("mamba2", 2, 1, value_dim=20, key_dim=32), -torch.tensor([0.1, 4.0])),
    "gdn": (LayerSpec("gdn", 2, 1, 20, 32, qk_l2norm=True, query_scale=32**-0.5), None),
    "kda": (LayerSpec("kda", 1, 1, 20, 32, qk_l2norm=True, query_scale=32**-0.5), None),
}
"""V = 20 is no power of two and takes two tiles of rows, where rows are independent."""

ARMS = [
    "reference", "replay-fp32-w4", "decoupled-nvfp4-w4", "coupled-nvfp4-w4", "coupled-nvfp4", "coupled-fp8-w4-hadamard",
    "decoupled-bf16-nvfp4-w4", "decoupled-nvfp4-w4-four_over_six-balanced-hadamard",
]  # fmt: skip
MORE = [
    *(f"decoupled-{name}-w5" for name in FORMATS if name != "nvfp4"),
    *(f"coupled-{name}-w3-sr" for name in FORMATS if name != "fp32"),
    *(f"coupled-{name}" for name in ("bf16", "mxfp4", "fp8_e4m3")),
    "coupled-int8-sr", "decoupled-nvfp4-w4-four_over_six-hadamard16", "coupled-nvfp4-w4-four_over_six",
    "coupled-nvfp4-w4-mse",
    "decoupled-mxfp4-w4-hadamard", "decoupled-nvfp4-w4-balanced", "decoupled-fp8-w4-balanced-hadamard16",
    "replay-fp32-w17", "replay-fp16-w4",
]  # fmt: skip


def error(ours, exact):
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def make(family, arm, slots=1, dtype=torch.float32, specs=SPECS):
    spec, rate = specs[family]
    state = DecodeState.allocate(
        spec,
        parse_arm(arm),
        slots,
        layer="layers.3",
        decay_rate=rate,
        dtype=dtype,
        columns=random_columns(spec, seed=2),
    )
    rng = torch.Generator().manual_seed(1)
    state.position += 7
    state.renew_(torch.randn(slots, spec.heads, spec.value_dim, spec.key_dim, generator=rng))
    return state


def inputs_of(family, rows, tokens, seed=5, specs=SPECS):
    return random_inputs(specs[family][0], rows, tokens, seed, dtype=torch.float32)


@pytest.fixture
def by_kernels(monkeypatch):
    """``step.scan`` with the kernels, as on a GPU."""

    def call(function, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(steps, "_windows_engine", lambda state: kernels.scan_windows)
            return function(*arguments)

    return call


def bits(t):
    return t.contiguous().view(torch.uint8)


def check_states(ours, expected):
    assert torch.equal(ours.cursor, expected.cursor) and torch.equal(ours.position, expected.position)
    for name, ring in ours.ring.items():
        assert torch.equal(ring, expected.ring[name]), name
    for a, b in ((ours.checkpoint, expected.checkpoint), (ours.copy, expected.copy)):
        if a is None:
            continue
        exact = a.format == "fp32"
        assert error(a.decode(), b.decode()) < (FP32 if exact else FLIPPED)
        assert exact or (bits(a.codes) != bits(b.codes)).float().mean() < FLIPS


def check_scan(by_kernels, family, arm, tokens, rows=1, **options):
    ours, expected = (make(family, arm, rows, **options) for _ in range(2))
    inputs = inputs_of(family, rows, tokens, specs=options.get("specs", SPECS))
    if options.get("dtype") == torch.bfloat16:
        inputs = inputs.map(lambda t: t.to(torch.bfloat16))
    y_expected = steps.scan(expected, inputs)
    y = by_kernels(steps.scan, ours, inputs)
    window = ours.policy.window
    assert error(y[:, :window], y_expected[:, :window]) < FP32  # before anything was rounded
    assert error(y, y_expected) < (FP32 if ours.policy.exact else FLIPPED)
    check_states(ours, expected)


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("family", SPECS)
def test_scan(by_kernels, family, arm):
    tokens = 20 if arm == "reference" else 3 if arm == "coupled-nvfp4" else 10  # 20: a shorter last chunk
    check_scan(by_kernels, family, arm, tokens)


@pytest.mark.parametrize("arm", MORE)
def test_every_format(by_kernels, arm):
    window = parse_arm(arm).window
    check_scan(by_kernels, "gdn", arm, 3 if window == 1 else 2 * window + 1)


def test_a_head_of_the_real_size_and_two_of_them(by_kernels):
    """128 × 128: products by halves of columns, and nvfp4's one scale for 128 rows."""
    specs = {"gdn": (LayerSpec("gdn", 1, 1, 128, 128, qk_l2norm=True), None)}
    check_scan(by_kernels, "gdn", "coupled-nvfp4-w3", 6, specs=specs)


def test_bfloat16_inputs(by_kernels):
    check_scan(by_kernels, "gdn", "decoupled-fp8-w4", 9, dtype=torch.bfloat16)


def test_ragged_rows_and_padding(by_kernels):
    """Rows whose windows end at different tokens, one that is padding, and a slot that no row names."""
    ours, expected = (make("gdn", "decoupled-nvfp4-w4", 4) for _ in range(2))
    for state in (ours, expected):
        for slot, lead in enumerate((0, 2, 3)):
            if lead:
                steps.scan(state, inputs_of("gdn", 1, lead, seed=slot), torch.tensor([slot]))
    inputs, slots = inputs_of("gdn", 4, 6), torch.tensor([2, -1, 0, 1])
    before = ours.clone()
    y_expected, y = steps.scan(expected, inputs, slots), by_kernels(steps.scan, ours, inputs, slots)
    assert error(y, y_expected) < FLIPPED and (y[1] == 0).all()
    check_states(ours, expected)
    assert torch.equal(bits(ours.checkpoint.codes[3]), bits(before.checkpoint.codes[3]))


def test_the_first_window_reads_the_copy_as_it_is_and_the_checkpoint_never_does(by_kernels):
    ours, expected, other = (make("kda", "decoupled-fp8-w4", 1) for _ in range(3))
    inputs = inputs_of("kda", 1, 8)
    for state in (ours, expected):
        state.copy.codes.view(torch.uint8).random_(0, 0x70, generator=torch.Generator().manual_seed(2))
    y_expected, y = steps.scan(expected, inputs), by_kernels(steps.scan, ours, inputs)
    y_other = by_kernels(steps.scan, other, inputs)
    assert error(y, y_expected) < FP32 and error(y[:, :3], y_other[:, :3]) > 0.1
    assert torch.equal(y[:, 3:], y_other[:, 3:])
    assert torch.equal(bits(ours.checkpoint.codes), bits(other.checkpoint.codes))


@pytest.mark.parametrize("arm", ["coupled-int8-w3-sr", "decoupled-nvfp4-w3"])
def test_pieces_change_nothing(by_kernels, monkeypatch, arm):
    whole, cut = make("gdn", arm), make("gdn", arm)
    inputs = inputs_of("gdn", 1, 9)
    y = by_kernels(steps.scan, whole, inputs)
    monkeypatch.setattr(kernels, "PIECE_BYTES", 1)
    assert torch.equal(by_kernels(steps.scan, cut, inputs), y)
    assert torch.equal(bits(cut.checkpoint.codes), bits(whole.checkpoint.codes))


def test_inputs_with_strides(by_kernels):
    """Slices of something wider: rows and tokens lie apart; keys whose own elements do, too."""
    inputs = inputs_of("kda", 2, 4)
    strided = inputs.map(lambda t: torch.stack([t, torch.full_like(t, 7)], dim=1).flatten(1, 2)[:, :4])
    strided.k.data = inputs.k.repeat_interleave(2, -1)[..., ::2]
    assert strided.v.stride(0) == 2 * inputs.v.stride(0) and strided.k.stride(-1) == 2
    ours, expected = (by_kernels(steps.scan, make("kda", "replay-fp32-w4", 2), x) for x in (strided, inputs))
    assert torch.equal(ours, expected)


@pytest.mark.parametrize("family", SPECS)
def test_float64(by_kernels, family):
    """The exact recurrence over several chunks, and its outputs, within FP32 rounding of float64."""
    spec, rate = SPECS[family]
    state, inputs = make(family, "reference"), inputs_of(family, 1, 40)
    outputs, states = recurrence(spec, inputs, state.checkpoint.decode().double(), rate)
    assert error(by_kernels(steps.scan, state, inputs), outputs) < FP32
    assert error(state.checkpoint.decode(), states[-1]) < FP32


@pytest.mark.parametrize("family", ["gdn", "kda"])
@pytest.mark.parametrize("decay", [float("-inf"), 0.0])
def test_extreme_gates(by_kernels, family, decay):
    """Identical keys and gains of 2: the triangular system at its worst; −∞ forgets everything."""
    ours, expected = make(family, "replay-fp32-w4"), make(family, "replay-fp32-w4")
    inputs = inputs_of(family, 1, 8)
    inputs.k[:] = inputs.k[:, :1].clone()
    inputs.beta[:, :3] = 2.0
    inputs.g[:, 1:6] = decay
    assert error(by_kernels(steps.scan, ours, inputs), steps.scan(expected, inputs)) < 3e-5  # condition number 3**3
    assert error(ours.checkpoint.codes, expected.checkpoint.codes) < 3e-5


def test_prefill(by_kernels):
    ours, expected = make("mamba2", "decoupled-nvfp4"), make("mamba2", "decoupled-nvfp4")
    inputs = inputs_of("mamba2", 1, 18)
    assert error(by_kernels(steps.prefill, ours, inputs), steps.prefill(expected, inputs)) < FP32
    check_states(ours, expected)


@pytest.mark.parametrize("arm", ["replay-fp32-w4", "coupled-fp8", "coupled-nvfp4-w4"])
@pytest.mark.parametrize("where", ["v", "g"])
def test_a_state_that_is_not_finite_is_named(by_kernels, arm, where):
    """NaN in an early token, which no rounding may hide."""
    state, inputs = make("gdn", arm, 2), inputs_of("gdn", 2, 4 if arm == "coupled-fp8" else 12)
    getattr(inputs, where)[1, 1, 1] = float("nan")
    with pytest.raises(NonFiniteStateError, match=r"'layers.3', slot 1, head 1"):
        by_kernels(steps.scan, state, inputs)


def test_which_engine_runs():
    def state(device, **policy):
        cursor = SimpleNamespace(device=torch.device(device))
        return SimpleNamespace(cursor=cursor, spec=SPECS["gdn"][0], policy=StatePolicy(**policy))

    assert steps._windows_engine(state("cuda", checkpoint="nvfp4", window=1)) is kernels.scan_windows
    assert steps._windows_engine(state("cpu")) is reference
    assert steps._windows_engine(state("cuda", read="int8", scale_rule="mse")) is reference
    assert "mse" in kernels.unsupported(state("cuda", read="int8", scale_rule="mse"))
    assert "128" in kernels.unsupported(state("cuda", window=128))
    odd = SimpleNamespace(key_dim=48)
    assert "48" in kernels.unsupported_layer(odd, StatePolicy())


@triton.jit
def _fake_kernel(
    p_x, p_keys, p_y, V: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, RULE: tl.constexpr, STOCHASTIC: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    o_v = tl.arange(0, R)
    o_x = o_v[:, None] * K + tl.arange(0, K)[None, :]
    m_x = (o_v < V)[:, None]
    b_x = tl.load(p_x + i * (V * K) + o_x, mask=m_x, other=0.0)
    b_random = fake.uniform(o_x, tl.load(p_keys + 2 * i), tl.load(p_keys + 2 * i + 1))
    b_y = fake.fake_quantize(b_x, codec.tile_amax(b_x), b_random, FORMAT, RULE, STOCHASTIC)
    tl.store(p_y + i * (V * K) + o_x, b_y, mask=m_x)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize(
    "format,rule", [*((name, "amax") for name in FORMATS), ("nvfp4", "four_over_six"), ("nvfp4", "mse")]
)
def test_fake_quantize_to_the_bit(format, rule, stochastic):
    """Ordinary tiles, and one with zeros, −0, subnormals, all-zero blocks beside tiny ones, and outliers."""
    if stochastic and not FORMATS[format].stochastic:
        return
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(5, 20, 64, generator=rng)
    x[1] *= 10.0 ** torch.randint(-6, 6, (20, 1), generator=rng)
    x[2, 0] = 0.0
    x[2, 1, :16] = -0.0
    x[2, 2] *= 1e-38
    x[2, 3] *= 1e-42
    x[2, 4, :32] = 0.0
    x[2, 5, 7] = 1e30 if format not in ("fp16", "bf16") else 1e5
    x[3] = x[3].clamp(-3, 3) * 1e38
    x[4] *= 1e-39
    seeds = torch.arange(5) * 0x9E3779B97F4A7C1 + 3
    expected = fake_quantize(x, format, rule, seeds=seeds if stochastic else None)
    y = torch.full_like(x, float("nan"))
    keys = torch.stack(stream_keys(seeds), dim=-1)
    _fake_kernel[(5,)](x, keys, y, V=20, R=32, K=64, FORMAT=format, RULE=rule, STOCHASTIC=stochastic)
    assert torch.equal(bits(y), bits(expected))
