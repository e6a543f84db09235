"""How a layer keeps its state: one policy, and the arm names that spell policies."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import InvalidValueError, unknown_name
from .formats import FORMATS
from .rotation import ROTATIONS
from .scales import SCALE_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from .encoded import How

MAX_WINDOW = 256

CALIBRATE = (
    "measure them by `quantize-state calibrate MODEL --out FILE.safetensors`, and name the file by --columns, by "
    "`columns:` in the recipe, or as attach(model, policy, columns=ColumnScales.read(FILE))"
)
"""What to do where a balanced policy has no column scales."""


@dataclass(frozen=True)
class StatePolicy:
    """How one layer's state is stored, read and renewed.

    ``checkpoint`` is the format of the recurrence, ``read`` that of the read copy; with ``read=None`` outputs
    read the checkpoint itself. Every ``window`` tokens the ring is folded into the checkpoint and the copy
    renewed. ``scale_rule`` and ``rotation`` apply to whatever is quantised; ``stochastic`` rounds the
    checkpoint stochastically, seeded by ``seed``, layer and position. ``balanced`` divides the copy's columns by
    constants of the layer, before the rotation, and multiplies Θ by them (docs/formats.md); a state needs them given.

    All arms are points of this one space: an FP32 recurrence is ``window=1``, replay is an FP32 checkpoint
    with ``read=None``, *decoupled* has an FP32 checkpoint and a low-precision copy, *coupled* has a
    low-precision checkpoint.

    Raises InvalidValueError for unknown names and windows outside 1 to 256.
    """

    checkpoint: str = "fp32"
    read: str | None = None
    window: int = 16
    scale_rule: str = "amax"
    rotation: str | None = None
    stochastic: bool = False
    seed: int = 0
    balanced: bool = False

    def __post_init__(self) -> None:
        for kind, given in (("checkpoint format", self.checkpoint), ("read format", self.read)):
            if given is not None and given not in FORMATS:
                raise unknown_name(kind, given, FORMATS)
        if self.scale_rule not in SCALE_RULES:
            raise unknown_name("scale rule", self.scale_rule, SCALE_RULES)
        if self.rotation is not None and self.rotation not in ROTATIONS:
            raise unknown_name("rotation", self.rotation, ROTATIONS)
        if isinstance(self.window, bool) or not isinstance(self.window, int) or not 1 <= self.window <= MAX_WINDOW:
            raise InvalidValueError(f"window is {self.window!r}; it must be a whole number from 1 to {MAX_WINDOW}")
        scaled = [f for f in (FORMATS[n] for n in (self.checkpoint, self.read) if n) if f.scaling is not None]
        if self.scale_rule != "amax" and not any(self.scale_rule in f.scale_rules for f in scaled):
            raise InvalidValueError(
                f"scale rule {self.scale_rule!r} means nothing for {self.read or self.checkpoint}; it exists for "
                + ", ".join(n for n, f in FORMATS.items() if f.scaling is not None and self.scale_rule in f.scale_rules)
            )
        if self.rotation is not None and not scaled:
            raise InvalidValueError(
                f"rotation {self.rotation!r} changes nothing for {self.read or self.checkpoint}, which has no scales"
            )
        if self.balanced and (self.read is None or FORMATS[self.read].scaling is None):
            raise InvalidValueError(
                "column scales are of a read copy that has scales, and here outputs read "
                f"{self.read or self.checkpoint}; leave balanced out"
            )
        if self.balanced and FORMATS[self.checkpoint].scaling is not None:
            raise InvalidValueError(
                f"column scales go with a checkpoint without scales, not with {self.checkpoint}; leave balanced out"
            )
        if self.stochastic and not FORMATS[self.checkpoint].stochastic:
            able = ", ".join(n for n, f in FORMATS.items() if f.stochastic)
            raise InvalidValueError(f"no stochastic rounding for a {self.checkpoint} checkpoint; it exists for {able}")

    @property
    def exact(self) -> bool:
        """Whether both recurrence and outputs are FP32, so that any window gives the same result."""
        return self.checkpoint == "fp32" and self.read in (None, "fp32")

    @property
    def bytes_resident(self) -> float:
        """Bytes kept per state element: checkpoint plus copy, without the ring."""
        return FORMATS[self.checkpoint].bytes_per_element + self._copy_bytes

    @property
    def bytes_moved(self) -> float:
        """State bytes moved per element and token, amortised over a window, without the ring.

        ((L−1)·read + flush)/L, where a flush reads and writes the checkpoint and writes the copy.
        """
        checkpoint = FORMATS[self.checkpoint].bytes_per_element
        read = checkpoint if self.read is None else self._copy_bytes
        return ((self.window - 1) * read + 2 * checkpoint + self._copy_bytes) / self.window

    def how(self, format: str, columns: Tensor | None = None) -> How:
        """Format, scale rule, rotation and column scales with which a part of the state is encoded.

        Formats without scales are not rotated, and a format that lacks the rule keeps to ``amax``. ``columns``: the
        layer's column scales [H, K], which a balanced policy needs and others ignore.

        Raises InvalidValueError where they are needed and not given.
        """
        fmt = FORMATS[format]
        rule = self.scale_rule if self.scale_rule in fmt.scale_rules else "amax"
        if fmt.scaling is None:
            return format, rule, None, None
        if self.balanced and columns is None:
            raise InvalidValueError(f"policy {self.name} needs column scales of the layer; {CALIBRATE}")
        return format, rule, self.rotation, columns if self.balanced else None

    @property
    def _copy_bytes(self) -> float:
        return 0.0 if self.read is None else FORMATS[self.read].bytes_per_element

    @property
    def name(self) -> str:
        """The arm name that ``parse_arm`` reads back to this policy (but for the seed)."""
        if self == StatePolicy(window=1, seed=self.seed):
            return "reference"
        if self.read is not None:
            kind = "decoupled" if self.checkpoint == "fp32" else f"decoupled-{self.checkpoint}"
            head, default_window = f"{kind}-{self.read}", 16
        elif FORMATS[self.checkpoint].block or FORMATS[self.checkpoint].bits < 16 or self.window == 1:
            head, default_window = f"coupled-{self.checkpoint}", 1
        else:
            head, default_window = f"replay-{self.checkpoint}", 16
        parts = [head]
        if self.window != default_window:
            parts.append(f"w{self.window}")
        if self.scale_rule != "amax":
            parts.append(self.scale_rule)
        if self.balanced:
            parts.append("balanced")
        if self.rotation is not None:
            parts.append(self.rotation)
        if self.stochastic:
            parts.append("sr")
        return "-".join(parts)


REFERENCE_ARMS = ("reference", "reference-again")

DEFAULT_ARMS = (
    "reference",
    "reference-again",
    "replay-fp32",
    "coupled-nvfp4",
    "coupled-nvfp4-w16",
    "coupled-fp8",
    "decoupled-nvfp4",
    "decoupled-fp8",
)

FORMAT_ALIASES = {"fp8": "fp8_e4m3"}

ARM_GRAMMAR = (
    "reference, reference-again, replay-FORMAT, coupled-FORMAT, decoupled-FORMAT, "
    "decoupled-CHECKPOINT-FORMAT; then any of -wN (window), a scale rule, -balanced (column scales), a rotation, "
    "-sr (stochastic rounding)"
)


def parse_arm(name: str, *, window: int = 16, seed: int = 0) -> StatePolicy:
    """The policy that an arm name spells, such as ``decoupled-nvfp4-w32-four_over_six``.

    ``window`` is that of replay and decoupled arms whose name has no ``-wN``; coupled arms round every token
    unless it has one. Raises InvalidValueError naming the part that is not understood.
    """
    if name in REFERENCE_ARMS:
        return StatePolicy(window=1, seed=seed)
    kind, *parts = name.split("-")
    if kind not in ("replay", "coupled", "decoupled"):
        raise unknown_name(
            "arm", name, [*DEFAULT_ARMS, *(f"{k}-{f}" for k in ("coupled", "decoupled") for f in FORMATS)]
        )
    formats: list[str] = []
    while parts and (fmt := FORMAT_ALIASES.get(parts[0], parts[0])) in FORMATS and len(formats) < 2:
        formats.append(fmt)
        parts.pop(0)
    if not formats or (len(formats) == 2 and kind != "decoupled"):
        raise unknown_name(f"format in arm {name!r}:", parts[0] if parts else "", FORMATS)
    options: dict = {"window": 1 if kind == "coupled" else window, "seed": seed}
    for part in parts:
        if re.fullmatch(r"w\d+", part):
            options["window"] = int(part[1:])
        elif part in SCALE_RULES:
            options["scale_rule"] = part
        elif part in ROTATIONS:
            options["rotation"] = part
        elif part == "balanced":
            options["balanced"] = True
        elif part == "sr":
            options["stochastic"] = True
        else:
            known = ["w16", "balanced", "sr", *SCALE_RULES, *ROTATIONS]
            raise unknown_name(f"part of arm {name!r}:", part, known)
    if kind == "decoupled":
        checkpoint = formats[0] if len(formats) == 2 else "fp32"
        return StatePolicy(checkpoint=checkpoint, read=formats[-1], **options)
    return StatePolicy(checkpoint=formats[0], **options)
