"""What the kernels are compiled for, and Triton itself where it is installed.

Every kernel module takes ``triton`` and ``tl`` from here. Where Triton is missing they are stand-ins that let the
module load, so that quant and the references run on any machine; ``unavailable()`` says why no kernel can run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError as error:  # a CPU-only installation
    IMPORT_ERROR: str | None = f"Triton does not load: {error}"

    class _Missing:
        """Takes the place of triton and triton.language: decorators return their function, the rest is never run."""

        def __getattr__(self, name: str) -> Any:
            return lambda value=None, **_: value if value is not None else lambda function: function

    triton = tl = _Missing()  # type: ignore[assignment]
else:
    IMPORT_ERROR = None

__all__ = ["BLACKWELL", "HOPPER", "INTERPRET", "PORTABLE", "TARGETS", "Target", "tl", "triton", "unavailable"]

PORTABLE, HOPPER, BLACKWELL = 0, 90, 100
"""Values of the constexpr ISA: plain Triton (the interpreter too); f16x2 arithmetic and E4M3 conversions in PTX;
the same with conversions from and to E2M1 in hardware."""

INTERPRET = IMPORT_ERROR is None and bool(triton.knobs.runtime.interpret)
"""Whether kernels run on numpy (TRITON_INTERPRET=1 when Triton was first imported)."""


@dataclass(frozen=True)
class Target:
    """An architecture to compile for: ``name`` as ptxas spells it, ``capability`` as Triton does."""

    name: str
    capability: int
    isa: int
    title: str


TARGETS: dict[str, Target] = {
    t.name: t
    for t in (
        Target("90a", 90, HOPPER, "H100, H200"),
        Target("100a", 100, BLACKWELL, "B200"),
        Target("103a", 103, BLACKWELL, "B300"),
        Target("120a", 120, BLACKWELL, "RTX PRO 6000 Blackwell, RTX 50"),
    )
}


def unavailable(device: torch.device | None = None) -> str | None:
    """Why kernels cannot run on ``device`` (or at all, for compiling), or None."""
    if IMPORT_ERROR is not None:
        return IMPORT_ERROR
    if device is not None and device.type != "cuda" and not INTERPRET:
        return f"kernels need a CUDA device, not {device.type} (or TRITON_INTERPRET=1, which runs them on numpy)"
    return None
