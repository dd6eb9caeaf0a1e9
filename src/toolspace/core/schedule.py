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


def seconds_in_words(text: str) -> float:
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


def time_of(text: str, zone: str | None = None) -> datetime:
    """An ISO time as a moment. One without an offset is meant in the zone, else in UTC. Raises `ValueError`."""
    try:
        found = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f'{text!r} is no ISO time; write it like "2026-03-01T08:00:00Z"') from None
    if found.tzinfo is None:
        found = found.replace(tzinfo=zone_of(zone))
    try:
        return found.astimezone(UTC)
    except OverflowError:
        raise ValueError(f"{text!r} is out of range") from None


def zone_of(name: str | None) -> tzinfo:
    """A time zone by its name; UTC where none is named. Raises `ValueError`."""
    if name is None:
        return UTC
    try:
        return ZoneInfo(name)
    except (ValueError, KeyError, OSError):  # Unknown, or no name at all: "../etc" must not be looked for.
        from zoneinfo import available_timezones

        near = did_you_mean(name, available_timezones()) or '; write it like "Europe/Berlin"'
        raise ValueError(f"there is no time zone {name!r}{near}") from None


def next_of_cron(expression: str, after: datetime, zone: str | None = None) -> datetime | None:
    """When a five-field cron expression comes next, strictly after a moment; None where it never does.

    Raises `ValueError` where it is none. A time that a change of the clocks skips or repeats comes once.
    """
    from cronsim import CronSim, CronSimError  # Only where something is scheduled.

    text = _NAMED.get(expression.strip().lower(), expression.strip())
    if len(text.split()) != 5:
        raise ValueError(f'{expression!r} is no cron expression; it has five fields, like "0 9 * * *"')
    try:
        found = next(CronSim(text, after.astimezone(zone_of(zone))), None)
    except CronSimError as error:
        raise ValueError(f"{expression!r} is no cron expression: {error}") from None
    return found.astimezone(UTC) if found is not None else None


def milliseconds_of(moment: datetime) -> int:
    return round((moment - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(milliseconds=1))


def moment_of(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def iso(milliseconds: int) -> str:
    """A moment as people write it: `2026-03-01T08:00:00Z`."""
    text = moment_of(milliseconds).isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds")
    return text.replace("+00:00", "Z")


def _unit(word: str, text: str) -> str:
    unit = _SHORT.get(word) or _SHORT_DAYS.get(word) or word
    unit = unit.removesuffix("s") if unit not in _UNITS else unit
    unit = _SHORT.get(unit, unit)
    if unit not in _UNITS:
        near = did_you_mean(word, [f"{one}s" for one in _UNITS])
        raise ValueError(f"{text!r} has {word!r}, which is no unit of time{near or '; there are ' + ', '.join(_UNITS)}")
    return unit
