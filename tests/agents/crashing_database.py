"""A database of a process that dies, in the middle of the test's own process: from then on it writes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from toolspace.errors import StorageUnavailable
from toolspace.storage.database import Database, DeferredT, DeferredWrites, Program, StaleError
from toolspace.storage.queries import deferred_writes

T = TypeVar("T")


class Mortal(Database):
    """Another database, until it dies: at once, or with one of its next writes."""

    def __init__(self, within: Database) -> None:
        self._within = within
        self._left: int | None = None
        self._lost = False
        self.is_shared = within.is_shared
        self.dead = asyncio.Event()

    def die(self) -> None:
        self.dead.set()

    def die_at(self, write: int, *, lost: bool) -> None:
        """With this write of those to come. `lost`: it does not happen any more; else nobody is told that it did.

        The sweeper's do not count: they come when they come.
        """
        self._left, self._lost = write, lost

    async def live(self) -> None:
        """Returns where the process lives; else never. For what has effects outside of the database."""
        if self.dead.is_set():
            await asyncio.get_running_loop().create_future()

    async def run(
        self,
        program: Callable[[], Program[T]],
        *,
        on_commit: Callable[[T], None] | None = None,
        deferred: Callable[[], DeferredWrites] | None = None,
        exclusive: bool = False,
    ) -> T:
        self._check()
        if self._left is not None and not _is_sweeping():
            self._left -= 1
            if self._left == 0:
                self.die()
                if not self._lost:
                    await self._within.run(program, deferred=deferred, exclusive=exclusive)
                self._check()

        def tell(value: T) -> None:
            if on_commit is not None and not self.dead.is_set():
                on_commit(value)

        return await self._within.run(program, on_commit=tell, deferred=deferred, exclusive=exclusive)

    async def commit_deferred(
        self, deferred: DeferredT, *, on_commit: Callable[[DeferredT], None], on_doubt: Callable[[DeferredT], None]
    ) -> bool:
        """As a program, so that it may die with it."""

        def left() -> Program[None]:
            yield from deferred_writes.resolve_calls(deferred)

        try:
            await self.run(left, on_commit=lambda _: on_commit(deferred), deferred=lambda: deferred)
        except StaleError:
            return False
        return True

    async def read(self, program: Callable[[], Program[T]]) -> T:
        self._check()
        return await self._within.read(program)

    async def aclose(self) -> None: ...

    def _check(self) -> None:
        if self.dead.is_set():
            raise StorageUnavailable("this process is dead")


def _is_sweeping() -> bool:
    task = asyncio.current_task()
    return task is not None and getattr(task.get_coro(), "__qualname__", "").startswith("Sweeper.")
