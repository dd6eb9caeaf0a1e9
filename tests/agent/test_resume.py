"""A cycle that is cut off goes on where its last step was kept, whatever it was at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.agent.chaos import books
from tests.agent.chaos.clerk import KINDS, Clerk, clerks_tools
from tests.agent.mortal import Mortal
from tests.agent.village import Village, agent, village
from toolspace.abc.database import Database
from toolspace.agent import writing
from toolspace.spaces.ledger import Ledger
from toolspace.stores.sql import sessions


class Lives:
    """One agent that lives in one process after the other."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.folder = folder
        self.book = folder / "book"
        self.jobs: dict[str, str] = {}

    @asynccontextmanager
    async def life(self) -> AsyncIterator[tuple[Village, Mortal]]:
        """The next process. Ends as if killed where it died before."""
        mortal = Mortal(self.database)
        await Ledger(self.database).write(sessions.free_all, "")  # As if the lease of the one before had ended.
        clerk = agent("clerk", Clerk(mortal.live))
        tools = clerks_tools(self.book, mortal.live)
        async with village(mortal, clerk, tools=tools, folder=self.folder, owns=False) as town:
            boss = asyncio.create_task(self._answer_as_boss(town))
            try:
                yield town, mortal
            finally:
                boss.cancel()
                await asyncio.gather(boss, return_exceptions=True)

    async def job(self, town: Village, kind: str) -> None:
        number = str(len(self.jobs) + 1)
        self.jobs[number] = kind
        await town.say(f"job {number} {kind}")

    async def finished(self, *, plans: bool = False) -> None:
        """Waits until every job is done; also those planned for later, if they are meant."""
        while not await books.settled(self.database, self.jobs, plans=plans):  # noqa: ASYNC110 - in whichever process
            await asyncio.sleep(0.005)

    async def _answer_as_boss(self, town: Village) -> None:
        while True:
            for one in await town.open_calls():
                await town.submit(one.call_id, {"boss": one.args["n"]})
            await asyncio.sleep(0.01)


async def _either(*waiting: Awaitable[Any]) -> None:
    tasks = [asyncio.ensure_future(one) for one in waiting]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.spec("11.4")
@pytest.mark.spec("11.6")
@pytest.mark.spec("6.8")
@pytest.mark.parametrize("kind", KINDS)
async def test_a_process_that_dies_with_any_of_its_writes_leaves_nothing_undone_or_done_twice(
    database: Database, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_FLUSH_SECONDS", 0)  # Each word that is said is a write of its own.
    lives = Lives(database, tmp_path)
    deaths, alive = 0, False
    while not alive:
        deaths += 1
        # A write that happened, and the next that did not, are the same to a database. Not to what is outside of it.
        for lost in (True, False) if kind == "plain" else (True,):
            async with lives.life() as (town, mortal):
                mortal.die_at(deaths + 1, lost=lost)  # The first is the message itself.
                await lives.job(town, kind)
                await _either(mortal.dead.wait(), lives.finished())
                alive = not mortal.dead.is_set()
            async with lives.life():
                await asyncio.wait_for(lives.finished(), 10)
    assert deaths > 10
    async with lives.life():
        await asyncio.wait_for(lives.finished(plans=True), 10)
    await books.check(database, lives.jobs, lives.book, town.agent)
