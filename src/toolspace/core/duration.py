"""Reads durations: milliseconds as a number, or a string such as `"250ms"`, `"30s"`, `"5m"`, `"2h"`."""

from __future__ import annotations

import re

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_LONGEST_MS = 1e15
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|w)?\s*")


def parse_duration(value: object) -> float:
    """Seconds from a configured duration. A bare number is milliseconds."""
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{value!r} is not a duration; write milliseconds (30000) or a string such as "
                '"250ms", "30s", "5m", "2h", "1d", "1w"'
            )
        seconds = float(match[1]) * _UNITS[match[2] or "ms"]
        if seconds * 1000 > _LONGEST_MS:
            raise ValueError(f"{value[:40]!r} is longer than anyone can wait")
        return seconds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{value!r} is not a duration; write milliseconds or a string such as "30s"')
    if not 0 <= value <= _LONGEST_MS:
        raise ValueError(f"{value!r:.40} is not a duration; it must be a number of milliseconds from 0 to 1e15")
    return value / 1000


def format_duration(seconds: float) -> str:
    """The shortest exact way to write a duration, as a person would."""
    if seconds < 1:
        return f"{milliseconds(seconds)}ms"
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNITS[unit] and seconds % _UNITS[unit] == 0:
            return f"{_number(seconds / _UNITS[unit])}{unit}"
    return f"{_number(seconds)}s"


def milliseconds(seconds: float) -> str:
    """`1500` for 1.5: how messages write a duration, without a fraction where there is none."""
    return _number(seconds * 1000)


def _number(value: float) -> str:
    """Without an exponent, which nothing here could read back, and without the noise of the last binary digits."""
    text = f"{value:.6f}" if value < 1e9 else f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
