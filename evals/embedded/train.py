"""Train one embedded model: ``python -m quantize_state.evals.embedded.train tiny-gdn --out DIR --minutes 8``.

One process, one GPU, one recipe for all three families. The text is whatever Python sources and documentation
the machine holds (``corpus.py``). Two things make the models use their state instead of only having one:
sequences are long (8,192 bytes, then 16,384), and attention is switched off for most training sequences, so
whatever must be remembered has to be in the state. Without a GPU the same script runs, slowly, on a CPU.

The schedule follows the clock, so a run uses exactly the minutes that it is given; ``--steps`` makes it follow
the step count instead, which is how a given run is repeated elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import importlib.metadata
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from . import EMBEDDED
from .configs import MAX_POSITIONS, build_model
from .corpus import Corpus, build_corpus, recall_document
from .fast import fast_available, fast_kernels, thin_autotuning
from .measure import bits_per_byte, sequences, token_loss
from .mixers import forgetting, replaced
from .optimizer import WEIGHT_DECAY, build_optimizers
from .tokenizer import byte_tokenizer


@dataclass(frozen=True)
class Recipe:
    """Everything that decides the result, apart from the text and the machine."""

    seed: int = 1
    tokens_per_step: int = 65536
    lengths: tuple[int, int] = (8192, 16384)  # sequence length before and after `lengthen_at`
    lengthen_at: float = 0.7
    learning_rate: float = 3e-3
    warmup: float = 0.02  # fractions of the run; after `decay_from` the rate falls linearly to zero
    decay_from: float = 0.4
    clip_norm: float = 1.0
    attention_off: float = 0.5  # share of sequences that train without attention
    prose: float = 0.62  # share of sequences; the rest of 1 is Python source
    recall: float = 0.04


class Batches:
    """Random windows of the corpus, the kinds mixed by sequence."""

    def __init__(self, corpus: Corpus, recipe: Recipe) -> None:
        self.corpus, self.recipe = corpus, recipe
        self.rng = np.random.default_rng(recipe.seed)

    def row(self, length: int) -> np.ndarray:
        """One sequence: prose, source, or a document made to need recall."""
        draw = self.rng.random()
        if draw < self.recipe.recall:
            return np.frombuffer(recall_document(self.rng, self.corpus.prose, length), dtype=np.uint8)
        stream = self.corpus.prose if draw < self.recipe.recall + self.recipe.prose else self.corpus.source
        start = int(self.rng.integers(max(1, len(stream) - length)))
        return stream[start : start + length]

    def batch(self, progress: float) -> torch.Tensor:
        """The sequences of one step, [rows, length]."""
        length = self.recipe.lengths[progress >= self.recipe.lengthen_at]
        rows = max(1, self.recipe.tokens_per_step // length)
        return torch.from_numpy(np.stack([self.row(length) for _ in range(rows)]).astype(np.int64))


def drop_attention(model: nn.Module, probability: float) -> None:
    """While training, silence all attention layers of a sequence at once with this probability.

    The draw is made at the first attention layer and kept for the others of the same forward pass.
    """
    layers = [module for module in model.modules() if getattr(module, "is_causal", False)]
    keep: list[torch.Tensor] = []

    def hook(module: nn.Module, args: Any, output: tuple[torch.Tensor, Any]) -> Any:
        if not module.training:
            return output
        if module is layers[0]:
            keep[:] = [torch.rand(len(output[0]), 1, 1, device=output[0].device) >= probability]
        return (output[0] * keep[0], *output[1:])

    for layer in layers:
        layer.register_forward_hook(hook)


def rate_factor(progress: float, recipe: Recipe) -> float:
    """Warm up, hold, decay linearly to zero."""
    return min(1.0, progress / recipe.warmup, (1 - progress) / (1 - recipe.decay_from))


def save(model: Any, directory: Path, record: dict[str, Any]) -> Any:
    """Write a Hugging Face directory with BF16 weights; gives back the rounded model."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.config.dtype = torch.bfloat16
    rounded.save_pretrained(directory)
    byte_tokenizer(MAX_POSITIONS).save_pretrained(directory)
    (directory / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return rounded


def train(name: str, corpus: Corpus, recipe: Recipe, out: Path, ends: float, steps: int | None) -> dict[str, Any]:
    """Train until the clock says ``ends`` (or for ``steps``), save half way and at the end, return the record."""
    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    family = EMBEDDED[name].family
    model: Any = build_model(name, recipe.seed)
    model.to(device).train()
    drop_attention(model, recipe.attention_off)
    optimizers = build_optimizers(model)
    batches = Batches(corpus, recipe)
    heldout = sequences(corpus.heldout, 2 * recipe.tokens_per_step, recipe.lengths[0]).to(device)
    curve: list[dict[str, float]] = []
    record: dict[str, Any] = {
        "model": name,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "recipe": asdict(recipe) | {"weight_decay": WEIGHT_DECAY, "optimizer": "Muon (matrices), AdamW (the rest)"},
        "data": {
            "prose_bytes": len(corpus.prose),
            "source_bytes": len(corpus.source),
            "documents": corpus.documents,
            "heldout_sha256": hashlib.sha256(corpus.heldout.tobytes()).hexdigest(),
        },
        "versions": versions(),
        "curve": curve,
    }

    def mixed_precision() -> torch.autocast:
        return torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    with fast_kernels(family) as (chunk_function, errors):
        record["kernel_errors"] = {key: round(value, 5) for key, value in errors.items()}

        def evaluate(progress: float, train_bits: float) -> None:
            point = {"progress": round(progress, 3), "step": step, "tokens": tokens, "train_bpb": train_bits}
            point["seconds"] = round(time.monotonic() - began, 1)
            with mixed_precision():
                point["heldout_bpb"] = bits_per_byte(model, heldout, rows=8)
            with mixed_precision(), replaced(family, forgetting(chunk_function)):
                point["heldout_bpb_forgetting"] = bits_per_byte(model, heldout, rows=8)
            curve.append({key: round(value, 4) for key, value in point.items()})
            print(name, json.dumps(curve[-1]), flush=True)

        step, tokens, progress, clock_start = 0, 0, 0.0, began
        running, since, saved = torch.zeros((), device=device), 0, False
        while progress < 1:
            ids = batches.batch(progress).to(device)
            with mixed_precision():
                loss = token_loss(model, ids).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = recipe.learning_rate * rate_factor(progress, recipe)
                optimizer.step()
                optimizer.zero_grad()
            running, since = running + loss.detach(), since + 1
            step, tokens = step + 1, tokens + ids.numel()
            if step == 2:  # kernels are compiled by now: compiling is no part of the schedule
                running.item()
                clock_start = time.monotonic()
            if steps:
                progress = step / steps
            elif step > 2:
                progress = (time.monotonic() - clock_start) / max(1.0, ends - clock_start)
            if progress >= len(curve) / 20 or progress >= 1:
                evaluate(min(1.0, progress), running.item() / since / np.log(2))
                running.zero_()
                since = 0
            if progress >= 0.5 and not saved:
                saved = True
                save(model, out, record)

        record |= {"steps": step, "tokens": tokens, "seconds": round(time.monotonic() - began, 1)}
        record["tokens_per_second"] = round(tokens / (time.monotonic() - clock_start))
        rounded = save(model, out, record).float()
        with mixed_precision():
            record["heldout_bpb_float32_weights"] = round(bits_per_byte(model, heldout, rows=8), 4)
            record["heldout_bpb_bf16_weights"] = round(bits_per_byte(rounded, heldout, rows=8), 4)
    (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    return record


def versions() -> dict[str, str]:
    """What ran the training."""
    import transformers

    found = {"python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__}
    if fast_available():
        found |= {package: importlib.metadata.version(package) for package in ("fla-core", "triton")}
    return found | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=EMBEDDED)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock length of the run")
    parser.add_argument("--steps", type=int, help="follow the step count instead of the clock")
    parser.add_argument("--corpus", type=Path, help="file made by `python -m ….corpus FILE`; default: build it now")
    parser.add_argument("--seed", type=int, default=Recipe.seed)
    parser.add_argument("--tokens-per-step", type=int, default=Recipe.tokens_per_step)
    parser.add_argument("--length", type=int, help="train at one sequence length, for short trials")
    args = parser.parse_args()
    ends = time.monotonic() + 60 * args.minutes  # reading text and compiling kernels count too

    torch.set_float32_matmul_precision("high")
    if fast_available():
        thin_autotuning()
    corpus = Corpus.load(args.corpus) if args.corpus else build_corpus()
    lengths = (args.length, args.length) if args.length else Recipe.lengths
    recipe = Recipe(seed=args.seed, tokens_per_step=args.tokens_per_step, lengths=lengths)
    args.out.mkdir(parents=True, exist_ok=True)
    record = train(args.model, corpus, recipe, args.out, ends, args.steps)
    print(json.dumps({key: value for key, value in record.items() if key != "curve"}))


if __name__ == "__main__":
    main()
