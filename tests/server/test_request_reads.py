"""Reads of requests: a slow one is ended, and leaves readers for operators and other members."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import toolspace.server.routes
from tests.server.gateway_api import ApiClient, open_api, open_app_api, write_config
from toolspace.server.authorization import Access
from toolspace.server.gateway import Gateway
from toolspace.server.requests import Request
from toolspace.server.routing import Handler, Route
from toolspace.storage.database import Program

COUNT = "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n WHERE x < ?) SELECT COUNT(*) FROM n"
ENDLESS = 2_000_000_000


def _route(path: str, handler: Handler) -> Route:
    return Route(method="GET", path=path, handler=handler, access=Access.MEMBER, summary="Read slowly", tag="Test")


class SlowReads:
    """A route whose read takes until the test releases it."""

    def __init__(self) -> None:
        self.started_count = 0
        self.started = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.release_event = threading.Event()

    def routes(self) -> list[Route]:
        return [
            _route("/slow", self._get_slow),
            _route("/endless", self._get_endless),
        ]

    def _program(self) -> Program[int]:
        self._loop.call_soon_threadsafe(self._count_start)
        while not self.release_event.is_set():
            yield COUNT, (20_000,)
        return 1

    def _count_start(self) -> None:
        self.started_count += 1
        self.started.set()

    async def _get_slow(self, request: Request) -> dict[str, int]:
        return {"value": await request.read(self._program)}

    async def _get_endless(self, request: Request) -> dict[str, int]:
        def count() -> Program[int]:
            rows = yield COUNT, (ENDLESS,)
            return rows[0][0]

        return {"value": await request.read(count)}


@pytest.fixture(params=["sqlite", "postgres"])
def storage(request: pytest.FixtureRequest) -> dict[str, str]:
    return {"url": request.getfixturevalue("postgres_url")} if request.param == "postgres" else {}


@pytest.fixture
async def slow_reads() -> AsyncIterator[SlowReads]:
    slow_reads = SlowReads()
    yield slow_reads
    slow_reads.release_event.set()


async def create_members(api: ApiClient) -> list[ApiClient]:
    for name in ("ann", "bob"):
        await api.create("/api/entities", id=name, type="human", name=name.title())
    await api.create("/api/spaces", id="den", name="The den", members=["ann", "bob"])
    return [await api.member(name) for name in ("ann", "bob")]


@pytest.mark.spec("26.2")
async def test_slow_reads_of_a_member_leave_readers_for_operators_and_others(
    tmp_path: Path, storage: dict[str, str], slow_reads: SlowReads
) -> None:
    config = write_config(tmp_path, storage=storage, server={"readTimeout": "10m"})
    async with (
        Gateway.open(config) as gateway,
        open_api(gateway) as api,
        open_app_api(gateway, slow_reads.routes()) as slow_api,
    ):
        ann, bob = await create_members(api)
        slow_ann = ApiClient(slow_api.url, slow_api.session, ann.headers)
        requests = [asyncio.create_task(slow_ann.get("/slow")) for _ in range(20)]
        await slow_reads.started.wait()
        assert (await bob.get("/api/calls?status=pending")).status == 200
        assert (await api.get("/api/calls")).status == 200
        assert (await api.get("/api/spaces/den/messages")).status == 200
        assert slow_reads.started_count < gateway.ledger.database.reader_count
        slow_reads.release_event.set()
        assert {response.status for response in await asyncio.gather(*requests)} == {200}


@pytest.mark.spec("26.2")
@pytest.mark.spec("12.1")
async def test_read_that_takes_too_long_is_ended_with_503(
    tmp_path: Path, storage: dict[str, str], slow_reads: SlowReads
) -> None:
    config = write_config(tmp_path, storage=storage, server={"readTimeout": "200ms"})
    async with Gateway.open(config) as gateway, open_app_api(gateway, slow_reads.routes()) as api:
        responses = await asyncio.gather(*(api.get("/endless") for _ in range(12)))
        for response in responses:
            assert response.status == 503
            assert response.headers["content-type"] == "application/problem+json"
            assert response.detail.startswith("the read took longer than 0.2 s; ask for less")
            assert response.headers["retry-after"] == "1"


def test_routes_read_with_the_time_limit_of_requests() -> None:
    folder = Path(toolspace.server.routes.__file__).parent
    assert [path.name for path in folder.glob("*.py") if re.search(r"request\.ledger\.read\(", path.read_text())] == []
