"""Added stages and listeners of runs."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Run, ToolResult, Toolspace
from toolspace.core.events import CallEvent
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.pipeline import CallHandler, StageContext
from toolspace.testing import EventRecorder


async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


class Watch:
    """A stage that records the calls that pass it."""

    def __init__(self, name: str, notes: list[str]) -> None:
        self._name = name
        self._notes = notes

    def __call__(self, plan: Any, next: Any, /) -> Any:
        async def run(call: Any) -> ToolResult:
            self._notes.append(f"{self._name} in")
            result = await next(call)
            self._notes.append(f"{self._name} out {'ok' if result.ok else result.error_kind}")
            return result

        return run


@pytest.mark.spec("4.1")
async def test_an_added_stage_sees_every_call_between_its_events() -> None:
    notes: list[str] = []
    async with Toolspace(tools=[add]) as ts:
        await ts.call("add", {"a": 1, "b": 1})
        ts.bus.subscribe(lambda event: notes.append(event.type.name) if isinstance(event, CallEvent) else None)
        ts.orchestrator.add_stage(Watch("first", notes))
        remove = ts.orchestrator.add_stage(Watch("second", notes))
        await ts.call("add", {"a": 1, "b": 2})
        remove()
        await ts.call("nothing")
        async with ts.run() as run:
            await run.call("add", {"a": 1})

    first = ["TOOL_CALL_REQUESTED", "first in", "second in", "second out ok", "first out ok", "TOOL_CALL_COMPLETED"]
    unknown = ["TOOL_CALL_REQUESTED", "first in", "first out unknown_tool", "TOOL_CALL_FAILED"]
    invalid = ["TOOL_CALL_REQUESTED", "first in", "first out invalid_parameters", "TOOL_CALL_FAILED"]
    assert notes == [*first, *unknown, *invalid]


@pytest.mark.spec("4.8")
async def test_listeners_get_new_runs_and_the_end_of_traces() -> None:
    endings: list[str] = []
    runs: list[Run] = []

    def on_start(run: Run) -> None:
        runs.append(run)
        run.trace.on_end = lambda operation: endings.append(f"{operation.kind} {operation.status}")

    async with Toolspace(tools=[add]) as ts:
        forget = ts.orchestrator.on_run(on_start)
        async with ts.run() as run:
            assert endings == []
        run.close()
        forget()
        ts.run()

    assert runs == [run]
    assert endings == ["run ok"]


@pytest.mark.spec("4.10")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_an_added_stage_that_raises_gives_a_failed_result(moment: str) -> None:
    def broken(plan: StageContext, next: CallHandler, /) -> CallHandler:
        async def run(call: Call) -> ToolResult:
            if moment == "after":
                await next(call)
            raise ValueError("lost the thread")

        return run

    async with Toolspace(tools=[add]) as ts:
        ts.orchestrator.add_stage(broken)
        recorder = EventRecorder(ts)
        result = await ts.call("add", {"a": 1, "b": 2})
        assert (result.error_kind, result.executed) == ("internal_error", moment == "after")
        assert result.error == "ValueError: lost the thread"
        assert recorder.types() == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
