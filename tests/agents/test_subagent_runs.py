"""Agents that agents call on the gateway: their runs are kept, beside those of whoever called them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import agent, village
from toolspace import tool
from toolspace.agents.host import entity_id_for
from toolspace.core.model import ModelRequest, ResultsTurn, Usage
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import runs
from toolspace.storage.database import Database

COST = Usage(requests=1, input_tokens=10, output_tokens=5)


@tool(visible=False)
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def asks(name: str, prompt: str = "Help.") -> Any:
    return call(f"agent__{name}", {"prompt": prompt, "reason": "a test"})


def heard(model: ScriptedModel) -> list[str]:
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


@pytest.mark.spec("3.40")
async def test_the_run_of_a_child_is_kept_and_streamed(database: Database, tmp_path: Path) -> None:
    child = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."], usage=COST)
    parent = ScriptedModel([asks("child", "1 + 2?"), "Done."], usage=COST)
    family = (agent("parent", parent, agents=("child",)), agent("child", child))
    async with village(database, *family, tools=[add], folder=tmp_path, owns=False) as town:
        await town.push({"do": "it"})
        run = await town.run_ended()
        assert heard(parent) == ["It is 3."]
        [below] = await town.runs(entity_id_for("child"))
        [asked] = await town.calls(run.id)
        assert below.trigger == {"type": "agent", "parentRunId": run.id, "callId": asked.call_id, "agent": "parent"}
        assert (below.status, below.steps, below.usage["inputTokens"]) == ("completed", 2, 20)
        assert run.usage["inputTokens"] == 40
        [added] = await town.calls(below.id)
        assert (added.tool_name, added.agent_entity_id, added.result) == ("add", entity_id_for("child"), 3)
        streamed = [event.type for event in await town.events(f"run:{below.id}")]
        assert streamed[0] == "run.started"
        assert "tool.streaming" in streamed
        assert streamed[-1] == "run.done"
        assert await town.history(entity_id_for("child")) == []  # What it has in mind is of its own cycles.


async def test_a_child_that_fails_or_hands_on_leaves_runs_that_say_so(database: Database, tmp_path: Path) -> None:
    parent = ScriptedModel([[asks("sick"), asks("desk")], "Done."])
    family = (
        agent("parent", parent, agents=("sick", "desk")),
        agent("sick", ScriptedModel([ModelError("broken", "cut\0off \ud800")])),
        agent("desk", ScriptedModel([call("router__handoff-to", {"agent": "clerk"})]), router=_to("clerk")),
        agent("clerk", ScriptedModel(["Filed."])),
    )
    async with village(database, *family, folder=tmp_path, owns=False) as town:
        await town.push({"do": "it"})
        await town.run_ended()
        assert heard(parent)[1] == "Filed."
        [sick] = await town.runs(entity_id_for("sick"))
        assert (sick.status, (sick.error or "")[:3]) == ("failed", "cut")
        [desk], [clerk] = await town.runs(entity_id_for("desk")), await town.runs(entity_id_for("clerk"))
        assert (desk.status, clerk.status) == ("completed", "completed")
        assert desk.trigger["callId"] == clerk.trigger["callId"]


async def test_a_childs_run_that_someone_cancels_stops_at_once(database: Database, tmp_path: Path) -> None:
    reached, stopped = asyncio.Event(), asyncio.Event()

    async def think(request: ModelRequest) -> str:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    parent = ScriptedModel([asks("child"), "Without it, then."])
    family = (agent("parent", parent, agents=("child",)), agent("child", ScriptedModel([think])))
    async with village(database, *family, folder=tmp_path, owns=False) as town:
        await town.push({"do": "it"})
        await reached.wait()
        [below] = await town.runs(entity_id_for("child"))
        await town.ledger.commit(runs.cancel_run, below.id)
        await stopped.wait()
        run = await town.run_ended()
        assert run.status == "completed"
        assert heard(parent) == ['(tool failed: the agent "child" did not finish: the run was canceled)']


async def test_cancelling_the_parents_run_cancels_the_childs(database: Database, tmp_path: Path) -> None:
    reached, stopped = asyncio.Event(), asyncio.Event()

    async def think(request: ModelRequest) -> str:
        reached.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    family = (
        agent("parent", ScriptedModel([asks("child"), "Done."]), agents=("child",)),
        agent("child", ScriptedModel([think])),
    )
    async with village(database, *family, folder=tmp_path, owns=False) as town:
        await town.push({"do": "it"})
        await reached.wait()
        [above] = await town.runs()
        await town.ledger.commit(runs.cancel_run, above.id)
        await stopped.wait()
        await town.run_ended()
        below = await town.run_ended(agent=entity_id_for("child"))
        assert below.status == "canceled"


async def test_a_child_has_no_inbox(database: Database, tmp_path: Path) -> None:
    child = ScriptedModel([[call("peek_inbox"), call("skip"), call("set_memory", {"key": "k", "value": "v"})], "ok"])
    parent = ScriptedModel([asks("child"), "Done."])
    family = (agent("parent", parent, agents=("child",)), agent("child", child))
    async with village(database, *family, folder=tmp_path, owns=False) as town:
        await town.push({"do": "it"})
        await town.run_ended()
        offered = {one.name for one in child.requests[0].tools}
        assert "send_message" in offered
        assert not {"peek_inbox", "skip"} & offered
        assert "this run answers a request" in heard(child)[0]
        assert "this run answers a request" in heard(child)[1]


async def test_an_agent_with_tools_of_its_own_lives_like_any_other(database: Database, tmp_path: Path) -> None:
    @tool(visible=False)
    async def shout(text: str) -> str:
        """Shouts."""
        return text.upper()

    model = ScriptedModel(
        [
            [
                call("shout", {"text": "hi"}),
                call("add", {"a": 1, "b": 2}),
                call("enter_space", {"spaceId": "spc_room"}),
            ],
            call("send_message", {"text": "HI"}),
            "Said.",
        ]
    )
    async with village(
        database, agent("ada", model, tools=[shout]), tools=[add], folder=tmp_path, owns=False
    ) as town:  # fmt: skip
        await town.say("Hello?")
        run = await town.run_ended()
        assert run.status == "completed"
        assert await town.said(town.agent) == ["HI"]
        made = {one.tool_name: one.status for one in await town.calls(run.id)}
        assert made == dict.fromkeys(("shout", "add", "enter_space", "send_message"), "completed")


async def test_the_run_of_a_child_ends_with_the_call_that_a_dead_process_left(
    database: Database, tmp_path: Path
) -> None:
    family = (agent("parent", ScriptedModel()), agent("child", ScriptedModel()))
    async with village(database, *family, folder=tmp_path, owns=False) as town:
        below = runs.subagent_run_id("call_lost")
        handed = runs.subagent_run_id("call_lost", 1)
        for run_id in (below, handed):
            await town.ledger.commit(runs.open_run, entity_id_for("child"), run_id=run_id)
        await town.ledger.commit(runs.interrupt_call, "call_lost")
        found = await town.runs(entity_id_for("child"))
        assert {run.id for run in found} == {below, handed}
        assert {run.status for run in found} == {"failed"}


def _to(*names: str) -> Any:
    from toolspace.config.agent_settings import RouterSettings

    return RouterSettings(destinations=names)
