"""Runs agents in the test's process, without HTTP, and reads what they did from the database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from toolspace import Quota, Settings, Tool, Toolspace
from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.agent_host import AgentHost
from toolspace.agents.background_tasks import TaskToolProvider
from toolspace.agents.prebuilt.provider import PrebuiltProvider
from toolspace.agents.subagent_run_recorder import open_stored_recorder
from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.config.configuration import AgentSpec
from toolspace.core.ids import new_id
from toolspace.core.language_model import Model
from toolspace.core.stored_records import ENDED_RUN, InboxEvent, Message, RunRecord, StoredEvent
from toolspace.core.tool_context import ToolContext
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.spaces import messaging
from toolspace.spaces.call_recorder import CallRecorder
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.ledger import Ledger
from toolspace.spaces.pending_calls import PendingCalls
from toolspace.spaces.quota_counters import StoredQuotas
from toolspace.spaces.sweeper import Sweeper
from toolspace.storage.database import Database, WakeUps
from toolspace.storage.queries import call_lists, entities_and_spaces, events, inbox, messages, runs, sessions
from toolspace.storage.queries.sessions import HistoryTurn


class AgentHarness:
    """Running agents, a person, and a space that all of them are members of."""

    def __init__(self, ledger: Ledger, pending_calls: PendingCalls, host: AgentHost, names: Sequence[str]) -> None:
        self.ledger = ledger
        self.pending_calls = pending_calls
        self.host = host
        self.agents = [entity_id_for(name) for name in names]
        self.agent = self.agents[0]
        self.person, self.space = "ent_person", "spc_room"

    async def create_space(self) -> None:
        await self.ledger.write(entities_and_spaces.create_entity, self.person, "human", "Husam", {})
        await self.ledger.write(entities_and_spaces.create_space, self.space, "Room", {})
        for entity in (self.person, *self.agents):
            await self.ledger.write(entities_and_spaces.add_member, self.space, entity)

    async def add_person(self, person: str, *spaces: str) -> None:
        """Adds a person to these spaces, by default the common one. A new space has the person and all agents."""
        await self.ledger.write(entities_and_spaces.create_entity, person, "human", person.removeprefix("ent_"), {})
        for space in spaces or (self.space,):
            await self.ledger.write(entities_and_spaces.create_space, space, space.removeprefix("spc_"), {})
            for member in (person, *self.agents):
                await self.ledger.write(entities_and_spaces.add_member, space, member)

    # Triggers

    async def send_message(self, text: str, *, sender: str | None = None, space: str | None = None) -> Message:
        return await self.ledger.commit(messaging.send_message, space or self.space, sender or self.person, text)

    async def push_event(self, data: Any, *, type: Any = "service", agent: str | None = None) -> None:
        agent = agent or self.agent
        await self.ledger.write(inbox.add, agent, new_id("evt"), type, data, priority=2)
        self.ledger.waiters.wake(f"inbox:{agent}")

    async def submit(self, call_id: str, result: Any, **options: Any) -> Any:
        return await self.pending_calls.submit(Submission(call_id=call_id, result=result, **options))

    # Waiting

    async def wait_for_run(self, count: int = 1, agent: str | None = None) -> RunRecord:
        """Waits until so many runs of the agent have ended. Returns the last of them."""
        while True:
            ended_runs = [run for run in await self.runs(agent) if run.status in ENDED_RUN]
            if len(ended_runs) >= count:
                await self.wait_until_idle()
                return ended_runs[count - 1]
            await asyncio.sleep(0.01)

    async def wait_for_paused_run(self, count: int = 1, agent: str | None = None) -> RunRecord:
        """Waits until so many runs wait for results, and no session is active. Returns the latest of them."""
        while True:
            paused_runs = [run for run in await self.runs(agent) if run.status == "waiting_tool"]
            if len(paused_runs) >= count:
                await self.wait_until_idle()
                return paused_runs[-1]
            await asyncio.sleep(0.01)

    async def wait_until_idle(self) -> None:
        """Waits until no session is active."""
        while self.host.scheduler.active_count:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0.005)

    async def wait_for_event(self, run_id: str, type: str) -> StoredEvent:
        """Waits for an event on the stream of a run."""
        async with await self.ledger.hub.subscribe(f"run:{run_id}", after=0) as subscription:
            async for batch in subscription:
                for event in batch:
                    if event.type == type:
                        return event
        raise AssertionError("the stream ended")

    async def wait_for_open_call(self) -> Any:
        """Waits until a call needs a result from outside. Returns it."""
        while not (open_calls := await self.open_calls()):  # noqa: ASYNC110 - other processes open calls, too
            await asyncio.sleep(0.01)
        return open_calls[0]

    # What is stored

    async def runs(self, agent: str | None = None) -> list[RunRecord]:
        """The runs of the agent, oldest first."""
        return (await self.ledger.read(runs.list_runs, agent_entity_id=agent or self.agent))[::-1]

    async def calls(self, run_id: str) -> list[Any]:
        return await self.ledger.read(call_lists.list_calls, run_id=run_id)

    async def open_calls(self) -> list[Any]:
        """The calls that need a result from outside."""
        return await self.ledger.read(call_lists.list_calls, statuses=("waiting", "pending"))

    async def messages(self) -> list[Message]:
        """All messages of the space, oldest first, with every status."""
        return (await self.ledger.read(messages.list_latest, self.space, limit=500))[0]

    async def sent_texts(self, sender: str | None = None) -> list[str]:
        """The texts of the complete messages in the space, oldest first; only those of `sender`, if it is given."""
        return [
            message.content
            for message in await self.messages()
            if message.kind == "message"
            and message.status == "complete"
            and (sender is None or message.sender_id == sender)
        ]

    async def inbox(self, agent: str | None = None) -> list[InboxEvent]:
        return await self.ledger.read(inbox.list_events, agent or self.agent)

    async def history(self, session: str | None = None) -> list[HistoryTurn]:
        """The turns of a session, by default the main one of the first agent."""
        return await self.ledger.read(sessions.list_turns, session or self.agent)

    async def lease_token(self, session_id: str | None = None) -> int:
        """The token of a session, by default the main one of the first agent: how often its lease was acquired."""
        session = await self.ledger.read(sessions.find, session_id or self.agent)
        return session.token if session is not None else 0

    async def events(self, stream: str) -> list[StoredEvent]:
        return await self.ledger.read(events.list_after, stream, 0, 5000)


class CallId:
    """The handle of a call that has an id and no limits."""

    run = None
    allowed_seconds = float("inf")

    def __init__(self, id: str) -> None:
        self.id = id


def agent(name: str, model: Model, *, tools: Sequence[Any] = (), system: str = "", **spec: Any) -> Agent:
    """An agent of configuration, with a model and tools of the test. It may start tasks."""
    spec.setdefault("named_tools", ("spawn_task", "reply"))
    configured_agent = Agent.from_spec(AgentSpec(name=name, system=system, **spec))
    configured_agent.model, configured_agent.tools = model, tuple(tools)
    return configured_agent


def private_agent(name: str, model: Model, **spec: Any) -> Agent:
    """As `agent`, but its plain text is private: for tests whose subject are other messages and events."""
    return agent(name, model, **{"loop": AgentLoopSettings(plain_text="private"), **spec})


@asynccontextmanager
async def run_agents(
    database: Database,
    *agents: Agent,
    tools: Sequence[Tool | Callable[..., Any]] = (),
    session_dir: Path,
    wakeups: WakeUps | None = None,
    closes_database: bool = False,
    context: ToolContext | None = None,
    names: Sequence[str] = (),
    quotas: Sequence[Quota] = (),
    settings: Settings | None = None,
    policy_rules: Sequence[PolicyRule] = (),
    **options: Any,
) -> AsyncIterator[AgentHarness]:
    """Runs agents until the end of the block. `names`: those of stored agents, if this process has none."""
    async with AsyncExitStack() as stack:
        ledger = Ledger(database, wakeups)
        if closes_database:
            stack.push_async_callback(ledger.aclose)
        sweeper = await stack.enter_async_context(Sweeper(ledger, worker_grace=0.2))
        pending_calls = PendingCalls(ledger)
        pending_calls.on_timer_started = sweeper.wake
        stack.push_async_callback(pending_calls.aclose)
        ts = Toolspace(tools=tools, context=context, settings=settings or Settings(quotas=quotas))
        ts.orchestrator.configure(quota_store=StoredQuotas(ledger), policy_rules=policy_rules)
        ts.orchestrator.register(PrebuiltProvider())
        ts.orchestrator.register(TaskToolProvider())
        recorder = CallRecorder(ledger, ts.bus)
        stack.push_async_callback(recorder.aclose)
        ts.orchestrator.add_stage(recorder.stage)
        await stack.enter_async_context(ts)
        ledger.on_stop_call = ts.cancel
        ts.agents.add(agents)
        ts.agents.open_run_recorder = partial(open_stored_recorder, pending_calls)
        host = AgentHost(pending_calls, ts.agents, session_dir=session_dir, **options)
        harness = AgentHarness(ledger, pending_calls, host, names or [agent.name for agent in agents])
        await stack.enter_async_context(host)
        await harness.create_space()
        yield harness
