"""Three small trained hybrid models that travel inside the package, one per state-space family.

They exist so that every claim of the toolkit can be tried on a CPU, offline, on weights that really use
their recurrent state. This module only says what they are and where they lie: it imports neither torch nor
transformers, so listing the models costs nothing. ``train.py`` made them, ``check.py`` measures them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["EMBEDDED", "EmbeddedModel", "embedded_path"]


@dataclass(frozen=True)
class EmbeddedModel:
    """Name, layer family and one-line description of a model in this folder."""

    name: str
    family: str
    description: str


EMBEDDED: dict[str, EmbeddedModel] = {
    model.name: model
    for model in (
        EmbeddedModel(
            "tiny-mamba2", "mamba2", "Mamba-2 hybrid in NemotronH form: 6 SSM layers of 8 heads, state 64 x 128"
        ),
        EmbeddedModel(
            "tiny-gdn", "gdn", "Gated DeltaNet hybrid in Qwen3-Next form: 6 SSM layers of 4 heads, state 128 x 128"
        ),
        EmbeddedModel(
            "tiny-kda", "kda", "Kimi Delta Attention hybrid in Kimi-Linear form: 6 SSM layers of 4 heads, 128 x 128"
        ),
    )
}


def embedded_path(name: str) -> Path:
    """The Hugging Face directory of an embedded model; ``KeyError`` for a name that is none."""
    return Path(__file__).resolve().parent / EMBEDDED[name].name
