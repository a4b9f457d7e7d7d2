"""Parses numbers with units as people type them: 7b parameters, 200M bits a second, 80 ms.

What cannot be parsed raises `ConfigError`, which names the option.
"""

from __future__ import annotations

import math
import re

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import seconds as seconds_of

_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*")
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_RATES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_RATE_UNIT = re.compile(r"([kmgtKMGT]?)(?:bits?/s|bps|b/s|bit)?")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}


def parse_count(text: str, option: str) -> int:
    """Parses a count such as 350M, 7b or 1.5e9."""
    value, unit = _split(text)
    if unit.lower() not in _COUNTS or not 1 <= value * _COUNTS[unit.lower()] <= 1e15:
        raise ConfigError(f"{option} {text}: give a number of parameters, as 350M, 7b or 1.5e9")
    return round(value * _COUNTS[unit.lower()])


def parse_rate(text: str, option: str) -> float:
    """Parses bits a second such as 200M, 10G or 1.5 Gbit/s."""
    value, unit = _split(text)
    match = _RATE_UNIT.fullmatch(unit)
    rate = value * _RATES[match[1].lower()] if match else math.nan
    if not 1e3 <= rate <= 1e15:  # 200 alone lacks an M
        raise ConfigError(f"{option} {text}: give bits a second, as 200M, 10G or 1.5Gbit/s (bits, not bytes)")
    return rate


def parse_seconds(text: str, option: str) -> float:
    """Parses a duration such as 80ms, 1.5s, 2min or 0."""
    value, unit = _split(text)
    seconds = value * _SECONDS.get(unit, math.nan)
    if not (seconds == 0 or 1e-9 <= seconds <= 1e9):
        raise ConfigError(f"{option} {text}: give a time with its unit, as 80ms or 1.5s")
    return seconds


def bit_rate(value: float) -> str:
    """Formats bits a second: 200 Mbit/s."""
    for unit, factor in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if value >= 0.9995 * factor:
            return f"{value / factor:.3g} {unit}"
    return f"{value:.3g} bit/s"


def duration(value: float) -> str:
    """Formats seconds, including short durations: 80 ms."""
    return seconds_of(value) if value >= 1 or not value else f"{value * 1e3:.3g} ms"


def _split(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text)
    return (float(match[1]), match[2]) if match else (math.nan, "?")
