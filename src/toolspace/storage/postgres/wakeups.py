"""Wake-ups over PostgreSQL's LISTEN and NOTIFY: ids only, many in one, outside of every transaction.

One connection of its own listens and tells, beside the pool: NOTIFY in a transaction would make all commits wait in
line. It is looked after: when it is lost, another is made, and everyone is told that there was a gap.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.errors import StorageUnavailable
from toolspace.storage.database import WakeUps
from toolspace.storage.postgres.driver import faults, load_driver, shown_address

_log = logging.getLogger("toolspace.storage")

_LONGEST = 7_900
"""Bytes of one payload; PostgreSQL takes fewer than 8,000."""
_MOST_KEPT = 20_000
"""Hints that wait for a connection. Beyond that, one gap says as much."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_TIMEOUT, _PULSE = 10.0, 15.0


class PostgresWakeUps(WakeUps):
    """Hints between the processes that share a PostgreSQL. An empty list of hints stands for a gap: look at all."""

    def __init__(self, url: str, channel: str = "toolspace") -> None:
        self.address = shown_address(url)
        self._url = url
        self._channel = channel
        self._driver = load_driver()
        self._node = new_id("node")  # What it tells comes back to it, too.
        self._waiting: dict[str, None] = {}
        self._gap = False
        self._news = asyncio.Event()
        self._on_hints: Callable[[Sequence[str]], None] | None = None
        self._on_gap: Callable[[], None] | None = None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str, channel: str = "toolspace") -> Self:
        """Connects, and stays connected until it is closed."""
        self = cls(url, channel)
        try:
            connection = await self._connect()
        except self._faults as error:
            raise StorageUnavailable(f"PostgreSQL at {self.address} does not answer: {error}") from error
        self._task = asyncio.create_task(self._stay_connected(connection), name="toolspace-wake-ups")
        return self

    def send(self, hints: Iterable[str]) -> None:
        if self._gap:
            return  # Everyone will look at everything.
        self._waiting.update(dict.fromkeys(hints))
        if len(self._waiting) > _MOST_KEPT:
            self._waiting.clear()
            self._gap = True
        self._news.set()

    def listen(self, on_hints: Callable[[Sequence[str]], None], on_gap: Callable[[], None]) -> None:
        self._on_hints, self._on_gap = on_hints, on_gap

    async def aclose(self) -> None:
        """Says what is left to say, and ends."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])

    @property
    def _faults(self) -> tuple[type[Exception], ...]:
        return faults(self._driver)

    # The connection

    async def _connect(self) -> Any:
        connection = await self._driver.connect(
            self._url,
            timeout=_TIMEOUT,
            command_timeout=_TIMEOUT,
            server_settings={"application_name": "toolspace wake-ups"},
        )
        try:
            await connection.add_listener(self._channel, self._heard)
        except BaseException:
            connection.terminate()
            raise
        return connection

    async def _stay_connected(self, connection: Any) -> None:
        while True:
            try:
                await self._tell_all(connection)
            except self._faults as error:
                _log.warning("the wake-ups of PostgreSQL at %s were lost: %s", self.address, error)
            except asyncio.CancelledError:
                await self._say_goodbye(connection)
                raise
            finally:
                connection.terminate()
            connection = await self._reconnect()
            _log.info("the wake-ups of PostgreSQL at %s are back", self.address)
            if self._on_gap is not None:
                self._call(self._on_gap)

    async def _reconnect(self) -> Any:
        pause = _FIRST_PAUSE
        while True:
            await asyncio.sleep(random.uniform(pause / 2, pause))
            try:
                return await self._connect()
            except self._faults as error:
                _log.debug("PostgreSQL at %s does not answer: %s", self.address, error)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _say_goodbye(self, connection: Any) -> None:
        try:
            async with asyncio.timeout(1):
                await self._tell(connection)
                await connection.close()
        except self._faults as error:
            _log.debug("PostgreSQL at %s was not told: %s", self.address, error)

    # Telling

    async def _tell_all(self, connection: Any) -> None:
        """Tells while there is something to tell: what comes in meanwhile goes out together."""
        connection.add_termination_listener(self._notice_end)
        while not connection.is_closed():
            self._news.clear()
            await self._tell(connection)
            try:
                async with asyncio.timeout(_PULSE):
                    await self._news.wait()
            except TimeoutError:
                await connection.execute("SELECT 1")  # One that died without a word is found out.
        raise ConnectionResetError("the connection was closed")

    def _notice_end(self, connection: Any) -> None:
        self._news.set()

    async def _tell(self, connection: Any) -> None:
        gap, hints = self._gap, list(self._waiting)
        payloads = self._packed(hints)
        if gap or payloads is None:
            payloads = [self._payload([])]
        if not payloads:
            return
        self._gap = False
        self._waiting.clear()
        try:
            await connection.execute(
                "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload", self._channel, payloads
            )
        except BaseException:
            # It may not have been heard. Twice does no harm.
            self._gap = self._gap or gap
            self._waiting = dict.fromkeys(hints) | self._waiting
            self._news.set()
            raise

    def _packed(self, hints: Sequence[str]) -> list[str] | None:
        """The hints in as few payloads as they fit in; None where one fits in none."""
        payloads: list[str] = []
        some: list[str] = []
        empty = size = len(self._payload([]))
        for hint in hints:
            more = len(json_text.encode_bytes(hint)) + 1
            if empty + more > _LONGEST:
                return None
            if size + more > _LONGEST:
                payloads.append(self._payload(some))
                some, size = [], empty
            some.append(hint)
            size += more
        if some:
            payloads.append(self._payload(some))
        return payloads

    def _payload(self, hints: Sequence[str]) -> str:
        return json_text.encode([self._node, *hints])

    # Hearing

    def _heard(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        try:
            node, *hints = json_text.decode(payload)
        except (ValueError, TypeError):
            _log.warning("something else speaks on the channel %s of PostgreSQL at %s", channel, self.address)
            return
        if node == self._node:
            return
        if not hints:
            if self._on_gap is not None:
                self._call(self._on_gap)
        elif self._on_hints is not None:
            self._call(self._on_hints, hints)

    def _call(self, told: Callable[..., None], *arguments: Any) -> None:
        try:
            told(*arguments)
        except Exception:
            _log.exception("a wake-up was not understood")
