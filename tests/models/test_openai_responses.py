"""OpenAI's responses API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.models.model_server import ModelTestServer, error_reply, events, openai_response, stream_reply
from tests.models.requests import ADD, HELLO, respond_and_record
from toolspace import ImagePart
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    Model,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    ResultsTurn,
    TextDelta,
    ThinkingDelta,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.registry import open_model

SEALED = {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "c2VhbA=="}


def text_item(*words: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    content = [{"type": "output_text", "text": "".join(words), "annotations": []}]
    item = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
    deltas = [
        {"type": "response.output_text.delta", "content_index": 0, "delta": word, "logprobs": []} for word in words
    ]
    return item, deltas


def call_item(id: str, name: str, *pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    item = {
        "id": f"fc_{id}",
        "type": "function_call",
        "status": "completed",
        "call_id": id,
        "name": name,
        "arguments": "".join(pieces),
    }
    return item, [{"type": "response.function_call_arguments.delta", "delta": piece} for piece in pieces]


@pytest.fixture
async def model(server: ModelTestServer) -> AsyncIterator[Model]:
    responses_model = open_model(
        "openai-responses", "gpt-6-sol", base_url=f"{server.url}/v1", api_key="k", environ={}, retries=0
    )
    yield responses_model
    await responses_model.aclose()


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("split", [0, 1])
async def test_text_reasoning_and_parallel_calls_are_streamed(
    server: ModelTestServer, model: Model, split: int
) -> None:
    thoughts = [{"type": "response.reasoning_summary_text.delta", "summary_index": 0, "delta": "Hm."}]
    body = openai_response(
        (SEALED, thoughts),
        text_item("Wa", "it."),
        call_item("call_1", "add", '{"a"', ":1}"),
        call_item("call_2", "now", "{}"),
    )
    server.reply(stream_reply(body, split=split))
    turn, parts = await respond_and_record(model)
    assert turn.text == "Wait."
    assert turn.calls == (ModelCall("call_1", "add", '{"a":1}'), ModelCall("call_2", "now", "{}"))
    assert turn.finish == "tools"
    assert parts == [
        ThinkingDelta("Hm."),
        TextDelta("Wa"),
        TextDelta("it."),
        CallStarted(0, "call_1", "add"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ":1}"),
        CallStarted(1, "call_2", "now"),
        CallDelta(1, "{}"),
    ]
    usage = turn.usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1000, 400, 50)
    assert usage.cost == pytest.approx((600 * 2 + 400 * 0.2 + 50 * 10) / 1e6)


async def test_nothing_is_stored_and_encrypted_reasoning_is_sent_back(server: ModelTestServer, model: Model) -> None:
    server.reply(
        stream_reply(openai_response((SEALED, []), call_item("call_1", "draw", "{}"))),
        stream_reply(openai_response(text_item("ok"))),
    )
    settings = ModelSettings(temperature=0.5, max_output_tokens=10, reasoning="high")
    tools = (ADD,)
    request = ModelRequest(system="Be brief.", turns=[UserTurn("x")], tools=tools, tool_choice="add", settings=settings)
    turn = await model.respond(request)
    answer = ModelToolResult("call_1", "draw", "[image]", media=(ImagePart(data="AAAA"),))
    await model.respond(ModelRequest(system="", turns=[UserTurn("x"), turn, ResultsTurn((answer,))], tools=tools))
    first, second = (request.json for request in server.requests)
    assert server.requests[0].path == "/v1/responses"
    assert first == {
        "model": "gpt-6-sol",
        "input": [{"role": "user", "content": "x"}],
        "stream": True,
        "store": False,
        "instructions": "Be brief.",
        "include": ["reasoning.encrypted_content"],
        "tools": [
            {
                "type": "function",
                "name": "add",
                "description": "Adds.",
                "parameters": ADD.input_schema,
                "strict": False,
            }
        ],
        "tool_choice": {"type": "function", "name": "add"},
        "temperature": 0.5,
        "max_output_tokens": 16,
        "reasoning": {"effort": "high"},
    }
    assert second["input"] == [
        {"role": "user", "content": "x"},
        {"type": "reasoning", "summary": [], "encrypted_content": "c2VhbA=="},
        {"type": "function_call", "call_id": "call_1", "name": "draw", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "call_1",
            "output": [
                {"type": "input_text", "text": "[image]"},
                {"type": "input_image", "image_url": "data:image/png;base64,AAAA"},
            ],
        },
    ]


@pytest.mark.parametrize(
    ("reason", "finish"), [("max_output_tokens", "length"), ("content_filter", "filter"), (None, "other")]
)
async def test_an_incomplete_response_has_a_finish_reason(
    server: ModelTestServer, model: Model, reason: str | None, finish: str
) -> None:
    details = {"reason": reason} if reason else None
    server.reply(stream_reply(openai_response(text_item("hi"), status="incomplete", incomplete_details=details)))
    turn, _ = await respond_and_record(model)
    assert (turn.text, turn.finish) == ("hi", finish)


async def test_a_refusal_is_returned(server: ModelTestServer, model: Model) -> None:
    item, _ = text_item("No.")
    server.reply(stream_reply(openai_response((item, [{"type": "response.refusal.delta", "delta": "No."}]))))
    turn, _ = await respond_and_record(model)
    assert (turn.text, turn.finish) == ("No.", "filter")


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (openai_response(status="failed", error={"code": "server_error", "message": "oops"}), "unavailable"),
        (openai_response(status="failed", error={"code": "rate_limit_exceeded", "message": "slow"}), "rate_limited"),
        (
            events({"type": "error", "code": "server_error", "message": "oops", "param": None}, is_named=True),
            "unavailable",
        ),
        (openai_response(text_item("Hel")).partition(b"event: response.output_item.done")[0], "broken"),
    ],
)
async def test_failures_in_the_stream_are_errors(server: ModelTestServer, model: Model, body: bytes, kind: str) -> None:
    server.reply(stream_reply(body))
    with pytest.raises(ModelError) as error_info:
        await model.respond(HELLO)
    assert error_info.value.kind == kind


async def test_models_without_reasoning_are_called_without_it(server: ModelTestServer, model: Model) -> None:
    error = {"message": "Encrypted content is not supported with this model.", "param": "include"}
    server.reply(error_reply(400, {"error": error}), stream_reply(openai_response(text_item("ok"))))
    assert (await model.respond(HELLO)).text == "ok"
    assert "include" not in server.requests[1].json


async def test_the_official_sdk_understands_the_test_server(server: ModelTestServer) -> None:
    openai = pytest.importorskip("openai")
    server.reply(stream_reply(openai_response((SEALED, []), call_item("call_1", "add", '{"a"', ":1}")), split=9))
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k", max_retries=0) as client:
        parts = await client.responses.create(model="gpt-6-sol", input="hi", stream=True)
        kinds = [event.type async for event in parts]
    assert kinds[0] == "response.created"
    assert "response.function_call_arguments.delta" in kinds
    assert kinds[-1] == "response.completed"
