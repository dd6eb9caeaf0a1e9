"""Requests to OpenAI's chat completions API."""

from __future__ import annotations

import pytest

from tests.models.model_server import (
    ModelTestServer,
    chat_chunk,
    error_reply,
    events,
    stream_reply,
    text_completion,
    tool_call_delta,
)
from tests.models.requests import ADD, HELLO, respond_and_record
from toolspace import ImagePart, Tool
from toolspace.core.language_model import (
    Model,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    UserTurn,
)
from toolspace.errors import ModelError


async def test_a_request_has_the_form_of_the_api(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    settings = ModelSettings(temperature=0.5, max_output_tokens=100, reasoning="low")
    await chat_model.respond(
        ModelRequest(system="Be brief.", turns=[UserTurn("Hello")], tools=(ADD,), tool_choice="add", settings=settings)
    )
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.headers["authorization"] == "Bearer sk-secret-1234567890"
    assert request.json == {
        "model": "gpt-4.1",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [
            {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": ADD.input_schema}}
        ],
        "tool_choice": {"type": "function", "function": {"name": "add"}},
        "temperature": 0.5,
        "max_tokens": 100,
        "reasoning_effort": "low",
    }


async def test_reasoning_before_a_call_is_sent_back_with_it(server: ModelTestServer, chat_model: Model) -> None:
    request_body = [
        chat_chunk({"reasoning_content": "Hm"}),
        chat_chunk(tool_call_delta(0, id="a", name="add", arguments="{}"), "tool_calls"),
    ]
    server.reply(stream_reply(events(*request_body)), stream_reply(text_completion("ok")))
    turn, _ = await respond_and_record(chat_model)
    await respond_and_record(
        chat_model,
        ModelRequest(system="", turns=[UserTurn("x"), turn, ResultsTurn((ModelToolResult("a", "add", "1"),))]),
    )
    assert server.requests[1].json["messages"][1] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        "reasoning_content": "Hm",
    }


async def test_connections_are_reused(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    for _ in range(5):
        await chat_model.respond(HELLO)
    assert server.connections == 1


async def test_a_conversation_has_a_form_that_the_provider_accepts(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    turns = [
        UserTurn("one"),
        UserTurn("two"),
        ModelTurn(),
        ModelTurn(
            text=" ",
            calls=(
                ModelCall("a", "add", "{bad"),
                ModelCall("a", "no such tool!", ""),
                ModelCall("", "add", '{"a":1}'),
            ),
        ),
        ResultsTurn((ModelToolResult("a", "add", "bad"), ModelToolResult("a", "no such tool!", "none"))),
        UserTurn("\n"),
        ModelTurn(text="done"),
    ]
    await chat_model.respond(ModelRequest(system="", turns=turns))
    request_body = server.requests[0].json["messages"]
    ids = ["a", "call_3_1", "call_3_2"]
    assert request_body == [
        {"role": "user", "content": "one\n\ntwo"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": ids[0], "type": "function", "function": {"name": "add", "arguments": '{"_malformed":"{bad"}'}},
                {"id": ids[1], "type": "function", "function": {"name": "no_such_tool_", "arguments": "{}"}},
                {"id": ids[2], "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": ids[0], "content": "bad"},
        {"role": "tool", "tool_call_id": ids[1], "content": "none"},
        {"role": "tool", "tool_call_id": ids[2], "content": "(no result: the call was interrupted)"},
        {"role": "assistant", "content": "done"},
        {"role": "user", "content": "(Go on.)"},
    ]


async def test_images_in_results_are_sent_in_the_next_message(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    picture = ImagePart(data="AAAA", mime_type="image/png")
    turns = [
        UserTurn("draw"),
        ModelTurn(calls=(ModelCall("a", "draw", "{}"), ModelCall("b", "add", "{}"))),
        ResultsTurn((ModelToolResult("a", "draw", "[image]", media=(picture,)), ModelToolResult("b", "add", "2"))),
        UserTurn("well?"),
    ]
    await chat_model.respond(ModelRequest(system="", turns=turns))
    assert [item["role"] for item in server.requests[0].json["messages"]] == [
        "user",
        "assistant",
        "tool",
        "tool",
        "user",
    ]
    assert server.requests[0].json["messages"][-1]["content"] == [
        {"type": "text", "text": "From the result of draw:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "text", "text": "well?"},
    ]


async def test_lone_surrogates_and_nul_do_not_stop_a_request(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    await chat_model.respond(ModelRequest(system="a\udc80b", turns=[UserTurn("nul \0 and \ud800")], tools=(ADD,)))
    request_body = server.requests[0].json
    assert request_body["messages"][0]["content"] == "a?b"
    assert request_body["messages"][1]["content"] == "nul \0 and ?"
    assert request_body["tools"][0]["function"]["name"] == "add"


async def test_large_requests_are_sent(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    await chat_model.respond(ModelRequest(system="x" * 3_000_000, turns=[UserTurn("hi")]))
    assert len(server.requests[0].body) > 3_000_000


@pytest.mark.parametrize(
    ("message", "omitted_key", "expected_key"),
    [
        ("Unsupported value: 'temperature' does not support 0.5 with this model.", "temperature", None),
        (
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens'.",
            "max_tokens",
            "max_completion_tokens",
        ),
        ("Function tools with reasoning_effort are not supported for gpt-5.6-sol", "reasoning_effort", None),
        ("Unknown parameter: stream_options", "stream_options", None),
    ],
)
async def test_a_feature_that_a_model_refuses_by_name_is_omitted_from_then_on(
    server: ModelTestServer, chat_model: Model, message: str, omitted_key: str, expected_key: str | None
) -> None:
    server.reply(error_reply(400, {"error": {"message": message}}), stream_reply(text_completion("ok")))
    settings = ModelSettings(temperature=0.5, max_output_tokens=100, reasoning="low")
    request = ModelRequest(system="", turns=[UserTurn("x")], settings=settings)
    for _ in range(2):
        turn, _ = await respond_and_record(chat_model, request)
        assert turn.text == "ok"
    first, *later = [item.json for item in server.requests]
    assert len(later) == 2
    assert omitted_key in first
    assert all(omitted_key not in item and (expected_key is None or expected_key in item) for item in later)


async def test_an_error_that_names_no_sent_feature_is_final(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(error_reply(400, {"error": {"message": "temperature is not supported"}}))
    with pytest.raises(ModelError):
        await chat_model.respond(HELLO)
    assert len(server.requests) == 1


async def test_tools_are_encoded_once(server: ModelTestServer, chat_model: Model) -> None:
    server.reply(stream_reply(text_completion("ok")))
    tools = (ADD, Tool("mul", "Multiplies.", {"anyOf": [{"required": ["a"], "properties": {"a": {}}}]}))
    for _ in range(2):
        await chat_model.respond(ModelRequest(system="", turns=[UserTurn("x")], tools=tools))
    first, second = (item.json["tools"] for item in server.requests)
    assert first == second
    assert first[1]["function"]["parameters"] == {"type": "object", "properties": {"a": {}}, "required": ["a"]}
