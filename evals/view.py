"""What the report templates show, as plain strings: one place where numbers become text."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from . import formatting as f
from .method import layers_text, method, provenance
from .result import Arm, Exponent, Result
from .verdict import floor_of, format_name, judge, kind_of, kl_text, note_on, weight_effects

PALETTES = {"floor": 1, "reference": 1, "replay": 2, "coupled": 4, "decoupled": 4, "other": 2}
"""Colours per kind of arm in style.css: --floor-0, --coupled-2 … Further arms of a kind repeat them."""

SHAPES = ("o", "s", "^", "D", "v", "P")


@dataclass(frozen=True)
class Style:
    """How an arm looks in every plot and table: a CSS variable, a marker, a dash."""

    colour: str
    marker: str
    dashed: bool


def sorted_arms(result: Result) -> list[Arm]:
    """By mean divergence, the smallest first; arms that overflowed last, the earliest at the end."""
    return sorted(result.arms, key=place)


def place(arm: Arm) -> tuple[int, float, str]:
    """What arms are sorted by, best first."""
    left = -min((overflow.tokens for overflow in arm.overflows), default=0)
    return (1, left, arm.name) if arm.overflows else (0, arm.kl.mean, arm.name)


def axis_floor(result: Result) -> float:
    """The divergence down to which axes reach: a decade and a half below the smallest arm that rounds anything.

    One that overflowed is known to be larger than its mean, so it counts only where there is no other.
    """
    above = [a for a in result.arms if kind_of(a) in ("coupled", "decoupled", "other") and a.kl.mean > 0]
    rounding = [a.kl.mean for a in above if not a.overflows] or [a.kl.mean for a in above]
    floor = floor_of(result)
    real = [mean for mean in rounding if floor is None or mean > floor.kl.mean]
    return min(real or rounding or [a.kl.mean for a in result.arms if a.kl.mean > 0], default=0.0) / 10**1.5


def split_at_floor(result: Result) -> tuple[list[Arm], list[Arm]]:
    """Arms to draw, and arms so far below all that round anything that no axis need reach down to them."""
    arms, floor = sorted_arms(result), floor_of(result)
    drawn = [arm for arm in arms if arm.kl.mean > 0 and arm.kl.mean >= axis_floor(result)]
    # beside a repeated reference, the reference's own zero says nothing, and neither does a lower bound
    below = [arm for arm in arms if arm not in drawn and not arm.overflows]
    return drawn, [arm for arm in below if floor is None or kind_of(arm) != "reference"]


def styles(names_and_kinds: list[tuple[str, str]]) -> dict[str, Style]:
    """A style per arm name. Kinds differ in colour and dash, arms of one kind in shade and marker."""
    count: dict[str, int] = {}
    chosen: dict[str, Style] = {}
    for name, kind in names_and_kinds:
        if name not in chosen:
            i = count[kind] = count.get(kind, -1) + 1
            chosen[name] = Style(f"{kind}-{i % PALETTES[kind]}", SHAPES[i % len(SHAPES)], kind == "coupled")
    return chosen


def styles_of(results: list[Result]) -> dict[str, Style]:
    return styles([(arm.name, kind_of(arm)) for result in results for arm in result.arms])


def single(result: Result) -> dict[str, Any]:
    """Everything that the page about one result shows, but for the plots."""
    verdict, rows = judge(result), arm_rows(result)
    shown = {arm.name for arms in split_at_floor(result) for arm in arms}
    return {
        "title": result.model.name,
        "subtitle": _subtitle(result),
        "date": result.provenance.finished[:10],
        "partial": result.status == "partial",
        "verdict": verdict,
        "rows": rows,
        "layer_rows": layer_rows(result),
        "weight_rows": weight_rows(result),
        "positions": position_rows(result),
        "exact_start": _exact_start(result),
        "overflowed": any(arm.overflows for arm in result.arms),
        "legend": [row for row in rows if row["name"] in shown],
        "drifting": [row for row in rows if row["name"] in _with_state_error(result)],
        "method": method(result),
        "provenance": provenance(result),
        "hidden_layers": not any(arm.layers for arm in result.arms),
    }


def arm_rows(result: Result) -> list[dict[str, Any]]:
    floor, arms, look = floor_of(result), sorted_arms(result), styles_of([result])
    subject = judge(result).subject
    span = _log_span(split_at_floor(result)[0])
    rows = []
    for arm in arms:
        mean, interval, power = cell_parts(arm)
        rows.append(
            {
                "name": arm.name,
                "policy": policy_text(arm),
                "style": look[arm.name],
                "subject": arm.name == subject,
                "note": note_on(arm, floor),
                "mean": mean,
                "interval": interval,
                "power": power,
                "kl": kl_text(arm),
                "forest": _forest(arm, span),
                "p999": f.scientific(arm.kl.p999 if arm.kl.tokens else None, 2),
                "max": f.scientific(arm.kl.max if arm.kl.tokens else None, 2),
                "top1": f.percent(arm.top1_agreement.rate),
                "ties": f.plural(arm.top1_agreement.ties, "tie") if arm.top1_agreement.ties else "",
                "ppl_ratio": "–" if arm.ppl is None else f"{arm.ppl.ratio:.5f}",
                "resident": f"{arm.bytes_per_element.resident:.2f}",
                "moved": f"{arm.bytes_per_element.moved_per_step:.2f}",
            }
        )
    return rows


def cell_parts(arm: Arm) -> tuple[str, str, str]:
    """``kl_text`` as mean, interval and power of ten, to be set apart on a page."""
    if not arm.kl.tokens:
        return "–", "", ""
    mean, interval, power = f.with_interval(arm.kl.mean, arm.kl.ci95)
    return ("≥ " if arm.overflows else "") + mean, interval, power


def weight_rows(result: Result) -> list[dict[str, str]]:
    """Weights alone, state alone and both: the table that separates the two effects."""
    return [
        {
            "name": effect.state.name,
            "format": format_name(effect.both.weights),
            "weights": f.mean_text(effect.weights.kl.mean, effect.weights.kl.ci95),
            "state": kl_text(effect.state),
            "both": kl_text(effect.both),
            "added": "–"
            if effect.both.kl_to_weights is None
            else kl_text(replace(effect.both, kl=effect.both.kl_to_weights)),
        }
        for effect in weight_effects(result)
    ]


def layer_rows(result: Result) -> list[dict[str, str]]:
    """Per arm: the layers' errors as median and range, and how they grow."""
    rows = []
    for arm in sorted_arms(result):
        if arm.layers:
            rows.append(
                {
                    "name": arm.name,
                    "output": _spread([layer.output_error for layer in arm.layers]),
                    "output_growth": _growth([layer.exponents.output for layer in arm.layers]),
                    "state": _spread([layer.state_error for layer in arm.layers]),
                    "state_growth": _growth([layer.exponents.state for layer in arm.layers]),
                }
            )
    return rows


def position_rows(result: Result) -> dict[str, Any]:
    """KL by position as a table: the numbers behind the plot."""
    arms = sorted_arms(result)
    starts = sorted({(b.start, b.stop) for arm in arms for b in arm.kl.by_position})
    cells = {arm.name: {(b.start, b.stop): f.scientific(b.mean, 2) for b in arm.kl.by_position} for arm in arms}
    return {
        "names": [arm.name for arm in arms],
        "rows": [
            (f"{f.number(low)}–{f.number(high)}", [cells[arm.name].get((low, high), "–") for arm in arms])
            for low, high in starts
        ],
    }


def policy_text(arm: Arm) -> str:
    """The policy in a few words: FP32 recurrence, NVFP4 copy, window 16."""
    policy = arm.policy
    if policy is None:
        return "the untouched model"
    weights = "" if arm.weights is None else f"{format_name(arm.weights)} weights, "
    if policy.recipe is not None:
        return f"{weights}recipe {policy.recipe}: a policy per layer"
    if arm.name == "reference-again":
        return "the reference, run again"
    parts = [f"{weights}{format_name(policy.checkpoint)} recurrence"]
    if policy.read not in (None, policy.checkpoint):
        parts.append(f"{format_name(policy.read)} copy")
    parts.append("every token" if policy.window == 1 else f"window {policy.window}")
    parts += [] if policy.scale_rule == "amax" else [f"{policy.scale_rule} scales"]
    parts += [policy.rotation] if policy.rotation else []
    parts += ["stochastic rounding"] if policy.stochastic else []
    return ", ".join(parts)


def _subtitle(result: Result) -> str:
    text = result.text
    shape = f"{'' if text.sequences == 1 else f'{text.sequences} × '}{f.number(text.tokens)} tokens"
    return f"{shape} of {text.source} · {layers_text(result)} · {result.provenance.dtype} on {result.provenance.device}"


def _log_span(arms: list[Arm]) -> tuple[float, float] | None:
    values = [x for arm in arms for x in (arm.kl.mean, *(arm.kl.ci95 or ())) if x > 0]
    if not values:
        return None
    low, high = math.log10(min(values)), math.log10(max(values))
    return low - 0.2, high + 0.2


def _forest(arm: Arm, span: tuple[float, float] | None) -> dict[str, float] | None:
    """Mean and interval as percentages of a logarithmic track; None where the divergence lies below it."""
    if span is None or arm.kl.mean < 10 ** span[0]:
        return None

    def place(value: float) -> float:
        at = (math.log10(value) - span[0]) / (span[1] - span[0]) if value > 0 else 0.0
        return round(100 * min(max(at, 0.0), 1.0), 2)

    low, high = arm.kl.ci95 or (arm.kl.mean, arm.kl.mean)
    return {"mean": place(arm.kl.mean), "low": place(low), "width": round(place(high) - place(low), 2)}


def _exact_start(result: Result) -> bool:
    """Whether an arm that rounds is at the noise floor in its first window, while it reads an empty state."""
    first = [arm.kl.by_position[0].mean for arm in split_at_floor(result)[0] if arm.kl.by_position]
    return any(mean < axis_floor(result) for mean in first)


def _with_state_error(result: Result) -> set[str]:
    return {a.name for a in result.arms if any(p.error for layer in a.layers for p in layer.state_error_by_position)}


def _spread(errors: list[float | None]) -> str:
    known = [e for e in errors if e is not None]
    return f.spread(known) if known else "–"


def _growth(exponents: list[Exponent | None]) -> str:
    known = [e for e in exponents if e is not None]
    if not known:
        return "–"
    middle = sorted(known, key=lambda e: e.value)[len(known) // 2]
    value = "0.00" if abs(middle.value) < 0.005 else f"{middle.value:+.2f}".replace("-", "−")
    return f"{value} ± {middle.stderr:.2f}"
