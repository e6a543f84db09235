"""The report's plots, as SVG text. Each comes in a wide form and in a narrow one for phones.

Divergences at the noise floor lie many decades below the others; they are named under the axis rather than let
push everything that matters into its upper third.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .axes import bytes_axis, draw_buckets, finish_log, heat_map, label_points, line, log_axes, positive, under_axis
from .formatting import scientific, short
from .result import Arm, Result
from .svg import css, drawing, new_figure, to_svg
from .view import axis_floor, sorted_arms, split_at_floor, styles_of

WIDE, NARROW = 700, 358

HEAT_RANGE = (-3.0, 0.0)
"""Powers of ten: from 0.1 % to an error as large as the value. The same in all reports, so that they compare."""


@dataclass(frozen=True)
class Plot:
    """One plot in both widths."""

    wide: str
    narrow: str


def single(result: Result) -> dict[str, Plot]:
    """All plots of the page about one result, by name; those without data are left out."""
    plots: dict[str, Plot] = {}
    drawings = {"position": kl_by_position, "pareto": kl_by_bytes, "layers": layer_errors, "growth": state_growth}
    for name, draw in drawings.items():
        plot = _both(lambda width, draw=draw: draw(result, width))
        if plot is not None:
            plots[name] = plot
    return plots


def kl_by_position(result: Result, width: int) -> str | None:
    """Mean KL in each position bucket, with its interval, on logarithmic axes."""
    look = styles_of([result])
    above, below = split_at_floor(result)
    if not any(b.mean > axis_floor(result) for arm in above for b in arm.kl.by_position):
        return None
    with drawing():
        figure = new_figure(width, 330 if width == WIDE else 300)
        axes = figure.subplots()
        for arm in above:
            draw_buckets(axes, arm, look[arm.name], axis_floor(result))
        log_axes(axes, "position in the sequence (tokens)", "KL to FP32 (nats per token)")
        under_axis(axes, [(arm.name, arm.kl.mean) for arm in below], width // 6)
        return to_svg(figure, f"position-{width}", f"KL divergence against position for {result.model.name}")


def kl_by_bytes(result: Result, width: int) -> str | None:
    """Mean KL against the state bytes that a step moves: lower left is better."""
    look = styles_of([result])
    above, below = split_at_floor(result)
    if not above:
        return None
    with drawing():
        figure = new_figure(width, 340 if width == WIDE else 330)
        axes = figure.subplots()
        points = [(arm.bytes_per_element.moved_per_step, arm.kl.mean, label(arm), look[arm.name]) for arm in above]
        lower_bounds = {(x, y) for (x, y, *_), arm in zip(points, above, strict=True) if arm.overflows}
        for arm in above:
            x, style = arm.bytes_per_element.moved_per_step, look[arm.name]
            if arm.kl.ci95:
                axes.plot([x, x], positive(arm.kl.ci95), color=css(style.colour), linewidth=1.2)
        bytes_axis(axes, [arm.bytes_per_element.moved_per_step for arm in result.arms])
        finish_log(axes.yaxis)
        axes.set_ylabel("KL to FP32 (nats per token)")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 3 if below else low / 1.4, high * 1.6)
        floor = axes.get_ylim()[0]
        for arm in below:
            named = f"{short(arm.name)} ↓ {scientific(arm.kl.mean, 2)}"
            points.append((arm.bytes_per_element.moved_per_step, floor, named, look[arm.name]))
        for x, y, _, style in points:
            hollow = y == floor or (x, y) in lower_bounds
            axes.plot(
                [x],
                [y],
                style.marker,
                color=css(style.colour),
                markersize=7,
                clip_on=False,
                zorder=3,
                markerfacecolor=css("paper") if hollow else css(style.colour),
            )
        label_points(figure, axes, points)
        return to_svg(figure, f"pareto-{width}", f"KL divergence against bytes moved for {result.model.name}")


def label(arm: Arm) -> str:
    """An arm's name beside its point, with an arrow where the mean is but a lower bound."""
    return f"{short(arm.name)} ↑ overflowed" if arm.overflows else short(arm.name)


def layer_errors(result: Result, width: int) -> str | None:
    """Output error of each layer under each arm, as a heat map on a logarithmic scale."""
    arms = [arm for arm in reversed(sorted_arms(result)) if any(layer.output_error for layer in arm.layers)]
    if not arms:
        return None
    names = list(dict.fromkeys(layer.name for arm in arms for layer in arm.layers))
    table = np.full((len(arms), len(names)), np.nan)
    for i, arm in enumerate(arms):
        for layer in arm.layers:
            if layer.output_error:
                table[i, names.index(layer.name)] = math.log10(layer.output_error)
    rows_first = width == NARROW and len(names) > 8  # many layers do not fit across a phone: turn the map
    cells = table.T if rows_first else table
    with drawing():
        figure = new_figure(width, 46 + 27 * cells.shape[0] + (86 if rows_first else 30))
        axes = figure.subplots()
        heat_map(axes, cells, *HEAT_RANGE, annotate=cells.shape[1] <= (8 if width == WIDE else 6))
        ticks = list(range(len(names))) if len(names) <= 16 else list(range(0, len(names), 4))
        (layer_axis, arm_axis) = (axes.yaxis, axes.xaxis) if rows_first else (axes.xaxis, axes.yaxis)
        layer_axis.set_ticks([t + 0.5 for t in ticks], [str(t) for t in ticks])
        arm_axis.set_ticks([i + 0.5 for i in range(len(arms))], [short(arm.name) for arm in arms])
        if rows_first:
            axes.tick_params(axis="x", rotation=90)
        layer_axis.set_label_text("SSM layer, in the model's order")
        return to_svg(figure, f"layers-{width}", f"Output error per layer for {result.model.name}")


def state_growth(result: Result, width: int) -> str | None:
    """Relative error of the state against position: the layers' geometric mean, and their range as a band."""
    look = styles_of([result])
    curves = [(arm, _state_curve(arm)) for arm in sorted_arms(result)]
    curves = [(arm, curve) for arm, curve in curves if len(curve) > 1]
    if not curves:
        return None
    tops = {arm.name: max(high for *_, high in curve) for arm, curve in curves}
    below = [(arm.name, tops[arm.name]) for arm, _ in curves if tops[arm.name] < max(tops.values()) / 1e4]
    curves = [(arm, curve) for arm, curve in curves if arm.name not in dict(below)]
    with drawing():
        figure = new_figure(width, 280 if width == WIDE else 260)
        axes = figure.subplots()
        for arm, curve in curves:
            style = look[arm.name]
            x, middle, low, high = (np.array(column) for column in zip(*curve, strict=True))
            axes.fill_between(x, low, high, color=css(style.colour), alpha=0.13, linewidth=0)
            line(axes, x, middle, style)
        log_axes(axes, "position in the sequence (tokens)", "relative error of the state")
        under_axis(axes, below, width // 6)
        return to_svg(figure, f"growth-{width}", f"State error against position for {result.model.name}")


def _both(draw: Any) -> Plot | None:
    wide, narrow = draw(WIDE), draw(NARROW)
    return Plot(wide, narrow) if wide and narrow else None


def _state_curve(arm: Arm) -> list[tuple[float, float, float, float]]:
    at: dict[int, list[float]] = {}
    for layer in arm.layers:
        for point in layer.state_error_by_position:
            if point.error:
                at.setdefault(point.position, []).append(point.error)
    return [
        (position, math.exp(float(np.mean(np.log(errors)))), min(errors), max(errors))
        for position, errors in sorted(at.items())
        if position > 0
    ]
