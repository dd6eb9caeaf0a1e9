"""Runs of called agents on the gateway are stored beside the runs of their callers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import private_agent as agent
from tests.agents.agent_harness import run_agents
from toolspace import tool
from toolspace.agents.agent import entity_id_for
from toolspace.core.language_model import ModelRequest, ResultsTurn, Usage
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces import runs
from toolspace.storage.database import Database

COST = Usage(requests=1, input_tokens=10, output_tokens=5)


@tool(visible=False)
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def call_agent(name: str, prompt: str = "Help.") -> Any:
    return call(f"agent__{name}", {"prompt": prompt, "reason": "a test"})


def last_results(model: ScriptedModel) -> list[str]:
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


@pytest.mark.spec("3.40")
async def test_a_subagent_run_is_stored_and_streamed(database: Database, tmp_path: Path) -> None:
    child = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."], usage=COST)
    parent = ScriptedModel([call_agent("child", "1 + 2?"), "Done."], usage=COST)
    family = (agent("parent", parent, agents=("child",)), agent("child", child))
    async with run_agents(database, *family, tools=[add], session_dir=tmp_path) as harness:
        await harness.push_event({"do": "it"})
        run = await harness.wait_for_run()
        assert last_results(parent) == ["It is 3."]
        [child_run] = await harness.runs(entity_id_for("child"))
        [parent_call] = await harness.calls(run.id)
        assert child_run.trigger == {
            "type": "agent",
            "parentRunId": run.id,
            "callId": parent_call.call_id,
            "agent": "parent",
        }
        assert (child_run.status, child_run.steps, child_run.usage["inputTokens"]) == ("completed", 2, 20)
        assert run.usage["inputTokens"] == 40
        [added_call] = await harness.calls(child_run.id)
        assert (added_call.tool_name, added_call.agent_entity_id, added_call.result) == (
            "add",
            entity_id_for("child"),
            3,
        )
        event_types = [event.type for event in await harness.events(f"run:{child_run.id}")]
        assert event_types[0] == "run.started"
        assert "tool.streaming" in event_types
        assert event_types[-1] == "run.done"
        assert await harness.history(entity_id_for("child")) == []  # What it has in mind is of its own cycles.


async def test_failed_and_handed_off_subagent_runs_are_stored_with_their_status(
    database: Database, tmp_path: Path
) -> None:
    parent = ScriptedModel([[call_agent("sick"), call_agent("desk")], "Done."])
    family = (
        agent("parent", parent, agents=("sick", "desk")),
        agent("sick", ScriptedModel([ModelError("broken", "cut\0off \ud800")])),
        agent("desk", ScriptedModel([call("router__handoff-to", {"agent": "clerk"})]), router=_to("clerk")),
        agent("clerk", ScriptedModel(["Filed."])),
    )
    async with run_agents(database, *family, session_dir=tmp_path) as harness:
        await harness.push_event({"do": "it"})
        await harness.wait_for_run()
        assert last_results(parent)[1] == "Filed."
        [sick] = await harness.runs(entity_id_for("sick"))
        assert (sick.status, (sick.error or "")[:3]) == ("failed", "cut")
        [desk], [clerk] = await harness.runs(entity_id_for("desk")), await harness.runs(entity_id_for("clerk"))
        assert (desk.status, clerk.status) == ("completed", "completed")
        assert desk.trigger["callId"] == clerk.trigger["callId"]


async def test_canceling_a_subagent_run_stops_it_at_once(database: Database, tmp_path: Path) -> None:
    reached_event, stopped = asyncio.Event(), asyncio.Event()

    async def think(request: ModelRequest) -> str:
        reached_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    parent = ScriptedModel([call_agent("child"), "Without it, then."])
    family = (agent("parent", parent, agents=("child",)), agent("child", ScriptedModel([think])))
    async with run_agents(database, *family, session_dir=tmp_path) as harness:
        await harness.push_event({"do": "it"})
        await reached_event.wait()
        [child_run] = await harness.runs(entity_id_for("child"))
        await harness.ledger.commit(runs.cancel_run, child_run.id)
        await stopped.wait()
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert last_results(parent) == ['(tool failed: the agent "child" did not finish: the run was canceled)']


async def test_canceling_the_parent_run_cancels_the_subagent_run(database: Database, tmp_path: Path) -> None:
    reached_event, stopped = asyncio.Event(), asyncio.Event()

    async def think(request: ModelRequest) -> str:
        reached_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    family = (
        agent("parent", ScriptedModel([call_agent("child"), "Done."]), agents=("child",)),
        agent("child", ScriptedModel([think])),
    )
    async with run_agents(database, *family, session_dir=tmp_path) as harness:
        await harness.push_event({"do": "it"})
        await reached_event.wait()
        [parent_run] = await harness.runs()
        await harness.ledger.commit(runs.cancel_run, parent_run.id)
        await stopped.wait()
        await harness.wait_for_run()
        child_run = await harness.wait_for_run(agent=entity_id_for("child"))
        assert child_run.status == "canceled"


async def test_a_subagent_run_cannot_use_the_inbox(database: Database, tmp_path: Path) -> None:
    child = ScriptedModel([[call("peek_inbox"), call("skip"), call("set_memory", {"key": "k", "value": "v"})], "ok"])
    parent = ScriptedModel([call_agent("child"), "Done."])
    family = (agent("parent", parent, agents=("child",)), agent("child", child))
    async with run_agents(database, *family, session_dir=tmp_path) as harness:
        await harness.push_event({"do": "it"})
        await harness.wait_for_run()
        tool_item = {tool_item.name for tool_item in child.requests[0].tools}
        assert "send_message" in tool_item
        assert not {"peek_inbox", "skip"} & tool_item
        assert "this run answers a request" in last_results(child)[0]
        assert "this run answers a request" in last_results(child)[1]


async def test_a_resident_agent_can_have_its_own_tools(database: Database, tmp_path: Path) -> None:
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
    async with run_agents(
        database, agent("ada", model, tools=[shout]), tools=[add], session_dir=tmp_path
    ) as harness:  # fmt: skip
        await harness.send_message("Hello?")
        run = await harness.wait_for_run()
        assert run.status == "completed"
        assert await harness.sent_texts(harness.agent) == ["HI"]
        statuses = {record.tool_name: record.status for record in await harness.calls(run.id)}
        assert statuses == dict.fromkeys(("shout", "add", "enter_space", "send_message"), "completed")


async def test_a_subagent_run_ends_when_its_interrupted_call_is_found(database: Database, tmp_path: Path) -> None:
    family = (agent("parent", ScriptedModel()), agent("child", ScriptedModel()))
    async with run_agents(database, *family, session_dir=tmp_path) as harness:
        child_run = runs.subagent_run_id("call_lost")
        handoff_run = runs.subagent_run_id("call_lost", 1)
        for run_id in (child_run, handoff_run):
            await harness.ledger.commit(runs.open_run, entity_id_for("child"), run_id=run_id)
        await harness.ledger.commit(runs.interrupt_call, "call_lost")
        child_runs = await harness.runs(entity_id_for("child"))
        assert {run.id for run in child_runs} == {child_run, handoff_run}
        assert {run.status for run in child_runs} == {"failed"}


def _to(*names: str) -> Any:
    from toolspace.config.agent_settings import RouterSettings

    return RouterSettings(destinations=names)
