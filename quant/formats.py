"""The registry of number formats. A format is an element type and a way to scale it; adding one is one entry."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from .errors import InvalidValueError, unknown_name
from .rounding import BF16, E2M1, E4M3, FP16, INT8, Grid, float_bits, restore_sign_
from .scales import SCALE_RULES, PowerOfTwoScale, RowScale, Scaling, TwoLevelScale


@dataclass(frozen=True)
class Element:
    """One stored number: its grid, and how values on the grid become bytes.

    ``dtype``: a torch dtype that holds the values themselves; None for codes of sign and magnitude in uint8
    (two per byte, the even index in the low nibble, when ``bits`` is 4). The magnitude code counts the grid's
    values from zero, which for E2M1 (and E4M3, and any small float) is its standard encoding.
    ``grid`` None: float32 as it is.
    """

    bits: int
    grid: Grid | None
    dtype: torch.dtype | None = None
    signed_zero: bool = True

    @property
    def packed(self) -> int:
        """Codes per stored item: 2 for 4-bit codes, else 1."""
        return 2 if self.dtype is None and self.bits == 4 else 1

    def store(self, a: Tensor, sign: Tensor) -> Tensor:
        """Magnitudes on the grid, float32 [..., n], and numbers whose signs they get, to codes [..., n / packed].

        ``a`` is overwritten.
        """
        if self.dtype is not None or self.grid is None:
            return restore_sign_(a, sign).to(self.dtype, copy=True)
        # With p the binade and y = a + magic·p, y's last bits count steps from zero; each binade above the lowest
        # adds 2**mantissa codes.
        mantissa, low = self.grid.mantissa, self.grid.min_exponent
        power = self.grid.power(a)
        code = a.add_(power, alpha=self.grid.magic).view(torch.int32)
        bits = power.view(torch.int32)
        code.sub_(bits).add_(bits.bitwise_right_shift_(23 - mantissa))
        code.sub_(float_bits(self.grid.magic) - (127 << 23) + ((low + 127) << mantissa))
        torch.bitwise_right_shift(sign.view(torch.int32), 31, out=bits)
        code = code.bitwise_or_(bits.bitwise_and_(1 << (self.bits - 1))).to(torch.uint8)
        if self.packed == 1:
            return code
        pair = code.view(torch.int16)  # even code + 256·odd code, on a little-endian machine
        return (pair | pair.bitwise_right_shift(4)).to(torch.uint8)

    def load(self, codes: Tensor) -> Tensor:
        """Codes [..., n / packed] to new float32 values [..., n]; exact."""
        if codes.element_size() > 1 or codes.dtype == torch.int8:
            return codes.to(torch.float32, copy=True)
        index = codes.view(torch.uint8).to(torch.int32).flatten()
        values = _table(self, codes.device).index_select(0, index).view(torch.float32)
        return values.view(*codes.shape[:-1], codes.shape[-1] * self.packed)


@lru_cache
def _table(element: Element, device: torch.device) -> Tensor:
    """What each of 256 bytes decodes to: float32, or a pair of them as one float64, which is faster to look up."""
    with torch.inference_mode(False):
        byte = torch.arange(256, dtype=torch.uint8)
        if element.dtype is not None:
            return byte.view(element.dtype).to(torch.float32).to(device)
        assert element.grid is not None
        mantissa, low = element.grid.mantissa, element.grid.min_exponent
        values = []
        for code in range(1 << (element.bits - 1)):
            exponent, rest = divmod(code, 1 << mantissa)
            step = 2.0 ** (max(exponent, 1) - 1 + low - mantissa)
            values.append((rest + ((1 << mantissa) if exponent else 0)) * step)
        both = torch.tensor(values + [-v for v in values], dtype=torch.float32)
        if element.packed == 1:
            return both[(byte & ((1 << element.bits) - 1)).long()].to(device)
        pair = torch.stack((both[(byte & 15).long()], both[(byte >> 4).long()]), dim=1)
        return pair.view(torch.float64).squeeze(1).to(device)


@dataclass(frozen=True)
class Format:
    """A number format for a state [..., V, K]; every field is in docs/formats.md."""

    name: str
    title: str
    element: Element
    scaling: Scaling | None = None

    @property
    def bits(self) -> int:
        """Bits of one element's code, scales not counted."""
        return self.element.bits

    @property
    def block(self) -> int:
        """Elements along K that share a scale; 0 where there is none, or one per row."""
        return self.scaling.block if self.scaling is not None else 0

    @property
    def bytes_per_element(self) -> float:
        """Bytes per element with block and row scales, at K = 128; a scale per head is not counted."""
        return self.bits / 8 + (self.scaling.bytes_per_element if self.scaling is not None else 0.0)

    @property
    def stochastic(self) -> bool:
        """Whether stochastic rounding exists: everywhere but in float32."""
        return self.element.grid is not None

    @property
    def scale_rules(self) -> tuple[str, ...]:
        """The scale rules that mean something here. Without a scale there is nothing to choose: all are taken."""
        return self.scaling.rules if self.scaling is not None else tuple(SCALE_RULES)


def _formats() -> dict[str, Format]:
    e4m3 = Element(8, E4M3, torch.float8_e4m3fn)
    e2m1 = Element(4, E2M1)
    formats = (
        Format("fp32", "FP32", Element(32, None, torch.float32)),
        Format("bf16", "BF16", Element(16, BF16, torch.bfloat16)),
        Format("fp16", "FP16", Element(16, FP16, torch.float16)),
        Format("fp8_e4m3", "FP8 E4M3, FP32 scale per row", e4m3, RowScale()),
        Format("mxfp8", "MXFP8 E4M3, E8M0 scale per 32", e4m3, PowerOfTwoScale(32)),
        Format("int8", "INT8, FP32 scale per row", Element(8, INT8, torch.int8, signed_zero=False), RowScale()),
        Format("nvfp4", "NVFP4, E4M3 scale per 16, FP32 per head", e2m1, TwoLevelScale(16)),
        Format("mxfp4", "MXFP4, E8M0 scale per 32", e2m1, PowerOfTwoScale(32)),
    )
    return {f.name: f for f in formats}


FORMATS: dict[str, Format] = _formats()
"""Every format by name. ``FORMATS[f.name] = f`` adds one: encode, policies and arm names know it at once."""


def find_format(name: str, scale_rule: str = "amax") -> Format:
    """The format called ``name``, if ``scale_rule`` exists for it; else InvalidValueError naming what does."""
    if name not in FORMATS:
        raise unknown_name("format", name, FORMATS)
    if scale_rule not in SCALE_RULES:
        raise unknown_name("scale rule", scale_rule, SCALE_RULES)
    fmt = FORMATS[name]
    if scale_rule not in fmt.scale_rules:
        raise InvalidValueError(f"format {name} has no scale rule {scale_rule!r}; it has {', '.join(fmt.scale_rules)}")
    return fmt
