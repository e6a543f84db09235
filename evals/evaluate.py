"""The main job: what every arm's state does to a model's predictions, beside FP32, on the same tokens."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ..adapters import attach
from ..quant.errors import InvalidValueError
from ..quant.policy import DEFAULT_ARMS, StatePolicy, parse_arm
from ..quant.recipe import Recipe
from ..quant.state import DecodeState
from . import provenance
from .metrics import KLMeter
from .models import LoadedModel, load_model, weights_sha256
from .records import write_atomic
from .result import Arm, BytesPerElement, Model, Policy, Result, Text
from .rollout import Rollout, chunks
from .rundir import RunDirectory
from .shadow import ExactShadow
from .text import load_text, tokenise
from .weights import ArmPolicy, Plan, plans, quantized

Progress = Callable[[str, int, int], None]
"""Called as (what is running, tokens done, tokens in all)."""

GENERATION_PROMPT = 256
"""Tokens of text before the generated ones; prefilled exactly and not evaluated."""

ENGINES = ("scan", "step")


def evaluate(
    model: Any,
    arms: Sequence[str] | Mapping[str, StatePolicy | Recipe | str] = DEFAULT_ARMS,
    *,
    tokenizer: Any = None,
    text: str = "pydoc",
    tokens: int = 4096,
    sequences: int = 1,
    generate: int = 0,
    window: int = 16,
    engine: str = "scan",
    weights: str | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    trust_remote_code: bool = False,
    out: str | os.PathLike[str] | None = None,
    progress: Progress | None = None,
) -> Result:
    """Teacher-force ``model`` on known tokens with each arm's state, and compare its predictions with FP32's.

    Each arm runs beside the reference, chunk by chunk, so memory is bounded by the chunk and not by the length.

    Args:
        model: an embedded name, a Hugging Face directory or hub id, or a loaded model with its ``tokenizer``.
        arms: arm names (``quantize-state ls``), or policies and recipes by name.
        text: ``pydoc``, ``stdlib`` or a UTF-8 file; ``sequences`` spans of ``tokens`` tokens are taken from it.
        generate: where above 0, the published protocol: FP32 generates that many tokens after a prompt of the text,
            at temperature 1, and they are the tokens evaluated.
        window: of replay and decoupled arms whose name gives none.
        engine: ``scan`` (whole windows at once) or ``step`` (token by token, as decode runs).
        weights: ``nvfp4``, ``fp8`` or ``int8``: adds the weights alone, quantised by ModelOpt in a second copy of the
            model, and every arm whose states round on top of them, so that the two effects can be told apart.
        out: a folder for result.json and each finished arm. A finished run is never overwritten, an interrupted one
            goes on at the arm where it stopped. By default nothing is written.

    Returns the result. Raises QuantizeStateError for whatever is wrong with these.
    """
    policies = plans(_policies(arms, window, seed), weights, seed)
    _check_positive(tokens=tokens, sequences=sequences)
    if generate < 0:
        raise InvalidValueError(f"generate is {generate}; it must be 0 (evaluate on the text) or more")
    if engine not in ENGINES:
        raise InvalidValueError(f"engine is {engine!r}; it must be {' or '.join(ENGINES)}")
    started = provenance.now()
    source = load_text(text)
    loaded = _loaded(model, tokenizer, device, dtype, trust_remote_code)
    length = GENERATION_PROMPT if generate else tokens + 1
    ids = torch.tensor(tokenise(loaded.tokenizer, source.text, length, sequences, seed), device=loaded.model.device)
    weights_dtype = str(loaded.model.dtype).removeprefix("torch.")
    configuration = {
        "weights": loaded.sha256,
        "text": _sha256(ids),
        "generate": generate,
        "window": window,
        "engine": engine,
        "seed": seed,
        "dtype": weights_dtype,
        "device": loaded.model.device.type,
        "version": provenance.version("quantize-state"),
    } | ({} if weights is None else {"quantized weights": weights})
    run = None if out is None else RunDirectory(out, configuration)
    with ExitStack() as stack:
        handle = stack.enter_context(attach(loaded.model, "reference"))
        for plan in policies.values():  # recipes name layers: all must be there before hours are spent
            handle.use(plan.policy)
        if run is not None:
            stack.enter_context(run)
            if run.finished is not None and set(policies) <= {arm.name for arm in run.finished.arms}:
                return run.finished
        prompt = GENERATION_PROMPT - 1 if generate else 0
        if generate:
            ids = _generated(loaded.model, handle, ids, generate, seed, run, progress)
        handles: dict[str | None, Any] = {None: handle}
        if weights is not None:
            handles[weights] = stack.enter_context(attach(quantized(loaded.model, weights), "reference"))
        done: list[Arm] = []
        for name, plan in policies.items():
            if run is not None and name in run.arms:
                done.append(run.arms[name])
                continue
            own = handles[plan.weights]
            arm = _run_arm(handle, own, name, plan, ids, prompt, engine, window, seed, progress, _byte_level(loaded))
            done.append(arm)
            if run is not None:
                run.save_arm(arm)
        if run is not None:  # arms of earlier calls on this folder
            done += [arm for name, arm in run.arms.items() if name not in policies]
        result = Result(
            model=_describe(loaded, handle),
            text=Text(
                source=source.name,
                tokens=ids.shape[1] - 1 - prompt,
                sequences=sequences,
                sha256=_sha256(ids),
                protocol="generated by FP32, then teacher-forced" if generate else "teacher-forced on text",
                generated=generate,
                prompt=prompt,
            ),
            arms=done,
            provenance=provenance.collect(
                device=_device_name(loaded.model.device),
                threads=torch.get_num_threads(),
                dtype=weights_dtype,
                engine=engine,
                window=window,
                seeds={"text, sampling, rounding and bootstrap": seed},
                sha256={"weights": loaded.sha256, "text": source.sha256, "tokens": _sha256(ids)},
                started=started,
            ),
            layer_errors="same-inputs",
        )
        if run is not None:
            run.finish(result)
    return result


def _run_arm(
    handle: Any,
    own: Any,
    name: str,
    plan: Plan,
    ids: Tensor,
    prompt: int,
    engine: str,
    window: int,
    seed: int,
    progress: Progress | None,
    byte_level: bool,
) -> Arm:
    """One arm beside the reference over all tokens of ``ids`` [B, prompt + N + 1], of which the prompt is exact.

    ``handle`` is of the model, ``own`` of the one that the arm runs on: the same, or that with quantised weights.
    """
    began = time.perf_counter()
    policy, exact = plan.policy, StatePolicy(window=1, seed=seed)
    reference = Rollout(handle, exact, engine)
    arm = reference if name == "reference" else Rollout(own, policy, engine)
    # What the states add to quantised weights is measured against those weights with exact states.
    base = Rollout(own, exact, engine) if plan.weights is not None and not plan.exact_state else None
    meter, added = KLMeter(window, seed=seed), KLMeter(window, seed=seed)
    errors = ExactShadow(window, prompt) if isinstance(policy, Recipe | StatePolicy) and arm is not reference else None
    if prompt:
        reference.prefill(ids[:, :prompt])
        if arm is not reference:
            arm.prefill(ids[:, :prompt], observer=errors)
        if base is not None:
            base.prefill(ids[:, :prompt])
    total = ids.shape[1] - 1 - prompt
    for start, inputs, targets in chunks(ids[:, prompt:]):
        expected = reference.advance(inputs)
        logits = expected
        if arm is not reference:
            logits = arm.advance(inputs, observer=errors)
            if errors is not None:
                errors.end_of_chunk(start + inputs.shape[1] - 1)
        meter.update(expected.float(), logits.float(), targets, start)
        if base is not None:
            added.update(base.advance(inputs).float(), logits.float(), targets, start)
        if progress is not None:
            progress(name, start + inputs.shape[1], total)
    evidence = meter.result(bytes_per_token=1.0 if byte_level else None)
    states = own.states(arm.cache)
    return Arm(
        name=name,
        policy=_record(policy, name),
        kl=evidence.kl,
        top1_agreement=evidence.top1_agreement,
        ppl=evidence.ppl,
        bytes_per_element=_bytes(states),
        layers=errors.layers(own, states) if errors is not None else [],
        seconds=time.perf_counter() - began,
        weights=plan.weights,
        kl_to_weights=None if base is None else added.result().kl,
    )


def _policies(
    arms: Sequence[str] | Mapping[str, StatePolicy | Recipe | str], window: int, seed: int
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


def _loaded(model: Any, tokenizer: Any, device: str, dtype: str, trust_remote_code: bool) -> LoadedModel:
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | os.PathLike):
        return load_model(os.fspath(model), device=device, dtype=dtype, trust_remote_code=trust_remote_code)
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


def _generated(
    model: Any, handle: Any, prompt: Tensor, tokens: int, seed: int, run: RunDirectory | None, progress: Progress | None
) -> Tensor:
    """``prompt`` [B, P] and ``tokens`` more from the untouched model at temperature 1; kept in the run's folder."""
    kept = None if run is None else run.path / "generated.json"
    if kept is not None and kept.exists():
        return torch.tensor(json.loads(kept.read_text()), device=prompt.device)
    handle.use(None)
    torch.manual_seed(seed)
    untouched = Rollout(handle, None)
    token, generated = prompt, [prompt]
    for done in range(tokens):
        probabilities = untouched.advance(token)[:, -1].float().softmax(-1)
        token = torch.multinomial(probabilities.cpu(), 1).to(prompt.device)
        generated.append(token)
        if progress is not None and done % 16 == 15:
            progress("generating", done + 1, tokens)
    ids = torch.cat(generated, dim=1)
    if kept is not None:
        write_atomic(kept, json.dumps(ids.tolist()), overwrite=False)
    return ids


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
    recipe = isinstance(policy, Recipe)
    return Policy(
        **dataclasses.asdict(policy.default if isinstance(policy, Recipe) else policy), recipe=name if recipe else None
    )


def _bytes(states: Mapping[str, DecodeState]) -> BytesPerElement:
    """Means over the state elements of all layers; an untouched model reads and writes FP32 at every token."""
    elements = sum(state.spec.elements for state in states.values())
    if not elements:
        untouched = StatePolicy(window=1)
        return BytesPerElement(untouched.bytes_resident, untouched.bytes_moved)
    resident = sum(state.spec.elements * state.policy.bytes_resident for state in states.values())
    moved = sum(state.spec.elements * state.policy.bytes_moved for state in states.values())
    return BytesPerElement(resident / elements, moved / elements)


def _byte_level(loaded: LoadedModel) -> bool:
    """Whether every token stands for one byte, so that bits per token are bits per byte."""
    return len(loaded.tokenizer) == 256


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else provenance.processor()


def _sha256(ids: Tensor) -> str:
    return hashlib.sha256(ids.cpu().to(torch.int64).numpy().astype("<i8").tobytes()).hexdigest()
