"""The main job: what every arm's state does to a model's predictions, beside FP32, on the same tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..adapters import attach
from ..quant.columns import ColumnScales
from ..quant.errors import InvalidValueError
from ..quant.policy import DEFAULT_ARMS, StatePolicy, parse_arm
from ..quant.recipe import Recipe
from . import provenance
from .attention import bounded_attention
from .calibrate import column_scales, other_text
from .injected import Injected
from .measure import ArmPolicy, Measured, measure, policy_of
from .metrics import Evidence
from .models import LoadedModel, input_device, load_model, weights_sha256
from .records import write_atomic
from .result import Arm, BytesPerElement, Model, Policy, Result, Text
from .rollout import CHUNK, Progress, Rollout
from .rundir import RunDirectory
from .team import Team
from .text import TextSource, load_text, tokenise
from .weights import Setup, quantized, setups

GENERATION_PROMPT = 256
"""Tokens of text before the generated ones; prefilled exactly and not evaluated."""

STORED_EVERY = 4096
"""Generated tokens between two writes of what there is."""

ENGINES = ("scan", "step")


def evaluate(
    model: Any,
    arms: Sequence[str] | Mapping[str, StatePolicy | Recipe | Injected | str] = DEFAULT_ARMS,
    *,
    tokenizer: Any = None,
    text: str | TextSource = "pydoc",
    tokens: int = 4096,
    sequences: int = 1,
    generate: int = 0,
    window: int = 16,
    engine: str = "scan",
    weights: str | None = None,
    columns: str | os.PathLike[str] | ColumnScales | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    batch: int = 1,
    together: int = 1,
    trust_remote_code: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
    team: Team | None = None,
) -> Result:
    """Teacher-force ``model`` on known tokens with each arm's state, and compare its predictions with FP32's.

    Each arm runs beside the reference, chunk by chunk, so memory is bounded by the chunk and not by the length. An arm
    whose rounded state overflows ends there, with what was measured before; the others go on.

    Args:
        model: an embedded name, a Hugging Face directory or hub id, or a loaded model with its ``tokenizer``.
        arms: arm names (``quantize-state ls``), or policies, recipes and injected arms by name.
        text: ``pydoc``, ``stdlib``, a UTF-8 file, or a loaded text; ``sequences`` spans of ``tokens`` tokens are taken.
        generate: where above 0, the published protocol: FP32 generates that many tokens after a prompt of the text,
            at temperature 1, and they are the tokens evaluated.
        window: of replay and decoupled arms whose name gives none.
        engine: ``scan`` (whole windows at once) or ``step`` (token by token, as decode runs).
        weights: ``nvfp4``, ``fp8`` or ``int8``: adds the weights alone, quantised by ModelOpt in a second copy of the
            model, and every arm whose states round on top of them, so that the two effects can be told apart.
        columns: column scales of balanced arms, or their file. By default, where an arm needs some, they are measured
            here, on a text that is not the one evaluated, and kept in ``out``.
        device_map: ``auto`` spreads a model that is too large for one device over all of them (accelerate).
        batch: sequences that run as one batch. Rounding depends on it a little, as the order of sums does.
        together: arms that run beside one reference, which then runs once for all of them; each needs memory for its
            states and its attention cache. The numbers do not depend on it.
        out: a folder for result.json and each finished arm. A finished run is never overwritten, an interrupted one
            goes on at the arm and sequences where it stopped. By default nothing is written.
        team: the processes that share the sequences; by default those that torchrun started, else this one. The
            first one returns the whole result, as do the others.

    Returns the result. Raises QuantizeStateError for whatever is wrong with these.
    """
    wanted = setups(_policies(arms, window, seed), weights, seed)
    _check_positive(tokens=tokens, sequences=sequences, batch=batch, together=together)
    if generate < 0:
        raise InvalidValueError(f"generate is {generate}; it must be 0 (evaluate on the text) or more")
    if engine not in ENGINES:
        raise InvalidValueError(f"engine is {engine!r}; it must be {' or '.join(ENGINES)}")
    team = Team.join() if team is None else team
    if device_map is not None and team.size > 1:
        raise InvalidValueError("--device-map spreads one model over all devices: run it without torchrun")
    if device_map is not None and weights is not None:
        raise InvalidValueError("--weights quantises a copy of the model on one device: leave --device-map out")
    if isinstance(columns, str | os.PathLike):
        columns = ColumnScales.read(columns)
    started = provenance.now()
    source = load_text(text) if isinstance(text, str) else text
    loaded = _loaded(model, tokenizer, device, dtype, device_map, trust_remote_code)
    length = GENERATION_PROMPT if generate else tokens + 1
    ids = token_ids(loaded, source, length, sequences, seed)
    weights_dtype = str(loaded.model.dtype).removeprefix("torch.")
    configuration = {
        "weights": loaded.sha256,
        "text": _sha256(ids),
        "generate": generate,
        "window": window,
        "engine": engine,
        "seed": seed,
        "batch": batch,
        "dtype": weights_dtype,
        "device": input_device(loaded.model).type,
        "version": provenance.version("quantize-state"),
    } | ({} if weights is None else {"quantized weights": weights})
    if columns is not None:
        configuration["column scales"] = columns.sha256
    run = None if out is None else RunDirectory(out, configuration)
    with ExitStack() as stack:
        stack.enter_context(bounded_attention(loaded.model))
        handle = stack.enter_context(attach(loaded.model, "reference", path="replay", columns=columns))
        if columns is None and any(_lacks_columns(setup.policy) for setup in wanted.values()):
            handle.columns = team.agree(lambda: _measured_columns(handle, loaded, source, seed, run, progress))
        for setup in wanted.values():  # recipes name layers: all must be there before hours are spent
            handle.use(policy_of(setup.policy))
        if run is not None:
            finished = team.agree(lambda: _finished(stack.enter_context(run)))
            if not team.first:
                run.join()
            if finished is not None and set(wanted) <= {arm.name for arm in finished.arms}:
                return finished
        if run is not None and team.first and handle.columns is not None and not _kept_columns(run).exists():
            handle.columns.write(_kept_columns(run))
        prompt = GENERATION_PROMPT - 1 if generate else 0
        work = _Work(handle, ids, prompt, batch, engine, window, seed, run, team, progress)
        if generate:
            work.generate(generate)
        done = {} if run is None else dict(run.arms)
        todo = [name for name in wanted if name not in done]
        if weights is not None and any(wanted[name].weights for name in todo):
            work.quantized = stack.enter_context(
                attach(quantized(loaded.model, weights), "reference", path="replay", columns=handle.columns)
            )
        for i in range(0, len(todo), together):
            group = {name: wanted[name] for name in todo[i : i + together]}
            for name, measured in work.measured(group).items():
                arm = _arm(name, wanted[name], measured, handle, byte_level=len(loaded.tokenizer) == 256)
                done[name] = arm
                if run is not None:
                    run.save_arm(arm)
        scales = _scales_used(handle.columns, wanted)
        result = Result(
            model=_describe(loaded, handle),
            text=Text(
                source=source.name,
                tokens=work.ids.shape[1] - 1 - prompt,
                sequences=sequences,
                sha256=_sha256(work.ids),
                protocol="generated by FP32, then teacher-forced" if generate else "teacher-forced on text",
                generated=generate,
                prompt=prompt,
            ),
            # those asked for, then arms of earlier calls on this folder
            arms=[done[name] for name in dict.fromkeys([*wanted, *done]) if name in done],
            provenance=provenance.collect(
                device=_device_name(input_device(loaded.model)),
                threads=torch.get_num_threads(),
                dtype=weights_dtype,
                engine=engine,
                window=window,
                seeds={"text, sampling, rounding and bootstrap": seed},
                sha256={"weights": loaded.sha256, "text": source.sha256, "tokens": _sha256(work.ids)}
                | {f"column scales{mark}": s.sha256 for mark, s in scales.items()},
                started=started,
                processes=team.size,
                columns=", and ".join(dict.fromkeys(s.measured_on for s in scales.values())) or None,
            ),
            layer_errors="same-inputs",
        )
        if run is not None and team.first:
            run.finish(result)
        return team.agree(lambda: result)


def token_ids(loaded: LoadedModel, source: TextSource, length: int, sequences: int, seed: int) -> Tensor:
    """Token ids [sequences, length] of spans of a text, on the model's device."""
    return torch.tensor(
        tokenise(loaded.tokenizer, source.text, length, sequences, seed), device=input_device(loaded.model)
    )


def _lacks_columns(policy: ArmPolicy) -> bool:
    """Whether an arm needs column scales and does not bring its own."""
    if isinstance(policy, Recipe):
        return policy.balanced and policy.columns is None
    return isinstance(policy, StatePolicy) and policy.balanced


def _kept_columns(run: RunDirectory) -> Path:
    return run.path / "columns.safetensors"


def _measured_columns(
    handle: Any, loaded: LoadedModel, source: TextSource, seed: int, run: RunDirectory | None, progress: Progress | None
) -> ColumnScales:
    """Column scales from a text that is not evaluated, or those that an earlier call on this folder has kept."""
    if run is not None and _kept_columns(run).exists():
        return ColumnScales.read(_kept_columns(run))
    return column_scales(handle, loaded, text=other_text(source), seed=seed, progress=progress)


def _scales_used(columns: ColumnScales | None, wanted: Mapping[str, Setup]) -> dict[str, ColumnScales]:
    """The column scales of a run's arms, by what tells recipes' own from those of all others."""
    own = {
        f" of {name}": s.policy.columns
        for name, s in wanted.items()
        if isinstance(s.policy, Recipe) and s.policy.balanced and s.policy.columns is not None
    }
    shared = columns is not None and any(_lacks_columns(s.policy) for s in wanted.values())
    return ({"": columns} if shared and columns is not None else {}) | own


def _finished(run: RunDirectory) -> Result | None:
    return run.finished


@dataclasses.dataclass
class _Work:
    """What every pass of one run shares, and which documents are this process's."""

    handle: Any
    ids: Tensor
    prompt: int
    batch: int
    engine: str
    window: int
    seed: int
    run: RunDirectory | None
    team: Team
    progress: Progress | None
    quantized: Any = None

    def measured(self, setups: Mapping[str, Setup]) -> dict[str, Measured]:
        """The arms over all documents, merged at the first process; elsewhere nothing.

        A document's numbers are those of its own batch, so they do not depend on how many processes there are.
        """
        mine: dict[str, dict[int, Measured]] = {name: {} for name in setups}
        for first, ids in self._batches():
            missing = {}
            for name, setup in setups.items():
                kept = self._kept(name, first)
                if kept is None:
                    missing[name] = setup
                else:
                    mine[name][first] = kept
            if not missing:
                continue
            found = measure(
                self.handle, missing, ids, quantized=self.quantized, prompt=self.prompt, first=first,
                engine=self.engine, window=self.window, seed=self.seed, progress=self.progress,
            )  # fmt: skip
            for name, measured in found.items():
                mine[name][first] = measured
                if self._keeps:
                    assert self.run is not None
                    measured.save(self.run.shard(name, first), self.run.fingerprint)
        merged: dict[str, Measured] = {}
        gathered = self.team.gather(mine)
        for name in setups if self.team.first else ():
            shards = {first: m for shares in gathered for first, m in shares[name].items()}
            merged[name] = Measured.empty(self.window, self.seed)
            for _, shard in sorted(shards.items()):
                merged[name].add(shard)
        return merged

    def generate(self, tokens: int) -> None:
        """Replace ``ids``, prompts, by prompts with ``tokens`` more from the untouched model at temperature 1."""
        kept = None if self.run is None else self.run.path / "generated.json"
        stored = self.team.agree(lambda: json.loads(kept.read_text()) if kept and kept.exists() else None)
        if stored is None:
            mine = {first: self._generated(ids, tokens, first) for first, ids in self._batches()}
            together = {first: rows for share in self.team.gather(mine) for first, rows in share.items()}
            stored = self.team.agree(lambda: [row for _, rows in sorted(together.items()) for row in rows])
            if kept is not None and self.team.first:
                write_atomic(kept, json.dumps(stored), overwrite=False)
        self.ids = torch.tensor(stored, device=self.ids.device)

    def _generated(self, prompt: Tensor, tokens: int, first: int) -> list[list[int]]:
        """One batch. What is done so far is stored now and then; an interrupted call reads it again and goes on."""
        self.handle.use(None)
        partial = None if self.run is None else self.run.shard("generated", first).with_suffix(".json")
        ids = prompt.tolist() if partial is None or not partial.exists() else json.loads(partial.read_text())
        random = torch.Generator()
        untouched = Rollout(self.handle, None)
        token = torch.tensor(ids, device=prompt.device)
        for start in range(0, token.shape[1] - 1, CHUNK):
            stop = min(start + CHUNK, token.shape[1] - 1)
            untouched.advance(token[:, start:stop])
        token = token[:, -1:]
        for done in range(len(ids[0]) - prompt.shape[1], tokens):
            probabilities = untouched.advance(token)[:, -1].float().softmax(-1).cpu()
            random.manual_seed((self.seed << 40) + (first << 24) + done)
            drawn = torch.multinomial(probabilities, 1, generator=random)
            for row, (choice,) in zip(ids, drawn.tolist(), strict=True):
                row.append(choice)
            token = drawn.to(prompt.device)
            if self.progress is not None and done % 16 == 15:
                self.progress("generating", done + 1, tokens)
            if partial is not None and done % STORED_EVERY == STORED_EVERY - 1:
                write_atomic(partial, json.dumps(ids), overwrite=True)
        return ids

    def _batches(self) -> Iterator[tuple[int, Tensor]]:
        """This process's batches of documents, with the number of the first document in each."""
        starts = range(0, len(self.ids), self.batch)
        for i in self.team.share(len(starts)):
            yield starts[i], self.ids[starts[i] : starts[i] + self.batch]

    @property
    def _keeps(self) -> bool:
        """Whether batches are stored one by one: a single one is the whole arm, which is stored anyway."""
        return self.run is not None and len(self.ids) > self.batch

    def _kept(self, name: str, first: int) -> Measured | None:
        if self.run is None or not self._keeps or not (path := self.run.shard(name, first)).exists():
            return None
        return Measured.load(path, self.run.fingerprint, self.window, self.seed)


def _arm(name: str, setup: Setup, measured: Measured, handle: Any, *, byte_level: bool) -> Arm:
    """The evidence on one arm. On a byte-level model every token is a byte, so bits per token are bits per byte."""
    policy = setup.policy
    if measured.overflows and measured.kl.empty:
        evidence = Evidence.nothing()
    else:
        evidence = measured.kl.result(bytes_per_token=1.0 if byte_level else None)
    handle.use(policy_of(policy))
    policies = {layer: "untouched" if own is None else own.name for layer, own in handle.policies.items()}
    if isinstance(policy, Injected):
        policies = dict.fromkeys(policies, name)
    record = _record(policy, name)
    return Arm(
        name=name,
        policy=record,
        kl=evidence.kl,
        top1_agreement=evidence.top1_agreement,
        ppl=evidence.ppl,
        bytes_per_element=BytesPerElement(measured.resident, measured.moved),
        layers=measured.layers.result(
            {layer.name: layer.family for layer in handle.layers}, policies, 1 if record is None else record.window
        ),
        seconds=measured.seconds,
        weights=setup.weights,
        kl_to_weights=None if measured.added.empty else measured.added.result().kl,
        overflows=measured.overflows,
    )


def _policies(
    arms: Sequence[str] | Mapping[str, StatePolicy | Recipe | Injected | str], window: int, seed: int
) -> dict[str, ArmPolicy]:
    """Each arm's policy, by name; a later arm of the same name is the same arm."""
    StatePolicy(window=window)  # names what is wrong with the window
    if isinstance(arms, str):
        arms = [arms]
    named = arms if isinstance(arms, Mapping) else {name: name for name in arms}
    if not named:
        raise InvalidValueError(f"no arms; the default ones are {', '.join(DEFAULT_ARMS)}")
    policies: dict[str, ArmPolicy] = {}
    for name, policy in named.items():
        if isinstance(policy, str):
            policies[name] = None if policy == "reference-again" else parse_arm(policy, window=window, seed=seed)
        else:
            policies[name] = policy
    return policies


def _loaded(
    model: Any, tokenizer: Any, device: str, dtype: str, device_map: str | None, trust_remote_code: bool
) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | os.PathLike):
        return load_model(
            os.fspath(model), device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
        )
    if tokenizer is None:
        raise InvalidValueError(
            "evaluate needs the tokenizer of a model that is loaded already: evaluate(model, tokenizer=…)"
        )
    name = getattr(model, "name_or_path", "") or type(model).__name__
    return LoadedModel(name, model.eval(), tokenizer, weights_sha256(model))


def _check_positive(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise InvalidValueError(f"{name} is {value}; it must be 1 or more")


def _describe(loaded: LoadedModel, handle: Any) -> Model:
    layers: dict[str, int] = {}
    for layer in handle.layers:
        layers[layer.family] = layers.get(layer.family, 0) + 1
    return Model(
        name=loaded.name,
        parameters=sum(p.numel() for p in loaded.model.parameters()),
        layers=layers | handle.others,
        sha256=loaded.sha256,
    )


def _record(policy: ArmPolicy, name: str) -> Policy | None:
    if policy is None:
        return None
    if isinstance(policy, Injected):
        return Policy(checkpoint="fp32", read=None, window=policy.window, recipe=name)
    recipe = isinstance(policy, Recipe) and name != policy.default.name  # else it only brings column scales along
    return Policy(
        **dataclasses.asdict(policy.default if isinstance(policy, Recipe) else policy), recipe=name if recipe else None
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.processor()


def _sha256(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()
