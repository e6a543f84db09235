"""A plan on the terminal, as Markdown and as a page. Loads without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from . import formatting as f
from .method import FAMILY_NAMES
from .plan import Plan
from .records import write_atomic

SIZES = (700, 358)
"""Widths of a plot: on a page and on a phone."""


def verdict(plan: Plan) -> str:
    """The plan in one sentence, from what was measured."""
    checked, best = plan.checked, next((u for u in plan.uniform if u.name == plan.best_uniform), None)
    said = (
        f"The recipe moves {checked.bytes_moved:.3f} bytes per state element and step; its KL was expected to be "
        f"{f.scientific(checked.expected)} and measured {f.mean_text(checked.measured, checked.ci95)} nats per token"
    )
    if best is None:
        return f"{said}. No uniform format moves as few bytes."
    ratio = best.measured / checked.measured if checked.measured else math.inf
    apart = (
        checked.ci95 is not None
        and best.ci95 is not None
        and (checked.ci95[1] < best.ci95[0] or best.ci95[1] < checked.ci95[0])
    )
    how = "" if apart else ", and their intervals overlap"
    if ratio > 1:
        return f"{said}: {f.times(ratio)} times less than the best uniform format at no more bytes, {best.name}{how}."
    return (
        f"{said}. It does not beat the best uniform format at no more bytes, {best.name}, "
        f"{f.mean_text(best.measured, best.ci95)} at {best.bytes_moved:.3f} bytes{how}."
    )


def facts(plan: Plan) -> list[str]:
    """What a reader should know beside the verdict."""
    kind, value = next(iter(plan.budget.items()))
    named = f"{f.scientific(value)} nats per token" if kind == "kl" else f"{value:g} bytes per element and step"
    told = [f"Budget: {named}; by measurement it is {'met' if plan.within_budget else 'NOT met'}."]
    if plan.per_head is not None and plan.checked.expected:
        share = plan.per_head / plan.checked.expected
        told.append(
            f"A format for each head, at the same bytes, is predicted to give {share:.0%} of the recipe's expected KL "
            "(not measured: a layer's copy has one format)."
        )
    if plan.rank_correlation is not None:
        told.append(
            "Expected against measured KL of single layers under all formats: rank correlation "
            f"{plan.rank_correlation:.3f} (the probe, {plan.probe}, left out)."
        )
    return told


def print_plan(plan: Plan) -> None:
    """Layers with their choices, what was verified, and the verdict, on the console."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    layers = Table(box=None, pad_edge=False, header_style="bold")
    for column, side in (("layer", "left"), ("read", "left"), ("KL alone, expected", "right"), ("error", "right")):
        layers.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    for row in layer_rows(plan):
        layers.add_row(escape(row["name"]), row["chosen"], row["expected"], row["error"])
    console.print(layers)
    checked = Table(box=None, pad_edge=False, header_style="bold")
    for column, side in (("on other text", "left"), ("B moved", "right"), ("KL expected", "right")):
        checked.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    checked.add_column("KL measured (95 %), nats/token", justify="right", no_wrap=True)
    for row in checked_rows(plan):
        style = "bold" if row["recipe"] else ""
        checked.add_row(escape(row["name"]), row["bytes"], row["expected"], row["measured"], style=style)
    console.print()
    console.print(checked)
    console.print()
    console.print(escape(verdict(plan)), highlight=False)
    for fact in facts(plan):
        console.print(escape(fact), style="dim", highlight=False)


def layer_rows(plan: Plan) -> list[dict[str, str]]:
    return [
        {
            "name": layer.name,
            "family": FAMILY_NAMES.get(layer.family, layer.family),
            "chosen": layer.chosen,
            "probe": f.scientific(layer.probe_kl),
            "expected": f.scientific(layer.expected[layer.chosen]),
            "error": f.error(layer.error.get(layer.chosen, 0.0)),
        }
        for layer in plan.layers
    ]


def checked_rows(plan: Plan) -> list[dict[str, Any]]:
    """The recipe and the uniform formats, the fewest bytes first."""
    return [
        {
            "name": c.name if c is plan.checked else f"{c.name} everywhere",
            "recipe": c is plan.checked,
            "bytes": f"{c.bytes_moved:.3f}",
            "expected": f.scientific(c.expected),
            "measured": f.mean_text(c.measured, c.ci95),
        }
        for c in sorted([plan.checked, *plan.uniform], key=lambda c: (c.bytes_moved, c.measured))
    ]


def method(plan: Plan) -> list[str]:
    """How it was found, in sentences."""
    measured, verified = plan.measured_on, plan.verified_on
    every = any(len(layer.measured) > 1 for layer in plan.layers)
    return [
        "The output error of a read copy is exactly (Q(S₀) − S₀)·Θ, so one FP32 pass predicts it for every layer and "
        "format.",
        f"Each layer's KL was measured with this layer alone in {'each format' if every else plan.probe}, on "
        f"{measured.source}, {f.plural(measured.sequences, 'sequence')} of {f.number(measured.tokens)} tokens. "
        "Expected KL is that of "
        f"{plan.probe} times the ratio of squared errors, and adds up over layers.",
        "The choice is exact for these expectations: a dynamic programme over all totals of bytes and KL.",
        f"Recipe and uniform formats were then measured on {verified.source}, "
        f"{f.plural(verified.sequences, 'sequence')} of {f.number(verified.tokens)} tokens.",
        f"Bytes are per element of the recurrent state and decode step, averaged over a window of {plan.window}, "
        "without the ring.",
    ]


def provenance(plan: Plan) -> list[tuple[str, str]]:
    p = plan.provenance
    return [
        ("Model", f"{plan.model.name}, {f.number(plan.model.parameters)} parameters"),
        ("Weights SHA-256", plan.model.sha256),
        ("Text SHA-256", f"{plan.measured_on.sha256}; {plan.verified_on.sha256}"),
        ("Command", p.command),
        ("Device", f"{p.device}, {f.plural(p.threads, 'thread')}, {p.dtype}"),
        ("quantize-state", f"{p.quantize_state}, commit {(p.git_commit or 'none')[:12]}"),
        ("Versions", ", ".join(f"{name} {v}" for name, v in p.versions.items())),
        ("Time", f"{p.started} to {p.finished}"),
        ("Schema", plan.schema),
    ]


def write_reports(plan: Plan, folder: Path) -> list[Path]:
    """report.html and report.md in ``folder``; returns their paths. They are made anew from the plan each time."""
    from markupsafe import Markup

    from .report import _environment

    beats = plan.beats_uniform
    page = {
        "title": plan.model.name,
        "date": plan.provenance.finished[:10],
        "verdict": verdict(plan),
        "tone": "clear" if beats and plan.within_budget else "against" if beats is False else "open",
        "facts": facts(plan),
        "layers": layer_rows(plan),
        "checked": checked_rows(plan),
        "recipe": plan.recipe,
        "method": method(plan),
        "provenance": provenance(plan),
    }
    drawn = {
        name: {"wide": Markup(draw(plan, SIZES[0])), "narrow": Markup(draw(plan, SIZES[1]))}
        for name, draw in {"bytes": _by_bytes, "expected": _expected}.items()
    }
    written = []
    for ending in ("html", "md"):
        text = _environment(html=ending == "html").get_template(f"plan.{ending}.j2").render(page=page, plots=drawn)
        path = folder / f"report.{ending}"
        write_atomic(path, text, overwrite=True)
        written.append(path)
    return written


def _by_bytes(plan: Plan, width: int) -> str:
    """Measured KL against bytes moved: the recipe among the uniform formats."""
    from .axes import bytes_axis, finish_log, label_points
    from .svg import css, drawing, new_figure, to_svg
    from .view import Style

    with drawing():
        figure = new_figure(width, 320)
        axes = figure.subplots()
        points = []
        for c in [*plan.uniform, plan.checked]:
            style = Style("coupled-0", "D", False) if c is plan.checked else Style("decoupled-0", "o", False)
            axes.plot([c.bytes_moved], [c.measured], style.marker, color=css(style.colour), markersize=7, zorder=3)
            if c.ci95:
                axes.plot([c.bytes_moved] * 2, c.ci95, color=css(style.colour), linewidth=1.2)
            points.append((c.bytes_moved, c.measured, f.short(c.name), style))
        bytes_axis(axes, [x for x, *_ in points])
        finish_log(axes.yaxis)
        axes.set_ylabel("KL to FP32 (nats per token)")
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.5, high * 1.6)
        label_points(figure, axes, points)
        return to_svg(figure, f"plan-bytes-{width}", f"KL against bytes moved for {plan.model.name}")


def _expected(plan: Plan, width: int) -> str:
    """Expected against measured KL: single layers under all formats measured, uniform formats, the recipe."""
    from .axes import decades_axis, finish_log, label_points
    from .svg import css, drawing, new_figure, to_svg
    from .view import Style

    singles = [(x.expected[c], m) for x in plan.layers for c, m in x.measured.items() if c != plan.probe and m > 0]
    with drawing():
        figure = new_figure(width, 320)
        axes = figure.subplots()
        if singles:
            axes.plot(*zip(*singles, strict=True), "o", color=css("muted"), markersize=3.5, alpha=0.7)
        points = []
        for c in [*plan.uniform, plan.checked]:
            if min(c.expected, c.measured) > 0:
                style = Style("coupled-0", "D", False) if c is plan.checked else Style("decoupled-0", "o", False)
                axes.plot([c.expected], [c.measured], style.marker, color=css(style.colour), markersize=7, zorder=3)
                points.append((c.expected, c.measured, f.short(c.name), style))
        decades_axis(axes, "expected KL (nats per token)")
        finish_log(axes.yaxis)
        ends = [min(axes.get_xlim()[0], axes.get_ylim()[0]), max(axes.get_xlim()[1], axes.get_ylim()[1])]
        axes.plot(ends, ends, color=css("line"), linewidth=1, zorder=1)
        axes.set_ylabel("measured KL")
        label_points(figure, axes, points)
        return to_svg(figure, f"plan-expected-{width}", f"Expected against measured KL for {plan.model.name}")
