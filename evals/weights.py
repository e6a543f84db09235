"""Quantised weights beside quantised states: which arms separate the two, and the model that they run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..quant.errors import unknown_name
from ..quant.policy import StatePolicy

if TYPE_CHECKING:  # it needs torch, and the names below are chosen without
    from .measure import ArmPolicy

WEIGHT_FORMATS = ("nvfp4", "fp8", "int8")

WEIGHT_ARMS = ("reference", "reference-again", "decoupled-nvfp4", "coupled-nvfp4")
"""State arms that are run where weights are quantised and no arms are named: each runs twice."""


@dataclass(frozen=True)
class Setup:
    """What an arm runs: a policy for the states, and the format of the weights (None: as they are)."""

    policy: ArmPolicy
    weights: str | None = None

    @property
    def exact_state(self) -> bool:
        """Whether the states round nothing, so that only the weights can make a difference."""
        return self.policy is None or (isinstance(self.policy, StatePolicy) and self.policy.exact)


def setups(policies: Mapping[str, ArmPolicy], weights: str | None, seed: int) -> dict[str, Setup]:
    """Every arm as it is and, with ``weights``, the weights alone and every arm whose states round on top of them.

    Raises InvalidValueError for a weight format that is not known.
    """
    alone = {name: Setup(policy) for name, policy in policies.items()}
    if weights is None:
        return alone
    if weights not in WEIGHT_FORMATS:
        raise unknown_name("weight format", weights, WEIGHT_FORMATS)
    only = f"weights-{weights}"
    both = {f"{only}+{name}": Setup(s.policy, weights) for name, s in alone.items() if not s.exact_state}
    return alone | {only: Setup(StatePolicy(window=1, seed=seed), weights)} | both


def quantized(model: Any, weights: str) -> Any:
    """A copy of ``model`` with its weights in ``weights``, by ModelOpt's preset. Raises where ModelOpt is missing."""
    from ..integrations.modelopt import quantize_weights

    return quantize_weights(model, weights)
