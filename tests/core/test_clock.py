"""The clock of a database: measured at a server, or the wall clock of the process that never goes back."""

from __future__ import annotations

import pytest

from toolspace.core.clock import DatabaseClock, SystemClock

_SECOND = 1_000_000_000
_MINUTE_MS = 60_000


class ManualClock(SystemClock):
    """Both clocks stand still until the test moves them."""

    def __init__(self) -> None:
        self.wall, self.monotonic = 1_000_000 * _SECOND, 50 * _SECOND

    def wall_ns(self) -> int:
        return self.wall

    def monotonic_ns(self) -> int:
        return self.monotonic

    def advance(self, seconds: float) -> None:
        self.wall += round(seconds * _SECOND)
        self.monotonic += round(seconds * _SECOND)


def test_time_goes_on_when_the_wall_clock_is_set_back() -> None:
    system_clock = ManualClock()
    clock = DatabaseClock(system_clock)
    start = clock.now_ms()
    system_clock.advance(10)
    assert clock.now_ms() == start + 10_000
    system_clock.wall -= 3600 * _SECOND
    assert clock.now_ms() == start + 10_000
    system_clock.advance(5)
    assert clock.now_ms() == start + 15_000
    assert clock.skew_seconds == -3600


def test_time_follows_the_wall_clock_forward_after_a_suspension() -> None:
    system_clock = ManualClock()
    clock = DatabaseClock(system_clock)
    start = clock.now_ms()
    system_clock.wall += 3600 * _SECOND
    assert clock.now_ms() == start + 3_600_000
    assert clock.skew_seconds == 0


@pytest.mark.parametrize("jump", [-3600, 3600])
def test_measured_time_ignores_the_wall_clock(jump: int) -> None:
    system_clock = ManualClock()
    clock = DatabaseClock(system_clock)
    clock.measure(5_000, sent_ns=system_clock.monotonic, received_ns=system_clock.monotonic)
    system_clock.advance(10)
    system_clock.wall += jump * _SECOND
    assert clock.now_ms() == 15_000
    assert clock.skew_seconds == system_clock.wall / _SECOND - 15


def test_half_of_the_round_trip_is_added() -> None:
    system_clock = ManualClock()
    clock = DatabaseClock(system_clock)
    sent_ns = system_clock.monotonic
    system_clock.advance(0.04)
    clock.measure(5_000, sent_ns=sent_ns, received_ns=system_clock.monotonic)
    assert clock.now_ms() == 5_020


def test_a_slow_answer_changes_the_time_only_if_it_contradicts_it() -> None:
    system_clock = ManualClock()
    clock = DatabaseClock(system_clock)
    clock.measure(0, sent_ns=system_clock.monotonic, received_ns=system_clock.monotonic)
    sent_ns = system_clock.monotonic
    system_clock.advance(8)
    clock.measure(7_000, sent_ns=sent_ns, received_ns=system_clock.monotonic)  # It took 8 s; 8,000 is possible.
    assert clock.now_ms() == 8_000
    clock.measure(_MINUTE_MS, sent_ns=sent_ns, received_ns=system_clock.monotonic)  # The machine was suspended.
    assert clock.now_ms() == _MINUTE_MS + 4_000
