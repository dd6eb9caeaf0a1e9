"""Large results for programs: whole up to `maxInlineBytes`, whatever a model would get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from toolspace import Settings, ToolContext, Toolspace, tool
from toolspace.core.result import ToolResult


@tool
async def text(size: int) -> str:
    return "x" * size


@tool
async def rows(count: int) -> list[int]:
    return list(range(count))


@tool
async def stream(count: int) -> AsyncIterator[str]:
    for number in range(count):
        yield f"line {number}\n"


@tool(cache=60)
async def cached_text(size: int) -> str:
    return "x" * size


def open_toolspace(folder: Path, **settings: Any) -> Toolspace:
    limits = {"tool_response_max_bytes": 1_000, "state_dir": folder, **settings}
    return Toolspace([text, rows, stream, cached_text], settings=Settings(**limits))


def is_handle(result: ToolResult) -> bool:
    assert result.ok, result.error
    is_stored = bool(result.extras.get("stored"))
    assert is_stored == (isinstance(result.result, dict) and "tool_output" in result.result)
    return is_stored


@pytest.mark.spec("4.6")
async def test_a_program_gets_the_whole_value(tmp_path: Path) -> None:
    async with open_toolspace(tmp_path) as ts:
        assert (await ts.call("text", {"size": 3_000_000})).result == "x" * 3_000_000
        assert (await ts.call("rows", {"count": 10_000})).result == list(range(10_000))
        streamed_text = (await ts.call("stream", {"count": 1_000})).result
        assert streamed_text == "".join(f"line {number}\n" for number in range(1_000))
        assert not list(tmp_path.rglob("session-*"))
        assert "agent__read_output" not in [item.name for item in ts.list_tools()]


@pytest.mark.spec("4.6")
async def test_a_program_gets_a_handle_above_the_limit_for_programs(tmp_path: Path) -> None:
    async with open_toolspace(tmp_path, max_inline_bytes=5_000) as ts:
        assert not is_handle(await ts.call("text", {"size": 5_000}))
        assert is_handle(await ts.call("text", {"size": 5_001}))
        assert is_handle(result := await ts.call("stream", {"count": 1_000}))
        assert result.result["tool_output"]["lines"] == 1_000


@pytest.mark.spec("4.6")
async def test_calls_of_runs_and_of_remote_callers_get_the_handle(tmp_path: Path) -> None:
    async with open_toolspace(tmp_path) as ts:
        for name, arguments in (("text", {"size": 2_000}), ("stream", {"count": 500}), ("rows", {"count": 1_000})):
            assert is_handle(await ts.run().call(name, arguments))
            assert is_handle(await ts.call(name, arguments, run=ts.run()))
            assert is_handle(await ts.orchestrator.execute(name, arguments))


@pytest.mark.spec("4.6")
async def test_the_code_of_a_tool_gets_whole_values_outside_a_run(tmp_path: Path) -> None:
    handles: list[bool] = []

    @tool
    async def measure(context: ToolContext) -> str:
        """Calls another tool."""
        result = await context.call("text", {"size": 2_000})
        handles.append(is_handle(result))
        return "y" * 2_000

    async with open_toolspace(tmp_path) as ts:
        ts.add_tool(measure)
        assert not is_handle(await ts.call("measure"))
        assert is_handle(await ts.orchestrator.execute("measure"))  # What it returns goes to a remote caller.
        assert is_handle(await ts.run().call("measure"))
        batch = {"calls": [{"id": "1", "tool": "text", "parameters": {"size": 2_000}}]}
        (entry,) = (await ts.call("agent__batch", batch)).result["results"]
    assert handles == [False, False, True]
    assert "tool_output" in entry["output"]


@pytest.mark.spec("4.6")
async def test_a_cached_value_is_whole_for_a_program_and_a_handle_for_a_model(tmp_path: Path) -> None:
    for first_is_program in (True, False):
        async with open_toolspace(tmp_path) as ts:
            arguments = '{"size": 2000}'
            for is_program in (first_is_program, not first_is_program, first_is_program):
                execute = ts.call if is_program else ts.orchestrator.execute
                assert is_handle(await execute("cached_text", arguments)) is not is_program
            assert [record.cache_hit for record in ts.orchestrator.call_log.recent] == [False, True, True]


@pytest.mark.spec("4.6")
async def test_calls_that_share_an_execution_get_what_their_callers_get(tmp_path: Path) -> None:
    may_end = asyncio.Event()

    @tool(cache=60)
    async def slow_stream(number: int) -> AsyncIterator[str]:
        """Streams much."""
        yield "x" * 1_500
        await may_end.wait()
        yield "y" * 1_500

    async with open_toolspace(tmp_path) as ts:
        ts.add_tool(slow_stream)
        pairs = ((ts.orchestrator.execute, ts.call), (ts.call, ts.orchestrator.execute))
        for number, (first, second) in enumerate(pairs):
            may_end.clear()
            arguments = {"number": number}
            calls = [asyncio.ensure_future(execute("slow_stream", arguments)) for execute in (first, second)]
            await asyncio.sleep(0)
            may_end.set()
            results = [is_handle(await call) for call in calls]
            assert results == [first != ts.call, second != ts.call]
