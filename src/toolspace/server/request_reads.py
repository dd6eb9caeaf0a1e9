"""Runs the reads of HTTP requests: none takes longer than `server.readTimeout`, and none takes all readers.

Callers without a secret key share a part of the readers of the database, and one of them gets not all of that part. So
operators, agents and other members are answered while somebody asks for something slow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar
from weakref import WeakValueDictionary

from toolspace.server.authorization import Caller, SecretKeyCaller
from toolspace.storage.database import Database, Program

P = ParamSpec("P")
T = TypeVar("T")


class RequestReads:
    """The reads of all HTTP requests of a gateway. `timeout` is in seconds."""

    def __init__(self, database: Database, *, timeout: float) -> None:
        self._database = database
        self._timeout = timeout
        shared_readers = max(1, database.reader_count - 1)
        self._shared_readers = asyncio.Semaphore(shared_readers)
        self._readers_per_caller = max(1, shared_readers - 1)
        self._readers_of_callers: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def read(self, caller: Caller, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that only reads. Raises `ReadTimeout`."""

        def run() -> Program[T]:
            return program(*args, **kwargs)

        if isinstance(caller, SecretKeyCaller):
            return await self._database.read(run, timeout=self._timeout)
        own_readers = self._readers_of_callers.get(caller.subject)
        if own_readers is None:
            own_readers = self._readers_of_callers[caller.subject] = asyncio.Semaphore(self._readers_per_caller)
        async with own_readers, self._shared_readers:
            return await self._database.read(run, timeout=self._timeout)
