"""Formats figures and names for people; a missing value is a dash."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterable

MISSING = "—"
LONGEST = 400  # characters of a library's message


def count(value: float | None) -> str:
    """Formats a count with thousands separators."""
    return MISSING if value is None else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Formats a rate per second: 12,815, or 0.57 if it is small."""
    return number(value, 2) if value is not None and 0 < value < 9.5 else count(value)


def short_count(value: float | None) -> str:
    """Formats a count in three digits: 151M parameters."""
    return MISSING if value is None else _scaled(value, ("", "k", "M", "B", "T"), "")


def size(value: float | None) -> str:
    """Formats bytes in decimal units, as networks are measured."""
    return MISSING if value is None else _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB", "EB"), " ")


def share(value: float | None) -> str:
    """Formats a fraction of 1 as a percentage."""
    return MISSING if value is None else f"{100 * value:.1f} %"


def loss(value: float | None) -> str:
    """Formats a loss, in nats."""
    return MISSING if value is None else f"{value:.4f}" if abs(value) < 1e6 else number(value)


def number(value: float | None, digits: int = 3) -> str:
    """Formats a number with `digits` significant digits."""
    return MISSING if value is None else f"{value:.{digits}g}"


def ratio(value: float | None) -> str:
    """Formats a reduction factor: 20.0x, 512x."""
    if value is None:
        return MISSING
    return f"{value:.1f}x" if value < 100 else f"{value:,.0f}x"


def perplexity(value: float | None) -> str:
    """Formats exp(loss): up to four significant digits, whole above 1000."""
    if value is None or not math.isfinite(value):
        return MISSING if value is None else str(value)
    if value >= 1e6:
        return f"{value:.2e}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def seconds(value: float | None) -> str:
    """Formats a duration: 0.4 s, 42 s, 3 min 20 s, 5 h 12 min."""
    if value is None:
        return MISSING
    if value < 59.5:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def plural(noun: str, num: int) -> str:
    """Returns the noun in singular or plural."""
    return noun if num == 1 else f"{noun}s"


def counted(num: int, noun: str) -> str:
    """`1 island`, `2 islands`, `1,203 steps`."""
    return f"{num:,} {plural(noun, num)}"


def numbers(values: Iterable[int], limit: int = 10) -> str:
    """Formats a set of numbers in order, with runs as spans (`1-3, 7, 9-12`); a long list is truncated."""
    spans: list[list[int]] = []
    for value in sorted(values):
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans[:limit]]
    return ", ".join(shown) + (", ..." if len(spans) > limit else "")


def name_all(values: Collection[int], unit: str = "island") -> str:
    """`island 1`, `islands 1, 2`, `islands 0-6, 8`; `islands unknown` if there are none."""
    return f"{plural(unit, len(values))} {numbers(values) or 'unknown'}"


def printable(value: str) -> str:
    """Returns untrusted text on one line, without terminal control characters or bidirectional overrides."""
    return "".join(char if char.isprintable() else "?" for char in value)


def one_line(error: BaseException | str) -> str:
    """Returns a library's error text without line breaks, truncated: some list all known names."""
    said = " ".join(str(error).split()) or type(error).__name__
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Suggests the known name that a misspelt or shortened one may mean, for the end of a clause; else ""."""
    candidates = list(known)
    by_small = {one.lower(): one for one in candidates}
    close = [by_small[one] for one in difflib.get_close_matches(name.lower(), by_small, n=1)]
    longer = [one for one in candidates if name in one.split("_")]  # such as delay, for fragment_sync_delay
    meant = close or (longer if len(longer) == 1 else [])
    return f" (did you mean {meant[0]}?)" if meant else ""


def _scaled(value: float, units: tuple[str, ...], space: str) -> str:
    """Formats three significant digits and a unit in steps of 1000."""
    index = 0
    while value >= 999.5 and index < len(units) - 1:
        value, index = value / 1000, index + 1
    if value >= 99.95 or (index == 0 and value == int(value)):
        return f"{value:,.0f}{space}{units[index]}"
    return f"{value:.1f}{space}{units[index]}" if value >= 9.995 else f"{value:.2f}{space}{units[index]}"
