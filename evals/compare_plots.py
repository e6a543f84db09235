"""Plots that lay several results over each other, one panel per arm."""

from __future__ import annotations

from collections.abc import Sequence

from .axes import bytes_axis, draw_buckets, finish_log, label_points, log_axes, positive
from .compare import arm_names, result_style
from .formatting import short
from .plots import NARROW, WIDE, Plot, label
from .result import Result
from .svg import css, drawing, new_figure, to_svg
from .verdict import at_floor, floor_of, kind_of
from .view import Style, axis_floor


def draw(results: Sequence[Result], labels: Sequence[str]) -> dict[str, Plot]:
    """The comparison's plots, by name."""
    title = " and ".join(labels)
    drawn = {
        "position": [_positions(results, width, title) for width in (WIDE, NARROW)],
        "pareto": [_pareto(results, width, title) for width in (WIDE, NARROW)],
    }
    return {name: Plot(wide, narrow) for name, (wide, narrow) in drawn.items() if wide and narrow}


def _worth_drawing(results: Sequence[Result]) -> list[str]:
    """Arms that lie above the noise floor in some result."""
    above = {
        arm.name
        for result in results
        for arm in result.arms
        if kind_of(arm) in ("coupled", "decoupled", "other") and arm.kl.mean > 0 and not at_floor(arm, floor_of(result))
    }
    return [name for name in arm_names(results) if name in above]


def _positions(results: Sequence[Result], width: int, title: str) -> str | None:
    names = _worth_drawing(results)
    if not names:
        return None
    columns = min(len(names), 3 if width == WIDE else 1)
    rows = -(-len(names) // columns)
    with drawing():
        figure = new_figure(width, 40 + rows * (190 if width == WIDE else 210))
        panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, name in zip(panels.flat, names, strict=False):
            for i, result in enumerate(results):
                for arm in result.arms:
                    if arm.name == name:
                        draw_buckets(axes, arm, result_style(i), axis_floor(result))
            axes.set_title(short(name), fontsize=9.5, loc="left", pad=6)
        for axes in panels.flat[: len(names)]:
            log_axes(axes, "", "")
        for axes in panels.flat[len(names) :]:
            axes.set_visible(False)
        figure.supxlabel("position in the sequence (tokens)", fontsize=9.5)
        figure.supylabel("KL to FP32 (nats per token)", fontsize=9.5)
        return to_svg(figure, f"compare-position-{width}", f"KL divergence against position for {title}")


def _pareto(results: Sequence[Result], width: int, title: str) -> str | None:
    names = _worth_drawing(results)
    if not names:
        return None
    with drawing():
        figure = new_figure(width, 360)
        axes = figure.subplots()
        top: dict[str, tuple[float, float, str, Style]] = {}
        moved = []
        for i, result in enumerate(results):
            style = result_style(i)
            for arm in result.arms:
                if arm.name not in names or arm.kl.mean <= 0:
                    continue
                x = arm.bytes_per_element.moved_per_step
                moved.append(x)
                if arm.kl.ci95:
                    axes.plot([x, x], positive(arm.kl.ci95), color=css(style.colour), linewidth=1.2)
                filled = css("paper" if arm.overflows else style.colour)
                axes.plot(
                    [x], [arm.kl.mean], style.marker, color=css(style.colour), markersize=6.5, zorder=3,
                    markerfacecolor=filled,
                )  # fmt: skip
                if arm.name not in top or arm.kl.mean > top[arm.name][1]:
                    top[arm.name] = (x, arm.kl.mean, label(arm), style)
        bytes_axis(axes, moved)
        finish_log(axes.yaxis)
        axes.set_ylabel("KL to FP32 (nats per token)")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.4, high * 2)
        label_points(figure, axes, list(top.values()))
        return to_svg(figure, f"compare-pareto-{width}", f"KL divergence against bytes moved for {title}")
