"""Providers that are asked through Pydantic AI."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.models.servers import Loopback, called, completion, said, status, stream
from toolspace import ImagePart, Tool
from toolspace.core.model import (
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
from toolspace.models.pydantic_ai import PydanticAIModel

pytest.importorskip("pydantic_ai")
pytest.importorskip("openai")

ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


@pytest.fixture
async def model(server: Loopback) -> AsyncIterator[PydanticAIModel]:
    made = PydanticAIModel("openai-chat", "some-model", api_key="sk-secret-12345", base_url=f"{server.url}/v1")
    yield made
    await made.aclose()


@pytest.mark.spec("11.7")
async def test_an_answer_is_heard_as_it_is_written(server: Loopback, model: PydanticAIModel) -> None:
    body = completion(
        {"content": "Wa"},
        {"content": "it."},
        called(0, id="call_a", name="add", arguments=""),
        called(0, arguments='{"a"'),
        called(0, arguments=":1}"),
        finish="tool_calls",
    )
    server.reply(stream(body))
    heard: list[ModelStreamPart] = []
    settings = ModelSettings(temperature=0.5, max_output_tokens=50)
    request = ModelRequest(system="Be brief.", turns=[UserTurn("Hello")], tools=(ADD,), settings=settings)
    turn = await model.respond(request, heard.append)
    assert (turn.text, turn.calls, turn.finish) == ("Wait.", (ModelCall("call_a", "add", '{"a":1}'),), "tools")
    assert heard == [
        TextDelta("Wa"),
        TextDelta("it."),
        CallStarted(0, "call_a", "add"),
        CallDelta(0, '{"a"'),
        CallDelta(0, ":1}"),
    ]
    assert (turn.usage.input_tokens, turn.usage.cached_tokens, turn.usage.output_tokens) == (1000, 400, 50)
    sent = server.asked[0].json
    assert [one["role"] for one in sent["messages"]] == ["system", "user"]
    assert sent["tools"][0]["function"]["name"] == "add"
    assert sent["temperature"] == 0.5


async def test_a_conversation_goes_along(server: Loopback, model: PydanticAIModel) -> None:
    server.reply(stream(said("ok")))
    turns = [
        UserTurn("draw", (ImagePart(data="AAAA"),)),
        ModelTurn(text="So.", calls=(ModelCall("a", "draw", "{}"), ModelCall("b", "add", "{bad"))),
        ResultsTurn((ModelToolResult("a", "draw", "[image]"), ModelToolResult("b", "add", "no", is_error=True))),
    ]
    turn = await model.respond(ModelRequest(system="", turns=turns))
    assert turn.text == "ok"
    sent = server.asked[0].json["messages"]
    assert [one["role"] for one in sent] == ["user", "assistant", "tool", "tool"]
    assert sent[0]["content"][1]["type"] == "image_url"


@pytest.mark.parametrize(
    ("code", "kind"), [(429, "rate_limited"), (401, "not_permitted"), (503, "overloaded"), (404, "not_found")]
)
async def test_refusals_are_understood(server: Loopback, model: PydanticAIModel, code: int, kind: str) -> None:
    server.reply(status(code, {"error": {"message": "no"}}, retry_after="7"))
    with pytest.raises(ModelError) as caught:
        await model.respond(ModelRequest(system="", turns=[UserTurn("x")]))
    assert (caught.value.kind, caught.value.status, caught.value.retry_after) == (kind, code, 7.0)
    assert len(server.asked) == 1
    assert "sk-secret" not in str(caught.value)


async def test_what_is_missing_is_named() -> None:
    request = ModelRequest(system="", turns=[UserTurn("x")])
    with pytest.raises(ModelError, match="install") as caught:
        await PydanticAIModel("bedrock", "some-model").respond(request)
    assert caught.value.kind == "not_found"
