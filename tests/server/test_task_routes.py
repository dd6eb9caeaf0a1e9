"""Background tasks and the history of agents over HTTP."""

from __future__ import annotations

import asyncio
import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import SECRET, ApiClient
from tests.server.scripted_agents import agent_config, open_agent_gateway, open_model_server, tool_calls_turn
from toolspace.agents.agent import Agent, entity_id_for
from toolspace.agents.background_tasks import NewTask, spawn
from toolspace.client.client import ToolspaceClient
from toolspace.core.language_model import ModelRequest
from toolspace.models.scripted import ScriptedModel, call
from toolspace.server.gateway import Gateway
from toolspace.storage.queries import sessions

TODAY = datetime.datetime.now(datetime.UTC).date()


def say(request: ModelRequest) -> Any:
    """Starts a task for every input."""
    if request.system.startswith("You work on a task"):
        return "It is done."
    if request.system.startswith("You keep the long-term memory"):
        return "It went well."
    input_turn = request.turns[-1]
    if "service" in getattr(input_turn, "text", ""):
        return call("spawn_task", {"description": "see to it", "input": "all of it"})
    return "I wait."


async def start_agent(gateway: Gateway) -> str:
    """Starts an agent in the gateway; returns its id."""
    gateway.toolspace.agents.add([Agent("ada", model=ScriptedModel(say), tools=["spawn_task"])])
    await gateway.agent_host.register_agents()
    return entity_id_for("ada")


async def wait_for_reflection(api: ApiClient, agent: str) -> Any:
    """Waits for the reflection on the first task of an agent."""
    while True:
        items = (await api.get(f"/api/agents/{agent}/tasks")).data["items"]
        if items and items[0]["reflection"] is not None:
            return items[0]
        await asyncio.sleep(0.01)


@pytest.mark.spec("11.5")
@pytest.mark.spec("12.1")
async def test_a_task_is_returned_with_its_conversation_and_reflection(gateway: Gateway, api: ApiClient) -> None:
    agent = await start_agent(gateway)
    await api.create(f"/api/agents/{agent}/inbox", data="something happened")
    task = await wait_for_reflection(api, agent)
    assert (task["status"], task["result"], task["description"]) == ("completed", "It is done.", "see to it")
    assert task["reflection"] == {"assessment": "It went well.", "toolCallsCount": 0}
    task_with_messages = (await api.get(f"/api/agents/{agent}/tasks/{task['id']}")).data
    assert [(turn["role"], turn["text"]) for turn in task_with_messages["messages"]] == [
        ("user", "TASK: see to it\n\nall of it"),
        ("assistant", "It is done."),
    ]
    assert (await api.post(f"/api/agents/{agent}/tasks/{task['id']}/cancel")).status == 409
    async with ToolspaceClient(api.url, secret_key=SECRET) as client:
        page = await client.agents.list_tasks(agent, date=TODAY.isoformat(), status="completed")
        assert [item.id for item in page.items] == [task["id"]]
        assert (await client.agents.get_task(agent, task["id"])).messages[-1].text == "It is done."
        history = await client.agents.get_history(agent)
        assert history.summary is None
        assert [turn.role for turn in history.items][:4] == ["user", "assistant", "tool", "assistant"]
        assert history.items[1].calls[0].name == "spawn_task"
        assert history.items[2].results[0].call_id == history.items[1].calls[0].call_id


async def new_tasks(gateway: Gateway, agent: str, count: int) -> list[str]:
    """Creates tasks of an agent that this gateway does not run."""
    return [
        await gateway.ledger.commit(
            spawn, NewTask(session_id=agent, description=f"{n}", input="x", call_id=f"call_{n}")
        )
        for n in range(count)
    ]


@pytest.mark.spec("12.1")
async def test_tasks_are_listed_in_pages_and_by_day(gateway: Gateway, api: ApiClient) -> None:
    agent = (await api.create("/api/entities", type="agent", name="Bob"))["id"]
    task_ids = await new_tasks(gateway, agent, 5)
    path = f"/api/agents/{agent}/tasks"
    first = (await api.get(f"{path}?limit=3")).data
    second = (await api.get(f"{path}?limit=3&cursor={first['next']}")).data
    assert {item["id"] for item in (*first["items"], *second["items"])} == set(task_ids)
    assert second["next"] is None
    assert len((await api.get(f"{path}?date={TODAY}")).data["items"]) == 5
    assert (await api.get(f"{path}?date={TODAY - datetime.timedelta(days=1)}")).data["items"] == []
    assert (await api.get(f"{path}?status=failed")).data["items"] == []
    for wrong in ("date=today", "date=2026-02-30", "status=lost", "limit=0", "nonsense=1"):
        assert (await api.get(f"{path}?{wrong}")).status == 400, wrong


@pytest.mark.spec("12.1")
async def test_a_task_is_cancelled_and_its_agent_notified(gateway: Gateway, api: ApiClient) -> None:
    agent = (await api.create("/api/entities", type="agent", name="Bob"))["id"]
    other_agent = (await api.create("/api/entities", type="agent", name="Eve"))["id"]
    (task,) = await new_tasks(gateway, agent, 1)
    path = f"/api/agents/{agent}/tasks/{task}"
    assert (await api.get(f"/api/agents/{other_agent}/tasks/{task}")).status == 404
    assert (await api.post(f"/api/agents/{other_agent}/tasks/{task}/cancel")).status == 404
    for _ in range(2):
        canceled = await api.post(f"{path}/cancel")
        assert (canceled.status, canceled.data["status"]) == (200, "canceled")
    assert (await api.get(f"/api/runs/run_{task}")).data["status"] == "canceled"
    (event,) = (await api.get(f"/api/agents/{agent}/inbox")).data["items"]
    assert (event["eventId"], event["data"]["status"]) == (f"task:{task}", "canceled")


@pytest.mark.spec("12.1")
async def test_a_history_is_listed_backwards_in_pages(gateway: Gateway, api: ApiClient) -> None:
    from toolspace.core.language_model import UserTurn
    from toolspace.storage.queries.sessions import NewTurn, StoredTurn

    agent = (await api.create("/api/entities", type="agent", name="Bob"))["id"]
    path = f"/api/agents/{agent}/history"
    assert (await api.get(path)).data == {"summary": None, "items": [], "next": None}
    await gateway.ledger.write(sessions.create, agent, agent, "agent")
    turns = [NewTurn(stored_turn=StoredTurn(UserTurn(f"{n}")), tokens=1, run_id=None) for n in range(1, 8)]
    await gateway.ledger.write(sessions.append_turns, agent, 1, turns)
    await gateway.ledger.write(sessions.replace_by_summary, agent, before_seq=3, summary="one and two")
    texts: list[str] = []
    query = "?limit=2"
    while query:
        part = (await api.get(path + query)).data
        assert part["summary"] == "one and two"
        texts = [turn["text"] for turn in part["items"]] + texts
        query = f"?limit=2&cursor={part['next']}" if part["next"] else ""
    assert texts == ["3", "4", "5", "6", "7"]
    for wrong in ("cursor=x", "cursor=-1", f"cursor={10**16}", "limit=501"):
        assert (await api.get(f"{path}?{wrong}")).status == 400, wrong


@pytest.mark.spec("11.5")
async def test_the_settings_of_an_agent_apply_to_its_tasks(tmp_path: Path) -> None:
    """The memory setting and denied tools."""
    async with open_model_server() as model_server:
        model_server.script(
            tool_calls_turn(("spawn_task", {"description": "learn", "input": "all of it"})), "I wait.", model="m"
        )
        builtins = ["memory_*", "spawn_task"]
        own_tools = {"memoryDir": "own-memory", "builtins": builtins, "toolsDenied": ["reply", "memory_append"]}
        async with open_agent_gateway(
            tmp_path, model_server, agents={"ada": agent_config(model_server, tools=own_tools)}
        ) as setup:
            agent = entity_id_for("ada")
            await setup.api.create(f"/api/agents/{agent}/inbox", data="something happened")
            task = await wait_for_reflection(setup.api, agent)
        offered_tools = [
            {tool["function"]["name"] for tool in request.get("tools", ())}
            for request in model_server.list_requests("m")
        ]
    main = next(names for names in offered_tools if "send_message" in names)
    assert main >= {"spawn_task", "task_list", "memory_list"}
    assert main.isdisjoint({"reply", "memory_append", "read_file"})
    assert {"memory_read", "memory_write", "memory_patch"} in offered_tools
    assert task["status"] == "completed"
