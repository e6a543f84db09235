"""Every check of this device in one list: the codec to the bit, kernels against references, graphs, far slots, memory.

Written for the first user of a card that we do not have: what it prints says whether the kernels can be trusted there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch

from ..quant.formats import FORMATS
from ..quant.policy import StatePolicy
from ..quant.rounding import E2M1, E4M3, INT8, Grid
from ..quant.spec import LayerSpec
from . import bandwidth, checks, verify_checks
from .checks import Check
from .device import probe
from .device.targets import INTERPRET
from .endurance import TOKENS, check_endurance
from .launch import isa_of
from .paths import Path
from .shapes import SHAPES

SMALL: dict[str, LayerSpec] = {
    "mamba2": LayerSpec("mamba2", heads=6, key_heads=2, value_dim=20, key_dim=32),
    "gdn": LayerSpec("gdn", 4, 2, 16, 64, qk_l2norm=True, query_scale=64**-0.5),
    "kda": LayerSpec("kda", 2, 2, 40, 32, qk_l2norm=True, query_scale=32**-0.5),
}
"""V ≠ K, and V no power of two, so that a wrong transpose or mask cannot hide."""
LARGE = {"mamba2": "nemotron-3-super", "gdn": "qwen3.5-4b", "kda": "glm-5.3-flash"}
WINDOW = 8
"""Of the small layers; the large ones have 16."""

POLICIES: tuple[StatePolicy, ...] = (
    *(StatePolicy(read=read) for read in (None, *FORMATS)),
    StatePolicy(read="nvfp4", scale_rule="four_over_six"),
    StatePolicy(read="nvfp4", scale_rule="mse"),
    StatePolicy(read="nvfp4", rotation="hadamard16"),
    StatePolicy(read="nvfp4", rotation="hadamard"),
    StatePolicy(read="nvfp4", scale_rule="four_over_six", rotation="hadamard", balanced=True),
)
QUICK = (None, "nvfp4", "fp8_e4m3")
"""Read formats of a quick run, which also leaves out scale rules and rotations."""
VERIFIED = 4
"""Tokens of a verification."""


SCANNED = tuple(
    StatePolicy(read=read, window=window) for window in (16, 64, 32) for read in (None, "nvfp4", "fp8_e4m3", "int8")
)
"""Policies whose scan is checked. Windows of 64 are there because Triton 3.6 miscompiled some launches for them."""


@dataclass(frozen=True)
class Outcome:
    """One row of the table. ``detail``: the worst of its checks, or why it failed or was skipped."""

    group: str
    name: str
    status: Literal["PASS", "FAIL", "SKIP"]
    detail: str
    seconds: float


@dataclass(frozen=True)
class _Item:
    group: str
    name: str
    run: Callable[[], list[Check]]
    skip: str | None = None


def selftest(
    device: torch.device, *, quick: bool = False, done: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Run everything that ``device`` can run; a check that raises counts as failed, and the others go on."""
    found = []
    for item in _items(device, quick):
        outcome = _run(item)
        found.append(outcome)
        if done is not None:
            done(outcome)
    return found


def _run(item: _Item) -> Outcome:
    if item.skip is not None:
        return Outcome(item.group, item.name, "SKIP", item.skip, 0.0)
    began = time.perf_counter()
    try:
        results = item.run()
    except Exception as error:  # whatever a compiler or driver raises is a finding
        text = " ".join(str(error).split())[:300]
        return Outcome(item.group, item.name, "FAIL", f"{type(error).__name__}: {text}", time.perf_counter() - began)
    bad = [c for c in results if not c.passed]
    if bad:
        detail = "; ".join(map(str, bad))
    else:
        measured = [c for c in results if c.limit > 0]
        worst = max(measured, key=lambda c: c.error / c.limit, default=None)
        detail = f"{len(results)} checks" + (f"; {worst}" if worst is not None else ", all to the bit")
    return Outcome(item.group, item.name, "FAIL" if bad else "PASS", detail, time.perf_counter() - began)


def _items(device: torch.device, quick: bool) -> Iterator[_Item]:
    gpu = device.type == "cuda" and not INTERPRET
    yield _Item("codec", "every code", partial(_every_code, device))
    for grid, name in ((E2M1, "E2M1"), (E4M3, "E4M3"), (INT8, "INT8")):
        yield _Item("codec", f"every tie of {name}", partial(_ties, grid, device))
    for format in FORMATS:
        yield _Item("codec", format, partial(_codec, format, quick, device))
    policies = [p for p in POLICIES if not quick or (p == StatePolicy(read=p.read) and p.read in QUICK)]
    too_long = None if gpu else "needs a GPU: the interpreter would take minutes; the tests run some of it there"
    for size, specs in (("small", SMALL), ("large", {f: SHAPES[n] for f, n in LARGE.items()})):
        too_slow = None if gpu or size == "small" else "large layers need a GPU: the interpreter would take hours"
        for family, spec in specs.items():
            name = f"{family} {spec.heads} × {spec.value_dim} × {spec.key_dim}"
            for policy in policies:
                if size == "small":
                    policy = replace(policy, window=WINDOW)
                label = policy.name.replace(f"-w{WINDOW}", "")
                yield _Item("step", f"{name}, {label}", partial(checks.check_replay, spec, policy, device), too_slow)
                run = partial(verify_checks.check_verify, spec, policy, device, VERIFIED)
                yield _Item("verify", f"{name}, {label}", run, too_long)
            both = StatePolicy(read="nvfp4", window=WINDOW)
            run = partial(checks.check_replay, spec, both, device, dtype=torch.float32)
            yield _Item("step", f"{name}, float32 inputs", run, too_slow)
            yield _Item("step", f"{name}, standard", partial(checks.check_standard, spec, device), too_slow)
            yield _Item("step", f"{name}, standard and back", partial(checks.check_paths, spec, both, device), too_slow)
            run = partial(verify_checks.check_snapshots, spec, device, VERIFIED)
            yield _Item("verify", f"{name}, snapshots", run, too_slow)
    without = None if gpu else "needs a GPU"
    for family, name in LARGE.items():
        spec = replace(SHAPES[name], heads=4 * SHAPES[name].heads // SHAPES[name].key_heads, key_heads=4)
        for policy in SCANNED[:6] if quick else SCANNED:
            yield _Item("scan", f"{family}, {policy.name}", partial(checks.check_scan, spec, policy, device), without)
    for family, spec in SMALL.items():
        captured: dict[Path, str] = {"replay": "captured step", "standard": "captured standard step"}
        for path, title in captured.items():
            run = partial(checks.check_graph, spec, StatePolicy(read="nvfp4", window=4), device, path)
            yield _Item("graph", f"{title}, {family}", run, without)
        run = partial(verify_checks.check_counts, spec, StatePolicy(read="nvfp4", window=WINDOW), device)
        yield _Item("graph", f"captured verification, changing counts, {family}", run, without)
    if not quick:
        for family, spec in SMALL.items():
            for read in (None, "nvfp4"):
                policy = StatePolicy(read=read)
                run = partial(check_endurance, spec, policy, device)
                yield _Item("endurance", f"{TOKENS:,} tokens, {family}, {policy.name}", run, without)
    yield _Item("memory", "slots beyond 2**31 elements", partial(checks.check_far, SMALL["gdn"], device), _room(device))
    yield _Item("memory", "read and copy kernels", partial(_bandwidth, device))


def _room(device: torch.device) -> str | None:
    if device.type != "cuda" or INTERPRET:
        return "needs a GPU"
    free, _ = torch.cuda.mem_get_info(device)
    need = 1.2 * checks.far_bytes()
    return None if free > need else f"needs {need / 1e9:.0f} GB of free memory; {free / 1e9:.0f} GB are free"


def _every_code(device: torch.device) -> list[Check]:
    codes = torch.arange(256, dtype=torch.uint8)
    e4m3, e2m1, scale, power = (torch.empty(256, device=device) for _ in range(4))
    probe.decode_every_code(codes.to(device), e4m3, e2m1, scale, power)
    finite = (codes & 0x7F) != 0x7F
    exact = codes.view(torch.float8_e4m3fn).float()
    nibble = FORMATS["mxfp4"].element.load(codes).view(256, 2)[:, 0]
    powers = codes.view(torch.float8_e8m0fnu).float()
    return [
        Check("E4M3", checks.different_bytes(e4m3.cpu()[finite], exact[finite]), 0),
        Check("E2M1", checks.different_bytes(e2m1.cpu(), nibble), 0),
        Check("E4M3 scales", checks.different_bytes(scale.cpu()[:127], exact[:127]), 0),
        Check("E8M0 scales", checks.different_bytes(power.cpu()[1:255], powers[1:255]), 0),
    ]


def _ties(grid: Grid, device: torch.device) -> list[Check]:
    values = torch.arange(128.0) if grid is INT8 else probe.grid_values(grid)
    values = values[values <= grid.max]
    ties = (values[1:] + values[:-1]) / 2
    tiny = torch.tensor([0.0, 1e-45, 1e-38, 2.0**-10, 1e30, 3.4e38, grid.max * 1.04, grid.max * 1.1])
    a = torch.cat([probe.with_neighbours(values), probe.with_neighbours(ties), tiny])
    a = torch.cat([a, torch.zeros(-len(a) % 1024)])
    rounded, codes = torch.empty(len(a), device=device), torch.empty(len(a), dtype=torch.int32, device=device)
    probe.round_on_device(a.to(device), grid, rounded, codes)
    expected = grid.nearest(a, torch.empty_like(a))
    return [
        Check("values", checks.different_bytes(rounded.cpu(), expected), 0),
        Check("codes", float((values[codes.cpu().long().clamp(0, len(values) - 1)] != expected).sum()), 0),
    ]


def _codec(format: str, quick: bool, device: torch.device) -> list[Check]:
    """Hard, tiny, huge and ordinary states under each rule and rotation."""
    rules = [rule for rule in FORMATS[format].scale_rules if rule != "mse" or format == "nvfp4"]
    scaled = FORMATS[format].scaling is not None
    rotations = (None, "hadamard16", "hadamard") if scaled and not quick else (None,)
    ordinary = torch.randn(2, 16, 128, generator=torch.Generator().manual_seed(2))
    states = {"hard": probe.hard_states(format), "ordinary": ordinary, "zero": torch.zeros(1, 16, 32)}
    states |= {f"{m:g}": ordinary[:1].clamp(-3, 3) * m for m in (() if quick else (1e-40, 1e-20, 1e38))}
    found = []
    for rule in rules if scaled else ["amax"]:
        for rotation in rotations:
            for name, x in states.items():
                if rotation is not None and name in ("hard", "1e+38"):
                    continue  # sums of extremes: see docs/formats.md
                different = probe.codec_differences(x.to(device), format, rule, rotation)
                label = ", ".join(filter(None, (name, rule if scaled else None, rotation)))
                found.append(Check(f"bytes of {label}", float(sum(different.values())), 0))
    return found


def _bandwidth(device: torch.device) -> list[Check]:
    x = torch.randn(64 * 4096, generator=torch.Generator().manual_seed(0)).to(device)
    y, sums = torch.zeros_like(x), torch.zeros(64, device=device)
    bandwidth.copy(x, y)
    bandwidth.read(x, sums)
    exact = x.double().view(64, 4096).abs().sum(1)
    error = (sums.double() - x.double().view(64, 4096).sum(1)).abs() / exact
    return [Check("copy", checks.different_bytes(y, x), 0), Check("sum", float(error.max()), 1e-6)]


def instructions(device: torch.device) -> str:
    """Which form of the kernels this device runs."""
    isa = isa_of(device)
    if isa >= 100:
        return "Blackwell: FP4 conversions in hardware"
    return "Hopper: FP4 by FP16 arithmetic" if isa >= 90 else "portable Triton"
