"""The web server under a gateway: patient with streams, not with those who never say what they want."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import pytest

from tests.gateway.serving import Api
from toolspace.mcpserver import http

pytestmark = pytest.mark.spec("8.3")


async def connect(api: Api) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    where = urlsplit(api.url)
    return await asyncio.open_connection(where.hostname, where.port)


@pytest.mark.parametrize("begun", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"])
async def test_a_connection_that_never_asks_anything_is_closed(
    api: Api, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    reader, writer = await connect(api)
    writer.write(begun)

    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_the_second_head_of_a_connection_has_its_time_too(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    reader, writer = await connect(api)
    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    first = await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /health HTTP/1.1\r\nHo")

    async with asyncio.timeout(20):
        assert await reader.read() == b""
    assert first.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_a_stream_may_be_silent_for_longer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "HEAD_SECONDS", 0.05)
    await api.create("/api/spaces", id="room", name="Room")
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    await api.ask("PUT", "/api/spaces/room/members/ann")
    async with api.session.get(f"{api.url}/api/spaces/room/stream", headers=api.headers) as response:
        idle, writer = await connect(api)
        await idle.read()  # Others have been closed by now.
        writer.close()
        await api.create("/api/spaces/room/messages", entityId="ann", content="still here?")
        async with asyncio.timeout(20):
            async for line in response.content:
                if b"still here?" in line:
                    break
