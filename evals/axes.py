"""Axes, lines, labels and cells that the report's plots share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from .formatting import power, scientific, short, tokens_axis
from .result import Arm
from .svg import HEAT_STEPS, css
from .view import Style


def line(axes: Any, x: Any, y: Any, style: Style) -> Any:
    (line,) = axes.plot(
        x, y, color=css(style.colour), marker=style.marker, linestyle=(0, (4, 2)) if style.dashed else "-", zorder=3
    )
    return line


def draw_buckets(axes: Any, arm: Arm, style: Style, lowest: float = 0.0) -> None:
    """KL by position, from the buckets whose mean is above ``lowest``."""
    buckets = [b for b in arm.kl.by_position if b.mean > lowest]
    x = [_middle(b.start, b.stop) for b in buckets]
    line(axes, x, [b.mean for b in buckets], style)
    known = [(at, *positive(b.ci95)) for at, b in zip(x, buckets, strict=True) if b.ci95]
    if len(known) > 1:
        at, low, high = (np.array(column) for column in zip(*known, strict=True))
        axes.fill_between(at, low, high, color=css(style.colour), alpha=0.16, linewidth=0)


def log_axes(axes: Any, xlabel: str, ylabel: str) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    low, high = axes.get_xlim()
    ticks = [2**i for i in range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)]
    keep = [t for t in ticks if (math.log2(t) - math.log2(ticks[-1])) % (1 if len(ticks) <= 8 else 2) == 0]
    axes.set_xticks(keep, [tokens_axis(t) for t in keep])
    axes.xaxis.set_minor_locator(NullLocator())
    finish_log(axes.yaxis)


def finish_log(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set_yscale("log")
    axis.axes.grid(True, axis="y")
    axis.axes.set_axisbelow(True)
    axis.set_major_locator(LogLocator(numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: power(round(math.log10(value))) if value > 0 else "0"))
    axis.set_minor_locator(NullLocator())
    low, high = axis.axes.get_ylim()
    if math.log10(high / low) < 1:  # at least one decade, so that the axis has two labels
        middle = math.sqrt(low * high)
        axis.axes.set_ylim(middle / 4, middle * 4)


def decades_axis(axes: Any, label: str) -> None:
    """A logarithmic x axis labelled at powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(numticks=8))
    axes.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: power(round(math.log10(value))) if value > 0 else "0")
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, axis="x")
    axes.set_xlabel(label)


def bytes_axis(axes: Any, values: Sequence[float]) -> None:
    axes.set_xscale("log", base=2)
    low, high = min(values) / 1.25, max(values) * 1.25
    axes.set_xlim(low, high)
    ticks = [t for t in (0.25, 0.5, 1, 2, 4, 8, 16) if low <= t <= high]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.set_xlabel("bytes moved per state element and step")
    axes.grid(True, axis="x")


def under_axis(axes: Any, below: Sequence[tuple[str, float]], characters: int) -> None:
    """Name the arms whose values lie so far below that the axis does not reach them, in lines that fit."""
    if below:
        named = [f"{short(name)} {scientific(value, 2)}".replace(" ", "\u00a0") for name, value in below]
        lines = wrap(f"↓\u00a0below: {', '.join(named)}", characters, break_long_words=False, break_on_hyphens=False)
        note = axes.annotate(
            "\n".join(lines),
            (0, 0),
            (5, 5),
            xycoords="axes fraction",
            textcoords="offset points",
            fontsize=8,
            color=css("muted"),
            bbox={"facecolor": css("paper"), "edgecolor": "none", "pad": 1.5},
        )
        note.set_in_layout(False)
        low, high = axes.get_ylim()
        axes.set_ylim(low / (high / low) ** (0.04 + 0.05 * len(lines)), high)


def label_points(figure: Any, axes: Any, points: Sequence[tuple[float, float, str, Style]]) -> None:
    """Write each point's name where it covers neither a point nor another name, the first place that fits."""
    figure.canvas.draw()
    frame = axes.get_window_extent()
    scale = figure.dpi / 72
    centres = [axes.transData.transform((x, y)) for x, y, _, _ in points]
    taken = [(cx - 5 * scale, cy - 5 * scale, cx + 5 * scale, cy + 5 * scale) for cx, cy in centres]
    for (x, y, name, _), (cx, cy) in zip(points, centres, strict=True):
        wide, tall = (5.3 * len(name) + 2) * scale, 12 * scale
        chosen = None
        for dx, dy, align in _PLACES:
            left = cx + dx * scale - (0 if align == "left" else wide if align == "right" else wide / 2)
            box = (left, cy + dy * scale - tall / 2, left + wide, cy + dy * scale + tall / 2)
            inside = (
                box[0] >= frame.x0 - 4 and box[2] <= frame.x1 + 4 and box[1] >= frame.y0 - 2 and box[3] <= frame.y1 + 2
            )
            if inside and not any(_overlap(box, other) for other in taken):
                chosen = (dx, dy, align, box)
                break
        dx, dy, align, box = chosen or (0, 13, "center", (cx, cy, cx, cy))
        taken.append(box)
        label = axes.annotate(
            name,
            (x, y),
            (dx, dy),
            textcoords="offset points",
            ha=align,
            va="center",
            fontsize=8.5,
            annotation_clip=False,
        )
        label.set_in_layout(False)


_PLACES = tuple(
    (dx, dy * far, align)
    for far in (1, 2, 3)
    for dx, dy, align in (
        (9, 0, "left"),
        (-9, 0, "right"),
        (0, 13, "center"),
        (0, -13, "center"),
        (7, 11, "left"),
        (-7, 11, "right"),
        (7, -11, "left"),
        (-7, -11, "right"),
        (5, 13, "right"),
    )
)
"""Where a label may stand, in points from its own one; the nearest come first."""


def _overlap(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def heat_map(axes: Any, cells: Any, bottom: float, top: float, *, annotate: bool) -> None:
    from matplotlib.patches import Rectangle

    rows, columns = cells.shape
    axes.set_xlim(0, columns)
    axes.set_ylim(rows, 0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(length=0)
    for (i, j), value in np.ndenumerate(cells):
        if np.isnan(value):
            continue
        share = (value - bottom) / (top - bottom)
        step = min(max(int(share * HEAT_STEPS), 0), HEAT_STEPS - 1)
        axes.add_patch(Rectangle((j + 0.02, i + 0.05), 0.96, 0.9, facecolor=css(f"heat-{step}"), edgecolor="none"))
        if annotate:
            ink = css("heat-ink-1" if step >= HEAT_STEPS // 2 else "heat-ink-0")
            axes.text(j + 0.5, i + 0.5, _cell(10**value), ha="center", va="center", fontsize=8, color=ink)


def _cell(error: float) -> str:
    """An error in few characters: 248×, 21%, 0.42%, 10⁻⁷."""
    if error < 5e-5:
        return power(round(math.log10(error)))
    if error >= 9.95:
        return f"{error:.0f}×" if error < 1e4 else f"{power(round(math.log10(error)))}×"
    return f"{error:.0%}" if error >= 0.0995 else f"{100 * error:#.2g}%"


def _middle(start: int, stop: int) -> float:
    """Where a bucket stands on a logarithmic axis."""
    return math.sqrt(max(start, stop / 4) * stop)


def positive(interval: tuple[float, float]) -> tuple[float, float]:
    return max(interval[0], interval[1] / 1e3), interval[1]
