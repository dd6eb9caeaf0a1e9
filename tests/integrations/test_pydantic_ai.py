"""A real Pydantic AI agent, driven by its own test models, over the tools of a real toolspace."""

from __future__ import annotations

import asyncio
import base64
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_ai import Agent, ModelMessagesTypeAdapter, ModelRetry, RunContext, ToolFailed
from pydantic_ai.messages import (
    BinaryContent,
    ModelMessage,
    ModelResponse,
    TextPart,
    ToolCallPart,
    ToolReturnPart,
)
from pydantic_ai.models.function import AgentInfo, FunctionModel
from pydantic_ai.models.test import TestModel
from pydantic_ai.usage import RunUsage

from toolspace import (
    Annotations,
    AudioPart,
    EventType,
    ImagePart,
    ResourcePart,
    Settings,
    Tool,
    ToolContext,
    ToolProvider,
    ToolResult,
    Toolspace,
    tool,
)
from toolspace import TextPart as ToolspaceText
from toolspace.core.events import CallEvent
from toolspace.integrations.pydantic_ai import ToolspaceToolset

EXAMPLES = Path(__file__).parents[2] / "examples"
PNG = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really").decode()


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
async def broken() -> None:
    """Always fails."""
    raise ValueError("the disk is full")


class ScriptedFunctionModel:
    """Plays a script: each step is the calls it makes, or the answer that ends the run."""

    def __init__(self, *script: list[ToolCallPart] | str) -> None:
        self._script = list(script)
        self.calls: list[AgentInfo] = []

    def __call__(self, messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        self.calls.append(info)
        step = self._script.pop(0)
        return ModelResponse(parts=[TextPart(step)] if isinstance(step, str) else step)

    def offered_tools(self, step: int) -> set[str]:
        return {definition.name for definition in self.calls[step].function_tools}


def tool_call(name: str, arguments: Any = None, id: str = "c1") -> ToolCallPart:
    return ToolCallPart(name, arguments, tool_call_id=id)


async def run_agent(toolset: ToolspaceToolset[Any], model: ScriptedFunctionModel, **options: Any) -> list[ModelMessage]:
    agent = Agent(FunctionModel(model), toolsets=[toolset])
    return (await agent.run("go", **options)).all_messages()


def tool_returns(messages: list[ModelMessage]) -> list[ToolReturnPart]:
    return [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]


@pytest.mark.spec("1.9")
async def test_an_agent_calls_the_tools_of_a_toolspace() -> None:
    async with Toolspace(tools=[add]) as ts:
        agent = Agent(TestModel(call_tools=["add"]), toolsets=[ToolspaceToolset(ts)])
        answer = await agent.run("go")

    assert '"add":"0"' in answer.output


@pytest.mark.spec("1.9")
async def test_the_model_sees_name_description_and_schema_as_they_are() -> None:
    raw = {"type": "object", "properties": {"x": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string"}}}
    model = ScriptedFunctionModel("done")
    async with Toolspace(
        tools=[Tool("raw", "Takes it raw.", raw, tags=("t",), annotations=Annotations(read_only=True))]
    ) as ts:
        await run_agent(ToolspaceToolset(ts), model)

    [definition] = [definition for definition in model.calls[0].function_tools if definition.name == "raw"]
    assert definition.description == "Takes it raw."
    assert definition.parameters_json_schema == raw
    assert definition.metadata == {"category": "custom", "annotations": {"readOnly": True}, "tags": ["t"]}


@pytest.mark.spec("1.9")
@pytest.mark.spec("4.10")
async def test_calls_go_through_the_pipeline_with_the_ids_of_the_model(
    record: Callable[[Toolspace], Any],
) -> None:
    async with Toolspace(tools=[add]) as ts:
        events = record(ts)
        messages = await run_agent(
            ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("add", '{"a": "1", "b": 2}', id="c7")], "done")
        )
        stats = ts.get_stats().to_dict()

    assert [part.content for part in tool_returns(messages)] == ["3"]
    assert events.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]
    assert events.events[0].call_id == "c7"
    assert "add" in str(stats)


@pytest.mark.spec("11.3")
async def test_calls_of_one_step_run_in_parallel_and_return_in_order() -> None:
    barrier = asyncio.Barrier(3)

    async def meet(number: int) -> int:
        """Returns once three are there."""
        await barrier.wait()
        return number

    calls = [tool_call("meet", {"number": number}, id=f"c{number}") for number in (3, 1, 2)]
    async with Toolspace(tools=[meet]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel(calls, "done"))

    assert [(part.tool_call_id, part.content) for part in tool_returns(messages)] == [
        ("c3", "3"),
        ("c1", "1"),
        ("c2", "2"),
    ]


@pytest.mark.spec("1.8")
async def test_a_failed_call_is_shown_to_the_model_and_the_agent_continues() -> None:
    async with Toolspace(tools=[broken]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("broken")], "done"))

    [part] = tool_returns(messages)
    assert part.content == "(tool failed: the disk is full)"
    assert part.outcome == "failed"


@pytest.mark.spec("1.8")
async def test_a_timeout_is_shown_as_a_timeout() -> None:
    @tool(timeout=0.01)
    async def endless() -> None:
        """Never returns."""
        await asyncio.Event().wait()

    async with Toolspace(tools=[endless]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("endless")], "done"))

    assert [part.content for part in tool_returns(messages)] == ["(tool failed: timeout)"]


@pytest.mark.spec("1.9")
async def test_invalid_arguments_ask_the_model_to_retry_with_our_message() -> None:
    async with Toolspace(tools=[add]) as ts:
        model = ScriptedFunctionModel(
            [tool_call("add", {"a": 1})], [tool_call("add", {"a": 1, "b": 2}, id="c2")], "done"
        )
        messages = await run_agent(ToolspaceToolset(ts), model)

    first, second = tool_returns(messages)
    assert "Parameter validation failed: b: required, but missing" in str(first.content)
    assert first.outcome != "success"
    assert second.content == "3"


@pytest.mark.spec("1.6")
async def test_repeated_invalid_arguments_do_not_end_the_agent_run() -> None:
    wrong = [[tool_call("add", {"a": "x"}, id=f"c{number}")] for number in range(4)]
    async with Toolspace(tools=[add]) as ts:
        messages = await run_agent(ToolspaceToolset(ts, max_retries=1), ScriptedFunctionModel(*wrong, "gave up"))

    assert len(tool_returns(messages)) == 4
    assert str(tool_returns(messages)[-1].content).startswith("(tool failed: Parameter validation failed: a:")


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("text", ["{not json", "[1, 2]", '"text"', "null", '{"a": 1'])
async def test_arguments_that_are_not_an_object_are_reported_and_logged(
    text: str, record: Callable[[Toolspace], Any]
) -> None:
    async with Toolspace(tools=[add]) as ts:
        events = record(ts)
        messages = await run_agent(
            ToolspaceToolset(ts, max_retries=0), ScriptedFunctionModel([tool_call("add", text)], "done")
        )

    assert "Parameter validation failed" in str(tool_returns(messages)[0].content)
    assert events.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]


@pytest.mark.spec("1.6")
@settings(deadline=None)  # The first example imports modules.
@given(text=st.text(st.characters(codec=None)) | st.text('{}[]":,a1 ') | st.sampled_from(["[" * 9_999, "9" * 9_999]))
async def test_any_invalid_arguments_become_a_readable_error(text: str) -> None:
    ctx = RunContext(deps=None, model=TestModel(), usage=RunUsage(), tool_call_id="c1", max_retries=1)
    toolset = ToolspaceToolset[None](Toolspace(tools=[add]))
    [toolset_tool] = (await toolset.get_tools(ctx)).values()

    arguments = toolset_tool.args_validator.validate_json(text)

    assert isinstance(arguments, dict)
    with pytest.raises((ModelRetry, ToolFailed)):
        await toolset.call_tool("add", arguments, ctx, toolset_tool)


@pytest.mark.spec("1.6")
async def test_images_and_audio_reach_the_model_as_binary_parts() -> None:
    wav = base64.b64encode(b"RIFF").decode()

    async def look() -> list[Any]:
        """Shows things."""
        return [
            ToolspaceText(text="before"),
            ImagePart(data=PNG, mime_type="image/png"),
            AudioPart(data=wav, mime_type="audio/wav"),
            ResourcePart(uri="file:///a.pdf", mime_type="application/pdf", blob=PNG),
        ]

    async with Toolspace(tools=[look]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("look")], "done"))

    text, image, audio, pdf = tool_returns(messages)[0].content_items()
    assert text == "before"
    assert [(content.media_type, content.data) for content in (image, audio, pdf)] == [
        ("image/png", base64.b64decode(PNG)),
        ("audio/wav", b"RIFF"),
        ("application/pdf", base64.b64decode(PNG)),
    ]


@pytest.mark.spec("3.15")
@pytest.mark.parametrize(
    "part",
    [
        ImagePart(data="%%% not base64", mime_type="image/png"),
        ImagePart(data=PNG, mime_type="image/svg+xml"),
        ImagePart(data=PNG, mime_type=""),
        ResourcePart(uri="x:y", blob=PNG),
    ],
)
async def test_an_unsupported_media_type_becomes_a_placeholder(part: Any) -> None:
    async def look() -> Any:
        """Shows something."""
        return part

    async with Toolspace(tools=[look]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("look")], "done"))

    assert tool_returns(messages)[0].content == part.placeholder
    assert not isinstance(tool_returns(messages)[0].content, BinaryContent)


@pytest.mark.spec("1.9")
async def test_the_history_of_a_run_can_be_stored_and_loaded() -> None:
    async with Toolspace(tools=[add]) as ts:
        messages = await run_agent(
            ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("add", {"a": 1, "b": 2})], "done")
        )

    [loaded_return] = tool_returns(ModelMessagesTypeAdapter.validate_json(ModelMessagesTypeAdapter.dump_json(messages)))
    assert loaded_return.metadata["tool"] == "add"
    assert loaded_return.metadata["callId"] == "c1"


@pytest.mark.spec("3.15")
async def test_the_instructions_of_providers_reach_the_system_prompt() -> None:
    class Weather(ToolProvider):
        namespace = "weather"

        def list_tools(self) -> list[Tool]:
            return [Tool("now", "The weather.")]

        def get_instructions(self) -> str:
            return "Ask for one city at a time."

        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            return ToolResult(ok=True, result="fine")

    async with Toolspace(providers=[Weather()]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("weather__now")], "done"))

    assert messages[0].instructions == "## weather\nAsk for one city at a time."  # type: ignore[union-attr]
    assert tool_returns(messages)[0].content == "fine"


@pytest.mark.spec("4.1")
async def test_each_agent_run_is_a_run_and_each_step_a_turn() -> None:
    settings = Settings(max_tool_calls_per_turn=1)
    model = ScriptedFunctionModel(
        [tool_call("add", {"a": 1, "b": 1}, "c1"), tool_call("add", {"a": 2, "b": 2}, "c2")],
        [tool_call("add", {"a": 3, "b": 3}, "c3")],
        "done",
    )
    runs: set[str | None] = set()
    async with Toolspace(tools=[add], settings=settings) as ts:
        ts.bus.subscribe(lambda event: runs.add(event.run_id), EventType.TOOL_CALL_REQUESTED)
        toolset = ToolspaceToolset[None](ts)
        messages = await run_agent(toolset, model)
        await run_agent(toolset, ScriptedFunctionModel([tool_call("add", {"a": 1, "b": 1})], "done"))

    contents = [str(part.content) for part in tool_returns(messages)]
    assert sorted(contents) == [
        "(tool failed: at most 1 tool calls are allowed in one turn (maxToolCallsPerTurn))",
        "2",
        "6",
    ]
    assert len(runs) == 2
    assert None not in runs


@pytest.mark.spec("4.8")
async def test_an_existing_run_is_used_turn_by_turn_and_left_open() -> None:
    async with Toolspace(tools=[add]) as ts, ts.run() as run:
        toolset = ToolspaceToolset[None](ts, run=run)
        await run_agent(toolset, ScriptedFunctionModel([tool_call("add", {"a": 1, "b": 1})], "done"))
        assert run.turn == 2
        await run_agent(toolset, ScriptedFunctionModel([tool_call("add", {"a": 1, "b": 1})], "done"))
        assert run.turn == 4
        assert run.trace.ended_at is None
        turns = [len(turn.children) for turn in run.trace.children]

    assert turns == [1, 0, 1, 0]


@pytest.mark.spec("3.30")
async def test_loop_tools_are_offered_only_for_an_existing_run() -> None:
    async with Toolspace(tools=[add]) as ts, ts.run() as run:
        own_model, existing_model = ScriptedFunctionModel("done"), ScriptedFunctionModel("done")
        await run_agent(ToolspaceToolset(ts), own_model)
        await run_agent(ToolspaceToolset(ts, run=run), existing_model)

    assert own_model.offered_tools(0) == {"add", "agent__batch"}
    assert existing_model.offered_tools(0) == {"add", "agent__batch", "agent__final_report", "agent__task_status"}


@pytest.mark.spec("1.5")
async def test_the_context_is_passed_to_the_tool() -> None:
    async def user_name(context: ToolContext) -> str:
        """Says who calls."""
        return f"{context.user_id} in {context.space_id}"

    context = ToolContext(user_id="ada", space_id="lab")
    async with Toolspace(tools=[user_name]) as ts:
        messages = await run_agent(
            ToolspaceToolset(ts, context=context), ScriptedFunctionModel([tool_call("user_name")], "done")
        )

    assert tool_returns(messages)[0].content == "ada in lab"


@pytest.mark.spec("4.9")
async def test_tools_that_a_search_found_are_offered_from_then_on() -> None:
    many = [Tool(f"tool_{number}", f"Counts to {number}.", handler=lambda p, c: 1) for number in range(20)]
    model = ScriptedFunctionModel(
        [tool_call("agent__find_tools", {"query": "adds two numbers", "limit": 1})],
        [tool_call("add", {"a": 1, "b": 2}, id="c2")],
        "done",
    )
    async with Toolspace(tools=[*many, add], settings=Settings(tool_search_threshold=50)) as ts:
        messages = await run_agent(ToolspaceToolset(ts), model)

    assert "add" not in model.offered_tools(0)
    assert "add" in model.offered_tools(1)
    assert tool_returns(messages)[-1].content == "3"


@pytest.mark.spec("4.6")
async def test_stored_outputs_are_readable_in_the_next_run_of_a_conversation() -> None:
    async def log() -> str:
        """A long log."""
        return "\n".join(f"line {number}" for number in range(5_000))

    async with Toolspace(tools=[log], settings=Settings(tool_response_max_bytes=2_000)) as ts:
        toolset = ToolspaceToolset[None](ts)
        first = await run_agent(toolset, ScriptedFunctionModel([tool_call("log")], "done"))
        handle = str(tool_returns(first)[0].content).split('"handle":"')[1].split('"')[0]
        read = tool_call("agent__read_output", {"handle": handle, "offset": 4_000, "limit": 1}, id="c2")
        second = await run_agent(toolset, ScriptedFunctionModel([read], "done"), message_history=first)
        strange = await run_agent(toolset, ScriptedFunctionModel([read], "done"))

    assert "line 4000" in str(tool_returns(second)[-1].content) or "line 3999" in str(tool_returns(second)[-1].content)
    assert "line " not in str(tool_returns(strange)[-1].content)


@pytest.mark.spec("4.5")
async def test_cancelling_the_agent_cancels_the_tool() -> None:
    started, canceled = asyncio.Event(), asyncio.Event()

    async def endless() -> None:
        """Never returns."""
        started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            canceled.set()
            raise

    async with Toolspace(tools=[endless]) as ts:
        failed: list[CallEvent] = []
        ts.bus.subscribe(failed.append, EventType.TOOL_CALL_FAILED)
        agent_task = asyncio.create_task(run_agent(ToolspaceToolset(ts), ScriptedFunctionModel([tool_call("endless")])))
        await started.wait()
        agent_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await agent_task

    assert canceled.is_set()
    assert [event.result.error_kind for event in failed] == ["canceled"]  # type: ignore[attr-defined]


@pytest.mark.spec("1.9")
async def test_the_toolset_composes_with_those_of_pydantic_ai() -> None:
    model = ScriptedFunctionModel([tool_call("my_add", {"a": 1, "b": 2})], "done")
    async with Toolspace(tools=[add, broken]) as ts:
        toolset = ToolspaceToolset[None](ts, id="tools").filtered(lambda ctx, definition: definition.name == "add")
        agent = Agent(FunctionModel(model), toolsets=[toolset.prefixed("my")])
        messages = (await agent.run("go")).all_messages()

    assert model.offered_tools(0) == {"my_add"}
    assert tool_returns(messages)[0].content == "3"


@pytest.mark.spec("1.9")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "pydantic_ai_agent.py"), run_name="__main__")

    assert "celsius" in capsys.readouterr().out


@pytest.mark.spec("1.9")
async def test_arguments_whose_names_models_refuse_have_other_names_for_the_model() -> None:
    schema = {"type": "object", "properties": {"filter[x]": {"type": "integer"}}, "required": ["filter[x]"]}
    query = Tool("query", "Queries.", schema, handler=lambda parameters, context: parameters["filter[x]"])
    model = ScriptedFunctionModel([tool_call("query", {"filter_x": 4})], "done")
    async with Toolspace(tools=[query]) as ts:
        messages = await run_agent(ToolspaceToolset(ts), model)

    assert [part.content for part in tool_returns(messages)] == ["4"]
    assert list(model.calls[0].function_tools[0].parameters_json_schema["properties"]) == ["filter_x"]
