"""The sessions of agents over HTTP: an operator sees all of them, and can select one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.scripted_agents import (
    ROOM,
    AgentGateway,
    ScriptedModelServer,
    agent_config,
    list_input_texts,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace.agents.agent import entity_id_for
from toolspace.client.client import ToolspaceClient

pytestmark = pytest.mark.spec("19.1")

ADA = entity_id_for("ada")
CARLA, DAVE = "ent_carla", "ent_dave"
HERS, HIS = f"{ADA}/user:{CARLA}", f"{ADA}/user:{DAVE}"


@pytest.fixture
async def model_server() -> AsyncIterator[ScriptedModelServer]:
    async with open_model_server() as server:
        yield server


@pytest.fixture
async def setup(tmp_path: Path, model_server: ScriptedModelServer) -> AsyncIterator[AgentGateway]:
    """An agent with a session for each person; Carla and Dave have each stored something."""
    agents = {"ada": agent_config(model_server, session="user")}
    async with open_agent_gateway(tmp_path, model_server, agents=agents) as gateway:
        for count, person in enumerate((CARLA, DAVE), 1):
            model_server.script(tool_calls_turn(*store(person)), "Stored.")
            await gateway.api.create("/api/entities", id=person, type="human", name=person)
            await gateway.api.create(f"/api/spaces/{ROOM}/members", entityId=person)
            await gateway.say(f"I am {person}", sender=person)
            await gateway.wait_for_run_end(count)
        yield gateway


def store(person: str) -> list[tuple[str, dict[str, Any]]]:
    return [
        ("set_goals", {"goals": [{"id": "goal-1", "description": person}]}),
        ("set_memories", {"memories": [{"key": "name", "value": person}]}),
        ("set_plans", {"plans": [{"name": person, "instruction": "Greet.", "runAfter": "1 hour"}]}),
    ]


async def get_items(setup: AgentGateway, resource: str, session: str | None = None) -> list[Any]:
    query = f"?session={session}" if session is not None else ""
    return (await setup.api.get(f"/api/agents/{ADA}/{resource}{query}")).data["items"]


async def test_an_operator_lists_all_sessions_or_one(setup: AgentGateway) -> None:
    for resource in ("goals", "memories", "plans", "inbox"):
        assert {item["sessionId"] for item in await get_items(setup, resource)} == {HERS, HIS}
        (item,) = await get_items(setup, resource, HERS)
        assert item["sessionId"] == HERS
        assert await get_items(setup, resource, ADA) == []
    assert {run["sessionId"] for run in await setup.list_runs()} == {HERS, HIS}
    assert await get_items(setup, "history") == []
    assert CARLA in str(await get_items(setup, "history", HERS))
    assert DAVE not in str(await get_items(setup, "history", HERS))
    reply = await setup.api.get(f"/api/agents/{ADA}/goals?session=ent_other/user:{CARLA}")
    assert (reply.status, "is not of agent" in reply.detail) == (400, True)


async def test_an_operator_changes_one_session(setup: AgentGateway) -> None:
    path = f"/api/agents/{ADA}"
    goals = await setup.api.put(f"{path}/goals?session={HERS}", {"goals": [{"id": "goal-1", "description": "new"}]})
    assert [goal["description"] for goal in goals.data["items"]] == ["new"]
    assert [goal["description"] for goal in await get_items(setup, "goals", HIS)] == [DAVE]
    memories = await setup.api.put(f"{path}/memories", {"memories": [{"key": "name", "value": "main"}]})
    assert [memory["sessionId"] for memory in memories.data["items"]] == [ADA]
    assert (await setup.api.delete(f"{path}/memories/name?session={HIS}")).data == {"deleted": 1}
    assert {memory["sessionId"] for memory in await get_items(setup, "memories")} == {ADA, HERS}
    (plan,) = await get_items(setup, "plans", HIS)
    assert (await setup.api.delete(f"{path}/plans/{plan['id']}")).data == {"deleted": 1}
    assert (await setup.api.delete(f"{path}/goals?session={HIS}")).data == {"deleted": 1}
    assert (await setup.api.delete(f"{path}/goals")).data == {"deleted": 1}


async def test_an_event_of_a_service_is_for_the_session_that_it_names_or_the_main_one(
    setup: AgentGateway, model_server: ScriptedModelServer
) -> None:
    inbox = f"/api/agents/{ADA}/inbox"
    for count, (session, session_id) in enumerate(((None, ADA), (HERS, HERS)), 3):
        model_server.script("Noted.")
        body = {"data": {"order": count}} if session is None else {"data": {"order": count}, "session": session}
        await setup.api.create(inbox, **body)
        assert (await setup.wait_for_run_end(count))["sessionId"] == session_id
        texts = "".join(list_input_texts(model_server.list_requests()[-1]))
        assert DAVE not in texts
        assert (CARLA in texts) == (session is not None)
    assert (await setup.api.post(inbox, {"data": 1, "session": f"{ADA}/user:ent_nobody"})).status == 404


async def test_an_event_with_a_space_is_for_the_session_of_that_space(
    tmp_path: Path, model_server: ScriptedModelServer
) -> None:
    agents = {"ada": agent_config(model_server, session="space")}
    async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
        model_server.script("Noted.", "Noted.")
        await setup.push_event({"order": 1, "spaceId": ROOM})
        assert (await setup.wait_for_run_end())["sessionId"] == f"{ADA}/space:{ROOM}"
        await setup.push_event({"order": 2, "spaceId": "spc_of_others"})
        assert (await setup.wait_for_run_end(2))["sessionId"] == ADA


async def test_a_run_of_a_program_belongs_to_the_session_of_its_space(
    tmp_path: Path, model_server: ScriptedModelServer
) -> None:
    agents = {"ada": agent_config(model_server, session="space", spaces=["Room", "Garden"])}
    async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
        spaces = {item["name"]: item["id"] for item in (await setup.api.get("/api/spaces")).data["items"]}
        run = await setup.api.create("/api/runs", agentEntityId=ADA, spaceId=ROOM)
        assert run["sessionId"] == f"{ADA}/space:{ROOM}"
        calls = f"/api/runs/{run['id']}/calls"
        memories = [{"key": "fruit", "value": "apples"}]
        assert (await setup.api.create(calls, name="set_memories", args={"memories": memories}))["ok"]
        assert [item["sessionId"] for item in await get_items(setup, "memories")] == [run["sessionId"]]
        result = await setup.api.create(calls, name="enter_space", args={"spaceId": spaces["Garden"]})
        assert "belongs to the space" in result["error"]
        assert await get_items(setup, "memories", ADA) == []


async def test_the_client_selects_a_session(setup: AgentGateway) -> None:
    async with ToolspaceClient(setup.api.url, secret_key=setup.api.headers["x-secret-key"]) as client:
        assert [event.session_id for event in await client.agents.list_inbox(ADA, session=HERS)] == [HERS]
        assert CARLA in str(await client.agents.get_history(ADA, session=HERS))
        assert (await client.agents.list_tasks(ADA, session=HERS)).items == []
        assert await client.agents.push_event(ADA, {"order": 1}, session=HERS)
