"""Errors of the chat completions adapter: error responses, broken streams, timeouts."""

from __future__ import annotations

import asyncio

import pytest

from tests.models.model_server import (
    ModelTestServer,
    chat_chunk,
    error_reply,
    events,
    hangs_up,
    stream_reply,
)
from tests.models.requests import HELLO, respond_and_record
from toolspace.core.language_model import (
    Model,
    ModelRequest,
    ModelSettings,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.http import ModelEndpoint
from toolspace.models.openai import OpenAIChatModel
from toolspace.models.registry import open_model
from toolspace.models.streaming import StreamLimits

REFUSALS = [
    (401, {"error": {"message": "Incorrect API key provided", "code": "invalid_api_key"}}, "not_permitted"),
    (403, {"error": {"message": "Country not supported"}}, "not_permitted"),
    (404, {"error": {"message": "The model `x` does not exist", "code": "model_not_found"}}, "not_found"),
    (400, {"error": {"message": "Invalid schema", "type": "invalid_request_error"}}, "invalid"),
    (422, {"detail": [{"msg": "field required"}]}, "invalid"),
    (
        400,
        {
            "error": {
                "message": "This model's maximum context length is 8192 tokens.",
                "code": "context_length_exceeded",
            }
        },
        "too_long",
    ),
    (413, b"<html>", "too_long"),
    (429, {"error": {"message": "Rate limit reached", "code": "rate_limit_exceeded"}}, "rate_limited"),
    (
        429,
        {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}},
        "not_permitted",
    ),
    (402, {"error": {"message": "Insufficient Balance"}}, "not_permitted"),
    (500, {"error": {"message": "The server had an error", "type": "server_error"}}, "unavailable"),
    (502, b"<html>Bad gateway</html>", "unavailable"),
    (503, {"error": {"message": "overloaded"}}, "overloaded"),
    (529, {"error": {"type": "overloaded_error", "message": "Overloaded"}}, "overloaded"),
    (307, b"", "not_found"),
]


@pytest.mark.parametrize(("code", "body", "kind"), REFUSALS)
async def test_an_error_response_has_a_kind(
    server: ModelTestServer, chat_model: Model, code: int, body: object, kind: str
) -> None:
    server.reply(error_reply(code, body))
    with pytest.raises(ModelError) as error_info:
        await chat_model.respond(HELLO)
    assert (error_info.value.kind, error_info.value.status) == (kind, code)
    assert str(error_info.value).startswith("openai:gpt-4.1: ")
    assert "sk-secret" not in str(error_info.value)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry_after": "7"}, 7.0), ({"retry_after_ms": "250"}, 0.25), ({"retry_after": "soon"}, None), ({}, None)],
)
async def test_the_retry_delay_is_the_one_of_the_provider(
    server: ModelTestServer, chat_model: Model, headers: dict[str, str], seconds: float | None
) -> None:
    server.reply(error_reply(429, {"error": {"message": "slow down"}}, **headers))
    with pytest.raises(ModelError) as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.retry_after == seconds


async def test_an_error_event_in_a_stream_is_an_error(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(
        stream_reply(events(chat_chunk({"content": "Hel"}), {"error": {"message": "Overloaded", "code": 529}}))
    )
    with pytest.raises(ModelError, match="Overloaded") as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.kind == "overloaded"


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("end", [True, False], ids=["ended", "cut off"])
async def test_an_incomplete_stream_is_an_error(server: ModelTestServer, chat_model: Model, end: bool) -> None:
    server.reply(stream_reply(events(chat_chunk({"content": "Hel"}), chat_chunk({"content": "lo"})), end=end))
    with pytest.raises(ModelError) as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.kind == "broken"
    assert error_info.value.is_transient


async def test_a_stream_that_ends_after_the_finish_reason_is_complete(
    server: ModelTestServer, chat_model: Model
) -> None:
    server.reply(stream_reply(events(chat_chunk({"content": "Hello"}, "stop")), end=False))
    turn, _ = await respond_and_record(chat_model)
    assert turn.text == "Hello"


@pytest.mark.parametrize("body", [b"data: {bad\n\n", b'data: {"choices": 3}\n\n', b"data: \xff\n\n", b"data: [[[\n\n"])
async def test_invalid_events_are_an_error(server: ModelTestServer, chat_model: Model, body: bytes) -> None:
    server.reply(stream_reply(body))
    with pytest.raises(ModelError) as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.kind == "broken"


async def test_a_web_page_instead_of_a_response_is_explained(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(b"<!doctype html><title>Welcome</title>", kind="text/html"))
    with pytest.raises(ModelError, match="check base_url") as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.kind == "not_found"


async def test_a_server_that_closes_the_connection_or_is_unreachable_is_unavailable(
    server: ModelTestServer, chat_model: Model
) -> None:
    server.reply(hangs_up)
    with pytest.raises(ModelError, match="closed the connection") as error_info:
        await chat_model.respond(HELLO)
    assert error_info.value.kind == "unavailable"
    unreachable_model = open_model("openai", "x", base_url="http://127.0.0.1:1/v1", api_key="k", environ={}, retries=0)
    with pytest.raises(ModelError, match=r"cannot connect to 127\.0\.0\.1:1") as error_info:
        await unreachable_model.respond(HELLO)
    assert error_info.value.kind == "unavailable"
    await unreachable_model.aclose()


@pytest.mark.spec("11.7")
async def test_cancelling_closes_the_connection(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(server.never_answer)
    request_task = asyncio.create_task(chat_model.respond(HELLO))
    async with asyncio.timeout(10):
        await server.request_arrived.wait()
        request_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request_task
        await server.client_closed.wait()


async def test_a_slow_response_times_out(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(server.never_answer)
    request = ModelRequest(system="", turns=[UserTurn("x")], settings=ModelSettings(timeout=0.05))
    with pytest.raises(ModelError, match=r"no answer within 0.05 s") as error_info:
        await chat_model.respond(request)
    assert error_info.value.kind == "unavailable"


def open_limited(server: ModelTestServer, limits: StreamLimits) -> Model:
    endpoint = ModelEndpoint(name="openai:gpt-4.1", url=f"{server.url}/v1/chat/completions")
    return OpenAIChatModel("gpt-4.1", endpoint, limits=limits)


async def test_a_stream_left_open_after_its_end_does_not_block(server: ModelTestServer) -> None:
    model = open_limited(server, StreamLimits(last_events_seconds=0.05))

    async def left_open(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = events(chat_chunk({"content": "Hello"}, "stop"))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n" + body)
        await server.never_answer(reader, writer)

    server.reply(left_open)
    async with asyncio.timeout(10):
        turn, _ = await respond_and_record(model)
        await server.client_closed.wait()
    await model.aclose()
    assert (turn.text, turn.finish) == ("Hello", "stop")


async def test_responses_have_a_size_limit(server: ModelTestServer) -> None:
    model = open_limited(server, StreamLimits(max_size=10_000))
    server.reply(stream_reply(events(*[chat_chunk({"content": "x" * 1000})] * 20)))
    with pytest.raises(ModelError, match="more than") as error_info:
        await model.respond(HELLO)
    await model.aclose()
    assert not error_info.value.is_transient
