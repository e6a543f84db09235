"""The layers that the kernels are made for: shapes of released models, as one card holds them."""

from __future__ import annotations

import re

from ..quant.errors import InvalidValueError, unknown_name
from ..quant.spec import FAMILIES, LayerSpec


def _delta(family: str, heads: int, key_heads: int) -> LayerSpec:
    return LayerSpec(family, heads, key_heads, 128, 128, qk_l2norm=True, query_scale=128**-0.5)


SHAPES: dict[str, LayerSpec] = {
    "nemotron-3-super": LayerSpec("mamba2", 128, 8, 64, 128),
    "nemotron-nano-4b": LayerSpec("mamba2", 96, 8, 80, 128),
    "nemotron-3-ultra": LayerSpec("mamba2", 256, 8, 64, 128),
    "qwen3.5-4b": _delta("gdn", 32, 16),
    "qwen3.5-122b": _delta("gdn", 64, 16),
    "glm-5.3-flash": _delta("kda", 64, 64),
    "kimi-k3-rank": _delta("kda", 12, 12),
}

ALIASES = {"ultra": "nemotron-3-ultra"}

BATCHES = (1, 8, 32, 64, 128, 256, 512)


def find_shape(text: str, family: str | None = None) -> tuple[str, LayerSpec]:
    """The shape called ``text``, or spelt as heads x value dim x key dim, 32x128x128 or 32/16x128x128 with 16 key
    heads; a spelt one needs ``family``. Raises InvalidValueError that says what is allowed."""
    name = ALIASES.get(text, text)
    if name in SHAPES:
        spec = SHAPES[name]
        if family not in (None, spec.family):
            raise InvalidValueError(f"shape {name} is {spec.family}, not {family}")
        return name, spec
    spelt = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)x(\d+)", text)
    if spelt is None:
        raise unknown_name("shape", text, [*SHAPES, *ALIASES])
    if family is None:
        raise InvalidValueError(f"shape {text} needs a family: {', '.join(FAMILIES)}")
    if family not in FAMILIES:
        raise unknown_name("layer family", family, FAMILIES)
    heads, key_heads, value_dim, key_dim = (int(n) if n else 0 for n in spelt.groups())
    delta = FAMILIES[family].delta_rule
    key_heads = key_heads or (heads if delta else 1)
    scale = key_dim**-0.5 if delta and key_dim else 1.0
    return text, LayerSpec(family, heads, key_heads, value_dim, key_dim, qk_l2norm=delta, query_scale=scale)
