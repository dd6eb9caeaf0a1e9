"""Many agents in one space: they are bounded, each gets its turn, and people come first."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from tests.agents.agent_harness import Village, agent, village
from toolspace.agents import scheduler
from toolspace.agents.agent import Agent
from toolspace.agents.host import entity_id_for
from toolspace.config.agent_settings import AgentLimits
from toolspace.core.model import ModelCall, ModelRequest, Turn, UserTurn
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import messaging
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities

T = TypeVar("T")


def told_last(request: ModelRequest) -> Turn:
    """The last turn that is a part of the conversation."""
    return next(turn for turn in reversed(request.turns) if "[INBOX PREVIEW" not in str(turn))


def answers_everything(request: ModelRequest) -> str | list[ModelCall]:
    """Says something whenever it is told anything."""
    if not isinstance(told_last(request), UserTurn):
        return "Done."
    return [call("enter_space", {"spaceId": "spc_room"}), call("send_message", {"text": "Indeed!"})]


def chatterbox(name: str, **limits: int) -> Agent:
    return agent(name, ScriptedModel(answers_everything, record=False), limits=AgentLimits(**limits))


async def silence(town: Village) -> None:
    """Waits until nobody has anything to do."""
    while True:
        await town.quiet()
        waiting = [one for name in town.agents for one in await town.inbox(name) if one.status != "processed"]
        if not waiting:
            return
        await asyncio.sleep(0.005)


class Counted(Database):
    """Another database, and how often it was read."""

    def __init__(self, within: Database) -> None:
        self._within = within
        self.is_shared = within.is_shared
        self.reads = 0
        self.run = within.run  # type: ignore[method-assign]
        self.commit_deferred = within.commit_deferred  # type: ignore[method-assign]

    async def run(self, *args: object, **kwargs: object) -> object: ...  # type: ignore[override]

    async def commit_deferred(self, *args: object, **kwargs: object) -> bool: ...  # type: ignore[override, empty-body]

    async def read(self, program: Callable[[], Program[T]]) -> T:
        self.reads += 1
        return await self._within.read(program)

    async def aclose(self) -> None: ...


@pytest.mark.spec("11.1")
async def test_ten_agents_that_answer_each_other_come_to_an_end(database: Database, tmp_path: Path) -> None:
    names = [f"agent{number}" for number in range(10)]
    agents = [chatterbox(name, max_agent_turns=3, cycles_per_minute=1_000) for name in names]
    async with village(database, *agents, folder=tmp_path, owns=False, max_active=4) as town:
        await town.say("What do you think?")
        await silence(town)
        said = {name: len(await town.said(entity_id_for(name))) for name in names}
        # One answer to the person, and no more than three in a row to each other.
        assert max(said.values()) <= 4
        assert min(said.values()) >= 2
        for name in town.agents:
            assert {event.status for event in await town.inbox(name)} == {"processed"}
            assert {run.status for run in await town.runs(name)} == {"completed"}
        # What was said after that is read, and known when someone is next asked.
        told = [row.stored.turn.text for row in await town.history() if isinstance(row.stored.turn, UserTurn)]
        assert sum(text.count("Indeed!") for text in told) == sum(said.values()) - said["agent0"]
        await town.say("And now?")
        await silence(town)
        for name in names:
            assert len(await town.said(entity_id_for(name))) > said[name]


@pytest.mark.spec("11.1")
async def test_each_agent_gets_its_turn_where_few_may_think_at_once(database: Database, tmp_path: Path) -> None:
    order: list[str] = []

    def thinks(name: str) -> ScriptedModel:
        def think(request: ModelRequest) -> str:
            order.append(name)
            return "Hm."

        return ScriptedModel(think)

    names = ["a", "b", "c", "d"]
    limits = AgentLimits(inbox_batch=1, cycles_per_minute=1_000)
    agents = [agent(name, thinks(name), limits=limits) for name in names]
    async with village(database, *agents, folder=tmp_path, owns=False, max_active=1) as town:
        for number in range(5):
            await town.say(f"Message {number}")
        await silence(town)
    assert Counter(order) == dict.fromkeys(names, 5)
    # Nobody has a second turn before everyone has had a first, and so on; but for the one who was there before others.
    for start in range(4, 20, 4):
        assert set(order[start : start + 4]) == set(names), order


@pytest.mark.spec("7.3")
async def test_a_person_is_answered_before_a_backlog_of_agents_messages(database: Database, tmp_path: Path) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def takes_its_time(request: ModelRequest) -> str:
        begun.set()
        await go_on.wait()
        return "Hm."

    model = ScriptedModel([takes_its_time, "First.", "Second.", "Third."])
    ada = agent("ada", model, limits=AgentLimits(inbox_batch=1))
    async with village(database, ada, folder=tmp_path, owns=False) as town:
        await town.ledger.write(entities.create_entity, "ent_bot", "agent", "Bot", {})
        await town.ledger.write(entities.add_member, town.space, "ent_bot")
        await town.say("Begin.")
        await begun.wait()
        await town.say("beep", sender="ent_bot")
        await town.say("boop", sender="ent_bot")
        await town.say("Are you there?")
        go_on.set()
        await town.run_ended(4)
    told = [str(told_last(request)) for request in model.requests]
    assert ["Are you there?" in text for text in told] == [False, True, False, False]


@pytest.mark.spec("7.3")
async def test_the_agent_that_a_person_asks_thinks_before_those_whom_agents_ask(
    database: Database, tmp_path: Path
) -> None:
    order: list[str] = []
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def busy(request: ModelRequest) -> str:
        begun.set()
        await go_on.wait()
        return "Hm."

    def thinks(name: str) -> ScriptedModel:
        return ScriptedModel(lambda request: order.append(name) or "Hm.")

    agents = [agent("busy", ScriptedModel(busy)), *(agent(name, thinks(name)) for name in ("x", "y", "asked", "z"))]
    async with village(database, *agents, folder=tmp_path, owns=False, max_active=1) as town:
        await town.ledger.write(entities.create_entity, "ent_bot", "agent", "Bot", {})
        await town.push({"do": "something"}, agent=entity_id_for("busy"))
        await begun.wait()
        for name, sender in (("x", "ent_bot"), ("y", "ent_bot"), ("asked", town.person), ("z", "ent_bot")):
            space = f"spc_{name}"
            await town.ledger.write(entities.create_space, space, name, {})
            for member in (sender, entity_id_for(name)):
                await town.ledger.write(entities.add_member, space, member)
            await town.ledger.commit(messaging.send_message, space, sender, "Think!")
        go_on.set()
        for name in ("x", "y", "asked", "z"):
            await town.run_ended(agent=entity_id_for(name))
    assert order == ["asked", "x", "y", "z"]


@pytest.mark.spec("11.1")
async def test_an_agent_that_has_had_its_cycles_of_the_minute_rests_and_costs_nothing(
    database: Database, tmp_path: Path
) -> None:
    counted = Counted(database)
    limits = AgentLimits(cycles_per_minute=2, inbox_batch=1)
    ada = agent("ada", ScriptedModel.loop(["Hm."]), limits=limits)
    async with village(counted, ada, folder=tmp_path, owns=False) as town:
        for number in range(4):
            await town.say(f"Message {number}")
        await town.run_ended(2)
        token = await town.token()
        before = counted.reads
        while counted.reads < before + 12:  # noqa: ASYNC110 - until it was looked at again, some times
            await asyncio.sleep(0.01)
        assert await town.token() <= token + 1
        assert len(await town.runs()) == 2
        assert Counter(event.status for event in await town.inbox()) == {"processed": 2, "pending": 2}
    # Another process knows, too.
    async with village(database, ada, folder=tmp_path, owns=False) as town:
        await town.say("One more.")
        await town.quiet()
        assert len(await town.runs()) == 2


@pytest.mark.spec("11.1")
async def test_an_agent_that_rested_goes_on(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "MINUTE_MS", 300)
    limits = AgentLimits(cycles_per_minute=1, inbox_batch=1)
    ada = agent("ada", ScriptedModel.loop(["Hm."]), limits=limits)
    async with village(database, ada, folder=tmp_path, owns=False) as town:
        for number in range(3):
            await town.say(f"Message {number}")
        await town.run_ended(3)
        times = [run.created_at for run in await town.runs()]
        assert all(later - earlier >= 300 for earlier, later in itertools.pairwise(times))
