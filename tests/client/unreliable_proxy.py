"""A TCP proxy between a client and a gateway that drops connections on request, or after some bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit


class UnreliableProxy:
    """Forwards connections. `break_after` returns after how many bytes of a response to disconnect; None: never."""

    def __init__(self, target: str, break_after: Callable[[], int | None] = lambda: None) -> None:
        parts = urlsplit(target)
        self.target = parts.hostname or "", parts.port or 80
        self.break_after = break_after
        self.dropped_count = 0
        self.url = ""
        self._writers: set[asyncio.StreamWriter] = set()

    def disconnect_all(self) -> None:
        """Drops all connections, as a lost network does."""
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            gateway_reader, gateway_writer = await asyncio.open_connection(*self.target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(gateway_writer)
        send_task = asyncio.ensure_future(self._forward(reader, gateway_writer, None))
        try:
            await self._forward(gateway_reader, writer, self.break_after())
        finally:
            send_task.cancel()
            for stream in (writer, gateway_writer):
                self._writers.discard(stream)
                stream.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limit: int | None) -> None:
        try:
            while data := await reader.read(65536):
                if limit is not None and len(data) > limit:
                    writer.write(data[:limit])
                    await writer.drain()
                    self.dropped_count += 1
                    return
                limit = None if limit is None else limit - len(data)
                writer.write(data)
                await writer.drain()
        except OSError:
            pass


@asynccontextmanager
async def open_unreliable_proxy(
    target: str, break_after: Callable[[], int | None] = lambda: None
) -> AsyncIterator[UnreliableProxy]:
    proxy = UnreliableProxy(target, break_after)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.disconnect_all()
