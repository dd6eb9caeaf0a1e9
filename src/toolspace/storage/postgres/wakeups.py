"""`PostgresWakeUps`: hints between processes over LISTEN and NOTIFY. Sends ids only, many in one notification.

The connection also holds an advisory lock with the id of the process. PostgreSQL releases it when the connection ends,
so the other processes notice at once that a process was killed. A process that is only busy keeps its connection.

One connection of its own sends and listens, beside the pool: NOTIFY inside a transaction would make all commits wait
for each other. If the connection is lost, a new one is made, and everyone is told of the gap.
"""

from __future__ import annotations

import asyncio
import logging
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Self

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.errors import StorageUnavailable
from toolspace.storage.database import ConnectedProcesses, WakeUps, shown_address
from toolspace.storage.postgres.database import connection_errors, load_driver

_log = logging.getLogger("toolspace.storage")

_MAX_PAYLOAD: Final = 7_900
"""Bytes; PostgreSQL allows fewer than 8,000."""
_MAX_WAITING: Final = 20_000
"""Hints that wait for a connection. With more, one gap says as much."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0
_TIMEOUT: Final = 10.0
_CHECK_SECONDS: Final = 15.0
"""How often to check an idle connection."""


_LOCK_CLASS: Final = zlib.crc32(b"toolspace process") & 0x7FFFFFFF
"""The first key of the advisory locks; the second is that of a process."""
_KEEPALIVE: Final = {"tcp_keepalives_idle": "5", "tcp_keepalives_interval": "2", "tcp_keepalives_count": "3"}
"""So that the server notices within seconds that the machine of a process is gone, too."""
_SELECT_LOCKS: Final = (
    "SELECT objid::bigint FROM pg_locks WHERE locktype = 'advisory' AND classid = $1::bigint::oid AND objsubid = 2 "
    "AND granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class _LockHolders(ConnectedProcesses):
    """The processes that hold their lock."""

    def __init__(self, epoch: int, keys: frozenset[int]) -> None:
        self.epoch = epoch
        self._keys = keys

    def __contains__(self, process_id: str) -> bool:
        return _lock_key(process_id) in self._keys

    @property
    def count(self) -> int:
        return len(self._keys)


class PostgresWakeUps(WakeUps):
    """Hints between the processes that share a PostgreSQL. A notification without hints means a gap."""

    def __init__(self, url: str, channel: str = "toolspace") -> None:
        self.address = shown_address(url)
        self._url = url
        self._channel = channel
        self._driver = load_driver()
        self._errors = connection_errors(self._driver)
        self._node = new_id("node")
        """Marks its own notifications, which PostgreSQL sends back to it."""
        self._waiting_hints: dict[str, None] = {}
        self._has_gap = False
        self._wake = asyncio.Event()
        self._on_hints: Callable[[Sequence[str]], None] = _ignore
        self._on_gap: Callable[[], None] = _ignore
        self._task: asyncio.Task[None] | None = None
        self._connection: Any = None
        self._connection_count = 0
        self._statement_lock = asyncio.Lock()
        """A connection runs one statement at a time."""
        self._process_id: str | None = None
        """The process that holds its lock on the connection."""

    @classmethod
    async def open(cls, url: str, channel: str = "toolspace") -> Self:
        """Connects, and stays connected until it is closed."""
        self = cls(url, channel)
        try:
            connection = await self._connect()
        except self._errors as error:
            raise StorageUnavailable(f"PostgreSQL at {self.address} does not answer: {error}") from error
        self._task = asyncio.create_task(self._stay_connected(connection), name="toolspace-wake-ups")
        return self

    def send(self, hints: Iterable[str]) -> None:
        if self._has_gap:
            return  # Everyone will read everything.
        self._waiting_hints.update(dict.fromkeys(hints))
        if len(self._waiting_hints) > _MAX_WAITING:
            self._waiting_hints.clear()
            self._has_gap = True
        self._wake.set()

    def listen(self, on_hints: Callable[[Sequence[str]], None], on_gap: Callable[[], None]) -> None:
        self._on_hints, self._on_gap = on_hints, on_gap

    async def announce(self, process_id: str) -> None:
        self._process_id = process_id
        async with self._statement_lock:
            try:
                await self._acquire_process_lock(self._connection)
            except self._errors as error:
                _log.debug("PostgreSQL at %s: announced when it is connected again: %s", self.address, error)

    async def find_connected(self) -> ConnectedProcesses | None:
        epoch = self._connection_count
        async with self._statement_lock:
            try:
                rows = await self._connection.fetch(_SELECT_LOCKS, _LOCK_CLASS)
            except self._errors as error:
                _log.debug("PostgreSQL at %s: connected processes are unknown: %s", self.address, error)
                return None
        holders = _LockHolders(epoch, frozenset(row[0] for row in rows))
        # Without its own lock, this process has been disconnected, and the others perhaps, too.
        is_certain = self._process_id is not None and self._process_id in holders and epoch == self._connection_count
        return holders if is_certain else None

    async def aclose(self) -> None:
        """Sends the waiting hints and disconnects."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait([task])

    # The connection

    async def _connect(self) -> Any:
        connection = await self._driver.connect(
            self._url,
            timeout=_TIMEOUT,
            command_timeout=_TIMEOUT,
            server_settings={"application_name": "toolspace wake-ups", **_KEEPALIVE},
        )
        try:
            await connection.add_listener(self._channel, self._receive)
            await self._acquire_process_lock(connection)
        except BaseException:
            connection.terminate()
            raise
        self._connection = connection
        self._connection_count += 1
        return connection

    async def _acquire_process_lock(self, connection: Any) -> None:
        if self._process_id is not None:
            key = _lock_key(self._process_id)
            signed_key = key - 2**32 if key >= 2**31 else key
            # Shared: acquired again, or by another process whose id has the same key, it does not wait.
            await connection.execute("SELECT pg_advisory_lock_shared($1, $2)", _LOCK_CLASS, signed_key)

    async def _stay_connected(self, connection: Any) -> None:
        while True:
            try:
                await self._send_forever(connection)
            except self._errors as error:
                _log.warning("wake-ups of PostgreSQL at %s: connection lost, reconnecting: %s", self.address, error)
            except asyncio.CancelledError:
                await self._disconnect(connection)
                raise
            except Exception:  # Without this task, no process would learn what the others change.
                _log.exception("wake-ups of PostgreSQL at %s failed, reconnecting", self.address)
            finally:
                connection.terminate()
            connection = await self._reconnect()
            _log.info("wake-ups of PostgreSQL at %s: connected again", self.address)
            self._call(self._on_gap)

    async def _reconnect(self) -> Any:
        pause = _FIRST_PAUSE
        while True:
            await asyncio.sleep(random.uniform(pause / 2, pause))
            try:
                return await self._connect()
            except self._errors as error:
                _log.debug("PostgreSQL at %s does not answer: %s", self.address, error)
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _disconnect(self, connection: Any) -> None:
        try:
            async with asyncio.timeout(1):
                await self._send_waiting(connection)
                await connection.close()
        except self._errors as error:
            _log.debug("PostgreSQL at %s: the last wake-ups were not sent: %s", self.address, error)

    # Sending

    async def _send_forever(self, connection: Any) -> None:
        """Sends hints while the connection lives: those that arrive during a notification share the next one."""
        connection.add_termination_listener(self._on_connection_end)
        while not connection.is_closed():
            self._wake.clear()
            await self._send_waiting(connection)
            try:
                async with asyncio.timeout(_CHECK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                async with self._statement_lock:
                    await connection.execute("SELECT 1")  # Detects a connection that broke silently.
        raise ConnectionResetError("the connection was closed")

    def _on_connection_end(self, connection: Any) -> None:
        self._wake.set()

    async def _send_waiting(self, connection: Any) -> None:
        has_gap, hints = self._has_gap, list(self._waiting_hints)
        payloads = self._pack(hints)
        if has_gap or payloads is None:
            payloads = [self._payload([])]
        if not payloads:
            return
        self._has_gap = False
        self._waiting_hints.clear()
        try:
            async with self._statement_lock:
                await connection.execute(
                    "SELECT pg_notify($1, payload) FROM unnest($2::text[]) AS payload", self._channel, payloads
                )
        except BaseException:
            # Perhaps not sent: they are sent again. A hint that arrives twice does no harm.
            self._has_gap = self._has_gap or has_gap
            self._waiting_hints = dict.fromkeys(hints) | self._waiting_hints
            self._wake.set()
            raise

    def _pack(self, hints: Sequence[str]) -> list[str] | None:
        """The hints in as few payloads as possible; None if one of them is too long for any."""
        payloads: list[str] = []
        payload_hints: list[str] = []
        empty_size = size = len(self._payload([]))
        for hint in hints:
            hint_size = len(json_text.encode_bytes(hint)) + 1
            if empty_size + hint_size > _MAX_PAYLOAD:
                return None
            if size + hint_size > _MAX_PAYLOAD:
                payloads.append(self._payload(payload_hints))
                payload_hints, size = [], empty_size
            payload_hints.append(hint)
            size += hint_size
        if payload_hints:
            payloads.append(self._payload(payload_hints))
        return payloads

    def _payload(self, hints: Sequence[str]) -> str:
        return json_text.encode([self._node, *hints])

    # Receiving

    def _receive(self, connection: Any, pid: int, channel: str, payload: str) -> None:
        try:
            node, *hints = json_text.decode(payload)
        except (ValueError, TypeError):
            _log.warning("channel %s of PostgreSQL at %s: ignored an unknown payload", channel, self.address)
            return
        if node != self._node and hints:
            self._call(self._on_hints, hints)
        elif node != self._node:
            self._call(self._on_gap)

    def _call(self, listener: Callable[..., None], *arguments: Any) -> None:
        try:
            listener(*arguments)
        except Exception:
            _log.exception("handling wake-ups failed")


def _lock_key(process_id: str) -> int:
    return zlib.crc32(process_id.encode())


def _ignore(*_: object) -> None: ...
