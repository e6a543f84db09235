"""The bench's plots: how much faster than the standard kernel a step is, by batch, and what a verification of T tokens
costs; one panel per shape."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

from ..axes import line
from ..svg import css, drawing, new_figure, to_svg
from ..view import Style, styles
from .result import Case, SpeculativeResult, SpeedResult, VerifyCase
from .table import by_shape_and_batch, dimensions, standard_of

WIDTH, PANEL = 940, 300


def speedup_svg(results: Sequence[SpeedResult]) -> str | None:
    """A whole SVG file, in light and dark; None where no arm was timed beside the standard kernel."""
    panels = {shape: curves for result in results for shape, curves in _curves(result).items()}
    if not panels:
        return None
    # shapes of a single batch would be dots; the table has them
    several = {n: p for n, p in panels.items() if any(len(points) > 1 for points in p[1].values())}
    panels = several or panels
    look = _styles([c for _, curves in panels.values() for c in curves])
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with drawing():
        figure = new_figure(WIDTH, PANEL * rows + 24)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        batches: set[int] = set()
        for axes, (shape, (first, curves)) in zip(grid.flat, panels.items(), strict=False):
            axes.axhline(1.0, color=css("muted"), linewidth=1, linestyle=(0, (4, 2)))
            for arm, points in curves.items():
                line(axes, [b for b, _ in points], [gain for _, gain in points], look[arm])
                batches |= {b for b, _ in points}
            axes.set_xscale("log", base=2)
            axes.set_title(f"{shape}\n{first.family}, {dimensions(first)}", fontsize=9.5, loc="left")
            axes.grid(True, axis="y")
            axes.set_axisbelow(True)
        grid[0][0].set_ylim(bottom=0)  # of all panels, once all curves are there
        from matplotlib.ticker import NullLocator

        for axes in grid.flat:
            axes.set_xticks(sorted(batches), [str(b) for b in sorted(batches)])
            axes.xaxis.set_minor_locator(NullLocator())
        figure.supylabel("speed of a mixed step, the standard kernel's being 1", fontsize=9.5)
        figure.supxlabel("batch", fontsize=9.5)
        shown = [line(grid[0][0], [], [], style) for style in look.values()]
        figure.legend(shown, list(look), loc="outside upper center", ncols=min(6, len(look)), frameon=False)
        return _standalone(to_svg(figure, "speed", "Speed-up of the mixed step over the standard kernel, by batch"))


def verification_svg(results: Sequence[SpeculativeResult]) -> str | None:
    """µs of a verification by its tokens, full acceptance, at the batch nearest to 256; a whole SVG file, or None."""
    panels = {shape: cases for result in results for shape, cases in _verifications(result).items()}
    if not panels:
        return None
    look = _styles(list(dict.fromkeys(c.arm for cases in panels.values() for c in cases)))
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    with drawing():
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        figure = new_figure(WIDTH, PANEL * rows + 24)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        for axes, (shape, cases) in zip(grid.flat, panels.items(), strict=False):
            for arm, style in look.items():
                steps = [(c.tokens, c.step("full")) for c in cases if c.arm == arm]
                points = [(t, s.time.median) for t, s in steps if s is not None]
                line(axes, [t for t, _ in points], [us for _, us in points], style)
            first = cases[0]
            axes.set_title(
                f"{shape}\n{first.family}, {dimensions(first)}, batch {first.batch}", fontsize=9.5, loc="left"
            )
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_xticks(sorted({c.tokens for c in cases}))
            axes.grid(True, axis="y")
            axes.set_axisbelow(True)
        figure.supylabel("µs per verification, every draft right", fontsize=9.5)
        figure.supxlabel("tokens verified", fontsize=9.5)
        shown = [line(grid[0][0], [], [], style) for style in look.values()]
        figure.legend(shown, list(look), loc="outside upper center", ncols=min(6, len(look)), frameon=False)
        return _standalone(to_svg(figure, "verify", "Time of a verification by its number of tokens"))


def _verifications(result: SpeculativeResult) -> dict[str, list[VerifyCase]]:
    """By shape: timed cases of the batch nearest to 256, where several numbers of tokens were."""
    found: dict[str, list[VerifyCase]] = {}
    for shape in dict.fromkeys(c.shape for c in result.cases):
        cases = [c for c in result.cases if c.shape == shape and c.status == "timed"]
        batch = min({c.batch for c in cases}, key=lambda b: abs(b - 256), default=0)
        cases = [c for c in cases if c.batch == batch]
        if len({c.tokens for c in cases}) > 1:
            found[shape] = cases
    return found


def _curves(result: SpeedResult) -> dict[str, tuple[Case, dict[str, list[tuple[int, float]]]]]:
    """By shape: a case of it, and for each arm the gain of its mixed step at each batch."""
    found: dict[str, tuple[Case, dict[str, list[tuple[int, float]]]]] = {}
    for shape, batch, cases in by_shape_and_batch(result):
        base = standard_of(cases)
        for case in cases:
            if base is None or base.serving_us is None or case is base or case.serving_us is None:
                continue
            _, curves = found.setdefault(shape, (case, {}))
            curves.setdefault(case.arm, []).append((batch, base.serving_us / case.serving_us))
    return found


def _styles(arms: Sequence[str]) -> dict[str, Style]:
    kinds = {arm: arm.partition("-")[0] for arm in arms}
    known = {"replay": "replay", "decoupled": "decoupled"}
    return styles([(arm, known.get(kind, "other")) for arm, kind in kinds.items()])


def _standalone(element: str) -> str:
    """An element for a page as a file of its own: with the page's colours, in light and dark."""
    style = (resources.files(__package__).parent / "templates" / "style.css").read_text(encoding="utf-8")  # type: ignore[attr-defined]
    colours = "\n".join(
        re.findall(r"^:root \{.*?^\}|^@media \(prefers-color-scheme: dark\) \{.*?^\}", style, re.S | re.M)
    )
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', element)
    size = f' width="{box.group(1)}" height="{box.group(2)}"' if box else ""
    head, rest = element.split(">", 1)
    return (
        f'{head} xmlns="http://www.w3.org/2000/svg"{size}>'
        f"<style>{colours}\ntext {{ font-family: system-ui, sans-serif }}</style>"
        f'<rect width="100%" height="100%" fill="var(--paper)"/>{rest}\n'
    )
