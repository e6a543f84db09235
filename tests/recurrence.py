"""The recurrence of docs/window-algebra.md, one token at a time: what every faster form is tested against."""

import torch

from quantize_state.kernels.inputs import TokenInputs
from quantize_state.quant.spec import LayerSpec

SPECS = {
    "mamba2": (
        LayerSpec("mamba2", heads=4, key_heads=2, value_dim=12, key_dim=32),
        -torch.tensor([0.5, 1.0, 2.0, 8.0]),
    ),
    "gdn": (LayerSpec("gdn", heads=4, key_heads=2, value_dim=24, key_dim=32), None),
    "kda": (LayerSpec("kda", heads=2, key_heads=2, value_dim=24, key_dim=32), None),
}
"""Small specs with V ≠ K, so that a wrong transpose cannot hide, and Mamba-2's decay rate A per head."""


def random_inputs(spec, rows, tokens, seed, dtype=torch.float64) -> TokenInputs:
    """Inputs of realistic size: unit keys for the delta rule, gains and decays of trained models."""
    rng = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=rng, dtype=torch.float64)  # noqa: E731
    q, k = randn(rows, tokens, spec.key_heads, spec.key_dim), randn(rows, tokens, spec.key_heads, spec.key_dim)
    v = randn(rows, tokens, spec.heads, spec.value_dim)
    if spec.family == "mamba2":
        beta, g = 0.1 * randn(rows, tokens, spec.heads).exp(), None
        k = k / spec.key_dim**0.5
    else:
        beta = randn(rows, tokens, spec.heads).sigmoid()
        channels = (spec.key_dim,) if spec.family == "kda" else ()
        g = -0.1 * randn(rows, tokens, spec.heads, *channels).exp()
        k = k / k.norm(dim=-1, keepdim=True)
        q = q / q.norm(dim=-1, keepdim=True)
    return TokenInputs(*(None if t is None else t.to(dtype) for t in (q, k, v, beta, g)))


def recurrence(spec, inputs: TokenInputs, state, decay_rate=None):
    """Outputs [B, T, H, V] and the state after every token (a list of [B, H, V, K]), in the dtype of ``state``."""
    dtype = state.dtype
    erase = 1.0 if spec.family in ("gdn", "kda") else 0.0
    q, k, v, beta = (t.to(dtype) for t in (inputs.q, inputs.k, inputs.v, inputs.beta))
    g = inputs.g.to(dtype) if inputs.g is not None else beta * decay_rate.to(dtype)
    if spec.qk_l2norm:
        q, k = (t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt() for t in (q, k))
    q = q * spec.query_scale
    repeats = spec.heads // spec.key_heads
    outputs, states = [], []
    for t in range(inputs.tokens):
        key = k[:, t].repeat_interleave(repeats, dim=1)
        query = q[:, t].repeat_interleave(repeats, dim=1)
        gate = g[:, t].exp().unsqueeze(-2) if g.dim() == 4 else g[:, t].exp()[..., None, None]
        state = state * gate
        held = torch.einsum("bhvk,bhk->bhv", state, key)
        write = beta[:, t, :, None] * (v[:, t] - erase * held)
        state = state + write[..., None] * key[..., None, :]
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, query))
        states.append(state)
    return torch.stack(outputs, 1), states
