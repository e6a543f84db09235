"""Write a model card: ``python -m …embedded.check NAME --json | python -m …embedded.card NAME``.

Every number in a card comes from the check on standard input or from training.json, so a card cannot drift
from the weights beside it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from . import EMBEDDED, embedded_path
from .check import render

LAYERS = {
    "mamba2": "NemotronH blocks: Mamba-2 with 8 heads of 64 x 128 in 2 groups; MLP with squared ReLU, 896 wide",
    "gdn": "Qwen3-Next layers: Gated DeltaNet with 2 key and 4 value heads of 128 x 128; SwiGLU MLP, 640 wide",
    "kda": "Kimi-Linear layers: Kimi Delta Attention with 4 heads of 128 x 128; SwiGLU MLP, 512 wide",
}
ATTENTION = {
    "mamba2": "one head of 32, no positions",
    "gdn": "one gated head of 32, rotary on a quarter of it",
    "kda": "latent attention (MLA), one head of 32 over a latent of 32, no positions",
}


def curve_table(curve: list[dict[str, Any]]) -> str:
    """A quarter of the logged points as a table, the last included."""
    rows = ["| million bytes | train | held out | state zeroed |", "|---:|---:|---:|---:|"]
    for point in curve[::-4][::-1]:
        losses = (point["train_bpb"], point["heldout_bpb"], point["heldout_bpb_forgetting"])
        rows.append(f"| {point['tokens'] / 1e6:.1f} | " + " | ".join(f"{loss:.3f}" for loss in losses) + " |")
    return "\n".join(rows)


def card(name: str, record: dict[str, Any], result: dict[str, Any]) -> str:
    """The text of README.md."""
    family = EMBEDDED[name].family
    recipe, data, versions = record["recipe"], record["data"], record["versions"]
    package = __package__ or ""
    return f"""---
license: apache-2.0
---
# {name}

{EMBEDDED[name].description}. A byte-level language model of {record["parameters"] / 1e6:.2f} million
parameters, made to measure state formats on: it is trained to depend on its recurrent state.

## Architecture
Hidden size 256, eight layers in the order S A S A S S S S (S state space, A attention), each with an MLP.
{LAYERS[family]}.
Attention: {ATTENTION[family]}. The 256 token ids are the byte values; byte 0 stood between training documents.

## Training
Text found on the training machine: {data["prose_bytes"] / 1e6:.0f} MB of docstrings and documentation
({recipe["prose"]:.0%} of sequences), {data["source_bytes"] / 1e6:.0f} MB of Python source
({1 - recipe["prose"] - recipe["recall"]:.0%}), generated recall tables ({recipe["recall"]:.0%}). Held out: the
Python language reference (`pydoc_data.topics`) and every document that shares more than three long lines with it.
{record["steps"]} steps, {record["tokens"] / 1e6:.0f} million bytes, seed {recipe["seed"]}, {record["seconds"]:.0f} s
on one {versions["device"]} (torch {versions["torch"]}, transformers {versions["transformers"]}), sequences of
{recipe["lengths"][0]}, then {recipe["lengths"][1]} bytes, attention silenced in
{recipe["attention_off"]:.0%} of them. {recipe["optimizer"]}, learning rate {recipe["learning_rate"]}.
Held-out loss, float32 and BF16 weights: {record["heldout_bpb_float32_weights"]:.4f} and
{record["heldout_bpb_bf16_weights"]:.4f}. The whole curve is in training.json; in bits per byte:

{curve_table(record["curve"])}

    python -m {package}.train {name} --out DIR --steps {record["steps"]}

Other machines hold other text, so a repeated run gives a like model, not the same one.

## Check
    python -m {package}.check {name}

```text
{render(result)}
```
Half-life: ln 2 over the mean log-decay of a {result["half_life_unit"].removesuffix("s")} on held-out text.

## Limits
It predicts Python documentation and source, and has no use beyond tests of numerics. It was trained on sequences
of up to {recipe["lengths"][1]} bytes. Attention is weaker than in real hybrids, so state errors show more. The check
reads the topics of the interpreter that runs it; training held out those of Python {versions["python"]}.
Licence of the weights: Apache-2.0.
"""


def main() -> None:
    (name,) = sys.argv[1:]
    directory: Path = embedded_path(name)
    record = json.loads((directory / "training.json").read_text())
    (directory / "README.md").write_text(card(name, record, json.load(sys.stdin)))


if __name__ == "__main__":
    main()
