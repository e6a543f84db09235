"""The branch of the vLLM plugin that a GPU takes, in Triton's interpreter: the kernels on vLLM's pages.

A page's tensors are views of one tensor, slots are vLLM's block numbers, and the rest of the layer's code is the same.
"""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from recurrence import SPECS, random_inputs
from vllm_pages import Scheduler, all_outputs, exact_outputs, layer, requests_of

from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.step import folded
from quantize_state.quant.policy import parse_arm
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import STALE

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

FP32 = 2e-6
"""Relative error of outputs and states in FP32, as in test_kernels.py."""
HALF = 2e-3
"""Of outputs read from 4-bit codes with Θ in float16, as in test_kernels.py."""

SMALL = {
    "mamba2": (LayerSpec("mamba2", 2, 1, 8, 32), -torch.tensor([0.5, 4.0])),
    "gdn": (LayerSpec("gdn", 2, 1, 8, 32, qk_l2norm=True, query_scale=32**-0.5), None),
    "kda": (LayerSpec("kda", 2, 2, 8, 32, qk_l2norm=True, query_scale=32**-0.5), None),
}
LENGTHS = [(3, 8), (1, 7), (5, 9), (2, 6), (4, 8)]
"""Tokens of the prompt and in all, of each request."""
SEED = 38
"""Of a schedule in which everything happens."""
EVENTS = {"reused", "mixed", "folded", "last chunks", "decoded", "padded", "preempted", "shared"}
LAST = torch.tensor([1, 2, 3, 4])
"""All pages; whoever was there last has left its state behind."""


def serve(family, arm, *, kernels):
    copy, pages = layer(SMALL[family], arm, rows=3, pages=5)
    if kernels:
        copy.use_kernels()
    unused = pages[0].clone()
    scheduler = Scheduler(copy, pages, requests_of(copy.spec, LENGTHS), seed=SEED, rows=3)
    done = scheduler.serve()
    assert torch.equal(pages[0], unused), "the null page was written"
    return scheduler, done


@pytest.mark.parametrize(
    ("family", "arm", "tolerance"),
    [("mamba2", "decoupled-nvfp4-w3", HALF), ("gdn", "decoupled-fp8-w3", FP32), ("kda", "decoupled-fp32-w3", FP32)],
)
def test_kernels_serve_as_the_reference_does(family, arm, tolerance):
    reference, expected = serve(family, arm, kernels=False)
    scheduler, found = serve(family, arm, kernels=True)
    assert set(+scheduler.seen) == EVENTS, "not all that this test is about has happened"
    outputs, wanted = all_outputs(found), all_outputs(expected)
    assert (outputs - wanted).norm() < tolerance * wanted.norm()
    whole = folded(reference.copy.state, LAST)
    assert (folded(scheduler.copy.state, LAST) - whole).norm() < FP32 * whole.norm()
    assert torch.equal(scheduler.copy.state.cursor[LAST], reference.copy.state.cursor[LAST])
    if arm.startswith("decoupled-fp32"):
        exact = exact_outputs(scheduler.copy, found)
        assert (outputs - exact).norm() < FP32 * exact.norm()


@pytest.mark.parametrize("family", SPECS)
def test_strided_inputs_a_skip_and_padding_in_vllms_buffers(family):
    """As vLLM's layers hand them over: rows of wider tensors, D·x to be added, an output buffer with rows of others."""
    reference, _ = layer(family, "decoupled-fp8-w2")
    kernels, pages = layer(family, "decoupled-fp8-w2")
    kernels.use_kernels()
    spec, pair, slots = reference.spec, torch.tensor([5, 2]), torch.tensor([5, 0, 2], dtype=torch.int32)
    states = torch.randn(2, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(1))
    for copy in (reference, kernels):
        with copy.prefill(pair, None):
            copy.state.checkpoint.codes[pair] = states
    others = [page for page in range(len(pages)) if page not in (5, 2)]
    before = pages[others].clone()
    skip_rate = torch.rand(spec.heads)
    for t in range(3):
        inputs = random_inputs(spec, 3, 1, seed=t, dtype=torch.float32)
        inputs = inputs.map(lambda x: torch.stack((x, x), dim=1)[:, 0])
        skip = (inputs.v[:, 0].contiguous(), skip_rate) if family == "mamba2" else None
        expected, found = (torch.full((3, spec.heads, spec.value_dim), float("nan")) for _ in range(2))
        reference.decode(inputs, slots, expected, skip=skip)
        kernels.decode(inputs, slots, found, skip=skip)
        assert (found[[0, 2]] - expected[[0, 2]]).norm() < FP32 * expected[[0, 2]].norm()
        assert found[1].isnan().all(), "a padded row was written"
    assert torch.equal(pages[others], before), "pages of other requests were written"


@pytest.mark.parametrize("arm", ["decoupled-fp8-w2", "decoupled-nvfp4-w2"])
def test_several_policies_share_pages_and_launches(arm):
    """Layers of another policy have their parts elsewhere in pages of the same size."""
    reference, _ = layer(SMALL["gdn"], arm, policies=[parse_arm(a) for a in ("decoupled-fp8-w2", "decoupled-nvfp4-w5")])
    kernels, _ = layer(SMALL["gdn"], arm, policies=[parse_arm(a) for a in ("decoupled-nvfp4-w5", "decoupled-fp8-w2")])
    kernels.use_kernels()
    states = torch.randn(1, 2, 8, 32, generator=torch.Generator().manual_seed(1))
    one, out = torch.tensor([3]), [torch.empty(1, 2, 8) for _ in range(2)]
    for copy in (reference, kernels):
        with copy.prefill(one, None):
            copy.state.checkpoint.codes[one] = states
    for t in range(3):
        inputs = random_inputs(reference.spec, 1, 1, seed=t, dtype=torch.float32)
        for copy, y in zip((reference, kernels), out, strict=True):
            copy.decode(inputs, one.int(), y)
        assert (out[1] - out[0]).norm() < (HALF if "nvfp4" in arm else FP32) * out[0].norm()


@pytest.mark.parametrize("family", SMALL)
def test_small_batches_decode_in_fp32_on_the_same_pages(family):
    """By the standard kernel, which the path is by itself; vLLM's prefill then goes on from the page's state."""
    copy, _ = layer(SMALL[family], "decoupled-nvfp4-w4", path="auto")
    exact, _ = layer(SMALL[family], "replay-fp32")
    copy.use_kernels()
    spec, pair, slots = copy.spec, torch.tensor([5, 2]), torch.tensor([5, 0, 2], dtype=torch.int32)
    states = torch.randn(2, spec.heads, spec.value_dim, spec.key_dim, generator=torch.Generator().manual_seed(1))
    for each in (copy, exact):
        with each.prefill(pair, None):
            each.state.checkpoint.codes[pair] = states
    for t in range(2):
        inputs = random_inputs(spec, 3, 1, seed=t, dtype=torch.float32)
        expected, found = (torch.full((3, spec.heads, spec.value_dim), float("nan")) for _ in range(2))
        exact.decode(inputs, slots, expected)
        copy.decode(inputs, slots, found)
        assert (found[[0, 2]] - expected[[0, 2]]).norm() < FP32 * expected[[0, 2]].norm()
        assert copy.state.cursor[pair].tolist() == [STALE, STALE]
    whole = folded(exact.state, pair)
    assert (copy.state.checkpoint[pair].decode() - whole).norm() < FP32 * whole.norm()
    with copy.prefill(torch.tensor([5]), torch.tensor([True])):
        pass
    assert copy.state.cursor[pair].tolist() == [0, STALE]
