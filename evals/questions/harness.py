"""The bridge to lm-eval: its own task definitions, prompts, filters and metrics, and its HFLM around our model."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from ...quant.errors import InvalidValueError, QuantizeStateError, unknown_name
from .pairing import by_question, question_hash, text_hash

FILTERS = ("flexible-extract", "strict-match")
"""Of a task's several ways to find the answer in a response, the first of these counts, else the task's first."""


@dataclass(frozen=True)
class Scoring:
    """Which of a task's filters and metrics is the score."""

    filter: str
    metric: str


@dataclass(frozen=True)
class Question:
    """One question as every arm gets it: lm-eval's requests, and what identifies them."""

    id: str
    doc: Any
    requests: list[Any]
    prompt: str
    target: str

    @property
    def prompt_sha256(self) -> str:
        """Over all the texts that the model is given, the options of a log-likelihood question included."""
        texts = [
            str(r.args[0]) + ("\0" + str(r.args[1]) if r.request_type == "loglikelihood" else "") for r in self.requests
        ]
        return text_hash("\0\0".join(texts))


@dataclass(frozen=True)
class Scored:
    """What a response is worth: the score, and the answer that the task's filter found in it (None: none)."""

    score: float
    answer: str | None
    metrics: dict[str, float]


class Harness:
    """One lm-eval task with its questions, ready to be asked and scored.

    ``likelihood`` tasks choose the likeliest option, the others generate a response of at most ``cap`` tokens.
    """

    def __init__(self, task: Any, questions: list[Question], scoring: Scoring, cap: int) -> None:
        self.task = task
        self.name: str = task.config.task
        self.version = str(task.VERSION)
        self.questions = questions
        self.scoring = scoring
        self.cap = cap
        self.likelihood = task.OUTPUT_TYPE != "generate_until"
        self._nothing = _fallbacks(task, scoring.filter)
        self.ends: list[str] = [] if self.likelihood else task.config.generation_kwargs["until"]

    def score(self, batch: Sequence[tuple[Question, Sequence[Any]]]) -> list[Scored]:
        """Score a response (or one log-likelihood per option) of each question with the task's filters and metrics.

        The filters see each response alone: their usual last step, ``take_first``, drops all repeats but one. They get
        the whole batch in one call, because GPQA's lists all of Unicode's punctuation each time, for half a second.
        """
        requests = [[copy.copy(request) for request in question.requests] for question, _ in batch]
        for own, (_, responses) in zip(requests, batch, strict=True):
            for request, response in zip(own, responses, strict=True):
                request.resps, request.filtered_resps = [response], {}
        for ensemble in self.task._filters:
            ensemble.apply([request for own in requests for request in own])
        return [self._scored(*pair, own) for pair, own in zip(batch, requests, strict=True)]

    def _scored(self, question: Question, responses: Sequence[Any], requests: list[Any]) -> Scored:
        metrics: dict[str, float] = {}
        for name in requests[0].filtered_resps:
            found = [request.filtered_resps[name] for request in requests]
            for metric, value in self.task.process_results(question.doc, found).items():
                if isinstance(value, int | float) or hasattr(value, "item"):
                    metrics[f"{name}/{metric}"] = float(value)
        key = f"{self.scoring.filter}/{self.scoring.metric}"
        if key not in metrics:
            raise QuantizeStateError(f"task {self.name} gave no number for {key}; it gave {', '.join(metrics)}")
        return Scored(metrics[key], self._answer(question, responses, requests[0]), metrics)

    def _answer(self, question: Question, responses: Sequence[Any], request: Any) -> str | None:
        if self.likelihood:
            values = [response[0] for response in responses[: len(self.options(question))]]
            return self.options(question)[values.index(max(values))]
        found = request.filtered_resps[self.scoring.filter]
        text = found if isinstance(found, str) else " ".join(map(str, found)) if found else ""
        return None if not text.strip() or text in self._nothing else text.strip()

    def options(self, question: Question) -> list[str]:
        """The texts among which a log-likelihood question chooses."""
        if self.task.config.doc_to_choice is None:
            return [request.args[1] for request in question.requests]
        return [str(option) for option in self.task.doc_to_choice(question.doc)]


def load_task(
    name: str,
    lm: Any,
    *,
    rows: Sequence[Mapping[str, str]] | None = None,
    cap: int,
    until: Sequence[str] = (),
    num_fewshot: int | None = None,
    chat_template: bool = False,
    system_instruction: str | None = None,
    filter: str | None = None,
    metric: str | None = None,
    include_path: str | Path | None = None,
    seed: int = 0,
) -> Harness:
    """The lm-eval task ``name`` and all its questions; with ``rows``, these are its dataset and nothing is loaded.

    Prompts are built for the whole dataset, in its order, so that few-shot examples do not depend on a limit.
    Answers end at the task's own stop texts and those in ``until``.
    """
    task = _build_task(name, rows, include_path)
    shots = num_fewshot if num_fewshot is not None else task.config.num_fewshot or 0
    task.set_config("num_fewshot", shots)
    task.set_fewshot_seed(seed)
    if task.OUTPUT_TYPE not in ("generate_until", "multiple_choice", "loglikelihood"):
        raise InvalidValueError(f"task {name} measures {task.OUTPUT_TYPE}; `quantize-state eval` measures perplexity")
    if task.OUTPUT_TYPE == "generate_until":
        own = task.config.generation_kwargs.get("until", [])
        ends = list(dict.fromkeys([*([own] if isinstance(own, str) else own or []), *until]))
        how = {"until": ends, "max_gen_toks": cap, "do_sample": False, "temperature": 0.0}
        task.set_config("generation_kwargs", how)
    with quiet():
        task.build_all_requests(
            apply_chat_template=chat_template,
            chat_template=lm.apply_chat_template if chat_template else None,
            tokenizer_name=lm.tokenizer_name if chat_template else "",
            system_instruction=system_instruction,
        )
    by_doc: dict[int, list[Any]] = {}
    for request in task.instances:
        by_doc.setdefault(request.doc_id, []).append(request)
    count: Counter[str] = Counter()
    questions = []
    for requests in by_doc.values():
        requests.sort(key=lambda request: request.idx)
        doc = requests[0].doc
        id = question_hash(doc)
        count[id] += 1  # some tasks ask a question twice
        id = id if count[id] == 1 else text_hash(f"{id} {count[id]}")
        target = task.doc_to_target(doc)
        questions.append(Question(id, doc, requests, str(requests[0].args[0]), str(target)))
    return Harness(task, questions, _scoring(task, questions[0], filter, metric), cap)


def _build_task(name: str, rows: Sequence[Mapping[str, str]] | None, include_path: str | Path | None) -> Any:
    with quiet():
        import lm_eval.tasks
        from lm_eval.tasks import TaskManager

        # To read lm-eval's thousands of tasks takes many seconds; a folder that holds the task is enough.
        folder = Path(lm_eval.tasks.__file__).parent / "gpqa" if rows is not None else include_path
        manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=folder is None)
        if rows is None and folder is not None and name not in manager.all_subtasks:
            manager = TaskManager(include_path=str(folder))
        if name not in manager.all_subtasks:
            if name in manager.all_tasks:
                raise InvalidValueError(f"{name} is a group of tasks of lm-eval; name its tasks one by one")
            raise unknown_task(name, manager.all_subtasks)
        try:
            with _own_dataset(rows):
                return manager.load([name])["tasks"][name]
        except (InvalidValueError, QuantizeStateError):
            raise
        except Exception as error:  # a dataset that is not there, in one of many ways
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InvalidValueError(f"lm-eval can't load the task {name}: {reason}") from error


@contextlib.contextmanager
def _own_dataset(rows: Sequence[Mapping[str, str]] | None) -> Iterator[None]:
    """Tasks made inside have ``rows`` as their dataset, in whatever split they ask for, and load nothing."""
    if rows is None:
        yield
        return
    import datasets
    from lm_eval.api.task import ConfigurableTask

    data = datasets.Dataset.from_list([dict(row) for row in rows])

    def download(task: Any, *_: Any, **__: Any) -> None:
        config = task.config
        splits = {config.training_split, config.validation_split, config.test_split, config.fewshot_split}
        task.dataset = {split: data for split in splits if split is not None}
        for place in (config, config.fewshot_config):
            if place.process_docs is not None:
                place.process_docs = by_question(place.process_docs)

    with mock.patch.object(ConfigurableTask, "download", download):
        yield


def unknown_task(name: str, known: Sequence[str]) -> InvalidValueError:
    """The error for a task that lm-eval does not have, with close matches and not its thousands of tasks."""
    import difflib

    close = difflib.get_close_matches(name, known, n=5, cutoff=0.5)
    hint = f"did you mean {', '.join(close)}?" if close else "`lm-eval ls tasks` lists them"
    return InvalidValueError(f"lm-eval has no task {name!r}; {hint}")


def _scoring(task: Any, question: Question, filter: str | None, metric: str | None) -> Scoring:
    filters = [ensemble.name for ensemble in task._filters]
    metrics = list(task._metric_fn_list)
    if filter is not None and filter not in filters:
        raise unknown_name(f"filter of task {task.config.task}:", filter, filters)
    if metric is not None and metric not in metrics:
        raise unknown_name(f"metric of task {task.config.task}:", metric, metrics)
    first = next((name for name in FILTERS if name in filters), filters[0])
    return Scoring(filter or first, metric or metrics[0])


def _fallbacks(task: Any, name: str) -> set[str]:
    """What the task's filter says where it finds no answer, such as [invalid]."""
    ensemble = next(e for e in task._filters if e.name == name)
    found = (getattr(make(), "fallback", None) for make in ensemble.filters)
    return {text for text in found if isinstance(text, str)}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without lm-eval's log lines and progress bars; this command has its own."""
    import datasets
    import lm_eval.api.task

    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    levels = [logger.level for logger in loggers]
    shown = datasets.utils.logging.is_progress_bar_enabled()
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        with mock.patch.object(lm_eval.api.task, "tqdm", lambda items, **_: items):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if shown:
            datasets.enable_progress_bars()
