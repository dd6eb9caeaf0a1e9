"""Measures the clock of the database now and then, and warns if the clock of this process differs from it.

The sweeper runs it in a task of its own.
"""

from __future__ import annotations

import logging
from typing import Final

from toolspace.core.clock import LARGE_SKEW_SECONDS
from toolspace.spaces.ledger import Ledger

_log = logging.getLogger("toolspace.sweeper")

MEASURE_SECONDS: Final = 2.0


class ClockMonitor:
    """Logs when the skew becomes large, and when it is small again."""

    def __init__(self, ledger: Ledger) -> None:
        self._database = ledger.database
        self._has_warned = False

    async def check(self) -> float:
        """Measures once. Returns how many seconds to wait until the next time."""
        await self._database.urgent_access.measure_clock()
        skew = self._database.clock.skew_seconds
        is_large = abs(skew) > LARGE_SKEW_SECONDS
        if is_large and not self._has_warned:
            direction = "ahead of" if skew > 0 else "behind"
            cause = (
                "records have the time of the database"
                if self._database.is_shared
                else "it was set back while this process ran; records continue with the earlier time until a restart"
            )
            _log.warning("the clock of this machine is %.1f s %s the database: %s", abs(skew), direction, cause)
        elif self._has_warned and not is_large:
            _log.info("the clock of this machine agrees with the database again")
        self._has_warned = is_large
        return MEASURE_SECONDS
