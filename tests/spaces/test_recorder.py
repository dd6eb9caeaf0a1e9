"""The calls of runs as rows, messages and events: before they begin, on their way, and when they end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.spaces.rig import rig
from toolspace import ToolContext, tool
from toolspace.abc.database import Database
from toolspace.stores.sql import calls as call_rows


@pytest.mark.spec("7.1")
async def test_every_call_of_a_run_and_its_result_are_rows(database: Database) -> None:
    @tool(visible=False)
    def add(a: int, b: int) -> int:
        return a + b

    @tool(visible=False)
    def fail() -> None:
        raise ValueError("broken")

    async with rig(database, add, fail) as r:
        run = await r.open_run()
        assert (await r.call(run, "add", {"a": 1, "b": 2}, call_id="call_mine")).unwrap() == 3
        await r.call(run, "fail")
        await r.call(run, "add", {"a": "x"})
        await r.call(run, "nothing_like_that")
        rows = [call for call, _ in await r.ledger.read(call_rows.of_run, run)]
        assert [(row.tool_name, row.status, row.seq) for row in rows] == [
            ("add", "completed", 1),
            ("fail", "failed", 2),
            ("add", "failed", 3),
            ("nothing_like_that", "failed", 4),
        ]
        assert (rows[0].call_id, rows[0].args, rows[0].result) == ("call_mine", {"a": 1, "b": 2}, 3)
        assert (rows[0].execution_target, rows[0].source, rows[0].is_error) == ("server", "server", False)
        assert "broken" in rows[1].result
        assert (rows[2].error_kind, rows[3].error_kind) == ("invalid_parameters", "unknown_tool")
        assert all(row.resolved_at is not None and row.resolved_at >= row.created_at for row in rows)


@pytest.mark.spec("7.2")
@pytest.mark.spec("7.5")
async def test_a_visible_call_streams_what_it_says_and_then_its_result(database: Database) -> None:
    @tool
    async def count(context: ToolContext) -> AsyncIterator[str]:
        context.report_progress(1, 2, "half")
        yield "one "
        yield "two"

    async with rig(database, count) as r:
        run = await r.open_run(in_space=True)
        assert (await r.call(run, "count")).unwrap() == "one two"
        seen = [(event.type, event.data) for event in await r.events(f"space:{r.space}")]
        assert [type for type, _ in seen] == [
            "run.started",
            "tool.started",
            "tool.progress",
            "tool.streaming",
            "tool.streaming",
            "tool.done",
        ]
        assert seen[2][1]["message"] == "half"
        assert [data["output"] for _, data in seen[3:]] == ["one ", "two", "one two"]
        (message,) = await r.messages()
        assert (message.kind, message.status, message.content["output"]) == ("tool", "complete", "one two")
        assert await r.inbox() == []


async def test_a_call_whose_caller_is_gone_is_written_down_as_canceled(database: Database) -> None:
    began = asyncio.Event()

    @tool(visible=False)
    async def hang() -> None:
        began.set()
        await asyncio.Event().wait()

    async with rig(database, hang) as r:
        run = await r.open_run()
        calling = asyncio.create_task(r.call(run, "hang", call_id="call_hang"))
        await began.wait()
        assert (await r.row("call_hang")).status == "running"
        calling.cancel()
        await asyncio.gather(calling, return_exceptions=True)
        await r.seen(run, "tool.error")
        assert (await r.row("call_hang")).status == "canceled"


async def test_an_id_is_used_once(database: Database) -> None:
    ran: list[int] = []

    @tool(visible=False)
    def effect() -> None:
        ran.append(1)

    async with rig(database, effect) as r:
        run = await r.open_run()
        await r.call(run, "effect", call_id="call_1")
        again = await r.call(run, "effect", call_id="call_1")
        assert not again.ok
        assert not again.executed
        assert ran == [1]


@pytest.mark.spec("3.32")
async def test_calls_inside_a_batch_are_rows_of_the_run_too(database: Database) -> None:
    @tool(visible=False)
    def double(n: int) -> int:
        return 2 * n

    async with rig(database, double) as r:
        run = await r.open_run()
        calls = [{"id": str(n), "tool": "double", "parameters": {"n": n}} for n in range(3)]
        assert (await r.call(run, "agent__batch", {"calls": calls})).ok
        names = [call.tool_name for call, _ in await r.ledger.read(call_rows.of_run, run)]
        assert sorted(names) == ["agent__batch", "double", "double", "double"]
