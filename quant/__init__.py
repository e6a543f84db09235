"""Number formats, codec, policies and the state that a decode step keeps. Needs torch alone."""

from __future__ import annotations

from .codec import EncodedState, encode, fake_quantize
from .errors import (
    FileFormatError,
    InvalidValueError,
    NonFiniteStateError,
    QuantizeStateError,
    UnsupportedModelError,
)
from .formats import FORMATS, Format
from .policy import StatePolicy, parse_arm
from .rotation import ROTATIONS, rotate
from .rounding import derive_seeds
from .scales import SCALE_RULES
from .spec import FAMILIES, Family, LayerSpec

__all__ = [
    "FAMILIES",
    "FORMATS",
    "ROTATIONS",
    "SCALE_RULES",
    "EncodedState",
    "Family",
    "FileFormatError",
    "Format",
    "InvalidValueError",
    "LayerSpec",
    "NonFiniteStateError",
    "QuantizeStateError",
    "StatePolicy",
    "UnsupportedModelError",
    "derive_seeds",
    "encode",
    "fake_quantize",
    "parse_arm",
    "rotate",
]
