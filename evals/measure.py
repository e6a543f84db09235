"""One pass over some documents: several arms beside one reference, and what is kept of it until all are done."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..quant.errors import FileFormatError
from ..quant.policy import StatePolicy
from ..quant.recipe import Recipe
from ..quant.state import DecodeState
from .injected import Injected
from .layer_errors import LayerErrorMeter
from .metrics import KLMeter
from .records import write_atomic_bytes
from .rollout import Progress, Rollout, chunks
from .shadow import ExactShadow, InjectedShadow
from .weights import Setup

ArmPolicy = StatePolicy | Recipe | Injected | None
"""None: the untouched model."""


def policy_of(arm: ArmPolicy) -> StatePolicy | Recipe | None:
    """What the model's layers follow under an arm: an injected one changes what the exact recurrence gives."""
    return StatePolicy(window=1) if isinstance(arm, Injected) else arm


@dataclass
class Measured:
    """What one arm's passes over some documents leave: numbers per token, sums per layer, bytes per state element.

    ``added`` is the divergence from quantised weights with exact states, empty where the arm has not both.
    """

    kl: KLMeter
    layers: LayerErrorMeter
    added: KLMeter
    resident: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    documents: list[int] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        """Take in what was measured on other documents."""
        self.kl.add(other.kl)
        self.layers.add(other.layers)
        self.added.add(other.added)
        self.resident, self.moved = other.resident, other.moved
        self.seconds += other.seconds
        self.documents += other.documents

    def save(self, path: Path, fingerprint: str) -> None:
        """Write it atomically, for ``load``."""
        import io

        facts = {
            "fingerprint": fingerprint,
            "resident": self.resident,
            "moved": self.moved,
            "seconds": self.seconds,
            "documents": self.documents,
            "layers": self.layers.sums(),
        }
        buffer = io.BytesIO()
        tables = {f"document {i}": table for i, table in self.kl.tables().items()}
        tables |= {f"added, document {i}": table for i, table in self.added.tables().items()}
        np.savez(buffer, facts=np.array(json.dumps(facts)), **tables)  # type: ignore[arg-type]
        write_atomic_bytes(path, buffer.getvalue(), overwrite=True)

    @classmethod
    def load(cls, path: Path, fingerprint: str, window: int, seed: int) -> Measured:
        """Read what ``save`` wrote. Raises FileFormatError where it is damaged or of another run."""
        measured = cls.empty(window, seed)
        try:
            with np.load(path, allow_pickle=False) as stored:
                facts = json.loads(str(stored["facts"]))
                for i in facts["documents"]:
                    measured.kl.add_table(i, stored[f"document {i}"])
                    if (key := f"added, document {i}") in stored:
                        measured.added.add_table(i, stored[key])
            measured.layers.add_sums(facts["layers"])
            measured.resident, measured.moved = facts["resident"], facts["moved"]
            measured.seconds, measured.documents = facts["seconds"], facts["documents"]
        except (OSError, ValueError, KeyError, EOFError) as error:
            raise FileFormatError(f"{path} is damaged ({error}); delete it and it is measured again") from error
        if facts["fingerprint"] != fingerprint:
            raise FileFormatError(f"{path} belongs to another run; delete it and it is measured again")
        return measured

    @classmethod
    def empty(cls, window: int, seed: int) -> Measured:
        return cls(KLMeter(window, seed=seed), LayerErrorMeter(window, window=window), KLMeter(window, seed=seed))


def measure(
    handle: Any,
    setups: Mapping[str, Setup],
    ids: Tensor,
    *,
    quantized: Any = None,
    prompt: int = 0,
    first: int = 0,
    engine: str = "scan",
    window: int = 16,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Measured]:
    """The arms beside one reference over ``ids`` [B, prompt + N + 1], documents ``first`` to ``first`` + B − 1.

    ``quantized`` is the handle of the model with quantised weights, on which arms run that ask for these; what their
    states add is measured beside those weights with exact states. The prompt is exact and not evaluated. An arm's
    numbers do not depend on which others run beside it, but for ``seconds``, which are those of the pass divided by
    its arms.
    """
    began = time.perf_counter()
    exact = StatePolicy(window=1, seed=seed)
    reference = Rollout(handle, exact, engine)
    found = {name: Measured.empty(window, seed) for name in setups}
    handles = {name: handle if setup.weights is None else quantized for name, setup in setups.items()}
    rollouts = {
        name: Rollout(handles[name], policy_of(setup.policy), engine)
        for name, setup in setups.items()
        if name != "reference"
    }
    on_both = [name for name, setup in setups.items() if setup.weights is not None and not setup.exact_state]
    base = Rollout(quantized, exact, engine) if on_both else None
    shadows: dict[str, ExactShadow | InjectedShadow] = {}
    for name in rollouts:
        arm, meter = setups[name].policy, found[name].layers
        if isinstance(arm, Injected):
            shadows[name] = InjectedShadow(arm.observer(prompt), meter, prompt)
        elif arm is not None:  # the untouched model keeps plain tensors, which nobody observes
            shadows[name] = ExactShadow(meter, prompt)
    if prompt:
        reference.prefill(ids[:, :prompt])
        for name, rollout in rollouts.items():
            rollout.prefill(ids[:, :prompt], observer=shadows.get(name))
        if base is not None:
            base.prefill(ids[:, :prompt])
    total = ids.shape[1] - 1 - prompt
    shown = ", ".join(setups) if len(setups) == 1 else f"{len(setups)} arms"
    for start, inputs, targets in chunks(ids[:, prompt:], vocabulary=handle.model.config.get_text_config().vocab_size):
        expected = reference.advance(inputs)
        weighted = None if base is None else base.advance(inputs).float()
        stop = start + inputs.shape[1]
        for name in setups:
            logits = expected
            if name in rollouts:
                shadow = shadows.get(name)
                logits = rollouts[name].advance(inputs, observer=shadow)
                if shadow is not None:
                    shadow.end_of_chunk(stop - 1)
            found[name].kl.update(expected.float(), logits.float(), targets, start, sequence=first)
            if weighted is not None and name in on_both:
                found[name].added.update(weighted, logits.float(), targets, start, sequence=first)
        if progress is not None:
            progress(shown, stop, total)
    for name, measured in found.items():
        states = handles[name].states(rollouts.get(name, reference).cache)
        arm = setups[name].policy
        measured.resident, measured.moved = (arm.resident, arm.moved) if isinstance(arm, Injected) else _bytes(states)
        measured.seconds = (time.perf_counter() - began) / len(setups)
        measured.documents = list(range(first, first + ids.shape[0]))
    return found


def _bytes(states: Mapping[str, DecodeState]) -> tuple[float, float]:
    """Bytes resident and moved, means over the state elements of all layers.

    An untouched model reads and writes FP32 at every token.
    """
    elements = sum(state.spec.elements for state in states.values())
    if not elements:
        untouched = StatePolicy(window=1)
        return untouched.bytes_resident, untouched.bytes_moved
    resident = sum(state.spec.elements * state.policy.bytes_resident for state in states.values())
    moved = sum(state.spec.elements * state.policy.bytes_moved for state in states.values())
    return resident / elements, moved / elements
