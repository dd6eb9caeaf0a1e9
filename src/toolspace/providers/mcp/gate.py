"""Lets a few servers start at once. One that takes long gives its place up, so that it delays nobody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

_PATIENCE_SECONDS = 3.0


class Gate:
    """Shared by the servers of one toolspace."""

    def __init__(self, limit: int, *, patience: float = _PATIENCE_SECONDS) -> None:
        self._places = asyncio.Semaphore(limit)
        self._patience = patience

    @asynccontextmanager
    async def slot(self) -> AsyncGenerator[None]:
        """A place to start in, for as long as the block runs, but no longer than the patience lasts."""
        await self._places.acquire()
        free = False

        def release() -> None:
            nonlocal free
            if not free:
                free = True
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._patience, release)
        try:
            yield
        finally:
            timer.cancel()
            release()
