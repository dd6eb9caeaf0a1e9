"""A toolspace with what the gateway puts around it, without HTTP: for tests of the services."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from toolspace import Tool, ToolContext, ToolResult, Toolspace
from toolspace.core.ids import new_id
from toolspace.core.records import CallRecord, InboxEvent, Message, StoredEvent
from toolspace.spaces import runs
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.runs import OpenRuns
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import entities, events, inbox, messages, presence


def elsewhere(name: str, execution_type: Any = "external", **options: Any) -> Tool:
    """A tool that someone else answers."""
    tool = Tool(name, "", {"type": "object"}, execution_type=execution_type, **{"visible": False, **options})

    async def handler(parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        assert context.host is not None
        return await context.host.wait_for_result(tool, parameters, context)

    tool.handler = handler
    return tool


class Rig:
    """An agent, a person and a space, and calls in runs of the agent."""

    def __init__(self, ts: Toolspace, ledger: Ledger, desk: PendingCalls, sweeper: Sweeper) -> None:
        self.ts = ts
        self.ledger = ledger
        self.desk = desk
        self.sweeper = sweeper
        self.cycles = OpenRuns(ledger, ts.run)
        self.agent, self.person, self.space = new_id("ent"), new_id("ent"), new_id("spc")

    async def settle_in(self) -> None:
        await self.ledger.write(entities.create_entity, self.agent, "agent", "Ada", {})
        await self.ledger.write(entities.create_entity, self.person, "human", "Husam", {})
        await self.ledger.write(entities.create_space, self.space, "Room", {})
        await self.ledger.write(entities.add_member, self.space, self.agent)
        await self.ledger.write(entities.add_member, self.space, self.person)

    async def open_run(self, *, in_space: bool = False) -> str:
        run = await self.ledger.commit(runs.open_run, self.agent, space_id=self.space if in_space else None)
        return run.id

    async def room(self, run_id: str) -> tuple[GatewayCallHost, Any]:
        record, run = await self.cycles.enter(run_id)
        room = GatewayCallHost(self.desk, run_id=run_id, agent_entity_id=self.agent, space_id=record.space_id)
        return room, run

    async def call(
        self, run_id: str, name: str, args: Any = None, *, call_id: str | None = None, confirms: bool = True
    ) -> ToolResult:
        room, run = await self.room(run_id)
        context = ToolContext(agent_entity_id=self.agent, space_id=room.space_id, host=room)
        result = await self.ts.call(name, args, context=context, run=run, call_id=call_id)
        if confirms:
            self.desk.mark_delivered(room.inline_call_ids)
        return result

    async def submit(self, call_id: str, result: Any, **options: Any) -> CallRecord:
        return await self.desk.submit(Submission(call_id=call_id, result=result, **options))

    async def row(self, call_id: str) -> CallRecord:
        call = await self.ledger.read(call_rows.find, call_id)
        assert call is not None
        return call

    async def began(self, run_id: str) -> CallRecord:
        """Waits until a call of the run is written down."""
        return await self.row((await self.seen(run_id, "tool.started")).data["toolCallId"])

    async def awaited(self, call_id: str) -> None:
        """Waits until someone waits for a call, which may not be written down yet."""
        while not self.ledger.waiters.is_waited_for(f"call:{call_id}"):  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0)

    async def seen(self, run_id: str, type: str) -> StoredEvent:
        """Waits until something happened in a run."""
        async with await self.ledger.hub.subscribe(f"run:{run_id}", after=0) as reader:
            async for batch in reader:
                for event in batch:
                    if event.type == type:
                        return event
        raise AssertionError("the stream ended")

    async def serve(self, *tools: str) -> None:
        """Someone says that they execute these tools."""
        topics = [f"tool:{tool}" for tool in tools]
        await self.ledger.write(presence.register, "wrk_test", topics, node_id=self.ledger.node_id)

    async def inbox(self) -> list[InboxEvent]:
        return await self.ledger.read(inbox.list_events, self.agent)

    async def messages(self) -> list[Message]:
        found, _ = await self.ledger.read(messages.list_latest, self.space)
        return found

    async def events(self, stream: str) -> list[StoredEvent]:
        return await self.ledger.read(events.list_after, stream, 0, 1000)


@asynccontextmanager
async def rig(
    database: Database, *tools: Tool, wakeups: WakeUps | None = None, owns: bool = True, **desk_options: Any
) -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        ledger = Ledger(database, wakeups)
        if owns:
            stack.push_async_callback(ledger.aclose)
        desk = PendingCalls(ledger, **desk_options)
        stack.push_async_callback(desk.aclose)
        ts = Toolspace(tools=tools)
        recorder = CallRecorder(ledger, ts.bus)
        stack.push_async_callback(recorder.aclose)
        ts.orchestrator.add_stage(recorder.stage)
        await stack.enter_async_context(ts)
        ledger.on_stop_call = ts.cancel
        sweeper = await stack.enter_async_context(Sweeper(ledger, worker_grace=0.2))
        desk.on_timer_started = sweeper.wake
        made = Rig(ts, ledger, desk, sweeper)
        await made.settle_in()
        yield made


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[None]:
    """Another program writes to a SQLite file while the block runs: what is to be written there has to wait."""
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            other.execute("ROLLBACK")
