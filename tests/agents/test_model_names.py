"""Runs of agents with tools whose names of arguments no model accepts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, Field

from tests.agents.agent_harness import private_agent as agent
from tests.agents.agent_harness import run_agents
from tests.agents.test_live_output import PacedModel
from tests.core.provider_schema_rules import check_anthropic
from tests.models.model_server import ModelTestServer, anthropic_message, stream_reply, text_block, tool_use_block
from toolspace import Agent, EventType, Settings, Tool, Toolspace
from toolspace.core.language_model import CallDelta, CallStarted, ModelCall, ModelTurn
from toolspace.models.registry import open_model
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database

pytestmark = pytest.mark.spec("1.9")

SCHEMA = {
    "type": "object",
    "properties": {"filter[x]": {"type": "integer"}, "sort": {"type": "string"}},
    "required": ["filter[x]"],
    "additionalProperties": False,
}


def query_tool(calls: list[Any]) -> Tool:
    def handle(parameters: dict[str, Any], context: Any) -> str:
        calls.append(parameters)
        return "3 rows"

    return Tool("query", "Queries.", SCHEMA, handler=handle)


async def test_an_agent_of_anthropic_calls_a_tool_whose_parameter_anthropic_refuses() -> None:
    calls: list[Any] = []
    events: list[Any] = []
    server = ModelTestServer()
    async with server.serve():
        server.reply(
            stream_reply(anthropic_message(tool_use_block("t1", "query", '{"fil', 'ter_x": 4}'), stop="tool_use")),
            stream_reply(anthropic_message(text_block("Done."))),
        )
        model = open_model("anthropic", "claude-sonnet-4-5", base_url=server.url, api_key="k", environ={}, retries=0)
        async with Toolspace(tools=[query_tool(calls)], agents=[Agent("ada", model=model)]) as ts:
            ts.bus.subscribe(lambda event: events.append(event.params), EventType.TOOL_CALL_REQUESTED)
            result = await ts.run_agent("ada", "Go.")
        await model.aclose()
    assert result.text == "Done."
    assert calls == [{"filter[x]": 4}]
    assert events == calls
    for request in server.requests:
        for definition in request.json["tools"]:
            assert list(check_anthropic(definition["input_schema"])) == []
    # The model reads its own call again as it has written it.
    [message] = [message for message in server.requests[1].json["messages"] if message["role"] == "assistant"]
    assert message["content"][0]["input"] == {"filter_x": 4}


async def test_a_batch_of_calls_restores_names_too() -> None:
    calls: list[Any] = []
    batch = call("agent__batch", {"calls": [{"id": "1", "tool": "query", "parameters": {"filter_x": 1}}]})
    model = ScriptedModel([batch, "Done."])
    async with Toolspace(tools=[query_tool(calls)], agents=[Agent("ada", model=model)]) as ts:
        await ts.run_agent("ada", "Go.")
    assert calls == [{"filter[x]": 1}]


@pytest.mark.spec("4.9")
async def test_the_search_tool_shows_the_names_for_models() -> None:
    other_tools = [Tool(f"tool_{number}", f"Counts to {number}.", handler=lambda p, c: 1) for number in range(20)]
    calls: list[Any] = []
    model = ScriptedModel([call("agent__find_tools", {"query": "queries"}), call("query", {"filter_x": 2}), "Done."])
    settings = Settings(tool_search_threshold=50)
    async with Toolspace(
        tools=[*other_tools, query_tool(calls)], settings=settings, agents=[Agent("ada", model=model)]
    ) as ts:
        await ts.run_agent("ada", "Go.")
    answer = json.loads(model.requests[1].turns[-1].results[0].text)  # type: ignore[union-attr]
    schema = next(match["parameters"] for match in answer["tools"] if match["name"] == "query")
    assert list(schema["properties"]) == ["filter_x", "sort"]
    assert calls == [{"filter[x]": 2}]


async def test_an_answer_of_an_output_type_is_read_under_the_names_for_models() -> None:
    class Row(BaseModel):
        number: Annotated[int, Field(alias="row[number]")]

    report = call("agent__final_report", {"status": "success", "format": "json", "content_json": {"row_number": 7}})
    async with Toolspace(agents=[Agent("ada", model=ScriptedModel([report]))]) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Row)
    assert result.output.number == 7


@pytest.mark.spec("7.5")
async def test_arguments_are_streamed_under_the_names_of_the_tool(database: Database, tmp_path: Path) -> None:
    chart = Tool("query", "Queries.", SCHEMA, handler=lambda parameters, context: "ok", visible=True)
    turn = ModelTurn(calls=(ModelCall("c1", "query", '{"sort": "a", "filter_x": 5}'),), finish="tools")
    model = PacedModel(
        ModelTurn(calls=(ModelCall("c0", "enter_space", '{"spaceId": "spc_room"}'),), finish="tools"),
        [
            CallStarted(0, "c1", "query"),
            CallDelta(0, '{"sort": "a", "fil'),
            CallDelta(0, 'ter_x": 5}'),
            turn,
        ],
        ModelTurn(text="done"),
    )
    async with run_agents(database, agent("ada", model), tools=[chart], session_dir=tmp_path) as harness:
        await harness.send_message("Go.")
        run = await harness.wait_for_run()
        events = await harness.events(f"space:{harness.space}")
    deltas = [event.data["inputDelta"] for event in events if event.type == "tool.streaming"]
    [ready] = [event for event in events if event.type == "tool.ready"]
    assert json.loads("".join(deltas)) == ready.data["input"] == {"sort": "a", "filter[x]": 5}
    assert ready.data["inputSchema"] == SCHEMA
    assert run.status == "completed"
