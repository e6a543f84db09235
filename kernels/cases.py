"""Random layers' states and tokens, of realistic size, on any device: what checks and benchmarks run on."""

from __future__ import annotations

import torch
from torch import Tensor

from ..quant.columns import sharing
from ..quant.policy import StatePolicy
from ..quant.spec import LayerSpec
from ..quant.state import DecodeState
from .inputs import TokenInputs


def random_tokens(
    spec: LayerSpec, rows: int, tokens: int = 1, *, seed: int, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> TokenInputs:  # fmt: skip
    """Queries, keys and values in ``dtype``; gains and decays float32, as those of trained models."""
    rng = torch.Generator(device).manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(rows, tokens, *shape, generator=rng, device=device)

    q, k = randn(spec.key_heads, spec.key_dim), randn(spec.key_heads, spec.key_dim)
    k = k / k.norm(dim=-1, keepdim=True)
    v = randn(spec.heads, spec.value_dim)
    if spec.rules.gain_sets_decay:
        beta, g = 0.1 * randn(spec.heads).exp(), None
    else:
        beta = randn(spec.heads).sigmoid()
        channels = (spec.key_dim,) if spec.rules.decay == "channel" else ()
        g = -0.1 * randn(spec.heads, *channels).exp()
    return TokenInputs(q.to(dtype), k.to(dtype), v.to(dtype), beta, g)


def random_columns(spec: LayerSpec, *, seed: int) -> Tensor:
    """Column scales [H, K] that differ as those of trained models, over three or four powers of two."""
    shared = sharing(spec)
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(spec.heads // shared, spec.key_dim, generator=rng).mul(0.5).exp().repeat_interleave(shared, 0)


def random_state(
    spec: LayerSpec, policy: StatePolicy, slots: int, *, seed: int, device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> DecodeState:  # fmt: skip
    """States of random content, copies encoded, every ring row filled, cursors at zero."""
    rate = None
    if spec.rules.gain_sets_decay:
        rate = -torch.logspace(-1, 0.8, spec.heads, device=device)  # from heads that remember to heads that forget
    state = DecodeState.allocate(
        spec, policy, slots, layer="random", device=device, dtype=dtype, decay_rate=rate,
        columns=random_columns(spec, seed=seed),
    )  # fmt: skip
    rng = torch.Generator(device).manual_seed(seed)
    chunk = max(1, 2**27 // spec.elements)  # the torch codec's temporaries stay below a few GB
    for start in range(0, slots, chunk):
        index = torch.arange(start, min(start + chunk, slots), device=device)
        shape = (len(index), spec.heads, spec.value_dim, spec.key_dim)
        state.renew_(torch.randn(shape, generator=rng, device=device), index)
        rows = random_tokens(spec, len(index), policy.window, seed=seed + 1 + start, device=device, dtype=dtype)
        for name, ring in state.ring.items():
            ring[index] = getattr(rows, name).to(ring.dtype)
    state.position += 100
    return state


def forget_unused(state: DecodeState, fills: list[int]) -> None:
    """Set cursors to ``fills`` and every ring row from there on to NaN: whoever reads it shows."""
    cursor = torch.tensor(fills, dtype=state.cursor.dtype, device=state.cursor.device)
    state.cursor.copy_(cursor)
    unused = torch.arange(state.policy.window, device=cursor.device)[None] >= cursor[:, None]
    for ring in state.ring.values():
        ring.masked_fill_(unused.view(*unused.shape, *(1,) * (ring.dim() - 2)), float("nan"))
