"""The arms of the study, in groups that each make one run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...quant.formats import FORMATS
from ...quant.policy import StatePolicy, parse_arm
from ...quant.rotation import ROTATIONS
from ..injected import Injected

WINDOWS = (4, 8, 32, 64)
"""Beside the usual 16."""

FP16 = 2 / (128 * 128)
"""Bytes per element of one FP16 number per head of 128 × 128, which controls are counted at."""

GROUPS = ("base", "reads", "windows", "coupled", "checkpoints", "controls", "balanced")


def reads(windows: tuple[int, ...] = (16,)) -> dict[str, StatePolicy]:
    """Every read format with every scale rule and rotation that means something for it."""
    found = {}
    for name, fmt in FORMATS.items():
        if name == "fp32":
            continue
        scaled = fmt.scaling is not None
        for window in windows:
            for rule in fmt.scale_rules if scaled else ("amax",):
                for rotation in (None, *ROTATIONS) if scaled else (None,):
                    policy = StatePolicy(read=name, window=window, scale_rule=rule, rotation=rotation)
                    found[policy.name] = policy
    return found


def arms(group: str, *, full: bool = False) -> dict[str, Any]:
    """The arms of one group by name, as ``evaluate`` takes them.

    ``full`` takes every window, format, rule and rotation with each other.
    """
    if group == "base":
        return {name: name for name in ("reference", "reference-again", "replay-fp32")}
    if group == "reads":
        return reads()
    if group == "windows":
        if full:
            return reads(WINDOWS)
        chosen = ("nvfp4", "nvfp4-mse-hadamard16", "mxfp4", "fp8", "int8-hadamard")
        return _named(f"decoupled-{c.split('-')[0]}-w{w}" + c[len(c.split("-")[0]) :] for c in chosen for w in WINDOWS)
    if group == "coupled":
        formats = ("nvfp4", "mxfp4", "fp8", "int8", "mxfp8", "bf16", "fp16")
        suffixes = ["", "-w16", "-sr", "-w16-sr", *(["-w4", "-w8", "-w32", "-w64"] if full else [])]
        more = ["coupled-nvfp4-hadamard", "coupled-nvfp4-w16-hadamard", "coupled-nvfp4-w64"]
        return _named([*(f"coupled-{f}{s}" for f in formats for s in suffixes), *more])
    if group == "checkpoints":
        copies = ("nvfp4", "fp8", "int8-hadamard")
        return _named([*(f"decoupled-{c}-{f}" for c in ("bf16", "fp16") for f in copies), "replay-bf16", "replay-fp16"])
    if group == "balanced":
        # Column scales with what rounds after them; evaluate measures the scales, on a text that is not evaluated.
        rules, turns = ("", "-four_over_six", "-mse"), ("", "-hadamard16", "-hadamard")
        tails = [f"nvfp4{{}}{rule}-balanced{turn}" for rule in rules for turn in turns]
        tails += [f"{f}{{}}-balanced-hadamard" for f in ("mxfp4", "fp8", "int8")]
        windowed = tails if full else ["nvfp4{}-mse-balanced-hadamard"]
        suffixes = [t.format("") for t in tails] + [t.format(f"-w{w}") for t in windowed for w in WINDOWS]
        return _named(f"decoupled-{s}" for s in suffixes)
    assert group == "controls", group
    return _controls()


def _named(names: object) -> dict[str, StatePolicy]:
    return {policy.name: policy for policy in map(parse_arm, names)}  # type: ignore[call-overload]


def _controls() -> dict[str, Injected]:
    from ...quant.codec import fake_quantize
    from ..error_law import Reader
    from . import controls as c

    best = c.plain("nvfp4", "mse")
    nl4, e2m1 = c.levels(c.NL4), c.levels(c.E2M1)
    copy, column = 0.5625, 128 * FP16
    readers: dict[str, tuple[float, Callable[[], Reader]]] = {
        "nvfp4, scales weighted by reads": (copy, lambda: c.weighted(e2m1)),
        "nvfp4, Hadamard along V": (copy, lambda: c.rounded(c.rotated_values(best))),
        "nvfp4, two axes: columns": (copy + column, lambda: c.two_axis(best, balanced=False)),
        "nvfp4, two axes: columns and rows": (copy + 2 * column, lambda: c.two_axis(best, rows=True, balanced=False)),
        "nvfp4, balanced columns": (copy + column, lambda: c.two_axis(best)),
        "nvfp4, balanced columns, hadamard16": (copy + column, lambda: c.two_axis(c.rotated(best))),
        "nvfp4, balanced columns, hadamard": (copy + column, lambda: c.two_axis(c.rotated(best, "hadamard"))),
        "int4, hadamard16": (copy, lambda: c.rounded(c.rotated(c.levels(c.INT4, signed=True)))),
        "nl4": (copy, lambda: c.rounded(nl4)),
        "nl4, hadamard16": (copy, lambda: c.rounded(c.rotated(nl4))),
        "nl4, balanced columns, hadamard16": (copy + column, lambda: c.two_axis(c.rotated(nl4))),
        "nvfp4, feedback": (copy, lambda: c.feedback()),
        "nvfp4, feedback, hadamard16": (copy, lambda: c.feedback(rotation="hadamard16")),
        "nl4, feedback, hadamard16": (copy, lambda: c.feedback(c.NL4, rotation="hadamard16")),
        **{
            f"nvfp4, rank {r} in FP16": (copy + r * 2 * column, lambda r=r: c.low_rank(best, r))  # type: ignore[misc]
            for r in (1, 2, 4, 8)
        },
        "int8, rank 4 in FP16": (1 + 4 / 128 + 8 * column, lambda: c.low_rank(c.plain("int8"), 4)),
    }
    found = {name: Injected.read(16, reader, size) for name, (size, reader) in readers.items()}
    nvfp4 = lambda x: fake_quantize(x, "nvfp4", check_finite=False)  # noqa: E731
    for window in (1, 16):
        found[f"coupled nvfp4 w{window}, nvfp4 residual"] = Injected.coupled(window, nvfp4, nvfp4, copy, copy)
    return found
