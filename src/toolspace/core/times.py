"""Reads and writes durations, points in time, time zones and cron expressions. Pure functions; runs nothing at a time.

Durations of settings are milliseconds as a number, or a text such as `"250ms"`, `"30s"`, `"5m"` or `"2h"`.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final

from toolspace.core.names import did_you_mean

_UNIT_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|d|w)?\s*")
_MAX_MILLISECONDS: Final = 1e15

_DELAY_UNITS: Final = {"second": 1, "minute": 60, "hour": 3_600, "day": 86_400, "week": 604_800}
_ABBREVIATIONS: Final = {"s": 1, "sec": 1, "m": 60, "min": 60, "h": 3_600, "hr": 3_600}
_PLURALS: Final = {f"{word}s": seconds for word, seconds in (_DELAY_UNITS | _ABBREVIATIONS).items()}
_DELAY_SECONDS: Final = _DELAY_UNITS | _ABBREVIATIONS | _PLURALS | {"d": 86_400, "w": 604_800}
_DELAY_PART: Final = re.compile(r"(\d{1,9}(?:\.\d{1,3})?|an?)\s*([a-z]+)", re.ASCII)
_MAX_DELAY: Final = 100 * 366 * 86_400.0
_NAMED_CRON: Final = {
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
    "@monthly": "0 0 1 * *",
    "@weekly": "0 0 * * 0",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@hourly": "0 * * * *",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def parse_duration(value: object) -> float:
    """Returns the seconds of a configured duration. A bare number is milliseconds. Raises `ValueError`."""
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        if match is None:
            raise ValueError(
                f"{value!r} is not a duration; write milliseconds (30000) or a string such as "
                '"250ms", "30s", "5m", "2h", "1d", "1w"'
            )
        seconds = float(match[1]) * _UNIT_SECONDS[match[2] or "ms"]
        if seconds * 1000 > _MAX_MILLISECONDS:
            raise ValueError(f"{value[:40]!r} is too long; the maximum is 1e15 milliseconds")
        return seconds
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{value!r} is not a duration; write milliseconds or a string such as "30s"')
    if not 0 <= value <= _MAX_MILLISECONDS:
        raise ValueError(f"{value!r:.40} is not a duration; it must be a number of milliseconds from 0 to 1e15")
    return value / 1000


def format_duration(seconds: float) -> str:
    """Returns the shortest exact text of a duration, which `parse_duration` reads back: `90s`, `2h`."""
    if seconds < 1:
        return f"{format_milliseconds(seconds)}ms"
    for unit in ("w", "d", "h", "m"):
        if seconds >= _UNIT_SECONDS[unit] and seconds % _UNIT_SECONDS[unit] == 0:
            return f"{_format_number(seconds / _UNIT_SECONDS[unit])}{unit}"
    return f"{_format_number(seconds)}s"


def format_milliseconds(seconds: float) -> str:
    """Returns `1500` for 1.5, for messages. Writes no fraction if there is none."""
    return _format_number(seconds * 1000)


def _format_number(value: float) -> str:
    """Returns a number without an exponent, which `parse_duration` could not read, and without rounding noise."""
    text = f"{value:.6f}" if value < 1e9 else f"{value:.0f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def parse_delay(text: str) -> float:
    """Returns the seconds of "2 hours", "1 day and 30 minutes" or "90s". Raises `ValueError`."""
    words = text.strip().lower().removeprefix("in ").replace(",", " ").replace(" and ", " ")
    parts = _DELAY_PART.findall(words)
    if not parts or _DELAY_PART.sub("", words).strip():
        raise ValueError(f'{text!r} is not a delay; write it like "2 hours", "30 minutes" or "1 day"')
    total = 0.0
    for amount, word in parts:
        if word not in _DELAY_SECONDS:
            hint = did_you_mean(word, [f"{unit}s" for unit in _DELAY_UNITS]) or f"; there are {', '.join(_DELAY_UNITS)}"
            raise ValueError(f"{text!r} has {word!r}, which is not a unit of time{hint}")
        total += (1.0 if amount.startswith("a") else float(amount)) * _DELAY_SECONDS[word]
    if not 0 < total <= _MAX_DELAY:
        raise ValueError(f"{text!r} is not between one second and a hundred years")
    return total


def parse_iso_time(text: str, zone: str | None = None) -> datetime:
    """Returns an ISO time in UTC. A time without an offset is in `zone`, else in UTC. Raises `ValueError`."""
    try:
        time = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f'{text!r} is not an ISO time; write it like "2026-03-01T08:00:00Z"') from None
    if time.tzinfo is None:
        time = time.replace(tzinfo=get_time_zone(zone))
    try:
        return time.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is out of range") from None


def get_time_zone(name: str | None) -> tzinfo:
    """Returns a time zone by its name; UTC for None. Raises `ValueError`."""
    if name is None:
        return UTC
    from zoneinfo import ZoneInfo, available_timezones  # Imported here: it is slow to load, and few programs need it.

    try:
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError):  # Unknown, or no name at all, like "../etc".
        hint = did_you_mean(name, available_timezones()) or '; write it like "Europe/Berlin"'
        raise ValueError(f"there is no time zone {name!r}{hint}") from None


def next_cron_time(expression: str, after: datetime, zone: str | None = None) -> datetime | None:
    """Returns when a five-field cron expression matches next, strictly after a time; None if it never does.

    Raises `ValueError` if it is not a cron expression. A time that a clock change skips or repeats occurs once.
    """
    from cronsim import CronSim, CronSimError  # Imported here: only schedules need it.

    text = _NAMED_CRON.get(expression.strip().lower(), expression.strip())
    if len(text.split()) != 5:
        raise ValueError(f'{expression!r} is not a cron expression; it has five fields, like "0 9 * * *"')
    try:
        time = next(CronSim(text, after.astimezone(get_time_zone(zone))), None)
    except CronSimError as error:
        raise ValueError(f"{expression!r} is not a cron expression: {error}") from None
    return time.astimezone(UTC) if time is not None else None


def to_milliseconds(time: datetime) -> int:
    """Returns Unix milliseconds."""
    return round((time - _EPOCH) / timedelta(milliseconds=1))


def from_milliseconds(milliseconds: int) -> datetime:
    """Returns the UTC time of Unix milliseconds."""
    return _EPOCH + timedelta(milliseconds=milliseconds)


def format_iso(milliseconds: int) -> str:
    """Returns Unix milliseconds as an ISO time: `2026-03-01T08:00:00Z`."""
    text = from_milliseconds(milliseconds).isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds")
    return text.replace("+00:00", "Z")
