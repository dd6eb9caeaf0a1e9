"""`run_agent(…, output_type=…)`: the answer is a value of that type, or the model hears what is wrong with it."""

from __future__ import annotations

import asyncio
import dataclasses
import datetime
import json
from collections.abc import AsyncIterator
from typing import Any, NotRequired, TypedDict, assert_type

import pytest
from pydantic import BaseModel, Field, field_validator

from tests.models.model_server import (
    ModelTestServer,
    anthropic_message,
    chat_completion,
    stream_reply,
    text_block,
    tool_call_delta,
    tool_use_block,
)
from toolspace import (
    Agent,
    AgentFinished,
    AgentResult,
    ToolContext,
    ToolExecutionError,
    Toolspace,
    ToolspaceError,
    tool,
)
from toolspace.config.agent_settings import AgentModelSettings
from toolspace.core.language_model import Model, ModelRequest, ModelTurn, ResultsTurn, UserTurn
from toolspace.models.scripted import ScriptedModel, call


class Wind(BaseModel):
    speed: float = Field(ge=0)


class Forecast(BaseModel):
    city: str
    degrees: int
    winds: list[Wind] = []

    @field_validator("city")
    @classmethod
    def check_city(cls, city: str) -> str:
        if city == "Atlantis":
            raise ValueError("there is no such city")
        return city


@dataclasses.dataclass
class Appointment:
    subject: str
    day: datetime.date


class Address(TypedDict):
    street: str
    number: NotRequired[int]


class Person(TypedDict):
    name: str
    homes: list[Address]


def report(content: Any, **more: Any) -> Any:
    return call("agent__final_report", {"status": "success", "format": "json", "content_json": content, **more})


def toolspace_of(model: Model, **options: Any) -> Toolspace:
    return Toolspace(agents=[Agent("ada", model=model, **options)])


@pytest.mark.spec("19.4")
@pytest.mark.parametrize("as_report", [True, False])
@pytest.mark.parametrize(
    ("output_type", "content", "expected"),
    [
        (Forecast, {"city": "Oslo", "degrees": 9}, Forecast(city="Oslo", degrees=9)),
        (Appointment, {"subject": "x", "day": "2026-03-01"}, Appointment("x", datetime.date(2026, 3, 1))),
        (Person, {"name": "n", "homes": [{"street": "s"}]}, {"name": "n", "homes": [{"street": "s"}]}),
        (list[Address], [{"street": "s", "number": 1}], [{"street": "s", "number": 1}]),
        (list[int], [1, 2], [1, 2]),
        (dict[str, float], {"a": 0.5}, {"a": 0.5}),
        (int | None, 4, 4),
        (bool, False, False),
    ],
)
async def test_the_output_has_the_type_that_was_asked_for(
    output_type: Any, content: Any, expected: Any, as_report: bool
) -> None:
    model = ScriptedModel([report(content) if as_report else json.dumps(content)])
    async with toolspace_of(model) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=output_type)
    assert (result.ok, result.error) == (True, None)
    assert result.output == expected
    assert type(result.output) is type(expected)
    assert result.unwrap() == expected


@pytest.mark.spec("19.4")
async def test_the_result_is_typed() -> None:
    async with toolspace_of(ScriptedModel(['{"city": "Oslo", "degrees": 9}', "Nine."])) as ts:
        result = await ts.run_agent("ada", "How warm is Oslo?", output_type=Forecast)
        assert_type(result, AgentResult[Forecast])
        assert_type(result.unwrap(), Forecast)
        assert result.unwrap().degrees == 9
        plain_result = await ts.run_agent("ada", "How warm is Oslo?")
        assert_type(plain_result, AgentResult[str])
        assert plain_result.output == "Nine."


@pytest.mark.spec("19.4")
async def test_the_model_is_told_the_schema() -> None:
    model = ScriptedModel([report({"city": "Oslo", "degrees": 9})])
    async with toolspace_of(model) as ts:
        await ts.run_agent("ada", "Go.", output_type=Forecast)
    (request,) = model.requests
    assert '"degrees"' in request.system
    definition = next(item for item in request.tools if item.name == "agent__final_report")
    content = definition.input_schema["properties"]["content_json"]
    assert set(content["properties"]) == {"city", "degrees", "winds"}
    assert "Wind" in definition.input_schema["$defs"]
    assert "content_json" in definition.input_schema["required"]


@pytest.mark.spec("19.4")
async def test_a_mismatch_goes_back_to_the_model_with_the_paths() -> None:
    model = ScriptedModel(
        [
            "It is 9 degrees.",
            '{"city": "Oslo", "winds": [{"speed": -1}]}',
            report({"city": "Atlantis", "degrees": "x"}),
            '```json\n{"city": "Oslo", "degrees": 9}\n```',
        ]
    )
    async with toolspace_of(model) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Forecast)
    assert result.output == Forecast(city="Oslo", degrees=9)
    advice = [turn.text for turn in result.turns if isinstance(turn, UserTurn)][1:]
    assert "Invalid JSON" in advice[0]
    assert "degrees: Field required" in advice[1]
    assert "winds[0].speed: Input should be greater than or equal to 0, got -1" in advice[1]
    answer = next(turn for turn in result.turns if isinstance(turn, ResultsTurn)).results[0]
    assert answer.is_error
    assert "content_json.city: Value error, there is no such city" in answer.text
    assert "content_json.degrees: Input should be a valid integer" in answer.text


@pytest.mark.spec("19.4")
@pytest.mark.parametrize("step", ["no JSON", report({"city": "Oslo"})])
async def test_the_corrections_are_bounded(step: Any) -> None:
    model = ScriptedModel.loop([step])
    async with toolspace_of(model) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Forecast)
    assert (result.ok, result.output, result.end, result.error_kind) == (False, None, "gave_up", "execution_error")
    assert str(result.error).startswith("none of 4 answers is a Forecast: ")
    assert len(model.requests) == 4
    with pytest.raises(ToolExecutionError, match='the agent "ada" did not finish: none of 4 answers'):
        result.unwrap()


async def test_a_report_of_failure_needs_no_output() -> None:
    failure = {"status": "failure", "format": "markdown", "content": "No data."}
    async with toolspace_of(ScriptedModel([call("agent__final_report", failure)])) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Forecast)
    assert (result.ok, result.output, result.error) == (False, None, "No data.")


async def test_a_report_in_another_format_is_refused() -> None:
    text_report = {"status": "success", "format": "markdown", "content": "Nine."}
    model = ScriptedModel([call("agent__final_report", text_report), report({"city": "Oslo", "degrees": 9})])
    async with toolspace_of(model) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Forecast)
    assert result.ok
    answer = next(turn for turn in result.turns if isinstance(turn, ResultsTurn)).results[0]
    assert 'this run asks for "json", got "markdown"' in answer.text


async def test_a_type_that_cannot_be_checked_is_refused() -> None:
    class Opaque:
        pass

    async with toolspace_of(ScriptedModel(["never"])) as ts:
        with pytest.raises(ToolspaceError, match="output_type Opaque cannot be checked"):
            await ts.run_agent("ada", "Go.", output_type=Opaque)


@pytest.mark.spec("19.4")
async def test_the_output_type_goes_with_a_handoff_but_not_to_subagents() -> None:
    helper_model = ScriptedModel(["Nine, I think."])
    expert_model = ScriptedModel([call("agent__helper", {"prompt": "How warm?"}), '{"city": "Oslo", "degrees": 9}'])
    expert = Agent("expert", model=expert_model, agents=[Agent("helper", model=helper_model)])
    desk_model = ScriptedModel([call("router__handoff-to", {"agent": "expert"})])
    async with Toolspace(agents=[Agent("desk", model=desk_model, destinations=[expert])]) as ts:
        result = await ts.run_agent("desk", "Go.", output_type=Forecast)
    assert result.output == Forecast(city="Oslo", degrees=9)
    assert result.path == ("desk", "expert")
    assert "OUTPUT:" not in helper_model.requests[0].system


@pytest.mark.spec("19.4")
async def test_a_tool_can_ask_an_agent_for_an_object() -> None:
    @tool
    async def forecast(city: str, context: ToolContext) -> dict[str, Any]:
        """Asks the expert."""
        result = await ts.run_agent("expert", city, output_type=Forecast)
        return result.unwrap().model_dump()

    expert = Agent("expert", model=ScriptedModel(['{"city": "Oslo", "degrees": 9}']))
    ada = Agent("ada", model=ScriptedModel([call("forecast", {"city": "Oslo"}), "Nine."]))
    async with Toolspace([forecast], agents=[ada, expert]) as ts:
        result = await ts.run_agent("ada", "Go.")
    answer = next(turn for turn in result.turns if isinstance(turn, ResultsTurn)).results[0]
    assert json.loads(answer.text) == {"city": "Oslo", "degrees": 9, "winds": []}


@pytest.mark.spec("19.4")
async def test_the_stream_ends_with_the_typed_result() -> None:
    async with toolspace_of(ScriptedModel(['{"city": "Oslo", "degrees": 9}'])) as ts:
        stream = ts.stream_agent("ada", "Go.", output_type=Forecast)
        forecasts = [event.result.unwrap() async for event in stream if isinstance(event, AgentFinished)]
        assert_type(forecasts, list[Forecast])
    assert forecasts == [Forecast(city="Oslo", degrees=9)]


async def test_a_validator_that_raises_anything_does_not_break_the_run() -> None:
    class Faulty(BaseModel):
        n: int

        @field_validator("n")
        @classmethod
        def divide(cls, n: int) -> int:
            return 1 // n

    def answer(request: ModelRequest) -> ModelTurn:
        return ModelTurn(text='{"n": 0}' if len(request.turns) == 1 else '{"n": 1}')

    async with toolspace_of(ScriptedModel(answer)) as ts:
        result = await ts.run_agent("ada", "Go.", output_type=Faulty)
    assert result.output == Faulty(n=1)
    assert any("ZeroDivisionError" in turn.text for turn in result.turns if isinstance(turn, UserTurn))


# Model providers, over HTTP


@pytest.fixture
async def server() -> AsyncIterator[ModelTestServer]:
    async with ModelTestServer().serve() as loopback:
        yield loopback


@pytest.mark.spec("19.4")
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_models_of_all_providers_return_objects(server: ModelTestServer, provider: str) -> None:
    wrong, right = '{"city": "Oslo"}', {"city": "Oslo", "degrees": 9}
    arguments = json.dumps({"status": "success", "format": "json", "content_json": right})
    if provider == "openai":
        url = f"{server.url}/v1"
        server.reply(
            stream_reply(chat_completion({"content": wrong})),
            stream_reply(
                chat_completion(
                    tool_call_delta(0, id="c1", name="agent__final_report", arguments=arguments), finish="tool_calls"
                )
            ),
        )
    else:
        url = server.url
        tool_use = tool_use_block("toolu_1", "agent__final_report", arguments[:20], arguments[20:])
        server.reply(
            stream_reply(anthropic_message(text_block(wrong))),
            stream_reply(anthropic_message(tool_use, stop="tool_use")),
        )
    name = "gpt-4.1" if provider == "openai" else "claude-sonnet-4-5"
    model = AgentModelSettings(provider=provider, name=name, base_url=url, api_key="k", retries=0)
    async with Toolspace(agents=[Agent("ada", model=model)]) as ts:
        result = await asyncio.wait_for(ts.run_agent("ada", "Go.", output_type=Forecast), 30)
    assert result.output == Forecast(city="Oslo", degrees=9)
    assert "degrees: Field required" in server.requests[1].body.decode()
    assert '"Wind"' in server.requests[0].body.decode()
