"""A server that repeats the request in its errors: no part of the key appears in errors and logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from tests.models.model_server import ModelTestServer, Reply, error_reply, events, stream_reply
from tests.models.requests import HELLO
from toolspace.errors import ModelError
from toolspace.models.registry import open_model

KEY = "private-Value.of_no_known-form-0123456789"
OTHER = "another-Value.that-is-secret"
HEAD = f"POST /v1 HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nX-Team-Token: {OTHER}\r\n"


def _raw(text: str) -> Reply:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(text.encode())
        await writer.drain()
        writer.close()

    return reply


def _at(place: int) -> str:
    """The key at a place where the message is cut."""
    return "x" * (place - 9) + KEY + "y" * 3000


ECHOES: list[Callable[[], Reply]] = [
    lambda: error_reply(401, {"error": {"message": HEAD}}),
    lambda: error_reply(400, HEAD.encode()),
    *(lambda at=at: error_reply(400, _at(at).encode()) for at in (300, 600, 601, 2400, 2401)),
    *(lambda at=at: error_reply(400, {"error": {"message": _at(at)}}) for at in (600, 601, 2400, 2401)),
    lambda: error_reply(400, {"error": {"message": KEY * 100}}),
    lambda: error_reply(500, (KEY * 100).encode()),
    lambda: error_reply(400, {"error": {"code": KEY, "message": {"headers": {"authorization": KEY}}}}),
    lambda: stream_reply(events({"error": {"message": HEAD}})),
    lambda: stream_reply(events({"error": {"message": _at(2400)}})),
    lambda: stream_reply(HEAD.encode(), kind="text/plain"),
    lambda: _raw(HEAD),
    lambda: _raw(f"HTTP/1.1 {KEY}\r\n\r\n"),
    lambda: _raw(f"HTTP/1.1 200 OK\r\n{KEY}\r\n\r\n"),
    lambda: _raw(f"HTTP/1.1 200 OK\r\nContent-Length: {KEY}\r\n\r\n"),
]


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("echo", ECHOES)
@pytest.mark.parametrize("provider", ["openai-chat", "openai-responses", "anthropic", "google"])
async def test_no_part_of_a_key_is_shown(
    echo: Callable[[], Reply], provider: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with ModelTestServer().serve() as server:
        server.reply(echo())
        model = open_model(
            provider,
            "m",
            base_url=server.url,
            api_key=KEY,
            headers={"X-Team-Token": f"Bearer {OTHER}"},
            environ={},
            retries=0,
        )
        try:
            with pytest.raises(ModelError) as error_info:
                await model.respond(HELLO)
        finally:
            await model.aclose()
    visible_text = f"{error_info.value} {error_info.value!r} {error_info.value.__cause__!r} {caplog.text}"
    for secret in (KEY, OTHER):
        assert [secret[at : at + 6] for at in range(len(secret) - 5) if secret[at : at + 6] in visible_text] == []
    assert len(str(error_info.value)) < 1_500
