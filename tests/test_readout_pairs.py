"""The readout of one query from a 4-bit copy, under the interpreter: tiles of every kind, poison in what is unread."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is first imported

import pytest
import torch
from kernel_cases import SPECS, read_case
from test_kernels import HALF, error

from quantize_state.kernels import launch
from quantize_state.kernels.device.targets import INTERPRET, unavailable
from quantize_state.kernels.readout import triton as kernels
from quantize_state.quant.spec import LayerSpec

pytestmark = pytest.mark.skipif(not INTERPRET, reason=unavailable() or "Triton was imported without TRITON_INTERPRET=1")

LIVE = [0, 2, 3]
SHAPES = {
    "odd": LayerSpec("gdn", 3, 3, 18, 64),  # the last quad of a head is half of one
    "wide": LayerSpec("gdn", 1, 1, 8, 256),  # two pieces of a row for each thread
    "narrow": LayerSpec("gdn", 2, 1, 8, 32),  # one piece of a row for four threads
}


@pytest.fixture(autouse=True)
def no_other_kernel(monkeypatch):
    monkeypatch.setattr(kernels, "readout_kernel", None)
    monkeypatch.setattr(kernels, "readout_many_kernel", None)
    for name, spec in SHAPES.items():
        monkeypatch.setitem(SPECS, name, (spec, None))


def check(case, **keywords):
    state, arguments, out, y = case
    theta, gain, c, _, used = arguments
    c[torch.arange(c.shape[-1]).expand_as(c) >= used[:, None, None, None]] = float("nan")
    theta[1], gain[1] = float("nan"), float("nan")
    kernels.readout(state.read_source, state.ring["v"], *arguments, out, **keywords)
    assert error(out[LIVE], y[LIVE]) < HALF
    for b in LIVE:  # a wrong head or row is not lost in the sum over all
        for h in range(y.shape[2]):
            assert error(out[b, :, h], y[b, :, h]) < 3 * HALF, (b, h)
    assert out[1].isnan().all(), "a padded row was written"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("family", ["gdn", "mamba2", "kda", *SHAPES])
def test_shapes(format, family):
    check(read_case(format, half=True, family=family, fills=(0, 3, 7, 1, 5)))


@pytest.mark.parametrize(("rows", "warps"), [(32, 1), (64, 1), (64, 2), (256, 2), (16, 4)])
@pytest.mark.parametrize(("family", "shared"), [("mamba2", 3), ("mamba2", 1), ("odd", 1)])
def test_launches(rows, warps, family, shared, monkeypatch):
    """One quad a thread or several, within a head and over many, with one Θ in a program and with several."""
    entry = launch.Entry(launch.Launch(rows=rows, warps=warps), "readout")
    monkeypatch.setattr(launch, "TABLE", (entry, *launch.TABLE))
    check(read_case("nvfp4", half=True, family=family, shared=shared, fills=(0, 3, 7, 1, 5)))


def test_quads_of_one_program_share_a_theta(monkeypatch):
    """Four quads a thread of one group: Θ is loaded once for all."""
    monkeypatch.setitem(SPECS, "group", (LayerSpec("gdn", 8, 8, 16, 32), None))
    entry = launch.Entry(launch.Launch(rows=128, warps=1), "readout")
    monkeypatch.setattr(launch, "TABLE", (entry, *launch.TABLE))
    check(read_case("nvfp4", half=True, family="group", shared=8))


@pytest.mark.parametrize(("window", "fills"), [(5, (0, 3, 4, 1, 5)), (16, (0, 3, 16, 9, 15)), (21, (0, 18, 20, 21, 3))])
def test_windows(window, fills):
    """Not a multiple of four, a whole chunk of sixteen, and two of them."""
    check(read_case("nvfp4", half=True, window=window, fills=fills))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_values_of_other_types(dtype):
    check(read_case("nvfp4", half=True, dtype=dtype))


def test_skip_and_gate():
    state, arguments, out, y = read_case("nvfp4", half=True)
    rng = torch.Generator().manual_seed(5)
    x, z = torch.randn(y.shape, generator=rng), torch.randn(y.shape, generator=rng)
    d = torch.randn(state.spec.heads, generator=rng)
    y = (y + d[:, None] * x) * torch.nn.functional.silu(z)
    check((state, arguments, out, y), skip=(x, d), gate=z)


def test_rows_that_have_their_output():
    """Of a verification of one token: −1 where the fold wrote it, and rows from ``used`` on."""
    state, arguments, out, y = read_case("nvfp4", half=True)
    out.fill_(7.0)
    row = torch.tensor([0, -2, -1, 5], dtype=torch.int32)  # used is 1, 0, 3, 5
    kernels.readout(state.read_source, state.ring["v"], *arguments, out, row=row)
    assert error(out[0], y[0]) < HALF
    assert (out[1:] == 7.0).all()
