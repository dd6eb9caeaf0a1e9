"""Readers of streams, as places: each knows how far it has read, and waits for more. Knows no HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final, Protocol, Self

from toolspace.core.records import StreamEvent
from toolspace.errors import ToolspaceError
from toolspace.storage.streams.firehose import Everything
from toolspace.storage.streams.ring import Ring, encoded_data

PAGE: Final = 256
"""Events that are read, and handed out, at once."""
_FIRST: Final = 16
"""Stored events that are read before it is known how large they are."""
_BYTES: Final = 64 * 1024
"""Of stored events that are read at once, about: many readers may look back at large ones."""


class TooSlow(ToolspaceError):
    """A reader was still busy with what it got when what comes next was let go."""


class StreamClosed(ToolspaceError):
    """There is nothing more to read: the subscription, or everything, was closed."""


class Topic(Protocol):
    """What a reader needs of the stream that it reads."""

    stream: str
    ring: Ring

    async def load(self, after: int, limit: int) -> list[StreamEvent]: ...

    async def bounds(self) -> tuple[int, int]: ...

    def expect(self, last_id: int) -> None:
        """Says that events up to this id are stored."""
        ...

    def leave(self, subscription: Subscription) -> None: ...


class _Cursor:
    """What readers have in common: they wait, are poked, and close."""

    def __init__(self) -> None:
        self.closed = False
        self._waiting: asyncio.Future[None] | None = None

    def poke(self) -> None:
        """Lets a `next` that waits return, with nothing where nothing happened."""
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    async def _wait(self) -> None:
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    async def next(self) -> list[StreamEvent]:
        raise NotImplementedError

    def close(self) -> None:
        """Ends it; a `next` that waits raises `StreamClosed`."""
        self.closed = True
        self.poke()

    async def __aiter__(self) -> AsyncIterator[list[StreamEvent]]:
        """Batches until it is closed."""
        while True:
            try:
                batch = await self.next()
            except StreamClosed:
                return
            if batch:
                yield batch

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Subscription(_Cursor):
    """One reader of one stream: first what is stored, then what happens, in order, nothing twice."""

    def __init__(self, topic: Topic) -> None:
        super().__init__()
        self._topic = topic
        self.cursor = 0
        """The id of the last event that was handed out."""
        self.reset: int | None = None
        """Where the position that was asked for is not kept: the id of the oldest event that is."""
        self._live = False
        """Whether it reads from the ring: then it must keep up."""
        self._page = _FIRST

    @property
    def stream(self) -> str:
        return self._topic.stream

    async def begin(self, after: int | None) -> None:
        """Finds the place where it begins."""
        ring = self._topic.ring
        if after is None:
            self.cursor, self._live = ring.last, True
            return
        self.cursor = after
        if ring.holds(after) and after <= ring.last:
            return
        oldest, newest = await self._topic.bounds()
        if after > newest or after + 1 < oldest:
            self.cursor, self.reset = oldest - 1, oldest
        self._topic.expect(newest)

    @property
    def ring(self) -> Ring:
        """The recent events, shared by all readers of the stream."""
        return self._topic.ring

    @property
    def lost(self) -> bool:
        """Whether the ring went on without it."""
        return self._live and not self._topic.ring.holds(self.cursor)

    async def ready(self) -> bool:
        """Waits until there is more, and says whether the ring has it; False where it was poked, or must `replay`.

        Raises `TooSlow` where the ring went on while the reader was busy. One that was waiting here all the time, and
        only had no turn, reads what it missed from the store.
        """
        ring = self._topic.ring
        if self.lost:
            raise TooSlow(f"{self.stream}: {ring.first - 1 - self.cursor} events were let go before they were read")
        waited = False
        while not self.closed:
            if not ring.holds(self.cursor):
                self._live = False
                return False
            if self.cursor < ring.last:
                self._live = True
                return True
            if waited:
                return False
            await self._wait()
            waited = True
        raise StreamClosed(f"{self.stream}: closed")

    @property
    def behind(self) -> bool:
        """Whether what comes next is in the store alone."""
        return not self._topic.ring.holds(self.cursor)

    async def replay(self) -> list[StreamEvent]:
        """The next events from the store, some at once."""
        batch = await self._topic.load(self.cursor, self._page)
        if batch:
            size = sum(len(encoded_data(event)) for event in batch)
            # It grows slowly: behind a small one there may be large ones.
            self._page = min(max(_BYTES * len(batch) // size, 1), 2 * self._page, PAGE)
        # Nothing there though the ring begins later: what was between was removed for its age.
        self.cursor = batch[-1].id if batch else max(self.cursor, self._topic.ring.first - 1)
        return batch

    async def next(self) -> list[StreamEvent]:
        """The next events, some at once; waits until there is one. Empty where it was poked. Raises as `ready` does."""
        if await self.ready():
            batch = self.ring.after(self.cursor, PAGE)
            self.cursor = batch[-1].id
            return batch
        return await self.replay() if self.behind else []

    def close(self) -> None:
        super().close()
        self._topic.leave(self)


class Follower(_Cursor):
    """One reader of all streams, from now on. Its events are in the order of their streams."""

    def __init__(self, everything: Everything) -> None:
        super().__init__()
        self._everything = everything
        self.cursor = everything.join(self)

    @property
    def lost(self) -> bool:
        """Whether the ring went on without it."""
        return not self._everything.ring.holds(self.cursor)

    async def next(self) -> list[StreamEvent]:
        """The next events of any stream. Raises `TooSlow` where they were let go before they were read."""
        ring = self._everything.ring
        poked = False
        while not self.closed:
            if not ring.holds(self.cursor):
                raise TooSlow(f"{ring.first - 1 - self.cursor} events were let go before they were read")
            if self.cursor < ring.last:
                batch = ring.after(self.cursor, PAGE)
                self.cursor += len(batch)
                return batch
            if poked:
                return []
            await self._wait()
            poked = True
        raise StreamClosed("closed")

    def close(self) -> None:
        super().close()
        self._everything.leave(self)
