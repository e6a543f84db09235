"""Decode of thousands of tokens by the kernels, beside the recurrence in float64: what rounding adds up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from . import sequence
from .cases import random_state, random_tokens
from .checks import Check, relative
from .inputs import TokenInputs
from .standard.reference import standard

TOKENS = 10_000
SLOW = 0.01
"""Half of the heads forget this much more slowly than ``random_tokens`` makes them: over hundreds of tokens."""
DRIFT = 2e-6
"""Relative error of the state and of outputs from it: the torch reference in FP32 has 1.6e-7 to 4.7e-7 after 2,000 such
tokens. A decay that is off by 2**-22 at every flush, always to the same side, has 2e-5."""


def check_endurance(
    spec: LayerSpec, policy: StatePolicy, device: torch.device | str, *, tokens: int = TOKENS, seed: int = 0
) -> list[Check]:
    """Windows of ``tokens`` in all, each of them the same launches: on a GPU one graph, replayed with new inputs."""
    device = torch.device(device)
    state = random_state(spec, policy, 2, seed=seed, device=device)
    remembering = torch.ones(spec.heads, device=device)
    remembering[: spec.heads // 2] = SLOW
    if state.decay_rate is not None:
        state.decay_rate *= remembering
    slots = torch.tensor([1, 0], dtype=torch.int32, device=device)
    exact = state.checkpoint.codes[slots.long()].double()
    inputs = _tokens(spec, policy.window, seed, device, remembering)
    y = torch.zeros(policy.window, 2, 1, spec.heads, spec.value_dim, device=device)
    expected = y.double()
    w = sequence.Workspace.allocate(state, 2)

    def window() -> None:
        for t in range(policy.window):
            one = inputs.slice(t, t + 1)
            sequence.step(state, one, slots, workspace=w, out=y[t])
            expected[t, :, 0] = standard(spec, exact, one, state.decay_rate)

    again, done = _captured(window, device), policy.window
    while done < tokens:
        fresh = _tokens(spec, policy.window, seed + done, device, remembering)
        for held, new in zip(vars(inputs).values(), vars(fresh).values(), strict=True):
            if held is not None:
                held.copy_(new)
        again()
        done += policy.window
    found = [
        Check(f"state after {done:,} tokens", relative(state.checkpoint.codes[slots.long()], exact), DRIFT),
        Check("output of the last flush", relative(y[-1], expected[-1]), DRIFT),
        Check("tokens counted", float((state.position - 100 - done).abs().sum()), 0),
        Check("not finite", float(int(w.status)), 0),
    ]
    if policy.read is None:
        found.append(Check("outputs of the last window", relative(y, expected), DRIFT))
    return found


def _tokens(spec: LayerSpec, tokens: int, seed: int, device: torch.device, remembering: torch.Tensor) -> TokenInputs:
    inputs = random_tokens(spec, 2, tokens, seed=seed, device=device)
    if inputs.g is None:
        return inputs
    # what the delta rule forgets is also what it overwrites, as much as it writes
    by_head = remembering.view(-1, *(1,) * (inputs.g.dim() - 3))
    return replace(inputs, g=inputs.g * by_head, beta=inputs.beta * remembering.sqrt())


def _captured(window: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Run ``window`` once, and give what runs it again: on a GPU a graph of it."""
    window()
    if device.type != "cuda":
        return window
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        window()
    return graph.replay
