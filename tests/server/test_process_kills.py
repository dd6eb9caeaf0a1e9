"""Gateway processes that are killed while results race timeouts, arrive twice and at the wrong process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.chaos.process_kills import KillableGateway, KillTest


@contextmanager
def _processes(tmp_path: Path, count: int, url: str | None = None) -> Iterator[list[KillableGateway]]:
    processes = [KillableGateway(tmp_path / str(number), url=url) for number in range(count)]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.end()


async def _storm(processes: list[KillableGateway], **options: int) -> KillTest:
    storm = KillTest(processes, **options)
    async with asyncio.timeout(200):
        await storm.run()
    storm.check()
    assert set(await storm.messages()) == {"complete"}
    return storm


@pytest.mark.spec("6.4")
@pytest.mark.spec("15.1")
async def test_two_gateways_on_one_database_deliver_every_result_once(tmp_path: Path, postgres_url: str) -> None:
    with _processes(tmp_path, 2, postgres_url) as processes:
        storm = await _storm(processes, calls=250)
        assert storm.inline
        assert storm.by_inbox
        assert set((storm.inline + storm.by_inbox).values()) == {1}


@pytest.mark.spec("15.2")
async def test_killed_gateways_on_one_database_lose_nothing(tmp_path: Path, postgres_url: str) -> None:
    with _processes(tmp_path, 2, postgres_url) as processes:
        storm = await _storm(processes, calls=250, kills=2)
        assert sum(process.starts for process in processes) == 4
        assert storm.by_inbox


@pytest.mark.spec("15.2")
async def test_a_killed_gateway_on_sqlite_loses_nothing(tmp_path: Path) -> None:
    with _processes(tmp_path, 1) as processes:
        await _storm(processes, calls=250, kills=3)
        assert processes[0].starts == 4
        assert processes[0].stop() == 0
