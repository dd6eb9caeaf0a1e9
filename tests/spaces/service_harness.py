"""The services of a gateway around a toolspace, without HTTP: for tests of calls in the runs of an agent."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from toolspace import Tool, ToolContext, ToolResult, Toolspace
from toolspace.core.ids import new_id
from toolspace.core.stored_records import CallRecord, Document, InboxEvent, Message, StoredEvent
from toolspace.spaces import runs
from toolspace.spaces.call_context import GatewayCallHost
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.runs import OpenRuns
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries import (
    calls,
    documents,
    entities_and_spaces,
    events,
    inbox,
    messages,
    workers_and_presence,
)


def pending_tool(name: str, execution_type: Any = "external", **options: Any) -> Tool:
    """A tool whose results someone else submits."""
    tool = Tool(name, "", {"type": "object"}, execution_type=execution_type, **{"visible": False, **options})

    async def handler(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        assert context.host is not None
        return await context.host.wait_for_result(tool, parameters, context)

    tool.handler = handler
    return tool


class ServiceHarness:
    """An agent, a person and a space, and calls in runs of the agent."""

    def __init__(self, ts: Toolspace, ledger: Ledger, pending_calls: PendingCalls, sweeper: Sweeper) -> None:
        self.ts = ts
        self.ledger = ledger
        self.pending_calls = pending_calls
        self.sweeper = sweeper
        self.open_runs = OpenRuns(ledger, ts.run)
        self.agent, self.person, self.space = new_id("ent"), new_id("ent"), new_id("spc")

    async def create_entities(self) -> None:
        await self.ledger.write(entities_and_spaces.create_entity, self.agent, "agent", "Ada", {})
        await self.ledger.write(entities_and_spaces.create_entity, self.person, "human", "Husam", {})
        await self.ledger.write(entities_and_spaces.create_space, self.space, "Room", {})
        await self.ledger.write(entities_and_spaces.add_member, self.space, self.agent)
        await self.ledger.write(entities_and_spaces.add_member, self.space, self.person)

    async def open_run(self, *, in_space: bool = False) -> str:
        run = await self.ledger.commit(runs.open_run, self.agent, space_id=self.space if in_space else None)
        return run.id

    async def open_host(self, run_id: str) -> tuple[GatewayCallHost, Any]:
        record, run = await self.open_runs.enter(run_id)
        host = GatewayCallHost(self.pending_calls, run_id=run_id, agent_entity_id=self.agent, space_id=record.space_id)
        return host, run

    async def call(
        self, run_id: str, name: str, args: Any = None, *, call_id: str | None = None, confirms: bool = True
    ) -> ToolResult:
        host, run = await self.open_host(run_id)
        context = ToolContext(agent_entity_id=self.agent, space_id=host.space_id, host=host)
        result = await self.ts.call(name, args, context=context, run=run, call_id=call_id)
        if confirms:
            self.pending_calls.mark_delivered(host.inline_call_ids)
        return result

    async def submit(self, call_id: str, result: Any, **options: Any) -> CallRecord:
        return await self.pending_calls.submit(Submission(call_id=call_id, result=result, **options))

    async def get_call(self, call_id: str) -> CallRecord:
        call = await self.ledger.read(calls.find, call_id)
        assert call is not None
        return call

    async def wait_until_started(self, run_id: str) -> CallRecord:
        """The first call of the run, once it is stored."""
        return await self.get_call((await self.wait_for_event(run_id, "tool.started")).data["toolCallId"])

    async def wait_until_awaited(self, call_id: str) -> None:
        """Waits until someone waits for a call, which may not be stored yet."""
        while not self.ledger.waiters.is_waited_for(f"call:{call_id}"):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)

    async def wait_for_event(self, run_id: str, type: str) -> StoredEvent:
        """The first event of a type in the stream of a run."""
        async with await self.ledger.hub.subscribe(f"run:{run_id}", after=0) as subscription:
            async for batch in subscription:
                for event in batch:
                    if event.type == type:
                        return event
        raise AssertionError("the stream ended")

    async def register_worker(self, *tools: str) -> None:
        """Registers someone who executes these tools."""
        topics = [f"tool:{tool}" for tool in tools]
        await self.ledger.write(workers_and_presence.register_holder, "wrk_test", topics, node_id=self.ledger.node_id)

    async def save_document(self, document_id: str | None = None, **fields: Any) -> Document:
        """Saves a document of the agent. `fields`: those of `documents.prepare`."""
        document = documents.prepare(document_id or new_id("doc"), **fields)
        return await self.ledger.write(documents.save, self.agent, document)

    async def inbox(self) -> list[InboxEvent]:
        return await self.ledger.read(inbox.list_events, self.agent)

    async def messages(self) -> list[Message]:
        latest, _ = await self.ledger.read(messages.list_latest, self.space)
        return latest

    async def events(self, stream: str) -> list[StoredEvent]:
        return await self.ledger.read(events.list_after, stream, 0, 1000)


@asynccontextmanager
async def service_harness(
    database: Database, *tools: Tool, wakeups: WakeUps | None = None, owns: bool = True, **options: Any
) -> AsyncGenerator[ServiceHarness]:
    """`owns`: closes the database at the end. `options`: of `PendingCalls`."""
    async with AsyncExitStack() as stack:
        ledger = Ledger(database, wakeups)
        if owns:
            stack.push_async_callback(ledger.aclose)
        pending_calls = PendingCalls(ledger, **options)
        stack.push_async_callback(pending_calls.aclose)
        ts = Toolspace(tools=tools)
        recorder = CallRecorder(ledger, ts.bus)
        stack.push_async_callback(recorder.aclose)
        ts.orchestrator.add_stage(recorder.stage)
        await stack.enter_async_context(ts)
        ledger.on_stop_call = ts.cancel
        sweeper = await stack.enter_async_context(Sweeper(ledger, worker_grace=0.2))
        pending_calls.on_timer_started = sweeper.wake
        harness = ServiceHarness(ts, ledger, pending_calls, sweeper)
        await harness.create_entities()
        yield harness


@asynccontextmanager
async def hold_write_lock(path: Path) -> AsyncGenerator[None]:
    """Another connection holds the write lock of a SQLite file while the block runs: writes have to wait."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            connection.execute("ROLLBACK")
