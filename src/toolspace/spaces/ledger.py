"""Runs programs, and once they are durable tells everyone concerned what they did. The only way to what is kept."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from toolspace.core.ids import new_id
from toolspace.core.records import NewEvent, StoredEvent
from toolspace.errors import StorageInDoubt
from toolspace.storage.database import Database, Program, WakeUps, is_long_running
from toolspace.storage.queries import events as event_rows
from toolspace.storage.queries.calls import CallTransition
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.waiters import Waiters

_log = logging.getLogger("toolspace.ledger")
P = ParamSpec("P")
T = TypeVar("T")
_MOST_KNOWN = 4096
"""Open calls that are kept in memory. The results of others read them from the database."""


class Effects(msgspec.Struct, eq=False):
    """What one attempt at a program did that others must hear of. Filled by the program, told after the commit."""

    resolved_calls: list[Sequence[Any]] = []
    """Calls that have their results, where nothing had to be read for that: `append` writes it."""
    opened_call: CallTransition | None = None
    """A call that was begun, to be known from now on."""
    inbox_rows: list[Sequence[Any]] = []
    """What goes to inboxes, at the end of the transaction."""
    new_events: dict[str, list[NewEvent]] = {}
    """Events for streams, to be stored at the end of the transaction."""
    stored_events: list[StoredEvent] = []
    changed_calls: dict[str, Any] = {}
    """Calls that moved, by id, with what they became."""
    wake_keys: list[str] = []
    """What someone may wait for, by the key under which they do: `run:ID`, or one of those below."""
    calls_to_stop: list[str] = []
    """Calls that run in some process and are to stop there."""

    def emit(self, stream: str, event: NewEvent) -> None:
        """Appends an event to a stream, at the end of the transaction."""
        self.new_events.setdefault(stream, []).append(event)

    def notify_inbox(self, agent_entity_id: str) -> None:
        """An agent has something new to look at."""
        self.wake_keys.append(f"inbox:{agent_entity_id}")

    def notify_workers(self, *tools: str) -> None:
        """Tools have a call for a worker."""
        self.wake_keys += [f"offers:{tool}" for tool in tools]


class Ledger:
    """What is kept, and who hears of changes to it: here at once, in other processes through wake-ups."""

    def __init__(self, database: Database, wakeups: WakeUps | None = None) -> None:
        self.database = database
        self.node_id = new_id("node")
        """This process, for as long as it lives."""
        self.stored_event_count = 0
        """Events that were stored by this process."""
        self.open_calls: dict[str, CallTransition] = {}
        """Open calls that were begun here lately: their results come soon, and need not read them again."""
        self.waiters = Waiters()
        self.hub = Hub(self._load, self._bounds)
        self.on_stop_call: Callable[[str], object] = _nothing
        """Stops a call that runs in this process, if it does."""
        self._wakeups = wakeups
        if wakeups is not None:
            wakeups.listen(self._heard, self._look_again)

    async def read(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that only reads."""
        return await self.database.read(lambda: program(*args, **kwargs))

    async def write(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that nobody needs to hear of."""
        return await self.database.run(lambda: program(*args, **kwargs), exclusive=is_long_running(program))

    async def commit(
        self, program: Callable[Concatenate[Effects, P], Program[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a program, and tells of its effects once they are durable."""
        effects = _NO_EFFECTS

        def attempt() -> Program[T]:
            nonlocal effects
            effects = Effects()
            return program(effects, *args, **kwargs)

        # Told by the database, not here: what is durable must be heard of even if whoever asked was canceled.
        try:
            return await self.database.run(
                attempt,
                on_commit=lambda _: self._tell(effects),
                deferred=lambda: effects,
                exclusive=is_long_running(program),
            )
        except StorageInDoubt:
            self._have_a_look(effects)
            raise

    def commit_deferred(self, effects: Effects) -> Awaitable[bool]:
        """As `commit`, where nothing has to be read. False where something is not as it was taken to be."""
        return self.database.commit_deferred(effects, on_commit=self._tell, on_doubt=self._have_a_look)

    async def aclose(self) -> None:
        await self.hub.aclose()
        if self._wakeups is not None:
            await self._wakeups.aclose()
        await self.database.aclose()

    def _tell(self, effects: Effects) -> None:
        if effects.stored_events:
            self.stored_event_count += len(effects.stored_events)
            self.hub.publish(effects.stored_events)
        if effects.opened_call is not None:
            self._know(effects.opened_call)
        wake = self.waiters.wake
        for call_id, moved in effects.changed_calls.items():
            self.open_calls.pop(call_id, None)
            wake(f"call:{call_id}", moved)
        for key in effects.wake_keys:
            wake(key)
        for call_id in effects.calls_to_stop:
            self.on_stop_call(call_id)
        if self._wakeups is not None:
            self._wakeups.send(_hints(effects))

    def _know(self, begun: CallTransition) -> None:
        if len(self.open_calls) >= _MOST_KNOWN:
            del self.open_calls[next(iter(self.open_calls))]  # The oldest.
        self.open_calls[begun.call.call_id] = begun

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
                self.hub.notify_appended(stream, int(number))
            elif kind == "k":
                self.waiters.wake(rest)
            elif kind == "s":
                self.on_stop_call(rest)
            elif kind == "c":
                self.waiters.wake(f"call:{rest}")
            else:
                _log.debug("a hint that this version does not know: %s", hint)

    def _look_again(self) -> None:
        self.hub.resync()
        self.waiters.wake_all()

    async def _load(self, stream: str, after: int, limit: int) -> list[StoredEvent]:
        return await self.read(event_rows.list_after, stream, after, limit)

    async def _bounds(self, stream: str) -> tuple[int, int]:
        return await self.read(event_rows.get_bounds, stream)


def _hints(effects: Effects) -> tuple[str, ...]:
    """What to look at again, by id."""
    last = {event.stream: event.id for event in effects.stored_events}  # The highest of each: they are in order.
    return (
        *(f"e {number} {stream}" for stream, number in last.items()),
        *(f"c {call_id}" for call_id in effects.changed_calls),
        *(f"k {key}" for key in dict.fromkeys(effects.wake_keys)),
        *(f"s {call_id}" for call_id in dict.fromkeys(effects.calls_to_stop)),
    )


_NO_EFFECTS = Effects()
"""Of a program that was not begun."""


def _nothing(_: str) -> None: ...
