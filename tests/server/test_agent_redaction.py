"""Redaction for members: searches everything that a member can read for private data of agents."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.models.model_server import error_reply
from tests.server.gateway_api import ApiClient
from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    AgentGateway,
    ScriptedModelServer,
    agent_config,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from tests.server.test_gateway_mcp import META, VERSION
from toolspace.agents.agent import entity_id_for

OPERATOR = "MARK-OPERATOR"
"""Marks data that only secret keys may see: model texts, instructions, prebuilt tools, messages of agents, failures."""
ROOMS = "MARK-ROOM"
DEN = "spc_den"
DENS = "MARK-DEN"
"""Marks messages of another space of the same agent."""
KEY = "mark-key-0123456789abcdef"
NAME = "mark-model"
FORBIDDEN = (OPERATOR, DENS, KEY, NAME, "127.0.0.1:")
MCP = {
    "accept": "application/json, text/event-stream",
    "mcp-protocol-version": VERSION,
    "mcp-method": "tools/call",
}
FORMATS = ("native", "ui-message-stream", "ag-ui")
TOOLS = [
    {"name": "lookup", "executionType": "static", "execution": {"output": f"{OPERATOR} of a static tool"}},
    {"name": "board", "executionType": "external", "isAsync": True},
]


def _agents(model_server: ScriptedModelServer) -> dict[str, Any]:
    model = {"name": NAME, "apiKey": KEY}
    ada = agent_config(model_server, model=model, agents=["bob"])
    bob = agent_config(model_server, model={**model, "name": f"{NAME}-bob"})
    return {
        "ada": {**ada, "system": f"{OPERATOR} instructions", "description": f"{OPERATOR} description"},
        "bob": {**bob, "system": f"{OPERATOR} instructions of bob"},
    }


def _script(model_server: ScriptedModelServer) -> None:
    body = {"memories": [{"key": f"{OPERATOR} key", "value": f"{OPERATOR} value"}]}
    model_server.script(
        tool_calls_turn(
            ("enter_space", {"spaceId": ROOM}),
            ("set_memories", body),
            ("no such tool", {"x": f"{OPERATOR} of a tool that is not there"}),
            text=f"{OPERATOR} thought",
        ),
        tool_calls_turn(
            ("send_message", {"text": f"{ROOMS} hello"}),
            ("lookup", {"q": f"{OPERATOR} argument"}),
            ("get_memories", {}),
            ("set_goals", {"goals": [{"description": f"{OPERATOR} goal"}]}),
            ("agent__bob", {"prompt": f"{OPERATOR} request to bob"}),
            ("board", {"look": f"{ROOMS} on a board"}),
            ("read_messages", {"spaceId": DEN}),
            text=f"{OPERATOR} second thought",
        ),
        tool_calls_turn(
            ("enter_space", {"spaceId": DEN}),
            ("send_message", {"text": f"{DENS} said"}),
            ("board", {"look": f"{DENS} on a board"}),
        ),
        tool_calls_turn(("enter_space", {"spaceId": ROOM}), ("send_message", {"text": f"{ROOMS} back"})),
        f"{OPERATOR} last thought",
        model=NAME,
    )
    model_server.script(
        tool_calls_turn(("lookup", {"q": f"{OPERATOR} of bob"}), text=f"{OPERATOR} thought of bob"), model=f"{NAME}-bob"
    )


async def _run_agents(setup: AgentGateway) -> None:
    """Makes a run with every kind of data, and one that fails."""
    await setup.api.create("/api/spaces", id=DEN, name=f"{DENS} name", members=[entity_id_for("ada")])
    await setup.api.create(f"/api/spaces/{DEN}/messages", entityId=entity_id_for("ada"), content=f"{DENS} earlier")
    _script(setup.model_server)
    await setup.say("Hello?")
    run = await setup.wait_for_run_end()
    assert run["status"] == "completed", run
    setup.model_server.script(
        tool_calls_turn(("enter_space", {"spaceId": ROOM})),
        error_reply(400, {"error": {"message": f"{OPERATOR} refusal, Bearer {KEY}"}}),
        model=NAME,
    )
    await setup.say("And now?")
    await setup.wait_for_run_end(2)


def _find_marks(body: bytes) -> list[str]:
    return [mark for mark in FORBIDDEN if mark.encode() in body]


async def _read_everything(member: ApiClient, setup: AgentGateway) -> dict[str, bytes]:
    """Reads everything that a member can request."""
    responses: dict[str, bytes] = {}
    ids = [run["id"] for name in ("ada", "bob") for run in await setup.list_runs(name)]
    run_calls = [(await setup.api.get(f"/api/runs/{run_id}/calls")).data["items"] for run_id in ids]
    call_ids = [call["callId"] for some in run_calls for call in some]
    agent = f"/api/agents/{entity_id_for('ada')}"
    parts = ("", "/runs", "/inbox", "/history", "/tasks", "/goals", "/memories", "/plans", "/documents")
    paths = [
        "/api/me", "/api/spaces", "/api/agents", "/api/entities", "/api/runs", "/api/calls", "/api/calls?limit=500",
        "/metrics", "/health", "/ready", "/api/tools", "/api/tools/agent__bob", "/api/servers",
        f"/api/spaces/{ROOM}", f"/api/spaces/{ROOM}/messages", f"/api/spaces/{ROOM}/members",
        f"/api/spaces/{DEN}", f"/api/spaces/{DEN}/messages", f"/api/entities/{entity_id_for('ada')}",
        *(agent + part for part in parts),
        *(f"/api/runs/{run_id}{part}" for run_id in ids for part in ("", "/calls")),
        *(f"/api/calls/{call_id}" for call_id in call_ids),
    ]  # fmt: skip
    for path in paths:
        responses[path] = (await member.get(path)).body
    for form in FORMATS:
        query = f"?from=start&format={form}"
        responses[f"space {form}"] = await _stream(member, f"/api/spaces/{ROOM}/stream{query}", f"{ROOMS} the end")
        responses[f"den {form}"] = (await member.get(f"/api/spaces/{DEN}/stream{query}")).body
        for run_id in ids:
            responses[f"run {run_id} {form}"] = (
                await member.get(f"/api/runs/{run_id}/events{query}&until=run.done")
            ).body
    call_item: dict[str, Any] = {"name": "agent__bob", "arguments": {"prompt": "x"}}
    for method, params in (("tools/list", dict[str, Any]()), ("tools/call", call_item)):
        body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        responses[f"mcp {method}"] = (await member.post("/mcp", body)).body
    return responses


async def _stream(member: ApiClient, path: str, until: str) -> bytes:
    data = b""
    async with member.session.get(member.url + path, headers=member.headers) as response:
        while until.encode() not in data:
            piece = await response.content.readany()
            assert piece, data[-500:]
            data += piece
    return data


@pytest.mark.spec("8.1")
@pytest.mark.spec("8.2")
@pytest.mark.spec("9.1")
async def test_a_member_sees_no_private_data_of_an_agent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "toolspace")
    async with (
        open_model_server() as model_server,
        open_agent_gateway(tmp_path, model_server, agents=_agents(model_server), tools=TOOLS) as setup,
    ):
        member = await setup.api.member(PERSON)
        await _run_agents(setup)
        await setup.say(f"{ROOMS} the end", sender=entity_id_for("bob"))
        responses = await _read_everything(member, setup)
        leaks = [
            f"{place}: {marks} in {body[:600]!r}" for place, body in responses.items() if (marks := _find_marks(body))
        ]
        assert not leaks, "\n".join(leaks)
        for form in FORMATS:
            assert f"{ROOMS} hello".encode() in responses[f"space {form}"]
        assert b"set_memories" in responses["space native"]
        assert b"usage" not in responses["space native"]
        all_calls = await setup.api.get("/api/calls?limit=500")
        assert OPERATOR.encode() in all_calls.body
        failed = next(run["error"] for run in await setup.list_runs() if run["status"] == "failed")
        assert (OPERATOR in failed, KEY in failed) == (True, False)
    assert KEY not in caplog.text


@pytest.mark.spec("8.1")
@pytest.mark.spec("3.40")
async def test_a_tool_key_calls_only_its_allowed_agents(tmp_path: Path) -> None:
    async with (
        open_model_server() as model_server,
        open_agent_gateway(tmp_path, model_server, agents=_agents(model_server), tools=TOOLS) as setup,
    ):
        key = await setup.api.create("/api/keys", kind="tools", name="bob", toolsAllowed=["agent__bob"])
        holder = setup.api.with_headers(authorization=f"Bearer {key['key']}")
        model_server.script("It is noon.", model=f"{NAME}-bob")
        answers: dict[str, bytes] = {}
        for name in (
            "agent__bob",
            "agent__ada",
            "lookup",
            "set_goals",
            "peek_inbox",
            "spawn_task",
            "router__handoff-to",
        ):
            params = {"name": name, "arguments": {"prompt": "What time is it?"}, "_meta": META}
            body = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
            reply = await holder.post("/mcp", body, headers={**MCP, "mcp-name": name})
            answers[name] = reply.body
        assert b"It is noon." in answers.pop("agent__bob")
        for name, body in answers.items():
            assert b'"isError":true' in body or b'"error"' in body, (name, body)
            assert not _find_marks(body), (name, body)
        assert model_server.list_requests(NAME) == []
        goals = await setup.api.get(f"/api/agents/{entity_id_for('ada')}/goals")
        assert goals.data["items"] == []
