"""What travels in a Hugging Face cache in place of the recurrent state's tensor."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.step import folded
from ..quant.errors import QuantizeStateError
from ..quant.state import DecodeState

Homes = MutableMapping[Any, Any]
"""Cache layer → the attached layer whose states it holds; weak in its keys, so that caches die as ever."""


class CachedState:
    """A DecodeState with one slot per batch row, which a cache layer carries as its recurrent state.

    It is no tensor, but has what transformers' caches call on one: moving, resetting, reordering rows, copying.
    ``homes`` lets a copy of the cache register itself, so that leaving the context finds it.
    """

    __slots__ = ("__weakref__", "home", "homes", "state", "transposed")

    def __init__(self, state: DecodeState, transposed: bool, home: Any, homes: Homes) -> None:
        self.state = state
        self.transposed = transposed
        self.home = None if home is None else weakref.ref(home)
        self.homes = homes

    def tensor(self) -> Tensor:
        """The state, its ring folded in, as the untouched model continues from it: float32, in transformers' layout."""
        state = folded(self.state)
        return (state.mT if self.transposed else state).contiguous()

    @property
    def shape(self) -> torch.Size:
        spec = self.state.spec
        matrix = (spec.key_dim, spec.value_dim) if self.transposed else (spec.value_dim, spec.key_dim)
        return torch.Size((self.state.slots, spec.heads, *matrix))

    @property
    def device(self) -> torch.device:
        return self.state.cursor.device

    @property
    def dtype(self) -> torch.dtype:
        """float32, which is what ``tensor()`` gives; the policy says what is stored."""
        return torch.float32

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def copy_(self, source: CachedState | Tensor, non_blocking: bool = False) -> CachedState:
        """Become ``source``. Caches copy a new state onto the old one; here both are one object, and nothing moves."""
        if isinstance(source, CachedState):
            if source is not self:
                self.state = source.state.clone()
        else:
            self.state.reset_()
            self.state.renew_((source.mT if self.transposed else source).to(self.device, torch.float32))
        return self

    def to(self, *args: Any, **kwargs: Any) -> CachedState:
        """The same state on another device. A dtype is ignored: the policy says what is stored."""
        device = kwargs.get("device")
        for given in args:
            if isinstance(given, (torch.device, str, int)):
                device = given
            elif isinstance(given, Tensor):
                device = given.device
        if device is None or torch.empty(0, device=device).device == self.device:
            return self
        return self._with(self.state.to(device))

    def zero_(self) -> CachedState:
        self.state.reset_()
        return self

    def index_select(self, dim: int, index: Tensor) -> CachedState:
        """Rows at ``index``, repeats allowed, in a new object: beams."""
        if dim != 0:
            raise QuantizeStateError(f"rows of a state can be selected, and this asks for dimension {dim}")
        return self._with(self.state.select(index.to(self.device)))

    def __getitem__(self, index: Any) -> CachedState:
        return self.index_select(0, torch.arange(self.state.slots)[index].reshape(-1))

    def repeat_interleave(self, repeats: int, dim: int = 0) -> CachedState:
        return self.index_select(dim, torch.arange(self.state.slots).repeat_interleave(repeats))

    def _with(self, state: DecodeState) -> CachedState:
        return CachedState(state, self.transposed, None if self.home is None else self.home(), self.homes)

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedState:
        home = None if self.home is None else self.home()
        # copy.deepcopy notes an object's copy before it copies what the object holds, so the cache layer that will
        # hold this copy is already known.
        copied_home = memo.get(id(home)) if home is not None else None
        if copied_home is not None and home in self.homes:
            self.homes[copied_home] = self.homes[home]
        return CachedState(self.state.clone(), self.transposed, copied_home, self.homes)

    def __reduce__(self) -> Any:
        """A pickled cache carries plain tensors, which an attached model takes in as it takes any cache."""
        return _identity, (self.tensor(),)

    def __repr__(self) -> str:
        return f"CachedState({self.state.layer!r}, shape={tuple(self.shape)}, policy={self.state.policy.name!r})"


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def to_plain(cache_layer: Any) -> None:
    """Replace the states in a cache layer by tensors, so that the untouched model continues from them."""
    for index, held in cache_layer.recurrent_states.items():
        if isinstance(held, CachedState):
            cache_layer.recurrent_states[index] = held.tensor()
