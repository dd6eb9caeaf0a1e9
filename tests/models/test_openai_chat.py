"""Responses of OpenAI's chat completions API, and of servers with their own variants of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.models.model_server import (
    USED,
    ModelTestServer,
    chat_chunk,
    chat_completion,
    error_reply,
    events,
    stream_reply,
    text_completion,
    tool_call_delta,
)
from tests.models.requests import respond_and_record
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelRequest,
    TextDelta,
    ThinkingDelta,
    UserTurn,
)


@pytest.mark.spec("11.7")
async def test_a_response_is_streamed(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("Hel", "lo, ", "wörld")))
    turn, parts = await respond_and_record(chat_model)
    assert turn.text == "Hello, wörld"
    assert parts == [TextDelta("Hel"), TextDelta("lo, "), TextDelta("wörld")]
    assert (turn.finish, turn.model) == ("stop", "openai:gpt-4.1")
    usage = turn.usage
    assert (usage.requests, usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1, 1000, 400, 50)
    assert usage.cost == pytest.approx((600 * 2 + 400 * 0.5 + 50 * 8) / 1e6)


@pytest.mark.parametrize("split", [1, 2, 3, 7, 64])
async def test_chunks_may_be_split_anywhere(server: ModelTestServer, chat_model: Model, split: int) -> None:
    body = chat_completion(
        {"content": "Größe: 🎉 "},
        tool_call_delta(0, id="call_a", name="add", arguments=""),
        tool_call_delta(0, arguments='{"a"'),
        tool_call_delta(0, arguments=": 1}"),
        finish="tool_calls",
    )
    server.reply(stream_reply(body, split=split))
    turn, _ = await respond_and_record(chat_model)
    assert turn.text == "Größe: 🎉 "
    assert turn.calls == (ModelCall("call_a", "add", '{"a": 1}'),)
    assert turn.finish == "tools"


@pytest.mark.spec("11.7")
async def test_parallel_calls_may_be_interleaved(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(
        stream_reply(
            chat_completion(
                tool_call_delta(0, id="call_a", name="add", arguments=""),
                tool_call_delta(1, id="call_b", name="mul", arguments='{"x"'),
                tool_call_delta(0, arguments='{"a":'),
                tool_call_delta(1, arguments=":2}"),
                tool_call_delta(0, arguments="1}"),
                finish="tool_calls",
            )
        )
    )
    turn, parts = await respond_and_record(chat_model)
    assert turn.calls == (ModelCall("call_a", "add", '{"a":1}'), ModelCall("call_b", "mul", '{"x":2}'))
    assert parts == [
        CallStarted(0, "call_a", "add"),
        CallStarted(1, "call_b", "mul"),
        CallDelta(1, '{"x"'),
        CallDelta(0, '{"a":'),
        CallDelta(1, ":2}"),
        CallDelta(0, "1}"),
    ]


def delta(**fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": fields}]}


@pytest.mark.parametrize(
    ("stream_chunks", "calls"),
    [
        pytest.param(
            [
                delta(tool_calls=[{"id": "a", "function": {"name": "f", "arguments": '{"x":'}}]),
                delta(tool_calls=[{"function": {"arguments": "1}"}}]),
                delta(tool_calls=[{"id": "b", "function": {"name": "g", "arguments": "{}"}}]),
            ],
            [("a", "f", '{"x":1}'), ("b", "g", "{}")],
            id="no index",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"function": {"name": "f", "arguments": '{"x":1}'}}]),
                delta(tool_calls=[{"function": {"name": "g", "arguments": "{}"}}]),
            ],
            [("call_0", "f", '{"x":1}'), ("call_1", "g", "{}")],
            id="neither index nor id",
        ),
        pytest.param(
            [delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"x": 1}}}])],
            [("a", "f", '{"x":1}')],
            id="arguments as an object",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]),
                delta(tool_calls=[{"index": 0, "id": "b", "function": {"name": "g", "arguments": "{}"}}]),
            ],
            [("a", "f", "{}"), ("b", "g", "{}")],
            id="all under one index",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"index": 0, "id": "x", "function": {"name": "f", "arguments": "{}"}}]),
                delta(tool_calls=[{"index": 1, "id": "x", "function": {"name": "g", "arguments": "{}"}}]),
            ],
            [("x", "f", "{}"), ("x_1", "g", "{}")],
            id="all under one id",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": None, "arguments": '{"x"'}}]),
                delta(tool_calls=[{"index": 0, "function": {"name": "f", "arguments": ":1}"}}]),
            ],
            [("a", "f", '{"x":1}')],
            id="name after the arguments",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]),
                delta(tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": ":1}"}}]),
            ],
            [("a", "f", '{"x":1}')],
            id="id and name in every chunk",
        ),
        pytest.param(
            [
                delta(tool_calls=[{"index": "0", "id": "a", "function": {"name": "f", "arguments": None}}]),
                delta(tool_calls=[{"index": 0, "id": "", "function": {"name": "", "arguments": "{}"}}]),
            ],
            [("a", "f", "{}")],
            id="numbers as texts, empty texts for nothing",
        ),
        pytest.param(
            [delta(function_call={"name": "f", "arguments": '{"x"'}), delta(function_call={"arguments": ":1}"})],
            [("call_0", "f", '{"x":1}')],
            id="function_call of old",
        ),
    ],
)
async def test_calls_are_assembled_from_any_form_of_chunks(
    server: ModelTestServer, chat_model: Model, stream_chunks: list[Any], calls: list[tuple[str, str, str]]
) -> None:
    server.reply(stream_reply(events(*stream_chunks, "[DONE]")))
    turn, parts = await respond_and_record(chat_model)
    assert [(call.id, call.name, call.arguments) for call in turn.calls] == calls
    assert turn.finish == "tools"
    started_calls = [part for part in parts if isinstance(part, CallStarted)]
    assert [(part.id, part.name) for part in started_calls] == [(id, name) for id, name, _ in calls]


async def test_malformed_arguments_are_returned_unchanged(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(
        stream_reply(chat_completion(tool_call_delta(0, id="a", name="add", arguments='{"a": '), finish="tool_calls"))
    )
    turn, _ = await respond_and_record(chat_model)
    assert turn.calls == (ModelCall("a", "add", '{"a": '),)


@pytest.mark.parametrize(
    ("body", "finish"),
    [
        pytest.param(events(delta(content="hi"), "[DONE]"), "other", id="no reason"),
        pytest.param(events(chat_chunk({"content": "hi"}, "stop")), "stop", id="no DONE"),
        pytest.param(events(chat_chunk({"content": "hi"}, "stop"), "[DONE]").rstrip(), "stop", id="no last line"),
        pytest.param(
            b"\xef\xbb\xbf" + text_completion("hi").replace(b"\n", b"\r\n"), "stop", id="byte order mark and CRLF"
        ),
        pytest.param(text_completion("hi").replace(b"\n", b"\r"), "stop", id="CR"),
        pytest.param(b": OPENROUTER PROCESSING\n\n" * 3 + b":\n" + text_completion("hi"), "stop", id="comments"),
        pytest.param(
            b"id: 1\nretry: 10\nevent: x\n" + text_completion("hi").replace(b"data: ", b"data:"), "stop", id="fields"
        ),
        pytest.param(events(chat_chunk({"content": "hi"}, "length"), "[DONE]"), "length", id="length"),
        pytest.param(events(chat_chunk({"content": "hi"}, "content_filter"), "[DONE]"), "filter", id="content filter"),
        pytest.param(events(chat_chunk({"refusal": "hi"}, "stop"), "[DONE]"), "filter", id="refusal"),
        pytest.param(events(chat_chunk({"content": [{"type": "text", "text": "hi"}]}, "stop")), "stop", id="parts"),
        pytest.param(events({"choices": []}, chat_chunk({"content": "hi"}, "stop"), ""), "stop", id="empty events"),
    ],
)
async def test_servers_may_leave_out_optional_parts(
    server: ModelTestServer, chat_model: Model, body: bytes, finish: str
) -> None:
    server.reply(stream_reply(body))
    turn, _ = await respond_and_record(chat_model)
    assert (turn.text, turn.finish) == ("hi", finish)


async def test_reasoning_is_streamed_separately(server: ModelTestServer, chat_model: Model) -> None:
    stream_chunks = [
        chat_chunk({"reasoning_content": "Hm"}),
        chat_chunk({"reasoning": "m."}),
        chat_chunk({"content": "Yes"}, "stop"),
    ]
    server.reply(stream_reply(events(*stream_chunks)))
    turn, parts = await respond_and_record(chat_model)
    assert turn.text == "Yes"
    assert parts == [ThinkingDelta("Hm"), ThinkingDelta("m."), TextDelta("Yes")]
    assert turn.thinking_data == ()


async def test_usage_is_estimated_if_a_server_sends_none(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(events(chat_chunk({"content": "word " * 100}, "stop"))))
    turn, _ = await respond_and_record(chat_model, ModelRequest(system="long " * 1000, turns=[UserTurn("x")]))
    assert 50 < turn.usage.output_tokens < 200
    assert 1000 < turn.usage.input_tokens < 2500


async def test_a_response_that_is_not_streamed_is_accepted(server: ModelTestServer, chat_model: Model) -> None:
    full_response = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": "Wait.",
                    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
                },
                "finish_reason": "tool_calls",
            }
        ],
        "usage": USED,
    }
    server.reply(error_reply(200, full_response))
    turn, _ = await respond_and_record(chat_model)
    assert (turn.text, turn.calls, turn.finish) == ("Wait.", (ModelCall("a", "add", "{}"),), "tools")
    assert turn.usage.input_tokens == 1000


async def test_the_official_sdk_understands_the_test_server(server: ModelTestServer) -> None:
    openai = pytest.importorskip("openai")
    body = chat_completion(
        {"content": "Wait. "},
        tool_call_delta(0, id="call_a", name="add", arguments=""),
        tool_call_delta(1, id="call_b", name="mul", arguments='{"x"'),
        tool_call_delta(0, arguments='{"a":1}'),
        tool_call_delta(1, arguments=":2}"),
        finish="tool_calls",
    )
    server.reply(stream_reply(body, split=5))
    async with (
        openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client,
        client.chat.completions.stream(
            model="gpt-4.1",
            messages=[{"role": "user", "content": "hi"}],
            stream_options={"include_usage": True},
        ) as parts,
    ):
        full_response = await parts.get_final_completion()
    message = full_response.choices[0].message
    assert message.content == "Wait. "
    assert [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls] == [
        ("call_a", {"a": 1}),
        ("call_b", {"x": 2}),
    ]
    assert full_response.usage.prompt_tokens == 1000
