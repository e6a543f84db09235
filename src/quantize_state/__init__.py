"""quantize-state: low-precision, read-only state copies for hybrid SSM models.

The names below are the stable public interface. They load on first use, so importing the package is cheap
and a report renders on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "attach": "adapters",
    "StatePolicy": "quant.policy",
    "parse_arm": "quant.policy",
    "Recipe": "quant.recipe",
    "DecodeState": "quant.state",
    "FORMATS": "quant.formats",
    "EncodedState": "quant.codec",
    "encode": "quant.codec",
    "save_states": "quant.storage",
    "load_states": "quant.storage",
    "evaluate": "evals.evaluate",
    "Result": "evals.result",
    "QuantizeStateError": "quant.errors",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from .adapters import attach
    from .evals.evaluate import evaluate
    from .evals.result import Result
    from .quant.codec import EncodedState, encode
    from .quant.errors import QuantizeStateError
    from .quant.formats import FORMATS
    from .quant.policy import StatePolicy, parse_arm
    from .quant.recipe import Recipe
    from .quant.state import DecodeState
    from .quant.storage import load_states, save_states


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
