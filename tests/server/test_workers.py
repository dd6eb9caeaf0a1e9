"""The worker stream over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.client.events import StreamEvent, read_event
from toolspace.core.sse_decoder import SseDecoder
from toolspace.server.gateway import Gateway

TOOLS = [
    {"name": "move", "description": "Moves.", "executionType": "external", "visible": False, "timeout": "20s"},
    {"name": "later", "description": "Later.", "executionType": "external", "visible": False, "isAsync": True},
    {"name": "hello", "description": "Greets.", "executionType": "static", "execution": {"output": "hello"}},
]


class WorkerStream:
    """Reads a worker's stream."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        self._decoder = SseDecoder()
        self._events: list[StreamEvent] = []
        self.raw = b""

    async def next(self) -> StreamEvent | None:
        """Returns the next event; None at the end."""
        async with asyncio.timeout(20):
            while not self._events:
                chunk = await self.response.content.readany()
                if not chunk:
                    return None
                self.raw += chunk
                self._events += map(read_event, self._decoder.feed(chunk))
        return self._events.pop(0)

    async def expect(self, type: str) -> dict[str, Any]:
        event = await self.next()
        assert event is not None
        assert event.type == type
        return event.data


@asynccontextmanager
async def connect_worker(api: ApiClient, tools: str = "move", **query: Any) -> AsyncIterator[WorkerStream]:
    parameters = {"tools": tools, **{name: str(value) for name, value in query.items()}}
    async with api.session.get(api.url + "/api/tools/stream", params=parameters, headers=api.headers) as response:
        assert response.status == 200, await response.text()
        line = WorkerStream(response)
        await line.expect("worker.ready")
        yield line


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    server = {"workerGrace": "200ms", "heartbeat": "200ms"}
    async with Gateway.open(write_config(tmp_path, tools=TOOLS, server=server)) as open_gateway:
        yield open_gateway


async def call(api: ApiClient, name: str = "move", **args: Any) -> Any:
    reply = await api.post(f"/api/tools/{name}/call", {"args": args})
    assert reply.status in (200, 202), reply
    return reply.data


@pytest.mark.spec("6.7")
async def test_worker_is_offered_a_call_and_its_result_goes_to_the_caller(api: ApiClient) -> None:
    async with connect_worker(api, workerId="wrk_mine") as line:
        call_task = asyncio.ensure_future(call(api, to="left"))
        offer = await line.expect("call.offered")
        assert (offer["toolName"], offer["args"]) == ("move", {"to": "left"})
        assert offer["createdAt"] <= offer["expiresAt"]
        answer = await api.post(f"/api/calls/{offer['callId']}/result", {"result": {"at": "left"}})
        assert answer.status == 200
        assert (await call_task)["result"] == {"at": "left"}
        assert await line.expect("call.answered") == {"callId": offer["callId"]}
        workers = (await api.get("/api/workers")).data["items"]
        assert workers == [{"workerId": "wrk_mine", "tools": ["move"], "connected": True}]


@pytest.mark.spec("6.7")
async def test_worker_gets_a_call_of_a_run_and_its_cancellation(api: ApiClient) -> None:
    agent = await api.create("/api/entities", type="agent", name="Bot")
    run = await api.create("/api/runs", agentEntityId=agent["id"])
    async with connect_worker(api, "later") as line:
        await api.post(f"/api/runs/{run['id']}/calls", {"name": "later", "args": {}})
        offer = await line.expect("call.offered")
        assert (offer["runId"], offer["agentEntityId"]) == (run["id"], agent["id"])
        await api.post(f"/api/runs/{run['id']}/cancel")
        assert await line.expect("call.canceled") == {"callId": offer["callId"]}


@pytest.mark.spec("6.7")
async def test_call_of_a_disconnected_worker_is_offered_to_another(api: ApiClient) -> None:
    async with connect_worker(api) as line:
        call_task = asyncio.ensure_future(call(api, to="left"))
        first = await line.expect("call.offered")
    async with connect_worker(api) as line:
        second_offer = await line.expect("call.offered")
        assert second_offer["callId"] == first["callId"]
        await api.post(f"/api/calls/{second_offer['callId']}/result", {"result": "done"})
        assert (await call_task)["result"] == "done"


async def test_worker_that_leaves_releases_the_calls_that_it_does_not_finish(api: ApiClient) -> None:
    async with connect_worker(api, "later", workerId="wrk_a") as first:
        ids = [(await call(api, "later"))["pendingToolCallId"] for _ in range(2)]
        for _ in ids:
            await first.expect("call.offered")
        async with connect_worker(api, "later") as second:
            response = await api.post("/api/workers/wrk_a/leave", {"finishing": ids[:1]})
            assert response.status == 204
            assert (await second.expect("call.offered"))["callId"] == ids[1]
    assert (await api.post("/api/workers/wrk_none/leave", {})).status == 404


async def test_worker_that_reconnects_replaces_its_first_connection(api: ApiClient) -> None:
    async with connect_worker(api, "later", workerId="wrk_a") as first:
        pending = (await call(api, "later"))["pendingToolCallId"]
        await first.expect("call.offered")
        async with connect_worker(api, "later", workerId="wrk_a") as second:
            assert (await second.expect("call.offered"))["callId"] == pending
            assert await first.expect("worker.replaced") == {"workerId": "wrk_a"}
            assert await first.next() is None


async def test_unknown_tool_is_a_warning(api: ApiClient) -> None:
    async with connect_worker(api, "move,fly") as line:
        assert (await line.expect("worker.warning"))["tools"] == ["fly"]


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ("tools=hello", '"hello" is not for workers: its executionType is "static"'),
        ("tools=", "tools"),
        ("tools=,", "tools is empty"),
        ("", "tools"),
        ("tools=move&concurrency=0", "concurrency"),
        ("tools=move&concurrency=1000000", "concurrency"),
        ("tools=move&workerId=a/b", "workerId"),
        ("tools=a%01b", "not a tool name"),
        ("tools=move&tool=x", '"tool"'),
    ],
)
async def test_invalid_worker_request_is_refused_with_the_reason(api: ApiClient, query: str, detail: str) -> None:
    reply = await api.get(f"/api/tools/stream?{query}")
    assert reply.status == 400
    assert detail in reply.detail


@pytest.mark.spec("6.7")
@pytest.mark.spec("8.1")
async def test_only_secret_keys_are_workers(api: ApiClient) -> None:
    entity = await api.create("/api/entities", type="human", name="Ada")
    member = await api.member(entity["id"])
    key = await api.create("/api/keys", kind="tools", name="friend")
    friend = api.with_headers(authorization=f"Bearer {key['key']}")
    for path in ("/api/tools/stream?tools=move", "/api/workers"):
        assert (await member.get(path)).status == 403
        assert (await friend.get(path)).status == 403
        assert (await api.with_headers().get(path)).status == 401


@pytest.mark.spec("7.4")
async def test_idle_worker_gets_heartbeats(api: ApiClient) -> None:
    async with connect_worker(api) as line, asyncio.timeout(20):
        while b": ping" not in line.raw:
            line.raw += await line.response.content.readany()


async def test_revoked_key_ends_the_stream(api: ApiClient) -> None:
    key = await api.create("/api/keys", kind="secret", name="worker")
    worker = api.with_headers(x_secret_key=key["key"])
    async with connect_worker(worker) as line:
        assert (await api.delete(f"/api/keys/{key['id']}")).status == 204
        assert await line.next() is None


@pytest.mark.spec("6.7")
async def test_call_in_one_process_is_executed_by_a_worker_of_another(tmp_path: Path, postgres_url: str) -> None:
    config = write_config(tmp_path, tools=TOOLS, storage={"url": postgres_url}, server={"workerGrace": "200ms"})
    async with (
        Gateway.open(config) as first_gateway,
        Gateway.open(config) as two,
        open_api(first_gateway) as first_api,
        open_api(two) as second_api,
    ):
        async with connect_worker(second_api) as line:
            call_task = asyncio.ensure_future(call(first_api, to="left"))
            offer = await line.expect("call.offered")
        async with connect_worker(first_api) as line:
            assert (await line.expect("call.offered"))["callId"] == offer["callId"]
            await second_api.post(f"/api/calls/{offer['callId']}/result", {"result": "done"})
            assert (await call_task)["result"] == "done"
            assert await line.expect("call.answered") == {"callId": offer["callId"]}


async def test_many_calls_from_two_processes_are_each_executed_once(tmp_path: Path, postgres_url: str) -> None:
    config = write_config(tmp_path, tools=TOOLS, storage={"url": postgres_url})
    executed: list[str] = []

    async def work(api: ApiClient) -> None:
        async with connect_worker(api, concurrency=4) as line:
            while (event := await line.next()) is not None:
                if event.type == "call.offered":
                    executed.append(event.data["callId"])
                    body = {"result": event.data["args"]["number"]}
                    assert (await api.post(f"/api/calls/{event.data['callId']}/result", body)).status == 200

    async with (
        Gateway.open(config) as first_gateway,
        Gateway.open(config) as two,
        open_api(first_gateway) as first_api,
        open_api(two) as second_api,
    ):
        tasks = [asyncio.ensure_future(work(api)) for api in (first_api, first_api, second_api, second_api)]
        while len((await first_api.get("/api/workers")).data["items"]) < len(tasks):
            pass
        calls = [call((first_api, second_api)[number % 2], number=number) for number in range(60)]
        results = await asyncio.gather(*calls)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert [result["result"] for result in results] == list(range(60))
    assert len(set(executed)) == len(executed) == 60
