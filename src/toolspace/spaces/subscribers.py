"""Which streams someone reads, in whatever process: a call that is shown to nobody need not wait for an answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from toolspace.errors import StorageError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import presence

_log = logging.getLogger("toolspace.audience")


class StreamSubscribers:
    """Counts the readers of each stream here, and tells the others of the first and the last."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._readers: dict[str, int] = {}
        self._known: set[str] = set()
        """Streams of which the others know that someone reads them here."""
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def subscribed(self, stream: str) -> AsyncGenerator[None]:
        """Someone reads a stream while the block runs. When it begins, others know."""
        self._readers[stream] = self._readers.get(stream, 0) + 1
        try:
            await self._tell(stream)
            yield
        finally:
            self._readers[stream] -= 1
            if not self._readers[stream]:
                # Shielded: that nobody reads any more has to be told also by one whose connection broke.
                await asyncio.shield(asyncio.ensure_future(self._tell(stream)))

    async def register_again(self) -> None:
        """The others forgot who reads here: they hear of all of it."""
        self._known.clear()
        for stream in tuple(self._readers):
            await self._tell(stream)

    async def _tell(self, stream: str) -> None:
        """Writes down whether someone reads a stream. One at a time, so that what is written last is true."""
        lock = self._locks.setdefault(stream, asyncio.Lock())
        async with lock:
            known = stream in self._known
            wanted = self._readers.get(stream, 0) > 0
            if known == wanted:
                return
            holder, node = f"{self._ledger.node_id}/{stream}", self._ledger.node_id
            try:
                if wanted:
                    await self._ledger.write(presence.register, holder, [stream], node_id=node)
                    self._known.add(stream)
                else:
                    await self._ledger.write(presence.mark_left, holder, node_id=node)
                    self._known.discard(stream)
            except StorageError as error:
                _log.warning("who reads %s could not be written down: %s", stream, error)
        if not self._readers.get(stream):
            self._readers.pop(stream, None)
            if not lock.locked():
                self._locks.pop(stream, None)
