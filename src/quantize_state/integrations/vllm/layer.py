"""What a layer with a read copy adds to vLLM's: a DecodeState in its pages, and the care that prefill needs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...kernels import sequence
from ...kernels.inputs import TokenInputs
from ...kernels.paths import Path
from ...kernels.step import folded, step
from ...quant.errors import QuantizeStateError
from ...quant.policy import StatePolicy
from ...quant.spec import LayerSpec
from ...quant.state import PADDING, DecodeState
from .pages import state_in_pages

NULL_BLOCK = 0
"""The page that vLLM gives to padded rows; nobody's state."""


class _Running(threading.local):
    """The layer whose recurrence runs on this thread: layers share memory, so a state does not say whose it is."""

    layer: ReadCopy | None = None


running = _Running()


class ReadCopy:
    """The states of one layer, page by page; ``slots`` are vLLM's block numbers.

    On a GPU decoding is done by the kernels, without waiting for the device, else by the reference. All else is the
    same: vLLM's own prefill works on the checkpoint, before it rings are folded in and after it copies renewed.
    """

    def __init__(self, name: str, spec: LayerSpec, policy: StatePolicy, max_rows: int, path: Path = "auto") -> None:
        self.name, self.spec, self.policy, self.path = name, spec, policy, path
        self._max_rows = max_rows
        self._state: DecodeState | None = None
        self._workspace: Any = None

    @property
    def state(self) -> DecodeState:
        if self._state is None:
            raise QuantizeStateError(f"layer {self.name!r} runs before vLLM has given it pages")
        return self._state

    def bind(self, checkpoint: Tensor, extra: tuple[Tensor, ...], decay_rate: Tensor | None = None) -> None:
        """Take up the pages that vLLM has allocated."""
        self._state = state_in_pages(
            self.spec, self.policy, self.name, checkpoint=checkpoint, extra=extra, decay_rate=decay_rate
        )
        if checkpoint.device.type != "cpu":
            self.use_kernels()

    def use_kernels(self) -> None:
        """Decode by the kernels from now on. Raises QuantizeStateError where they can't: what vLLM captures in a CUDA
        graph must not wait for the device, as the reference does."""
        if reason := sequence.unsupported(self.state):
            raise QuantizeStateError(f"layer {self.name!r}, policy {self.policy.name}: {reason}")
        self._workspace = _shared_workspace(self.state, self._max_rows)

    def decode(
        self, inputs: TokenInputs, slots: Tensor, out: Tensor, skip: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """One token for each row, its outputs [B, H, V] into ``out``; ``skip`` as (x [B, H, V], D [H]) adds D·x."""
        state = self.state
        slots = torch.where(slots == NULL_BLOCK, PADDING, slots)
        if self._workspace is not None:
            with_token = None if skip is None else (skip[0].unsqueeze(1), skip[1])
            sequence.step(
                state, inputs, slots, path=self.path, workspace=self._workspace, out=out.unsqueeze(1), skip=with_token
            )
            return
        y = step(state, inputs, slots).squeeze(1)
        if skip is not None:
            y += skip[0].float() * skip[1].float()[:, None]
        out.copy_(y)

    @contextmanager
    def prefill(self, slots: Tensor, has_state: Tensor | None, also: Tensor | None = None) -> Iterator[None]:
        """Around vLLM's forward: this layer is the running one, and its prefill rows are whole before and after.

        Before: of the pages in ``slots`` [n] with a state (``has_state`` [n]) rings are folded into the checkpoints,
        which is all that vLLM's prefill reads. After: copies are renewed and rings emptied, there and in ``also``,
        pages in which vLLM left a state from inside of a prompt.
        """
        slots = slots.long()
        if has_state is not None and slots.numel():
            self._fold_rings(slots[has_state])
        before, running.layer = running.layer, self
        try:
            yield
        finally:
            running.layer = before
        if also is not None:
            slots = torch.cat([slots, also.long()])
        if slots.numel():
            self._renew(slots)

    def _fold_rings(self, slots: Tensor) -> None:
        filled = slots[self.state.cursor[slots] > 0]
        if filled.numel():
            self.state.renew_(folded(self.state, filled), filled)

    def _renew(self, slots: Tensor) -> None:
        self.state.position[slots] = 0  # tells tokens apart where rounding is stochastic, which it is not here
        self.state.renew_(self.state.checkpoint[slots].decode(), slots)

    def __repr__(self) -> str:
        return f"ReadCopy({self.name!r}, {self.spec.family}, policy={self.policy.name})"


_workspaces: dict[tuple[Any, ...], Any] = {}


def _shared_workspace(state: DecodeState, rows: int) -> Any:
    """Layers run one after the other, so those of one shape and policy share what a step's launches hand on."""
    key = (state.spec, state.policy, rows, state.cursor.device)
    if key not in _workspaces:
        _workspaces[key] = sequence.Workspace.allocate(state, rows)
    return _workspaces[key]


class ReadCopyLayer:
    """The first base of each layer class: vLLM's layer and, where its policy asks for one, a ReadCopy."""

    read_copy: ReadCopy | None = None
    siblings: Mapping[str, Any]
    """All layers of the model, by name."""
    stages = 1
    """Of the pipeline: with several, the layers here are not all."""
    bound = False
    prefix: str
    kv_cache: Any
    _as_stock = False

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """Inside, the layer has the two states that vLLM's own code unpacks."""
        cache, self.kv_cache, self._as_stock = self.kv_cache, self.kv_cache[:2], True
        try:
            yield
        finally:
            self.kv_cache, self._as_stock = cache, False
