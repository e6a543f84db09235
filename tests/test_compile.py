"""Ahead-of-time compilation, in a process of its own: kernels under the interpreter's decorator cannot be compiled.

The machine code that the compiler gives is looked at, which needs no GPU.
"""

import importlib.util
import json
import os
import random
import re
import struct
import subprocess
import sys

import pytest
from ptx_machine import E2M1, run_ptx

from quantize_state.quant.errors import InvalidValueError

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def compiled(cache, *arguments):
    """(exit code, the JSON, standard error) of ``quantize-state compile``."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    command = [sys.executable, "-m", "quantize_state", "compile", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr


@pytest.fixture(scope="module")
def report(tmp_path_factory, pytestconfig):
    folder = tmp_path_factory.mktemp("compile")
    cache = pytestconfig.cache.mkdir("triton")  # by Triton's key of sources, options and compiler: half of the time
    chosen = ("--arch", "90a,100a", "--shape", "nemotron-3-super", "--arm", "decoupled-nvfp4")
    code, found, errors = compiled(cache, *chosen, "--out", str(folder / "out"))
    assert found is not None, errors
    return code, found, folder / "out"


def test_every_kernel_compiles_without_spills(report):
    code, found, _ = report
    assert code == 0 and not found["problems"], [k for k in found["kernels"] if k["problems"]]
    of_a_step = {"plan_kernel", "verify_plan_kernel", "mamba2_window", "fold_kernel"}
    of_a_step |= {"readout_pairs_kernel", "readout_many_kernel", "accept_kernel"}
    of_the_standard = {"standard_kernel", "snapshots_kernel", "renew_kernel"}
    of_a_scan = {"window_terms", "carry_kernel", "read_kernel"}
    assert {k["kernel"] for k in found["kernels"]} == of_a_step | of_the_standard | of_a_scan
    assert all(k["spills"] == 0 and 0 < k["registers"] <= 255 for k in found["kernels"])


def test_blackwell_converts_in_hardware_and_hopper_does_not(report):
    _, found, _ = report
    for k in found["kernels"]:
        blackwell = k["target"] == "100a"
        if k["kernel"].startswith("readout"):
            assert (k["counts"]["fp4_unpack"] > 0) == blackwell, k
        if k["kernel"] == "renew_kernel":
            assert (k["counts"]["fp4_pack"] > 0) == blackwell, k


def test_several_queries_are_multiplied_where_they_were_decoded(report):
    """On tensor cores, with nothing passed between threads: the instruction's order is that of registers and lanes."""
    _, found, out = report
    of_many = [k for k in found["kernels"] if k["kernel"] == "readout_many_kernel"]
    assert len(of_many) == 4 and all(k["shared"] == 0 and k["counts"]["matrix"] > 0 for k in of_many)
    for path in out.glob("readout_many*.ptx"):
        assert not re.search(r"shfl|\.shared|bar\.", path.read_text()), path.name


def test_nothing_rounds_to_e4m3_by_a_conversion(report):
    """The ptxas of Triton 3.6 moves such a pack behind its unpack on sm_90, without an error."""
    _, found, out = report
    assert all(k["counts"]["fp8_pack"] == 0 for k in found["kernels"])
    listings = list(out.glob("*.sass"))
    assert len(listings) == len(found["kernels"])
    for path in listings:
        assert not re.search(r"F2FP\S*E4M3\S*PACK_AB", path.read_text()), path.name


def test_no_product_is_tf32(report):
    """Matrix instructions take bfloat16 or float16, whose products are exact: see device/dot.py. Never TF32."""
    _, found, out = report
    folds = [k for k in found["kernels"] if k["kernel"] == "fold_kernel"]
    assert folds and all(k["counts"]["matrix"] > 0 for k in folds)
    for path in out.glob("*.sass"):
        assert "TF32" not in path.read_text(), path.name
    for path in out.glob("*.ptx"):
        assert ".tf32" not in path.read_text(), path.name


def test_every_shape_is_compiled_unless_some_are_chosen():
    from quantize_state.kernels.compile import READS, cases
    from quantize_state.kernels.shapes import SHAPES

    usual = cases(quick=True)
    assert len(set(usual)) == len(usual) and {s for s, p in usual if p.read == "nvfp4"} == set(SHAPES)
    assert {s for s, _ in cases(quick=True, shapes=["ultra"])} == {"nemotron-3-ultra"}
    assert {(s, p.read) for s, p in cases(quick=False)} == {(s, r) for s in SHAPES for r in READS}


def test_errors_are_explained():
    from quantize_state.kernels.compile import cases, compile_all

    with pytest.raises(InvalidValueError, match="Did you mean '90a'"):
        compile_all(["90"], [])
    with pytest.raises(InvalidValueError, match="unknown shape 'qwen'"):
        cases(quick=True, shapes=["qwen"])


def e2m1(code):
    return E2M1[code & 7] * (-1 if code & 8 else 1)


def test_the_inline_ptx_computes_block_sums():
    """The PTX of both readouts, run on paper: decode sixteen codes and multiply them with Θ in its stored order."""
    from quantize_state.kernels.device import fp4

    rng = random.Random(0)
    for blackwell in (False, True):
        for _ in range(20):
            codes = [rng.randrange(16) for _ in range(16)]
            theta = [float(rng.randrange(-8, 8)) for _ in range(16)]
            block = sum(c << (4 * i) for i, c in enumerate(codes))
            stored = [0.0] * 16
            for e, value in enumerate(theta):
                stored[e if blackwell else (e & ~5) | ((e & 1) << 2) | ((e >> 2) & 1)] = value
            pairs = run_ptx(fp4.PAIRS_PTX.value, 8, [block]) if blackwell else hopper_pairs(block)
            (total,) = run_ptx(fp4.DOT_PTX.value, 1, [*pairs, *half_words(stored)])
            unit = 1.0 if blackwell else 2.0**14
            assert total * unit == sum(e2m1(c) * t for c, t in zip(codes, theta, strict=True))


def low_bytes(word):
    """The instruction of device/fp4.py, which is a shift and a mask elsewhere."""
    from quantize_state.kernels.device import fp4

    (found,) = run_ptx(fp4.LOW_BYTES_PTX.value, 1, [word & 0xFFFFFFFF])
    assert found == (word << 8) & 0xFF00FF00
    return found


def hopper_pairs(block):
    """``_eight`` of device/fp4.py in Python, for both halves."""
    words = []
    for w in (block & 0xFFFFFFFF, block >> 32):
        even = ((w << 4) & 0x80808080) | ((w << 1) & 0x0E0E0E0E)
        odd = (w & 0x80808080) | ((w >> 3) & 0x0E0E0E0E)
        words += [low_bytes(even), even & 0xFF00FF00, low_bytes(odd), odd & 0xFF00FF00]
    return words


def half_words(values):
    """Sixteen numbers as float16 in four 64-bit words."""
    return struct.unpack("<4Q", struct.pack("<16e", *values))


def test_the_inline_ptx_encodes_eight_numbers():
    from quantize_state.kernels.device import codec

    numbers = [0.0, -1.5, -0.5, 2.0, 1.0, -3.0, 6.0, 4.0]
    (word,) = run_ptx(codec.E2M1_PTX.value, 1, numbers)
    assert [e2m1(word >> (4 * i) & 15) for i in range(8)] == numbers


def test_the_inline_ptx_takes_the_lowest_bytes():
    from quantize_state.kernels.device import codec

    (word,) = run_ptx(codec.BYTES_PTX.value, 1, [0xAAAAAA01, 0xBBBBBB72, 0xCCCCCC33, 0xDDDDDDF4])
    assert word == 0xF4337201
