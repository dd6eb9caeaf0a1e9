"""Whether this process can take requests: its database answers, and it is not about to stop. Tells no internals."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

_log = logging.getLogger("toolspace.gateway")
_SECONDS = 2.0
"""How long the database may take. Whoever asks wants to know soon."""
_FRESH_SECONDS = 0.5
"""How long an answer holds. Anyone may ask, as often as they like: the database hears of it this often at most."""

STOPPING = "it is stopping"
STARTING = "it is starting"
NO_DATABASE = "the database does not answer"


class Readiness:
    """What stands against sending requests here."""

    def __init__(self, look: Callable[[], Awaitable[object]], *, seconds: float = _SECONDS) -> None:
        self.started = False
        self.stopping = False
        self._look = look
        """Asks the database for anything; raises where it does not answer."""
        self._seconds = seconds
        self._looking: asyncio.Task[bool] | None = None
        self._looked_at = -1e9

    async def reasons(self) -> list[str]:
        """Why not; nothing where it is ready."""
        found = [STOPPING] if self.stopping else [] if self.started else [STARTING]
        if not self.stopping and not await self._database_answers():
            found.append(NO_DATABASE)
        return found

    async def aclose(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _database_answers(self) -> bool:
        now = time.monotonic()
        looking = self._looking
        if looking is None or (looking.done() and now - self._looked_at > _FRESH_SECONDS):
            self._looked_at = now
            looking = self._looking = asyncio.create_task(self._look_once())
        # Shielded: one who stops waiting must not take the answer away from the others.
        return await asyncio.shield(looking)

    async def _look_once(self) -> bool:
        try:
            async with asyncio.timeout(self._seconds):
                await self._look()
        except Exception as error:  # Whatever it is: there was no answer.
            _log.warning("the database does not answer: %s", error or "it took too long")
            return False
        return True
