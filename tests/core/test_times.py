"""Delays, ISO times, time zones and cron expressions."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from toolspace.core.times import format_iso, next_cron_time, parse_delay, parse_iso_time, to_milliseconds


@pytest.mark.spec("9.4")
@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2 hours", 7200),
        ("30 minutes", 1800),
        ("1 day", 86_400),
        ("an hour", 3600),
        ("in 1 day and 2 hours", 93_600),
        ("1.5 hours", 5400),
        ("90s", 90),
        ("5m", 300),
        ("2 weeks", 1_209_600),
        ("3d", 259_200),
        ("1 w", 604_800),
        ("45 secs", 45),
        ("10 mins", 600),
        ("3 hrs", 10_800),
    ],
)
def test_durations_in_words(text: str, seconds: float) -> None:
    assert parse_delay(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "2", "2 fortnights", "2 ds", "2 ws", "-1 hour", "0 seconds", "2 hours later", "9" * 40]
)
def test_invalid_delays_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"hours|unit|between"):
        parse_delay(text)


def _utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)


@pytest.mark.spec("9.4")
def test_cron_expressions_use_the_given_time_zone() -> None:
    assert next_cron_time("0 9 * * *", _utc(2026, 1, 5, 7, 30)) == _utc(2026, 1, 5, 9)
    assert next_cron_time("0 9 * * *", _utc(2026, 1, 5, 7, 30), "Europe/Berlin") == _utc(2026, 1, 5, 8)
    assert next_cron_time("0 9 * * *", _utc(2026, 7, 5, 7, 30), "Europe/Berlin") == _utc(2026, 7, 6, 7)
    assert next_cron_time("@daily", _utc(2026, 1, 5, 7)) == _utc(2026, 1, 6)


@pytest.mark.spec("9.4")
def test_a_time_that_a_clock_change_skips_or_repeats_occurs_once() -> None:
    # On 2026-03-29 the clocks of Berlin go from 2:00 to 3:00, on 2026-10-25 from 3:00 back to 2:00.
    next_time = next_cron_time("30 2 * * *", _utc(2026, 3, 28, 12), "Europe/Berlin")
    assert next_time == _utc(2026, 3, 29, 1)
    assert next_cron_time("30 2 * * *", next_time, "Europe/Berlin") == _utc(2026, 3, 30, 0, 30)
    autumn = next_cron_time("30 2 * * *", _utc(2026, 10, 24, 12), "Europe/Berlin")
    assert autumn is not None
    after = next_cron_time("30 2 * * *", autumn, "Europe/Berlin")
    assert after == _utc(2026, 10, 26, 1, 30)


@pytest.mark.parametrize("text", ["", "* * * *", "* * * * * *", "61 * * * *", "a b c d e", "0 0 31 2 *"])
def test_invalid_cron_expressions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="cron expression"):
        next_cron_time(text, _utc(2026, 1, 1))


def test_times_without_an_offset_are_in_the_given_zone() -> None:
    assert parse_iso_time("2026-03-01T08:00:00Z") == _utc(2026, 3, 1, 8)
    assert parse_iso_time("2026-03-01T08:00:00", "Europe/Berlin") == _utc(2026, 3, 1, 7)
    assert format_iso(to_milliseconds(_utc(2026, 3, 1, 8))) == "2026-03-01T08:00:00Z"
    with pytest.raises(ValueError, match="not an ISO time"):
        parse_iso_time("tomorrow")
    with pytest.raises(ValueError, match="time zone 'Europe/Berlni'; did you mean"):
        parse_iso_time("2026-03-01", "Europe/Berlni")
    with pytest.raises(ValueError, match="time zone"):
        parse_iso_time("2026-03-01", "../../etc/passwd")
