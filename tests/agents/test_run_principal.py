"""The principal of a run: the person whose message triggered it. Its calls, plans and tasks have the same one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.agents.agent_harness import AgentHarness, agent, run_agents
from tests.agents.scripted_sessions import ScriptedSessions, wait_until_done
from toolspace import tool
from toolspace.agents.agent import entity_id_for
from toolspace.config.agent_settings import RouterSettings
from toolspace.core.language_model import ModelCall, ModelRequest, ResultsTurn
from toolspace.core.tool_context import ToolContext
from toolspace.models.scripted import ScriptedModel, call
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, plans, runs

CARLA, DAVE = "ent_carla", "ent_dave"


@tool(visible=False)
async def whoami(context: ToolContext) -> str:
    """Says for whom the call is made."""
    return context.principal


@tool(visible=False)
def shout() -> str:
    """Says a lot."""
    return "\n".join(f"line {number}" for number in range(200_000))


def last_text(model: ScriptedModel) -> str:
    """The last result that the model was given."""
    turn = model.requests[-1].turns[-1]
    assert isinstance(turn, ResultsTurn)
    return turn.results[-1].text


async def principals(harness: AgentHarness, agent: str | None = None) -> list[str | None]:
    return [run.principal for run in await harness.runs(agent)]


@pytest.mark.spec("21.1")
async def test_a_run_works_for_the_person_whose_message_triggered_it(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel.loop([call("whoami"), "Done."])
    async with run_agents(database, agent("ada", model), tools=[whoami], session_dir=tmp_path) as harness:
        for number, person in enumerate((CARLA, DAVE), 1):
            await harness.add_person(person)
            await harness.send_message("Who am I?", sender=person)
            await harness.wait_for_run(number)
            assert person in last_text(model)
        assert await principals(harness) == [CARLA, DAVE]


@pytest.mark.spec("21.1")
async def test_a_run_that_several_people_or_only_a_service_triggered_works_for_the_agent(
    sqlite: Database, tmp_path: Path
) -> None:
    may_answer = asyncio.Event()

    async def wait(request: ModelRequest) -> str:
        await may_answer.wait()
        return "Later."

    model = ScriptedModel([wait, call("whoami"), "Done.", call("whoami"), "Done."])
    async with run_agents(sqlite, agent("ada", model), tools=[whoami], session_dir=tmp_path) as harness:
        await harness.send_message("Wait.")
        for person in (CARLA, DAVE):
            await harness.add_person(person)
            await harness.send_message("Hello", sender=person)
        may_answer.set()
        await harness.wait_for_run(2)
        assert harness.agent in last_text(model)
        await harness.push_event({"order": 1})
        await harness.wait_for_run(3)
        assert harness.agent in last_text(model)
        assert await principals(harness) == [harness.person, harness.agent, harness.agent]


@pytest.mark.spec("21.1")
async def test_a_plan_and_a_task_run_for_whoever_created_them(database: Database, tmp_path: Path) -> None:
    plan = {"name": "Look", "instruction": "Look again.", "runAfter": "1 second"}
    scripts = ScriptedSessions(
        main=[
            [
                call("set_plans", {"plans": [plan]}),
                call("spawn_task", {"description": "look it up", "input": "Who am I?"}),
            ]
        ],
        task=[call("whoami"), "Found."],
    )
    async with run_agents(database, agent("ada", scripts.model), tools=[whoami], session_dir=tmp_path) as harness:
        await harness.add_person(CARLA)
        await harness.send_message("Look.", sender=CARLA)
        while not any(event.type == "plan" for event in await harness.inbox()):  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        (task,) = await wait_until_done(harness)
        assert (await harness.ledger.read(runs.find, task.run_id)).principal == CARLA  # type: ignore[union-attr]
        request = scripts.requests_of("task")[-1].turns[-1]
        assert isinstance(request, ResultsTurn)
        assert CARLA in request.results[0].text
        triggers = {run.trigger["type"]: run.principal for run in await harness.runs()}
        assert triggers["plan"] == triggers["task"] == CARLA


@pytest.mark.spec("21.1")
async def test_a_changed_plan_runs_for_whoever_changed_it_last(sqlite: Database, tmp_path: Path) -> None:
    """Otherwise one person could have an instruction carried out for another."""
    plan = {"name": "Look", "instruction": "Look.", "runAfter": "1 hour"}

    def change(request: ModelRequest) -> ModelCall:
        plan_id = request.system.split("PLANS:\n- [")[1].split("]")[0]
        return call("set_plans", {"plans": [{**plan, "id": plan_id, "instruction": "Delete everything."}]})

    model = ScriptedModel([call("set_plans", {"plans": [plan]}), "Planned.", change, "Changed."])
    async with run_agents(sqlite, agent("ada", model), session_dir=tmp_path) as harness:
        for number, person in enumerate((CARLA, DAVE), 1):
            await harness.add_person(person)
            await harness.send_message("Plan.", sender=person)
            await harness.wait_for_run(number)
            (record,) = await harness.ledger.read(plans.list_plans, harness.agent)
            assert record.principal == person


@pytest.mark.spec("21.1")
async def test_a_subagent_works_for_the_principal_of_its_caller(sqlite: Database, tmp_path: Path) -> None:
    child_model = ScriptedModel([call("whoami"), "Asked."])
    parent = agent("parent", ScriptedModel([call("agent__child", {"prompt": "Who?"}), "Done."]), agents=("child",))
    child = agent("child", child_model)
    async with run_agents(sqlite, parent, child, tools=[whoami], session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, "spc_carla")
        await harness.ledger.write(entities_and_spaces.remove_member, "spc_carla", entity_id_for("child"))
        await harness.send_message("Ask.", sender=CARLA, space="spc_carla")
        await harness.wait_for_run()
        called_runs = [run for run in await harness.runs(entity_id_for("child")) if run.trigger["type"] == "agent"]
        assert [run.principal for run in called_runs] == [CARLA]
        assert CARLA in str(child_model.requests[1].turns[-1])


@pytest.mark.spec("21.1")
async def test_an_agent_that_another_one_hands_a_request_or_writes_to_works_for_the_same_person(
    sqlite: Database, tmp_path: Path
) -> None:
    router = agent(
        "router",
        ScriptedModel([call("router__handoff-to", {"agent": "clerk"})]),
        router=RouterSettings(destinations=("clerk",)),
    )
    speak = [call("enter_space", {"spaceId": "spc_carla"}), call("send_message", {"text": "I look."})]
    clerk = agent("clerk", ScriptedModel([speak, "Done."]))
    listener = agent("listener", ScriptedModel.loop("Heard."))
    async with run_agents(sqlite, router, clerk, listener, session_dir=tmp_path) as harness:
        await harness.add_person(CARLA, "spc_carla")
        await harness.ledger.write(entities_and_spaces.remove_member, "spc_carla", entity_id_for("clerk"))
        await harness.send_message("Hello", sender=CARLA, space="spc_carla")
        run = await harness.wait_for_run(agent=entity_id_for("clerk"))
        assert (run.trigger["type"], run.principal) == ("service", CARLA)
        runs_of_listener = [await harness.wait_for_run(number, entity_id_for("listener")) for number in (1, 2)]
        assert [run.principal for run in runs_of_listener] == [CARLA, CARLA]


@pytest.mark.spec("21.1")
async def test_an_output_is_read_by_its_principal_and_by_nobody_else_in_the_same_session(
    sqlite: Database, tmp_path: Path
) -> None:
    def read(request: ModelRequest) -> ModelCall:
        first_result = next(turn for turn in request.turns if isinstance(turn, ResultsTurn)).results[0].text
        handle = json.loads(first_result)["tool_output"]["handle"]
        return call("agent__read_output", {"handle": handle, "pattern": "line 123456$"})

    model = ScriptedModel([call("shout"), "Much.", read, "Read.", read, "Tried."])
    async with run_agents(sqlite, agent("ada", model), tools=[shout], session_dir=tmp_path) as harness:
        for person in (CARLA, DAVE):
            await harness.add_person(person)
        for number, person in enumerate((CARLA, CARLA, DAVE), 1):
            await harness.send_message("Go on.", sender=person)
            await harness.wait_for_run(number)
            if number > 1:
                assert ("line 123456" in last_text(model).replace("123456$", "")) == (person == CARLA)
