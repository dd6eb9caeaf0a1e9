"""Serves event streams from a real database, and reads them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import aiohttp
import msgspec

from toolspace.core.stored_records import NewEvent, StoredEvent, Visibility
from toolspace.server.redaction import Viewer
from toolspace.server.requests import Receive, Scope, Send
from toolspace.server.responses import Problem, send_problem
from toolspace.server.sse_responses import PermissionCheck, StreamQuery, StreamRegistry, parse_stream_options
from toolspace.server.uvicorn_server import WebServer, bind_socket, socket_url, uvicorn_config
from toolspace.storage.queries import events
from toolspace.storage.sqlite.database import SqliteDatabase
from toolspace.storage.streams.hub import Hub


class Frame(NamedTuple):
    """One server-sent event."""

    id: str
    type: str
    data: Any


class Streams:
    """Streams in a database, and an application at `/NAME` for each. `?audience=public` reads as a member."""

    def __init__(self, database: SqliteDatabase, readers: StreamRegistry, **sizes: int) -> None:
        self.database = database
        self.readers = readers
        self.hub = Hub(self._load, self._bounds, **sizes)
        self.allowed: PermissionCheck | None = None
        self.expires_at: int | None = None
        self.url = ""

    async def _load(self, stream: str, after: int, limit: int) -> list[StoredEvent]:
        return await self.database.read(lambda: events.list_after(stream, after, limit))

    async def _bounds(self, stream: str) -> tuple[int, int]:
        return await self.database.read(lambda: events.get_bounds(stream))

    async def append(self, stream: str, *new: NewEvent) -> list[StoredEvent]:
        stored_events = await self.database.run(lambda: events.append(stream, new))
        self.hub.publish(stored_events)
        return stored_events

    async def say(self, stream: str, type: str, data: Mapping[str, Any], exposure: Visibility = "full") -> None:
        await self.append(stream, NewEvent(type, data, exposure))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = dict(parse_qsl(scope["query_string"].decode()))
        audience: Viewer = "public" if query.pop("audience", "") else "secret"
        headers = dict(scope["headers"])
        try:
            if scope["path"] == "/everything":
                answer = await self.readers.open_all_events(self.hub)
            else:
                stream_query = msgspec.convert(query, StreamQuery, strict=False)
                open_events = parse_stream_options(stream_query, headers.get(b"last-event-id", b"").decode())
                answer = await self.readers.open_stream(
                    self.hub,
                    scope["path"].lstrip("/"),
                    open_events,
                    viewer=audience,
                    is_allowed=self.allowed,
                    expires_at=self.expires_at,
                )
        except Problem as problem:
            await send_problem(send, problem)
            return
        await answer(scope, receive, send)


@asynccontextmanager
async def streaming(
    folder: Path, *, heartbeat: float = 15.0, stall: float = 20.0, recheck: float = 2.0, **sizes: int
) -> AsyncIterator[Streams]:
    database = await SqliteDatabase.open(folder / "streams.db")
    readers = StreamRegistry(heartbeat=heartbeat, stall=stall, recheck=recheck)
    streams = Streams(database, readers, **sizes)
    listen_socket = bind_socket("127.0.0.1", 0)
    server = WebServer(uvicorn_config(streams, stop_seconds=2))
    server_task = asyncio.create_task(server.serve(sockets=[listen_socket]))
    try:
        await server.wait_until_started(server_task)
        streams.url = socket_url(listen_socket)
        yield streams
    finally:
        await readers.aclose()
        await streams.hub.aclose()
        server.should_exit = True
        await server_task
        listen_socket.close()
        await database.aclose()


class FrameReader:
    """Reads frames of a response as they come, as a browser's EventSource does."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self.last_id = ""
        """The last event id, which a browser would send to resume."""
        self.raw = b""
        """All bytes that were read."""
        self._rest = b""
        self._frames: list[Frame] = []

    async def next(self) -> Frame | None:
        """The next frame; None at the end."""
        while not self._frames:
            chunk = await self.response.content.readany()
            if not chunk:
                return None
            self.raw += chunk
            *blocks, self._rest = (self._rest + chunk).split(b"\n\n")
            for block in blocks:
                self._take(block)
        return self._frames.pop(0)

    async def take(self, count: int) -> list[Frame]:
        frames = [await self.next() for _ in range(count)]
        assert None not in frames, "the stream ended"
        return [frame for frame in frames if frame is not None]

    async def rest(self) -> list[Frame]:
        """Reads all frames up to the end."""
        frames: list[Frame] = []
        while (frame := await self.next()) is not None:
            frames.append(frame)
        return frames

    async def until(self, text: bytes) -> None:
        """Reads until these bytes were received."""
        while text not in self.raw:
            chunk = await self.response.content.readany()
            assert chunk, "the stream ended"
            self.raw += chunk
            *blocks, self._rest = (self._rest + chunk).split(b"\n\n")
            for block in blocks:
                self._take(block)

    def _take(self, block: bytes) -> None:
        type, data = "message", []
        for line in block.decode().split("\n"):
            name, _, value = line.partition(": ")
            if name == "id":
                self.last_id = value
            elif name == "event":
                type = value
            elif name == "data":
                data.append(value)
        if data:
            text = "\n".join(data)
            value = text if text == "[DONE]" else msgspec.json.decode(text)
            self._frames.append(Frame(self.last_id, type, value))


@asynccontextmanager
async def open_events(
    session: aiohttp.ClientSession, url: str, *, last_event_id: str = "", **query: str
) -> AsyncIterator[FrameReader]:
    headers = {"last-event-id": last_event_id} if last_event_id else {}
    async with session.get(url, headers=headers, params=query) as response:
        assert response.status == 200, await response.text()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield FrameReader(response)
