"""What people and workers submit is checked against the output schema of the tool, and recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from tests.server.scripted_agents import (
    PERSON,
    ROOM,
    agent_config,
    list_input_texts,
    open_agent_gateway,
    open_model_server,
    tool_calls_turn,
)
from toolspace import Toolspace
from toolspace.client.client import ToolspaceClient
from toolspace.client.worker import OfferedCall, ToolWorker
from toolspace.errors import ConfigError
from toolspace.server.gateway import Gateway

BOOKING = {
    "type": "object",
    "properties": {"nights": {"type": "integer"}, "guests": {"type": "array", "items": {"type": "string"}}},
    "required": ["nights"],
    "additionalProperties": False,
}
BOOK = {
    "name": "bookHotel",
    "executionType": "space",
    "isAsync": True,
    "inputSchema": {"type": "object", "properties": {"city": {"type": "string"}}},
    "outputSchema": BOOKING,
}
MOVE = {"name": "move", "executionType": "external", "visible": False, "outputSchema": {"type": "integer"}}
APPROVE = {"name": "approve", "executionType": "external", "visible": False, "isAsync": True}
WRONG = {"nights": "two", "guests": ["Ada", 5], "breakfast": True}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway.open(write_config(tmp_path, tools=[BOOK, MOVE, APPROVE])) as open_gateway:
        yield open_gateway


@pytest.fixture
async def api(gateway: Gateway) -> AsyncIterator[ApiClient]:
    async with open_api(gateway) as client:
        await client.create("/api/entities", id="bot", type="agent", name="Bot")
        await client.create("/api/entities", id="eve", type="human", name="Eve")
        await client.create("/api/spaces", id="room", name="Room", members=["bot", "eve"])
        await client.create("/api/runs", id="run_1", agentEntityId="bot", spaceId="room")
        yield client


async def _call(api: ApiClient, name: str) -> str:
    """Calls an async tool in the run; returns the id of the call."""
    reply = await api.post("/api/runs/run_1/calls", {"name": name, "args": {"city": "Oslo"}})
    assert reply.status == 202, reply
    return reply.data["pendingToolCallId"]


@pytest.mark.spec("19.5")
async def test_an_answer_that_does_not_match_the_schema_is_refused_with_the_paths(api: ApiClient) -> None:
    call_id = await _call(api, "bookHotel")
    eve = await api.member("eve")
    for path, body in (
        ("/api/spaces/room/tool-results", {"toolCallId": call_id}),
        ("/api/runs/run_1/tool-results", {"callId": call_id}),
        (f"/api/calls/{call_id}/result", {}),
    ):
        for submitter in (api, eve):
            reply = await submitter.post(path, {**body, "result": WRONG}, headers={"idempotency-key": "k"})
            assert reply.status == 422
            assert reply.headers["content-type"] == "application/problem+json"
            messages = {error["path"]: error["message"] for error in reply.data["errors"]}
            assert set(messages) == {"breakfast", "guests[1]", "nights"}
            assert "expected integer" in messages["nights"]
            assert "nights" in reply.detail
    call = (await api.get(f"/api/calls/{call_id}")).data
    assert (call["status"], call["result"], call["outputSchema"]) == ("pending", None, BOOKING)
    assert (await api.get("/api/agents/bot/inbox")).data["items"] == []
    right = {"toolCallId": call_id, "result": {"nights": 2}}
    reply = await eve.post("/api/spaces/room/tool-results", right, headers={"idempotency-key": "k"})
    assert (reply.status, reply.data["result"]) == (200, {"nights": 2})
    (event,) = (await api.get("/api/agents/bot/inbox")).data["items"]
    assert event["data"]["result"] == {"nights": 2}


@pytest.mark.spec("19.5")
async def test_the_ready_event_and_the_message_carry_the_schemas(api: ApiClient) -> None:
    call_id = await _call(api, "bookHotel")
    reply = await api.get("/api/spaces/room/stream?from=start&until=tool.ready")
    assert b"event: tool.started" in reply.body
    ready = reply.body.rpartition(b"event: tool.ready")[2]
    for text in (
        b'"inputSchema":{"type":"object","properties":{"city"',
        b'"outputSchema":{',
        b'"input":{"city":"Oslo"}',
    ):
        assert text in ready
    (message,) = (await api.get("/api/spaces/room/messages")).data["items"]
    assert (message["status"], message["content"]["outputSchema"]) == ("requires_action", BOOKING)
    await api.create(f"/api/calls/{call_id}/result", result={"nights": 1})
    (message,) = (await api.get("/api/spaces/room/messages")).data["items"]
    assert message["content"] == {
        "toolCallId": call_id,
        "toolName": "bookHotel",
        "input": {"city": "Oslo"},
        "output": {"nights": 1},
    }


@pytest.mark.spec("19.5")
async def test_the_answer_to_a_call_that_was_approved_is_checked_and_its_events_come_once(tmp_path: Path) -> None:
    path = write_config(tmp_path, tools=[{**BOOK, "approval": "required"}], storage={"dir": str(tmp_path / "state")})
    async with Gateway.open(path) as gateway, open_api(gateway) as api:
        await api.create("/api/entities", id="bot", type="agent", name="Bot")
        await api.create("/api/spaces", id="room", name="Room", members=["bot"])
        await api.create("/api/runs", id="run_1", agentEntityId="bot", spaceId="room")
        call_id = await _call(api, "bookHotel")
        key = await api.create("/api/keys", kind="secret", name="approver")
        approver = api.with_headers(x_secret_key=key["key"])
        assert (await approver.post(f"/api/approvals/{call_id}", {"decision": "approve"})).status == 200
        (message,) = (await api.get("/api/spaces/room/messages")).data["items"]
        assert message["content"]["outputSchema"] == BOOKING
        assert (await api.post(f"/api/calls/{call_id}/result", {"result": WRONG})).status == 422
        await api.create(f"/api/calls/{call_id}/result", result={"nights": 1})
        for stream in ("/api/spaces/room/stream", "/api/runs/run_1/events"):
            body = (await api.get(f"{stream}?from=start&until=tool.done")).body
            assert [body.count(b"event: tool.%b" % name) for name in (b"started", b"ready", b"done")] == [1, 1, 1]


@pytest.mark.spec("19.5")
async def test_an_error_is_not_checked(api: ApiClient) -> None:
    call_id = await _call(api, "bookHotel")
    reply = await api.post(f"/api/calls/{call_id}/result", {"result": "no room is free", "isError": True})
    assert (reply.status, reply.data["isError"]) == (200, True)


@pytest.mark.spec("19.5")
async def test_a_huge_or_deep_answer_is_refused_without_much_work(api: ApiClient) -> None:
    call_id = await _call(api, "bookHotel")
    raw = b'{"result": {"nights": %b}}' % (b"[" * 900 + b"]" * 900)
    for reply in (
        await api.post(f"/api/calls/{call_id}/result", {"result": {"nights": 1, "guests": list(range(100_000))}}),
        await api.post(f"/api/calls/{call_id}/result", raw=raw),
    ):
        assert reply.status in (400, 422)
        assert len(reply.body) < 10_000
    assert (await api.get(f"/api/calls/{call_id}")).data["status"] == "pending"


@pytest.mark.spec("19.5")
async def test_the_result_of_a_worker_is_checked(gateway: Gateway, api: ApiClient) -> None:
    worker = ToolWorker(api.url, secret_key=api.headers["x-secret-key"])

    @worker.tool("move")
    async def move(steps: Any, call: OfferedCall) -> Any:
        assert call.output_schema == MOVE["outputSchema"]
        return steps

    async with worker, ToolspaceClient(api.url, secret_key=api.headers["x-secret-key"]) as client:
        assert (await client.runs.call("run_1", "move", {"steps": 3})).result == 3
        refusal = await client.runs.call("run_1", "move", {"steps": "far"})
        assert not refusal.ok
        assert "does not match the output schema" in (refusal.error or "")


@pytest.mark.spec("19.5")
async def test_the_answer_for_a_tool_below_one_agent_is_checked(tmp_path: Path) -> None:
    async with open_model_server() as model_server:
        agents = {"ada": agent_config(model_server, tools=[BOOK])}
        async with open_agent_gateway(tmp_path, model_server, agents=agents) as setup:
            enter = ("enter_space", {"spaceId": ROOM})
            model_server.script(tool_calls_turn(enter, ("bookHotel", {"city": "Oslo"})))
            await setup.say("Book a room.")
            run = await setup.wait_for_run_end()
            (call,) = [call for call in await setup.list_calls(run) if call["toolName"] == "bookHotel"]
            person = await setup.api.member(PERSON)
            path, body = f"/api/spaces/{ROOM}/tool-results", {"toolCallId": call["callId"]}
            wrong = await person.post(path, {**body, "result": WRONG})
            assert (wrong.status, len(wrong.data["errors"])) == (422, 3)
            assert (await person.post(path, {**body, "result": {"nights": 2}})).status == 200
            await setup.wait_for_run_end(2)
            assert any('{"nights":2}' in text for text in list_input_texts(model_server.list_requests()[-1]))


@pytest.mark.spec("6.5")
async def test_both_routes_record_the_client_that_submits(api: ApiClient) -> None:
    by_run, by_space, by_id = await _call(api, "approve"), await _call(api, "bookHotel"), await _call(api, "approve")
    await api.create("/api/runs/run_1/tool-results", callId=by_run, result=1, clientId="tab-1")
    await api.create("/api/spaces/room/tool-results", toolCallId=by_space, result={"nights": 1}, clientId="tab-2")
    await api.create(f"/api/calls/{by_id}/result", result=1)
    clients = [(await api.get(f"/api/calls/{id}")).data["clientId"] for id in (by_run, by_space, by_id)]
    assert clients == ["tab-1", "tab-2", None]
    reply = await api.post("/api/runs/run_1/tool-results", {"callId": by_run, "result": 2, "clientId": "x" * 300})
    assert reply.status == 400


@pytest.mark.spec("6.5")
async def test_the_run_of_a_submission_to_a_space_is_checked_if_it_is_named(api: ApiClient) -> None:
    call_id = await _call(api, "bookHotel")
    await api.create("/api/runs", id="run_2", agentEntityId="bot", spaceId="room")
    body = {"toolCallId": call_id, "result": {"nights": 1}}
    assert (await api.post("/api/spaces/room/tool-results", {**body, "runId": "run_2"})).status == 403
    assert (await api.post("/api/spaces/room/tool-results", body)).status == 200


@pytest.mark.spec("19.5")
@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "objekt"}, "is not a valid JSON Schema"),
        ({"type": "object", "description": "x" * 70_000}, "the maximum is 65,536"),
        (
            {"$ref": "#/$defs/n30", "$defs": {"n0": {"type": "string"}}
             | {f"n{n}": {"allOf": [{"$ref": f"#/$defs/n{n - 1}"}] * 2} for n in range(1, 31)}},
            "more than 100,000 values",
        ),
    ],
)  # fmt: skip
async def test_an_output_schema_that_cannot_be_used_is_an_error_of_the_configuration(
    tmp_path: Path, schema: Any, reason: str
) -> None:
    path = write_config(tmp_path, tools=[{**BOOK, "outputSchema": schema}])
    with pytest.raises(ConfigError, match=reason) as error:
        await asyncio.wait_for(Toolspace.open(path).__aenter__(), 10)
    assert "outputSchema" in str(error.value)
