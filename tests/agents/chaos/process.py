"""A process of clerks, which may be killed at any moment. Told what to do over a socket, so that it alone has the
database open.
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

from tests.agents.agent_harness import Village, agent, village
from tests.agents.chaos import checks
from tests.agents.chaos.job_agent import Clerk, clerks_tools
from toolspace.agents import cycle_transactions
from toolspace.agents.host import entity_id_for
from toolspace.config.agent_settings import AgentLimits, AgentLoopSettings
from toolspace.core.records import Message
from toolspace.errors import RefusedError
from toolspace.spaces import messaging
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Database, Program, WakeUps
from toolspace.storage.queries import entities, messages


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process lives, and how."""

    folder: Path
    """What all processes share: the book of effects, and SQLite."""
    socket: Path
    log: Path
    url: str | None = None
    """Of PostgreSQL; None for a file in the folder."""
    clerks: tuple[str, ...] = ("clerk",)
    lease_ms: int = cycle_transactions.LEASE_MS
    pace: float = 0.01
    """Seconds that each little thing takes, at most."""
    cycles: bool = False
    """Whether to write down when cycles begin and end."""


def space_of(clerk: str) -> str:
    return f"spc_{clerk}"


def live(place: Place) -> None:
    """Runs until SIGTERM."""
    logging.basicConfig(filename=place.log, level=logging.INFO, format="%(process)d %(asctime)s %(name)s %(message)s")
    cycle_transactions.LEASE_MS = place.lease_ms
    asyncio.run(_live(place))


async def open_database(place: Place) -> tuple[Database, WakeUps | None]:
    if place.url is None:
        from toolspace.storage.sqlite.database import SqliteDatabase

        return await SqliteDatabase.open(place.folder / "toolspace.db"), None
    from toolspace.storage.postgres.database import PostgresDatabase
    from toolspace.storage.postgres.wakeups import PostgresWakeUps

    return await PostgresDatabase.open(place.url), await PostgresWakeUps.open(place.url)


async def _live(place: Place) -> None:
    chance = random.Random()

    async def pause() -> None:
        await asyncio.sleep(chance.random() * place.pace)

    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    database, wakeups = await open_database(place)
    limits = AgentLimits(cycles_per_minute=100_000)
    clerks = [
        agent(name, Clerk(pause), limits=limits, loop=AgentLoopSettings(max_steps=1_000)) for name in place.clerks
    ]
    async with AsyncExitStack() as stack:
        town = await stack.enter_async_context(
            village(
                database,
                *clerks,
                tools=clerks_tools(place.folder / "book", pause),
                folder=place.folder,
                wakeups=wakeups,
            )
        )
        await _settle(town, place)
        boss = asyncio.create_task(_answer_as_boss(town))
        place.socket.unlink(missing_ok=True)
        desk = _Desk(town, database)
        server = await asyncio.start_unix_server(desk.serve, place.socket)
        try:
            await over.wait()
        finally:
            boss.cancel()
            server.close()
            await asyncio.gather(boss, return_exceptions=True)


async def _settle(town: Village, place: Place) -> None:
    for name in place.clerks:
        space = space_of(name)
        await town.ledger.write(entities.create_space, space, name.title(), {})
        for entity in (town.person, entity_id_for(name)):
            await town.ledger.write(entities.add_member, space, entity)


async def _answer_as_boss(town: Village) -> None:
    while True:
        for one in await town.open_calls():
            with suppress(RefusedError):  # Another process was faster.
                await town.submit(one.call_id, {"boss": one.args["n"]})
        await asyncio.sleep(0.02)


class _Desk:
    """Takes jobs in, and says how far they are."""

    def __init__(self, town: Village, database: Database) -> None:
        self._town = town
        self._database = database

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while line := await reader.readline():
                answer = await self._answer(json.loads(line))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        writer.close()

    async def _answer(self, asked: dict[str, Any]) -> Any:
        if "job" in asked:
            await self._town.ledger.commit(_say_once, asked["space"], self._town.person, asked["job"], asked["id"])
            return True
        if "jobs" in asked:
            return await checks.settled(self._database, asked["jobs"])
        return len(await checks.said(self._database))


def _say_once(effects: Effects, space_id: str, sender: str, text: str, message_id: str) -> Program[Message | None]:
    if (yield from messages.find(message_id)) is not None:
        return None
    return (yield from messaging.send_message(effects, space_id, sender, text, message_id=message_id))
