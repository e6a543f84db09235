"""The device codec run by itself, and the inputs that are hardest for it: for tests, and for a device's self-test."""

from __future__ import annotations

import torch
from torch import Tensor

from ...quant.codec import encode
from ...quant.rounding import Grid
from ..launch import Launch, isa_of, run
from . import codec, tile
from .targets import tl, triton
from .views import raw_view


@triton.jit
def grid_kernel(p_a, p_rounded, p_code, N: tl.constexpr, M: tl.constexpr, LOW: tl.constexpr, MAX: tl.constexpr):
    o = tl.program_id(0) * N + tl.arange(0, N)
    b_a = tl.load(p_a + o)
    tl.store(p_rounded + o, codec.round_grid(b_a, M, LOW, MAX))
    tl.store(p_code + o, codec.grid_code(b_a, M, LOW, MAX))


@triton.jit
def values_kernel(p_code, p_e4m3, p_e2m1, p_scale, p_power, N: tl.constexpr, ISA: tl.constexpr):
    o = tl.arange(0, N)
    b_code = tl.load(p_code + o)
    tl.store(p_e4m3 + o, codec.e4m3_value(b_code, ISA))
    tl.store(p_e2m1 + o, codec.e2m1_value(b_code.to(tl.int32)))
    tl.store(p_scale + o, codec.e4m3_scale(b_code & 0x7F))
    tl.store(p_power + o, codec.e8m0_scale(b_code))


@triton.jit
def encode_kernel(
    p_x, p_codes, p_row, p_block, p_total, p_decoded, V: tl.constexpr, R: tl.constexpr, K: tl.constexpr,
    FORMAT: tl.constexpr, RULE: tl.constexpr, ROTATE: tl.constexpr, WORDS: tl.constexpr, ISA: tl.constexpr,
):  # fmt: skip
    """Grid (heads): encode x [heads, V, K], and decode what was stored."""
    i_h = tl.program_id(0)
    o_v = tl.arange(0, R)
    m_v = o_v < V
    o_rows = (i_h * V + o_v).to(tl.int64)
    o_x = o_rows[:, None] * K + tl.arange(0, K)[None, :]
    b_x = tl.load(p_x + o_x, mask=m_v[:, None], other=0.0)
    if ROTATE > 1:
        b_x = codec.hadamard(b_x, ROTATE)
    b_top = codec.tile_amax(b_x)
    i_row = (i_h * V).to(tl.int64)
    tile.store_tile(b_x, b_top, p_codes, p_row, p_block, p_total + i_h, i_row, V, FORMAT, RULE, V == R, WORDS, ISA)
    tl.debug_barrier()  # other threads of this program wrote what is read back now
    b_back = tile.load_tile(p_codes, p_row, p_block, p_total + i_h, o_rows, m_v, K, FORMAT, ISA)
    tl.store(p_decoded + o_x, b_back, mask=m_v[:, None])


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8)


def round_on_device(a: Tensor, grid: Grid, rounded: Tensor, codes: Tensor, count: int = 1024) -> None:
    """Magnitudes ``a`` [n · count] float32 to the grid: values float32 and codes int32."""
    run(
        grid_kernel, (len(a) // count,), Launch(warps=4), a, rounded, codes,
        N=count, M=grid.mantissa, LOW=grid.min_exponent, MAX=grid.max,
    )  # fmt: skip


def decode_every_code(codes: Tensor, e4m3: Tensor, e2m1: Tensor, scale: Tensor, power: Tensor) -> None:
    """The 256 bytes as E4M3, as E2M1 (their low four bits), as E4M3 and E8M0 scales, float32."""
    run(values_kernel, (1,), Launch(warps=4), codes, e4m3, e2m1, scale, power, N=256, ISA=isa_of(codes.device))


def codec_differences(
    x: Tensor, format: str, rule: str = "amax", rotation: str | None = None, *, words: bool = True
) -> dict[str, int]:
    """Bytes in which the device codec differs from the torch codec on the CPU for x [heads, V, K], by tensor; none is
    right. ``words``: 4-bit codes are stored as words."""
    heads, value_dim, key_dim = x.shape
    expected = encode(x.cpu(), format, rule, rotation)
    poison = {name: torch.full_like(as_bytes(t), 0xA5).view(t.dtype) for name, t in expected.tensors().items()}
    ours = {name: t.to(x.device) for name, t in poison.items()}
    raw = {n: raw_view(t) for n, t in ours.items()}
    none = torch.zeros(1, device=x.device)
    decoded = torch.full_like(x, float("nan"))
    run(
        encode_kernel, (heads,), Launch(warps=4),
        x, raw["codes"], *(raw.get(f"scales.{n}", none) for n in ("row", "block", "global")), decoded,
        V=value_dim, R=max(16, triton.next_power_of_2(value_dim)), K=key_dim,
        FORMAT=format, RULE=rule,
        ROTATE={None: 0, "hadamard16": 16, "hadamard": key_dim}[rotation], WORDS=words, ISA=isa_of(x.device),
        enable_fp_fusion=False,
    )  # fmt: skip
    pairs = {n: (t, ours[n]) for n, t in expected.tensors().items()}
    pairs["decoded"] = (expected.decode(unrotate=False), decoded)
    counts = {n: int((as_bytes(a) != as_bytes(b.cpu())).sum()) for n, (a, b) in pairs.items()}
    return {n: count for n, count in counts.items() if count}


def grid_values(grid: Grid) -> Tensor:
    """The values of an E2M1 or E4M3 grid in the order of their codes, without the sign."""
    code = torch.arange(8 if grid.mantissa == 1 else 127)
    exponent, rest = code >> grid.mantissa, code & ((1 << grid.mantissa) - 1)
    whole = rest + torch.where(exponent > 0, 1 << grid.mantissa, 0)
    return whole * 2.0 ** (exponent.clamp(min=1) - 1 + grid.min_exponent - grid.mantissa)


def with_neighbours(points: Tensor) -> Tensor:
    """Positive float32 points and the three floats on either side of each."""
    bits = points.to(torch.float32).view(torch.int32)
    around = bits[:, None] + torch.arange(-3, 4, dtype=torch.int32, device=bits.device)
    return around.flatten().clamp(0).view(torch.float32)


def hard_states(format: str) -> Tensor:
    """Three heads [3, 20, 64]: an ordinary one, one with rows from 1e-6 to 1e6, and one of zeros, −0, subnormals, an
    all-zero block and an outlier."""
    rng = torch.Generator().manual_seed(1)
    x = torch.randn(3, 20, 64, generator=rng)
    x[1] *= 10.0 ** torch.randint(-6, 6, (20, 1), generator=rng)
    x[2, 0] = 0.0
    x[2, 1, :16] = -0.0
    x[2, 2] *= 1e-38
    x[2, 3] *= 1e-42
    x[2, 4, :32] = 0.0
    x[2, 5, 7] = 1e30 if format not in ("fp16", "bf16") else 1e5
    return x
