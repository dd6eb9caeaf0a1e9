"""Agents that live in a process, without HTTP: for tests of their cycles."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from toolspace import Tool, Toolspace
from toolspace.agents.agent import Agent
from toolspace.agents.host import AgentHost, entity_id_for
from toolspace.agents.prebuilt.provider import PrebuiltProvider
from toolspace.agents.subagent_runs import StoredRunRecorders
from toolspace.agents.task_tools import TaskToolProvider
from toolspace.config.configuration import AgentSpec
from toolspace.core.context import ToolContext
from toolspace.core.ids import new_id
from toolspace.core.model import Model
from toolspace.core.records import ENDED_RUN, InboxEvent, Message, RunRecord, StoredEvent
from toolspace.spaces import messaging
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import entities, events, inbox, messages, runs, sessions
from toolspace.storage.queries.sessions import HistoryTurn


class Village:
    """One agent or more, a person, and a space that all of them are in."""

    def __init__(self, ledger: Ledger, desk: PendingCalls, residents: AgentHost, names: Sequence[str]) -> None:
        self.ledger = ledger
        self.desk = desk
        self.residents = residents
        self.agents = [entity_id_for(name) for name in names]
        self.agent = self.agents[0]
        self.person, self.space = "ent_person", "spc_room"

    async def settle_in(self) -> None:
        await self.ledger.write(entities.create_entity, self.person, "human", "Husam", {})
        await self.ledger.write(entities.create_space, self.space, "Room", {})
        for entity in (self.person, *self.agents):
            await self.ledger.write(entities.add_member, self.space, entity)

    async def say(self, text: str, *, sender: str | None = None) -> Message:
        return await self.ledger.commit(messaging.send_message, self.space, sender or self.person, text)

    async def push(self, data: Any, *, type: Any = "service", agent: str | None = None) -> None:
        agent = agent or self.agent
        await self.ledger.write(inbox.add, agent, new_id("evt"), type, data, priority=2)
        self.ledger.waiters.wake(f"inbox:{agent}")

    async def runs(self, agent: str | None = None) -> list[RunRecord]:
        """Oldest first."""
        return (await self.ledger.read(runs.list_runs, agent_entity_id=agent or self.agent))[::-1]

    async def until(self, look: Callable[[], Any]) -> Any:
        """Waits until something is true, looking whenever anything happens to a run or a message."""
        async with await self.ledger.hub.subscribe(f"space:{self.space}", after=0) as reader:
            while not (found := await look()):
                async for _ in reader:
                    break
        return found

    async def run_ended(self, count: int = 1, agent: str | None = None) -> RunRecord:
        """Waits until so many runs of the agent have ended; gives the last of them."""
        while True:
            ended = [run for run in await self.runs(agent) if run.status in ENDED_RUN]
            if len(ended) >= count:
                await self.quiet()
                return ended[count - 1]
            await self._news(agent or self.agent)

    async def paused(self, count: int = 1, agent: str | None = None) -> RunRecord:
        """Waits until so many runs wait for results, and nobody thinks; gives the latest of them."""
        while True:
            waiting = [run for run in await self.runs(agent) if run.status == "waiting_tool"]
            if len(waiting) >= count:
                await self.quiet()
                return waiting[-1]
            await self._news(agent or self.agent)

    async def quiet(self) -> None:
        """Waits until nobody thinks."""
        import asyncio

        while self.residents.scheduler.active_count:  # noqa: ASYNC110 - nobody tells of it
            await asyncio.sleep(0.005)

    async def _news(self, agent: str) -> None:
        import asyncio

        await asyncio.sleep(0.01)

    async def seen(self, run_id: str, type: str) -> StoredEvent:
        """Waits until something happened in a run."""
        async with await self.ledger.hub.subscribe(f"run:{run_id}", after=0) as reader:
            async for batch in reader:
                for event in batch:
                    if event.type == type:
                        return event
        raise AssertionError("the stream ended")

    async def submit(self, call_id: str, result: Any, **options: Any) -> Any:
        return await self.desk.submit(Submission(call_id=call_id, result=result, **options))

    async def calls(self, run_id: str) -> list[Any]:
        return await self.ledger.read(call_rows.list_calls, run_id=run_id)

    async def until_asked(self) -> Any:
        """Waits until someone else has to answer a call; gives it."""
        while not (asked := await self.open_calls()):
            await self._news(self.agent)
        return asked[0]

    async def open_calls(self) -> list[Any]:
        """Calls that someone else has to answer."""
        return await self.ledger.read(call_rows.list_calls, statuses=("waiting", "pending"))

    async def messages(self) -> list[Message]:
        """All messages of the space, oldest first, whatever became of them."""
        return (await self.ledger.read(messages.list_latest, self.space, limit=500))[0]

    async def said(self, sender: str | None = None) -> list[str]:
        """What was said in the space, oldest first; by one, if they are named."""
        found, _ = await self.ledger.read(messages.list_latest, self.space, limit=500)
        return [
            one.content
            for one in found
            if one.kind == "message" and one.status == "complete" and (sender is None or one.sender_id == sender)
        ]

    async def inbox(self, agent: str | None = None) -> list[InboxEvent]:
        return await self.ledger.read(inbox.list_events, agent or self.agent)

    async def history(self, agent: str | None = None) -> list[HistoryTurn]:
        return await self.ledger.read(sessions.list_turns, agent or self.agent)

    async def token(self) -> int:
        """How often the session of the first agent was taken."""
        session = await self.ledger.read(sessions.find, self.agent)
        return session.token if session is not None else 0

    async def events(self, stream: str) -> list[StoredEvent]:
        return await self.ledger.read(events.list_after, stream, 0, 5000)


def agent(name: str, model: Model, *, tools: Sequence[Any] = (), system: str = "", **spec: Any) -> Agent:
    """An agent of configuration, with a model of the test."""
    made = Agent.from_spec(AgentSpec(name=name, system=system, **spec))
    made.model, made.tools = model, tuple(tools)
    return made


@asynccontextmanager
async def village(
    database: Database,
    *agents: Agent,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    folder: Path,
    wakeups: WakeUps | None = None,
    owns: bool = True,
    context: ToolContext | None = None,
    names: Sequence[str] = (),
    **options: Any,
) -> AsyncIterator[Village]:
    """`names`: of agents that are known already, where none lives in this process."""
    async with AsyncExitStack() as stack:
        ledger = Ledger(database, wakeups)
        if owns:
            stack.push_async_callback(ledger.aclose)
        sweeper = await stack.enter_async_context(Sweeper(ledger, worker_grace=0.2))
        desk = PendingCalls(ledger)
        desk.on_timer_started = sweeper.wake
        stack.push_async_callback(desk.aclose)
        ts = Toolspace(tools=tools, context=context)
        ts.orchestrator.register(PrebuiltProvider())
        ts.orchestrator.register(TaskToolProvider())
        recorder = CallRecorder(ledger, ts.bus)
        stack.push_async_callback(recorder.aclose)
        ts.orchestrator.add_stage(recorder.stage)
        await stack.enter_async_context(ts)
        ledger.on_stop_call = ts.cancel
        crew = ts.agents
        crew.add(agents)
        crew.run_recorders = StoredRunRecorders(desk)
        residents = AgentHost(desk, crew, session_dir=folder, **options)
        made = Village(ledger, desk, residents, names or [one.name for one in agents])
        await stack.enter_async_context(residents)
        await made.settle_in()
        yield made
