"""Numbers as people read them: 2.4 × 10⁻⁴ (2.1–2.8), 99.87 %, 446 times."""

from __future__ import annotations

import math
import re
import statistics

_TIMES = "\u00a0×\u00a0"  # no line break before or after
_PLAIN = range(-2, 3)
"""Powers of ten that are written out: 0.0107, 0.107, 3.71, 17.3, 409."""

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


_UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Control characters but tab and newline, halves of surrogate pairs (of file names that are no UTF-8), and marks that
reverse the text after them."""


def printable(text: str) -> str:
    """``text`` with what a terminal or a page would obey, and not show, spelled out: \\x1b, \\u202e."""
    return _UNSEEN.sub(lambda m: m.group().encode("unicode_escape").decode("ascii"), text)


def power(exponent: int) -> str:
    """10⁻⁴."""
    return "10" + str(exponent).translate(_RAISED)


def scientific(value: float | None, digits: int = 3) -> str:
    """2.41 × 10⁻⁴; 0.107, 3.71 and 17 where that is as short; 0; an en dash where there is no value."""
    if value is None:
        return "–"
    if value == 0:
        return "0"
    mantissa, raised = f"{value:.{digits - 1}e}".split("e")
    if int(raised) in _PLAIN:
        return f"{value:.{max(0, digits - 1 - int(raised))}f}"
    return f"{mantissa}{_TIMES}{power(int(raised))}"


def signed(value: float) -> str:
    """+2.4 × 10⁻⁵, −0.11; 0."""
    return "0" if value == 0 else ("−" if value < 0 else "+") + scientific(abs(value), 2)


def scaled(value: float, exponent: int, digits: int = 2) -> str:
    """The value in units of a power of ten, to stand in an interval that shares it: 2.14."""
    # in two steps, as 10⁻³²⁴ is zero
    return f"{value / 10.0 ** (exponent // 2) / 10.0 ** (exponent - exponent // 2):.{digits}f}"


def with_interval(mean: float, interval: tuple[float, float] | None) -> tuple[str, str, str]:
    """Mean, interval and power that belong together: ('2.41', '2.14–2.72', '10⁻⁴'); the power may be empty."""
    if mean == 0:
        return "0", "", ""
    exponent = int(f"{mean:.2e}".split("e")[1])
    plain = exponent in _PLAIN
    places, unit = (max(0, 2 - exponent), 0) if plain else (2, exponent)
    shown = "" if interval is None else "–".join(scaled(x, unit, places) for x in interval)
    return scaled(mean, unit, places), shown, "" if plain else power(exponent)


def mean_text(mean: float, interval: tuple[float, float] | None) -> str:
    """2.41 (2.14–2.72) × 10⁻⁴, in one line of text."""
    value, shown, raised = with_interval(mean, interval)
    return value + (f" ({shown})" if shown else "") + (f"{_TIMES}{raised}" if raised else "")


def times(ratio: float) -> str:
    """A factor of at least one: 446, 12, 9.0, 1.04."""
    if ratio >= 1e6:
        return scientific(ratio, 2)
    if ratio >= 9.95:
        return f"{float(f'{ratio:.3g}'):,.0f}"
    return f"{ratio:.1f}" if ratio >= 1.95 else f"{ratio:.2f}"


def error(value: float) -> str:
    """A relative error: 248×, 3.3 %, 1.5 × 10⁻⁷."""
    if value == 0:
        return "0"
    if value >= 10:
        return f"{value:,.0f}×" if value < 1e6 else f"{scientific(value, 2)}×"
    if value < 1e-4:
        return scientific(value, 2)
    return f"{100 * value:.{max(0, 1 - math.floor(math.log10(100 * value)))}f}\u00a0%"


def spread(values: list[float]) -> str:
    """Median and range of relative errors: 3.3 % (1.6 %–7.6 %), or 1.5 (1.1–2.9) × 10⁻⁷ where all are tiny."""
    low, middle, high = min(values), statistics.median(values), max(values)
    if high == 0:
        return "0"
    if high < 1e-4:
        return mean_text(middle, (low, high)) if middle else f"0 ({error(low)}–{error(high)})"
    return f"{error(middle)} ({error(low)}–{error(high)})"


def percent(rate: float | None) -> str:
    """99.87 %, rounded down, so that 100.00 % means all."""
    return "–" if rate is None else f"{math.floor(rate * 10000) / 100:.2f} %"


def number(value: int) -> str:
    """16,384."""
    return f"{value:,}"


def tokens_axis(value: float) -> str:
    """Positions on an axis: 512, 4K, 128K."""
    value = round(value)
    return f"{value // 1024}K" if value >= 1024 and value % 1024 == 0 else f"{value}"


def seconds(value: float) -> str:
    """12.5 s, 3 min 20 s."""
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def short(name: str, length: int = 26) -> str:
    """A name that fits into a plot."""
    return name if len(name) <= length else f"{name[: length - 1]}…"


def plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count:,} {one if count == 1 else many or one + 's'}"
