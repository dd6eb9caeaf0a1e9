"""The calls of runs as rows, messages and events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.spaces.service_harness import hold_write_lock, pending_tool, service_harness
from toolspace import ToolContext, tool
from toolspace.errors import StorageInDoubt
from toolspace.storage.database import Database
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import runs as run_rows
from toolspace.storage.sqlite.database import SqliteDatabase


@pytest.mark.spec("7.1")
async def test_calls_of_a_run_are_stored_with_their_results(database: Database) -> None:
    @tool(visible=False)
    def add(a: int, b: int) -> int:
        return a + b

    @tool(visible=False)
    def fail() -> None:
        raise ValueError("broken")

    async with service_harness(database, add, fail) as harness:
        run = await harness.open_run()
        assert (await harness.call(run, "add", {"a": 1, "b": 2}, call_id="call_mine")).unwrap() == 3
        await harness.call(run, "fail")
        await harness.call(run, "add", {"a": "x"})
        await harness.call(run, "nothing_like_that")
        rows = [call for call, _ in await harness.ledger.read(call_rows.list_of_run, run)]
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
async def test_visible_call_streams_partial_results_and_then_its_result(database: Database) -> None:
    @tool
    async def count(context: ToolContext) -> AsyncIterator[str]:
        context.report_progress(1, 2, "half")
        yield "one "
        yield "two"

    async with service_harness(database, count) as harness:
        run = await harness.open_run(in_space=True)
        assert (await harness.call(run, "count")).unwrap() == "one two"
        events = [(event.type, event.data) for event in await harness.events(f"space:{harness.space}")]
        assert [type for type, _ in events] == [
            "run.started",
            "tool.started",
            "tool.ready",
            "tool.progress",
            "tool.streaming",
            "tool.streaming",
            "tool.done",
        ]
        assert events[3][1]["message"] == "half"
        assert [data["output"] for _, data in events[4:]] == ["one ", "two", "one two"]
        (message,) = await harness.messages()
        assert (message.kind, message.status, message.content["output"]) == ("tool", "complete", "one two")
        assert await harness.inbox() == []


async def test_call_of_a_cancelled_caller_is_stored_as_cancelled(database: Database) -> None:
    has_begun = asyncio.Event()

    @tool(visible=False)
    async def hang() -> None:
        has_begun.set()
        await asyncio.Event().wait()

    async with service_harness(database, hang) as harness:
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "hang", call_id="call_hang"))
        await has_begun.wait()
        assert (await harness.get_call("call_hang")).status == "running"
        call_task.cancel()
        await asyncio.gather(call_task, return_exceptions=True)
        await harness.wait_for_event(run, "tool.error")
        assert (await harness.get_call("call_hang")).status == "canceled"


async def test_call_id_is_used_once(database: Database) -> None:
    ran: list[int] = []

    @tool(visible=False)
    def effect() -> None:
        ran.append(1)

    async with service_harness(database, effect) as harness:
        run = await harness.open_run()
        await harness.call(run, "effect", call_id="call_1")
        second_result = await harness.call(run, "effect", call_id="call_1")
        assert not second_result.ok
        assert not second_result.executed
        assert ran == [1]


@pytest.mark.spec("3.32")
async def test_calls_inside_a_batch_are_stored_in_the_run(database: Database) -> None:
    @tool(visible=False)
    def double(n: int) -> int:
        return 2 * n

    async with service_harness(database, double) as harness:
        run = await harness.open_run()
        calls = [{"id": str(n), "tool": "double", "parameters": {"n": n}} for n in range(3)]
        assert (await harness.call(run, "agent__batch", {"calls": calls})).ok
        names = [call.tool_name for call, _ in await harness.ledger.read(call_rows.list_of_run, run)]
        assert sorted(names) == ["agent__batch", "double", "double", "double"]


async def test_waiting_for_a_running_call_returns_its_result(database: Database) -> None:
    go_on = asyncio.Event()

    @tool(visible=False)
    async def work() -> str:
        await go_on.wait()
        return "done"

    async with service_harness(database, work) as harness:
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "work", call_id="call_1"))
        await harness.wait_until_started(run)
        wait_task = asyncio.create_task(harness.pending_calls.wait_for_result("call_1", 3600))
        await harness.wait_until_awaited("call_1")
        go_on.set()
        assert (await wait_task).result == "done"
        await call_task


class _FlakyDatabase(SqliteDatabase):
    """Signals write requests, and can lose the connection after a commit."""

    loses_connection = False
    write_requested: asyncio.Event | None = None

    async def run(
        self, program: Any, *, on_commit: Any = None, deferred_writes: Any = None, exclusive: bool = False
    ) -> Any:
        if self.write_requested is not None:
            self.write_requested.set()
        if self.loses_connection:
            self.loses_connection = False
            await super().run(program, deferred_writes=deferred_writes)
            raise StorageInDoubt("went away during a commit: it may have happened, or not")
        return await super().run(program, on_commit=on_commit, deferred_writes=deferred_writes, exclusive=exclusive)


async def test_call_whose_caller_is_cancelled_while_it_is_stored_ends(tmp_path: Path) -> None:
    @tool
    async def effect() -> None: ...

    database = await _FlakyDatabase.open(tmp_path / "a.db")
    async with service_harness(database, effect) as harness:
        run = await harness.open_run(in_space=True)
        await harness.sweeper.__aexit__()  # It would write, too.
        async with hold_write_lock(tmp_path / "a.db"):
            database.write_requested = asyncio.Event()
            call_task = asyncio.create_task(harness.call(run, "effect", call_id="call_1"))
            await database.write_requested.wait()
            call_task.cancel()
            await asyncio.gather(call_task, return_exceptions=True)
        await harness.wait_for_event(run, "tool.error")
        assert (await harness.get_call("call_1")).status == "canceled"
        assert [message.status for message in await harness.messages()] == ["error"]


async def test_call_stored_in_doubt_ends(tmp_path: Path) -> None:
    ran: list[int] = []

    @tool
    def effect() -> None:
        ran.append(1)

    database = await _FlakyDatabase.open(tmp_path / "a.db")
    async with service_harness(database, effect) as harness:
        run = await harness.open_run(in_space=True)
        room, limits = await harness.open_host(run)
        await harness.sweeper.__aexit__()  # It would write, too.
        database.loses_connection = True
        result = await harness.ts.call("effect", context=ToolContext(host=room), run=limits, call_id="call_1")
        assert (result.ok, result.executed, ran) == (False, False, [])
        await harness.wait_for_event(run, "tool.error")
        assert (await harness.get_call("call_1")).status == "failed"
        assert [message.status for message in await harness.messages()] == ["error"]


async def test_cached_result_of_a_pending_tool_is_stored(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch", cache=60.0)) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        first = asyncio.create_task(harness.call(run, "fetch", call_id="call_1"))
        second = asyncio.create_task(harness.call(run, "fetch", call_id="call_2"))
        started = await harness.wait_until_started(run)
        await harness.submit(started.call_id, {"answer": 42})
        assert (await first).unwrap() == (await second).unwrap() == {"answer": 42}
        rows = [call for call, _ in await harness.ledger.read(call_rows.list_of_run, run)]
        assert sorted((row.status, row.result["answer"]) for row in rows) == [("completed", 42), ("resolved", 42)]


async def test_callers_of_one_async_tool_each_get_a_pending_call_of_their_own(database: Database) -> None:
    async with service_harness(database, pending_tool("approve", is_async=True, cache=60.0)) as harness:
        run = await harness.open_run()
        results = await asyncio.gather(*(harness.call(run, "approve") for _ in range(3)))
        assert len({result.unwrap()["pendingToolCallId"] for result in results}) == 3


async def test_callers_of_one_tool_that_times_out_each_get_a_late_result_of_their_own(database: Database) -> None:
    async with service_harness(database, pending_tool("fetch", timeout=0.1, cache=60.0)) as harness:
        await harness.register_worker("fetch")
        run = await harness.open_run()
        results = await asyncio.gather(*(harness.call(run, "fetch") for _ in range(2)))
        assert len({result.extras["pendingToolCallId"] for result in results}) == 2


@pytest.mark.spec("4.7")
@pytest.mark.parametrize("is_pending", [False, True])
async def test_a_result_that_does_not_fit_the_context_window_marks_the_stored_run(
    database: Database, is_pending: bool
) -> None:
    @tool(visible=False)
    def read() -> str:
        return "word " * 10_000

    async with service_harness(database, read, pending_tool("ask")) as harness:
        run_id = await harness.open_run()
        _, run = await harness.open_host(run_id)
        run.context_window = 100
        record = await harness.ledger.read(run_rows.find, run_id)
        assert record is not None
        assert record.tool_budget_exceeded is False
        run.add_tokens(95)
        if is_pending:
            call_task = asyncio.create_task(harness.call(run_id, "ask", {}))
            await harness.submit((await harness.wait_until_started(run_id)).call_id, "word " * 10_000)
            result = await call_task
        else:
            result = await harness.call(run_id, "read")
        assert result.error == "context window budget exceeded"
        record = await harness.ledger.read(run_rows.find, run_id)
        assert record is not None
        assert record.tool_budget_exceeded is True
