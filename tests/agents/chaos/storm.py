"""Jobs for clerks, whose processes are killed again and again while they do them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import KINDS
from tests.agents.chaos.process import Place, live, open_database, space_of
from toolspace.agents.host import entity_id_for

_forks = multiprocessing.get_context("forkserver")
# Imported once: a process that is killed often is born often.
_forks.set_forkserver_preload(
    ["tests.agents.chaos.process", "toolspace.storage.postgres.database", "toolspace.storage.postgres.wakeups"]
)


class Life:
    """A process that is killed and started again."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._process: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process = _forks.Process(target=live, args=(self.place,), daemon=True)
        self._process.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def stop(self) -> int | None:
        self._process.terminate()
        self._process.join(30)
        return self._process.exitcode

    def end(self) -> None:
        if self._process is not None and self._process.is_alive():
            self.kill()

    async def ask(self, question: dict[str, Any]) -> Any:
        """An answer, as soon as the process lives and gives one."""
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_unix_connection(self.place.socket)
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    return json.loads(await reader.readuntil())
                finally:
                    writer.close()
            await asyncio.sleep(0.02)


class Storm:
    """Processes, jobs, kills."""

    def __init__(
        self,
        folder: Path,
        *,
        url: str | None = None,
        processes: int = 1,
        clerks: tuple[str, ...] = ("ann", "ben"),
        jobs: int = 20,
        kills: int = 8,
        stops: int = 0,
        stalls: int = 0,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self._random = random.Random(seed)
        self.place = Place(folder=folder, socket=folder / "0", log=folder / "log", url=url, clerks=clerks, **options)
        self.lives = [
            Life(msgspec.structs.replace(self.place, socket=folder / str(number))) for number in range(processes)
        ]
        self.jobs: dict[str, str] = {}
        self._strikes = [self._kill] * kills + [self._stop] * stops + [self._stall] * stalls
        self._random.shuffle(self._strikes)
        self._stalls = stalls > 0
        self._number = jobs

    async def run(self) -> None:
        """All jobs are done in the end, and nobody thinks any more."""
        try:
            for life in self.lives:
                life.start()
            await asyncio.gather(self._give_jobs(), self._strike_now_and_then())
            while not await self.lives[0].ask({"jobs": self.jobs}):  # noqa: ASYNC110 - another process is asked
                await asyncio.sleep(0.05)
            assert [life.stop() for life in self.lives] == [0] * len(self.lives)
        finally:
            for life in self.lives:
                life.end()

    async def check(self) -> None:
        database, wakeups = await open_database(self.place)
        try:
            agents = [entity_id_for(name) for name in self.place.clerks]
            await checks.check(database, self.jobs, self.place.folder / "book", *agents, stalled=self._stalls)
        finally:
            await database.aclose()
            if wakeups is not None:
                await wakeups.aclose()

    async def _give_jobs(self) -> None:
        for number in map(str, range(1, self._number + 1)):
            kind = self._random.choice(KINDS)
            clerk = self._random.choice(self.place.clerks)
            life = self._random.choice(self.lives)
            await life.ask({"job": f"job {number} {kind}", "space": space_of(clerk), "id": f"msg_job_{number}"})
            self.jobs[number] = kind
            await asyncio.sleep(self._random.random() * 0.2)

    async def _strike_now_and_then(self) -> None:
        for strike in self._strikes:
            life = self._random.choice(self.lives)
            before = await life.ask({"said": True})
            for _ in range(self._random.randrange(40)):  # Some time, and often while something happens.
                if await life.ask({"said": True}) > before:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._random.random() * 0.1)
            await strike(life)

    async def _kill(self, life: Life) -> None:
        life.kill()
        life.start()

    async def _stop(self, life: Life) -> None:
        assert await asyncio.to_thread(life.stop) == 0
        life.start()

    async def _stall(self, life: Life) -> None:
        """Not a sign of life for longer than the lease; then it goes on as if nothing had happened."""
        os.kill(life.pid, signal.SIGSTOP)
        await asyncio.sleep(self.place.lease_ms / 1000 * (1 + self._random.random()))
        os.kill(life.pid, signal.SIGCONT)
