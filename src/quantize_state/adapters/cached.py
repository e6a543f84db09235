"""What travels in a Hugging Face cache in place of the recurrent state's tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch import Tensor

from ..kernels.inputs import TokenInputs, concat_tokens
from ..kernels.paths import Path
from ..kernels.speculative import accept, verify
from ..kernels.step import folded, scan
from ..kernels.step import step as reference_step
from ..quant.errors import InvalidValueError, QuantizeStateError
from ..quant.state import DecodeState

Homes = MutableMapping[Any, Any]
"""Cache layer → the attached layer whose states it holds; weak in its keys, so that caches die as ever."""


class CachedState:
    """A DecodeState with one slot per batch row, which a cache layer carries as its recurrent state.

    It is no tensor, but has what transformers' caches call on one: moving, resetting, reordering rows, copying.
    ``homes`` lets a copy of the cache register itself, so that leaving the context finds it.

    While the cache records its past, for assisted generation, nothing changes the state: ``drafts`` holds the raw
    inputs since the last ``crop``, which says how many of them stay. ``prompted`` is False where a prompt comes next.
    """

    __slots__ = ("__weakref__", "_steps", "_workspace", "drafts", "home", "homes", "prompted", "state", "transposed")

    def __init__(self, state: DecodeState, transposed: bool, home: Any, homes: Homes) -> None:
        self.state = state
        self.transposed = transposed
        self.home = None if home is None else weakref.ref(home)
        self.homes = homes
        self.drafts: TokenInputs | None = None
        self.prompted = True
        self._workspace: Any = None  # what the kernels' launches hand on, kept so that a captured graph finds it
        self._steps = 0

    def step(self, inputs: TokenInputs, path: Path = "auto") -> Tensor:
        """One token for each row: by the kernels on a GPU, where they can, else by the reference, which replays.

        The kernels do not wait for the device, so Inf or NaN in a state is found once a window, and never while a
        graph is captured.
        """
        state = self.state
        if state.cursor.device.type != "cuda":
            return reference_step(state, inputs)
        from ..kernels import sequence  # loads Triton

        if sequence.unsupported(state) is not None:
            return reference_step(state, inputs)
        if self._workspace is None:
            self._workspace = sequence.Workspace.allocate(state, state.slots)
        y = sequence.step(state, inputs, path=path, workspace=self._workspace)
        self._steps += 1
        if self._steps % state.policy.window == 0 and not torch.cuda.is_current_stream_capturing():
            self._workspace.check_finite(state)
        return y

    def tensor(self) -> Tensor:
        """The state, its ring folded in, as the untouched model continues from it: float32, in transformers' layout."""
        state = self.state
        if self.drafts is not None:
            state = state.clone()
            scan(state, self.drafts)
        matrix = folded(state)
        return (matrix.mT if self.transposed else matrix).contiguous()

    @property
    def recording(self) -> bool:
        """Whether the tokens that come may be taken back."""
        home = None if self.home is None else self.home()
        return self.prompted and home is not None and home.record_past

    def verify(self, inputs: TokenInputs) -> Tensor:
        """Outputs [B, T, H, V] of decoding ``inputs``, which may be taken back: the state stays where it is.

        Inside a window the tokens go into the ring, and the cursor stays. Beyond a window's end outputs need a state
        that may never be: a temporary one, here.
        """
        self.drafts = inputs.map(Tensor.clone) if self.drafts is None else concat_tokens([self.drafts, inputs])
        y = verify(self.state, self.drafts).y if self._within_window else scan(self.state.clone(), self.drafts)
        return y[:, -inputs.tokens :]

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last tokens back, and make the others since the last crop final."""
        held = 0 if self.drafts is None else self.drafts.tokens
        if tokens_to_remove > held:
            raise InvalidValueError(
                f"{self} can't take back {tokens_to_remove} tokens: the last {held} are kept, those since the last crop"
            )
        self.settle(held - tokens_to_remove)
        self.prompted = True

    def settle(self, tokens: int | None = None) -> None:
        """Make the first ``tokens`` of the drafts (all by default) final and forget the others."""
        drafts = self.drafts
        if drafts is None:
            return
        tokens = drafts.tokens if tokens is None else tokens
        if tokens and self._within_window:
            ones = torch.ones(self.state.slots, dtype=torch.int32, device=self.device)
            accept(self.state, ones * tokens, ones * drafts.tokens)
        elif tokens:
            scan(self.state, drafts.slice(0, tokens))
        self.drafts = None

    @property
    def _within_window(self) -> bool:
        """Whether no draft, accepted, would end the window; a window whose copy is stale ends with the next token."""
        assert self.drafts is not None
        least, most = (int(t) for t in self.state.cursor.aminmax())
        return least >= 0 and most + self.drafts.tokens < self.state.policy.window

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
                self.drafts = source.drafts
        else:
            self.zero_()
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
        return self._with(self.state.to(device), lambda t: t.to(device))

    def zero_(self) -> CachedState:
        self.state.reset_()
        self.drafts = None
        return self

    def index_select(self, dim: int, index: Tensor) -> CachedState:
        """Rows at ``index``, repeats allowed, in a new object: beams."""
        if dim != 0:
            raise QuantizeStateError(f"rows of a state can be selected, and this asks for dimension {dim}")
        index = index.to(self.device)
        return self._with(self.state.select(index), lambda t: t[index])

    def __getitem__(self, index: Any) -> CachedState:
        return self.index_select(0, torch.arange(self.state.slots)[index].reshape(-1))

    def repeat_interleave(self, repeats: int, dim: int = 0) -> CachedState:
        return self.index_select(dim, torch.arange(self.state.slots).repeat_interleave(repeats))

    def _with(self, state: DecodeState, change: Callable[[Tensor], Tensor]) -> CachedState:
        home = None if self.home is None else self.home()
        return CachedState(state, self.transposed, home, self.homes)._recording_as(self, change)

    def _recording_as(self, other: CachedState, change: Callable[[Tensor], Tensor]) -> CachedState:
        self.drafts = None if other.drafts is None else other.drafts.map(change)
        self.prompted = other.prompted
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> CachedState:
        home = None if self.home is None else self.home()
        # copy.deepcopy notes an object's copy before it copies what the object holds, so the cache layer that will
        # hold this copy is already known.
        copied_home = memo.get(id(home)) if home is not None else None
        if copied_home is not None and home in self.homes:
            self.homes[copied_home] = self.homes[home]
        copied = CachedState(self.state.clone(), self.transposed, copied_home, self.homes)
        return copied._recording_as(self, Tensor.clone)

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
