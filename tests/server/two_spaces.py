"""A gateway with two separate spaces, every kind of caller, and marks on all private data.

Ann is with the robot in one space, Bob with another agent in the other; Eve is nowhere. Every text that somebody must
not see has a mark of its own, which can be looked for in whatever they get.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jwt

from tests.server.gateway_api import JWT_SECRET, PUBLIC, ApiClient, ApiResponse, open_api, write_config
from toolspace.core.extension_points import ToolProvider
from toolspace.core.result import ToolResult
from toolspace.core.tool import Tool
from toolspace.core.tool_context import ToolContext
from toolspace.server.gateway import Gateway

OPERATOR = "MARK-OPERATOR"
"""Marks data that only secret keys may see: input and output of prebuilt tools, triggers, costs, inboxes, outputs."""
IN_A = "MARK-IN-A"
"""Marks data that members of the first space may see."""
IN_B = "MARK-IN-B"
"""Marks data that members of the second space may see."""

TOOLS = [
    {"name": "confirm", "executionType": "space", "isAsync": True},
    {"name": "move", "executionType": "external", "isAsync": True},
    {"name": "quiet", "executionType": "external", "isAsync": True, "visible": False},
    {"name": "lookup", "executionType": "static", "execution": {"output": f"{OPERATOR} of a static tool"}},
]


class PrivateTools(ToolProvider):
    """Hidden tools, like prebuilt ones, and one visible tool."""

    kind = "own"
    namespace = ""

    def list_tools(self) -> list[Tool]:
        any_object = {"type": "object", "properties": {}}
        return [
            Tool("peek", input_schema=any_object, execution_type="prebuilt", visible=False),
            Tool("stumble", input_schema=any_object, execution_type="prebuilt", visible=False),
            Tool("show", input_schema=any_object, execution_type="internal", visible=True),
            Tool("large", input_schema=any_object),
        ]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name == "large":
            return ToolResult(ok=True, result=f"{OPERATOR} of a large output\n" * 20_000)
        if name == "show":
            return ToolResult(ok=True, result={"shown": parameters})
        context.report_progress(1, 2, f"{OPERATOR} in progress")
        context.emit_partial(f"{OPERATOR} in a part")
        if name == "stumble":
            return ToolResult(ok=False, error=f"{OPERATOR} in an error", error_kind="execution_error")
        return ToolResult(ok=True, result=f"{OPERATOR} in a result")


class TwoSpaces:
    """The gateway, the headers of each caller, and the ids of the records."""

    def __init__(self, gateway: Gateway, api: ApiClient) -> None:
        self.gateway = gateway
        self.api = api
        """With the secret key."""
        self.callers: dict[str, Mapping[str, str]] = {}
        self.calls: dict[str, str] = {}
        self.messages: dict[str, str] = {}
        self.secrets: list[str] = []
        """The keys and tokens that were created."""

    async def ask(self, caller: str, method: str, path: str, body: Any = None) -> ApiResponse:
        return await ApiClient(self.api.url, self.api.session, self.callers[caller]).request(method, path, body)

    async def call(self, run: str, name: str, args: Mapping[str, Any]) -> Any:
        reply = await self.api.post(f"/api/runs/{run}/calls", {"name": name, "args": args})
        assert reply.status in (200, 202), reply
        return reply.data

    async def key(self, kind: str, **scope: Any) -> tuple[str, str]:
        key = await self.api.create("/api/keys", kind=kind, name=f"{OPERATOR} key", **scope)
        self.secrets.append(key["key"])
        return key["id"], key["key"]

    async def token(self, entity: str) -> str:
        token = await self.api.create(f"/api/entities/{entity}/token")
        self.secrets.append(token["token"])
        return token["token"]


@asynccontextmanager
async def open_two_spaces(folder: Path, **server: Any) -> AsyncIterator[TwoSpaces]:
    config = write_config(folder, tools=TOOLS, server={"failedLoginLimit": None, **server})
    async with Gateway.open(config) as gateway:
        gateway.toolspace.orchestrator.register(PrivateTools())
        async with open_api(gateway) as api:
            setup = TwoSpaces(gateway, api)
            await _create_records(setup)
            await _create_callers(setup)
            yield setup


async def _create_records(setup: TwoSpaces) -> None:
    api = setup.api
    for id, kind in (("ann", "human"), ("bob", "human"), ("eve", "human"), ("robot", "agent"), ("other", "agent")):
        metadata = {"mark": IN_B if id in ("bob", "other") else IN_A}
        await api.create("/api/entities", id=id, type=kind, name=id.title(), metadata=metadata)
    for id, mark, members in (("spc_a", IN_A, ["ann", "robot"]), ("spc_b", IN_B, ["bob", "other"])):
        await api.create("/api/spaces", id=id, name=f"{mark} space", metadata={"mark": mark}, members=members)
    for space, run, agent, mark in (
        ("spc_a", "run_a", "robot", IN_A),
        ("spc_b", "run_b", "other", IN_B),
        (None, "run_alone", "robot", OPERATOR),
    ):
        trigger = {"why": f"{OPERATOR} trigger"}
        await api.create("/api/runs", id=run, agentEntityId=agent, spaceId=space, trigger=trigger)
        await setup.call(run, "peek", {"look": f"{OPERATOR} in an argument"})
        await setup.call(run, "stumble", {"look": f"{OPERATOR} in an argument"})
        await setup.call(run, "lookup", {"look": f"{OPERATOR} in an argument"})
        await setup.call(run, "quiet", {"look": f"{OPERATOR} for a worker"})
        if space is None:
            await setup.call(run, "show", {"look": f"{OPERATOR} outside of every space"})
            continue
        await setup.call(run, "show", {"look": f"{mark} on a screen"})
        for name in ("confirm", "move"):
            response = await setup.call(run, name, {"question": f"{mark} in a question"})
            setup.calls[f"{name} {space}"] = response["pendingToolCallId"]
        response = await api.post(
            f"/api/spaces/{space}/messages", {"entityId": agent, "content": f"{mark} in a message"}
        )
        setup.messages[space] = response.data["id"]
        await api.post(f"/api/agents/{agent}/inbox", {"data": {"mark": f"{OPERATOR} in an inbox"}, "eventId": "evt_1"})
    run_calls = (await api.get("/api/runs/run_a/calls")).data["items"]
    setup.calls["peek"] = next(call["callId"] for call in run_calls if call["toolName"] == "peek")
    setup.calls["quiet"] = next(call["callId"] for call in run_calls if call["toolName"] == "quiet")
    large_result = (await api.post("/api/tools/large/call")).data
    match = re.search(r"session-[\w-]+/[0-9a-f]{16}", str(large_result))
    assert match is not None, str(large_result)[:500]
    setup.calls["output"] = match[0]
    for agent in ("robot", "other"):
        await api.put(f"/api/agents/{agent}/goals", {"goals": [{"description": f"{OPERATOR} in a goal"}]})
        plan = {"name": f"{OPERATOR} plan", "instruction": f"{OPERATOR} in a plan", "runAfter": "2 days"}
        assert (await api.put(f"/api/agents/{agent}/plans", {"plans": [plan]})).status == 200
        await api.put(f"/api/agents/{agent}/memories", {"memories": [{"key": "k", "value": f"{OPERATOR} in memory"}]})


async def _create_callers(setup: TwoSpaces) -> None:
    tool_id, tool_key = await setup.key("tools", toolsAllowed=["lookup", "large"])
    revoked_id, revoked_key = await setup.key("secret")
    assert (await setup.api.delete(f"/api/keys/{revoked_id}")).status == 204
    setup.calls["key"] = tool_id
    now = int(time.time())

    def sign(secret: str, exp: int) -> str:
        token = jwt.encode({"sub": "ann", "exp": exp}, secret, algorithm="HS256")
        setup.secrets.append(token)
        return token

    def with_token(token: str) -> Mapping[str, str]:
        return {"x-public-key": PUBLIC, "authorization": f"Bearer {token}"}

    setup.callers = {
        "secret": setup.api.headers,
        "member": with_token(await setup.token("ann")),
        "member of another space": with_token(await setup.token("bob")),
        "member of no space": with_token(await setup.token("eve")),
        "tool key": {"authorization": f"Bearer {tool_key}"},
        "expired token": with_token(sign(JWT_SECRET, now - 3600)),
        "wrong signature": with_token(sign("x" * 40, now + 3600)),
        "public key without a token": {"x-public-key": PUBLIC},
        "token without a public key": {"authorization": f"Bearer {sign(JWT_SECRET, now + 3600)}"},
        "revoked key": {"x-secret-key": revoked_key},
        "nobody": {},
    }
