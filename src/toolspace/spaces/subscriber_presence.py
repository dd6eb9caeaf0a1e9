"""Which streams have subscribers, in any process. A call that needs a person fails at once if nobody would see it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from toolspace.errors import StorageError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import presence

_log = logging.getLogger("toolspace.subscribers")


class StreamSubscribers:
    """Counts the subscribers of each stream in this process, and stores whether there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, int] = {}
        self._registered: set[str] = set()
        """Streams that are stored as having subscribers here."""
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def subscribed(self, stream: str) -> AsyncGenerator[None]:
        """Counts a subscriber while the block runs. Other processes know of it when the block starts."""
        self._counts[stream] = self._counts.get(stream, 0) + 1
        try:
            await self._register(stream)
            yield
        finally:
            self._counts[stream] -= 1
            if not self._counts[stream]:
                # Shielded: it is also stored for a subscriber whose connection broke.
                await asyncio.shield(asyncio.ensure_future(self._register(stream)))

    async def register_again(self) -> None:
        """Stores all streams again: other processes declared this one dead and deleted them."""
        self._registered.clear()
        for stream in tuple(self._counts):
            await self._register(stream)

    async def _register(self, stream: str) -> None:
        """Stores whether a stream has subscribers. One at a time, so that the last write is true."""
        lock = self._locks.setdefault(stream, asyncio.Lock())
        async with lock:
            has_subscribers = self._counts.get(stream, 0) > 0
            if has_subscribers == (stream in self._registered):
                return
            node_id = self._ledger.node_id
            holder = f"{node_id}/{stream}"
            try:
                if has_subscribers:
                    await self._ledger.write(presence.register, holder, [stream], node_id=node_id)
                    self._registered.add(stream)
                else:
                    await self._ledger.write(presence.mark_left, holder, node_id=node_id)
                    self._registered.discard(stream)
            except StorageError as error:
                _log.warning("Stream %s: storing that it has subscribers failed: %s", stream, error)
        if not self._counts.get(stream):
            self._counts.pop(stream, None)
            if not lock.locked():
                self._locks.pop(stream, None)
