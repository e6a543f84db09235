"""What the answers support in one sentence, and what they do not; computed from the numbers. No torch."""

from __future__ import annotations

from typing import Literal

from ..formatting import plural
from ..verdict import Verdict
from ..verdict import kind_of as kind_of_policy
from . import statistics as s
from .result import RESEEDED, Arm, Difference, Interval, QuestionsResult

SMALL = 0.01
"""A loss below one point of accuracy is what published comparisons call none."""

Finding = Literal["worse", "better", "none shown", "no interval"]


def kind_of(arm: Arm) -> str:
    """As for other results; the reference with other seeds is a noise floor as well."""
    return "floor" if arm.name == RESEEDED else kind_of_policy(arm)  # type: ignore[arg-type]


def finding(difference: Difference) -> Finding:
    """What the 95 % interval of a difference says."""
    if difference.ci95 is None:
        return "no interval"
    low, high = difference.ci95
    return "worse" if high < 0 else "better" if low > 0 else "none shown"


def subject_of(result: QuestionsResult) -> Arm | None:
    """The arm that the report is about: decoupled NVFP4, else the first decoupled one, else any but a reference."""
    arms = [arm for arm in result.arms if arm.difference is not None and kind_of(arm) not in ("reference", "floor")]
    order = {"decoupled": 0, "other": 1, "coupled": 2, "replay": 3}
    return min(arms, key=lambda arm: (arm.name != "decoupled-nvfp4", order.get(kind_of(arm), 4)), default=None)


def judge(result: QuestionsResult) -> Verdict:
    """The verdict on the subject, and facts about the others, the noise floor, the size of the run and lengths."""
    subject, reference = subject_of(result), result.reference
    count = len(result.questions)
    what = f"{plural(count, 'question')} of {result.task.name}"
    if result.task.stand_in:
        what = f"{plural(count, 'stand-in question')}, not GPQA,"
    if subject is None or subject.difference is None or reference is None:
        sentence = f"No verdict on {result.model.name}: this run has no arm to compare with the reference."
        return Verdict(sentence, _facts(result, None), "open")
    difference = subject.difference
    opening = (
        f"On {what} {result.model.name} with {subject.name} is right in "
        f"{percent(subject.accuracy.mean)} and with an FP32 state in {percent(reference.accuracy.mean)}: "
    )
    found = finding(difference)
    size = f"{points(abs(difference.mean))} points ({span(difference.ci95)})"
    tone: Literal["clear", "open", "against"] = "open"
    if found == "worse":
        sentence, tone = f"{opening}it loses {size}, more than chance explains.", "against"
    elif found == "better":
        sentence = f"{opening}it gains {size}, more than chance explains."
    elif found == "no interval" or difference.ci95 is None:
        sentence = f"{opening}too few questions for an interval, so nothing is claimed about the difference."
    else:
        low = -difference.ci95[0]
        shown = f"{points(difference.mean, sign=True)} points ({span(difference.ci95)})"
        excluded = f"A loss of more than {points(low)} points is excluded at 95 %, a smaller one is not."
        sentence = f"{opening}the difference of {shown} can't be told from none. {excluded}"
        tone = "clear" if low <= SMALL else "open"
    return Verdict(sentence, _facts(result, subject), tone, subject.name)


def _facts(result: QuestionsResult, subject: Arm | None) -> list[str]:
    facts = [_others(result, subject), _size(result, subject), _floor(result), _lengths(result, subject), *result.notes]
    if result.status == "partial":
        facts.append("This run is partial: not every arm has answered every question as often as the others.")
    return [fact for fact in facts if fact]


def _others(result: QuestionsResult, subject: Arm | None) -> str:
    others = [a for a in result.arms if a.difference and a is not subject and kind_of(a) not in ("floor", "reference")]
    parts = []
    for found, title in (("worse", "Below the reference"), ("better", "Above the reference")):
        told = [(a.difference, a.name) for a in others if a.difference and finding(a.difference) == found]
        if told:
            told.sort(key=lambda pair: -abs(pair[0].mean))
            parts.append(
                f"{title}: "
                + "; ".join(f"{name} {points(d.mean, sign=True)} points ({span(d.ci95)})" for d, name in told)
                + "."
            )
            if found == "better":
                parts.append("A state that changes predictions can raise an accuracy; that is no sign of precision.")
    rest = [a.name for a in others if a.difference and finding(a.difference) == "none shown"]
    if rest:
        parts.append(f"Not to be told from it: {', '.join(rest)}.")
    return " ".join(parts)


def _size(result: QuestionsResult, subject: Arm | None) -> str:
    if subject is None or subject.difference is None or subject.difference.detectable is None:
        return ""
    d = subject.difference
    fact = (
        f"Runs of this size ({plural(len(result.questions), 'question')} × {plural(len(subject.repeats), 'repeat')}) "
        f"find a difference of {points(subject.difference.detectable)} points in 8 of 10 cases, and mostly miss "
        f"smaller ones. "
    )
    if d.repeats_for_point is None:
        return fact + "To find 1 point, no number of repeats of these questions is enough: it takes more questions."
    if d.repeats_for_point <= len(subject.repeats):
        return fact + "That is enough to find 1 point."
    least = "at least " if d.at_least else "about "
    return fact + f"To find 1 point takes {least}{plural(d.repeats_for_point, 'repeat')}."


def _floor(result: QuestionsResult) -> str:
    reseeded = next((arm for arm in result.arms if arm.name == RESEEDED), None)
    again = next((arm for arm in result.arms if arm.name == "reference-again"), None)
    parts = []
    if reseeded is not None and reseeded.difference is not None:
        d = reseeded.difference
        parts.append(
            f"Noise floor: the reference with other seeds is {points(d.mean, sign=True)} points "
            f"({span(d.ci95)}) from itself, and {share(d.changed, d.pairs)} of its answers change."
        )
    elif result.task.temperature == 0:
        parts.append("Nothing was sampled, so other seeds would change nothing.")
    if again is not None and again.difference is not None:
        d = again.difference
        parts.append(
            f"The untouched model, FP32 in its own code, changes {d.changed} of {d.pairs} answers: what rounding in "
            "another order does."
        )
    elif not parts:
        parts.append("The noise floor was not measured.")
    if not any(a.difference and a.difference.changed for a in result.arms) and result.questions:
        parts.append(
            f"No answer changed in any arm; with {plural(len(result.questions), 'question')}, up to "
            f"{percent(s.unseen_share(len(result.questions)))} of answers might still (95 %)."
        )
    return " ".join(parts)


def _lengths(result: QuestionsResult, subject: Arm | None) -> str:
    reference = result.reference
    if subject is None or subject.lengths is None or reference is None or not result.task.cap:
        return ""
    parts = []
    difference = subject.lengths.difference
    if difference is not None:
        interval = subject.lengths.ci95
        shown = "" if interval is None else f" ({signed(interval[0])} to {signed(interval[1])})"
        parts.append(f"The mean length of its answers is {signed(difference)} tokens from the reference's{shown}.")
    mine, theirs = subject.accuracy, reference.accuracy
    if mine.answers and theirs.answers:
        parts.append(
            f"The cap of {result.task.cap:,} tokens cut off {share(mine.cut_off, mine.answers)} of them (reference "
            f"{share(theirs.cut_off, theirs.answers)}); {share(mine.unparsed, mine.answers)} "
            f"({share(theirs.unparsed, theirs.answers)}) held no answer that could be parsed."
        )
        if max(mine.cut_off / mine.answers, theirs.cut_off / theirs.answers) > 0.05:
            parts.append("So the accuracy above is that of capped answers.")
    if away := [_longer(arm) for arm in result.arms if arm is not subject and _longer(arm)]:
        parts.append(f"Answers of another mean length than the reference's: {'; '.join(away)}.")
    return " ".join(parts)


def _longer(arm: Arm) -> str:
    """By how much an arm's answers are longer or shorter, where the interval as it is shown says that they are."""
    if arm.lengths is None or arm.lengths.difference is None or arm.lengths.ci95 is None:
        return ""
    low, high = arm.lengths.ci95
    if low < 0.05 and high > -0.05:
        return ""
    return f"{arm.name} {signed(arm.lengths.difference)} tokens ({signed(low)} to {signed(high)})"


def points(value: float, *, sign: bool = False) -> str:
    """A share in points: 3.1, or −0.4 and +1.0 with a sign."""
    text = f"{100 * abs(value):.1f}"
    return text if not sign or float(text) == 0 else ("−" if value < 0 else "+") + text


def span(interval: Interval | None) -> str:
    """−1.6 to +0.8, or that there is none."""
    return (
        "no interval" if interval is None else f"{points(interval[0], sign=True)} to {points(interval[1], sign=True)}"
    )


def signed(value: float) -> str:
    text = f"{abs(value):.1f}"
    return text if float(text) == 0 else ("−" if value < 0 else "+") + text


def percent(value: float) -> str:
    """61.2 %."""
    return f"{100 * value:.1f}\u00a0%"


def share(part: int, whole: int) -> str:
    return percent(part / whole) if whole else "–"


def p_value(p: float) -> str:
    return "< 0.0001" if p < 0.0001 else f"{p:.2g}" if p < 0.1 else f"{p:.2f}"
