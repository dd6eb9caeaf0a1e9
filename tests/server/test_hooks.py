"""Hooks in a gateway: HTTP, MCP, agents, and results that workers and people submit later."""

from __future__ import annotations

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.server.scripted_agents import (
    ROOM,
    list_result_texts,
    message_turns,
    open_single_agent_gateway,
    tool_calls_turn,
)
from tests.server.test_approvals import open_shop
from tests.server.test_workers import connect_worker
from toolspace.agents.agent import entity_id_for
from toolspace.server.gateway import Gateway

pytestmark = pytest.mark.spec("23.1")

MAIL = "carla@example.com"
_ANY = {"type": "object"}
TOOLS: list[dict[str, Any]] = [
    {"name": "find", "executionType": "static", "execution": {"output": {"mail": MAIL}}, "inputSchema": _ANY},
    {"name": "move", "executionType": "external", "visible": False, "inputSchema": _ANY, "timeout": "20s"},
    {"name": "later", "executionType": "external", "visible": False, "isAsync": True, "inputSchema": _ANY},
    {"name": "ask", "executionType": "space", "isAsync": True, "inputSchema": _ANY, "description": "Asks."},
]
MASK = {"on": "after", "use": "mask_personal_data"}
HOOKS = """
import json, pathlib

log = pathlib.Path(__file__).with_name("hooks.log")

def record(call):
    entry = [call.on, call.tool.name, call.principal, call.run_id is not None, call.arguments, call.result, call.error]
    with log.open("a") as file:
        file.write(json.dumps(entry) + "\\n")

def deny(call):
    return {"deny": "not for " + call.tool.name}

def rescue(call):
    return {"result": {"rescued": call.error}}

def shorten(call):
    return {"arguments": {**call.arguments, "text": call.arguments["text"][:5]}}
"""


@asynccontextmanager
async def open_gateway(folder: Path, *hooks: Any, **config: Any) -> AsyncIterator[tuple[Gateway, ApiClient]]:
    (folder / "hooks.py").write_text(HOOKS)
    path = write_config(folder, tools=TOOLS, hooks=hooks, **config)
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        yield gateway, api


def read_log(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "hooks.log").read_text().splitlines()]


async def test_http_and_mcp_calls_have_their_hooks(tmp_path: Path) -> None:
    record = {"on": "before", "use": "./hooks.py:record", "tools": "find"}
    async with open_gateway(tmp_path, record, MASK) as (_, api):
        reply = await api.post("/api/tools/find/call", {"args": {}})
        assert reply.data["result"] == {"mail": "[email]"}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "find", "arguments": {}}}
        headers = {"accept": "application/json, text/event-stream", "mcp-protocol-version": "2025-06-18"}
        initialize = {
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "test", "version": "1"},
        }  # fmt: skip
        start = {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": initialize}
        session_reply = await api.post("/mcp", start, headers=headers)
        headers["mcp-session-id"] = session_reply.headers.get("mcp-session-id", "")
        reply = await api.post("/mcp", message, headers=headers)
        assert "[email]" in reply.body.decode()
        assert MAIL not in reply.body.decode()
    principals = {entry[2].partition("/")[0] for entry in read_log(tmp_path)}
    assert principals == {"key"}


@pytest.mark.parametrize("database", ["sqlite", "postgres"])
async def test_a_submitted_result_passes_the_hooks_once_before_it_is_stored(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = {} if database == "sqlite" else {"storage": {"url": request.getfixturevalue("postgres_url")}}
    record = {"on": "after", "use": "./hooks.py:record"}
    async with open_gateway(tmp_path, record, MASK, **config) as (_, api):
        async with connect_worker(api, "move") as worker:
            call_task = asyncio.create_task(api.post("/api/tools/move/call", {"args": {"x": 1}}))
            call_id = (await worker.expect("call.offered"))["callId"]
            call = await api.create(f"/api/calls/{call_id}/result", result={"mail": MAIL})
            assert call["result"] == {"mail": "[email]"}
            assert (await call_task).data["result"] == {"mail": "[email]"}
        # One who is not waited for.
        pending = await api.post("/api/tools/later/call", {"args": {"x": 2}, "callId": "call_later"})
        assert pending.status == 202
        headers = {"idempotency-key": "k1"}
        for _ in range(2):
            reply = await api.post("/api/calls/call_later/result", {"result": MAIL}, headers=headers)
            assert (reply.status, reply.data["result"]) == (200, "[email]")
        assert (await api.get("/api/calls/call_later")).data["result"] == "[email]"
        conflict = await api.post("/api/calls/call_later/result", {"result": "other"})
        assert conflict.status == 409
        assert (await api.post("/api/calls/call_none/result", {"result": "x"})).status == 404
    entries = read_log(tmp_path)
    assert [(on, tool, arguments, result) for on, tool, _, _, arguments, result, _ in entries] == [
        ("after", "move", {"x": 1}, {"mail": MAIL}),
        ("after", "later", {"x": 2}, MAIL),
    ]
    assert {principal.partition("/")[0] for _, _, principal, *_ in entries} == {"key"}


async def test_a_submitted_result_can_be_withheld(tmp_path: Path) -> None:
    async with open_gateway(tmp_path, {"on": "after", "use": "./hooks.py:deny"}) as (_, api):
        async with connect_worker(api, "move") as worker:
            call_task = asyncio.create_task(api.post("/api/tools/move/call", {"args": {}}))
            call_id = (await worker.expect("call.offered"))["callId"]
            await api.create(f"/api/calls/{call_id}/result", result="gold")
            result = (await call_task).data
            assert (result["ok"], result["errorKind"], result["executed"]) == (False, "not_permitted", True)
            assert result["error"] == "Permission denied: not for move"
        call = (await api.get(f"/api/calls/{call_id}")).data
        assert (call["isError"], call["errorKind"]) == (True, "not_permitted")
        assert "gold" not in json.dumps(call)


async def test_a_submitted_failure_passes_the_error_hooks(tmp_path: Path) -> None:
    hooks = (
        {"on": "error", "use": "mask_personal_data"},
        {"on": "error", "use": "./hooks.py:rescue", "tools": "later"},
    )
    async with open_gateway(tmp_path, *hooks) as (_, api):
        async with connect_worker(api, "move") as worker:
            call_task = asyncio.create_task(api.post("/api/tools/move/call", {"args": {}}))
            call_id = (await worker.expect("call.offered"))["callId"]
            await api.create(f"/api/calls/{call_id}/result", result=f"no {MAIL}", isError=True)
            result = (await call_task).data
            assert (result["errorKind"], result["error"]) == ("execution_error", "no [email]")
        await api.post("/api/tools/later/call", {"args": {}, "callId": "call_later"})
        call = await api.create("/api/calls/call_later/result", result={"for": MAIL}, isError=True)
        assert (call["isError"], call["result"]) == (False, {"rescued": '{"for":"[email]"}'})


async def test_what_a_person_answers_reaches_the_agent_and_the_space_masked(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path, tools=TOOLS, hooks=[MASK]) as setup:
        setup.model_server.script(
            tool_calls_turn(("enter_space", {"spaceId": ROOM}), ("find", {})),
            tool_calls_turn(("ask", {"question": "mail?"})),
        )
        await setup.say("Hello?")
        run = await setup.wait_for_run_end()
        (found_call, asked_call) = [call for call in await setup.list_calls(run) if call["toolName"] in ("find", "ask")]
        assert found_call["result"] == {"mail": "[email]"}
        person = await setup.api.member("ent_husam")
        body = {"toolCallId": asked_call["callId"], "runId": run["id"], "result": {"mail": MAIL}}
        assert (await person.post(f"/api/spaces/{ROOM}/tool-results", body)).status == 200
        request = await setup.model_server.wait_for_requests(4)
        assert MAIL not in json.dumps(setup.model_server.list_requests())
        assert "[email]" in json.dumps(request)
        assert list_result_texts(setup.model_server.list_requests()[1])[1] == '{"mail":"[email]"}'
        events = await setup.wait_for_event(f"/api/spaces/{ROOM}/stream", "tool.done")
        assert MAIL not in json.dumps(events)


async def test_a_message_with_a_before_hook_is_not_streamed_before_the_hook(tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(HOOKS)
    hook = {"on": "before", "use": "./hooks.py:shorten", "tools": "send_message"}
    async with open_single_agent_gateway(tmp_path, hooks=[hook]) as setup:
        setup.model_server.script(*message_turns("Hello and the secret is gold"))
        await setup.say("Hello?")
        await setup.wait_for_run_end()
        assert await setup.list_agent_messages() == ["Hello"]
        person = await setup.api.member("ent_husam")
        reply = await person.get(f"/api/spaces/{ROOM}/stream?from=start&until=message.done")
        assert "gold" not in reply.body.decode()


async def test_tools_of_one_agent_have_the_hooks_of_the_main_file(tmp_path: Path) -> None:
    async with open_single_agent_gateway(tmp_path, ada={"tools": TOOLS}, hooks=[MASK]) as setup:
        setup.model_server.script(tool_calls_turn(("find", {}), ("later", {"x": 1})))
        await setup.push_event("go")
        run = await setup.wait_for_run_end()
        calls = {call["toolName"]: call for call in await setup.list_calls(run)}
        assert calls["find"]["result"] == {"mail": "[email]"}
        call = await setup.api.create(f"/api/calls/{calls['later']['callId']}/result", result=MAIL)
        assert call["result"] == "[email]"
        inbox = (await setup.api.get(f"/api/agents/{entity_id_for('ada')}/inbox")).body.decode()
        assert MAIL not in inbox


@pytest.mark.spec("20.3")
async def test_an_approved_call_has_the_arguments_of_the_hooks_and_its_result_passes_them(tmp_path: Path) -> None:
    code = """
        def add_one(call):
            return {"arguments": {"amount": call.arguments["amount"] + 1}}

        def describe(call):
            return {"result": f"{call.result['paid']} by {call.principal.partition('/')[0]}"}
    """
    (tmp_path / "hooks.py").write_text(textwrap.dedent(code))
    hooks = [{"on": "before", "use": "./hooks.py:add_one"}, {"on": "after", "use": "./hooks.py:describe"}]
    async with open_shop(tmp_path, hooks=[{**hook, "tools": "pay"} for hook in hooks]) as shop:
        call_id = await shop.ask(5)
        [approval] = await shop.list_approvals()
        assert approval["args"] == {"amount": 6}
        assert (await shop.decide(call_id)).status == 200
        call = await shop.wait_for_call(call_id)
        assert (call["result"], call["isError"]) == ("6 by key", False)
        assert shop.payments == [6]
