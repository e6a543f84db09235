"""Measure an embedded model on the CPU: ``python -m quantize_state.evals.embedded.check tiny-gdn``.

A model that ignores its state makes every state format look perfect. So each must show, from the weights as
shipped and on text that it was not trained on, that it predicts well, that it predicts worse when the state is
zeroed at every 16-token boundary, and that some of its heads remember for more than 1,000 tokens.
Exit code 1 if one of these fails.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import EMBEDDED, embedded_path
from .corpus import as_array, heldout_text, recall_table
from .measure import bits_per_byte, half_lives, sequences
from .mixers import forgetting, replaced, silenced_attention, torch_chunk_function, with_chunk

MAX_BITS = 1.8  # per byte of held-out text
MIN_STATE_BITS = 0.2  # what zeroing the state must cost
LONG = 1000  # tokens of half-life
RECALL_GAPS = (256, 1024, 4096)  # bytes between a table and its repetition
SILENT_GAP = 1024  # the gap at which recall is measured without attention too


def load(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a directory."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(path)


@torch.no_grad()
def recall_accuracy(model: Any, filler: np.ndarray, gap: int, tables: int = 4) -> float:
    """Share of digits recalled right across a gap of held-out text; 0.1 is chance."""
    rng = np.random.default_rng(gap)
    right = total = 0
    for _ in range(tables):
        text, answers = recall_table(rng, filler, gap)
        ids = torch.tensor([list(text)])
        guesses = model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        where = torch.tensor(answers)
        right += (guesses[where - 1] == ids[0, where]).sum().item()
        total += len(answers)
    return right / total


def check(name: str, path: Path, tokens: int, length: int) -> dict[str, Any]:
    """Everything measured, and which gates pass."""
    family = EMBEDDED[name].family
    model, tokenizer = load(path)
    text = heldout_text()
    heldout = as_array(text.encode())
    if tokenizer(text[:2000])["input_ids"] != list(text[:2000].encode()):
        raise SystemExit(f"{path}: the tokenizer does not give the bytes of a text")
    ids = sequences(heldout, tokens, length)
    # KDA's torch version holds [chunk, chunk, channels] per chunk: a short one keeps it usable on a CPU.
    function = with_chunk(torch_chunk_function(family), 16 if family == "kda" else 64)
    forgetful = forgetting(with_chunk(torch_chunk_function(family), 16))

    def with_state(measure: Callable[[], Any], chunk_function: Any = function) -> Any:
        with replaced(family, chunk_function):
            return measure()

    bits = with_state(lambda: bits_per_byte(model, ids))
    forgetting_bits = with_state(lambda: bits_per_byte(model, ids), forgetful)
    lives = with_state(lambda: half_lives(model, family, ids))

    def recall(gap: int) -> float:
        return with_state(lambda: recall_accuracy(model, heldout, gap))

    with silenced_attention(model):
        recall_from_state = recall(SILENT_GAP)

    result: dict[str, Any] = {
        "model": name,
        "tokens": ids.numel(),
        "sequence_length": length,
        "heldout_bpb": round(bits, 4),
        "heldout_bpb_state_zeroed_every_16": round(forgetting_bits, 4),
        "state_worth_bpb": round(forgetting_bits - bits, 4),
        "half_life_unit": "channels" if family == "kda" else "heads",
        "half_life_quantiles": {
            str(q): round(torch.quantile(lives.flatten(), q).item(), 1) for q in (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
        },
        "half_life_over_1000": int((lives > LONG).sum()),
        "half_life_count": lives.numel(),
        "recall_accuracy": {str(gap): round(recall(gap), 3) for gap in RECALL_GAPS},
        "recall_accuracy_without_attention": round(recall_from_state, 3),
    }
    result["gates"] = {
        f"held-out text costs at most {MAX_BITS} bits per byte": bits <= MAX_BITS,
        f"zeroing the state costs at least {MIN_STATE_BITS} bits per byte": forgetting_bits - bits >= MIN_STATE_BITS,
        f"some half-lives exceed {LONG} tokens": result["half_life_over_1000"] > 0,
    }
    return result


def render(result: dict[str, Any]) -> str:
    """The result for people."""
    quantiles = "  ".join(f"{float(q):.0%} {life:g}" for q, life in result["half_life_quantiles"].items())
    recall = "  ".join(f"{gap} bytes {share:.0%}" for gap, share in result["recall_accuracy"].items())
    lines = [
        f"{result['model']}: {result['tokens']} bytes of held-out text in sequences of {result['sequence_length']}",
        f"  bits per byte                      {result['heldout_bpb']:.4f}",
        f"  with the state zeroed every 16     {result['heldout_bpb_state_zeroed_every_16']:.4f}"
        f"  (+{result['state_worth_bpb']:.4f})",
        f"  half-life quantiles, tokens        {quantiles}",
        f"  {result['half_life_unit']} beyond 1,000 tokens"
        f"{'':<{21 - len(result['half_life_unit'])}}{result['half_life_over_1000']} of {result['half_life_count']}",
        f"  digits recalled across a gap       {recall}  (10% is chance)",
        f"  the same with attention silenced   {SILENT_GAP} bytes {result['recall_accuracy_without_attention']:.0%}",
    ]
    return "\n".join([*lines, *(f"  {'pass' if ok else 'FAIL'}  {gate}" for gate, ok in result["gates"].items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", choices=EMBEDDED)
    parser.add_argument("--path", type=Path, help="check this directory instead of the shipped one")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=4096, help="sequence length")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_args()
    result = check(args.model, args.path or embedded_path(args.model), args.tokens, args.length)
    print(json.dumps(result, indent=1) if args.json else render(result))
    raise SystemExit(0 if all(result["gates"].values()) else 1)


if __name__ == "__main__":
    main()
