"""States for the kernel tests: pools with odd slot strides, NaN in everything that must not be read."""

import mmap
from dataclasses import replace

import torch
from recurrence import random_inputs

from quantize_state.kernels.cases import random_columns
from quantize_state.kernels.inputs import TokenInputs
from quantize_state.kernels.readout.reference import readout as reference_readout
from quantize_state.kernels.window.reference import ReadTerms
from quantize_state.quant.policy import StatePolicy
from quantize_state.quant.spec import LayerSpec
from quantize_state.quant.state import DecodeState

SPECS = {
    "mamba2": (
        LayerSpec("mamba2", heads=6, key_heads=2, value_dim=20, key_dim=32),
        -torch.tensor([0.1, 0.5, 1, 2, 4, 9]),
    ),
    "gdn": (LayerSpec("gdn", 4, 2, 16, 64, qk_l2norm=True, query_scale=64**-0.5), None),
    "kda": (LayerSpec("kda", 2, 2, 40, 32, qk_l2norm=True, query_scale=32**-0.5), None),
}
"""V ≠ K, V = 20 and 40 are no powers of two, K = 64 is two of the chunks that columns come in."""


GAP = 0xA5
"""The byte between slots of a pool."""


def as_bytes(t):
    return t.contiguous().view(torch.uint8)


def padded(t, extra):
    """``t`` [slots, ...] in a pool whose slots lie ``extra`` elements further apart."""
    size, width = t[0].numel(), t.element_size()
    raw = torch.full((t.shape[0], (size + extra) * width), GAP, dtype=torch.uint8)
    raw[:, : size * width] = as_bytes(t).view(t.shape[0], -1)
    return raw.view(t.dtype)[:, :size].unflatten(1, t.shape[1:])


def gaps_untouched(t):
    """Whether every byte between the slots of a padded pool is what ``padded`` put there."""
    width = t.element_size()
    pool = torch.tensor(t.untyped_storage().tolist(), dtype=torch.uint8).view(t.shape[0], t.stride(0) * width)
    return bool((pool[:, t[0].numel() * width :] == GAP).all())


def pad_encoded(state):
    if state is None:
        return None
    return replace(state, codes=padded(state.codes, 64), scales={n: padded(t, 8) for n, t in state.scales.items()})


def pools(state):
    """Every padded tensor of a state, by name."""
    found = {f"ring.{n}": t for n, t in state.ring.items()}
    for part, encoded in (("checkpoint", state.checkpoint), ("copy", state.copy)):
        if encoded is not None:
            found |= {f"{part}.{n}": t for n, t in encoded.tensors().items()}
    return found


def make_state(family, *, read="nvfp4", window=8, slots=5, dtype=torch.bfloat16, fills=None, seed=0, **policy):
    """A state of random content; slot s holds ``fills[s]`` tokens, the rest of its ring NaN."""
    spec, rate = SPECS[family]
    rng = torch.Generator().manual_seed(seed)
    state = DecodeState.allocate(
        spec, StatePolicy(read=read, window=window, **policy), slots, layer="layers.0", dtype=dtype, decay_rate=rate,
        columns=random_columns(spec, seed=seed),
    )  # fmt: skip
    state.renew_(torch.randn(slots, spec.heads, spec.value_dim, spec.key_dim, generator=rng))
    state.position += 100
    fills = [i % window for i in range(slots)] if fills is None else fills
    rows = random_inputs(spec, slots, window, seed + 1, dtype=torch.float32)
    unused = torch.arange(window)[None] >= torch.tensor(fills)[:, None]
    for name, ring in state.ring.items():
        ring.copy_(getattr(rows, name))
        ring.masked_fill_(unused.view(*unused.shape, *(1,) * (ring.dim() - 2)), float("nan"))
    state.cursor.copy_(torch.tensor(fills))
    state.ring = {name: padded(ring, 24) for name, ring in state.ring.items()}
    state.checkpoint, state.copy = pad_encoded(state.checkpoint), pad_encoded(state.copy)
    state.cursor, state.position = (t[:, None].repeat(1, 3)[:, 1] for t in (state.cursor, state.position))
    return state


def token(family, rows, dtype=torch.bfloat16, seed=9) -> TokenInputs:
    """One new token per row, in the ring's dtype; gains and decays float32."""
    t = random_inputs(SPECS[family][0], rows, 1, seed, dtype=torch.float32)
    return TokenInputs(t.q.to(dtype), t.k.to(dtype), t.v.to(dtype), t.beta, t.g)


def make_far(state):
    """The same state with slots 2**30 elements apart."""

    def spread(t):
        stride = 1 << 30
        size = (t.shape[0] - 1) * stride + t[0].numel()
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        memory = mmap.mmap(-1, size * t.element_size(), flags=flags)
        inner = t[0].contiguous().stride()
        pool = torch.frombuffer(memory, dtype=torch.uint8).view(t.dtype).as_strided(t.shape, (stride, *inner))
        (pool.view(torch.uint8) if t.element_size() == 1 else pool).copy_(as_bytes(t) if t.element_size() == 1 else t)
        return pool

    def encoded(e):
        return replace(e, codes=spread(e.codes), scales={n: spread(t) for n, t in e.scales.items()})

    ring = {n: spread(t) for n, t in state.ring.items()}
    far = state.clone()
    return replace(far, checkpoint=encoded(far.checkpoint), copy=encoded(far.copy), ring=ring)


def half_theta(theta):
    """Θ [B, T, Hq, K] as the window kernels store it for 4-bit reads: (float16 in pair order, factor [B, T, Hq])."""
    position = torch.arange(theta.shape[-1])
    position = (position & ~5) | ((position & 1) << 2) | ((position >> 2) & 1)
    factor = 2.0 ** (13 - theta.abs().amax(-1).log2().floor())
    out = torch.empty_like(theta, dtype=torch.float16)
    out[..., position] = (theta * factor[..., None]).half()
    return out, 1 / factor


def read_case(
    format, queries=1, half=False, window=8, shared=1, fills=(0, 3, 8, 1, 5), family="gdn", dtype=torch.bfloat16
):
    """Random Θ, gains and C for five slots; returns what readout takes and what it must give."""
    state = make_state(family, read=format, window=window, fills=list(fills), dtype=dtype)
    spec = state.spec
    rng = torch.Generator().manual_seed(4)
    slots = torch.tensor([3, -1, 1, 4], dtype=torch.int32)
    used = torch.tensor([fills[3], 0, fills[1], fills[4]], dtype=torch.int32)
    theta = torch.randn(4, queries, spec.heads // shared, spec.key_dim, generator=rng)
    gain = torch.rand(4, queries, spec.heads, generator=rng) + 0.5
    c = torch.randn(4, queries, spec.heads, window, generator=rng)
    y = torch.zeros(4, queries, spec.heads, spec.value_dim)
    for b in (0, 2, 3):
        whole = theta[b].repeat_interleave(shared, 1) * gain[b, ..., None]
        v = state.ring["v"][slots[b], : used[b]].float().transpose(0, 1)
        terms = ReadTerms(whole.transpose(0, 1), c[b, :, :, : used[b]].transpose(0, 1))
        y[b] = reference_readout(state.read_source[int(slots[b])].decode(), terms, v).transpose(0, 1)
    if half:
        theta, factor = half_theta(theta)
        gain = gain * factor.repeat_interleave(shared, -1)
    out = torch.full_like(y, float("nan"))
    return state, (theta, gain, c, slots, used), out, y
