"""Runs programs, and once they are durable tells everyone concerned what they did. The only way to what is kept."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from toolspace.abc.database import Database, Program, WakeUps, is_large
from toolspace.core.ids import new_id
from toolspace.core.records import NewEvent, StreamEvent
from toolspace.errors import StorageInDoubt
from toolspace.stores.sql import events as event_rows
from toolspace.stores.sql.calls import Moved
from toolspace.streams.hub import Hub
from toolspace.streams.waiters import Waiters

_log = logging.getLogger("toolspace.ledger")
P = ParamSpec("P")
T = TypeVar("T")
_MOST_KNOWN = 4096
"""Open calls that are kept in memory. The results of others read them from the database."""


class Effects:
    """What one attempt at a program did that others must hear of. Filled by the program, told after the commit."""

    __slots__ = ("begun", "calls", "events", "inbox", "keys", "known", "new", "offers", "pushed", "resolved", "stops")

    def __init__(self, known: Mapping[str, Moved]) -> None:
        self.known = known
        """Open calls as they were begun: what is done on the strength of it goes to `resolved`, which compares them
        with their rows."""
        self.resolved: list[Sequence[Any]] = []
        """Calls of those that have their results, at the end of the transaction."""
        self.begun: Moved | None = None
        """A call that was begun, to be known from now on."""
        self.pushed: list[Sequence[Any]] = []
        """What goes to inboxes, at the end of the transaction."""
        self.new: dict[str, list[NewEvent]] = {}
        """Events for streams, to be stored at the end of the transaction."""
        self.events: list[StreamEvent] = []
        self.calls: dict[str, Any] = {}
        """Calls that moved, by id, with what they became."""
        self.inbox: set[str] = set()
        """Agents that have something new to look at."""
        self.offers: set[str] = set()
        """Tools that have a call for a worker."""
        self.keys: set[str] = set()
        """Anything else that someone may wait for, by the key under which they do: `run:ID`."""
        self.stops: set[str] = set()
        """Calls that run in some process and are to stop there."""

    def emit(self, stream: str, event: NewEvent) -> None:
        """Appends an event to a stream, at the end of the transaction."""
        self.new.setdefault(stream, []).append(event)


class Ledger:
    """What is kept, and who hears of changes to it: here at once, in other processes through wake-ups."""

    def __init__(self, database: Database, wakeups: WakeUps | None = None) -> None:
        self.database = database
        self.node_id = new_id("node")
        """This process, for as long as it lives."""
        self.appended = 0
        """Events that were stored by this process."""
        self.known: dict[str, Moved] = {}
        """Open calls that were begun here lately: their results come soon, and need not read them again."""
        self.waiters = Waiters()
        self.hub = Hub(self._load, self._bounds)
        self.on_stop: Callable[[str], object] = _nothing
        """Stops a call that runs in this process, if it does."""
        self._wakeups = wakeups
        if wakeups is not None:
            wakeups.listen(self._heard, self._look_again)

    async def read(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that only reads."""
        return await self.database.read(lambda: program(*args, **kwargs))

    async def write(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that nobody needs to hear of."""
        return await self.database.run(lambda: program(*args, **kwargs), aside=is_large(program))

    async def commit(
        self, program: Callable[Concatenate[Effects, P], Program[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a program, and tells of its effects once they are durable."""
        effects, known = _NO_EFFECTS, self.known

        def attempt() -> Program[T]:
            nonlocal effects, known
            effects, known = Effects(known), _NOTHING_KNOWN  # Should there be another, it looks for itself.
            return program(effects, *args, **kwargs)

        # Told by the database, not here: what is durable must be heard of even if whoever asked was canceled.
        try:
            return await self.database.run(
                attempt, then=lambda _: self._tell(effects), tail=lambda: effects, aside=is_large(program)
            )
        except StorageInDoubt:
            self._have_a_look(effects)
            raise

    async def aclose(self) -> None:
        await self.hub.aclose()
        if self._wakeups is not None:
            await self._wakeups.aclose()
        await self.database.aclose()

    def _tell(self, effects: Effects) -> None:
        if effects.events:
            self.appended += len(effects.events)
            self.hub.publish(effects.events)
        if effects.begun is not None:
            self._know(effects.begun)
        wake = self.waiters.wake
        for call_id, moved in effects.calls.items():
            self.known.pop(call_id, None)
            wake(f"call:{call_id}", moved)
        for agent in effects.inbox:
            wake(f"inbox:{agent}")
        for tool in effects.offers:
            wake(f"offers:{tool}")
        for key in effects.keys:
            wake(key)
        for call_id in effects.stops:
            self.on_stop(call_id)
        if self._wakeups is not None:
            self._wakeups.send(_hints(effects))

    def _know(self, begun: Moved) -> None:
        if len(self.known) >= _MOST_KNOWN:
            del self.known[next(iter(self.known))]  # The oldest.
        self.known[begun.call.call_id] = begun

    def _have_a_look(self, effects: Effects) -> None:
        """Nobody knows whether it happened: everyone concerned looks, here and elsewhere, as if others had done it."""
        hints = _hints(effects)
        self._heard(hints)
        if self._wakeups is not None:
            self._wakeups.send(hints)

    def _heard(self, hints: Sequence[str]) -> None:
        for hint in hints:
            kind, _, rest = hint.partition(" ")
            if kind == "e":
                number, _, stream = rest.partition(" ")
                self.hub.heard(stream, int(number))
            elif kind == "k":
                self.waiters.wake(rest)
            elif kind == "s":
                self.on_stop(rest)
            elif kind in _KEYS:
                self.waiters.wake(f"{_KEYS[kind]}:{rest}")
            else:
                _log.debug("a hint that this version does not know: %s", hint)

    def _look_again(self) -> None:
        self.hub.resync()
        self.waiters.wake_all()

    async def _load(self, stream: str, after: int, limit: int) -> list[StreamEvent]:
        return await self.read(event_rows.after, stream, after, limit)

    async def _bounds(self, stream: str) -> tuple[int, int]:
        return await self.read(event_rows.bounds, stream)


def _hints(effects: Effects) -> tuple[str, ...]:
    """What to look at again, by id."""
    last = {event.stream: event.id for event in effects.events}  # The highest of each: they are in order.
    return (
        *(f"e {number} {stream}" for stream, number in last.items()),
        *(f"c {call_id}" for call_id in effects.calls),
        *(f"i {agent}" for agent in effects.inbox),
        *(f"o {tool}" for tool in effects.offers),
        *(f"k {key}" for key in effects.keys),
        *(f"s {call_id}" for call_id in effects.stops),
    )


_NOTHING_KNOWN: dict[str, Moved] = {}
_NO_EFFECTS = Effects(_NOTHING_KNOWN)
"""Of a program that was not begun."""


def _nothing(_: str) -> None: ...


_KEYS = {"c": "call", "i": "inbox", "o": "offers"}
