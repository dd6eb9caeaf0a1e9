"""Calls over HTTP that are repeated, cancelled, or whose client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.server.gateway import Gateway
from toolspace.storage.queries import workers_and_presence

_ANY = {"type": "object"}
TOOLS: list[dict[str, Any]] = [
    {"name": "fetch", "executionType": "external", "visible": False, "inputSchema": _ANY},
    {"name": "approve", "executionType": "external", "visible": False, "isAsync": True, "inputSchema": _ANY},
]


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway.open(write_config(tmp_path, tools=TOOLS)) as open_gateway:
        await open_gateway.ledger.write(
            workers_and_presence.register_holder, "wrk_1", ["tool:fetch"], node_id=open_gateway.ledger.node_id
        )
        yield open_gateway


@pytest.fixture
async def api(gateway: Gateway) -> AsyncIterator[ApiClient]:
    async with open_api(gateway) as client:
        yield client


async def _wait_for_waiter(gateway: Gateway, call_id: str) -> None:
    """Waits until a request waits for the call."""
    wake_up = gateway.waiters.register("offers:fetch")
    if not gateway.pending_calls.waiting_count:
        await wake_up


@pytest.mark.spec("6.4")
async def test_a_result_without_an_inbox_is_returned_to_a_repeated_call(api: ApiClient) -> None:
    body = {"args": {}, "callId": "call_mine"}
    assert (await api.post("/api/tools/approve/call", body)).status == 202
    assert (await api.post("/api/tools/approve/call", body)).status == 202
    await api.create("/api/calls/call_mine/result", result="yes")
    for _ in range(2):
        second_response = await api.post("/api/tools/approve/call", body)
        assert (second_response.status, second_response.data["result"]) == (200, "yes")


@pytest.mark.spec("12.1")
async def test_a_waiting_call_is_cancelled_at_once(gateway: Gateway, api: ApiClient) -> None:
    call_task = asyncio.create_task(api.post("/api/tools/fetch/call", {"callId": "call_mine"}))
    await _wait_for_waiter(gateway, "call_mine")
    canceled = await api.post("/api/calls/call_mine/cancel")
    assert (canceled.status, canceled.data["status"]) == (200, "canceled")
    assert (await call_task).data["errorKind"] == "canceled"
    assert (await api.post("/api/calls/call_mine/cancel")).status == 200
    assert (await api.post("/api/calls/call_none/cancel")).status == 404


@pytest.mark.spec("6.4")
@pytest.mark.parametrize("accept", ["application/json", "text/event-stream"])
async def test_a_result_for_a_disconnected_caller_goes_to_the_inbox(
    gateway: Gateway, api: ApiClient, accept: str
) -> None:
    await api.create("/api/entities", id="bot", type="agent", name="Bot")
    run = await api.create("/api/runs", agentEntityId="bot")
    body = {"name": "fetch", "callId": "call_mine"}
    call_task = asyncio.create_task(api.post(f"/api/runs/{run['id']}/calls", body, headers={"accept": accept}))
    await _wait_for_waiter(gateway, "call_mine")
    call_task.cancel()
    await asyncio.gather(call_task, return_exceptions=True)
    await api.create("/api/calls/call_mine/result", result="here")
    (event,) = (await api.get("/api/agents/bot/inbox?wait=10")).data["items"]
    assert event["data"]["result"] == "here"
