"""What one layer keeps between decode steps, for many sequences: plain tensors in a dataclass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .codec import EncodedState, encode
from .columns import check_columns
from .errors import InvalidValueError, NonFiniteStateError
from .policy import StatePolicy
from .rounding import derive_seeds
from .spec import LayerSpec

PADDING = -1
"""The slot index of a padded row of a batch: it is neither read nor written."""

STALE = -2
"""A cursor's value: the ring is empty, and the copy encodes a checkpoint of some tokens ago, which the standard path
(kernels/standard) has moved on since. The next step by replay flushes: it folds its own token alone, and renews the
copy. Without a copy nothing can be stale, and the cursor is 0."""

_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@dataclass
class DecodeState:
    """The recurrent state of one layer for ``slots`` sequences.

    ``checkpoint`` [slots, H, V, K] is the state at the start of each slot's window; ``copy`` its read-only
    low-precision encoding, or None where outputs read the checkpoint itself. ``ring`` holds the raw inputs
    since then: ``v`` [slots, L, H, V], ``k`` [slots, L, Hk, K], ``beta`` [slots, L, H] and, but for Mamba-2,
    ``g`` [slots, L, H] or [slots, L, H, K]. ``cursor`` [slots] counts the tokens in the ring (or is STALE),
    ``position`` [slots] all tokens seen. ``decay_rate`` [H] is Mamba-2's A, a constant of the layer. ``mix``
    [slots, H, L, L] is what the kernels keep of the delta rule between tokens, the rows of M = (I + A)⁻¹·diag(β) of the
    tokens in the ring: a function of the ring, float32, None until a kernel first steps.
    """

    spec: LayerSpec
    policy: StatePolicy
    layer: str
    checkpoint: EncodedState
    copy: EncodedState | None
    ring: dict[str, Tensor]
    cursor: Tensor
    position: Tensor
    decay_rate: Tensor | None = None
    mix: Tensor | None = None

    @classmethod
    def allocate(
        cls,
        spec: LayerSpec,
        policy: StatePolicy,
        slots: int,
        *,
        layer: str = "",
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        decay_rate: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> DecodeState:
        """Empty states for ``slots`` sequences; ``dtype`` is that of the ring's keys and values.

        ``columns`` [H, K] are the layer's column scales, which a balanced policy needs and others ignore.

        Raises InvalidValueError where Mamba-2 comes without its decay rate, one number per head, or a balanced policy
        without column scales.
        """
        if slots < 0:
            raise InvalidValueError(f"layer {layer!r}: {slots} slots; a state has 0 or more")
        if spec.rules.gain_sets_decay and (decay_rate is None or decay_rate.shape != (spec.heads,)):
            given = "none" if decay_rate is None else f"shape {list(decay_rate.shape)}"
            raise InvalidValueError(
                f"layer {layer!r}: a {spec.rules.title} state needs decay_rate, A per head [{spec.heads}], not {given}"
            )
        if policy.balanced and columns is not None:
            check_columns(columns, spec, layer)
            columns = columns.to(device=device, dtype=torch.float32)
        heads, window = spec.heads, policy.window
        zeros = torch.zeros(slots, heads, spec.value_dim, spec.key_dim, device=device)
        ring = {
            "v": torch.zeros(slots, window, heads, spec.value_dim, dtype=dtype, device=device),
            "k": torch.zeros(slots, window, spec.key_heads, spec.key_dim, dtype=dtype, device=device),
            "beta": torch.zeros(slots, window, heads, device=device),
        }
        if not spec.rules.gain_sets_decay:
            channels = (spec.key_dim,) if spec.rules.decay == "channel" else ()
            ring["g"] = torch.zeros(slots, window, heads, *channels, device=device)
        return cls(
            spec,
            policy,
            layer,
            checkpoint=encode(zeros, *policy.how(policy.checkpoint)),
            copy=None if policy.read is None else encode(zeros, *policy.how(policy.read, columns)),
            ring=ring,
            cursor=torch.zeros(slots, dtype=torch.int32, device=device),
            position=torch.zeros(slots, dtype=torch.int64, device=device),
            decay_rate=None if decay_rate is None else decay_rate.detach().to(device=device, dtype=torch.float32),
        )

    @property
    def slots(self) -> int:
        return self.cursor.shape[0]

    @property
    def read_source(self) -> EncodedState:
        """What outputs read: the copy, or the checkpoint where there is none."""
        return self.checkpoint if self.copy is None else self.copy

    @property
    def emptied(self) -> int:
        """The cursor of a ring that was folded into the checkpoint without renewing the copy."""
        return 0 if self.copy is None else STALE

    def fill(self, slots: Tensor) -> Tensor:
        """How many tokens the rings of ``slots`` [n] hold, int64."""
        return self.cursor[slots].long().clamp(min=0)

    def index(self, slots: Tensor | None, *, padding: bool = False, repeats: bool = False) -> Tensor:
        """``slots`` [n] as int64 on the state's device; all of them by default.

        Raises InvalidValueError for anything that is no whole number from 0 (−1 with ``padding``) to the last slot,
        and for a slot named twice unless ``repeats``: indexing itself would take −1 for the last slot.
        """
        device = self.cursor.device
        if slots is None:
            return torch.arange(self.slots, device=device)
        if slots.dim() != 1 or slots.dtype not in _INDEX_TYPES:
            raise InvalidValueError(
                f"slots are whole numbers [n], int64 or smaller, not {slots.dtype} {list(slots.shape)}"
            )
        slots = slots.to(device, torch.int64)
        least = PADDING if padding else 0
        outside = ((slots < least) | (slots >= self.slots)).any()
        ordered = slots.sort().values
        twice = ((ordered[1:] == ordered[:-1]) & (ordered[1:] != PADDING)).any() & (not repeats)
        if bool(outside | twice):  # one wait for the device
            if bool(outside):
                raise InvalidValueError(f"slots {_brief(slots)}: each must be {least} to {self.slots - 1}")
            raise InvalidValueError(f"slots {_brief(slots)} name one slot twice; two rows can't share a state")
        return slots

    def renew_(self, state: Tensor, slots: Tensor | None = None) -> None:
        """Make ``state`` [n, H, V, K] float32 the checkpoint of ``slots`` (all by default).

        The copy is encoded from what the checkpoint then holds, and the ring emptied.
        Raises NonFiniteStateError naming layer, slot and head, before anything is written.
        """
        index = self.index(slots)
        wanted = (len(index), self.spec.heads, self.spec.value_dim, self.spec.key_dim)
        if state.shape != wanted:
            raise InvalidValueError(f"the states of {len(index)} slots are {list(wanted)}, not {list(state.shape)}")
        self.check_finite(state, index)
        policy = self.policy
        seeds = self.rounding_seeds(self.position[index]) if policy.stochastic else None
        checkpoint = encode(state, *policy.how(policy.checkpoint), seeds=seeds, check_finite=False)
        self.checkpoint.write_(index, checkpoint)
        if self.copy is not None:
            source = state if policy.checkpoint == "fp32" else checkpoint.decode()
            self.copy.write_(index, encode(source, *self.copy.how, check_finite=False))
        self.cursor[index] = 0

    def rounding_seeds(self, position: Tensor) -> Tensor:
        """Seeds [n, H] of stochastic rounding for slots at ``position`` [n]: of policy, layer, position and head."""
        heads = torch.arange(self.spec.heads, device=position.device)
        return derive_seeds(self.policy.seed, self.layer, position[:, None], heads)

    def check_finite(self, state: Tensor, slots: Tensor) -> None:
        """Raise NonFiniteStateError naming layer, slot and head where ``state`` [n, H, V, K] holds Inf or NaN."""
        finite = torch.isfinite(state.sum(dim=(-1, -2), dtype=torch.float64))
        if bool(finite.all()):
            return
        row, head = (int(i) for i in (~finite).nonzero()[0])
        raise NonFiniteStateError(
            f"the state of layer {self.layer!r}, slot {int(slots[row])}, head {head} holds Inf or NaN after "
            f"{int(self.position[slots[row]])} tokens; its inputs overflowed or were already not finite",
            layer=self.layer,
        )

    def reset_(self, slots: Tensor | None = None) -> None:
        """Forget the sequences in ``slots`` (all by default): checkpoint, copy, ring, cursor and position."""
        index = self.index(slots)
        self.position[index] = 0
        for rows in self.ring.values():
            rows[index] = 0
        shape = (len(index), self.spec.heads, self.spec.value_dim, self.spec.key_dim)
        self.renew_(torch.zeros(shape, device=self.cursor.device), index)

    def select(self, index: Tensor) -> DecodeState:
        """A new state whose slots are those at ``index`` [n], repeats allowed: beams, or a smaller batch."""
        index = self.index(index, repeats=True)
        return self._map(lambda t: t[index], lambda e: e[index])

    def to(self, device: torch.device | str) -> DecodeState:
        """The same state on another device."""
        moved = self._map(lambda t: t.to(device), lambda e: e.to(device))
        moved.decay_rate = None if self.decay_rate is None else self.decay_rate.to(device)
        return moved

    def clone(self) -> DecodeState:
        """An independent state with the same bytes."""
        return self._map(Tensor.clone, EncodedState.clone)

    def _map(self, tensor, encoded) -> DecodeState:
        return DecodeState(
            self.spec,
            self.policy,
            self.layer,
            checkpoint=encoded(self.checkpoint),
            copy=None if self.copy is None else encoded(self.copy),
            ring={name: tensor(rows) for name, rows in self.ring.items()},
            cursor=tensor(self.cursor),
            position=tensor(self.position),
            decay_rate=self.decay_rate,
            mix=None if self.mix is None else tensor(self.mix),
        )

    def state_bytes(self) -> dict[str, int]:
        """Bytes that the slots occupy: checkpoint, copy, ring (with cursors) and their total."""
        kept = (*self.ring.values(), self.cursor, self.position, *(() if self.mix is None else (self.mix,)))
        ring = sum(t.numel() * t.element_size() for t in kept)
        parts = {
            "checkpoint": self.checkpoint.nbytes,
            "copy": 0 if self.copy is None else self.copy.nbytes,
            "ring": ring,
        }
        return parts | {"total": sum(parts.values())}


def _brief(slots: Tensor) -> str:
    """The first few of ``slots``, for a message."""
    return f"[{', '.join(map(str, slots[:8].tolist()))}{', …' if len(slots) > 8 else ''}]"
