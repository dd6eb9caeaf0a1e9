"""The tools of a real toolspace through LangChain's own flow of tool calls and messages."""

from __future__ import annotations

import asyncio
import base64
import gc
import runpy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackHandler
from langchain_core.messages import ToolMessage
from langchain_core.tools import BaseTool, ToolException
from langchain_core.utils.function_calling import convert_to_openai_tool

from toolspace import ImagePart, QueueSpec, Settings, TextPart, Tool, ToolContext, ToolResult, Toolspace, tool
from toolspace.integrations.langchain import LoopRunner, ToolFailure, to_langchain_tools

EXAMPLES = Path(__file__).parents[2] / "examples"


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
def length(text: str) -> int:
    """Counts characters, in a thread."""
    return len(text)


@tool
async def broken() -> None:
    """Always fails."""
    raise ValueError("the disk is full")


def find_tool(tools: list[BaseTool], name: str) -> BaseTool:
    return next(candidate for candidate in tools if candidate.name == name)


def tool_call(name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "tool_call", "id": "c1", "name": name, "args": arguments or {}}


@pytest.mark.spec("1.9")
async def test_a_tool_call_becomes_a_tool_message_with_the_result_as_artifact(
    record: Callable[[Toolspace], Any],
) -> None:
    async with Toolspace(tools=[add]) as ts:
        events = record(ts)
        message = await find_tool(to_langchain_tools(ts), "add").ainvoke(tool_call("add", {"a": "1", "b": 2}))

    assert isinstance(message, ToolMessage)
    assert (message.content, message.tool_call_id, message.name, message.status) == ("3", "c1", "add", "success")
    assert isinstance(message.artifact, ToolResult)
    assert message.artifact.result == 3
    assert events.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]
    assert events.events[0].call_id == "c1"


@pytest.mark.spec("1.9")
async def test_plain_arguments_return_the_text_for_the_model() -> None:
    async with Toolspace(tools=[add, broken]) as ts:
        tools = to_langchain_tools(ts)
        assert await find_tool(tools, "add").ainvoke({"a": 1, "b": 2}) == "3"
        assert await find_tool(tools, "add").ainvoke('{"a": 1, "b": 2}') == "3"
        assert await find_tool(tools, "broken").ainvoke({}) == "(tool failed: the disk is full)"


@pytest.mark.spec("1.8")
@pytest.mark.parametrize(
    ("name", "arguments", "kind", "text"),
    [
        ("broken", {}, "execution_error", "(tool failed: the disk is full)"),
        ("add", {"a": 1}, "invalid_parameters", "(tool failed: Parameter validation failed: b: required, but missing)"),
    ],
)
async def test_a_failure_is_an_error_message_with_its_kind(
    name: str, arguments: dict[str, Any], kind: str, text: str
) -> None:
    async with Toolspace(tools=[add, broken]) as ts:
        message = await find_tool(to_langchain_tools(ts), name).ainvoke(tool_call(name, arguments))

    assert (message.status, message.content, message.tool_call_id) == ("error", text, "c1")
    assert message.artifact.error_kind == kind


@pytest.mark.spec("1.9")
async def test_a_custom_error_handler_gets_the_failure_with_its_result() -> None:
    async with Toolspace(tools=[broken]) as ts:
        [failing_tool] = to_langchain_tools(ts)
        failing_tool.handle_tool_error = lambda error: f"kind: {error.result.error_kind}"  # type: ignore[attr-defined]
        message = await failing_tool.ainvoke(tool_call("broken"))
        failing_tool.handle_tool_error = False
        with pytest.raises(ToolFailure, match="the disk is full") as failure:
            await failing_tool.ainvoke(tool_call("broken"))

    assert (message.status, message.content) == ("error", "kind: execution_error")
    assert isinstance(failure.value, ToolException)
    assert failure.value.result.executed


@pytest.mark.spec("1.4")
@pytest.mark.spec("1.9")
async def test_a_raw_schema_reaches_the_model_unchanged() -> None:
    raw = {"type": "object", "properties": {"x": {"type": ["string", "null"], "minLength": 2}}, "required": ["x"]}
    bare = {"type": "object"}
    async with Toolspace(tools=[Tool("raw", "Takes it raw.", raw), Tool("bare", "Takes anything.", bare)]) as ts:
        tools = to_langchain_tools(ts)

    assert find_tool(tools, "raw").args_schema == raw
    assert convert_to_openai_tool(find_tool(tools, "raw")) == {
        "type": "function",
        "function": {"name": "raw", "description": "Takes it raw.", "parameters": raw},
    }
    assert find_tool(tools, "raw").args == raw["properties"]
    assert find_tool(tools, "bare").args == {}


@pytest.mark.spec("1.9")
async def test_parameters_may_have_names_that_langchain_reserves() -> None:
    async def echo(config: str, run_manager: str, callbacks: str, tool_call_id: str) -> str:
        """Says what it got."""
        return " ".join((config, run_manager, callbacks, tool_call_id))

    arguments = {"config": "a", "run_manager": "b", "callbacks": "c", "tool_call_id": "d"}
    async with Toolspace(tools=[echo]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        assert (await langchain_tool.ainvoke(tool_call("echo", arguments))).content == "a b c d"


@pytest.mark.spec("1.9")
async def test_callbacks_of_langchain_are_called() -> None:
    class Watcher(AsyncCallbackHandler):
        events: tuple[str, ...] = ()

        async def on_tool_start(self, tool_data: Any, input_str: str, **_: Any) -> None:
            self.events += ("start",)

        async def on_tool_end(self, output: Any, **_: Any) -> None:
            self.events += (output.content,)

    watcher = Watcher()
    async with Toolspace(tools=[add]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        await langchain_tool.ainvoke(tool_call("add", {"a": 1, "b": 2}), config={"callbacks": [watcher]})

    assert watcher.events == ("start", "3")


@pytest.mark.spec("1.6")
async def test_images_reach_the_model_as_content_blocks() -> None:
    data = base64.b64encode(b"png").decode()

    async def look() -> list[Any]:
        """Shows things."""
        return [TextPart(text="before"), ImagePart(data=data)]

    async with Toolspace(tools=[look]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        message = await langchain_tool.ainvoke(tool_call("look"))

    assert message.content == [
        {"type": "text", "text": "before"},
        {"type": "image", "base64": data, "mime_type": "image/png"},
    ]
    assert [block["type"] for block in message.content_blocks] == ["text", "image"]


@pytest.mark.spec("1.5")
async def test_calls_use_the_context_and_the_run() -> None:
    async def user_name(context: ToolContext) -> str:
        """Says who calls."""
        return f"{context.user_id} in {context.run_id}"

    async with Toolspace(tools=[user_name]) as ts, ts.run(max_tool_calls_per_turn=1) as run:
        tools = to_langchain_tools(ts, context=ToolContext(user_id="ada"), run=run)
        first = await find_tool(tools, "user_name").ainvoke(tool_call("user_name"))
        second = await find_tool(tools, "user_name").ainvoke(tool_call("user_name"))

    assert first.content == f"ada in {run.id}"
    assert second.artifact.error_kind == "limit_exceeded"
    assert run.trace.to_dict()["children"][0]["children"][0]["name"] == "user_name"


@pytest.mark.spec("4.9")
async def test_without_a_run_all_tools_are_listed_and_with_one_those_for_its_model() -> None:
    many = [Tool(f"tool_{number}", f"Counts to {number}.", handler=lambda p, c: 1) for number in range(20)]
    settings = Settings(tool_search_threshold=50)
    async with Toolspace(tools=[*many, add], settings=settings) as ts, ts.run() as run:
        all_names = {langchain_tool.name for langchain_tool in to_langchain_tools(ts)}
        model_tools = to_langchain_tools(ts, run=run)
        await find_tool(model_tools, "agent__find_tools").ainvoke({"query": "adds two numbers", "limit": 1})
        found_names = {langchain_tool.name for langchain_tool in to_langchain_tools(ts, run=run)}

    assert {"add", "tool_0", "tool_19"} <= all_names
    assert "add" not in {langchain_tool.name for langchain_tool in model_tools}
    assert "add" in found_names


@pytest.mark.spec("3.30")
async def test_loop_tools_are_hidden_from_other_model_loops(tmp_path: Path) -> None:
    (tmp_path / "toolspace.yaml").write_text("tools: {builtins: [current_time]}\n")
    async with Toolspace.open(tmp_path / "toolspace.yaml") as ts:
        assert {langchain_tool.name for langchain_tool in to_langchain_tools(ts)} == {"current_time", "agent__batch"}


@pytest.mark.spec("1.9")
def test_synchronous_code_invokes_tools_without_a_loop() -> None:
    ts = Toolspace(tools=[add, length, broken], settings=Settings(queues={"one": QueueSpec(concurrent=1)}))
    tools = to_langchain_tools(ts)
    before = threading.active_count()

    assert find_tool(tools, "add").invoke({"a": 1, "b": 2}) == "3"
    message = find_tool(tools, "length").invoke(tool_call("length", {"text": "four"}))
    assert (message.content, message.artifact.result) == ("4", 4)
    assert find_tool(tools, "broken").invoke(tool_call("broken")).status == "error"

    private = [thread for thread in threading.enumerate() if thread.name == "toolspace-loop"]
    assert threading.active_count() > before
    del tools, message
    gc.collect()
    assert [thread for thread in private if thread.is_alive()] == []


@pytest.mark.spec("1.9")
async def test_a_synchronous_call_from_a_thread_runs_on_the_loop_of_the_toolspace() -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def record_loop() -> str:
        """Says where it runs."""
        loops.append(asyncio.get_running_loop())
        return "here"

    async with Toolspace(tools=[record_loop]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        message = await asyncio.to_thread(langchain_tool.invoke, tool_call("record_loop"))

    assert message.content == "here"
    assert loops == [asyncio.get_running_loop()]


@pytest.mark.spec("1.9")
async def test_a_synchronous_call_inside_a_loop_raises() -> None:
    async with Toolspace(tools=[add]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        with pytest.raises(RuntimeError, match="use ainvoke"):
            langchain_tool.invoke({"a": 1, "b": 2})


@pytest.mark.spec("1.9")
def test_tools_of_an_ended_loop_raise() -> None:
    async def make() -> list[BaseTool]:
        return to_langchain_tools(Toolspace(tools=[add]))

    [langchain_tool] = asyncio.run(make())
    with pytest.raises(RuntimeError, match="has ended; create them again"):
        langchain_tool.invoke({"a": 1, "b": 2})


@pytest.mark.spec("1.9")
async def test_waiting_for_a_blocked_loop_raises_instead_of_a_deadlock() -> None:
    home = LoopRunner(start_seconds=0.05)
    ran: list[int] = []
    errors: list[Exception] = []

    async def work() -> None:
        ran.append(1)

    def wait() -> None:
        try:
            home.run(work)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join()  # Blocks the loop that the thread waits for.
    await asyncio.sleep(0)

    assert "use ainvoke" in str(errors[0])
    assert ran == []


@pytest.mark.spec("1.9")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "langchain_tools.py"), run_name="__main__")

    assert capsys.readouterr().out.splitlines() == [
        "success 0.25 None",
        "error (tool failed: division by zero) execution_error",
    ]


@pytest.mark.spec("1.9")
async def test_arguments_whose_names_models_refuse_have_other_names_for_the_model() -> None:
    schema = {"type": "object", "properties": {"filter[x]": {"type": "integer"}}, "required": ["filter[x]"]}
    query = Tool("query", "Queries.", schema, handler=lambda parameters, context: parameters["filter[x]"])
    async with Toolspace(tools=[query]) as ts:
        [langchain_tool] = to_langchain_tools(ts)
        message = await langchain_tool.ainvoke(tool_call("query", {"filter_x": 4}))

    assert message.content == "4"
    assert list(convert_to_openai_tool(langchain_tool)["function"]["parameters"]["properties"]) == ["filter_x"]
