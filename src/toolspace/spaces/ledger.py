"""The ledger: runs transactions, and notifies everyone concerned after the commit. Nothing else runs queries."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from toolspace.core.ids import new_id
from toolspace.core.stored_records import NewEvent, StoredEvent
from toolspace.errors import StorageInDoubt
from toolspace.storage.database import ConnectedProcesses, Database, Program, WakeUps, is_long_running
from toolspace.storage.queries import events
from toolspace.storage.queries.calls import CallTransition
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.waiters import Waiters

_log = logging.getLogger("toolspace.ledger")
P = ParamSpec("P")
T = TypeVar("T")
_MAX_OPEN_CALLS = 4096
"""Open calls that are remembered. Before the result of any other call is stored, the call is read."""


class Effects(msgspec.Struct, eq=False):
    """What a transaction changes that others must be notified of. The program fills it anew in each attempt.

    It is also the `DeferredWrites` of the transaction.
    """

    resolved_calls: list[Sequence[Any]] = []
    """The results of remembered calls, for `commit_deferred`."""
    opened_call: CallTransition | None = None
    """A call that was started, to be remembered while it is open."""
    inbox_rows: list[Sequence[Any]] = []
    """Inbox rows to write at the end of the transaction."""
    new_events: dict[str, list[NewEvent]] = {}
    """Events to append at the end of the transaction, by stream."""
    stored_events: list[StoredEvent] = []
    changed_calls: dict[str, Any] = {}
    """Calls whose status changed, by id: the record for a waiting caller, or None if the caller has to read it."""
    wake_keys: list[str] = []
    """Keys of waiters to wake: `run:ID`, `inbox:SESSION`, `offers:TOOL`, `sessions`, `plans`."""
    calls_to_stop: list[str] = []
    """Calls that run in some process and have to be stopped there."""

    def emit(self, stream: str, event: NewEvent) -> None:
        """Appends an event to a stream, at the end of the transaction."""
        self.new_events.setdefault(stream, []).append(event)

    def notify_inbox(self, session_id: str) -> None:
        """A session of an agent has something new in its inbox."""
        self.wake_keys.append(f"inbox:{session_id}")

    def notify_workers(self, *tools: str) -> None:
        """These tools have a call for a worker."""
        self.wake_keys += [f"offers:{tool}" for tool in tools]


class Transactions:
    """Runs programs on a database, and notifies of their effects."""

    def __init__(
        self, database: Database, notify: Callable[[Effects], None], notify_of_doubt: Callable[[Effects], None]
    ) -> None:
        self.database = database
        self._on_commit = notify
        self._on_doubt = notify_of_doubt

    def now_ms(self) -> int:
        """The time of the database, as its records have it."""
        return self.database.clock.now_ms()

    async def read(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that only reads."""
        return await self.database.read(lambda: program(*args, **kwargs))

    async def write(self, program: Callable[P, Program[T]], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs a program that needs no notification."""
        return await self.database.run(lambda: program(*args, **kwargs), exclusive=is_long_running(program))

    async def commit(
        self, program: Callable[Concatenate[Effects, P], Program[T]], /, *args: P.args, **kwargs: P.kwargs
    ) -> T:
        """Runs a program with `Effects` to fill, and notifies of them once they are durable."""
        effects = _NO_EFFECTS

        def attempt() -> Program[T]:
            nonlocal effects
            effects = Effects()
            return program(effects, *args, **kwargs)

        try:
            # The database notifies, not this coroutine: its caller may be cancelled before the commit.
            return await self.database.run(
                attempt,
                on_commit=lambda _: self._on_commit(effects),
                deferred_writes=lambda: effects,
                exclusive=is_long_running(program),
            )
        except StorageInDoubt:
            self._on_doubt(effects)
            raise


class Ledger(Transactions):
    """Transactions with notifications: in this process at once, in other processes through wake-ups."""

    def __init__(self, database: Database, wakeups: WakeUps | None = None) -> None:
        super().__init__(database, self._notify, self._notify_of_doubt)
        self.urgent_access = Transactions(database.urgent_access, self._notify, self._notify_of_doubt)
        """For short transactions that must not wait for others: heartbeats, plans and time-outs."""
        self.node_id = new_id("node")
        """Identifies this process for as long as it lives."""
        self.stored_event_count = 0
        """Events that this process has stored."""
        self.open_calls: dict[str, CallTransition] = {}
        """Open calls that this process started lately: storing their results needs no read."""
        self.waiters = Waiters()
        self.hub = Hub(partial(self.read, events.list_after), partial(self.read, events.get_bounds), now_ms=self.now_ms)
        self.on_stop_call: Callable[[str], object] = lambda _: None
        """Stops a call, if it runs in this process."""
        self._wakeups = wakeups
        if wakeups is not None:
            wakeups.listen(self._handle_hints, self._handle_gap)

    def commit_deferred(self, effects: Effects) -> Awaitable[bool]:
        """As `commit`, for effects that need no program. False if a row is not as remembered: nothing is written then.

        Stores the results of remembered calls: see `call_transactions.resolve_from_memory`.
        """
        return self.database.commit_deferred(effects, on_commit=self._notify, on_doubt=self._notify_of_doubt)

    async def announce(self) -> None:
        """Shows the processes that share the database that this one is connected."""
        if self._wakeups is not None:
            await self._wakeups.announce(self.node_id)

    async def find_connected_processes(self) -> ConnectedProcesses | None:
        """Returns the processes that are connected to the database; None if that is unknown."""
        return await self._wakeups.find_connected() if self._wakeups is not None else None

    async def aclose(self) -> None:
        await self.hub.aclose()
        if self._wakeups is not None:
            await self._wakeups.aclose()
        await self.database.aclose()

    def _notify(self, effects: Effects) -> None:
        if effects.stored_events:
            self.stored_event_count += len(effects.stored_events)
            self.hub.publish(effects.stored_events)
        if effects.opened_call is not None:
            self._remember(effects.opened_call)
        wake = self.waiters.wake
        for call_id, call in effects.changed_calls.items():
            self.open_calls.pop(call_id, None)
            wake(f"call:{call_id}", call)
        for key in effects.wake_keys:
            self._wake(key)
        for call_id in effects.calls_to_stop:
            self.on_stop_call(call_id)
        if self._wakeups is not None:
            self._wakeups.send(_build_hints(effects))

    def _wake(self, key: str) -> None:
        """Wakes the waiters of a key. Those of an agent's inbox get the scope key of the session, if it has one."""
        topic, _, scope_key = key.partition("/")
        self.waiters.wake(topic, scope_key or None)

    def _remember(self, opened_call: CallTransition) -> None:
        if len(self.open_calls) >= _MAX_OPEN_CALLS:
            del self.open_calls[next(iter(self.open_calls))]  # The oldest.
        self.open_calls[opened_call.call.call_id] = opened_call

    def _notify_of_doubt(self, effects: Effects) -> None:
        """Nobody knows whether the commit happened: every waiter, here and in other processes, reads the database."""
        hints = _build_hints(effects)
        self._handle_hints(hints)
        if self._wakeups is not None:
            self._wakeups.send(hints)

    def _handle_hints(self, hints: Sequence[str]) -> None:
        for hint in hints:
            kind, _, rest = hint.partition(" ")
            if kind == "e":
                event_id, _, stream = rest.partition(" ")
                self.hub.notify_appended(stream, int(event_id))
            elif kind == "k":
                self._wake(rest)
            elif kind == "s":
                self.on_stop_call(rest)
            elif kind == "c":
                self.waiters.wake(f"call:{rest}")
            else:
                _log.debug("ignored a wake-up hint of an unknown kind: %s", hint)

    def _handle_gap(self) -> None:
        self.hub.resync()
        self.waiters.wake_all()


def _build_hints(effects: Effects) -> tuple[str, ...]:
    """The ids that other processes have to read again. `e`: events, `c`: a call, `k`: a key, `s`: stop a call."""
    last_ids = {event.stream: event.id for event in effects.stored_events}  # In order, so the last id is the highest.
    return (
        *(f"e {event_id} {stream}" for stream, event_id in last_ids.items()),
        *(f"c {call_id}" for call_id in effects.changed_calls),
        *(f"k {key}" for key in dict.fromkeys(effects.wake_keys)),
        *(f"s {call_id}" for call_id in dict.fromkeys(effects.calls_to_stop)),
    )


_NO_EFFECTS = Effects()
"""The effects of a program that has not started."""
