"""Verifying drafts by the Triton kernels, under the interpreter, against kernels/speculative.py: outputs and state."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from kernel_cases import SPECS, make_state
from recurrence import random_inputs
from test_kernels import FP32, HALF, check_state, error

from quantize_state.kernels import sequence
from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.speculative import accept, accept_on_device
from quantize_state.kernels.speculative import verify as reference_verify

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

SLOTS = [3, -1, 1, 4, 0]
FILLS = [5, 4, 6, 7, 0]
"""Of slots 0 to 4, in windows of 8: a row that closes its window, rows whose three tokens just fit and just do not, and
a fresh one."""


def drafts(family, tokens, dtype=torch.bfloat16):
    t = random_inputs(SPECS[family][0], len(SLOTS), tokens, 3, dtype=torch.float32)
    return TokenInputs(t.q.to(dtype), t.k.to(dtype), t.v.to(dtype), t.beta, t.g)


@pytest.mark.parametrize(
    ("family", "read", "early"),
    [
        ("mamba2", None, False), ("gdn", None, True), ("kda", None, False),
        ("mamba2", "nvfp4", True), ("gdn", "nvfp4", False), ("kda", "nvfp4", True),
    ],
)  # fmt: skip
def test_verified_tokens(family, read, early):
    """Rows that close, read and are padding at once; then counts, and a second verification after them.

    Of the twelve combinations six, in which every pair occurs: ``early`` is the plan's alone, which knows neither the
    family nor the format, and the read kernels know nothing of it.
    """
    state = make_state(family, read=read, window=8, fills=FILLS)
    clone, slots = state.clone(), torch.tensor(SLOTS)
    counts = torch.tensor([2, 1, 1, 3, 1], dtype=torch.int32)
    for tokens in (3, 2):
        inputs = drafts(family, tokens)
        expected = reference_verify(clone, inputs, slots, early=early)
        workspace = sequence.Workspace.allocate(state, len(SLOTS), tokens=tokens)
        for t in (workspace.theta, workspace.gain, workspace.c, workspace.start):
            t.fill_(float("nan"))
        workspace.top.fill_(0x7E000000)  # of a flush long ago, and enormous
        out = torch.full_like(expected.y, float("nan"))
        out, verified = sequence.verify(state, inputs, slots, early=early, workspace=workspace, out=out)
        assert torch.equal(verified, expected.tokens)
        for b, n in enumerate(verified.tolist()):
            assert out[b, n:].isnan().all(), f"row {b}: a token was written that is not verified"
            if n:
                assert error(out[b, :n], expected.y[b, :n]) < (HALF if read else 2 * FP32), f"row {b}"
        committed = torch.minimum(counts, verified.clamp(min=1))
        accept(clone, committed, expected.tokens.clamp(min=1), slots)
        accept_on_device(state, committed, verified, slots)
        check_state(state, clone)


@pytest.mark.parametrize("family", ["gdn", "kda"])
def test_drafts_in_a_ring_of_another_type(family):
    """Tokens that are loaded by themselves, behind more rows of the ring than KDA takes at a time, and some of which
    would come to stand behind the padded ring."""
    state = make_state(family, read=None, window=16, fills=[14, 1, 8, 3, 0], dtype=torch.float32)
    clone, slots = state.clone(), torch.tensor([0, 2])
    inputs = drafts(family, 4).map(lambda t: t[:2])
    expected = reference_verify(clone, inputs, slots)
    out, verified = sequence.verify(state, inputs, slots)
    assert verified.tolist() == expected.tokens.tolist() == [1, 4]
    for b, n in enumerate(verified.tolist()):
        assert error(out[b, :n], expected.y[b, :n]) < 2 * FP32, b


def test_one_token_is_a_step():
    state = make_state("gdn", read="nvfp4", window=8, fills=FILLS)
    clone, slots = state.clone(), torch.tensor(SLOTS)
    inputs = drafts("gdn", 1)
    expected = sequence.step(clone, inputs, slots)
    out, verified = sequence.verify(state, inputs, slots)
    accept_on_device(state, torch.ones_like(verified), verified, slots)
    assert torch.equal(out, expected)
    check_state(state, clone)


def test_nothing_is_verified_before_a_count():
    """A row that closed its window waits for its count; verifying again must not write into anyone's slot."""
    state = make_state("mamba2", read="nvfp4", window=8, fills=FILLS)
    slots = torch.tensor(SLOTS)
    sequence.verify(state, drafts("mamba2", 3), slots)
    before = state.clone()
    waiting = int((state.cursor == -1).nonzero()[0])
    out, verified = sequence.verify(state, drafts("mamba2", 3), slots)
    row = SLOTS.index(waiting)
    assert int(verified[row]) == 0 and not out[row].any()
    assert torch.equal(state.checkpoint.codes[waiting], before.checkpoint.codes[waiting])


@pytest.mark.parametrize(("family", "tokens"), [("mamba2", 10), ("gdn", 10), ("kda", 6)])
def test_more_tokens_than_are_taken_at_a_time(family, tokens):
    """Window kernels of several tokens go by pieces, whose rings hold the tokens of those before; a row that closes
    goes on from row −1, and what is NaN in a query or gain reaches no output before it."""
    state = make_state(family, read=None, window=16, slots=3, fills=[3, 15, 0])
    clone, slots = state.clone(), torch.tensor([1, 0, 2])
    inputs = drafts(family, tokens).map(lambda t: t[:3].contiguous())
    inputs.q[0, tokens - 1] = inputs.beta[0, tokens - 1] = float("nan")
    expected = reference_verify(clone, inputs.map(lambda t: t.nan_to_num(0.0)), slots)
    out, verified = sequence.verify(state, inputs, slots)
    assert verified.tolist() == expected.tokens.tolist() == [tokens] * 3
    assert error(out[0, :-1], expected.y[0, :-1]) < 2 * FP32
    assert error(out[1:], expected.y[1:]) < 2 * FP32
