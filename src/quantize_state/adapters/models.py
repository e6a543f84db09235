"""Finding the layers of a model whose state can be kept another way, and saying so when there are none."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

from ..quant.errors import UnsupportedModelError
from .families import HF_FAMILIES, HFFamily


@dataclass(frozen=True)
class SsmLayer:
    """A layer with a Mamba-2, GDN or KDA recurrence: its name in ``model.named_modules()``, module and family."""

    name: str
    module: nn.Module
    family: HFFamily

    @property
    def namespace(self) -> dict[str, Any]:
        """The globals in which the layer's forward looks its functions up: those of its modeling module."""
        found = _recurrence(type(self.module))
        assert found is not None
        return found[1].__globals__


CACHE_NAMES = ("cache", "past_key_values", "cache_params")
"""What models and layers call their cache: the first from transformers 5.24 on, one of the others before."""


def cache_argument(model: nn.Module) -> str:
    """The name of the cache in the arguments of ``model``'s forward, and in its output."""
    parameters = inspect.signature(_forward(type(getattr(model, "_orig_mod", model)))).parameters
    return next((name for name in CACHE_NAMES if name in parameters), "past_key_values")


def find_layers(model: nn.Module) -> list[SsmLayer]:
    """The model's layers with a recurrence, in order.

    A layer is recognised by the functions that its class's forward uses, not by its name, so classes that share
    transformers' code need no entry anywhere. Raises UnsupportedModelError where there is none.
    """
    # A compiled model holds the one that it compiles; names are those of the latter.
    model = getattr(model, "_orig_mod", model)
    found = []
    for name, module in model.named_modules():
        family = _family(type(module))
        if family is not None:
            found.append(SsmLayer(name, module, family))
    if not found:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no layer with a Mamba-2, GDN or KDA recurrence that can be attached; its "
            f"layers are {', '.join(other_layers(model)) or 'unknown'}. Supported by the installed transformers: "
            + "; ".join(f"{family}: {', '.join(kinds) or 'none'}" for family, kinds in supported_model_types().items())
        )
    return found


def other_layers(model: nn.Module) -> dict[str, int]:
    """Classes, and their numbers, of the model's numbered layers without such a recurrence: attention and the like."""
    numbered = (m for m in model.modules() if isinstance(getattr(m, "layer_idx", None), int))
    names = Counter(type(module).__name__ for module in numbered if _family(type(module)) is None)
    return dict(names or Counter(type(module).__name__ for module in model.children()))


@cache
def supported_model_types() -> dict[str, tuple[str, ...]]:
    """For each family, the model types of the installed transformers whose layers ``attach`` recognises."""
    spec = importlib.util.find_spec("transformers")
    places = [] if spec is None else spec.submodule_search_locations or []
    kinds: dict[str, list[str]] = {family.name: [] for family in HF_FAMILIES}
    for path in sorted(p for place in places for p in Path(place).glob("models/*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        for family in HF_FAMILIES:
            if all(re.search(rf"^def {name}\(", source, re.MULTILINE) for name in family.required):
                kinds[family.name].append(path.parent.name)
    return {family: tuple(names) for family, names in kinds.items()}


def _forward(kind: Any) -> Any:
    return inspect.unwrap(kind.forward)


def _family(kind: Any) -> HFFamily | None:
    found = _recurrence(kind)
    return None if found is None else found[0]


def _recurrence(kind: type) -> tuple[HFFamily, Any] | None:
    """The family of a layer's class, and the forward that uses its functions.

    That may be a base class's: quantisation toolkits put a subclass with a forward around it in front.
    """
    for base in kind.__mro__:
        forward = inspect.unwrap(base.__dict__["forward"]) if "forward" in base.__dict__ else None
        code = getattr(forward, "__code__", None)
        if forward is None or code is None:
            continue
        for family in HF_FAMILIES:
            if family.required <= set(code.co_names) and family.required <= set(forward.__globals__):
                return family, forward
    return None
