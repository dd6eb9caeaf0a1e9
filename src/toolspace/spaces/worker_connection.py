"""The line to a connected worker: what it should hear. Decides nothing."""

from __future__ import annotations

import asyncio
from typing import Literal

from toolspace.core.records import CallRecord

Ending = Literal["stopping", "replaced", "forgotten"]
"""Why a line ends: the process stops; the same worker has connected again, here or elsewhere; or others took the
process for dead, and the worker for gone: it has to come again."""
Fate = Literal["answered", "canceled"]
News = tuple[Literal["offered"], CallRecord] | tuple[Fate, str]
"""A call to execute; or that one is answered already, or not wanted any more, by its id."""


class Connection:
    """A worker's line: what it should hear, in order. It holds no more than the calls that the worker may have."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.ended: Ending | None = None
        """Why it was ended from here; None while it is not."""
        self._news: list[News] = []
        self._offered: set[str] = set()
        self._ready = asyncio.Event()

    async def news(self) -> list[News]:
        """Waits for what is new. Nothing where it was poked, or the line was ended."""
        if not self._news and self.ended is None:
            self._ready.clear()
            await self._ready.wait()
        news, self._news = self._news, []
        return news

    def offer(self, call: CallRecord) -> None:
        if call.call_id not in self._offered:
            self._offered.add(call.call_id)
            self._tell(("offered", call))

    def close_call(self, call_id: str, fate: Fate) -> None:
        if call_id in self._offered:
            self._offered.discard(call_id)
            self._tell((fate, call_id))

    def end(self, reason: Ending) -> None:
        self.ended = self.ended or reason
        self.poke()

    def poke(self) -> None:
        """Lets a `news` that waits return."""
        self._ready.set()

    def _tell(self, news: News) -> None:
        self._news.append(news)
        self.poke()
