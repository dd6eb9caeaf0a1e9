"""Database outages: waiting calls, streams, workers and wake-ups during and after them."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.server.gateway_api import SECRET, ApiClient, ApiResponse, open_api, write_config
from tests.server.test_health_and_metrics import wait_for_readiness
from tests.servers.postgres import LocalPostgresServer
from toolspace.client.worker import ToolWorker
from toolspace.server.gateway import Gateway

TOOLS = [
    {"name": "move", "executionType": "external", "visible": False, "timeout": "20s"},
    {"name": "confirm", "executionType": "space", "timeout": "60s"},
]


@asynccontextmanager
async def _gateway(folder: Path, **more: Any) -> AsyncIterator[ApiClient]:
    folder.mkdir()
    state = {"storage": {"dir": str(folder / "state"), **more}}
    async with Gateway.open(write_config(folder, tools=TOOLS, **state)) as gateway, open_api(gateway) as api:
        yield api


async def _create_room(api: ApiClient) -> None:
    await api.create("/api/entities", id="robot", type="agent", name="Robot")
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    await api.create("/api/spaces", id="room", name="Room", members=["robot", "ann"])
    await api.create("/api/runs", id="run", agentEntityId="robot", spaceId="room")


async def _say(api: ApiClient, content: str) -> ApiResponse:
    return await api.post("/api/spaces/room/messages", {"entityId": "ann", "content": content})


async def _call(api: ApiClient, name: str, call_id: str) -> ApiResponse:
    return await api.post("/api/runs/run/calls", {"name": name, "args": {}, "callId": call_id})


class _Reader:
    """Reads the stream of the room without reconnecting; it must miss nothing."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.ids: list[int] = []
        self._id = 0

    async def reads(self, text: str) -> None:
        async for line in self._response.content:
            if line.startswith(b"id: "):
                self._id = int(line[4:])
            elif line.startswith(b"data: "):
                self.ids.append(self._id)
                if text.encode() in line:
                    return
        raise AssertionError("the stream ended")


@asynccontextmanager
async def _open_reader(api: ApiClient) -> AsyncIterator[_Reader]:
    url = f"{api.url}/api/spaces/room/stream"
    async with api.session.get(url, headers={**api.headers, "last-event-id": "0"}) as response:
        yield _Reader(response)


@pytest.mark.spec("15.3")
@pytest.mark.spec("7.4")
async def test_waiting_calls_streams_and_agents_continue_after_a_database_outage(
    stoppable_postgres: LocalPostgresServer, tmp_path: Path
) -> None:
    with stoppable_postgres.database() as url:
        async with (
            asyncio.timeout(60),
            _gateway(tmp_path / "a", url=url) as first_api,
            _gateway(tmp_path / "b", url=url) as second_api,
        ):
            await _create_room(first_api)
            worker = ToolWorker(first_api.url, secret_key=SECRET)
            worker.tool("move")(lambda: "moved")
            async with worker, _open_reader(second_api) as reader:
                await worker.ready.wait()
                await _say(first_api, "before")
                await reader.reads("before")
                call_task = asyncio.create_task(_call(first_api, "confirm", "call_confirm"))
                await reader.reads("requires_action")

                await asyncio.to_thread(stoppable_postgres.stop)
                message, call_response = await _say(first_api, "meanwhile"), await _call(first_api, "move", "call_1")
                await asyncio.to_thread(stoppable_postgres.start)
                await asyncio.gather(wait_for_readiness(first_api, 200), wait_for_readiness(second_api, 200))

                while (second_response := await _call(second_api, "move", "call_1")).status == 503:
                    pass
                await _say(first_api, "after")
                await reader.reads("after")
                result = {"callId": "call_confirm", "result": "yes"}
                submit_response = await second_api.post("/api/runs/run/tool-results", result)
                confirm_response = await call_task
            inbox = await first_api.get("/api/agents/robot/inbox")

    for response in (message, call_response):
        assert (response.status, response.headers["retry-after"]) == (503, "1")
        assert "The database is unavailable" in response.detail
    assert (second_response.status, second_response.data["result"]) == (200, "moved")
    assert (submit_response.status, confirm_response.data["result"]) == (200, "yes")
    assert [event["type"] for event in inbox.data["items"]] == ["space_message"] * 2
    assert reader.ids == list(range(1, len(reader.ids) + 1))


@contextmanager
def _largest_file(size: int) -> Iterator[None]:
    """Limits the size of files of this process, like a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.spec("15.2")
async def test_a_full_disk_is_reported_loses_nothing_and_work_continues_afterwards(tmp_path: Path) -> None:
    async with _gateway(tmp_path / "a") as api:
        await _create_room(api)
        size = max(file.stat().st_size for file in (tmp_path / "a" / "state").iterdir())
        contents: list[str] = []
        with _largest_file(size + 300_000):
            while (reply := await _say(api, text := f"{len(contents)} " + "x" * 20_000)).status == 201:
                contents.append(text)
            health = await api.get("/health")
        after = await _say(api, "after")
        messages = await api.get("/api/spaces/room/messages?after=0&limit=500")

    assert (reply.status, reply.headers["retry-after"], health.status) == (503, "1", 200)
    assert after.status == 201
    assert [message["content"] for message in messages.data["items"]] == [*contents, "after"]
    assert "The database is unavailable" in reply.detail
