# ruff: noqa: F401 - the imports are for type checkers; at run time names load lazily.
"""Number formats, codec, policies and the state that a decode step keeps. Needs torch alone.

Names load on first use, so that ``quant.errors`` and ``quant.spec`` do so without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_PUBLIC = {
    "EncodedState": "encoded",
    "ColumnScales": "columns",
    "encode": "codec",
    "fake_quantize": "codec",
    "FileFormatError": "errors",
    "InvalidValueError": "errors",
    "NonFiniteStateError": "errors",
    "QuantizeStateError": "errors",
    "UnsupportedModelError": "errors",
    "FORMATS": "formats",
    "Element": "formats",
    "Format": "formats",
    "StatePolicy": "policy",
    "parse_arm": "policy",
    "Recipe": "recipe",
    "ROTATIONS": "rotation",
    "rotate": "rotation",
    "Grid": "rounding",
    "derive_seeds": "rounding",
    "SCALE_RULES": "scales",
    "PowerOfTwoScale": "scales",
    "RowScale": "scales",
    "TwoLevelScale": "scales",
    "FAMILIES": "spec",
    "Family": "spec",
    "LayerSpec": "spec",
    "DecodeState": "state",
    "load_states": "storage",
    "save_states": "storage",
}

__all__ = [*_PUBLIC]

if TYPE_CHECKING:
    from .codec import encode, fake_quantize
    from .columns import ColumnScales
    from .encoded import EncodedState
    from .errors import (
        FileFormatError,
        InvalidValueError,
        NonFiniteStateError,
        QuantizeStateError,
        UnsupportedModelError,
    )
    from .formats import FORMATS, Element, Format
    from .policy import StatePolicy, parse_arm
    from .recipe import Recipe
    from .rotation import ROTATIONS, rotate
    from .rounding import Grid, derive_seeds
    from .scales import SCALE_RULES, PowerOfTwoScale, RowScale, TwoLevelScale
    from .spec import FAMILIES, Family, LayerSpec
    from .state import DecodeState
    from .storage import load_states, save_states


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
