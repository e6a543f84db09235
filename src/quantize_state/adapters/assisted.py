"""Assisted generation on an attached model: what transformers' ``generate`` and its caches are told meanwhile.

transformers refuses it for models with recurrent states, since these can't be taken back. Those of an attached model
can: while a cache records its past, the raw inputs of its tokens are kept, and ``crop`` decides which of them become
part of the state (cached.py). So an attached model says that it is not stateful, and its cache layers that they can be
cropped; attributes of their classes are swapped for that, as functions are in swap.py, and fall through to the
originals for everything that is not attached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .cached import CachedState
from .models import CACHE_NAMES


@dataclass
class Acceptance:
    """Of one assisted generation, without its prompt: the model's ``steps``, tokens ``drafted`` and ``accepted``."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def length(self) -> float:
        """Tokens per step of the model: the certain one and the accepted drafts. 1 is what plain decoding has."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


_handles: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Attached models that can generate, with the handle that ``attach`` returned; the model's hooks keep that alive."""

_swaps: dict[tuple[type, str], tuple[Any, int]] = {}
"""(class, attribute) → what the class's own namespace held, and the number of users."""

_ABSENT = object()


def _handle(model: nn.Module) -> Any:
    found = _handles.get(model)
    return None if found is None else found()


def swap_in(model: nn.Module, handle: Any, undo: Callable[..., Any]) -> None:
    """Let the generating modules in ``model`` draft, as far as transformers is there; ``undo(f, *args)`` notes how."""
    for module in model.modules():
        if hasattr(type(module), "_assisted_decoding"):
            _handles[module] = weakref.ref(handle)
            undo(_handles.pop, module, None)
            for name, replacement in _MODEL.items():
                _swap(type(module), name, replacement, undo)
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    for name, replacement in _CACHE_LAYER.items():
        if hasattr(LinearAttentionCacheLayerMixin, name):
            _swap(LinearAttentionCacheLayerMixin, name, replacement, undo)


def _swap(owner: type, name: str, replacement: Callable[[Any], Any], undo: Callable[..., Any]) -> None:
    kept, users = _swaps.get((owner, name), (owner.__dict__.get(name, _ABSENT), 0))
    if not users:
        setattr(owner, name, replacement(getattr(owner, name)))
    _swaps[owner, name] = (kept, users + 1)
    undo(_unswap, owner, name)


def _unswap(owner: type, name: str) -> None:
    kept, users = _swaps.pop((owner, name))
    if users > 1:
        _swaps[owner, name] = (kept, users - 1)
    elif kept is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, kept)


# --- Models ----------------------------------------------------------------------------------------------------------


class _Stateful:
    """``_is_stateful``: whether generate must refuse. Not for attached models all of whose states have a policy."""

    def __init__(self, original: bool) -> None:
        self.original = original

    def __get__(self, model: nn.Module | None, owner: type) -> bool:
        handle = None if model is None else _handle(model)
        return self.original if handle is None or None in handle.policies.values() else False


def _assisted_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    def decode(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        handle = _handle(model)
        if handle is None:
            return original(model, *args, **kwargs)
        cache = next((c for name in CACHE_NAMES if (c := kwargs.get(name)) is not None), None)
        for held in _states(cache):
            held.settle()
            held.prompted = False
        handle.verifying = True
        try:
            return original(model, *args, **kwargs)
        finally:
            handle.verifying = False
            # The cache may be the caller's, who goes on without drafts.
            for held in _states(cache):
                held.settle()
                held.home().record_past = False

    return decode


def _states(cache: Any) -> list[Any]:
    layers = [] if cache is None else cache.layers
    held = [state for layer in layers for state in getattr(layer, "recurrent_states", {}).values()]
    return [state for state in held if isinstance(state, CachedState) and state.home is not None]


def _candidate_generator(original: Callable[..., Any]) -> Callable[..., Any]:
    def create(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        generator = original(model, *args, **kwargs)
        handle = _handle(model)
        if handle is not None:
            handle.acceptance = Acceptance()
            _watch(generator, handle.acceptance)
        return generator

    return create


def _watch(generator: Any, acceptance: Acceptance) -> None:
    """Count what ``generator`` drafts, and drop what it drafts beside the prompt.

    In one call with the prompt drafts could not be told from it, and a prompt is computed in another way than decode.
    The generator is asked nevertheless: an assistant has its own prompt to read.
    """
    draft, update = generator.get_candidates, generator.update_candidate_strategy
    at_prompt = True

    def get_candidates(input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        candidates = draft(input_ids, *args, **kwargs)
        if at_prompt:
            getattr(generator, "probs", []).clear()  # of drafts that never meet their matches
            return input_ids, None
        acceptance.drafted += candidates[0].shape[1] - input_ids.shape[1]
        return candidates

    def update_candidate_strategy(input_ids: torch.Tensor, scores: torch.Tensor, num_matches: Any) -> None:
        nonlocal at_prompt
        if at_prompt:
            at_prompt = False
            return
        acceptance.steps += 1
        acceptance.accepted += int(num_matches)
        update(input_ids, scores, num_matches)

    generator.get_candidates, generator.update_candidate_strategy = get_candidates, update_candidate_strategy


# --- Caches ----------------------------------------------------------------------------------------------------------


def _is_croppable(original: Any) -> property:
    def is_croppable(layer: Any) -> bool:
        held = [state for state in layer.recurrent_states.values() if state is not None]
        if not held or not all(isinstance(state, CachedState) for state in held):
            return original.fget(layer)
        return True

    return property(is_croppable)


def _crop(original: Callable[..., Any]) -> Callable[..., Any]:
    def crop(layer: Any, tokens_to_remove: int) -> None:
        removed = -int(tokens_to_remove)
        if removed < 0 or not layer.record_past:  # for which transformers has its errors
            original(layer, tokens_to_remove)
            return
        for state in layer.recurrent_states.values():
            if isinstance(state, CachedState):
                state.crop(removed)
        # transformers' own would do, if it knew layers without a convolution, and prompts that are shorter than one.
        for i, size in layer.conv_kernel_size.items():
            if size is not None:
                columns = layer.conv_states[i]
                columns = columns[..., : columns.shape[-1] - removed][..., -size:]
                layer.conv_states[i] = F.pad(columns, (size - columns.shape[-1], 0))

    return crop


_MODEL: dict[str, Callable[[Any], Any]] = {
    "_is_stateful": _Stateful,
    "_assisted_decoding": _assisted_decoding,
    "_get_candidate_generator": _candidate_generator,
}
_CACHE_LAYER: dict[str, Callable[[Any], Any]] = {"is_croppable": _is_croppable, "crop": _crop}
