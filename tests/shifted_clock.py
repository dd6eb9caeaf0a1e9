"""Clocks that are wrong: for tests of gateways on machines whose clocks differ, or are set while they run."""

from __future__ import annotations

import asyncpg

from toolspace.core.clock import SystemClock


class ShiftedClock(SystemClock):
    """The wall clock is so many seconds ahead; the monotonic clock is right, as always."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def wall_ns(self) -> int:
        return super().wall_ns() + round(self.seconds * 1_000_000_000)


async def set_database_ahead(url: str, interval: str) -> None:
    """Makes the clock of a database wrong: its function hides the one of the server."""
    connection = await asyncpg.connect(url)
    try:
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(
            "CREATE FUNCTION public.clock_timestamp() RETURNS timestamptz LANGUAGE sql AS "
            f"$$ SELECT pg_catalog.clock_timestamp() + INTERVAL '{interval}' $$"
        )
        await connection.execute(f'ALTER DATABASE "{name}" SET search_path = public, pg_catalog')
    finally:
        await connection.close()
