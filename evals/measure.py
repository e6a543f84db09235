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

from ..quant.errors import FileFormatError, NonFiniteLogitsError, NonFiniteStateError
from ..quant.policy import StatePolicy
from ..quant.recipe import Recipe
from ..quant.state import DecodeState
from .injected import Injected
from .layer_errors import LayerErrorMeter
from .metrics import KLMeter
from .records import Mismatch, from_plain, to_plain, write_atomic_bytes
from .result import Overflow
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
    ``overflows`` are the documents that end early.
    """

    kl: KLMeter
    layers: LayerErrorMeter
    added: KLMeter
    resident: float = 0.0
    moved: float = 0.0
    seconds: float = 0.0
    documents: list[int] = field(default_factory=list)
    overflows: list[Overflow] = field(default_factory=list)

    def add(self, other: Measured) -> None:
        """Take in what was measured on other documents."""
        self.kl.add(other.kl)
        self.layers.add(other.layers)
        self.added.add(other.added)
        self.resident, self.moved = other.resident, other.moved
        self.seconds += other.seconds
        self.documents += other.documents
        self.overflows += other.overflows

    def save(self, path: Path, fingerprint: str) -> None:
        """Write it atomically, for ``load``."""
        import io

        facts = {
            "fingerprint": fingerprint,
            "resident": self.resident,
            "moved": self.moved,
            "seconds": self.seconds,
            "documents": self.documents,
            "overflows": to_plain(self.overflows),
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
                measured.overflows = from_plain(list[Overflow], facts.get("overflows", []))
                unmeasured = {i for overflow in measured.overflows if not overflow.tokens for i in overflow.documents}
                for i in facts["documents"]:
                    if i in unmeasured:
                        continue
                    measured.kl.add_table(i, stored[f"document {i}"])
                    if (key := f"added, document {i}") in stored:
                        measured.added.add_table(i, stored[key])
            measured.layers.add_sums(facts["layers"])
            measured.resident, measured.moved = facts["resident"], facts["moved"]
            measured.seconds, measured.documents = facts["seconds"], facts["documents"]
        except (OSError, ValueError, KeyError, EOFError, Mismatch) as error:
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

    An arm whose states round and overflow, or whose logits do, is left where it is, and its ``overflows`` say so; the
    others go on. A batch stops as a whole. NonFiniteStateError is raised where nothing that rounds is to blame: for the
    reference, other exact arms, and exact states on quantised weights.
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
    documents, running = list(range(first, first + ids.shape[0])), list(setups)
    shown = ", ".join(setups) if len(setups) == 1 else f"{len(setups)} arms"
    for start, inputs, targets in chunks(ids[:, prompt:], vocabulary=handle.model.config.get_text_config().vocab_size):
        expected = reference.advance(inputs)
        weighted = None if base is None else base.advance(inputs).float()
        stop = start + inputs.shape[1]
        for name in list(running):
            measured, logits, before = found[name], expected, found[name].layers.snapshot()
            try:
                if name in rollouts:
                    shadow = shadows.get(name)
                    logits = rollouts[name].advance(inputs, observer=shadow)
                    if shadow is not None:
                        shadow.end_of_chunk(stop - 1)
                measured.kl.update(expected.float(), logits.float(), targets, start, sequence=first)
            except (NonFiniteStateError, NonFiniteLogitsError) as error:
                if setups[name].exact_state:
                    raise
                layer = error.layer if isinstance(error, NonFiniteStateError) else None
                measured.overflows = [Overflow(documents, start, layer, str(error))]
                measured.layers = before
                running.remove(name)
                del rollouts[name]
                shadows.pop(name, None)
                continue
            if weighted is not None and name in on_both:
                measured.added.update(weighted, logits.float(), targets, start, sequence=first)
        if progress is not None:
            progress(shown, stop, total)
        if not running:
            break
    states = handle.states(reference.cache)
    for name, measured in found.items():
        arm = setups[name].policy
        handles[name].use(policy_of(arm))
        measured.resident, measured.moved = (
            (arm.resident, arm.moved) if isinstance(arm, Injected) else _bytes(states, handles[name].policies)
        )
        measured.seconds = (time.perf_counter() - began) / len(setups)
        measured.documents = list(documents)
    return found


def _bytes(states: Mapping[str, DecodeState], policies: Mapping[str, StatePolicy | None]) -> tuple[float, float]:
    """Bytes resident and moved under each layer's policy, means over the elements of all layers' ``states``.

    An untouched model reads and writes FP32 at every token.
    """
    untouched = StatePolicy(window=1)
    followed = [(state.spec.elements, policies[name] or untouched) for name, state in states.items()]
    elements = sum(count for count, _ in followed)
    resident = sum(count * policy.bytes_resident for count, policy in followed)
    moved = sum(count * policy.bytes_moved for count, policy in followed)
    return resident / elements, moved / elements
