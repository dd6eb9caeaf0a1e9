"""Anthropic's messages API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.models.model_server import (
    ModelTestServer,
    anthropic_message,
    error_reply,
    events,
    stream_reply,
    text_block,
    thinking_block,
    tool_use_block,
)
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
    ModelTurn,
    ResultsTurn,
    TextDelta,
    ThinkingDelta,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.registry import open_model

KEPT = {"cache_control": {"type": "ephemeral"}}


def open_anthropic(server: ModelTestServer, name: str = "claude-sonnet-4-5") -> Model:
    return open_model("anthropic", name, base_url=server.url, api_key="sk-ant-secret-1234567890", environ={}, retries=0)


@pytest.fixture
async def model(server: ModelTestServer) -> AsyncIterator[Model]:
    anthropic = open_anthropic(server)
    yield anthropic
    await anthropic.aclose()


@pytest.mark.spec("11.7")
@pytest.mark.parametrize("split", [0, 1, 3])
async def test_text_and_parallel_calls_are_streamed(server: ModelTestServer, model: Model, split: int) -> None:
    body = anthropic_message(
        text_block("Größe ", "🎉"),
        tool_use_block("toolu_1", "add", "", '{"a"', ": 1}"),
        tool_use_block("toolu_2", "now"),
        stop="tool_use",
    )
    server.reply(stream_reply(body, split=split))
    turn, parts = await respond_and_record(model)
    assert turn.text == "Größe 🎉"
    assert turn.calls == (ModelCall("toolu_1", "add", '{"a": 1}'), ModelCall("toolu_2", "now", "{}"))
    assert turn.finish == "tools"
    assert parts == [
        TextDelta("Größe "),
        TextDelta("🎉"),
        CallStarted(0, "toolu_1", "add"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ": 1}"),
        CallStarted(1, "toolu_2", "now"),
        CallDelta(1, "{}"),
    ]
    usage = turn.usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens) == (1000, 600, 50)
    assert usage.cost == pytest.approx((100 * 3 + 600 * 0.3 + 300 * 3.75 + 50 * 15) / 1e6)


async def test_a_request_has_the_form_of_the_api(server: ModelTestServer, model: Model) -> None:
    server.reply(stream_reply(anthropic_message(text_block("ok"))))
    settings = ModelSettings(temperature=1.5, max_output_tokens=100)
    await model.respond(
        ModelRequest(
            system="Be brief.", turns=[UserTurn("Hello")], tools=(ADD,), tool_choice="required", settings=settings
        )
    )
    request = server.requests[0]
    assert (request.method, request.path) == ("POST", "/v1/messages")
    assert request.headers["x-api-key"] == "sk-ant-secret-1234567890"
    assert request.headers["anthropic-version"] == "2023-06-01"
    assert request.json == {
        "model": "claude-sonnet-4-5",
        "max_tokens": 100,
        "stream": True,
        "system": [{"type": "text", "text": "Be brief.", **KEPT}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Hello", **KEPT}]}],
        "tools": [{"name": "add", "description": "Adds.", "input_schema": ADD.input_schema, **KEPT}],
        "tool_choice": {"type": "any"},
        "temperature": 1.0,
    }


@pytest.mark.parametrize(
    ("name", "reasoning", "expected_thinking"),
    [
        ("claude-opus-5-5", "high", {"thinking": {"type": "adaptive", "display": "summarized"}, "effort": "high"}),
        ("claude-opus-4-6", "low", {"thinking": {"type": "adaptive", "display": "summarized"}, "effort": "low"}),
        ("claude-haiku-4-5-20251001", "low", {"thinking": {"type": "enabled", "budget_tokens": 2048}}),
        ("claude-3-7-sonnet-20250219", "medium", {"thinking": {"type": "enabled", "budget_tokens": 8192}}),
        ("claude-3-5-haiku-latest", "high", {}),
        ("claude-opus-5-5", "none", {"thinking": {"type": "disabled"}}),
        ("claude-opus-5-5", None, {}),
    ],
)
async def test_reasoning_has_the_form_of_each_model_generation(
    server: ModelTestServer, name: str, reasoning: str | None, expected_thinking: dict[str, Any]
) -> None:
    server.reply(stream_reply(anthropic_message(text_block("ok"))))
    model = open_anthropic(server, name)
    settings = ModelSettings(reasoning=reasoning, max_output_tokens=1000)
    await model.respond(ModelRequest(system="", turns=[UserTurn("x")], settings=settings))
    await model.aclose()
    body = server.requests[0].json
    assert body.get("thinking") == expected_thinking.get("thinking")
    assert body.get("output_config", {}).get("effort") == expected_thinking.get("effort")
    assert body["max_tokens"] == 1000 + expected_thinking.get("thinking", {}).get("budget_tokens", 0)


async def test_signed_thinking_is_sent_back_in_its_place(server: ModelTestServer, model: Model) -> None:
    first = anthropic_message(
        thinking_block("Let me ", "see.", signature="c2VhbA=="),
        text_block("I look."),
        ({"type": "redacted_thinking", "data": "b3BhcXVl"}, []),
        tool_use_block("toolu_1", "add", '{"a":1}'),
        stop="tool_use",
    )
    server.reply(stream_reply(first), stream_reply(anthropic_message(text_block("2"))))
    turn, parts = await respond_and_record(model)
    assert parts[:3] == [ThinkingDelta("Let me "), ThinkingDelta("see."), TextDelta("I look.")]
    turns = [UserTurn("x"), turn, ResultsTurn((ModelToolResult("toolu_1", "add", "2"),))]
    await respond_and_record(model, ModelRequest(system="", turns=turns))
    assert server.requests[1].json["messages"][1]["content"] == [
        {"type": "thinking", "thinking": "Let me see.", "signature": "c2VhbA=="},
        {"type": "text", "text": "I look."},
        {"type": "redacted_thinking", "data": "b3BhcXVl"},
        {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}},
    ]
    # Another model cannot read them.
    other_model = open_anthropic(server, "claude-opus-5-5")
    await other_model.respond(ModelRequest(system="", turns=turns))
    await other_model.aclose()
    assert [block["type"] for block in server.requests[2].json["messages"][1]["content"]] == ["text", "tool_use"]


async def test_a_conversation_has_a_form_that_the_provider_accepts(server: ModelTestServer, model: Model) -> None:
    server.reply(stream_reply(anthropic_message(text_block("ok"))))
    picture = ImagePart(data="AAAA", mime_type="image/png")
    odd = ImagePart(data="AAAA", mime_type="image/tiff")
    turns = [
        ModelTurn(text="I was here."),
        UserTurn(" "),
        UserTurn("look", (picture, odd)),
        ModelTurn(calls=(ModelCall("call:1", "add", "[1]"), ModelCall("b", "draw", ""))),
        ResultsTurn(
            (
                ModelToolResult("call:1", "add", "wrong", is_error=True, media=(picture,)),
                ModelToolResult("b", "draw", "", media=(picture,)),
            )
        ),
        UserTurn("and now?"),
    ]
    await model.respond(ModelRequest(system=" ", turns=turns))
    body = server.requests[0].json
    assert "system" not in body
    block = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
    assert body["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "(The conversation began earlier.)"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "I was here."}]},
        {"role": "user", "content": [block, {"type": "text", "text": "look\n[image image/tiff, 3 bytes]", **KEPT}]},
        {
            "role": "assistant",
            "content": [
                {"type": "tool_use", "id": "call_3_0", "name": "add", "input": {"_malformed": "[1]"}},
                {"type": "tool_use", "id": "b", "name": "draw", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_3_0", "is_error": True, "content": "wrong"},
                {"type": "tool_result", "tool_use_id": "b", "content": [block]},
                {"type": "text", "text": "and now?", **KEPT},
            ],
        },
    ]


@pytest.mark.spec("11.7")
@pytest.mark.parametrize(
    ("code", "body", "kind"),
    [
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "overloaded"),
        (429, {"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}, "rate_limited"),
        (401, {"type": "error", "error": {"type": "authentication_error", "message": "bad key"}}, "not_permitted"),
        (
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}},
            "not_permitted",
        ),
        (404, {"type": "error", "error": {"type": "not_found_error", "message": "model: x"}}, "not_found"),
        (
            400,
            {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "prompt is too long: 210000 tokens > 200000"},
            },
            "too_long",
        ),
        (413, {"type": "error", "error": {"type": "request_too_large", "message": "too large"}}, "too_long"),
        (500, {"type": "error", "error": {"type": "api_error", "message": "oops"}}, "unavailable"),
    ],
)
async def test_an_error_response_has_a_kind(
    server: ModelTestServer, model: Model, code: int, body: object, kind: str
) -> None:
    server.reply(error_reply(code, body, retry_after="3"))
    with pytest.raises(ModelError) as error_info:
        await model.respond(HELLO)
    assert (error_info.value.kind, error_info.value.status, error_info.value.retry_after) == (kind, code, 3.0)


@pytest.mark.parametrize(
    ("error_type", "kind"),
    [("overloaded_error", "overloaded"), ("api_error", "unavailable"), ("rate_limit_error", "rate_limited")],
)
async def test_an_error_event_ends_the_answer(
    server: ModelTestServer, model: Model, error_type: str, kind: str
) -> None:
    partial_stream = anthropic_message(text_block("Hel")).partition(b"event: content_block_stop")[0]
    error = events({"type": "error", "error": {"type": error_type, "message": "Overloaded"}}, is_named=True)
    server.reply(stream_reply(partial_stream + error))
    with pytest.raises(ModelError, match="Overloaded") as error_info:
        await model.respond(HELLO)
    assert error_info.value.kind == kind


@pytest.mark.parametrize("end", [True, False])
async def test_an_incomplete_stream_is_an_error(server: ModelTestServer, model: Model, end: bool) -> None:
    server.reply(stream_reply(anthropic_message(text_block("Hel")).partition(b"event: content_block_stop")[0], end=end))
    with pytest.raises(ModelError) as error_info:
        await model.respond(HELLO)
    assert error_info.value.kind == "broken"


@pytest.mark.parametrize(
    ("stop", "finish"),
    [("refusal", "filter"), ("max_tokens", "length"), ("pause_turn", "other"), ("stop_sequence", "stop")],
)
async def test_the_finish_reason_is_translated(server: ModelTestServer, model: Model, stop: str, finish: str) -> None:
    server.reply(stream_reply(anthropic_message(text_block("hi"), stop=stop)))
    turn, _ = await respond_and_record(model)
    assert turn.finish == finish


async def test_unknown_events_and_blocks_are_ignored(server: ModelTestServer, model: Model) -> None:
    body = anthropic_message(
        ({"type": "server_tool_use", "id": "x", "name": "web"}, [{"type": "new_delta", "x": 1}]), text_block("hi")
    )
    server.reply(stream_reply(events({"type": "brand_new", "delta": {"type": "what"}}, is_named=True) + body))
    turn, _ = await respond_and_record(model)
    assert (turn.text, turn.calls) == ("hi", ())


async def test_a_refused_temperature_is_omitted(server: ModelTestServer, model: Model) -> None:
    error = {"type": "invalid_request_error", "message": "`temperature` is deprecated for this model."}
    server.reply(error_reply(400, {"type": "error", "error": error}), stream_reply(anthropic_message(text_block("ok"))))
    request = ModelRequest(system="", turns=[UserTurn("x")], settings=ModelSettings(temperature=0.3))
    assert (await model.respond(request)).text == "ok"
    assert "temperature" not in server.requests[1].json


async def test_the_official_sdk_understands_the_test_server(server: ModelTestServer) -> None:
    anthropic = pytest.importorskip("anthropic")
    body = anthropic_message(
        thinking_block("Hm", signature="c2VhbA=="),
        text_block("Wait."),
        tool_use_block("toolu_1", "add", '{"a"', ": 1}"),
        stop="tool_use",
    )
    server.reply(stream_reply(body, split=7))
    async with (
        anthropic.AsyncAnthropic(base_url=server.url, api_key="k", max_retries=0) as client,
        client.messages.stream(
            model="claude-opus-5-5", max_tokens=100, messages=[{"role": "user", "content": "hi"}]
        ) as parts,
    ):
        final_message = await parts.get_final_message()
    assert [block.type for block in final_message.content] == ["thinking", "text", "tool_use"]
    assert final_message.content[2].input == {"a": 1}
    assert final_message.stop_reason == "tool_use"
    assert final_message.usage.cache_read_input_tokens == 600
