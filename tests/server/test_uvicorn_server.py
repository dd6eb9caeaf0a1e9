"""The timeouts of the web server."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server.gateway_api import ApiClient, open_app_api
from toolspace.server import uvicorn_server
from toolspace.server.gateway import Gateway
from toolspace.server.routes import calls

pytestmark = pytest.mark.spec("8.3")


async def connect(api: ApiClient) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url_parts = urlsplit(api.url)
    return await asyncio.open_connection(url_parts.hostname, url_parts.port)


@pytest.mark.parametrize("start", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX-A: b"])
async def test_a_connection_without_a_request_is_closed(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch, start: bytes
) -> None:
    monkeypatch.setattr(uvicorn_server, "HEADER_TIMEOUT_SECONDS", 0.05)
    reader, writer = await connect(api)
    writer.write(start)

    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()


async def test_the_header_timeout_applies_to_every_request_of_a_connection(
    api: ApiClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_server, "HEADER_TIMEOUT_SECONDS", 0.05)
    reader, writer = await connect(api)
    writer.write(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
    first = await reader.readuntil(b'{"status":"ok"}')
    writer.write(b"GET /health HTTP/1.1\r\nHo")

    async with asyncio.timeout(20):
        assert await reader.read() == b""
    assert first.startswith(b"HTTP/1.1 200")
    writer.close()


async def test_the_timeouts_do_not_apply_to_a_silent_stream(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_server, "HEADER_TIMEOUT_SECONDS", 0.05)
    await api.create("/api/spaces", id="room", name="Room")
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    await api.request("PUT", "/api/spaces/room/members/ann")
    async with api.session.get(f"{api.url}/api/spaces/room/stream", headers=api.headers) as response:
        idle, writer = await connect(api)
        await idle.read()  # An idle connection was closed in this time.
        writer.close()
        await api.create("/api/spaces/room/messages", entityId="ann", content="still here?")
        async with asyncio.timeout(20):
            async for line in response.content:
                if b"still here?" in line:
                    break


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
async def test_a_response_that_the_client_does_not_read_is_dropped(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, connection: str
) -> None:
    disconnect_event = asyncio.Event()
    usual: Any = uvicorn_server.http_protocol()

    class Watched(usual):
        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            disconnect_event.set()

    monkeypatch.setattr(uvicorn_server, "http_protocol", lambda: Watched)
    monkeypatch.setattr(uvicorn_server, "READ_TIMEOUT_SECONDS", 0.05)
    output_writer = await gateway.toolspace.outputs.create(session="s1", owner="ann", tool="read_file")
    await output_writer.write("x" * 16_000_000)
    stored_output = await output_writer.commit()
    async with open_app_api(gateway, calls.output_routes) as api:
        _, writer = await connect(api)
        head = [f"GET /api/outputs/{stored_output.handle} HTTP/1.1", "Host: 127.0.0.1", f"Connection: {connection}"]
        head += [f"{name}: {value}" for name, value in api.headers.items()]
        writer.transport.pause_reading()
        writer.write("\r\n".join([*head, "", ""]).encode())
        async with asyncio.timeout(20):
            await disconnect_event.wait()
        writer.transport.abort()
