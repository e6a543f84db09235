"""Ask a model the questions of an lm-eval task with every arm's state, and compare the answers with FP32's."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ...adapters import attach
from ...quant.errors import InvalidValueError, NonFiniteStateError, QuantizeStateError
from ...quant.policy import StatePolicy
from ...quant.recipe import Recipe
from .. import provenance
from ..evaluate import _describe, _device_name, _policies, _record
from ..formatting import plural
from ..injected import Injected
from ..measure import ArmPolicy, policy_of
from ..models import LoadedModel, load_model
from ..records import digest
from ..rundir import RunDirectory
from ..team import Team
from ..weights import Setup
from . import result as r
from .assemble import ArmCells, Cell, answer_word, arms_of, status_of
from .harness import Harness, Question, load_task
from .lm import PairedLM, Sampling
from .pairing import text_hash
from .plan import Plan, Source
from .store import Answer, AnswerStore, read_answers

Progress = Callable[[str, int, int], None]
"""Called as (arm, answers this process has, answers it is to have)."""

PACKAGES = ("lm_eval", "datasets", "accelerate")


def ask(
    model: str | LoadedModel,
    task: str,
    arms: Sequence[str] | Mapping[str, StatePolicy | Recipe | str],
    source: Source,
    plan: Plan,
    out: str | os.PathLike[str],
    *,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    team: Team | None = None,
    progress: Progress | None = None,
) -> r.QuestionsResult | None:
    """Ask every arm, and return the result; None in all processes but the first.

    ``out`` holds each answer from the moment it is finished. A run that was stopped goes on where it was, and a
    finished one takes in more arms, questions or repeats. ``team`` are the processes that share the questions, by
    default those that torchrun started; they exchange no answers, which are on disk. Raises QuantizeStateError for
    whatever is wrong.
    """
    team = Team.join() if team is None else team
    policies = _arm_policies(arms, plan)
    started = provenance.now()
    if isinstance(model, LoadedModel):
        loaded = model
    else:
        loaded = load_model(model, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    with ExitStack() as stack:
        handle = stack.enter_context(attach(loaded.model, "reference", path="replay"))
        for policy in policies.values():  # recipes name layers: all must be there before hours are spent
            handle.use(policy_of(policy))
        how = Sampling(plan.temperature, plan.top_k, plan.top_p, plan.seed)
        lm = PairedLM(
            handle,
            loaded.tokenizer,
            batch_size=plan.batch_size,
            sampling=how,
            think_end_token=plan.think_end_token,
        )
        harness = load_task(
            task,
            lm,
            rows=source.rows,
            cap=plan.cap,
            until=plan.until,
            num_fewshot=plan.num_fewshot,
            chat_template=plan.chat_template,
            system_instruction=plan.system_instruction,
            filter=plan.filter,
            metric=plan.metric,
            include_path=plan.include_path,
            seed=plan.seed,
        )
        _check_form(harness, plan, policies)
        asked = harness.questions[: plan.limit or None]
        lm.check_lengths(asked, 1 if harness.likelihood else plan.cap)
        about = _about(harness, source, plan)
        configuration = _configuration(loaded, about, plan)
        run = RunDirectory(out, configuration)
        team.agree(lambda: _open(stack, run))
        with AnswerStore(run.path / "arms", team.rank) as store:
            team.wait()  # all must have read the same answers, before anyone adds one, to share the rest alike
            index, count = plan.shard
            mine = asked[index - 1 :: count]
            for name, policy in policies.items():
                _check_policy(store, name, policy)
                handle.use(policy_of(policy))
                _ask_arm(lm, harness, mine, name, policy, plan.repeats, store, team, progress)
        team.wait()
        if not team.first:
            return None
        result = _result(run, loaded, handle, harness, asked, policies, about, plan, source, started)
        return _finish(run, result)


def _ask_arm(
    lm: PairedLM,
    harness: Harness,
    questions: Sequence[Question],
    name: str,
    policy: ArmPolicy,
    repeats: int,
    store: AnswerStore,
    team: Team,
    progress: Progress | None,
) -> None:
    """Answer what is not answered yet; longest prompts first, as lm-eval does, so that memory runs out at once."""
    wanted = [(question, repeat) for repeat in range(repeats) for question in questions]
    pending = [(q, repeat) for q, repeat in wanted if (name, q.id, repeat) not in store.answers]
    pending.sort(key=lambda pair: -len(pair[0].prompt))
    pending = [pending[i] for i in team.share(len(pending))]
    done = len(wanted) // team.size - len(pending)
    for first in range(0, len(pending), lm.batch_size):
        batch = pending[first : first + lm.batch_size]
        store.append(_answers(lm, harness, batch, name, policy))
        if progress is not None:
            progress(name, max(0, done) + first + len(batch), max(0, done) + len(pending))


def _answers(
    lm: PairedLM, harness: Harness, batch: Sequence[tuple[Question, int]], name: str, policy: ArmPolicy
) -> list[Answer]:
    """One batch's answers. Where the arm's rounded state overflows, each question is asked alone, to tell which it was.

    Answers do not depend on the batch around them. Raises NonFiniteStateError where the arm rounds nothing.
    """
    began = time.perf_counter()
    given: list[tuple[Any, list[Any], int, bool]]
    try:
        if harness.likelihood:
            given = [("", values, 0, False) for values in lm.choose([question for question, _ in batch])]
        else:
            stream = name if name == r.RESEEDED else "answer"
            responses = lm.respond([(question, lm.seed_of(question, repeat, stream)) for question, repeat in batch])
            given = [(response.text, [response.text], response.tokens, response.cut_off) for response in responses]
    except NonFiniteStateError as error:
        if Setup(policy).exact_state:
            raise
        given, overflow = [], str(error)
    seconds = (time.perf_counter() - began) / len(batch)
    if not given and len(batch) > 1:
        return [answer for one in batch for answer in _answers(lm, harness, [one], name, policy)]
    hashed = _policy_sha256(policy)
    if not given:
        ((question, repeat),) = batch
        return [
            Answer(name, hashed, question.id, repeat, question.prompt_sha256, 0.0, None, 0, False, seconds,
                   overflow=overflow)
        ]  # fmt: skip
    scores = harness.score([(question, values) for (question, _), (_, values, *_) in zip(batch, given, strict=True)])
    return [
        Answer(
            arm=name,
            policy=hashed,
            question=question.id,
            repeat=repeat,
            prompt=question.prompt_sha256,
            score=scored.score,
            answer=scored.answer,
            tokens=tokens,
            cut_off=cut_off,
            seconds=seconds,
            text=text,
            metrics=scored.metrics,
        )
        for (question, repeat), (text, _, tokens, cut_off), scored in zip(batch, given, scores, strict=True)
    ]


def _overflow_notes(answers: Iterable[Answer]) -> list[str]:
    """What a result says of answers that an overflow ended, arm by arm. The question tells notes of a merge apart."""
    lost: dict[str, list[Answer]] = {}
    for answer in answers:
        if answer.overflow:
            lost.setdefault(answer.arm, []).append(answer)
    return [
        f"The state of {name} overflowed in {plural(len(of_arm), 'answer')}, first to question "
        f"{of_arm[0].question[:12]}; such answers count as wrong and not parsed ({of_arm[0].overflow})."
        for name, of_arm in sorted(lost.items())
    ]


def _open(stack: ExitStack, run: RunDirectory) -> None:
    stack.enter_context(run)


def _arm_policies(arms: Any, plan: Plan) -> dict[str, ArmPolicy]:
    named = dict(arms) if isinstance(arms, Mapping) else {name: name for name in arms}
    reseeded = named.pop(r.RESEEDED, None)
    policies = _policies(named, plan.window, plan.seed)
    for name, policy in policies.items():
        if isinstance(policy, Injected):
            raise InvalidValueError(f"the arm {name!r} is injected, which evaluate alone runs; questions need a policy")
    if "reference" not in policies:
        raise InvalidValueError("the arms need the one called reference: all others are compared with it")
    if reseeded is not None:
        policies[r.RESEEDED] = policies["reference"]
    return policies


def _check_form(harness: Harness, plan: Plan, policies: Mapping[str, ArmPolicy]) -> None:
    if harness.likelihood and (plan.repeats > 1 or plan.temperature > 0):
        raise InvalidValueError(
            f"task {harness.name} compares log-likelihoods, in which nothing is drawn: "
            "leave out --repeats and --temperature"
        )
    if r.RESEEDED in policies and plan.temperature == 0:
        raise InvalidValueError(
            f"without sampling, {r.RESEEDED} is the reference itself; leave it out, or give a --temperature"
        )


def _check_policy(store: AnswerStore, name: str, policy: ArmPolicy) -> None:
    wanted = _policy_sha256(policy)
    if any(answer.arm == name and answer.policy != wanted for answer in store.answers.values()):
        raise QuantizeStateError(
            f"{store.folder} holds answers of another policy under the name {name}; use another --out"
        )


def _policy_sha256(policy: ArmPolicy) -> str:
    return digest(repr(policy))


def _about(harness: Harness, source: Source, plan: Plan) -> r.Task:
    prompts = text_hash("".join(question.prompt_sha256 for question in harness.questions))
    return r.Task(
        name=harness.name,
        version=harness.version,
        form="likelihood" if harness.likelihood else "generate",
        filter=harness.scoring.filter,
        metric=harness.scoring.metric,
        source=source.name,
        data_sha256=source.sha256,
        prompts_sha256=prompts,
        num_fewshot=harness.task.config.num_fewshot,
        chat_template=plan.chat_template,
        cap=0 if harness.likelihood else plan.cap,
        temperature=plan.temperature,
        top_k=plan.top_k,
        top_p=plan.top_p,
        seed=plan.seed,
        stand_in=source.stand_in,
        until=harness.ends,
    )


def _configuration(loaded: LoadedModel, about: r.Task, plan: Plan) -> dict[str, Any]:
    """All that decides an answer, but for the arm, question and repeat, and the device's numerics."""
    kept = {k: v for k, v in dataclasses.asdict(about).items() if k not in ("source", "stand_in")}
    device = loaded.model.device
    return kept | {
        "weights": loaded.sha256,
        "window": plan.window,
        "think_end_token": plan.think_end_token,
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": _device_name(device) if device.type == "cuda" else device.type,
        "quantize-state": provenance.version("quantize-state"),
        "lm_eval": provenance.version("lm_eval"),
    }


def _result(
    run: RunDirectory,
    loaded: LoadedModel,
    handle: Any,
    harness: Harness,
    asked: Sequence[Question],
    policies: Mapping[str, ArmPolicy],
    about: r.Task,
    plan: Plan,
    source: Source,
    started: str,
) -> r.QuestionsResult:
    answers = read_answers(run.path / "arms")
    answered = {answer.question for answer in answers.values()}
    wanted = {question.id for question in asked} | answered
    questions = [
        r.Question(q.id, q.prompt_sha256, answer_word(_right_answer(harness, q)))
        for q in harness.questions
        if q.id in wanted
    ]
    prompts = {question.sha256: question.prompt_sha256 for question in questions}
    for answer in answers.values():
        if prompts.get(answer.question) != answer.prompt:
            raise QuantizeStateError(
                f"{run.path} holds an answer of {answer.arm} to another prompt of question {answer.question[:12]}; "
                "use another --out"
            )
    earlier = _read_earlier(run)
    records = {name: _record(policy, name) for name, policy in policies.items()}
    if earlier is not None:  # arms of earlier calls on this folder
        records = {arm.name: arm.policy for arm in earlier.arms} | records
    given = []
    for name in dict.fromkeys([*policies, *records]):
        own = [answer for answer in answers.values() if answer.arm == name]
        cells = {
            (a.question, a.repeat): Cell(round(a.score, 6), answer_word(a.answer), a.tokens, a.cut_off) for a in own
        }
        policy_sha256 = own[0].policy if own else ""
        given.append(ArmCells(name, records.get(name), policy_sha256, sum(a.seconds for a in own), cells))
    arms = arms_of(questions, given, plan.seed)
    collected = provenance.collect(
        device=_device_name(loaded.model.device),
        threads=torch.get_num_threads(),
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        engine="generate" if not harness.likelihood else "scan",
        window=plan.window,
        seeds={"sampling, few-shot examples, rounding and bootstrap": plan.seed},
        sha256={"weights": loaded.sha256, "questions": about.data_sha256, "prompts": about.prompts_sha256},
        started=run.started if run.started < started else started,
    )
    versions = collected.versions | {name: provenance.version(name) for name in PACKAGES}
    return r.QuestionsResult(
        model=_describe(loaded, handle),
        task=about,
        questions=questions,
        arms=arms,
        runs=[dataclasses.replace(collected, versions=versions)],
        configuration=json.dumps(run.configuration, sort_keys=True),
        status=status_of(questions, arms),
        notes=_overflow_notes(answers.values()),
    )


def _right_answer(harness: Harness, question: Question) -> str:
    """The right answer's text, for which a task with options may give a number."""
    if not harness.likelihood:
        return question.target
    target = harness.task.doc_to_target(question.doc)
    options = harness.options(question)
    return options[target] if isinstance(target, int) and 0 <= target < len(options) else str(target)


def _read_earlier(run: RunDirectory) -> r.QuestionsResult | None:
    return r.QuestionsResult.read(run.result_path) if run.result_path.exists() else None


def _finish(run: RunDirectory, result: r.QuestionsResult) -> r.QuestionsResult:
    """Write result.json; one that holds the same answers stays as it is, one with fewer is extended."""
    earlier = _read_earlier(run)
    if earlier is not None and _count(earlier) == _count(result) and earlier.questions == result.questions:
        return earlier
    result.write(run.result_path, overwrite=earlier is not None)
    return result


def _count(result: r.QuestionsResult) -> int:
    return sum(arm.accuracy.answers for arm in result.arms)
