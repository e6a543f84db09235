"""``attach``: give a model's recurrent states a policy for as long as a context lasts."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, get_args

from torch import nn

from ..kernels.paths import Path
from ..quant.columns import ColumnScales
from ..quant.errors import InvalidValueError, QuantizeStateError, unknown_name
from ..quant.policy import CALIBRATE, StatePolicy
from ..quant.recipe import Recipe
from ..quant.state import DecodeState
from . import assisted
from .auto import required_recipe
from .cached import CachedState, Homes, to_plain
from .layer import AttachedLayer, Observer
from .models import find_layers, other_layers
from .swap import EnterHook, LeaveHook, lock, swap_in, swap_out

Policy = StatePolicy | Recipe | Mapping[str, Any] | str | None

_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def attach(
    model: nn.Module,
    policy: Policy,
    *,
    teacher_forced: bool = False,
    path: Path = "auto",
    columns: ColumnScales | None = None,
) -> Attached:
    """Keep the recurrent states of ``model`` as ``policy`` says, until the returned handle's context is left.

    ``policy`` is one StatePolicy or arm name for all layers, a Recipe (also as the mapping that a YAML recipe
    holds), or ``"auto"``: the recipe that the model brings along (``resolve_recipe``). It is consulted when a state is
    created; afterwards the state carries it. None leaves new states to transformers' own functions. ``columns`` are
    the column scales of balanced policies, where a recipe does not bring its own.

    - Several tokens at once are a prompt, or more of one: exact FP32 outputs, then the copy is renewed.
    - One token with a state is a decode step.
    - With ``teacher_forced`` every call, of any length and also without a cache, has the arithmetic of decoding:
      it gives what as many single steps would. (Mamba-2's limits on Δ, which some models have, apply to prompts
      alone: transformers' single-token function has none, nor have serving engines.)

    On a GPU, decode steps of small batches are by default those of the standard FP32 kernel, which is faster there; its
    outputs carry no read error. To see what a read format does to a model, ask for ``path="replay"``, as `eval` does:
    then every step reads the copy.

    The model works as ever otherwise: ``generate()``, padded batches, beam search, static caches; and beyond that,
    assisted generation, which transformers refuses for recurrent states (docs/speculative.md). A cache made by
    the model when it was not attached is taken in on first use; when the context is left, also by an exception,
    every live cache gets plain tensors, and the model is what it was. For inference alone: a backward pass through
    a state raises QuantizeStateError.

    Raises UnsupportedModelError for a model without such layers, InvalidValueError for a policy, recipe or path that
    does not fit, and QuantizeStateError where the model is attached already.
    """
    return Attached(model, policy, teacher_forced=teacher_forced, path=path, columns=columns)


class Attached:
    """A model whose states have a policy; the handle that ``attach`` returns, and its context manager.

    ``model`` is the model, ``layers`` are the attached layers in order, ``others`` the classes of its other layers
    with their numbers. ``observer``, where set, is called as ``observer(layer, inputs, y, state)`` after each
    layer's recurrence, with its outputs before Mamba-2's skip and before gates. ``teacher_forced`` and ``path`` may be
    changed between calls, and ``columns`` (column scales) before ``use``. ``acceptance`` counts the drafts of the last
    assisted generation; ``verifying`` says that one runs.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        *,
        teacher_forced: bool = False,
        path: Path = "auto",
        columns: ColumnScales | None = None,
    ) -> None:
        if path not in get_args(Path):
            raise unknown_name("path", path, get_args(Path))
        found = find_layers(model)
        self.columns = columns
        policies, scales = _policies(policy, model, [layer.name for layer in found], columns)
        self.model = model
        self.teacher_forced = teacher_forced
        self.path: Path = path
        self.observer: Observer | None = None
        self.layers = tuple(
            AttachedLayer(layer, i, own, self) for i, (layer, own) in enumerate(zip(found, policies, strict=True))
        )
        self._give(scales)
        self.others = other_layers(model)
        self.homes: Homes = weakref.WeakKeyDictionary()
        self.acceptance = assisted.Acceptance()
        self.verifying = False
        with lock, ExitStack() as undo:
            assisted.swap_in(model, self, undo.callback)
            for layer, attached in zip(found, self.layers, strict=True):
                if layer.module in _attached:
                    raise QuantizeStateError(
                        f"layer {layer.name!r} of this {type(model).__name__} is attached already; "
                        "leave that context first"
                    )
                _attached.add(layer.module)
                undo.callback(_attached.discard, layer.module)
                swap_in(layer.namespace, layer.family)
                undo.callback(swap_out, layer.namespace, layer.family)
                enter = layer.module.register_forward_pre_hook(EnterHook(attached), with_kwargs=True)
                undo.callback(enter.remove)
                leave = layer.module.register_forward_hook(LeaveHook(attached), always_call=True)
                undo.callback(leave.remove)
            self._undo = undo.pop_all()
        self._live = True

    @property
    def policies(self) -> dict[str, StatePolicy | None]:
        """The policy of each layer, by name, for states to come."""
        return {layer.name: layer.policy for layer in self.layers}

    def use(self, policy: Policy) -> None:
        """Give new states another policy or recipe; existing ones keep what they have."""
        policies, scales = _policies(policy, self.model, [layer.name for layer in self.layers], self.columns)
        for layer, own in zip(self.layers, policies, strict=True):
            layer.policy = own
        self._give(scales)

    def _give(self, scales: ColumnScales | None) -> None:
        for layer in self.layers:
            layer.columns = None if scales is None else scales.layers.get(layer.name)

    def states(self, cache: Any) -> dict[str, DecodeState]:
        """The states in ``cache``, by layer name; layers that have none yet are left out."""
        held = {layer.name: cache.layers[layer.module.layer_idx].recurrent_states[0] for layer in self.layers}
        return {name: state.state for name, state in held.items() if isinstance(state, CachedState)}

    def state_bytes(self) -> dict[str, Any]:
        """Bytes of the states in all live caches: checkpoint, copy, ring and total; the same again under ``layers``."""
        parts = ("checkpoint", "copy", "ring", "total")
        layers = {layer.name: dict.fromkeys(parts, 0) for layer in self.layers}
        for home, layer in list(self.homes.items()):
            for held in home.recurrent_states.values():
                if isinstance(held, CachedState):
                    for part, size in held.state.state_bytes().items():
                        layers[layer.name][part] += size
        return {part: sum(sizes[part] for sizes in layers.values()) for part in parts} | {"layers": layers}

    def detach(self) -> None:
        """Give live caches plain tensors and restore the model; does nothing the second time."""
        self._live = False
        with lock, self._undo:
            for home in list(self.homes):
                self._undo.callback(to_plain, home)
            self.homes.clear()

    def __enter__(self) -> Attached:
        if not self._live:
            raise QuantizeStateError("this handle was detached and does nothing any more; attach the model again")
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise QuantizeStateError(
            "a handle stands for its model in this process, so it can't be copied or pickled; attach the copied model"
        )

    def __exit__(self, *_: object) -> None:
        self.detach()

    def __repr__(self) -> str:
        policies = ", ".join(sorted({layer.spelled for layer in self.layers}))
        return f"Attached({len(self.layers)} {self.layers[0].family} layers, policy {policies}; others: {self.others})"


def _policies(
    policy: Policy, model: nn.Module, names: list[str], columns: ColumnScales | None
) -> tuple[list[StatePolicy] | list[None], ColumnScales | None]:
    """A policy per layer, and the column scales of those that are balanced."""
    if policy is None:
        return [None] * len(names), None
    recipe = Recipe.of(required_recipe(model) if policy == "auto" else policy)
    policies = recipe.for_layers(names)
    balanced = [name for name, own in zip(names, policies, strict=True) if own.balanced]
    if not balanced:
        return policies, None
    scales = columns if recipe.columns is None else recipe.columns
    if scales is None:
        raise InvalidValueError(
            f"policy {next(p for p in policies if p.balanced).name} needs column scales; {CALIBRATE}"
        )
    scales.check(balanced)
    return policies, scales
