"""Limits how many pending calls one principal may have open, so that one key or person cannot fill the gateway.

`pending_calls` uses it. It applies to tool keys and persons, not to secret keys and programs.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from toolspace.errors import ToolLimitError
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import calls

_MAX_PRINCIPALS: Final = 10_000


class OpenCallLimit:
    """Counts the calls that this process opens. Counts those in the database when a principal seems to be at the limit.

    So a call rarely costs a query, and after a restart a principal may have up to twice as many.
    """

    def __init__(self, ledger: Ledger, limit: int | None) -> None:
        self._ledger = ledger
        self._limit = limit
        self._counts: Counter[str] = Counter()
        """At least how many calls of a principal are open, as far as this process knows."""

    async def check(self, principal: str | None) -> None:
        """Counts one more call. Raises `ToolLimitError` if the principal has too many."""
        limit = self._limit
        if limit is None or principal is None:
            return
        if self._counts[principal] >= limit:
            self._counts[principal] = await self._ledger.read(calls.count_open, principal)
            if (count := self._counts[principal]) >= limit:
                raise ToolLimitError(
                    f"{count} calls of {principal} wait for a result already (server.maxPendingCallsPerCaller); "
                    "try again when some have ended",
                    executed=False,
                )
        if len(self._counts) > _MAX_PRINCIPALS:
            self._counts.clear()
        self._counts[principal] += 1
