"""Models through Pydantic AI."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.models.model_server import (
    ModelTestServer,
    chat_completion,
    error_reply,
    stream_reply,
    text_completion,
    tool_call_delta,
)
from toolspace import ImagePart, Tool
from toolspace.core.language_model import (
    CallDelta,
    CallStarted,
    ModelCall,
    ModelRequest,
    ModelSettings,
    ModelStreamPart,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    TextDelta,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.pydantic_ai_adapter import PydanticAIModel

pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture
async def model(server: ModelTestServer) -> AsyncIterator[PydanticAIModel]:
    pydantic_model = PydanticAIModel(
        "openai-chat", "some-model", api_key="sk-secret-12345", base_url=f"{server.url}/v1"
    )
    yield pydantic_model
    await pydantic_model.aclose()


@pytest.mark.spec("11.7")
async def test_a_response_is_streamed(server: ModelTestServer, model: PydanticAIModel) -> None:
    body = chat_completion(
        {"content": "Wa"},
        {"content": "it."},
        tool_call_delta(0, id="call_a", name="add", arguments=""),
        tool_call_delta(0, arguments='{"a"'),
        tool_call_delta(0, arguments=":1}"),
        finish="tool_calls",
    )
    server.reply(stream_reply(body))
    parts: list[ModelStreamPart] = []
    settings = ModelSettings(temperature=0.5, max_output_tokens=50)
    request = ModelRequest(system="Be brief.", turns=[UserTurn("Hello")], tools=(ADD,), settings=settings)
    turn = await model.respond(request, parts.append)
    assert (turn.text, turn.calls, turn.finish) == ("Wait.", (ModelCall("call_a", "add", '{"a":1}'),), "tools")
    assert parts == [
        TextDelta("Wa"),
        TextDelta("it."),
        CallStarted(0, "call_a", "add"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ":1}"),
    ]
    assert (turn.usage.input_tokens, turn.usage.cached_tokens, turn.usage.output_tokens) == (1000, 400, 50)
    request_body = server.requests[0].json
    assert [item["role"] for item in request_body["messages"]] == ["system", "user"]
    assert request_body["tools"][0]["function"]["name"] == "add"
    assert request_body["temperature"] == 0.5


async def test_a_conversation_is_sent(server: ModelTestServer, model: PydanticAIModel) -> None:
    server.reply(stream_reply(text_completion("ok")))
    turns = [
        UserTurn("draw", (ImagePart(data="AAAA"),)),
        ModelTurn(text="So.", calls=(ModelCall("a", "draw", "{}"), ModelCall("b", "add", "{bad"))),
        ResultsTurn((ModelToolResult("a", "draw", "[image]"), ModelToolResult("b", "add", "no", is_error=True))),
    ]
    turn = await model.respond(ModelRequest(system="", turns=turns))
    assert turn.text == "ok"
    request_body = server.requests[0].json["messages"]
    assert [item["role"] for item in request_body] == ["user", "assistant", "tool", "tool"]
    assert request_body[0]["content"][1]["type"] == "image_url"


@pytest.mark.parametrize(
    ("code", "kind"), [(429, "rate_limited"), (401, "not_permitted"), (503, "overloaded"), (404, "not_found")]
)
async def test_error_responses_have_a_kind(
    server: ModelTestServer, model: PydanticAIModel, code: int, kind: str
) -> None:
    server.reply(error_reply(code, {"error": {"message": "no"}}, retry_after="7"))
    with pytest.raises(ModelError) as error_info:
        await model.respond(ModelRequest(system="", turns=[UserTurn("x")]))
    assert (error_info.value.kind, error_info.value.status, error_info.value.retry_after) == (kind, code, 7.0)
    assert len(server.requests) == 1
    assert "sk-secret" not in str(error_info.value)


async def test_a_missing_package_is_named() -> None:
    request = ModelRequest(system="", turns=[UserTurn("x")])
    with pytest.raises(ModelError, match="install") as error_info:
        await PydanticAIModel("bedrock", "some-model").respond(request)
    assert error_info.value.kind == "not_found"
