"""The database of a process that dies, within the test's own process: after the crash it writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from toolspace.errors import StorageUnavailable
from toolspace.spaces.repeated_work import TASK_PREFIX
from toolspace.storage.database import Database, DeferredT, DeferredWrites, Program, StaleError
from toolspace.storage.queries import events

T = TypeVar("T")


class CrashingDatabase(Database):
    """Wraps a database until it crashes: at once, or with one of the next writes."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._writes_until_crash: int | None = None
        self._loses_last_write = False
        self.is_shared = database.is_shared
        self.clock = database.clock
        self.has_crashed = asyncio.Event()

    def crash(self) -> None:
        self.has_crashed.set()

    def crash_at_write(self, number: int, *, loses_write: bool) -> None:
        """Crashes with the write of that number from now on. `loses_write`: it is not committed; otherwise it is, but
        its caller does not learn so.

        Writes of the sweeper do not count: their time is random.
        """
        self._writes_until_crash, self._loses_last_write = number, loses_write

    async def check_alive(self) -> None:
        """Returns if the process is alive, and never returns after the crash. For effects outside of the database."""
        if self.has_crashed.is_set():
            await asyncio.get_running_loop().create_future()

    async def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred_writes: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> T:
        self._raise_if_crashed()
        if self._writes_until_crash is not None and not _is_sweeper():
            self._writes_until_crash -= 1
            if self._writes_until_crash == 0:
                self.crash()
                if not self._loses_last_write:
                    await self._database.run(program, deferred_writes=deferred_writes, exclusive=exclusive)
                self._raise_if_crashed()

        def call_on_commit(value: T) -> None:
            if on_commit is not None and not self.has_crashed.is_set():
                on_commit(value)

        return await self._database.run(
            program, on_commit=call_on_commit, deferred_writes=deferred_writes, exclusive=exclusive
        )

    async def commit_deferred(
        self,
        deferred_writes: DeferredT,
        *,
        on_commit: Callable[[DeferredT], None],
        on_doubt: Callable[[DeferredT], None],
    ) -> bool:
        """Runs the writes as a program, so that the process can crash with them."""

        def resolve() -> Program[None]:
            yield from events.resolve_deferred_calls(deferred_writes)

        try:
            await self.run(
                resolve, on_commit=lambda _: on_commit(deferred_writes), deferred_writes=lambda: deferred_writes
            )
        except StaleError:
            return False
        return True

    async def read(self, program: Callable[[], Program[T]], *, timeout: float | None = None) -> T:
        self._raise_if_crashed()
        return await self._database.read(program, timeout=timeout)

    async def aclose(self) -> None: ...

    def _raise_if_crashed(self) -> None:
        if self.has_crashed.is_set():
            raise StorageUnavailable("this process is dead")


def _is_sweeper() -> bool:
    task = asyncio.current_task()
    return task is not None and task.get_name().startswith(TASK_PREFIX)
