"""One attached layer: what runs in place of transformers' functions while it is the running one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.inputs import TokenInputs
from ..kernels.paths import Path
from ..kernels.step import prefill, scan
from ..quant.errors import QuantizeStateError
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from .cached import CachedState, Homes
from .models import CACHE_NAMES, SsmLayer
from .swap import running

Observer = Callable[["AttachedLayer", TokenInputs, Tensor, DecodeState], None]


class Handle(Protocol):
    """What a layer needs of the handle that it belongs to."""

    teacher_forced: bool
    path: Path
    verifying: bool
    observer: Observer | None
    homes: Homes


class AttachedLayer:
    """One attached layer.

    ``name`` is that in ``model.named_modules()``, ``index`` counts SSM layers, ``policy`` is that of states to come,
    ``columns`` their column scales [H, K], where it is balanced.
    """

    def __init__(self, layer: SsmLayer, index: int, policy: StatePolicy | None, handle: Handle) -> None:
        self.name = layer.name
        self.index = index
        self.family = layer.family.name
        self.module = layer.module
        self.policy = policy
        self.columns: Tensor | None = None
        self._transposed = layer.family.transposed
        self._handle = handle
        self._conv_before: Tensor | None = None
        parameters = [name for name in inspect.signature(type(layer.module).forward).parameters if name != "self"]
        self._cache_position = next((i for i, name in enumerate(parameters) if name in CACHE_NAMES), len(parameters))

    @property
    def decoding(self) -> bool:
        """Whether every chunk stands for as many decode steps: teacher forcing."""
        return self._handle.teacher_forced

    def decodes(self, initial: Tensor | CachedState | None) -> bool:
        return self.decoding or (isinstance(initial, CachedState) and initial.recording)

    def recur(
        self,
        inputs: TokenInputs,
        initial: Tensor | CachedState | None,
        *,
        keep: bool,
        qk_l2norm: bool = False,
        query_scale: float = 1.0,
        decay_rate: Tensor | None = None,
    ) -> tuple[Tensor, CachedState | None]:
        """Outputs [B, T, H, V] float32, contiguous, and the state for the layer's cache, if it ``keep``s one."""
        handle = self._handle
        with torch.no_grad():
            if isinstance(initial, CachedState):
                held = initial
            else:
                spec = self._spec(inputs, qk_l2norm, query_scale)
                held = self._new_state(spec, inputs, initial, keep, decay_rate)
            y = self._advance(held, inputs, fresh=initial is None)
            y = y.contiguous()
        if handle.observer is not None:
            handle.observer(self, inputs, y, held.state)
        if torch.is_grad_enabled():
            sources = (inputs.q, inputs.k, inputs.v, inputs.beta, inputs.g, decay_rate)
            source = next((t for t in sources if t is not None and t.requires_grad), None)
            y = y if source is None else _InferenceOnly.apply(y, source)
        return y, held if keep else None

    def _advance(self, held: CachedState, inputs: TokenInputs, *, fresh: bool) -> Tensor:
        """Outputs of what comes next: a prompt, decode steps, or drafts."""
        recording = held.recording
        if recording and not fresh:
            return held.verify(inputs)
        if recording and not self._handle.verifying:
            # An assistant's prompt, of which generate takes back the last token.
            last = inputs.tokens - 1
            head = [prefill(held.state, inputs.slice(0, last))] if last else []
            return torch.cat([*head, held.verify(inputs.slice(last, last + 1))], dim=1)
        if self._handle.teacher_forced:
            return scan(held.state, inputs)
        if fresh or inputs.tokens != 1:
            return prefill(held.state, inputs)
        return held.step(inputs, self._handle.path)

    def _spec(self, inputs: TokenInputs, qk_l2norm: bool, query_scale: float) -> LayerSpec:
        heads, value_dim = inputs.v.shape[-2:]
        key_heads, key_dim = inputs.k.shape[-2:]
        return LayerSpec(self.family, heads, key_heads, value_dim, key_dim, qk_l2norm, query_scale)

    def _new_state(
        self, spec: LayerSpec, inputs: TokenInputs, initial: Tensor | None, keep: bool, decay_rate: Tensor | None
    ) -> CachedState:
        """An empty state, or one that continues from the tensor of a cache that the untouched model made."""
        assert self.policy is not None  # or the call would have fallen through
        device, dtype = inputs.v.device, inputs.v.dtype
        state = DecodeState.allocate(
            spec, self.policy, inputs.rows, layer=self.name, device=device, dtype=dtype, decay_rate=decay_rate,
            columns=self.columns,
        )  # fmt: skip
        if initial is not None:
            state.renew_((initial.mT if self._transposed else initial).to(device, torch.float32))
        home = self._home() if keep else None
        held = CachedState(state, self._transposed, home, self._handle.homes)
        if home is not None:
            # In place before the layer stores it, so that the cache copies the object onto itself.
            home.recurrent_states[0] = held
            home.is_recurrent_states_initialized[0] = True
            self._handle.homes[home] = self
        return held

    def _home(self) -> Any:
        """The cache layer in which the running layer keeps its state."""
        home = self._find_home()
        if home is None:
            raise QuantizeStateError(f"layer {self.name!r} keeps a state, and was called without a cache to keep it in")
        return home

    def _find_home(self) -> Any:
        cache = next((c for name in CACHE_NAMES if (c := running.kwargs.get(name)) is not None), None)
        if cache is None and len(running.args) > self._cache_position:
            cache = running.args[self._cache_position]
        return None if cache is None else cache.layers[self.module.layer_idx]

    def enter(self) -> None:
        """Called before the layer's forward, with its arguments in ``running``."""
        home = self._find_home()
        records = home is not None and home.record_past and home.conv_states[0] is not None
        self._conv_before = home.conv_states[0].clone() if records else None

    def leave(self) -> None:
        """Called after the layer's forward, by whatever way it ended."""
        before, self._conv_before = self._conv_before, None
        home = self._find_home()
        # A few classes shift a single token into the convolution's state although the cache records its past.
        if before is not None and home is not None and home.conv_states[0].shape == before.shape:
            home.conv_states[0] = torch.cat([before, home.conv_states[0][..., -1:]], dim=-1)

    def __repr__(self) -> str:
        return f"AttachedLayer({self.index}, {self.name!r}, {self.family}, policy={self.spelled})"

    @property
    def spelled(self) -> str:
        """The policy's arm name; ``untouched`` for none."""
        return "untouched" if self.policy is None else self.policy.name


class _InferenceOnly(torch.autograd.Function):
    """Outputs that a forward pass may use and a backward pass may not: a state has no gradient."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, source: Tensor) -> Tensor:
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise QuantizeStateError(
            "a backward pass through an attached model: states are for inference, so leave the context first"
        )
