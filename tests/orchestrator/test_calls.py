"""Calls through the public API: results, events, streams and exceptions."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolspace import (
    Annotations,
    EventType,
    ImagePart,
    Settings,
    TextPart,
    Tool,
    ToolCanceledError,
    ToolContext,
    ToolLimitError,
    ToolPermissionError,
    ToolResult,
    Toolspace,
    ToolspaceError,
    ToolTimeoutError,
    ToolTransportError,
    ToolValidationError,
    tool,
)
from toolspace.testing import EventRecorder


@tool
async def add(a: int, b: int = 2) -> int:
    """Adds two numbers."""
    return a + b


@pytest.mark.spec("18")
async def test_three_lines_from_import_to_a_called_tool() -> None:
    ts = Toolspace(tools=[add])
    result = await ts.call("add", {"a": 1})
    assert (result.ok, result.result) == (True, 3)


@pytest.mark.spec("18")
@pytest.mark.parametrize("arguments", [{"a": 1, "b": 4}, '{"a": 1, "b": 4}', b'{"a": 1, "b": 4}', {"a": "1", "b": 4.0}])
async def test_arguments_are_a_mapping_or_the_text_that_a_model_sent(arguments: Any) -> None:
    async with Toolspace(tools=[add]) as ts:
        assert (await ts.call("add", arguments)).unwrap() == 5


@pytest.mark.spec("1.6")
async def test_a_result_has_its_times_duration_and_provider() -> None:
    async with Toolspace(tools=[add]) as ts:
        result = await ts.call("add", {"a": 1}, call_id="mine")
    wire = result.to_dict()
    assert wire["startedAt"] <= wire["completedAt"]
    assert result.duration_ms >= 0
    assert (wire["ok"], wire["kind"], wire["namespace"], wire["tool"], wire["callId"]) == (
        True,
        "local",
        "",
        "add",
        "mine",
    )
    assert wire["content"] == [{"type": "json", "value": 3}]


@pytest.mark.spec("1.6")
@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (False, "false"), (0, "0"), ("", ""), ([], "[]"), ({"a": [1]}, '{"a":[1]}'), (1.5, "1.5")],
)
async def test_null_false_and_empty_are_results(value: Any, text: str) -> None:
    @tool
    async def give() -> Any:
        return value

    async with Toolspace(tools=[give]) as ts:
        result = await ts.call("give")
    assert result.ok
    assert result.result == value
    assert result.text == text
    assert "result" in result.to_dict()


@pytest.mark.spec("1.6")
async def test_typed_parts_are_kept_and_have_a_placeholder_for_text() -> None:
    @tool
    async def draw() -> list[Any]:
        return [TextPart(text="a dot"), ImagePart(data="aGVsbG8=", mime_type="image/png")]

    async with Toolspace(tools=[draw]) as ts:
        result = await ts.call("draw")
    assert [part["type"] for part in result.to_dict()["content"]] == ["text", "image"]
    assert result.text == "a dot\n[image image/png, 5 bytes]"


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("error", [ValueError("boom"), KeyError("boom"), RuntimeError("boom"), SystemExit("boom")])
@pytest.mark.parametrize("style", ["async", "sync", "stream"])
async def test_a_tool_that_raises_is_a_failed_result(error: BaseException, style: str) -> None:
    def sync() -> None:
        raise error

    async def coroutine() -> None:
        raise error

    async def stream() -> AsyncIterator[str]:
        yield "a"
        raise error

    function: Callable[..., Any] = {"async": coroutine, "sync": sync, "stream": stream}[style]
    async with Toolspace(tools=[tool(name="fail")(function)]) as ts:
        result = await ts.call("fail")
    assert (result.ok, result.error_kind, result.executed) == (False, "execution_error", True)
    assert "boom" in (result.error or "")
    assert result.text.startswith("(tool failed: ")


@pytest.mark.spec("1.7")
@pytest.mark.parametrize(
    ("error", "kind", "executed"),
    [
        (ToolPermissionError("no"), "not_permitted", False),
        (ToolLimitError("no"), "limit_exceeded", False),
        (ToolCanceledError("no"), "canceled", False),
        (ToolTimeoutError("no"), "timeout", True),
        (ToolTransportError("no"), "transport_error", True),
    ],
)
async def test_a_tool_chooses_the_kind_of_its_failure(error: Exception, kind: str, executed: bool) -> None:
    @tool
    async def fail() -> None:
        raise error

    async with Toolspace(tools=[fail]) as ts:
        result = await ts.call("fail")
    assert (result.error_kind, result.executed) == (kind, executed)
    with pytest.raises(type(error)):
        result.unwrap()


@pytest.mark.spec("1.7")
async def test_an_unknown_tool_names_the_nearest() -> None:
    async with Toolspace(tools=[add]) as ts:
        result = await ts.call("addd", {"a": 1})
    assert (result.error_kind, result.executed) == ("unknown_tool", False)
    assert result.error == 'Tool "addd" not found; did you mean "add"?'


@pytest.mark.spec("1.7")
async def test_invalid_parameters_name_each_path_expected_and_actual_value() -> None:
    async with Toolspace(tools=[add]) as ts:
        result = await ts.call("add", {"a": "x", "c": 1})
    assert (result.error_kind, result.executed) == ("invalid_parameters", False)
    assert result.error is not None
    assert result.error.startswith("Parameter validation failed: ")
    assert "a: expected integer" in result.error
    assert '"x"' in result.error
    assert "c: no such parameter" in result.error


@pytest.mark.spec("1.3")
async def test_plain_functions_run_in_a_thread_and_see_their_context() -> None:
    @tool
    def describe_place(context: ToolContext) -> dict[str, Any]:
        return {"thread": threading.current_thread().name, "user": context.user_id, "call": context.call_id}

    async with Toolspace(tools=[describe_place]) as ts:
        result = await ts.call("describe_place", context=ToolContext(user_id="ann"), call_id="c1")
    assert result.result["thread"] != threading.main_thread().name
    assert (result.result["user"], result.result["call"]) == ("ann", "c1")


@pytest.mark.spec("1.3")
async def test_a_streaming_tool_gives_parts_as_events_and_the_joined_text() -> None:
    @tool
    async def count() -> AsyncIterator[str]:
        for word in ("one ", "two ", "three"):
            yield word

    async with Toolspace(tools=[count]) as ts:
        recorder = EventRecorder(ts)
        result = await ts.call("count")
    assert result.result == "one two three"
    assert [event.to_dict()["value"] for event in recorder.of_type(EventType.TOOL_CALL_PARTIAL)] == [
        "one ",
        "two ",
        "three",
    ]
    assert recorder.types()[0] == "TOOL_CALL_REQUESTED"
    assert recorder.types()[-1] == "TOOL_CALL_COMPLETED"


@pytest.mark.spec("1.3")
async def test_a_streaming_tool_of_values_gives_their_list() -> None:
    @tool
    async def rows() -> AsyncIterator[Any]:
        yield {"n": 1}
        yield "text"
        yield None

    async with Toolspace(tools=[rows]) as ts:
        assert (await ts.call("rows")).result == [{"n": 1}, "text", None]


@pytest.mark.spec("1.4")
async def test_a_raw_schema_reaches_the_model_unchanged_and_is_checked() -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "minimum": 1, "x-note": "kept"}},
        "required": ["n"],
        "$comment": "also kept",
    }

    async def double(parameters: dict[str, Any], context: ToolContext) -> Any:
        return parameters["n"] * 2

    raw = Tool("double", "Doubles", schema, handler=double, annotations=Annotations(read_only=True))
    async with Toolspace(tools=[raw]) as ts:
        assert ts.to_llm_tools("anthropic")[0]["input_schema"] == schema
        assert (await ts.call("double", {"n": "21"})).result == 42
        failed = await ts.call("double", {"n": 0})
    assert failed.error_kind == "invalid_parameters"


@pytest.mark.spec("1.5")
async def test_the_context_reports_progress_parts_and_cancellation() -> None:
    @tool
    async def work(context: ToolContext) -> str:
        context.report_progress(1, 2, "half")
        context.emit_partial("some")
        context.check_canceled()
        context.logger.info("working")
        return context.task_id

    async with Toolspace(tools=[work]) as ts:
        recorder = EventRecorder(ts)
        result = await ts.call("work", context=ToolContext(task_id="t1"))
    assert result.result == "t1"
    progress = recorder.of_type(EventType.TOOL_CALL_PROGRESS)[0].to_dict()
    assert (progress["progress"], progress["total"], progress["message"]) == (1, 2, "half")
    assert recorder.of_type(EventType.TOOL_CALL_PARTIAL)[0].to_dict()["value"] == "some"


@pytest.mark.spec("1.5")
async def test_progress_from_a_thread_reaches_subscribers_on_the_loop() -> None:
    threads: list[str] = []

    @tool
    def work(context: ToolContext) -> None:
        context.report_progress(1)

    async with Toolspace(tools=[work]) as ts:
        ts.bus.subscribe(lambda _: threads.append(threading.current_thread().name), EventType.TOOL_CALL_PROGRESS)
        await ts.call("work")
        await asyncio.sleep(0)
    assert threads == [threading.main_thread().name]


async def test_a_call_id_that_is_given_is_used_everywhere() -> None:
    async with Toolspace(tools=[add]) as ts:
        recorder = EventRecorder(ts)
        await ts.call("add", {"a": 1}, call_id="c-7")
        assert {event.to_dict()["callId"] for event in recorder.events} == {"c-7"}
        assert ts.orchestrator.call_log.recent[-1].call_id == "c-7"


async def test_a_tool_may_return_a_whole_result() -> None:
    @tool
    async def deep() -> ToolResult:
        return ToolResult(ok=False, error="upstream said no", error_kind="transport_error", executed=False)

    async with Toolspace(tools=[deep]) as ts:
        result = await ts.call("deep")
    assert (result.error, result.error_kind, result.executed, result.tool) == (
        "upstream said no",
        "transport_error",
        False,
        "deep",
    )


async def test_calls_work_from_several_loops_one_after_the_other() -> None:
    ts = Toolspace(tools=[add])
    results = await asyncio.gather(*(asyncio.to_thread(lambda: asyncio.run(_call_once(ts))) for _ in range(2)))
    assert results == [3, 3]


async def _call_once(ts: Toolspace) -> Any:
    return (await ts.call("add", {"a": 1})).result


async def test_a_tool_that_awaits_something_cancelled_elsewhere_fails_alone() -> None:
    @tool
    async def odd() -> None:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future

    async with Toolspace(tools=[odd]) as ts:
        result = await ts.call("odd")
    assert result.error_kind == "execution_error"


@pytest.mark.spec("1.8")
async def test_the_text_of_a_failure_is_as_the_spec_says() -> None:
    @tool(timeout=0.01)
    async def slow() -> None:
        await asyncio.sleep(30)

    async with Toolspace(tools=[slow, add], settings=Settings()) as ts:
        assert (await ts.call("slow")).text == "(tool failed: timeout)"
        assert (await ts.call("add", {"a": 1})).text == "3"


def test_import_is_light() -> None:
    """`import toolspace` loads nothing heavy: not even asyncio."""
    import subprocess

    code = "import sys, toolspace; print([m for m in ('asyncio', 'pydantic', 'msgspec', 'yaml') if m in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"


class Stop(BaseException):
    """Derives from BaseException, as errors of some libraries do."""


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("style", ["async", "sync", "stream"])
async def test_any_exception_of_a_tool_is_a_result_that_is_recorded_and_announced(style: str) -> None:
    def sync() -> None:
        raise Stop("boo")

    async def coroutine() -> None:
        raise Stop("boo")

    async def stream() -> AsyncIterator[str]:
        yield "a"
        raise Stop("boo")

    function: Callable[..., Any] = {"async": coroutine, "sync": sync, "stream": stream}[style]
    async with Toolspace(tools=[tool(name="fail")(function)]) as ts:
        recorder = EventRecorder(ts)
        result = await ts.call("fail")
        assert (result.error_kind, result.error) == ("execution_error", "boo")
        assert recorder.types()[-1] == "TOOL_CALL_FAILED"
        assert ts.get_stats().calls == 1


async def test_two_calls_with_the_same_id_are_both_cancelled() -> None:
    @tool
    async def forever() -> None:
        await asyncio.sleep(60)

    async with Toolspace(tools=[forever]) as ts:
        recorder = EventRecorder(ts)
        tasks = [asyncio.create_task(ts.run().call("forever", call_id="c1")) for _ in range(2)]
        await recorder.wait_for(lambda _: len(recorder.of_type(EventType.TOOL_CALL_REQUESTED)) == 2)
        assert ts.orchestrator.active_calls.ids == ["c1", "c1"]
        assert ts.cancel("c1")
        assert {result.error_kind for result in await asyncio.gather(*tasks)} == {"canceled"}
        assert ts.orchestrator.active_calls.ids == []


async def test_calls_of_a_closed_toolspace_fail_with_the_reason() -> None:
    ts = Toolspace(tools=[add])
    async with ts:
        assert (await ts.call("add", {"a": 1})).ok
    late = await ts.call("add", {"a": 1})
    assert (late.ok, late.executed, late.error) == (False, False, "the toolspace is closed")
    with pytest.raises(ToolspaceError, match="make a new one"):
        await ts.__aenter__()


@pytest.mark.parametrize("make", [lambda: (n for n in [1]), lambda: asyncio.sleep(0)], ids=["generator", "coroutine"])
async def test_an_unawaited_coroutine_or_generator_is_no_result(make: Callable[[], Any]) -> None:
    value = make()

    @tool
    async def give() -> Any:
        return value

    async with Toolspace(tools=[give]) as ts:
        result = await ts.call("give")
    value.close()
    assert "a coroutine or generator" in (result.error or "")


@pytest.mark.parametrize("name", [None, 5, b"add"])
async def test_a_name_that_is_no_text_is_an_unknown_tool(name: Any) -> None:
    async with Toolspace(tools=[add]) as ts:
        assert (await ts.call(name, {})).error_kind == "unknown_tool"
        assert (await ts.call("add", "null")).error_kind == "invalid_parameters"


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("style", ["async", "plain", "stream"])
@pytest.mark.parametrize("kind", [GeneratorExit, SystemExit, type("Strange", (BaseException,), {})])
async def test_any_exception_of_a_tool_is_a_result(kind: type[BaseException], style: str) -> None:
    async def coroutine() -> None:
        raise kind("odd")

    def plain() -> None:
        raise kind("odd")

    async def stream() -> AsyncIterator[str]:
        yield "a"
        raise kind("odd")

    function = {"async": coroutine, "plain": plain, "stream": stream}[style]
    async with Toolspace(tools=[tool(name="odd")(function)]) as ts:
        recorder = EventRecorder(ts)
        result = await ts.call("odd")
        assert (result.error_kind, result.executed) == ("execution_error", True)
        assert recorder.types()[-1] == "TOOL_CALL_FAILED"


@pytest.mark.spec("1.3")
async def test_a_stream_may_give_nothing_or_none() -> None:
    @tool
    async def empty() -> AsyncIterator[str]:
        return
        yield "never"

    @tool
    async def nones() -> AsyncIterator[None]:
        yield None
        yield None

    async with Toolspace(tools=[empty, nones]) as ts:
        assert (await ts.call("empty")).result == ""
        assert (await ts.call("nones")).result == [None, None]


async def test_a_forked_process_runs_plain_functions_and_has_its_own_call_ids() -> None:
    script = """
import asyncio, os, sys
from toolspace import Toolspace, tool

@tool(timeout=5)
def plain() -> int:
    return 1

ts = Toolspace(tools=[plain])

async def call():
    result = await ts.call("plain")
    assert result.result == 1, result
    return result.call_id

asyncio.run(call())  # Now a thread is idle here, and will not be in the child.
reader, writer = os.pipe()
if os.fork() == 0:
    try:
        os.write(writer, asyncio.run(call()).encode())
    finally:
        os._exit(0)
os.wait()
os.close(writer)
mine, theirs = asyncio.run(call()), os.read(reader, 100).decode()
assert theirs and mine != theirs, (mine, theirs)
"""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", script, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()


@pytest.mark.spec("1.7")
async def test_a_validation_error_has_the_issues_as_its_cause() -> None:
    @tool
    async def add(a: int, b: int) -> int:
        return a + b

    result = await Toolspace([add]).call("add", {"a": "x"})
    with pytest.raises(ToolValidationError) as error_info:
        result.unwrap()
    cause = error_info.value.cause
    assert isinstance(cause, list)
    assert {issue["path"] for issue in cause} == {"a", "b"}
    assert all(set(issue) == {"path", "message"} and issue["message"] for issue in cause)
