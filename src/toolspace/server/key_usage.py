"""What is done with each key: counted as it happens, written down now and then. Decides nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final, Self

from toolspace.core.ids import now_ms
from toolspace.core.result import ToolResult
from toolspace.errors import StorageError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stage import Handler, Plan
from toolspace.server.tool_keys import key_of
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import keys as rows
from toolspace.storage.queries.keys import Use

_log = logging.getLogger("toolspace.access")
_WRITE_SECONDS: Final = 10.0


class Usage:
    """Counts the calls of each key. Give `stage` to the orchestrator; inside `async with` it writes down what it has.

    What was counted since the last time is lost where the process is killed: the calls themselves have rows.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, list[int]] = {}
        self._writing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._writing = asyncio.create_task(self._write_now_and_then())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        await self.write()

    def stage(self, plan: Plan, next: Handler, /) -> Handler:
        counts = self._counts

        def run(call: Call) -> Coroutine[Any, Any, ToolResult]:
            if call.parent is not None or (user := call.base.user_id) is None or (key_id := key_of(user)) is None:
                return next(call)
            return counted(call, key_id)

        async def counted(call: Call, key_id: str) -> ToolResult:
            try:
                result = await next(call)
            except BaseException:
                self._count(key_id, failed=1)
                raise
            if (mine := counts.get(key_id)) is not None and result.ok:
                mine[0] += 1
            else:
                self._count(key_id, failed=not result.ok)
            return result

        return run

    def used(self, key_id: str) -> None:
        """The key was shown just now."""
        self._counts.setdefault(key_id, [0, 0, 0])[2] = now_ms()

    async def write(self) -> None:
        """Writes down what was counted."""
        counted = {key_id: tuple(counts) for key_id, counts in self._counts.items() if any(counts)}
        if not counted:
            return
        now = now_ms()
        try:
            uses = {key_id: Use(calls, failed, at or now) for key_id, (calls, failed, at) in counted.items()}
            await self._ledger.write(rows.note_use, uses)
        except StorageError as error:
            _log.warning("what was done with keys is written down later: %s", error)
            return
        for key_id, written in counted.items():
            counts = self._counts[key_id]
            for place in (0, 1):
                counts[place] -= written[place]
            counts[2] = 0 if counts[2] == written[2] else counts[2]
            if not any(counts):
                del self._counts[key_id]

    def _count(self, key_id: str, *, failed: int) -> None:
        counts = self._counts.setdefault(key_id, [0, 0, 0])
        counts[0] += 1
        counts[1] += failed

    async def _write_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(_WRITE_SECONDS)
            await self.write()
