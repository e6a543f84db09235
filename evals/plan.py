"""Choosing a read format for each layer: the fewest bytes moved for a divergence, or the least divergence for bytes.

1. One FP32 pass over a text predicts every layer's output error e under every candidate (``error_law``).
2. Each layer runs alone with one candidate, the probe, and its divergence is measured. Divergence is quadratic in a
   small error, so KL(layer, candidate) = KL(layer, probe) · e(candidate)² / e(probe)².
3. Errors of different layers are independent draws, so divergences add up; an exact dynamic programme chooses.
4. The recipe and every candidate, uniformly applied, are measured on another text. Only that decides.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from ..quant.columns import ColumnScales
from ..quant.errors import InvalidValueError, QuantizeStateError
from ..quant.policy import StatePolicy, parse_arm
from ..quant.recipe import Recipe
from . import provenance
from .knapsack import choose
from .records import dump, load, write_atomic
from .result import Arm, Model, Provenance, Result, Text
from .verdict import overflow_text

if TYPE_CHECKING:
    from .error_law import PredictedError

SCHEMA: Final = "quantize-state/plan/1"

CANDIDATES = (
    "nvfp4-mse", "nvfp4-mse-hadamard16", "nvfp4-four_over_six-balanced-hadamard", "fp8", "int8-hadamard", "mxfp8",
    "bf16", "fp32",
)  # fmt: skip
"""Read formats with scale rule and rotation, as in arm names. All windows are equal: bytes of the ring are not counted,
so longer ones would look cheaper than they are. ``fp32`` reads the checkpoint itself."""


@dataclass(frozen=True)
class LayerChoice:
    """``expected`` maps candidates to expected KL, nats per token; ``error`` to predicted output errors,
    the root mean square over heads of their relative ones."""

    name: str
    family: str
    elements: int
    probe_kl: float
    error: dict[str, float]
    expected: dict[str, float]
    measured: dict[str, float]
    chosen: str


@dataclass(frozen=True)
class Checked:
    """A uniform candidate or the recipe: what was expected of it, and what was measured on the other text."""

    name: str
    bytes_moved: float
    expected: float
    measured: float
    ci95: tuple[float, float] | None


@dataclass(frozen=True)
class Plan:
    """What ``quantize-state plan`` found. Bytes are moved per state element and step, without the ring.

    ``best_uniform`` names the uniform candidate with the least measured divergence among those that move no more bytes
    than the recipe, None where all move more. ``per_head`` is the expected divergence were formats chosen per head at
    the same bytes. ``rank_correlation`` (Spearman) is that of predicted against measured divergence of single layers
    under all candidates, None where only the probe was measured.
    """

    model: Model
    budget: dict[str, float]
    window: int
    probe: str
    layers: list[LayerChoice]
    recipe: str
    checked: Checked
    uniform: list[Checked]
    best_uniform: str | None
    per_head: float | None
    rank_correlation: float | None
    measured_on: Text
    verified_on: Text
    provenance: Provenance
    kind: Literal["plan"] = "plan"
    schema: Literal["quantize-state/plan/1"] = SCHEMA

    @property
    def within_budget(self) -> bool:
        """Whether the measured divergence, or the bytes, meet the budget."""
        if "kl" in self.budget:
            return self.checked.measured <= self.budget["kl"]
        return self.checked.bytes_moved <= self.budget["bytes"] * (1 + 1e-9)

    @property
    def beats_uniform(self) -> bool | None:
        """Whether the recipe diverges less than the best uniform candidate at no more bytes; None without one."""
        best = next((u for u in self.uniform if u.name == self.best_uniform), None)
        return None if best is None else self.checked.measured < best.measured

    @classmethod
    def read(cls, path: str | Path) -> Plan:
        return load(cls, Path(path), SCHEMA)


def plan(
    model: Any,
    *,
    out: str | os.PathLike[str],
    budget_kl: float | None = None,
    budget_bytes: float | None = None,
    candidate_names: Sequence[str] = CANDIDATES,
    probe: str | None = None,
    every_format: bool = False,
    window: int = 16,
    text: str = "pydoc",
    tokens: int = 4096,
    sequences: int = 1,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    device_map: str | None = None,
    batch: int = 1,
    together: int = 4,
    trust_remote_code: bool = False,
    progress: Any = None,
) -> Plan:
    """Find, verify and write a recipe: ``out`` (YAML), and beside it a folder with plan.json and both measurements.

    Give one budget: ``budget_kl`` (nats per token, on average) or ``budget_bytes`` (moved per state element and step).
    Column scales of balanced candidates are measured on another text, and lie beside ``out`` too. ``every_format``
    measures each layer under each candidate in place of the probe alone. The two halves of ``text`` serve measuring and
    verifying. A candidate that overflows is out. An interrupted call goes on where it stopped. Raises
    QuantizeStateError, also where the probe or the recipe overflows.
    """
    from ..adapters import attach
    from .calibrate import calibrate, other_text
    from .error_law import predict
    from .evaluate import evaluate, token_ids
    from .models import load_model
    from .text import load_text, part_of

    policies = candidates(candidate_names, window)
    probe = probe or next(iter(policies))
    if probe not in policies or policies[probe].exact:
        raise InvalidValueError(f"the probe {probe!r} must be one of the rounding candidates {', '.join(policies)}")
    if (budget_kl is None) == (budget_bytes is None):
        raise InvalidValueError("give --budget-kl or --budget-bytes, one of them")
    budget = {"kl": budget_kl} if budget_kl is not None else {"bytes": float(budget_bytes or 0.0)}
    if min(budget.values()) <= 0:  # type: ignore[type-var]
        raise InvalidValueError(f"the budget is {next(iter(budget.values()))}; it must be above 0")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise InvalidValueError("plan runs in one process: start it without torchrun (--device-map auto uses all GPUs)")
    recipe_path = Path(out)
    folder = folder_of(recipe_path)
    if recipe_path.exists():
        raise QuantizeStateError(f"{recipe_path} exists and is never overwritten; choose another --out")
    started = provenance.now()
    halves = [part_of(load_text(text), i, 2) for i in (0, 1)]
    loaded = load_model(
        os.fspath(model), device=device, dtype=dtype, device_map=device_map, trust_remote_code=trust_remote_code
    )
    options: dict[str, Any] = {
        "tokens": tokens, "sequences": sequences, "window": window, "seed": seed, "batch": batch,
        "together": together, "progress": progress,
    }  # fmt: skip
    rounding = {name: policy for name, policy in policies.items() if not policy.exact}
    columns = None
    if any(policy.balanced for policy in policies.values()):
        kept = recipe_path.with_suffix(".columns.safetensors")  # beside the recipe, which names it
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            calibrate(loaded, text=other_text(halves[0]), seed=seed, progress=progress).write(kept)
        columns = options["columns"] = ColumnScales.read(kept)
    with attach(loaded.model, "reference", path="replay", columns=columns) as handle:
        ids = token_ids(loaded, halves[0], tokens + 1, sequences, seed)
        predicted = predict(handle, ids[:, :-1], rounding, progress=progress)
        families = {layer.name: layer.family for layer in handle.layers}
    exact = StatePolicy(window=window)
    alone: dict[str, Recipe] = {
        f"{candidate} in layer {i}": Recipe(exact, {name: rounding[candidate]})
        for candidate in (rounding if every_format else (probe,))
        for i, name in enumerate(families)
    }
    first = evaluate(loaded, alone, text=halves[0], out=folder / "measured", **options)
    lost = {arm.name.rpartition(" in layer ")[0]: arm for arm in first.arms if arm.overflows}
    if probe in lost:
        raise QuantizeStateError(
            f"the probe {lost[probe].name} {overflow_text(lost[probe])}, which gives the other formats no measure; "
            "choose another --probe"
        )
    policies = {name: policy for name, policy in policies.items() if name not in lost}
    rounding = {name: policy for name, policy in rounding.items() if name not in lost}
    predicted = {name: errors for name, errors in predicted.items() if name not in lost}
    layers = _layers(families, policies, predicted, probe, first)
    chosen = _chosen(layers, policies, budget)
    layers = [replace(layer, chosen=name) for layer, name in zip(layers, chosen, strict=True)]
    recipe = _recipe(list(families), chosen, policies)
    if recipe.balanced:
        recipe = replace(recipe, columns=columns)
    everywhere: dict[str, StatePolicy | Recipe] = {f"{name} everywhere": policy for name, policy in rounding.items()}
    label = f"recipe for {next(iter(budget))} {next(iter(budget.values())):g}"
    second = evaluate(loaded, everywhere | {label: recipe}, text=halves[1], out=folder / "verified", **options)
    if second.arm(label).overflows:
        raise QuantizeStateError(
            f"the {label} {overflow_text(second.arm(label))}, so none is written; leave formats out with --formats"
        )
    expected = {f"{name} everywhere": math.fsum(x.expected[name] for x in layers) for name in rounding}
    uniform = [
        _checked(second.arm(name), name.removesuffix(" everywhere"), e)
        for name, e in expected.items()
        if not second.arm(name).overflows
    ]
    checked = _checked(second.arm(label), "recipe", math.fsum(x.expected[x.chosen] for x in layers))
    cheaper = [u for u in uniform if u.bytes_moved <= checked.bytes_moved * (1 + 1e-6)]
    found = Plan(
        model=first.model,
        budget=budget,
        window=window,
        probe=probe,
        layers=layers,
        recipe=recipe.to_yaml(),
        checked=checked,
        uniform=sorted(uniform, key=lambda u: u.measured),
        best_uniform=min(cheaper, key=lambda u: u.measured).name if cheaper else None,
        per_head=_per_head(layers, policies, predicted, checked.bytes_moved),
        rank_correlation=_rank_correlation(layers) if every_format else None,
        measured_on=first.text,
        verified_on=second.text,
        provenance=replace(second.provenance, started=started, finished=provenance.now()),
    )
    write_atomic(folder / f"{label.replace(' ', '-')}.json", dump(found), overwrite=True)
    write_atomic(recipe_path, found.recipe, overwrite=False)
    return found


def folder_of(recipe: Path) -> Path:
    """The folder beside a recipe that holds its plan and measurements."""
    return recipe.with_name(recipe.stem + ".plan")


def candidates(names: Sequence[str], window: int) -> dict[str, StatePolicy]:
    """Policies by candidate name; ``fp32`` has no copy, since reading the checkpoint moves as many bytes."""
    if not names:
        raise InvalidValueError(f"no read formats; the default ones are {', '.join(CANDIDATES)}")
    return {
        name: StatePolicy(window=window) if name == "fp32" else parse_arm(f"decoupled-{name}", window=window)
        for name in dict.fromkeys(names)
    }


def _layers(
    families: Mapping[str, str],
    policies: Mapping[str, StatePolicy],
    predicted: Mapping[str, Mapping[str, PredictedError]],
    probe: str,
    result: Result,
) -> list[LayerChoice]:
    arms = {arm.name: arm.kl.mean for arm in result.arms}
    layers = []
    for i, (name, family) in enumerate(families.items()):
        error = {candidate: predicted[candidate][name].normalised for candidate in predicted}
        kl = arms[f"{probe} in layer {i}"]
        per_square = kl / error[probe] ** 2 if error[probe] else 0.0
        expected = {c: per_square * error[c] ** 2 if c in error else 0.0 for c in policies}
        measured = {c: arms[arm] for c in error if (arm := f"{c} in layer {i}") in arms}
        elements = predicted[probe][name].elements
        layers.append(LayerChoice(name, family, elements, kl, error, expected, measured, chosen=probe))
    return layers


def _chosen(
    layers: Sequence[LayerChoice], policies: Mapping[str, StatePolicy], budget: Mapping[str, float]
) -> list[str]:
    total = sum(layer.elements for layer in layers)
    items = [
        [(layer.elements / total * policies[c].bytes_moved, layer.expected[c]) for c in policies] for layer in layers
    ]
    picked = choose(items, max_loss=budget.get("kl"), max_cost=budget.get("bytes"))
    return [list(policies)[i] for i in picked]


def _recipe(names: Sequence[str], chosen: Sequence[str], policies: Mapping[str, StatePolicy]) -> Recipe:
    """The commonest policy as the default, and what differs from it."""
    common = Counter(chosen).most_common(1)[0][0]
    return Recipe(policies[common], {n: policies[c] for n, c in zip(names, chosen, strict=True) if c != common})


def _checked(arm: Arm, name: str, expected: float) -> Checked:
    return Checked(name, arm.bytes_per_element.moved_per_step, expected, arm.kl.mean, arm.kl.ci95)


def _per_head(
    layers: Sequence[LayerChoice],
    policies: Mapping[str, StatePolicy],
    predicted: Mapping[str, Mapping[str, PredictedError]],
    max_bytes: float,
) -> float | None:
    """The expected divergence were every head to have a format of its own, at no more bytes than ``max_bytes``.

    A head's share of its layer's squared relative errors is its share of the divergence.
    """
    total = sum(layer.elements for layer in layers)
    items = []
    for layer in layers:
        probe = {c: predicted[c][layer.name] for c in predicted}
        heads = len(next(iter(probe.values())).error)
        for h in range(heads):
            share = {c: float((p.error[h] / p.exact[h]) / (heads * p.normalised**2)) for c, p in probe.items()}
            items.append(
                [
                    (layer.elements / heads / total * policies[c].bytes_moved, layer.expected[c] * share.get(c, 0.0))
                    for c in policies
                ]
            )
    picked = choose(items, max_cost=max_bytes * (1 + 1e-6))
    return math.fsum(options[i][1] for options, i in zip(items, picked, strict=True))


def _rank_correlation(layers: Sequence[LayerChoice]) -> float | None:
    """Spearman's, of expected against measured divergence over single layers and candidates, the probe left out.

    The probe's own expectation is its measurement.
    """
    import numpy as np

    pairs = [(x.expected[c], m) for x in layers for c, m in x.measured.items() if m != x.probe_kl]
    if len(pairs) < 3:
        return None
    ranks = [np.argsort(np.argsort(column)) for column in zip(*pairs, strict=True)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
