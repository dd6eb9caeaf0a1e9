"""Durations in the configuration."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolspace.core.times import format_duration, format_milliseconds, parse_duration

quick = settings(max_examples=200, deadline=None)


@pytest.mark.parametrize(
    ("setting", "seconds"),
    [
        (30_000, 30.0), (0, 0.0), (1.5, 0.0015), ("250ms", 0.25), ("30s", 30.0), ("5m", 300.0), ("2h", 7200.0),
        ("1d", 86_400.0), ("1w", 604_800.0), ("1.5h", 5400.0), (" 30 s ", 30.0), ("250", 0.25), ("0s", 0.0),
    ],
)  # fmt: skip
def test_numbers_are_milliseconds_and_text_has_units(setting: object, seconds: float) -> None:
    assert parse_duration(setting) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "setting",
    [
        "", "s", "5 minutes", "-5s", "1e3", "5S", "5M", "1h30m", "٣s", "5s\n5s", "inf", "nan", "0x10", "1.s", ".5s",
        "9" * 400, "9" * 400 + "w", True, False, None, [], {}, b"5s", -1, -0.001, math.nan, math.inf, -math.inf,
        10**400, 10**5000, 1e300, 1j,
    ],
    ids=lambda item: repr(item)[:20] if not isinstance(item, int) else "int",
)  # fmt: skip
def test_invalid_durations_are_refused(setting: object) -> None:
    with pytest.raises(ValueError) as caught_error:
        parse_duration(setting)
    assert len(str(caught_error.value)) < 600


def test_the_error_for_an_invalid_duration_has_an_example() -> None:
    with pytest.raises(ValueError, match=r"'5 minutes' is not a duration; write milliseconds \(30000\) or .*\"5m\""):
        parse_duration("5 minutes")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"), (0.25, "250ms"), (0.0005, "0.5ms"), (1, "1s"), (1.5, "1.5s"), (90, "90s"), (60, "1m"), (3600, "1h"),
        (86_400, "1d"), (604_800, "1w"), (5400, "90m"), (1_234_567, "1234567s"), (0.1 + 0.2, "300ms"),
    ],
)  # fmt: skip
def test_a_duration_is_formatted_in_its_largest_unit(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@quick
@given(st.integers(0, 10**15) | st.floats(0, 1e12))
def test_formatted_durations_can_be_parsed_back(value: float) -> None:
    seconds = parse_duration(value)
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=1e-6, abs=1e-9)
    assert "e" not in format_milliseconds(seconds)


@pytest.mark.spec("1.7")
@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.5, "1500"),
        (0.1, "100"),
        (30, "30000"),
        (0.0015, "1.5"),
        (0.29, "290"),
        (12_345_678.9, "12345678900"),
        (1e8, "100000000000"),
    ],
)
def test_milliseconds_are_formatted_without_rounding_noise(seconds: float, text: str) -> None:
    assert format_milliseconds(seconds) == text


@quick
@given(st.text())
def test_any_text_is_a_finite_duration_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= parse_duration(text) <= 1e12
