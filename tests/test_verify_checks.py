"""What ``selftest`` and ``bench --speculative`` check of a verification, in the interpreter, and that it can fail."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from kernel_cases import make_state

from quantize_state.kernels import speculative, verify_checks
from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.selftest import SMALL
from quantize_state.kernels.verify_checks import check_counts, check_snapshots, check_verify
from quantize_state.kernels.window.accept import accept
from quantize_state.quant.policy import StatePolicy

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

CPU = torch.device("cpu")


def reference(state, inputs, slots, *, out, workspace, **options):
    """``sequence.verify`` by the reference, which is fast: what is tested with it is a check."""
    found = speculative.verify(state, inputs, slots, **options)
    verified = torch.arange(inputs.tokens) < found.tokens[:, None]
    out[verified] = found.y[verified]
    return out, found.tokens


def failed(checks):
    return [c.name for c in checks if not c.passed]


def test_a_verification_passes_its_check():
    found = check_verify(SMALL["gdn"], StatePolicy(read="nvfp4", window=8), CPU, 3)
    assert not failed(found), [str(c) for c in found]
    assert {"output of reads", "output of flushes", "states", "cursors and positions"} <= {c.name for c in found}


def test_counts_that_change_pass_their_check():
    found = check_counts(SMALL["kda"], StatePolicy(read="fp8_e4m3", window=4), CPU, rounds=3)
    assert not failed(found), [str(c) for c in found]


def test_a_state_for_every_draft_passes_its_check():
    assert not failed(check_snapshots(SMALL["kda"], CPU, 2))


def test_checks_can_fail(monkeypatch):
    """A count that is not brought into its range, a row that is verified wrongly, and outputs of another query."""
    policy = StatePolicy(read="fp8_e4m3", window=4)

    def unchecked(state, counts, verified, slots):
        for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
            if slot >= 0:
                state.cursor[slot] += count

    with monkeypatch.context() as m:
        m.setattr(verify_checks, "accept", unchecked)
        assert {"cursors outside their rings", "cursors and positions"} <= set(
            failed(check_counts(SMALL["kda"], policy, CPU, rounds=2))
        )

    def shifted(*args, out, **keywords):
        _, verified = reference(*args, out=out, **keywords)
        out[:, :2] = out[:, :2].flip(1).nan_to_num()  # or what was not verified would be seen instead
        return out, verified

    with monkeypatch.context() as m:
        m.setattr(verify_checks.sequence, "verify", reference)
        assert not failed(check_verify(SMALL["kda"], policy, CPU, 2))
        m.setattr(verify_checks.sequence, "verify", shifted)
        assert "output of reads" in failed(check_verify(SMALL["kda"], policy, CPU, 2))


@pytest.mark.parametrize("bad", [0, -3, 9, 2**31 - 1])
def test_accepting_by_the_kernel_is_accepting_on_the_device(bad):
    """Counts out of range, rows without a slot and slots that do not exist: nothing else moves."""
    state = make_state("gdn", window=8, fills=[3, -1, 5, 0, 2])
    clone = state.clone()
    slots = torch.tensor([3, -1, 1, 5, 0], dtype=torch.int32)
    counts = torch.tensor([2, 1, bad, 1, bad], dtype=torch.int32)
    verified = torch.tensor([4, 0, 3, 2, 4], dtype=torch.int32)
    accept(state, counts, verified, slots)
    speculative.accept_on_device(clone, counts, verified, slots)
    assert torch.equal(state.cursor, clone.cursor) and torch.equal(state.position, clone.position)
    assert state.cursor[2] == 5 and state.cursor[4] == 2
    neighbours = state.cursor.as_strided((5, 3), (3, 1), 0)
    assert torch.equal(neighbours[:, 0], torch.tensor([3, -1, 5, 0, 2])), "something beside a cursor was written"
