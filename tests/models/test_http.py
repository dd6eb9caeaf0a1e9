"""The connections that models share."""

from __future__ import annotations

import asyncio

import pytest

from tests.models.model_server import ModelTestServer, stream_reply, text_completion
from toolspace.core.language_model import ModelRequest, UserTurn
from toolspace.models.http import ModelHttpClient
from toolspace.models.registry import open_model

HELLO = ModelRequest(system="", turns=[UserTurn("Hello")])


async def test_models_share_their_connections(server: ModelTestServer) -> None:
    server.reply(stream_reply(text_completion("ok")))
    http = ModelHttpClient()
    models = [open_model("openai", name, base_url=server.url, environ={}, http=http) for name in ("a", "b", "c")]
    for model in models:
        await model.respond(HELLO)
        await model.aclose()  # What is shared stays open.
    assert server.connections == 1
    await http.aclose()
    await models[0].respond(HELLO)
    assert server.connections == 2
    await http.aclose()


async def test_a_model_may_be_used_from_several_event_loops(server: ModelTestServer) -> None:
    server.reply(stream_reply(text_completion("ok")))
    model = open_model("openai", "x", base_url=server.url, environ={})

    async def ask() -> str:
        try:
            return (await model.respond(HELLO)).text
        finally:
            await model.aclose()

    assert await asyncio.to_thread(lambda: asyncio.run(ask())) == "ok"
    assert await ask() == "ok"


async def test_a_proxy_in_the_environment_is_used(server: ModelTestServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.reply(stream_reply(text_completion("ok")))
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", "inside.example")
    model = open_model("openai", "x", base_url="http://models.example/v1", environ={}, retries=0)
    assert (await model.respond(HELLO)).text == "ok"
    assert server.requests[0].path == "http://models.example/v1/chat/completions"
    await model.aclose()


async def test_many_requests_run_at_once(server: ModelTestServer) -> None:
    barrier = asyncio.Barrier(150)

    async def together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await barrier.wait()
        await stream_reply(text_completion("ok"))(reader, writer)

    server.reply(together)
    model = open_model("openai", "x", base_url=server.url, environ={})
    async with asyncio.timeout(30):
        turns = await asyncio.gather(*(model.respond(HELLO) for _ in range(150)))
    assert {turn.text for turn in turns} == {"ok"}
    await model.aclose()
