"""What the hardening tests share: states and inputs by family, and hypothesis without chance."""

import torch
from hypothesis import HealthCheck, settings
from recurrence import SPECS, random_inputs, recurrence

from quantize_state.quant.policy import parse_arm
from quantize_state.quant.state import DecodeState

LAYER = "layers.3"


def bounded(examples):
    """Settings of a property: the same examples in every run, so that a failure is one for everybody."""
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def fresh(family, arm, slots, dtype=torch.float32):
    spec, rate = SPECS[family]
    return DecodeState.allocate(spec, parse_arm(arm), slots, layer=LAYER, decay_rate=rate, dtype=dtype)


def inputs_for(family, rows, tokens, seed=0):
    return random_inputs(SPECS[family][0], rows, tokens, seed, dtype=torch.float32)


def truth(family, inputs, start=None):
    """Outputs and states of the float64 recurrence, from zeros unless ``start`` is given."""
    spec, rate = SPECS[family]
    if start is None:
        start = torch.zeros(inputs.rows, spec.heads, spec.value_dim, spec.key_dim, dtype=torch.float64)
    return recurrence(spec, inputs, start.double(), rate)


def error(ours, exact):
    """‖ours − exact‖ / ‖exact‖; not a number where either is not finite."""
    return float((ours.double() - exact.double()).norm() / exact.double().norm())


def parts(state):
    """Every tensor of a state by name, as bytes, so that equality is equality of bits."""
    found = {f"ring.{n}": t for n, t in state.ring.items()} | {"cursor": state.cursor, "position": state.position}
    for part, encoded in (("checkpoint", state.checkpoint), ("copy", state.copy)):
        if encoded is not None:
            found |= {f"{part}.{n}": t for n, t in encoded.tensors().items()}
    return {n: t.contiguous().view(torch.uint8) for n, t in found.items()}


def same_state(a, b):
    return all(torch.equal(t, parts(b)[n]) for n, t in parts(a).items())
