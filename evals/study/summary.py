"""The tables and plots of a study, generated from the results of its groups. Loads without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from ...quant.errors import InvalidValueError
from .. import formatting as f
from ..compare import why_not_paired
from ..growth import layer_exponents
from ..records import dump, load, write_atomic
from ..report import markdown_text
from ..result import Arm, Exponent, Result
from ..verdict import kind_of, kl_text, overflow_text
from ..view import place

SCHEMA: Final = "quantize-state/law/1"

FOUR_BITS = 0.62
"""Bytes per element up to which a copy counts as a 4-bit one: NVFP4's 0.5625 and a few numbers per column or row."""


@dataclass(frozen=True)
class LawEntry:
    """Predicted relative output errors of a layer: as a whole, with its heads weighing alike, and of each head."""

    layer: float
    normalised: float
    heads: list[float]


@dataclass(frozen=True)
class Law:
    """Predictions of the error law from one FP32 pass, by arm and layer."""

    model: str
    sha256: str
    tokens: int
    arms: dict[str, dict[str, LawEntry]]
    schema: Literal["quantize-state/law/1"] = SCHEMA

    def write(self, path: Path) -> None:
        write_atomic(path, dump(self), overwrite=False)

    @classmethod
    def read(cls, path: Path) -> Law:
        return load(cls, path, SCHEMA)


def collect(folder: Path) -> Result:
    """The groups' results in a study's folder as one; raises InvalidValueError where there are none, or no pairs."""
    results = [_own_windows(Result.read(path)) for path in sorted(folder.glob("*/result.json"))]
    if not results:
        raise InvalidValueError(f"no group of {folder} is finished")
    for other in results[1:]:
        reason = why_not_paired(results[0], other)
        if reason is not None:
            raise InvalidValueError(f"the groups in {folder} are not of one study: {reason}")
    arms = {arm.name: arm for result in results for arm in result.arms}
    return replace(results[0], arms=list(arms.values()))


def _own_windows(result: Result) -> Result:
    """With each layer's exponents from the arm's own window on; runs before 2026-12 had them from their default's."""
    arms = []
    for arm in result.arms:
        window = max(result.provenance.window or 1, arm.policy.window if arm.policy else 1)
        layers = [
            replace(x, exponents=layer_exponents(x.output_error_by_position, x.state_error_by_position, window))
            if x.output_error_by_position  # some results are kept without their curves
            else x
            for x in arm.layers
        ]
        arms.append(replace(arm, layers=layers))
    return replace(result, arms=arms)


def write_summary(folder: Path) -> list[Path]:
    """study.md and study.html in a study's folder; returns their paths. They are made anew each time."""
    result = collect(folder)
    law = Law.read(folder / "law.json") if (folder / "law.json").exists() else None
    lines = [
        f"# Study of {result.model.name}, {_length(result)} tokens, {result.text.protocol}",
        "",
        *(f"- {sentence}" for sentence in findings(result, law)),
        "",
        "| arm | KL (95 %), nats per token | against decoupled-nvfp4 | p99.9 | B moved | B resident "
        "| output error, median layer | its exponent | state exponent |",
        "|---|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(map(markdown_text, row))} |" for row in rows(result)),
        "",
        "Exponents are slopes of log error on log position, of the median layer: 0 flat, 0.5 a random walk, 1 linear.",
        f"{result.provenance.device}, {result.provenance.dtype}, torch {result.provenance.versions.get('torch')}, "
        f"commit {(result.provenance.git_commit or 'none')[:12]}.",
        "",
    ]
    written = [folder / "study.md", folder / "study.html"]
    write_atomic(written[0], "\n".join(lines), overwrite=True)
    write_atomic(written[1], _page(result, law), overwrite=True)
    return written


def _length(result: Result) -> str:
    tokens, sequences = result.text.tokens, result.text.sequences
    return f.number(tokens) if sequences == 1 else f"{sequences} × {f.number(tokens)}"


def rows(result: Result) -> list[list[str]]:
    plain = next((a.kl.mean for a in result.arms if a.name == "decoupled-nvfp4" and not a.overflows), None)
    table = []
    for arm in sorted(result.arms, key=place):
        errors = [x.output_error for x in arm.layers if x.output_error is not None]
        table.append(
            [
                f"{arm.name}, {overflow_text(arm)}" if arm.overflows else arm.name,
                kl_text(arm),
                _share(arm, plain),
                f.scientific(arm.kl.p999 if arm.kl.tokens else None, 2),
                f"{arm.bytes_per_element.moved_per_step:.3f}",
                f"{arm.bytes_per_element.resident:.3f}",
                f.error(median(errors)) if errors else "–",
                _exponent([x.exponents.output for x in arm.layers]),
                _exponent([x.exponents.state for x in arm.layers]),
            ]
        )
    return table


def findings(result: Result, law: Law | None) -> list[str]:
    """What the study set out to answer, from its numbers; goals that are missed are said to be."""
    arms = {arm.name: arm for arm in result.arms}
    told = []
    plain = arms.get("decoupled-nvfp4")
    if plain and plain.overflows:
        told.append(f"decoupled-nvfp4 {overflow_text(plain)}, so nothing is compared with it (all goals: MISSED).")
        plain = None
    for name, goal in (("coupled-nvfp4", 36), ("coupled-nvfp4-w16", 8)):
        if plain and name in arms and arms[name].overflows:
            told.append(f"{_beyond(arms[name], plain)} (goal {goal}: met, at least).")
        elif plain and name in arms:
            ratio = arms[name].kl.mean / plain.kl.mean
            met = "met" if ratio >= goal else "MISSED"
            told.append(f"{name} diverges {f.times(ratio)} times as much as decoupled-nvfp4 (goal {goal}: {met}).")
    if plain:
        small = [
            a for a in result.arms if not a.overflows and a.policy and 4 < a.bytes_per_element.resident <= 4 + FOUR_BITS
        ]
        same = [a for a in small if a.policy and a.policy.window == plain.policy.window and a is not plain]  # type: ignore[union-attr]
        others = [a for a in small if a not in same and a is not plain]
        for what, kind, among in (
            ("4-bit read format", "decoupled", same),
            ("4-bit read format with another window", "decoupled", others),
            ("4-bit control, no format yet,", "other", same),
        ):
            if of_kind := [a for a in among if kind_of(a) == kind]:
                best = min(of_kind, key=lambda a: a.kl.mean)
                share = best.kl.mean / plain.kl.mean
                told.append(
                    f"The best {what} is {best.name}: {share:.2f} of the KL of plain NVFP4 reads, at "
                    f"{best.bytes_per_element.moved_per_step:.3f} bytes moved where those move "
                    f"{plain.bytes_per_element.moved_per_step:.3f} (goal 0.5: {'met' if share <= 0.5 else 'MISSED'})."
                )
    for kind in ("coupled", "decoupled"):
        slopes = [
            x.exponents.output.value
            for a in result.arms
            if kind_of(a) == kind
            for x in a.layers
            if x.exponents.output is not None
        ]
        if slopes:
            told.append(
                f"Growth exponent of the output error with position, {kind} arms: median {median(slopes):+.2f} "
                f"(of {len(slopes)} layers and arms, {min(slopes):+.2f} to {max(slopes):+.2f})."
            )
    if law is not None:
        pairs = law_pairs(result, law)
        if len(pairs) >= 3:
            told.append(
                f"Error law from one FP32 pass over {law.tokens:,} tokens against measured KL of {len(pairs)} "
                f"decoupled arms: rank correlation {rank_correlation([(x, y) for x, y, _ in pairs]):.3f}."
            )
    front = ", ".join(a.name for a in pareto(result))
    told.append(f"On the front of KL against bytes moved: {front}.")
    return told


def _share(arm: Arm, plain: float | None) -> str:
    """KL over decoupled-nvfp4's; of what overflowed at least that."""
    if not plain or not arm.kl.tokens:
        return "–"
    share = arm.kl.mean / plain
    plainly = share == 0 or 1e-3 <= share < 100
    text = f"{share:.3g}" if plainly else f.times(share) if share >= 100 else f.scientific(share)
    return f"≥ {text}" if arm.overflows else text


def _beyond(arm: Arm, plain: Arm) -> str:
    """What is known of an arm that overflowed, beside one that did not."""
    if not arm.kl.tokens:
        return f"{arm.name} {overflow_text(arm)}, before anything of it was measured"
    return (
        f"{arm.name} {overflow_text(arm)}; its KL up to there, {f.scientific(arm.kl.mean)} nats per token, is "
        f"{f.times(arm.kl.mean / plain.kl.mean)} times that of decoupled-nvfp4 over all tokens"
    )


def law_pairs(result: Result, law: Law) -> list[tuple[float, float, str]]:
    """(sum over layers of predicted squared errors, measured KL, arm) of each decoupled arm that has both."""
    return [
        (math.fsum(e.normalised**2 for e in law.arms[a.name].values()), a.kl.mean, a.name)
        for a in result.arms
        if a.name in law.arms and a.kl.mean > 0 and not a.overflows
    ]


def pareto(result: Result) -> list[Arm]:
    """Arms that round something and that no other beats in both KL and bytes moved, the fewest bytes first.

    None that overflowed: its KL is not known.
    """
    front: list[Arm] = []
    real = [a for a in result.arms if _drawn(a)]
    for arm in sorted(real, key=lambda a: (a.bytes_per_element.moved_per_step, a.kl.mean)):
        if not front or arm.kl.mean < front[-1].kl.mean:
            front.append(arm)
    return front


def _drawn(arm: Arm) -> bool:
    return kind_of(arm) in ("coupled", "decoupled", "other") and arm.kl.mean > 0 and not arm.overflows


def rank_correlation(pairs: list[tuple[float, float]]) -> float:
    """Spearman's."""
    import numpy as np

    ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def _exponent(exponents: list[Exponent | None]) -> str:
    known = sorted(e.value for e in exponents if e is not None)
    return f"{median(known):+.2f}" if known else "–"


def _page(result: Result, law: Law | None) -> str:
    from markupsafe import Markup

    from ..report import _environment

    plots = {"front": [Markup(_front(result, width)) for width in (700, 358)]}
    if law is not None and len(law_pairs(result, law)) >= 3:
        plots["law"] = [Markup(_law(result, law, width)) for width in (700, 358)]
    page = {
        "title": f"{result.model.name}, {_length(result)} tokens",
        "subtitle": f"{result.text.protocol}; {result.provenance.dtype} on {result.provenance.device}",
        "findings": findings(result, law),
        "rows": rows(result),
    }
    drawn = {name: {"wide": wide, "narrow": narrow} for name, (wide, narrow) in plots.items()}
    return _environment(html=True).get_template("study.html.j2").render(page=page, plots=drawn)


def _front(result: Result, width: int) -> str:
    from ..axes import bytes_axis, finish_log, label_points
    from ..svg import css, drawing, new_figure, to_svg
    from ..view import Style

    front = pareto(result)
    colours = {"coupled": "coupled-0", "decoupled": "decoupled-0", "other": "decoupled-1"}
    with drawing():
        figure = new_figure(width, 420)
        axes = figure.subplots()
        drawn = [a for a in result.arms if _drawn(a)]
        for arm in drawn:
            axes.plot(
                [arm.bytes_per_element.moved_per_step], [arm.kl.mean], "o", color=css(colours[kind_of(arm)]),
                markersize=4, alpha=0.6,
            )  # fmt: skip
        points: list[tuple[float, float, str, Any]] = [
            (a.bytes_per_element.moved_per_step, a.kl.mean, f.short(a.name), Style("ink", "o", False)) for a in front
        ]
        axes.plot([x for x, *_ in points], [y for _, y, *_ in points], color=css("muted"), linewidth=1, zorder=1)
        bytes_axis(axes, [a.bytes_per_element.moved_per_step for a in drawn])
        finish_log(axes.yaxis)
        axes.set_ylabel("KL to FP32 (nats per token)")
        label_points(figure, axes, points)
        return to_svg(figure, f"front-{width}", f"KL against bytes moved, all arms, for {result.model.name}")


def _law(result: Result, law: Law, width: int) -> str:
    from ..axes import decades_axis, finish_log
    from ..svg import css, drawing, new_figure, to_svg

    pairs = law_pairs(result, law)
    with drawing():
        figure = new_figure(width, 320)
        axes = figure.subplots()
        axes.plot([x for x, *_ in pairs], [y for _, y, _ in pairs], "o", color=css("decoupled-0"), markersize=5)
        decades_axis(axes, "predicted squared output error, summed over layers")
        finish_log(axes.yaxis)
        axes.set_ylabel("measured KL (nats per token)")
        return to_svg(figure, f"law-{width}", f"Predicted error against measured KL for {result.model.name}")
