"""A process with agents that may be killed at any moment. The test talks to it over a socket, so that only the process
has the database open.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import signal
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec

from tests.agents.agent_harness import AgentHarness, run_agents
from tests.agents.agent_harness import private_agent as agent
from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import JobModel, job_tools
from toolspace.agents import session_transactions
from toolspace.agents.agent import entity_id_for
from toolspace.config.agent_settings import AgentLimits, AgentLoopSettings
from toolspace.core.stored_records import Message, SessionScope
from toolspace.errors import RefusedError
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Database, Program, WakeUps
from toolspace.storage.queries import entities_and_spaces, messages


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of one process."""

    directory: Path
    """What all processes share: the effects file and the SQLite database."""
    socket: Path
    log: Path
    url: str | None = None
    """The URL of PostgreSQL; None: SQLite."""
    agent_names: tuple[str, ...] = ("clerk",)
    session: SessionScope = "agent"
    """The scope of the agents' sessions."""
    lease_ms: int = session_transactions.LEASE_MS
    max_delay: float = 0.01
    """The longest delay of a response or a call, in seconds."""


PEOPLE = ("ent_person", "ent_other")
"""Each of them has a space with each agent."""


def space_of(agent_name: str, person: str) -> str:
    return f"spc_{agent_name}_{person}"


def run_process(settings: ProcessSettings) -> None:
    """Runs until SIGTERM."""
    logging.basicConfig(
        filename=settings.log, level=logging.INFO, format="%(process)d %(asctime)s %(name)s %(message)s"
    )
    session_transactions.LEASE_MS = settings.lease_ms
    asyncio.run(_run(settings))


async def open_database(settings: ProcessSettings) -> tuple[Database, WakeUps | None]:
    if settings.url is None:
        from toolspace.storage.sqlite.database import SqliteDatabase

        return await SqliteDatabase.open(settings.directory / "toolspace.db"), None
    from toolspace.storage.postgres.database import PostgresDatabase
    from toolspace.storage.postgres.wakeups import PostgresWakeUps

    return await PostgresDatabase.open(settings.url), await PostgresWakeUps.open(settings.url)


async def _run(settings: ProcessSettings) -> None:
    delays = random.Random()

    async def pause() -> None:
        await asyncio.sleep(delays.random() * settings.max_delay)

    is_terminated = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_terminated.set)
    database, wakeups = await open_database(settings)
    limits = AgentLimits(cycles_per_minute=100_000)
    agents = [
        agent(
            name,
            JobModel(pause),
            limits=limits,
            loop=AgentLoopSettings(max_steps=1_000, plain_text="private"),
            session=settings.session,
        )
        for name in settings.agent_names
    ]
    async with AsyncExitStack() as stack:
        harness = await stack.enter_async_context(
            run_agents(
                database,
                *agents,
                tools=job_tools(settings.directory / "effects", pause),
                session_dir=settings.directory,
                wakeups=wakeups,
                closes_database=True,
            )
        )
        await _create_spaces(harness, settings)
        submit_task = asyncio.create_task(_submit_results(harness))
        settings.socket.unlink(missing_ok=True)
        control = _ControlServer(harness, database)
        server = await asyncio.start_unix_server(control.serve, settings.socket)
        try:
            await is_terminated.wait()
        finally:
            submit_task.cancel()
            server.close()
            await asyncio.gather(submit_task, return_exceptions=True)


async def _create_spaces(harness: AgentHarness, settings: ProcessSettings) -> None:
    for person in PEOPLE:
        await harness.ledger.write(entities_and_spaces.create_entity, person, "human", person, {})
        for name in settings.agent_names:
            space = space_of(name, person)
            await harness.ledger.write(entities_and_spaces.create_space, space, name.title(), {})
            for entity in (person, entity_id_for(name)):
                await harness.ledger.write(entities_and_spaces.add_member, space, entity)


async def _submit_results(harness: AgentHarness) -> None:
    while True:
        for record in await harness.open_calls():
            with suppress(RefusedError):  # Another process was faster.
                await harness.submit(record.call_id, {"boss": record.args["n"]})
        await asyncio.sleep(0.02)


class _ControlServer:
    """Receives jobs, and reports which of them are done."""

    def __init__(self, harness: AgentHarness, database: Database) -> None:
        self._harness = harness
        self._database = database

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                answer = await self._handle(json.loads(line))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _handle(self, request: dict[str, Any]) -> Any:
        if "job" in request:
            await self._harness.ledger.commit(
                _send_once, request["space"], request["sender"], request["job"], request["id"]
            )
            return True
        if "jobs" in request:
            return await checks.is_done(self._database, request["jobs"])
        return len(await checks.list_sent_texts(self._database))


def _send_once(effects: Effects, space_id: str, sender: str, text: str, message_id: str) -> Program[Message | None]:
    if (yield from messages.find(message_id)) is not None:
        return None
    return (yield from messaging.send_message(effects, space_id, sender, text, message_id=message_id))
