"""When something is to happen: after a while, at a time, or again and again as cron says. Pure functions."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

from toolspace.core.names import did_you_mean

_UNITS: Final = {
    "second": 1,
    "minute": 60,
    "hour": 3_600,
    "day": 86_400,
    "week": 604_800,
}
_SHORT: Final = {"s": "second", "sec": "second", "m": "minute", "min": "minute", "h": "hour", "hr": "hour"}
_SHORT_DAYS: Final = {"d": "day", "w": "week"}
_PART: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?|an?)\s*([a-z]+)", re.ASCII)
_NAMED: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_LONGEST: Final = 100 * 366 * 86_400.0


def parse_delay(text: str) -> float:
    """How long "2 hours", "1 day and 30 minutes" or "90s" are. Raises `ValueError` that says what is taken."""
    said = text.strip().lower()
    words = said.removeprefix("in ").replace(",", " ").replace(" and ", " ")
    parts = _PART.findall(words)
    if not parts or _PART.sub("", words).strip():
        raise ValueError(f'{text!r} is no time to wait; write it like "2 hours", "30 minutes" or "1 day"')
    total = 0.0
    for amount, unit in parts:
        total += (1.0 if amount.startswith("a") else float(amount)) * _UNITS[_unit(unit, text)]
    if not 0 < total <= _LONGEST:
        raise ValueError(f"{text!r} is not between one second and a hundred years")
    return total


def parse_iso_time(text: str, zone: str | None = None) -> datetime:
    """An ISO time as a moment. One without an offset is meant in the zone, else in UTC. Raises `ValueError`."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f'{text!r} is no ISO time; write it like "2026-03-01T08:00:00Z"') from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=get_time_zone(zone))
    try:
        return found.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is out of range") from None


def get_time_zone(name: str | None) -> tzinfo:
    """A time zone by its name; UTC where none is named. Raises `ValueError`."""
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError):  # Unknown, or no name at all: "../etc" must not be looked for.
        from zoneinfo import available_timezones

        near = did_you_mean(name, available_timezones()) or '; write it like "Europe/Berlin"'
        raise ValueError(f"there is no time zone {name!r}{near}") from None


def next_cron_time(expression: str, after: datetime, zone: str | None = None) -> datetime | None:
    """When a five-field cron expression comes next, strictly after a moment; None where it never does.

    Raises `ValueError` where it is none. A time that a change of the clocks skips or repeats comes once.
    """
    from cronsim import CronSim, CronSimError  # Only where something is scheduled.

    text = _NAMED.get(expression.strip().lower(), expression.strip())
    if len(text.split()) != 5:
        raise ValueError(f'{expression!r} is no cron expression; it has five fields, like "0 9 * * *"')
    try:
        found = next(CronSim(text, after.astimezone(get_time_zone(zone))), None)
    except CronSimError as error:
        raise ValueError(f"{expression!r} is no cron expression: {error}") from None
    return found.astimezone(UTC) if found is not None else None


def to_milliseconds(moment: datetime) -> int:
    return round((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1))


def from_milliseconds(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def format_iso(milliseconds: int) -> str:
    """A moment as people write it: `2026-03-01T08:00:00Z`."""
    text = from_milliseconds(milliseconds).isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds")
    return text.replace("+00:00", "Z")


def _unit(word: str, text: str) -> str:
    unit = _SHORT.get(word) or _SHORT_DAYS.get(word) or word
    unit = unit.removesuffix("s") if unit not in _UNITS else unit
    unit = _SHORT.get(unit, unit)
    if unit not in _UNITS:
        near = did_you_mean(word, [f"{one}s" for one in _UNITS])
        raise ValueError(f"{text!r} has {word!r}, which is no unit of time{near or '; there are ' + ', '.join(_UNITS)}")
    return unit


# MERGED from duration: Reads durations: milliseconds as a number, or a string such as `"250ms"`, `"30s"`, `"5m"`, …

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
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
        seconds = float(match[1]) * _UNIT_SECONDS[match[2] or "ms"]
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
        return f"{format_milliseconds(seconds)}ms"
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNIT_SECONDS[unit] and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{_number(seconds / _UNIT_SECONDS[unit])}{unit}"
    return f"{_number(seconds)}s"


def format_milliseconds(seconds: float) -> str:
    """`1500` for 1.5: how messages write a duration, without a fraction where there is none."""
    return _number(seconds * 1000)


def _number(value: float) -> str:
    """Without an exponent, which nothing here could read back, and without the noise of the last binary digits."""
    text = f"{value:.6f}" if value < 1e9 else f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
