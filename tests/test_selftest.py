"""The device's self-test, run on numpy: that it runs what it can, and that what is broken fails."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import json
from dataclasses import replace

import pytest
import torch

from quantize_state.cli import main
from quantize_state.kernels import checks, endurance, selftest, sequence
from quantize_state.kernels.device import codec
from quantize_state.kernels.device.targets import INTERPRET, tl, triton, unavailable
from quantize_state.kernels.standard.reference import step as standard_step
from quantize_state.kernels.step import step as reference_step
from quantize_state.quant.policy import StatePolicy

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

CPU = torch.device("cpu")


def shown(capsys):
    """Standard output with single spaces; standard error must be empty."""
    out, err = capsys.readouterr()
    assert err == "", "quiet in a pipe"
    return " ".join(out.split())


def only(monkeypatch, *words):
    """Let the self-test have those of its items whose name holds one of ``words``."""
    every = list(selftest._items(CPU, quick=True))
    chosen = [i for i in every if any(w in f"{i.group} {i.name}" for w in words)]
    assert chosen
    monkeypatch.setattr(selftest, "_items", lambda device, quick: iter(chosen))
    return chosen


def test_it_covers_families_formats_and_says_what_it_skips(monkeypatch, capsys):
    names = [f"{i.group} {i.name}" for i in selftest._items(CPU, quick=False)]
    for family in ("mamba2", "gdn", "kda"):
        for arm in ("replay-fp32", "decoupled-bf16", "decoupled-fp16", "decoupled-fp8_e4m3", "decoupled-mxfp8",
                    "decoupled-int8", "decoupled-nvfp4", "decoupled-mxfp4", "decoupled-nvfp4-four_over_six",
                    "decoupled-nvfp4-hadamard16", "standard"):  # fmt: skip
            assert sum(n.startswith(f"step {family}") and n.endswith(f", {arm}") for n in names) == 2, (family, arm)
            arm = "snapshots" if arm == "standard" else arm
            assert sum(n.startswith(f"verify {family}") and n.endswith(f", {arm}") for n in names) == 2, (family, arm)
        assert f"graph captured verification, changing counts, {family}" in names
    only(monkeypatch, "codec mxfp4", "graph", "memory", "large", "128 × 64")
    assert main(["selftest"]) == 0
    out = shown(capsys)
    assert "interpreter" in out and "gpu" in out
    assert "SKIP step mamba2 128 × 64 × 128" in out and "SKIP graph" in out and "needs a GPU" in out
    assert "2 passed, 0 failed, 20 skipped" in out
    long = [n for n in names if n.startswith("endurance 10,000 tokens")]
    assert len(long) == 6 and not [i for i in selftest._items(CPU, quick=True) if i.group == "endurance"]
    assert sum(n.endswith("standard and back") for n in names) == 6
    assert sum(n.endswith("float32 inputs") for n in names) == 6


def test_the_json_has_versions_and_every_outcome(monkeypatch, capsys):
    chosen = only(monkeypatch, "every")
    assert main(["selftest", "--quick", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"PASS": len(chosen), "FAIL": 0, "SKIP": 0}
    assert {"torch", "triton", "device", "kernels"} <= found["device"].keys()
    assert [o["name"] for o in found["outcomes"]] == [i.name for i in chosen]


round_grid = codec.round_grid


@triton.jit
def _toward_zero(b_a, MANTISSA: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    return round_grid(b_a * (1 - 2.0**-20), MANTISSA, LOW, MAX)


def test_a_broken_codec_fails(monkeypatch, capsys):
    only(monkeypatch, "every tie of E2M1")
    monkeypatch.setattr("quantize_state.kernels.device.probe.codec.round_grid", _toward_zero)
    assert main(["selftest"]) == 1
    assert "FAIL codec every tie of E2M1" in shown(capsys)


def reference_kernels(change=lambda state, out: None):
    """``sequence.step`` by the reference, which is fast, and then spoilt: what is tested here are the checks."""

    def step(state, inputs, slots=None, *, path="replay", workspace=None, out=None):
        y = (standard_step if path == "standard" else reference_step)(state, inputs, slots)
        if out is not None:
            live = slots >= 0
            out[live] = y[live]
        change(state, out)
        return y

    return step


def test_the_reference_passes_its_own_checks(monkeypatch):
    monkeypatch.setattr(sequence, "step", reference_kernels())
    for policy in selftest.POLICIES:
        for spec in selftest.SMALL.values():
            assert all(c.passed for c in checks.check_replay(spec, replace(policy, window=3), CPU)), policy.name


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda state, out: out.mul_(1.01), "output of reads"),
        (lambda state, out: out[1].zero_(), "padded outputs written"),
        (lambda state, out: state.checkpoint.codes[3].mul_(1.0001), "state of flushes"),
        (lambda state, out: state.checkpoint.codes[2].mul_(1.0001), "state bytes of reads"),
        (lambda state, out: state.ring["v"][4].add_(1), "ring bytes"),
        (lambda state, out: state.copy.scales["block"].view(torch.uint8)[3].add_(1), "copy bytes"),
        (lambda state, out: state.cursor.add_(1), "cursors and positions"),
        (lambda state, out: state.copy.codes[5].add_(1), "bytes of a slot that no row names"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_every_check_of_a_step_can_fail(change, says, monkeypatch):
    monkeypatch.setattr(sequence, "step", reference_kernels(change))
    found = checks.check_replay(selftest.SMALL["mamba2"], StatePolicy(read="nvfp4", window=3), CPU)
    assert says in {c.name for c in found if not c.passed}


def test_the_checks_of_both_paths_can_fail(monkeypatch):
    """A copy that nobody renews, a cursor that hides that, a state that the standard kernel leaves wrong."""
    policy = StatePolicy(read="nvfp4", window=4)

    def failing(change):
        monkeypatch.setattr(sequence, "step", reference_kernels(change))
        return {c.name for c in checks.check_paths(selftest.SMALL["gdn"], policy, CPU) if not c.passed}

    def unrenewed(state, out):
        state.copy.codes.random_(0, 256, generator=torch.Generator().manual_seed(0))

    assert not failing(lambda state, out: None)
    assert "copy bytes" in failing(unrenewed)
    assert failing(lambda state, out: state.cursor.clamp_(min=0)) >= {"cursors", "copy bytes"}
    assert "state" in failing(lambda state, out: state.checkpoint.codes.mul_(1 + 1e-5))
    assert "rows still counted" in {c.name for c in checks.check_paths(selftest.SMALL["gdn"], policy, CPU)}


@pytest.mark.parametrize("family", selftest.SMALL)
def test_endurance_finds_a_decay_that_is_off_in_its_last_bits(family, monkeypatch):
    """The error of the hardware's exponential, 2**-22 and always to the same side, over 320 tokens."""
    spec, policy = selftest.SMALL[family], StatePolicy(window=8)

    def failing(drift):
        def step(state, inputs, slots, *, workspace, out):
            out.copy_(reference_step(state, inputs, slots))
            state.checkpoint.codes.mul_(torch.where(state.cursor == 0, drift, 1.0).view(-1, 1, 1, 1))

        monkeypatch.setattr(sequence, "step", step)
        return {c.name for c in endurance.check_endurance(spec, policy, CPU, tokens=320) if not c.passed}

    assert not failing(1.0)
    assert "state after 320 tokens" in failing(1 + 2.0**-22)


@pytest.mark.parametrize("family", selftest.SMALL)
def test_a_step_with_float32_inputs(family):
    found = checks.check_replay(selftest.SMALL[family], StatePolicy(read="nvfp4", window=4), CPU, dtype=torch.float32)
    assert all(c.passed for c in found), found


@pytest.mark.parametrize("family", selftest.SMALL)
@pytest.mark.parametrize("read", [None, "nvfp4"])
def test_endurance_of_the_kernels_passes(family, read):
    found = endurance.check_endurance(selftest.SMALL[family], StatePolicy(read=read, window=4), CPU, tokens=8)
    assert all(c.passed for c in found), found


def test_what_raises_fails_and_the_rest_goes_on(monkeypatch, capsys):
    only(monkeypatch, "every", "memory read")

    def fails(*arguments, **options):
        raise RuntimeError("ptxas\nfatal")

    monkeypatch.setattr("quantize_state.kernels.device.probe.decode_every_code", fails)
    assert main(["selftest"]) == 1
    out = shown(capsys)
    assert "FAIL codec every code" in out and "RuntimeError: ptxas fatal" in out and "4 passed, 1 failed" in out


def test_far_slots_lie_apart_and_a_wrong_offset_shows(monkeypatch):
    monkeypatch.setattr(checks, "FAR", 1 << 16)
    monkeypatch.setattr(checks, "ROOM", 1 << 16)
    spec = selftest.SMALL["gdn"]
    state = checks.random_state(spec, StatePolicy(read="nvfp4", window=4), 3, seed=0)
    far = checks.far_copy(state)
    assert far.checkpoint.codes.stride(0) == far.ring["v"].stride(0) == 1 << 16
    assert all(checks.touched(far, state, slot) == 0 for slot in range(3)), "tensors of a far pool overlap"
    assert all(c.passed for c in checks.check_far(spec, CPU))
    real = reference_kernels()

    def short(state, inputs, slots, **options):  # an offset that wraps: the third slot lands on the first
        return real(state, inputs, slots % 2 if state.cursor.data_ptr() == far_cursor[0] else slots, **options)

    far_cursor = []
    copy = checks.far_copy

    def watched(state):
        made = copy(state)
        far_cursor.append(made.cursor.data_ptr())
        return made

    monkeypatch.setattr(checks, "far_copy", watched)
    monkeypatch.setattr(sequence, "step", short)
    assert not all(c.passed for c in checks.check_far(spec, CPU))


def test_a_count_that_is_not_a_number_fails():
    assert not checks.Check("x", float("nan"), 1.0).passed and not checks.Check("x", float("inf"), 1e30).passed
    assert replace(checks.Check("x", 0.5, 1.0)).passed
