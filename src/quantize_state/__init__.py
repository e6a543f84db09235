"""quantize-state: low-precision, read-only state copies for hybrid SSM models.

The names below are the stable public interface. They load on first use, so importing the package is cheap
and a report renders on a machine without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    # a model with quantised states, and what that does to it
    "attach": "adapters",
    "export_recipe": "adapters",
    "resolve_recipe": "adapters",
    "StatePolicy": "quant.policy",
    "parse_arm": "quant.policy",
    "Recipe": "quant.recipe",
    "load_model": "evals.models",
    "evaluate": "evals.evaluate",
    "Result": "evals.result",
    "write_reports": "evals.report",
    # number formats, and what one is made of
    "FORMATS": "quant.formats",
    "Format": "quant.formats",
    "Element": "quant.formats",
    "Grid": "quant.rounding",
    "RowScale": "quant.scales",
    "PowerOfTwoScale": "quant.scales",
    "TwoLevelScale": "quant.scales",
    "EncodedState": "quant.codec",
    "encode": "quant.codec",
    "fake_quantize": "quant.codec",
    # a layer's state, and advancing it
    "LayerSpec": "quant.spec",
    "DecodeState": "quant.state",
    "TokenInputs": "kernels.inputs",
    "step": "kernels.step",
    "scan": "kernels.step",
    "prefill": "kernels.step",
    "folded": "kernels.step",
    "save_states": "quant.storage",
    "load_states": "quant.storage",
    "QuantizeStateError": "quant.errors",
}

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from .adapters import attach, export_recipe, resolve_recipe
    from .evals.evaluate import evaluate
    from .evals.models import load_model
    from .evals.report import write_reports
    from .evals.result import Result
    from .kernels.inputs import TokenInputs
    from .kernels.step import folded, prefill, scan, step
    from .quant.codec import EncodedState, encode, fake_quantize
    from .quant.errors import QuantizeStateError
    from .quant.formats import FORMATS, Element, Format
    from .quant.policy import StatePolicy, parse_arm
    from .quant.recipe import Recipe
    from .quant.rounding import Grid
    from .quant.scales import PowerOfTwoScale, RowScale, TwoLevelScale
    from .quant.spec import LayerSpec
    from .quant.state import DecodeState
    from .quant.storage import load_states, save_states


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)
    globals()[name] = value  # the next time it is found without coming here
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
