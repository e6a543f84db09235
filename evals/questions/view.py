"""What the report on questions shows, as plain strings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .. import formatting as f
from ..method import FAMILY_NAMES
from ..view import Style, policy_text, styles
from . import verdict as v
from .result import MISSING, NOTHING, RESEEDED, Arm, QuestionsResult, answers, words

SHOWN_FLIPS = 300
"""Rows of the table of flips; result.json holds them all."""


def page(result: QuestionsResult) -> dict[str, Any]:
    """Everything that the page shows."""
    rows = arm_rows(result)
    flips = flip_rows(result)
    return {
        "title": result.model.name,
        "subtitle": _subtitle(result),
        "date": max((run.finished for run in result.runs), default="")[:10],
        "partial": result.status == "partial",
        "stand_in": result.task.stand_in,
        "verdict": v.judge(result),
        "rows": rows,
        "axis": _axis_labels(result),
        "generated": result.task.form == "generate",
        "flips": flips[:SHOWN_FLIPS],
        "flips_left_out": any(arm.name == RESEEDED for arm in result.arms),
        "hidden_flips": max(0, len(flips) - SHOWN_FLIPS),
        "flip_arms": [arm.name for arm in result.arms],
        "method": method(result),
        "provenance": provenance(result),
    }


def arm_rows(result: QuestionsResult) -> list[dict[str, Any]]:
    """One row per arm: the references first, then by difference, the smallest loss first."""
    look = styles([(arm.name, v.kind_of(arm)) for arm in result.arms])
    subject, limit = v.subject_of(result), _axis(result)
    return [_arm_row(arm, look[arm.name], arm is subject, limit) for arm in sorted_arms(result)]


def sorted_arms(result: QuestionsResult) -> list[Arm]:
    def place(arm: Arm) -> tuple[int, float, str]:
        first = 0 if arm.name == "reference" else 1 if v.kind_of(arm) == "floor" else 2
        return first, -arm.difference.mean if arm.difference and first == 2 else 0.0, arm.name

    return sorted(result.arms, key=place)


def _arm_row(arm: Arm, style: Style, subject: bool, limit: float) -> dict[str, Any]:
    accuracy, d, lengths = arm.accuracy, arm.difference, arm.lengths
    row: dict[str, Any] = {
        "name": arm.name,
        "policy": "the reference with other sampling seeds" if arm.name == RESEEDED else policy_text(arm),  # type: ignore[arg-type]
        "style": style,
        "subject": subject,
        "accuracy": v.percent(accuracy.mean),
        "accuracy_span": "" if accuracy.ci95 is None else f"{v.points(accuracy.ci95[0])}–{v.points(accuracy.ci95[1])}",
        "answers": f.plural(accuracy.answers, "answer"),
        "unparsed": v.share(accuracy.unparsed, accuracy.answers),
        "cut_off": v.share(accuracy.cut_off, accuracy.answers),
        "tokens": "–" if lengths is None else f"{lengths.mean:,.1f}",
        "median": "–" if lengths is None else f"{lengths.median:,.0f}",
        "longer": "" if lengths is None or lengths.difference is None else v.signed(lengths.difference),
        "longer_span": ""
        if lengths is None or lengths.ci95 is None
        else f"{v.signed(lengths.ci95[0])} to {v.signed(lengths.ci95[1])}",
        "difference": "",
        "span": "",
        "finding": "the reference itself" if d is None else v.finding(d),
        "forest": None,
        "lost": "",
        "gained": "",
        "changed": "",
        "p": "",
        "detectable": "",
    }
    if d is not None:
        row |= {
            "difference": v.points(d.mean, sign=True),
            "span": "no interval" if d.ci95 is None else v.span(d.ci95),
            "forest": _forest(d.mean, d.ci95, limit),
            "lost": f"{d.lost:,}",
            "gained": f"{d.gained:,}",
            "changed": f"{d.changed:,} of {d.pairs:,}",
            "p": v.p_value(d.mcnemar_p),
            "detectable": "–" if d.detectable is None else v.points(d.detectable),
        }
    return row


def flip_rows(result: QuestionsResult) -> list[dict[str, Any]]:
    """Questions that some arm and the reference did not both answer right as often; those of most arms first."""
    reference = result.reference
    if reference is None:
        return []
    letters = {arm.name: answers(arm) for arm in result.arms}
    scores = {arm.name: [words(repeat.scores) for repeat in arm.repeats] for arm in result.arms}
    rows = []
    for i, question in enumerate(result.questions):
        own = [column[i] for column in scores["reference"]]
        cells, changed = [], 0
        for arm in result.arms:
            given = [column[i] for column in scores[arm.name]]
            paired = [(a, b) for a, b in zip(given, own, strict=False) if MISSING not in (a, b)]
            flipped = sum(float(a) for a, _ in paired) != sum(float(b) for _, b in paired)
            changed += flipped and arm.name != RESEEDED
            cells.append(
                {
                    "flipped": flipped,
                    "answers": [
                        {"text": _shown(letter[i]), "right": score not in (MISSING, "0")}
                        for letter, score in zip(letters[arm.name], given, strict=True)
                    ],
                }
            )
        if changed:
            rows.append({"hash": question.sha256[:12], "target": question.target, "cells": cells, "changed": changed})
    return sorted(rows, key=lambda row: (-row["changed"], row["hash"]))


def _shown(word: str) -> str:
    return {NOTHING: "–", MISSING: "·"}.get(word, word if len(word) == 1 else "*")


def _axis(result: QuestionsResult) -> float:
    """Where the axis of differences ends on both sides: a round number of points, as a share."""
    reach = [abs(x) for a in result.arms if a.difference for x in (a.difference.mean, *(a.difference.ci95 or ()))]
    largest = max(reach, default=0.0)
    return next(
        step
        for step in (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.75, 1.0)
        if largest <= step or step == 1.0
    )


def _axis_labels(result: QuestionsResult) -> str:
    return f"{v.points(_axis(result)).removesuffix('.0')}"


def _forest(mean: float, interval: tuple[float, float] | None, limit: float) -> dict[str, float]:
    def place(value: float) -> float:
        return round(50 + 50 * min(max(value / limit, -1.0), 1.0), 2)

    low, high = interval or (mean, mean)
    return {"mean": place(mean), "low": place(low), "width": round(place(high) - place(low), 2)}


def _subtitle(result: QuestionsResult) -> str:
    task, device = result.task, " and ".join(dict.fromkeys(run.device for run in result.runs))
    dtype = result.runs[0].dtype if result.runs else ""
    size = f"{f.plural(len(result.questions), 'question')} × {f.plural(result.repeats, 'repeat')}"
    return f"{task.name}, {size} · {_layers(result)} · {dtype} on {device}"


def _layers(result: QuestionsResult) -> str:
    counts: dict[str, int] = {}
    for family, count in result.model.layers.items():
        name = "attention" if family.endswith("Attention") else FAMILY_NAMES.get(family, family)
        counts[name] = counts.get(name, 0) + count
    return f"{' + '.join(f'{count} {name}' for name, count in counts.items())} layers"


def method(result: QuestionsResult) -> list[str]:
    """How it was measured, in sentences."""
    task = result.task
    sentences = [
        f"Task {task.name} (version {task.version}) of lm-eval, its own prompts, filters and metrics, "
        f"{f.plural(task.num_fewshot, 'example')} in the prompt. Scored by {task.metric} after {task.filter}.",
        "Every arm saw the same prompts byte for byte, in the same order of options, which comes from a hash of the "
        "question; the hashes of the prompts are in result.json and were compared.",
    ]
    if task.form == "generate":
        how = (
            "The likeliest token was taken at each step."
            if task.temperature == 0
            else f"Sampled at temperature {task.temperature:g}"
            + (f", top-k {task.top_k}" if task.top_k else "")
            + (f", top-p {task.top_p:g}" if task.top_p < 1 else "")
            + ", with random numbers that belong to question, repeat and step: the same in every arm and batch."
        )
        sentences += [
            f"{how} An answer ends with the model's end-of-text token{_ends(task.until)}, and has at most {task.cap:,} "
            "tokens; answers that reached the cap are counted as cut off, and scored as they stand.",
            "Prompts are read exactly in FP32, as a server prefills them; only the tokens of the answer are decoded "
            "with the arm's state.",
        ]
    else:
        sentences.append(
            "The likeliest option counts. Prompt and options are read with the arithmetic of decoding, token by token, "
            "as a prompt that is prefilled exactly would hide the state's error."
        )
    sentences += [
        "Differences are arm − reference on the same question, repeat and seed. Intervals are 95 %: of accuracy "
        "Wilson's for the number of independent answers that the repeats are worth; of differences by bootstrap over "
        "questions, each with all its repeats. Two invented questions, one better and one worse, are added before "
        "resampling, so that few changes do not look like certainty.",
        "p is exact McNemar: over questions that an arm answers right more often, and less often, than the reference. "
        "It is not corrected for the number of arms.",
        "Detectable is the difference that 8 of 10 runs of this size would find at 5 %, two-sided, computed from the "
        "spread of this run's own differences.",
    ]
    return sentences


def _ends(texts: Sequence[str]) -> str:
    """Texts that end an answer, as they would be typed."""
    return "".join(f" or {json.dumps(text, ensure_ascii=False)}" for text in texts)


def provenance(result: QuestionsResult) -> list[tuple[str, str]]:
    model, task = result.model, result.task
    entries = [
        ("Model", f"{model.name}, {f.number(model.parameters)} parameters, {_layers(result)}"),
        ("Weights SHA-256", model.sha256),
        ("Questions", f"{task.source}, {f.number(len(result.questions))} asked"),
        ("Questions SHA-256", task.data_sha256 or "loaded by lm-eval"),
        ("Prompts SHA-256", task.prompts_sha256),
        ("Seed", str(task.seed)),
    ]
    for i, run in enumerate(result.runs, start=1):
        label = "" if len(result.runs) == 1 else f" {i}"
        commit = "not from a checkout" if run.git_commit is None else f"commit {run.git_commit[:12]}"
        commit += " with local changes" if run.git_dirty else ""
        entries += [
            (f"Command{label}", run.command),
            (f"Device{label}", f"{run.device}, {f.plural(run.threads, 'thread')}, {run.dtype}"),
            (f"quantize-state{label}", f"{run.quantize_state}, {commit}"),
            (f"Versions{label}", ", ".join(f"{name} {version}" for name, version in run.versions.items())),
            (f"Time{label}", f"{run.started} to {run.finished}"),
        ]
    entries += [
        ("Answering took", f.seconds(sum(arm.seconds for arm in result.arms))),
        ("Settings", ", ".join(f"{k} {val}" for k, val in json.loads(result.configuration).items() if k in SETTINGS)),
        ("Schema", result.schema),
    ]
    return entries


SETTINGS = ("window", "think_end_token", "chat_template", "top_k", "top_p", "temperature", "cap")
