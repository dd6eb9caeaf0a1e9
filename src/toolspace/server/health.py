"""Whether this process can take requests: its database answers and keeps what it is given, and it is not about to stop.
Tells no internals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger("toolspace.server")
_SECONDS = 2.0
"""How long the database may take. Whoever asks wants to know soon."""
_FRESH_SECONDS = 0.5
"""How long an answer holds. Anyone may ask, as often as they like: the database hears of it this often at most."""

STOPPING = "it is stopping"
STARTING = "it is starting"
NO_DATABASE = "the database does not answer"
NO_WRITES = "the database takes nothing in"


class Readiness:
    """What stands against sending requests here."""

    def __init__(
        self,
        look: Callable[[], Awaitable[object]],
        write: Callable[[], Awaitable[object]],
        *,
        seconds: float = _SECONDS,
    ) -> None:
        self.started = False
        self.stopping = False
        self._tries = ((look, NO_DATABASE), (write, NO_WRITES))
        """Asks the database for anything, and has it keep something: a full disk can be read. They raise where it
        cannot be done."""
        self._seconds = seconds
        self._looking: asyncio.Task[str | None] | None = None
        self._looked_at = -1e9

    async def reasons(self) -> list[str]:
        """Why not; nothing where it is ready."""
        found = [STOPPING] if self.stopping else [] if self.started else [STARTING]
        if not self.stopping and (fault := await self._fault()) is not None:
            found.append(fault)
        return found

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _fault(self) -> str | None:
        now = time.monotonic()
        looking = self._looking
        if looking is None or (looking.done() and now - self._looked_at > _FRESH_SECONDS):
            self._looked_at = now
            looking = self._looking = asyncio.create_task(self._look_once())
        # Shielded: one who stops waiting must not take the answer away from the others.
        return await asyncio.shield(looking)

    async def _look_once(self) -> str | None:
        for attempt, fault in self._tries:
            try:
                async with asyncio.timeout(self._seconds):
                    await attempt()
            except Exception as error:  # Whatever it is: it could not be done.
                _log.warning("%s: %s", fault, error or "it took too long")
                return fault
        return None
