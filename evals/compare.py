"""Several results side by side. They are paired only where model and text are the same bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..quant.errors import InvalidValueError
from . import formatting as f
from .bootstrap import detrended, interval_of_mean
from .method import provenance
from .result import Arm, Result
from .verdict import floor_of, judge, kl_text, note_on, overflow_text, separated
from .view import SHAPES, Style, arm_rows, cell_parts

_TELLING: tuple[tuple[str, Callable[[Result], object]], ...] = (
    ("text", lambda r: r.text.source),
    ("tokens", lambda r: r.text.tokens),
    ("protocol", lambda r: r.text.protocol),
    ("window", lambda r: r.provenance.window),
    ("engine", lambda r: r.provenance.engine),
    ("dtype", lambda r: r.provenance.dtype),
    ("device", lambda r: r.provenance.device),
    ("weights", lambda r: r.model.sha256[:8]),
    ("version", lambda r: r.provenance.quantize_state),
    ("commit", lambda r: (r.provenance.git_commit or "none")[:8]),
    ("finished", lambda r: r.provenance.finished),
)


def why_not_paired(a: Result, b: Result) -> str | None:
    """Why two results are no pair, so that only their own numbers may be shown; None where they are one."""
    differing = [
        name
        for name, x, y in (
            ("weights", a.model.sha256, b.model.sha256),
            ("text", a.text.sha256, b.text.sha256),
            ("protocol", (a.text.protocol, a.text.generated), (b.text.protocol, b.text.generated)),
            ("tokens", (a.text.tokens, a.text.sequences), (b.text.tokens, b.text.sequences)),
        )
        if x != y
    ]
    return f"their {' and '.join(differing)} differ" if differing else None


def pair(a: Result, b: Result) -> list[tuple[Arm, Arm]]:
    """The arms that two results share. Raises InvalidValueError where model or text are not the same bytes."""
    reason = why_not_paired(a, b)
    if reason is not None:
        raise InvalidValueError(f"the results of {a.model.name} and {b.model.name} can't be paired: {reason}")
    others = {arm.name: arm for arm in b.arms}
    return [(arm, others[arm.name]) for arm in a.arms if arm.name in others]


def difference(a: Arm, b: Arm) -> tuple[float, tuple[float, float] | None] | None:
    """Mean KL of ``b`` less that of ``a``, two arms on the same tokens, with the 95 % interval of the difference.

    Paired span by span, so what both arms find hard cancels. None where a result is too old to hold spans, or an arm
    overflowed; the interval is None where there are too few.
    """
    if (
        a.overflows
        or b.overflows
        or not a.kl.by_span
        or a.kl.span != b.kl.span
        or [*map(len, a.kl.by_span)] != [*map(len, b.kl.by_span)]
    ):
        return None
    spans = [np.subtract(y, x) for x, y in zip(a.kl.by_span, b.kl.by_span, strict=True)]
    mean = b.kl.mean - a.kl.mean
    residuals = detrended(spans, [np.arange(len(d), dtype=np.float64) for d in spans])
    centred = [d - np.concatenate(residuals).mean() for d in residuals]
    return mean, interval_of_mean(centred, 1, mean=mean)


def labels(results: Sequence[Result]) -> list[str]:
    """A short name for each result: the model, and what tells it from others of that model."""
    names = [result.model.name for result in results]
    for _, read in _TELLING:
        again = {name for name, count in Counter(names).items() if count > 1}
        if not again:
            break
        told = [str(read(result)) for result in results]
        for name in again:
            members = [i for i, n in enumerate(names) if n == name]
            if len({told[i] for i in members}) > 1:
                for i in members:
                    names[i] = f"{name}, {told[i]}"
    again = {name for name, count in Counter(names).items() if count > 1}
    return [f"{name} ({i})" if name in again else name for i, name in enumerate(names, start=1)]


def view(results: Sequence[Result]) -> dict[str, Any]:
    """Everything that the page about several results shows, but for the plots."""
    names = labels(results)
    reasons = [why_not_paired(results[0], other) for other in results[1:]]
    paired = all(reason is None for reason in reasons)
    if paired:
        note = "All results are of one model and one text, token by token, so their arms are compared directly."
    else:
        differing = "; ".join(
            f"{name}: {reason}" for name, reason in zip(names[1:], reasons, strict=True) if reason is not None
        )
        note = f"Side by side only, not paired. Against {names[0]}, {differing}."
    return {
        "title": " · ".join(names),
        "names": names,
        "paired": paired,
        "note": note,
        "verdicts": [(name, judge(result)) for name, result in zip(names, results, strict=True)],
        "legend": [{"name": name, "style": result_style(i)} for i, name in enumerate(names)],
        "matrix": _matrix(results),
        "ratios": _ratios(results) if paired else [],
        "sections": [
            {"name": name, "rows": arm_rows(result), "provenance": provenance(result)}
            for name, result in zip(names, results, strict=True)
        ],
    }


def result_style(index: int) -> Style:
    """The look of a result, by its place in the list."""
    return Style(f"set-{index % 6}", SHAPES[index % len(SHAPES)], index >= 6)


def plots(results: Sequence[Result]) -> dict[str, Any]:
    from .compare_plots import draw

    return draw(results, labels(results))


def arm_names(results: Sequence[Result]) -> list[str]:
    """All arms, those with the smallest divergence (in the result where it is largest) first; overflow is larger."""
    worst: dict[str, float] = {}
    for result in results:
        for arm in result.arms:
            worst[arm.name] = max(worst.get(arm.name, 0.0), math.inf if arm.overflows else arm.kl.mean)
    return sorted(worst, key=lambda name: (worst[name], name))


def _matrix(results: Sequence[Result]) -> list[dict[str, Any]]:
    rows = []
    for name in arm_names(results):
        cells: list[dict[str, str] | None] = []
        for result in results:
            arm = next((a for a in result.arms if a.name == name), None)
            if arm is None:
                cells.append(None)
                continue
            mean, interval, power = cell_parts(arm)
            cells.append(
                {
                    "mean": mean,
                    "interval": interval,
                    "power": power,
                    "kl": kl_text(arm),
                    "note": note_on(arm, floor_of(result)),
                }
            )
        rows.append({"name": name, "cells": cells})
    return rows


def _difference_text(first: Arm, second: Arm) -> str:
    """The paired difference, and whether it is one; for older results, whether the intervals of both overlap."""
    found = difference(first, second)
    if found is None:
        apart = separated(first, second)
        return {True: "intervals apart", False: "intervals overlap", None: "no interval"}[apart]
    mean, interval = found
    if interval is None:
        return f"difference {f.signed(mean)}, too few tokens for an interval"
    low, high = interval
    said = "no clear difference" if low <= 0 <= high else "clear"
    return f"difference {f.signed(mean)} ({f.signed(low)} to {f.signed(high)}): {said}"


def _ratios(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per arm, each further result's divergence over the first one's, where both have it and neither is zero.

    An arm that overflowed has other tokens than its namesake, so it is no pair.
    """
    rows = []
    for name in arm_names(results):
        cells: list[str | None] = []
        for other in results[1:]:
            match = next(((a, b) for a, b in pair(results[0], other) if a.name == name), None)
            if match is not None and (overflowed := [arm for arm in match if arm.overflows]):
                cells.append(f"no pair: {overflow_text(overflowed[-1])}")
                continue
            if match is None or not match[0].kl.mean or not match[1].kl.mean:
                cells.append(None)
                continue
            first, second = match
            cells.append(f"{second.kl.mean / first.kl.mean:.3g}, {_difference_text(first, second)}")
        if any(cells):
            rows.append({"name": name, "cells": cells})
    return rows
