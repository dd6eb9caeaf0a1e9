"""Sends jobs to agents whose processes are killed, stopped or stalled repeatedly."""

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
from tests.agents.chaos.process import PEOPLE, ProcessSettings, open_database, run_process, space_of
from toolspace.agents.agent import entity_id_for

_forks = multiprocessing.get_context("forkserver")
# Imported once: the processes are started often.
_forks.set_forkserver_preload(
    ["tests.agents.chaos.process", "toolspace.storage.postgres.database", "toolspace.storage.postgres.wakeups"]
)


class AgentProcess:
    """A process that is killed and started again."""

    def __init__(self, place: ProcessSettings) -> None:
        self.settings = place
        self._process: Any = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        self._process = _forks.Process(target=run_process, args=(self.settings,), daemon=True)
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
        """Sends a request until the process is up and answers."""
        while True:
            with suppress(OSError, asyncio.IncompleteReadError, ValueError):
                reader, writer = await asyncio.open_unix_connection(self.settings.socket)
                try:
                    writer.write(json.dumps(question).encode() + b"\n")
                    return json.loads(await reader.readuntil())
                finally:
                    writer.close()
            await asyncio.sleep(0.02)


class ProcessStorm:
    """Runs processes, sends jobs, and interrupts the processes at random."""

    def __init__(
        self,
        directory: Path,
        *,
        url: str | None = None,
        processes: int = 1,
        agent_names: tuple[str, ...] = ("ann", "ben"),
        jobs: int = 20,
        kills: int = 8,
        stops: int = 0,
        stalls: int = 0,
        seed: int = 1,
        **options: Any,
    ) -> None:
        self._random = random.Random(seed)
        self.settings = ProcessSettings(
            directory=directory,
            socket=directory / "0",
            log=directory / "log",
            url=url,
            agent_names=agent_names,
            **options,
        )
        self.processes = [
            AgentProcess(msgspec.structs.replace(self.settings, socket=directory / str(number)))
            for number in range(processes)
        ]
        self.jobs: dict[str, str] = {}
        self._interruptions = [self._kill] * kills + [self._stop] * stops + [self._stall] * stalls
        self._random.shuffle(self._interruptions)
        self._stalls = stalls > 0
        self._job_count = jobs

    async def run(self) -> None:
        """Runs until all jobs are done and no session is active."""
        try:
            for process in self.processes:
                process.start()
            await asyncio.gather(self._send_jobs(), self._interrupt_repeatedly())
            while not await self.processes[0].ask({"jobs": self.jobs}):  # noqa: ASYNC110 - another process is asked
                await asyncio.sleep(0.05)
            assert [process.stop() for process in self.processes] == [0] * len(self.processes)
        finally:
            for process in self.processes:
                process.end()

    async def check(self) -> None:
        database, wakeups = await open_database(self.settings)
        try:
            agents = [entity_id_for(name) for name in self.settings.agent_names]
            await checks.check(
                database, self.jobs, self.settings.directory / "effects", *agents, has_stalled=self._stalls
            )
        finally:
            await database.aclose()
            if wakeups is not None:
                await wakeups.aclose()

    async def _send_jobs(self) -> None:
        for number in map(str, range(1, self._job_count + 1)):
            kind = self._random.choice(KINDS)
            name = self._random.choice(self.settings.agent_names)
            person = self._random.choice(PEOPLE)
            process = self._random.choice(self.processes)
            job = {"job": f"job {number} {kind}", "id": f"msg_job_{number}"}
            await process.ask({**job, "space": space_of(name, person), "sender": person})
            self.jobs[number] = kind
            await asyncio.sleep(self._random.random() * 0.2)

    async def _interrupt_repeatedly(self) -> None:
        for interrupt in self._interruptions:
            process = self._random.choice(self.processes)
            before = await process.ask({"said": True})
            for _ in range(self._random.randrange(40)):  # After a random time, preferably while messages are sent.
                if await process.ask({"said": True}) > before:
                    break
                await asyncio.sleep(0.01)
            await asyncio.sleep(self._random.random() * 0.1)
            await interrupt(process)

    async def _kill(self, process: AgentProcess) -> None:
        process.kill()
        process.start()

    async def _stop(self, process: AgentProcess) -> None:
        assert await asyncio.to_thread(process.stop) == 0
        process.start()

    async def _stall(self, process: AgentProcess) -> None:
        """Stops the process for longer than its lease, then lets it continue."""
        os.kill(process.pid, signal.SIGSTOP)
        await asyncio.sleep(self.settings.lease_ms / 1000 * (1 + self._random.random()))
        os.kill(process.pid, signal.SIGCONT)
