"""The runs that a process keeps in mind: until they end, in whichever process that happens."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest

from tests.spaces.rig import rig
from toolspace import tool
from toolspace.spaces import runs
from toolspace.storage.database import Database


@pytest.mark.parametrize("end", ["closed", "canceled"])
async def test_a_run_that_ended_elsewhere_is_forgotten(database: Database, end: Literal["closed", "canceled"]) -> None:
    async with rig(database) as r:
        run = await r.open_run()
        await r.room(run)
        assert r.cycles.find(run) is not None
        over = r.ledger.waiters.register(f"run:{run}")
        await r.ledger.commit(runs.close_run if end == "closed" else runs.cancel_run, run)
        await over
        await asyncio.gather(*r.cycles._looking)  # pyright: ignore[reportPrivateUsage]
        assert r.cycles.find(run) is None


async def test_what_runs_in_a_canceled_run_stops(database: Database) -> None:
    @tool(visible=False)
    async def hang() -> None:
        await asyncio.Event().wait()

    async with rig(database, hang) as r:
        run = await r.open_run()
        calling = asyncio.create_task(r.call(run, "hang"))
        await r.began(run)
        r.cycles.remove(run)  # Forgotten, because too many others came after it.
        await r.ledger.commit(runs.cancel_run, run)
        assert (await calling).error_kind == "canceled"
