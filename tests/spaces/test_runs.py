"""The runs that a process has open: until they end, in whatever process that happens."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from tests.spaces.service_harness import service_harness
from toolspace import tool
from toolspace.spaces import runs
from toolspace.storage.database import Database


@pytest.mark.parametrize("end", ["closed", "canceled"])
async def test_run_that_has_ended_is_closed_in_every_process(
    database: Database, end: Literal["closed", "canceled"]
) -> None:
    async with service_harness(database) as harness:
        run = await harness.open_run()
        await harness.open_host(run)
        assert harness.open_runs.find(run) is not None
        await harness.ledger.commit(runs.close_run if end == "closed" else runs.cancel_run, run)
        async with asyncio.timeout(30):
            while harness.open_runs.find(run) is not None:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.001)


async def test_canceling_a_run_stops_its_running_calls(database: Database) -> None:
    @tool(visible=False)
    async def hang() -> None:
        await asyncio.Event().wait()

    async with service_harness(database, hang) as harness:
        run = await harness.open_run()
        call_task = asyncio.create_task(harness.call(run, "hang"))
        await harness.wait_until_started(run)
        harness.open_runs.remove(run)  # As if too many other runs were used after it.
        await harness.ledger.commit(runs.cancel_run, run)
        assert (await call_task).error_kind == "canceled"
