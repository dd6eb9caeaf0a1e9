"""Limits how many pending calls one principal may have open, so that one key or person cannot fill the gateway.

`pending_calls` uses it. It applies to tool keys and persons, not to secret keys and programs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from toolspace.errors import ToolLimitError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import calls
from toolspace.storage.queries import workers_and_presence as presence

T = TypeVar("T")
_MAX_PRINCIPALS: Final = 10_000
_ALLOWANCE_SECONDS: Final = 1.0
"""How long an allowance holds, if other processes share the database."""


class _Caller:
    """What this process knows about the calls of one principal."""

    __slots__ = ("allowance", "expires_at", "lock", "opening_count")

    def __init__(self) -> None:
        self.allowance = 0
        """How many calls it may open before they are counted again."""
        self.expires_at = 0.0
        """Until when the allowance holds, in seconds of the event loop's clock."""
        self.opening_count = 0
        """Calls that are allowed, but not stored yet."""
        self.lock = asyncio.Lock()
        """Held while its calls are counted."""


class OpenCallLimit:
    """Counts open calls in the database, those of all processes that share it.

    A count allows the process a part of what is left: half of it, divided by the number of processes. So a principal
    that is far from the limit rarely costs a query, and one that is close to it costs one for each call. Processes that
    count at the same moment may exceed the limit by one call each.
    """

    def __init__(self, ledger: Ledger, limit: int | None) -> None:
        self._ledger = ledger
        self._limit = limit
        self._callers: dict[str, _Caller] = {}

    async def open(self, principal: str | None, store: Callable[[], Awaitable[T]]) -> T:
        """Returns what `store` returns, which stores one more call. Raises `ToolLimitError` if there are too many."""
        if self._limit is None or principal is None:
            return await store()
        caller = self._find_caller(principal)
        if not self._has_allowance(caller):
            async with caller.lock:
                if not self._has_allowance(caller):
                    await self._count(principal, caller, self._limit)
        caller.allowance -= 1
        caller.opening_count += 1
        try:
            return await store()
        finally:
            caller.opening_count -= 1

    def _find_caller(self, principal: str) -> _Caller:
        caller = self._callers.get(principal)
        if caller is None:
            if len(self._callers) >= _MAX_PRINCIPALS:
                self._callers = {name: item for name, item in self._callers.items() if item.opening_count}
            caller = self._callers[principal] = _Caller()
        return caller

    def _has_allowance(self, caller: _Caller) -> bool:
        if caller.allowance <= 0:
            return False
        return not self._ledger.database.is_shared or asyncio.get_running_loop().time() < caller.expires_at

    async def _count(self, principal: str, caller: _Caller, limit: int) -> None:
        # Before the read: a call that is stored meanwhile is counted twice rather than never.
        opening_count = caller.opening_count
        stored_count, process_count = await self._ledger.read(_count_calls_and_processes, principal, limit)
        count = stored_count + opening_count
        if count >= limit:
            raise ToolLimitError(
                f"{count} calls of {principal} wait for a result already (server.maxPendingCallsPerCaller); "
                "try again when some have ended",
                executed=False,
            )
        caller.allowance = max(1, (limit - count) // (2 * process_count))
        caller.expires_at = asyncio.get_running_loop().time() + _ALLOWANCE_SECONDS


def _count_calls_and_processes(principal: str, limit: int) -> Program[tuple[int, int]]:
    count = yield from calls.count_open(principal, limit=limit)
    heartbeats = yield from presence.list_heartbeats(except_node="")
    return count, max(1, len(heartbeats))
