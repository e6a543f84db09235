"""Rounding, written once in torch: nearest even and stochastic, on magnitudes in float32.

This is the oracle that device code repeats bit for bit. Everything works on magnitudes (the caller puts the
sign back), so rounding is symmetric and a zero keeps its sign.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

EXPONENT_MASK = 0x7F800000
"""The exponent bits of a float32; alone they are the power of two at or below a normal magnitude."""

SIGN_BIT = -(1 << 31)
"""The sign bit of a float32, as the int32 that torch wants."""


@lru_cache(maxsize=256)
def constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A 0-d tensor on ``device``. Faster than a Python number, and exact as a divisor: on CUDA torch multiplies by
    the reciprocal where a divisor is a number, which differs in the last place."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def float_bits(value: float) -> int:
    """The bits of ``value`` as a float32."""
    return struct.unpack("<i", struct.pack("<f", value))[0]


@dataclass(frozen=True)
class Grid:
    """The magnitudes that a number format can hold: a small float, or (one binade only) whole numbers.

    Binades from ``min_exponent`` up hold 2**mantissa steps each; below 2**min_exponent the step stays what it
    is there (subnormals). ``max`` is the largest magnitude, to which everything above it saturates.
    """

    mantissa: int
    min_exponent: int
    max: float
    cast: torch.dtype | None = None
    """A torch dtype whose conversion from float32 is this rounding, where that is faster than arithmetic."""

    @cached_property
    def magic(self) -> float:
        """1.5·2**(23−mantissa): adding this times 2**e leaves a float32 whose last bit weighs one step."""
        return 1.5 * 2.0 ** (23 - self.mantissa)

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest magnitude, floor(log2(max)); ``emax_elem`` in the OCP MX specification."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def lowest_bits(self) -> int:
        """The bits of 2**min_exponent as a float32."""
        return float_bits(2.0**self.min_exponent)

    def nearest_(self, a: Tensor, scratch: Tensor | None = None, low: float | None = None) -> Tensor:
        """Round the magnitudes ``a`` (float32, any shape) in place to nearest even, saturating; returns ``a``.

        ``low`` is a least result, which must be on the grid; the rest as in ``nearest``.
        """
        return self.nearest(a, a, scratch, low)

    def nearest(self, a: Tensor, out: Tensor, scratch: Tensor | None = None, low: float | None = None) -> Tensor:
        """``nearest_`` into ``out``.

        p = 2**max(floor(log2 a), min_exponent) from the exponent bits; (a + magic·p) − magic·p. Both products
        are exact, so it does not matter whether they are fused into the sum. ``scratch``: float32 like ``a``.
        """
        torch.clamp(a, low, self.max, out=out)
        if self.cast is not None:
            return out.copy_(out.to(self.cast))
        power = self.power(out, scratch)
        return out.add_(power, alpha=self.magic).sub_(power, alpha=self.magic)

    def stochastic_(self, a: Tensor, random: Tensor, scratch: Tensor | None = None) -> Tensor:
        """Round the magnitudes ``a`` in place to one of their two neighbours, at random; returns ``a``.

        ``random``: float32 like ``a``, multiples of 2**-24 in [0, 1). With a = (n + f)·step, 0 <= f < 1, the
        result is (n + 1)·step where random < f, else n·step: its mean is ``a`` (to within 2**-24 of a step),
        and what is on the grid stays.
        """
        a.clamp_(max=self.max)
        step = self.power(a, scratch).mul_(2.0**-self.mantissa)
        a.div_(step)
        whole = torch.floor(a)
        # The sign of f − random is exact, and its ceiling is 1 where random < f, else 0 (or −0).
        up = a.sub_(whole).sub_(random).ceil_()
        return torch.add(whole, up, out=a).mul_(step)

    def power(self, a: Tensor, scratch: Tensor | None = None) -> Tensor:
        """2**max(floor(log2 a), min_exponent), as float32 (in ``scratch`` if given)."""
        if scratch is None:
            scratch = torch.empty_like(a)
        bits = scratch.view(torch.int32)
        torch.bitwise_and(a.view(torch.int32), constant(EXPONENT_MASK, torch.int32, a.device), out=bits)
        bits.clamp_(min=self.lowest_bits)
        return scratch


E2M1 = Grid(mantissa=1, min_exponent=0, max=6.0)
E4M3 = Grid(mantissa=3, min_exponent=-6, max=448.0)
INT8 = Grid(mantissa=7, min_exponent=7, max=127.0)
FP16 = Grid(mantissa=10, min_exponent=-14, max=65504.0, cast=torch.float16)
BF16 = Grid(mantissa=7, min_exponent=-126, max=torch.finfo(torch.bfloat16).max, cast=torch.bfloat16)


def restore_sign_(a: Tensor, x: Tensor, scratch: Tensor | None = None) -> Tensor:
    """copysign(a, x) in place, for float32 ``a`` >= 0; three times faster than torch.copysign on a CPU."""
    sign = (torch.empty_like(a) if scratch is None else scratch).view(torch.int32)
    torch.bitwise_and(x.view(torch.int32), constant(SIGN_BIT, torch.int32, x.device), out=sign)
    a.view(torch.int32).bitwise_or_(sign)
    return a


def _word(constant_: int, device: torch.device) -> Tensor:
    """A 32-bit constant as the int32 with the same bits."""
    return constant(constant_ - (1 << 32) if constant_ >= 1 << 31 else constant_, torch.int32, device)


def _xorshift_(x: Tensor, shift: int, scratch: Tensor) -> Tensor:
    """x ^= x >> shift, the shift logical although torch's int32 is signed."""
    torch.bitwise_right_shift(x, _word(shift, x.device), out=scratch)
    return x.bitwise_xor_(scratch.bitwise_and_(_word((1 << (32 - shift)) - 1, x.device)))


def _mix_(x: Tensor, key: Tensor, scratch: Tensor) -> Tensor:
    """A bijection of 32-bit words whose high bits are well mixed; the constants are Wellons' lowbias32."""
    _xorshift_(x, 16, scratch).mul_(_word(0x7FEB352D, x.device)).bitwise_xor_(key)
    return _xorshift_(x, 15, scratch).mul_(_word(0x846CA68B, x.device))


def stream_keys(seeds: Tensor) -> tuple[Tensor, Tensor]:
    """k0 and k1 of ``uniform``, int32 like ``seeds``."""
    device = seeds.device

    def fin(x: Tensor) -> Tensor:
        scratch = torch.empty_like(x)
        return _xorshift_(_mix_(x, _word(0, device), scratch), 16, scratch)

    lo, hi = seeds.to(torch.int32), (seeds >> 32).to(torch.int32)
    return fin(lo ^ fin(hi + _word(0x9E3779B9, device))), fin(hi ^ fin(lo + _word(0x85EBCA6B, device)))


def uniform(seeds: Tensor, count: int) -> Tensor:
    """Random numbers for stochastic rounding: float32 [n, count], multiples of 2**-24 in [0, 1).

    ``seeds``: int64 [n]. Row r depends on ``seeds[r]`` alone and number i on i alone, so a tile rounds the same
    whatever else is in its batch. In uint32 arithmetic (wrapping), with lo and hi the halves of a seed:

        mix(x, key):  x ^= x>>16; x *= 0x7FEB352D; x ^= key; x ^= x>>15; x *= 0x846CA68B
        fin(x):       y = mix(x, 0); y ^ y>>16
        k0 = fin(lo ^ fin(hi + 0x9E3779B9))      k1 = fin(hi ^ fin(lo + 0x85EBCA6B))
        u(i) = (mix(i + k0, k1) >> 8) · 2**-24   i = v·K + k in a [V, K] tile
    """
    device = seeds.device
    k0, k1 = stream_keys(seeds)
    x = torch.arange(count, dtype=torch.int32, device=device) + k0[:, None]
    _mix_(x, k1[:, None], scratch := torch.empty_like(x))
    torch.bitwise_right_shift(x, _word(8, device), out=scratch)
    return scratch.bitwise_and_(_word(0xFFFFFF, device)).to(torch.float32).mul_(2.0**-24)


def derive_seeds(*parts: int | str | Tensor, device: torch.device | str | None = None) -> Tensor:
    """One int64 seed for every combination of ``parts``, e.g. (seed, layer name, position[:, None], head).

    Integers and strings are constants; integer tensors broadcast against each other and give the shape. The
    order of parts matters. Each part goes through the finaliser of splitmix64, so neighbours are unrelated.
    """
    state = torch.zeros((), dtype=torch.int64, device=device)
    for part in parts:
        if isinstance(part, str):
            part = int.from_bytes(hashlib.sha256(part.encode()).digest()[:8], "little")
        if isinstance(part, int):
            part = torch.tensor((part + (1 << 63)) % (1 << 64) - (1 << 63), dtype=torch.int64, device=state.device)
        state = state.to(part.device) if state.dim() == 0 else state
        state = _mix64((state ^ part.to(torch.int64)) + _int64(0x9E3779B97F4A7C15))
    return state


def _int64(constant: int) -> int:
    return constant - (1 << 64) if constant >= 1 << 63 else constant


def _mix64(x: Tensor) -> Tensor:
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _int64(factor)
    return x
