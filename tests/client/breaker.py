"""A line between a client and a gateway that breaks when a test says so, or after some bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class Breaker:
    """Forwards connections. `break_after` says after how many bytes of an answer each breaks; None: never."""

    def __init__(self, target: str, break_after: Callable[[], int | None] = lambda: None) -> None:
        parts = urlsplit(target)
        self.target = parts.hostname or "", parts.port or 80
        self.break_after = break_after
        self.broken = 0
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    def cut(self) -> None:
        """Breaks every connection there is, as a lost network does."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there, out = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(out)
        sending = asyncio.ensure_future(self._forward(reader, out, None))
        try:
            await self._forward(there, writer, self.break_after())
        finally:
            sending.cancel()
            for one in (writer, out):
                self._writers.discard(one)
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
        try:
            while data := await reader.read(65536):
                if limit is not None and len(data) > limit:
                    writer.write(data[:limit])
                    await writer.drain()
                    self.broken += 1
                    return
                limit = None if limit is None else limit - len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


@asynccontextmanager
async def breaking(target: str, break_after: Callable[[], int | None] = lambda: None) -> AsyncIterator[Breaker]:
    breaker = Breaker(target, break_after)
    server = await asyncio.start_server(breaker._serve, "127.0.0.1", 0)
    breaker.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield breaker
    finally:
        server.close()
        breaker.cut()
