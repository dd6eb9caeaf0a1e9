"""Many agents in one space: limits apply, every agent gets its turn, and people come first."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.agents.agent_harness import AgentHarness, agent, private_agent, run_agents
from toolspace.agents import scheduler
from toolspace.agents.agent import Agent, entity_id_for
from toolspace.config.agent_settings import AgentLimits
from toolspace.core.language_model import ModelCall, ModelRequest, Turn, UserTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import messaging
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces

T = TypeVar("T")


def last_turn(request: ModelRequest) -> Turn:
    """The last turn of the conversation, without the inbox preview."""
    return next(turn for turn in reversed(request.turns) if "[INBOX PREVIEW" not in str(turn))


def answer_every_message(request: ModelRequest) -> str | list[ModelCall]:
    """Sends a message after every event."""
    if not isinstance(last_turn(request), UserTurn):
        return "Done."
    return [call("enter_space", {"spaceId": "spc_room"}), call("send_message", {"text": "Indeed!"})]


def talkative_agent(name: str, **limits: int) -> Agent:
    return agent(name, ScriptedModel(answer_every_message, record=False), limits=AgentLimits(**limits))


async def wait_until_inboxes_empty(harness: AgentHarness) -> None:
    """Waits until every event of every inbox is processed."""
    while True:
        await harness.wait_until_idle()
        waiting_events = [
            event for name in harness.agents for event in await harness.inbox(name) if event.status != "processed"
        ]
        if not waiting_events:
            return
        await asyncio.sleep(0.005)


class CountingDatabase(Database):
    """Wraps a database and counts its reads."""

    def __init__(self, database: Database) -> None:
        self._inner_database = database
        self.is_shared = database.is_shared
        self.reads = 0
        self.run = database.run  # type: ignore[method-assign]
        self.commit_deferred = database.commit_deferred  # type: ignore[method-assign]

    async def run(self, *args: object, **kwargs: object) -> object: ...  # type: ignore[override]

    async def commit_deferred(self, *args: object, **kwargs: object) -> bool: ...  # type: ignore[override, empty-body]

    async def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> T:
        self.reads += 1
        return await self._inner_database.read(program, timeout=timeout)

    async def aclose(self) -> None: ...


@pytest.mark.spec("11.1")
async def test_agents_that_answer_one_another_stop_after_max_agent_turns(database: Database, tmp_path: Path) -> None:
    names = [f"agent{number}" for number in range(10)]
    agents = [talkative_agent(name, max_agent_turns=3, cycles_per_minute=1_000) for name in names]
    async with run_agents(database, *agents, session_dir=tmp_path, max_active=4) as harness:
        await harness.send_message("What do you think?")
        await wait_until_inboxes_empty(harness)
        counts = {name: len(await harness.sent_texts(entity_id_for(name))) for name in names}
        # One answer to the person, and no more than three in a row to each other.
        assert max(counts.values()) <= 4
        assert min(counts.values()) >= 2
        for name in harness.agents:
            assert {event.status for event in await harness.inbox(name)} == {"processed"}
            assert {run.status for run in await harness.runs(name)} == {"completed"}
        # Later messages are added to the conversations, for the next cycle.
        texts = [
            row.stored_turn.turn.text for row in await harness.history() if isinstance(row.stored_turn.turn, UserTurn)
        ]
        assert sum(text.count("Indeed!") for text in texts) == sum(counts.values()) - counts["agent0"]
        await harness.send_message("And now?")
        await wait_until_inboxes_empty(harness)
        for name in names:
            assert len(await harness.sent_texts(entity_id_for(name))) > counts[name]


@pytest.mark.spec("11.1")
async def test_agents_take_turns_when_few_may_run_at_once(database: Database, tmp_path: Path) -> None:
    order: list[str] = []

    def thinks(name: str) -> ScriptedModel:
        def think(request: ModelRequest) -> str:
            order.append(name)
            return "Hm."

        return ScriptedModel(think)

    names = ["a", "b", "c", "d"]
    limits = AgentLimits(inbox_batch=1, cycles_per_minute=1_000)
    agents = [private_agent(name, thinks(name), limits=limits) for name in names]
    async with run_agents(database, *agents, session_dir=tmp_path, max_active=1) as harness:
        for number in range(5):
            await harness.send_message(f"Message {number}")
        await wait_until_inboxes_empty(harness)
    assert Counter(order) == dict.fromkeys(names, 5)
    # Every agent runs once before any agent runs again, except for the one that started before the others were ready.
    for start in range(4, 20, 4):
        assert set(order[start : start + 4]) == set(names), order


@pytest.mark.spec("7.3")
async def test_a_message_of_a_person_comes_before_older_messages_of_agents(database: Database, tmp_path: Path) -> None:
    has_started, go_on = asyncio.Event(), asyncio.Event()

    async def takes_its_time(request: ModelRequest) -> str:
        has_started.set()
        await go_on.wait()
        return "Hm."

    model = ScriptedModel([takes_its_time, "First.", "Second.", "Third."])
    ada = agent("ada", model, limits=AgentLimits(inbox_batch=1))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await harness.ledger.write(entities_and_spaces.create_entity, "ent_bot", "agent", "Bot", {})
        await harness.ledger.write(entities_and_spaces.add_member, harness.space, "ent_bot")
        await harness.send_message("Begin.")
        await has_started.wait()
        await harness.send_message("beep", sender="ent_bot")
        await harness.send_message("boop", sender="ent_bot")
        await harness.send_message("Are you there?")
        go_on.set()
        await harness.wait_for_run(4)
    texts = [str(last_turn(request)) for request in model.requests]
    assert ["Are you there?" in text for text in texts] == [False, True, False, False]


@pytest.mark.spec("7.3")
async def test_an_agent_with_a_message_of_a_person_runs_before_other_agents(database: Database, tmp_path: Path) -> None:
    order: list[str] = []
    has_started, go_on = asyncio.Event(), asyncio.Event()

    async def busy(request: ModelRequest) -> str:
        has_started.set()
        await go_on.wait()
        return "Hm."

    def thinks(name: str) -> ScriptedModel:
        return ScriptedModel(lambda request: order.append(name) or "Hm.")

    agents = [agent("busy", ScriptedModel(busy)), *(agent(name, thinks(name)) for name in ("x", "y", "asked", "z"))]
    async with run_agents(database, *agents, session_dir=tmp_path, max_active=1) as harness:
        await harness.ledger.write(entities_and_spaces.create_entity, "ent_bot", "agent", "Bot", {})
        await harness.push_event({"do": "something"}, agent=entity_id_for("busy"))
        await has_started.wait()
        for name, sender in (("x", "ent_bot"), ("y", "ent_bot"), ("asked", harness.person), ("z", "ent_bot")):
            space = f"spc_{name}"
            await harness.ledger.write(entities_and_spaces.create_space, space, name, {})
            for member in (sender, entity_id_for(name)):
                await harness.ledger.write(entities_and_spaces.add_member, space, member)
            await harness.ledger.commit(messaging.send_message, space, sender, "Think!")
        go_on.set()
        for name in ("x", "y", "asked", "z"):
            await harness.wait_for_run(agent=entity_id_for(name))
    assert order == ["asked", "x", "y", "z"]


@pytest.mark.spec("11.1")
async def test_cycles_per_minute_are_limited_over_all_processes(database: Database, tmp_path: Path) -> None:
    counting_database = CountingDatabase(database)
    limits = AgentLimits(cycles_per_minute=2, inbox_batch=1)
    ada = agent("ada", ScriptedModel.loop(["Hm."]), limits=limits)
    async with run_agents(counting_database, ada, session_dir=tmp_path) as harness:
        for number in range(4):
            await harness.send_message(f"Message {number}")
        await harness.wait_for_run(2)
        token = await harness.lease_token()
        before = counting_database.reads
        while counting_database.reads < before + 12:  # noqa: ASYNC110 - until it was looked at again, some times
            await asyncio.sleep(0.01)
        assert await harness.lease_token() <= token + 1
        assert len(await harness.runs()) == 2
        assert Counter(event.status for event in await harness.inbox()) == {"processed": 2, "pending": 2}
    # Another process knows, too.
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await harness.send_message("One more.")
        await harness.wait_until_idle()
        assert len(await harness.runs()) == 2


@pytest.mark.spec("11.1")
async def test_a_rate_limited_agent_continues_after_the_minute(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MINUTE_MS", 300)
    limits = AgentLimits(cycles_per_minute=1, inbox_batch=1)
    ada = agent("ada", ScriptedModel.loop(["Hm."]), limits=limits)
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        for number in range(3):
            await harness.send_message(f"Message {number}")
        await harness.wait_for_run(3)
        times = [run.created_at for run in await harness.runs()]
        assert all(later - earlier >= 300 for earlier, later in itertools.pairwise(times))
