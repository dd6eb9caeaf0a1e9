"""Configured tools of each execution type, in runs of the gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.http_servers import http_server
from tests.server.gateway_api import ApiClient, ApiResponse, open_api, write_config
from toolspace.server.gateway import Gateway

pytestmark = pytest.mark.spec("6.1")


class AgentInSpace:
    """An agent and a person in a space, with a run of the agent."""

    def __init__(self, api: ApiClient) -> None:
        self.api = api

    async def create_space(self) -> None:
        self.id = (await self.api.create("/api/entities", type="agent", name="Ada"))["id"]
        self.person = (await self.api.create("/api/entities", type="human", name="Husam"))["id"]
        self.space = (await self.api.create("/api/spaces", name="Room", members=[self.id, self.person]))["id"]
        self.run = (await self.api.create("/api/runs", agentEntityId=self.id))["id"]

    async def call(self, name: str, **args: Any) -> ApiResponse:
        return await self.api.post(f"/api/runs/{self.run}/calls", {"name": name, "args": args})


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[AgentInSpace]:
    async with http_server() as server:
        tools: list[dict[str, Any]] = [
            {"name": "pause", "executionType": "wait", "visible": False, "execution": {"duration": 20}},
            {"name": "nap", "executionType": "wait", "visible": False, "timeout": 20},
            {"name": "total", "executionType": "compute", "execution": {"expression": "price * count"}},
            {"name": "fetch", "executionType": "gateway", "execution": {"url": server.url()}},
            {"name": "confirm", "executionType": "space", "isAsync": True},
            {"name": "robot", "executionType": "external", "visible": False, "whenUnserved": "fail"},
            {"name": "slowRobot", "executionType": "external", "visible": False, "timeout": 50},
            {"name": "show", "executionType": "internal", "visible": True},
            {"name": "goals", "executionType": "prebuilt", "execution": {"action": "getGoals"}},
        ]
        path = write_config(tmp_path, tools={"definitions": tools, "overrides": {"goals": {"visible": True}}})
        async with Gateway.open(path) as gateway, open_api(gateway) as api:
            new_agent = AgentInSpace(api)
            await new_agent.create_space()
            yield new_agent


async def test_a_timer_resolves_a_wait(agent: AgentInSpace) -> None:
    reply = await agent.call("pause")
    assert reply.data["ok"], reply
    assert reply.data["result"]["waited"] >= 20


@pytest.mark.spec("6.3")
async def test_the_result_of_a_long_wait_goes_to_the_inbox(agent: AgentInSpace) -> None:
    reply = await agent.call("nap", duration="60ms")
    assert reply.data["error"] == "Tool timed out after 20ms"
    inbox = (await agent.api.get(f"/api/agents/{agent.id}/inbox?wait=10")).data["items"]
    assert [event["data"]["toolName"] for event in inbox] == ["nap"]
    assert inbox[0]["data"]["result"]["waited"] >= 60
    wrong = await agent.call("nap", duration="soon")
    assert "is not a duration" in wrong.data["error"]


async def test_server_tools_are_executed_in_a_run(agent: AgentInSpace) -> None:
    assert (await agent.call("total", price=2, count=3)).data["result"] == 6
    assert (await agent.call("goals")).data["result"] == {"goals": [], "totalGoals": 0}


@pytest.mark.spec("6.6")
async def test_a_visible_tool_needs_an_active_space(agent: AgentInSpace) -> None:
    for name in ("fetch", "confirm", "show"):
        error = (await agent.call(name)).data["error"]
        assert f'Tool "{name}" is visible but you are not in a space. Call enter_space first.' in error
    alone = (await agent.api.post("/api/tools/confirm/call", {"args": {"question": "Sure?"}})).data
    assert (alone["errorKind"], alone["executed"]) == ("not_permitted", False)
    assert "open a run there (POST /api/runs)" in alone["error"]  # Outside a run there is no enter_space.
    assert "enter_space" not in alone["error"]
    await agent.call("enter_space", spaceId=agent.space)
    assert (await agent.call("fetch")).data["result"] == {}
    assert (await agent.call("show", a=1)).data["result"] == {"success": True, "args": {"a": 1}}
    pending = await agent.call("confirm", question="Sure?")
    assert pending.data["result"]["status"] == "pending"
    messages = (await agent.api.get(f"/api/spaces/{agent.space}/messages")).data["items"]
    calls = [(message["content"]["toolName"], message["status"]) for message in messages]
    assert calls == [("fetch", "complete"), ("show", "complete"), ("confirm", "requires_action")]


@pytest.mark.spec("6.7")
async def test_a_tool_that_no_worker_serves_waits_for_its_timeout_or_fails_at_once(agent: AgentInSpace) -> None:
    error = (await agent.call("robot")).data["error"]
    assert 'no worker serves the tool "robot"' in error
    reply = (await agent.call("slowRobot")).data
    assert (reply["error"], reply["errorKind"]) == ("Tool timed out after 50ms; no worker serves it", "timeout")
    assert (await agent.api.get(f"/api/calls/{reply['callId']}")).data["status"] == "pending"


@pytest.mark.spec("8.2")
async def test_an_override_does_not_make_a_prebuilt_tool_visible(agent: AgentInSpace) -> None:
    await agent.call("enter_space", spaceId=agent.space)
    assert (await agent.call("goals")).data["ok"]
    assert (await agent.api.get(f"/api/spaces/{agent.space}/messages")).data["items"] == []
