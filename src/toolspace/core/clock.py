"""The time that stored records have: the time of their database, whatever the clock of this process says.

`SystemClock` is the clock of the process, `DatabaseClock` that of a database. Both are passed in, never replaced.
"""

from __future__ import annotations

import time
from typing import Final

LARGE_SKEW_SECONDS: Final = 5.0
"""From here on, people are told that two clocks differ."""
_NS_PER_MS: Final = 1_000_000
_PRECISE_NS: Final = 100 * _NS_PER_MS
"""A measurement whose round trip took no longer replaces the one before."""


class SystemClock:
    """The clocks of this process. A subclass may be wrong on purpose, or advance when a test says so."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970. It may jump, when someone sets the clock of the machine."""
        return time.time_ns()

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment. It never jumps."""
        return time.monotonic_ns()


class DatabaseClock:
    """The time of a database, in Unix milliseconds.

    A database server has a clock of its own: it is measured now and then, and between two measurements the monotonic
    clock of this process advances the time. Without a server, the time is the wall clock of this process, except that
    it never goes back: if someone sets the wall clock back, plans and timeouts still end when they should.
    """

    def __init__(self, system_clock: SystemClock | None = None) -> None:
        self._system_clock = clock = system_clock or SystemClock()
        self._is_measured = False
        self._anchor = clock.wall_ns(), clock.monotonic_ns()
        """A time of the database, and the monotonic time of the same moment. Replaced as a whole: threads read it."""

    def now_ms(self) -> int:
        return self._now_ns() // _NS_PER_MS

    @property
    def skew_seconds(self) -> float:
        """How far the wall clock of this process is ahead of the database; negative if it is behind."""
        return (self._system_clock.wall_ns() - self._now_ns()) / 1_000_000_000

    def monotonic_ns(self) -> int:
        """The clock of `sent_ns` and `received_ns`."""
        return self._system_clock.monotonic_ns()

    def measure(self, database_ms: int, *, sent_ns: int, received_ns: int) -> None:
        """The database said its time, in response to a request that was sent and answered at these moments.

        A slow answer replaces the measurement before only if the two contradict each other.
        """
        database_ns, round_trip = database_ms * _NS_PER_MS, received_ns - sent_ns
        time_ns, moment_ns = self._anchor
        expected_ns = time_ns + received_ns - moment_ns
        is_possible = database_ns <= expected_ns <= database_ns + round_trip
        if not self._is_measured or round_trip <= _PRECISE_NS or not is_possible:
            self._anchor = database_ns + round_trip // 2, received_ns
            self._is_measured = True

    def _now_ns(self) -> int:
        time_ns, moment_ns = self._anchor
        current_moment_ns = self._system_clock.monotonic_ns()
        now = time_ns + current_moment_ns - moment_ns
        if not self._is_measured and (wall_ns := self._system_clock.wall_ns()) > now:
            self._anchor = wall_ns, current_moment_ns
            return wall_ns
        return now
