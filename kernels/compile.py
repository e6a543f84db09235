"""Ahead-of-time compilation of every kernel, without a GPU, and what the machine code holds.

The launches of a step are recorded, not run, for each layer shape and read format; so what is compiled is what
would be launched, specialisation included. Registers and spills come from the cubin, instructions from its SASS.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..quant.columns import unit_columns
from ..quant.errors import InvalidValueError, unknown_name
from ..quant.policy import StatePolicy, parse_arm
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from . import sequence
from .device.targets import BLACKWELL, INTERPRET, TARGETS, Target, unavailable
from .fold.renew import renew
from .inputs import TokenInputs
from .launch import Call, recording
from .scan import triton as scan
from .shapes import SHAPES, find_shape
from .standard import snapshots
from .standard.triton import step as standard_step
from .window.accept import accept

READS = (None, "fp32", "bf16", "fp16", "fp8_e4m3", "mxfp8", "int8", "nvfp4", "mxfp4")

QUICK = (
    ("nemotron-3-super", StatePolicy(read="nvfp4")),
    ("nemotron-3-super", StatePolicy(read=None)),
    ("nemotron-nano-4b", StatePolicy(read="fp8_e4m3")),
    ("qwen3.5-4b", StatePolicy(read="nvfp4", scale_rule="four_over_six")),
    ("glm-5.3-flash", StatePolicy(read="mxfp4", rotation="hadamard16")),
    ("qwen3.5-4b", StatePolicy(checkpoint="nvfp4", window=1)),
    *((shape, StatePolicy(read="nvfp4")) for shape in SHAPES if shape != "nemotron-3-super"),
)
"""What is compiled unless everything is asked for: every kernel, both ways of scaling 4-bit codes, every shape."""

COUNTED: dict[str, re.Pattern[str]] = {
    "fp4_unpack": re.compile(r"F2FP\S*E2M1\S*UNPACK"),
    "fp4_pack": re.compile(r"F2FP\S*E2M1\S*PACK_AB"),
    "fp8_unpack": re.compile(r"F2FP\S*E4M3\S*UNPACK"),
    "fp8_pack": re.compile(r"F2FP\S*E4M3\S*PACK_AB"),
    "matrix": re.compile(r"\b(?:[HIDQO]|HG|QG|IG|UTC[A-Z]*)MMA\b"),
    "spill": re.compile(r"\b(?:STL|LDL)\b"),
}
"""Instructions of the SASS, by what they are to us."""


@dataclass(frozen=True)
class Compiled:
    """One kernel for one target. ``spills``: loads and stores of local memory; ``shared`` in bytes."""

    kernel: str
    target: str
    shape: str
    policy: str
    registers: int
    spills: int
    shared: int
    instructions: int
    counts: dict[str, int]
    warps: int
    problems: tuple[str, ...] = field(default=())


def cases(quick: bool, shapes: Sequence[str] = (), arms: Sequence[str] = ()) -> list[tuple[str, StatePolicy]]:
    """(shape, policy) pairs: those of QUICK, or every shape with every read format; or of the given ones alone."""
    shapes = [find_shape(name)[0] for name in shapes]
    if arms:
        return [(s, parse_arm(a)) for s in shapes or SHAPES for a in arms]
    if quick:
        return [c for c in QUICK if not shapes or c[0] in shapes]
    extra = (
        StatePolicy(read="nvfp4", scale_rule="four_over_six"),
        StatePolicy(read="nvfp4", rotation="hadamard16"),
        StatePolicy(read="nvfp4", rotation="hadamard"),
        StatePolicy(read="nvfp4", scale_rule="four_over_six", rotation="hadamard", balanced=True),
    )
    policies = (*(StatePolicy(read=read) for read in READS), *extra)
    return [(s, p) for s in shapes or SHAPES for p in policies]


def record(spec: LayerSpec, policy: StatePolicy, target: Target) -> list[Call]:
    """The launches of one step of two rows by replay and of one by the standard kernel, of verifications of four tokens
    by both, and of a scan of 64, as ``target`` would get them: BF16 activations, FP32 gates. A policy that the step
    has no kernels for gives those of the scan alone."""
    steps = sequence.unsupported_layer(spec, policy)
    if reason := steps and scan.unsupported_layer(spec, policy):
        raise InvalidValueError(f"no kernels for {policy.name}: {reason}")
    rate = -torch.ones(spec.heads) if spec.rules.gain_sets_decay else None
    state = DecodeState.allocate(spec, policy, 2, dtype=torch.bfloat16, decay_rate=rate, columns=unit_columns(spec))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.zeros(2, 64, *shape, dtype=dtype)

    g = (spec.key_dim,) if spec.rules.decay == "channel" else ()
    inputs = TokenInputs(
        empty(spec.key_heads, spec.key_dim),
        empty(spec.key_heads, spec.key_dim),
        empty(spec.heads, spec.value_dim),
        empty(spec.heads, dtype=torch.float32),
        None if spec.rules.gain_sets_decay else empty(spec.heads, *g, dtype=torch.float32),
    )
    out = empty(spec.heads, spec.value_dim)[:, :1].contiguous()
    with recording(target) as calls:
        if steps is None:
            one = inputs.slice(0, 1).map(Tensor.contiguous)
            sequence.step(state, one, out=out)
            standard_step(state, one, out=out)
            renew(state, torch.zeros(2, dtype=torch.int32))
            drafts = inputs.slice(0, 4).map(Tensor.contiguous)
            sequence.verify(state, drafts)
            accept(state, *torch.ones(3, 2, dtype=torch.int32))
            slots = torch.ones(2, 5, dtype=torch.int32)
            snapshots.verify(spec, state.checkpoint.codes, drafts, slots[:, 0], slots[:, 1:], decay_rate=rate)
        if scan.unsupported_layer(spec, policy) is None:
            scan.scan_windows(state, inputs, torch.arange(2))
    return calls


def compile_all(
    targets: Iterable[str], chosen: Iterable[tuple[str, StatePolicy]], out: Path | None = None
) -> list[Compiled]:
    """Compile every distinct kernel of the given cases; with ``out`` keep PTX, cubin and SASS there.

    Raises InvalidValueError where kernels can't be compiled here, saying why.
    """
    for name in targets:
        if name not in TARGETS:
            raise unknown_name("architecture", name, TARGETS)
    if reason := unavailable():
        raise InvalidValueError(f"kernels can't be compiled: {reason}")
    if INTERPRET:
        raise InvalidValueError("kernels can't be compiled with TRITON_INTERPRET set; unset it")
    found: dict[str, Future[Compiled]] = {}
    # Threads suffice: passes, ptxas and disassembler leave Python alone. Recording is for one thread, this one.
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for shape, policy in chosen:
            for name in targets:
                for call in record(SHAPES[shape], policy, TARGETS[name]):
                    source, options = source_of(call)
                    key = f"{name} {source.hash()} {sorted(options.items())}"
                    if key not in found:
                        found[key] = pool.submit(_compiled, call, source, options, TARGETS[name], shape, policy, out)
        return [future.result() for future in found.values()]


def source_of(call: Call) -> tuple[Any, dict[str, Any]]:
    """What Triton's launcher would compile for a call: types, constants, divisibility by 16; and the options."""
    from triton.compiler import ASTSource

    names = call.kernel.arg_names
    given = dict(zip(names, call.arguments, strict=False)) | call.keywords
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for i, (name, parameter) in enumerate(zip(names, call.kernel.params, strict=True)):
        value = given.pop(name)
        free = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not free):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = "*" + _POINTERS[value.dtype]
        else:
            signature[name] = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
        if isinstance(value, Tensor) or (value % 16 == 0 and not free):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(call.kernel, signature, constants, attributes), given


_POINTERS = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}


def _compiled(
    call: Call, source: Any, options: dict[str, Any], target: Target, shape: str, policy: StatePolicy, out: Path | None
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget

    built = triton.compile(source, target=GPUTarget("cuda", target.capability, 32), options=options)
    sass, usage = disassemble(built.asm["cubin"])
    name = call.kernel.fn.__name__
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        stem = f"{name}-{shape}-{policy.name}-sm_{target.name}-{hashlib.sha256(source.hash().encode()).hexdigest()[:6]}"
        (out / f"{stem}.ptx").write_text(built.asm["ptx"])
        (out / f"{stem}.cubin").write_bytes(built.asm["cubin"])
        (out / f"{stem}.sass").write_text(sass)
    counts = {what: len(pattern.findall(sass)) for what, pattern in COUNTED.items()}
    spills = counts.pop("spill")
    return Compiled(
        kernel=name,
        target=target.name,
        shape=shape,
        policy=policy.name,
        registers=usage["REG"],
        spills=spills,
        shared=built.metadata.shared,
        instructions=len(re.findall(r"^\s*/\*[0-9a-f]{4,}\*/", sass, re.MULTILINE)),
        counts=counts,
        warps=built.metadata.num_warps,
        problems=tuple(_problems(name, target, policy, spills, counts, built.asm["ptx"])),
    )


def _problems(
    name: str, target: Target, policy: StatePolicy, spills: int, counts: dict[str, int], ptx: str
) -> Iterable[str]:
    if spills:
        yield f"{spills} spill instructions"
    if target.isa >= BLACKWELL and policy.read in ("nvfp4", "mxfp4"):
        if name in ("readout_pairs_kernel", "readout_kernel", "readout_many_kernel") and not counts["fp4_unpack"]:
            yield "no hardware conversion from E2M1"
        if name == "renew_kernel" and not counts["fp4_pack"]:
            yield "no hardware conversion to E2M1"
    if name == "readout_many_kernel" and re.search(r"\bshfl\b|\.shared\b", ptx):
        yield "moves operands to other threads than those that hold them by the instruction's order (device/mma.py)"
    if counts["fp8_pack"]:
        yield "rounds to E4M3 by a conversion, which ptxas 12.8 and 12.9 miscompile; device/codec.py rounds by addition"


def disassemble(cubin: bytes) -> tuple[str, dict[str, int]]:
    """SASS of a cubin, and its resource usage (REG, STACK, SHARED, LOCAL, …), by the tools that Triton brings."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        sass = _output(knobs.nvidia.nvdisasm.path, "-c", str(path))
        usage = _output(knobs.nvidia.cuobjdump.path, "-res-usage", str(path))
    return sass, {k: int(v) for k, v in re.findall(r"([A-Z]+):(\d+)", usage)}


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def summary(results: list[Compiled]) -> dict[str, Any]:
    """What ``--json`` prints."""
    from triton import __version__

    problems = Counter(r.target for r in results if r.problems)
    return {"triton": __version__, "kernels": [asdict(r) for r in results], "problems": dict(problems)}
