"""The result in one sentence, computed from the numbers: it says so as well when they show nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .formatting import mean_text, plural, scientific, times
from .result import KL, Arm, Result

FORMAT_NAMES = {
    "fp32": "FP32",
    "bf16": "BF16",
    "fp16": "FP16",
    "fp8_e4m3": "FP8",
    "mxfp8": "MXFP8",
    "int8": "INT8",
    "nvfp4": "NVFP4",
    "mxfp4": "MXFP4",
    "fp8": "FP8",
}

Kind = Literal["floor", "reference", "replay", "coupled", "decoupled", "other"]


@dataclass(frozen=True)
class Verdict:
    """``tone`` is ``clear`` where the intervals separate in favour of the read copy, ``against`` or ``open`` else."""

    sentence: str
    facts: list[str]
    tone: Literal["clear", "open", "against"]
    subject: str | None = None


def kind_of(arm: Arm) -> Kind:
    """What an arm is, by its policy: coupled arms feed a low-precision state back, decoupled ones only read it."""
    if arm.name == "reference-again":
        return "floor"
    policy = arm.policy
    if policy is None or policy.recipe is not None or arm.weights is not None:
        return "other"
    if policy.read not in (None, policy.checkpoint):
        return "decoupled"
    if policy.checkpoint != "fp32":
        return "coupled"
    return "reference" if policy.window == 1 else "replay"


def format_name(name: str | None) -> str:
    return FORMAT_NAMES.get(name or "", name or "")


def floor_of(result: Result) -> Arm | None:
    """The arm that repeats the reference, whose divergence is the noise floor."""
    return next((arm for arm in result.arms if kind_of(arm) == "floor"), None)


def at_floor(arm: Arm, floor: Arm | None) -> bool:
    """Whether an arm's divergence can't be told from the noise floor: its interval reaches down to the floor's."""
    if floor is None or arm.overflows:
        return False
    return (arm.kl.ci95 or (arm.kl.mean,))[0] <= (floor.kl.ci95 or (floor.kl.mean,))[-1]


def floor_note(arm: Arm, floor: Arm | None) -> str:
    """``at the noise floor``, ``near the noise floor`` (within ten times: much of it is noise), or nothing."""
    if arm.overflows:
        return ""
    if kind_of(arm) == "reference":
        return "the reference itself"
    if at_floor(arm, floor):
        return "at the noise floor"
    return "near the noise floor" if floor is not None and arm.kl.mean <= 10 * floor.kl.mean else ""


def overflow_text(arm: Arm) -> str:
    """``overflowed after 16,384 tokens in LAYER``: the first time, and how many documents stopped; empty without."""
    if not arm.overflows:
        return ""
    first = min(arm.overflows, key=lambda o: o.tokens)
    stopped = sum(len(o.documents) for o in arm.overflows)
    counted = f" ({plural(stopped, 'document')} stopped early)" if stopped > 1 or len(arm.kl.by_document) > 1 else ""
    return f"overflowed after {plural(first.tokens, 'token')} in {first.layer or 'its logits'}{counted}"


def note_on(arm: Arm, floor: Arm | None) -> str:
    """What must stand beside an arm's mean: that it overflowed, or where it lies by the noise floor."""
    return overflow_text(arm) or floor_note(arm, floor)


def kl_text(arm: Arm) -> str:
    """The mean divergence with its interval: a lower bound where an arm overflowed, a dash where it left nothing."""
    if not arm.kl.tokens:
        return "–"
    return ("≥ " if arm.overflows else "") + mean_text(arm.kl.mean, arm.kl.ci95)


def separated(a: Arm, b: Arm) -> bool | None:
    """Whether the 95 % intervals of two mean divergences have no point in common; None where one has no interval."""
    if a.kl.ci95 is None or b.kl.ci95 is None:
        return None
    return a.kl.ci95[1] < b.kl.ci95[0] or b.kl.ci95[1] < a.kl.ci95[0]


def subject_of(result: Result) -> Arm | None:
    """The arm the report is about: decoupled NVFP4, else the decoupled arm that moves the fewest bytes."""
    arms = [arm for arm in result.arms if kind_of(arm) == "decoupled"]
    return min(
        arms,
        key=lambda a: (a.name != "decoupled-nvfp4", a.bytes_per_element.moved_per_step),
        default=None,
    )


def judge(result: Result) -> Verdict:
    """Compare the read copy with the coupled arms of its own format, or with all where there are none."""
    subject = subject_of(result)
    coupled = [arm for arm in result.arms if kind_of(arm) == "coupled"]
    facts = _facts(result, subject)
    if subject is None or subject.policy is None or not coupled:
        missing = "decoupled" if subject is None else "coupled"
        sentence = (
            f"No verdict on {result.model.name}: {'this run' if result.arms else 'an empty run'} has no {missing} arm."
        )
        return Verdict(sentence, facts, "open", subject.name if subject else None)
    same = [arm for arm in coupled if arm.policy and arm.policy.checkpoint == subject.policy.read]
    rivals = sorted(same or coupled, key=lambda arm: -arm.kl.mean)
    lost = "".join(f"; {_describe(arm)} {overflow_text(arm)}" for arm in rivals if arm.overflows)
    rivals = [arm for arm in rivals if not arm.overflows]
    read = format_name(subject.policy.read)
    opening = (
        f"On {result.model.name}, reading {'an' if read[0] in 'AEFIMN' else 'a'} {read} copy of the state while the "
        f"recurrence stays {format_name(subject.policy.checkpoint)}"
    )
    if subject.overflows:
        return Verdict(f"{opening} {overflow_text(subject)}{lost}.", facts, "against", subject.name)
    opening += f" costs {scientific(subject.kl.mean)} nats per token"
    if at_floor(subject, floor_of(result)):
        return Verdict(f"{opening}, which is the noise floor itself{lost}.", facts, "clear", subject.name)
    if not rivals:
        return Verdict(f"{opening}{lost}.", facts, "clear", subject.name)
    below = [arm for arm in rivals if separated(subject, arm) and arm.kl.mean > subject.kl.mean]
    above = [arm for arm in rivals if separated(subject, arm) and arm.kl.mean < subject.kl.mean]
    apart = [arm for arm in rivals if arm not in below and arm not in above]
    parts = []
    if below:
        parts.append(_join([f"{_less(subject, arm)} less than {_describe(arm)}" for arm in below]))
    if above:
        parts.append(_join([f"{_more(subject, arm)} more than {_describe(arm)}" for arm in above]))
    if apart:
        parts.append(f"not to be told apart from {_join([_describe(arm) for arm in apart])} on this text")
    tone: Literal["clear", "open", "against"] = "against" if above else "open" if apart else "clear"
    facts.insert(0, _interval_fact(subject, rivals, apart))
    return Verdict(f"{opening}: {', but '.join(parts)}{lost}.", facts, tone, subject.name)


def _facts(result: Result, subject: Arm | None) -> list[str]:
    facts = []
    floor = floor_of(result)
    if floor is None:
        facts.append("The noise floor was not measured: there is no arm reference-again.")
    else:
        level = (
            "exactly 0 (bit-identical logits)"
            if floor.kl.max == 0
            else f"{scientific(floor.kl.mean, 2)} nats per token"
        )
        facts.append(f"The noise floor, FP32 in the untouched model, is {level}; a divergence below it means nothing.")
        for note in ("at the noise floor", "near the noise floor"):
            there = [arm.name for arm in result.arms if arm is not floor and floor_note(arm, floor) == note]
            if there:
                facts[-1] += f" {_join(there)} {'is' if len(there) == 1 else 'are'} {note}."
    facts += [
        f"{arm.name} {overflow_text(arm)}: its numbers are those of the tokens before, its mean KL a lower bound."
        for arm in result.arms
        if arm.overflows
    ]
    if subject is not None:
        cost = subject.bytes_per_element
        facts.append(
            f"{subject.name} moves {cost.moved_per_step:.2f} bytes per state element and step "
            f"(FP32 read and written every token: 8; FP32 replay: 4.25 at window 16) "
            f"and keeps {cost.resident:.2f} resident (FP32: 4)."
        )
    facts += [effect.sentence for effect in weight_effects(result)]
    if result.status == "partial":
        facts.append(f"This run is partial: {plural(len(result.arms), 'arm')} so far.")
    return facts


@dataclass(frozen=True)
class WeightEffect:
    """Quantised weights and quantised states, each alone and both together, on the same tokens."""

    weights: Arm
    state: Arm
    both: Arm

    @property
    def sentence(self) -> str:
        """The two effects in words."""
        added = "" if self.both.kl_to_weights is None else (
            f"; to the model with such weights the state adds {_mean(self.both, self.both.kl_to_weights)}"
        )  # fmt: skip
        return (
            f"{format_name(self.both.weights)} weights alone cost {scientific(self.weights.kl.mean)} nats per token, "
            f"the state alone ({self.state.name}) {_mean(self.state, self.state.kl)}, "
            f"both {_mean(self.both, self.both.kl)}{added}."
        )


def weight_effects(result: Result) -> list[WeightEffect]:
    """Every arm that has quantised weights as well, beside the weights alone and the state alone."""
    arms = {arm.name: arm for arm in result.arms}
    found = []
    for arm in result.arms:
        only, _, state = arm.name.partition("+")
        if arm.weights is not None and state in arms and only in arms:
            found.append(WeightEffect(arms[only], arms[state], arm))
    return found


def _mean(arm: Arm, kl: KL) -> str:
    """A mean in a sentence. What an arm that overflowed gives is a lower bound, even where it is 0."""
    return f"{'at least ' if arm.overflows else ''}{scientific(kl.mean)}"


def _interval_fact(subject: Arm, rivals: list[Arm], apart: list[Arm]) -> str:
    named = "; ".join(f"{arm.name} {mean_text(arm.kl.mean, arm.kl.ci95)}" for arm in (subject, *rivals))
    if any(separated(subject, arm) is None for arm in apart):
        return f"Too few tokens for a 95 % interval, so nothing is claimed to differ: {named}."
    how = "overlap" if apart else "do not overlap"
    return f"The 95 % intervals {how}: {named}."


def _describe(arm: Arm) -> str:
    policy = arm.policy
    if policy is None:
        return arm.name
    every = "every token" if policy.window == 1 else f"every {policy.window} tokens"
    return f"{arm.name} ({format_name(policy.checkpoint)} fed back {every})"


def _less(subject: Arm, arm: Arm) -> str:
    return f"{times(arm.kl.mean / subject.kl.mean)} times" if subject.kl.mean else "infinitely"


def _more(subject: Arm, arm: Arm) -> str:
    return f"{times(subject.kl.mean / arm.kl.mean)} times" if arm.kl.mean else "infinitely"


def _join(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
