"""Goals and memories of agents over HTTP."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.gateway_api import ApiClient


async def agent(api: ApiClient, name: str = "Ada") -> str:
    new_agent = await api.create("/api/entities", type="agent", name=name)
    return new_agent["id"]


@pytest.mark.spec("12.1")
@pytest.mark.spec("9.3")
async def test_goals_are_stored_for_an_agent(each_database_api: ApiClient) -> None:
    path = f"/api/agents/{await agent(each_database_api)}/goals"
    response = await each_database_api.put(path, {"goals": [{"description": "b"}, {"description": "a", "priority": 2}]})
    assert [goal["description"] for goal in response.data["items"]] == ["a", "b"]
    first = response.data["items"][0]
    change = {"goals": [{"id": first["id"], "description": "a", "isCompleted": True}], "clearExisting": True}
    assert (await each_database_api.put(path, change)).data["items"][0]["status"] == "completed"
    goal_page = (await each_database_api.get(path)).data
    assert [goal["id"] for goal in goal_page["items"]] == [first["id"]]
    assert goal_page["next"] is None
    assert (await each_database_api.delete(f"{path}/{first['id']}")).data == {"deleted": 1}
    assert (await each_database_api.delete(f"{path}/{first['id']}")).status == 404
    assert (await each_database_api.delete(path)).data == {"deleted": 0}


@pytest.mark.spec("9.3")
async def test_goals_of_two_agents_are_apart(each_database_api: ApiClient) -> None:
    api = each_database_api
    ada, bob = await agent(api), await agent(api, "Bob")
    goal = {"id": "goal-1", "description": "hers", "metadata": {"ticket": 7}}
    hers = (await api.put(f"/api/agents/{ada}/goals", {"goals": [goal]})).data["items"]
    assert (hers[0]["id"], hers[0]["metadata"]) == ("goal-1", {"ticket": 7})
    assert (await api.delete(f"/api/agents/{bob}/goals/goal-1")).status == 404
    reply = await api.put(f"/api/agents/{bob}/goals", {"goals": [{"id": "goal-1", "description": "his"}]})
    assert [(item["description"], item["metadata"]) for item in reply.data["items"]] == [("his", {})]
    assert (await api.get(f"/api/agents/{ada}/goals")).data["items"] == hers


@pytest.mark.spec("12.1")
@pytest.mark.spec("9.2")
async def test_memories_are_stored_for_an_agent(each_database_api: ApiClient) -> None:
    path = f"/api/agents/{await agent(each_database_api)}/memories"
    memories = [{"key": "deadline", "value": "Friday"}, {"key": "a/b c", "value": {"x": [None, "\0"]}}]
    response = await each_database_api.put(path, {"memories": memories})
    assert [(memory["key"], memory["value"]) for memory in response.data["items"]] == [
        ("a/b c", {"x": [None, "\0"]}),
        ("deadline", "Friday"),
    ]
    assert (await each_database_api.delete(f"{path}/a%2Fb%20c")).data == {"deleted": 1}
    assert (await each_database_api.delete(f"{path}/nothing%00")).status == 404
    assert len((await each_database_api.get(path)).data["items"]) == 1
    assert (await each_database_api.delete(path)).data == {"deleted": 1}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("goals", {"goals": [{"description": ""}]}),
        ("goals", {"goals": [{"description": "a\0"}]}),
        ("goals", {"goals": [{"description": "a", "priority": 1e300}]}),
        ("goals", {"goals": [{"description": "a", "status": "active", "isCompleted": True}]}),
        ("goals", {"goals": [{"description": "a", "nonsense": 1}]}),
        ("goals", {"goals": [{"description": "a", "metadata": {"big": "x" * 5_000}}]}),
        ("goals", {"goals": [{"description": "a", "metadata": [1]}]}),
        ("goals", {"goals": [{"description": "a"}] * 101}),
        ("memories", {"memories": [{"key": "", "value": 1}]}),
        ("memories", {"memories": [{"key": "k\0", "value": 1}]}),
        ("memories", {"memories": [{"key": "k", "value": "x" * 20_000}]}),
        ("memories", {}),
    ],
)
async def test_invalid_goals_and_memories_are_refused(api: ApiClient, path: str, body: Any) -> None:
    reply = await api.put(f"/api/agents/{await agent(api)}/{path}", body)
    assert reply.status == 400, reply
    assert reply.detail


@pytest.mark.spec("8.1")
async def test_only_a_secret_key_reads_goals_and_memories(api: ApiClient) -> None:
    ada = await agent(api)
    person = (await api.create("/api/entities", type="human", name="Husam"))["id"]
    await api.create("/api/spaces", name="Room", members=[ada, person])
    member = await api.member(person)
    for path in ("goals", "memories"):
        assert (await member.get(f"/api/agents/{ada}/{path}")).status == 403
        assert (await api.get(f"/api/agents/{person}/{path}")).status == 404
        assert (await api.get(f"/api/agents/ent_nobody/{path}")).status == 404


@pytest.mark.spec("12.2")
@pytest.mark.spec("9.6")
async def test_a_program_calls_prebuilt_tools_in_a_run(api: ApiClient) -> None:
    ada = await agent(api)
    space = (await api.create("/api/spaces", name="Room", members=[ada]))["id"]
    run = (await api.create("/api/runs", agentEntityId=ada))["id"]
    calls: list[tuple[str, dict[str, Any]]] = [
        ("enter_space", {"spaceId": space}),
        ("send_message", {"text": "Hello"}),
        ("get_goals", {}),
    ]
    for name, args in calls:
        reply = await api.post(f"/api/runs/{run}/calls", {"name": name, "args": args})
        assert reply.data["ok"], reply
    messages = (await api.get(f"/api/spaces/{space}/messages")).data["items"]
    assert [message["content"] for message in messages] == ["Hello"]
    response = await api.post("/api/tools/get_goals/call", {"args": {}})
    assert "is for agents, in their runs" in response.data["error"]
