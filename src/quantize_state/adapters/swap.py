"""Swapping functions of a modeling module, and knowing which layer calls them.

Several models of one class may be attached at once, and others of that class not at all: a module's functions are
swapped once, for as long as anyone needs them, and fall straight through to the originals unless the layer that
is running on this thread is attached and has a policy.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..quant.errors import QuantizeStateError
from .cached import CachedState
from .families import HFFamily


class _Running(threading.local):
    """The attached layer whose forward is running on this thread, what it was called with, and its calls so far."""

    def __init__(self) -> None:
        self.layer: Any = None
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}
        self.calls = 0


running = _Running()

lock = threading.RLock()
"""Held while anything is attached or detached; forwards need no lock."""

_swaps: dict[tuple[int, str], tuple[dict[str, Any], list[None]]] = {}
"""(namespace, family) → the originals by name, and one entry for each user."""


def swap_in(namespace: dict[str, Any], family: HFFamily) -> None:
    """Have the family's functions in ``namespace`` replaced; each call needs one of ``swap_out``."""
    with lock:
        key = (id(namespace), family.name)
        if key not in _swaps:
            originals = {name: namespace[name] for name in family.functions if name in namespace}
            _swaps[key] = (originals, [])
            for name, original in originals.items():
                namespace[name] = _replacement(name, original, family)
        _swaps[key][1].append(None)


def swap_out(namespace: dict[str, Any], family: HFFamily) -> None:
    """Undo one ``swap_in``; the last one puts the originals back."""
    with lock:
        originals, users = _swaps[id(namespace), family.name]
        users.pop()
        if not users:
            namespace.update(originals)
            del _swaps[id(namespace), family.name]


def _replacement(name: str, original: Callable[..., Any], family: HFFamily) -> Callable[..., Any]:
    mapping = family.functions[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        layer = running.layer
        running.calls += 1
        if layer is not None and layer.policy is not None:
            return mapping(layer, *args, **kwargs)
        state = next((given for given in (*args, *kwargs.values()) if type(given) is CachedState), None)
        if state is None:
            if layer is not None and layer.decoding:
                kwargs |= {key: value for key, value in family.as_decoding.items() if key in kwargs}
            return original(*args, **kwargs)
        if layer is not None:
            return mapping(layer, *args, **kwargs)
        raise QuantizeStateError(
            f"{state} is in a cache of an attached model, and a layer that is not attached was given it"
        )

    call.__name__ = call.__qualname__ = name
    call.__wrapped__ = original  # type: ignore[attr-defined]
    # A state is a Python object and its steps branch on its fill, so a compiled model breaks its graph here.
    return torch.compiler.disable(call)


class EnterHook:
    """Forward pre-hook of one attached layer: it is the running one. A copied or pickled model leaves it behind."""

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is self.layer.module:
            running.layer, running.args, running.kwargs, running.calls = self.layer, args, kwargs, 0
            self.layer.enter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _no_hook

    def __reduce__(self) -> Any:
        return _the_no_hook, ()


class LeaveHook(EnterHook):
    """Forward hook of one attached layer, called after exceptions too: nothing is running any more."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # type: ignore[override]
        if running.layer is not self.layer:
            return
        calls = running.calls
        self.layer.leave()
        running.layer, running.args, running.kwargs = None, (), {}
        if not calls and output is not None:  # without output, the forward raised
            raise QuantizeStateError(
                f"layer {self.layer.name!r} ran without its recurrence being called: the forward of its "
                f"{type(module).__name__} is another than its class's, such as a kernel for the whole layer"
            )


def _no_hook(*_: Any) -> None:
    """What copies of an attached model have in place of its hooks."""


def _the_no_hook() -> Callable[..., None]:
    return _no_hook
