"""Histograms of states: how often each 4-bit code is used, and how magnitudes spread below the largest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..quant.errors import InvalidValueError
from ..quant.files import replacing
from ..quant.inspection import BINS_PER_OCTAVE, StateReport

SUFFIXES = (".png", ".svg", ".pdf")
NAMED = 8
"""States that a legend names; of more, only the spread is drawn."""


def draw_histograms(reports: Sequence[StateReport], path: Path, title: str) -> None:
    """One panel for states in 4-bit codes, one for all others; a thin line per state and their mean. Overwrites.

    Raises InvalidValueError for a suffix that is no image, and where there is nothing to draw.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if path.suffix not in SUFFIXES:
        raise InvalidValueError(f"{path} is no image: its name must end with {', '.join(SUFFIXES)}")
    coded = [r for r in reports if r.codes]
    plain = [r for r in reports if not r.codes]
    panels = [p for p in (coded, plain) if p]
    if not panels:
        raise InvalidValueError("no state to draw")
    figure = Figure(figsize=(7, 3.4 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=11)
    for axes, group in zip(figure.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        if group is coded:
            _codes(axes, group)
        else:
            _magnitudes(axes, group)
        axes.set_ylabel("share of elements (%)")
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        if len(group) > 1:
            axes.legend(frameon=False, fontsize=8)
    with replacing(path, overwrite=True) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=150)


def _codes(axes, group: Sequence[StateReport]) -> None:
    for codes in dict.fromkeys(tuple(r.codes) for r in group):
        same = [r for r in group if tuple(r.codes) == codes]
        positions = range(len(codes))
        mean = [100 * sum(shares) / len(same) for shares in zip(*(r.histogram for r in same), strict=True)]
        axes.bar(positions, mean, color="#8fb3d9", label=f"mean of {len(same)} states")
        _lines(axes, [(r.name, list(positions), r.histogram) for r in same])
        axes.set_xticks(positions, [f"{c:g}".replace("-", "−") for c in codes])
    axes.set_xlabel("code's value, in units of its scale")


def _magnitudes(axes, group: Sequence[StateReport]) -> None:
    _lines(axes, [(r.name, [(i + 1 - len(r.histogram)) / BINS_PER_OCTAVE for i in range(len(r.histogram))], r.histogram)
                  for r in group])  # fmt: skip
    axes.set_xlabel("powers of two below the state's largest magnitude")


def _lines(axes, lines: Sequence[tuple[str, list, list[float]]]) -> None:
    named = len(lines) <= NAMED
    for name, x, y in lines:
        axes.plot(
            x,
            [100 * share for share in y],
            linewidth=1.0,
            alpha=0.9 if named else 0.4,
            color=None if named else "#444444",
            marker="." if named else None,
            label=name if named else None,
        )
    if not named:
        axes.plot([], [], linewidth=1.0, alpha=0.4, color="#444444", label=f"each of {len(lines)} states")
