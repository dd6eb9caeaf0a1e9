"""Workers: remote processes that execute external calls. Gives each call to one of them. Knows nothing of HTTP.

One task assigns calls for all workers of this process. It wakes when a tool has a new call, when a claimed call ended,
and when workers connect or disconnect. Other processes do the same for theirs; the database decides who gets a call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Literal, Self

from toolspace.core.defaults import WORKER_GRACE_SECONDS
from toolspace.core.stored_records import OPEN_CALL, CallRecord
from toolspace.errors import RefusedError, StorageError
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.workers")
_COMPARE_SECONDS: Final = 5.0
"""How often to compare with the database without being woken: a hint may be lost, a row may have been locked."""
_RETRY_SECONDS: Final = 1.0
_STATES_AT_ONCE: Final = 500

DisconnectReason = Literal["stopping", "replaced", "forgotten"]
"""`stopping`: the process stops. `replaced`: the worker has connected again, here or elsewhere. `forgotten`: other
processes declared this one dead, and the worker disconnected; it has to connect again."""
WithdrawalReason = Literal["answered", "canceled"]
WorkerEvent = tuple[Literal["offered"], CallRecord] | tuple[WithdrawalReason, str]
"""A call to execute; or the id of a call that is resolved already, or cancelled."""


class WorkerConnection:
    """The events for a connected worker, in order. They are bounded by the calls that the worker may have."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.disconnect_reason: DisconnectReason | None = None
        """Why this side ended the connection; None while it has not."""
        self._events: list[WorkerEvent] = []
        self._offered_ids: set[str] = set()
        self._ready = asyncio.Event()

    async def next_events(self) -> list[WorkerEvent]:
        """Waits for events. Empty if it was woken, or if this side ended the connection."""
        if not self._events and self.disconnect_reason is None:
            self._ready.clear()
            await self._ready.wait()
        events, self._events = self._events, []
        return events

    def offer(self, call: CallRecord) -> None:
        if call.call_id not in self._offered_ids:
            self._offered_ids.add(call.call_id)
            self._add(("offered", call))

    def withdraw(self, call_id: str, reason: WithdrawalReason) -> None:
        if call_id in self._offered_ids:
            self._offered_ids.discard(call_id)
            self._add((reason, call_id))

    def disconnect(self, reason: DisconnectReason) -> None:
        self.disconnect_reason = self.disconnect_reason or reason
        self.wake()

    def wake(self) -> None:
        """Lets a waiting `next_events` return."""
        self._ready.set()

    def _add(self, event: WorkerEvent) -> None:
        self._events.append(event)
        self.wake()


class _Worker:
    """A worker that is connected to this process. A new connection of it replaces the old one."""

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.tools: tuple[str, ...] = ()
        self.concurrency = 0
        self.connection: WorkerConnection | None = None
        self.is_registered = False
        """Whether the database has it as connected to this process."""
        self.claimed_calls: dict[str, Callable[[], None]] = {}
        """The calls that it has claimed, each with the function that stops listening for its end."""
        self.stop_listening: list[Callable[[], None]] = []
        """The functions that stop listening for calls of its tools."""
        self.last_turn = 0
        """The number of the turn (`Workers._turns`) in which it last got a call; not a time."""
        self.lock = asyncio.Lock()

    @property
    def free_slots(self) -> int:
        is_ready = self.connection is not None and self.is_registered
        return self.concurrency - len(self.claimed_calls) if is_ready else 0

    def close(self) -> None:
        for stop in (*self.stop_listening, *self.claimed_calls.values()):
            stop()
        self.stop_listening.clear()
        self.claimed_calls.clear()


class Workers:
    """The workers that are connected to this process. The first one starts the assignment task; `aclose` ends it."""

    def __init__(
        self, ledger: Ledger, *, grace: float = WORKER_GRACE_SECONDS, compare_seconds: float = _COMPARE_SECONDS
    ) -> None:
        self._ledger = ledger
        self._node_id = ledger.node_id
        self._grace = grace
        self._compare_seconds = compare_seconds
        self._workers: dict[str, _Worker] = {}
        self._disconnected_ids: list[str] = []
        """Workers whose connection ended, which is not stored yet."""
        self._changed_calls: dict[str, str | None] = {}
        """Claimed calls that may have ended, with their status if it is known."""
        self._may_have_calls = False
        """Whether there may be calls for workers with free slots."""
        self._turns = 0
        self._grace_ends: list[float] = []
        """When the grace of disconnected workers ends."""
        self._awake = asyncio.Event()
        self._assignment_task: asyncio.Task[None] | None = None
        self._is_stopping = False

    def count_by_tool(self) -> dict[str, int]:
        """How many workers of this process serve each tool."""
        connected_workers = (worker for worker in self._workers.values() if worker.connection is not None)
        return Counter(tool for worker in connected_workers for tool in worker.tools)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def disconnect_all(self) -> None:
        """Ends every connection, and accepts no new one. During the grace the workers keep their calls."""
        self._is_stopping = True
        for worker in self._workers.values():
            if worker.connection is not None:
                worker.connection.disconnect("stopping")

    async def aclose(self) -> None:
        self.disconnect_all()
        if self._assignment_task is not None:
            self._assignment_task.cancel()
            await asyncio.gather(self._assignment_task, return_exceptions=True)
        for worker in self._workers.values():
            worker.close()
        worker_ids, self._workers = list(self._workers), {}
        if worker_ids:
            with suppress(StorageError):  # Then other processes notice that this one is gone, and its workers.
                await self._ledger.write(_mark_left, worker_ids, node_id=self._node_id)

    @asynccontextmanager
    async def connect(self, worker_id: str, tools: Sequence[str], concurrency: int) -> AsyncGenerator[WorkerConnection]:
        """Connects a worker while the block runs. A worker that connects again replaces its earlier connection.

        Raises `RefusedError` if the gateway is stopping.
        """
        if self._is_stopping:
            raise RefusedError("unavailable", "the gateway is stopping; retry in a moment")
        if self._assignment_task is None:
            self._assignment_task = asyncio.create_task(self._assign_forever(), name="workers")
        tools = tuple(dict.fromkeys(tools))
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        connection = WorkerConnection(worker_id)
        if worker.connection is not None:
            worker.connection.disconnect("replaced")
        worker.connection, worker.is_registered = connection, False
        try:
            async with worker.lock:
                calls = await self._ledger.write(presence.register_worker, worker_id, tools, node_id=self._node_id)
                if worker.connection is connection:
                    worker.tools, worker.concurrency, worker.is_registered = tools, concurrency, True
                    self._listen_for_calls(worker)
                    self._add_claimed(worker, calls)
            self._wake_for_calls()
            yield connection
        finally:
            if worker.connection is connection:
                worker.connection, worker.is_registered = None, False
                self._disconnected_ids.append(worker_id)
                self._awake.set()

    async def retire(self, worker_id: str, call_ids: Sequence[str]) -> bool:
        """A worker of any process takes no more calls, and finishes the named ones; others get the rest.

        False if there is no such worker.
        """
        return await self._ledger.commit(_retire, worker_id, call_ids)

    # What wakes the assignment task

    def _listen_for_calls(self, worker: _Worker) -> None:
        for stop in worker.stop_listening:
            stop()
        listen = self._ledger.waiters.listen
        worker.stop_listening = [listen(f"offers:{tool}", lambda _: self._wake_for_calls()) for tool in worker.tools]

    def _wake_for_calls(self) -> None:
        self._may_have_calls = True
        self._awake.set()

    def _note_change(self, call_id: str, call: CallRecord | None) -> None:
        self._changed_calls[call_id] = None if call is None else call.status
        self._awake.set()

    # Assigning calls

    async def _assign_forever(self) -> None:
        loop = asyncio.get_running_loop()
        next_comparison = loop.time() + self._compare_seconds
        while True:
            seconds = min((next_comparison, *self._grace_ends)) - loop.time()
            if seconds > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await self._awake.wait()
            self._awake.clear()
            try:
                await self._store_disconnections()
                await self._withdraw_ended_calls()
                if loop.time() >= next_comparison:
                    next_comparison = loop.time() + self._compare_seconds
                    await self._compare_with_database()
                await self._assign()
            except Exception as error:
                if isinstance(error, StorageError):
                    _log.warning("assigning calls to workers failed, retrying in %s s: %s", _RETRY_SECONDS, error)
                else:
                    _log.exception("assigning calls to workers failed, retrying in %s s", _RETRY_SECONDS)
                await asyncio.sleep(_RETRY_SECONDS)
                self._wake_for_calls()

    async def _store_disconnections(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._disconnected_ids:
            worker_id = self._disconnected_ids[-1]
            worker = self._workers.get(worker_id)
            if worker is not None:
                async with worker.lock:
                    if worker.connection is None:
                        await self._ledger.write(presence.mark_left, worker_id, node_id=self._node_id)
                        # A little later than the grace: rows have the time in whole milliseconds.
                        self._grace_ends.append(now + self._grace + 0.005)
                    if worker.connection is None:  # Read again: it may be connecting, and wait for the lock.
                        worker.close()
                        del self._workers[worker_id]
            self._disconnected_ids.remove(worker_id)
        if any(at <= now for at in self._grace_ends):
            await self._ledger.commit(release_departed, grace=self._grace)
            self._grace_ends = [at for at in self._grace_ends if at > now]

    async def _withdraw_ended_calls(self) -> None:
        """Tells workers which of their calls have ended, or were released."""
        while self._changed_calls:
            statuses, self._changed_calls = self._changed_calls, {}
            unknown_ids = [call_id for call_id, status in statuses.items() if status is None]
            states: dict[str, presence.ClaimedCallState] = {}
            try:
                for start in range(0, len(unknown_ids), _STATES_AT_ONCE):
                    chunk = unknown_ids[start : start + _STATES_AT_ONCE]
                    rows = await self._ledger.read(presence.list_call_states, chunk)
                    states |= {state.call_id: state for state in rows}
            except BaseException:
                self._changed_calls = statuses | self._changed_calls
                raise
            for worker in self._workers.values():
                for call_id in worker.claimed_calls.keys() & statuses:
                    state = states.get(call_id)
                    status = statuses[call_id] or (state.status if state is not None else None)
                    if status not in OPEN_CALL or (state is not None and state.worker_id != worker.id):
                        self._withdraw(worker, call_id, "answered" if status == "resolved" else "canceled")

    async def _compare_with_database(self) -> None:
        """Corrects what this process missed."""
        self._may_have_calls = True
        await self._ledger.commit(release_departed, grace=self._grace)
        stored_ids = await self._ledger.read(presence.list_connected, node_id=self._node_id)
        # Workers whose connection was lost while it was being stored.
        if lost_ids := [worker_id for worker_id in stored_ids if worker_id not in self._workers]:
            await self._ledger.write(_mark_left, lost_ids, node_id=self._node_id)
        for worker in tuple(self._workers.values()):
            connection = worker.connection
            if connection is None or not worker.is_registered:
                continue
            calls = await self._ledger.read(presence.find_claimed_calls, worker.id, node_id=self._node_id)
            if worker.connection is not connection:
                continue
            if calls is None:
                await self._disconnect(connection)
                continue
            self._changed_calls |= dict.fromkeys(worker.claimed_calls.keys() - {call.call_id for call in calls})
            self._add_claimed(worker, calls)
        await self._withdraw_ended_calls()

    async def _assign(self) -> None:
        while self._may_have_calls:
            self._may_have_calls = False
            ready = sorted(
                (worker for worker in self._workers.values() if worker.free_slots > 0),
                key=lambda worker: (len(worker.claimed_calls) / worker.concurrency, worker.last_turn),
            )
            if not ready:
                return
            connections = {worker.id: worker.connection for worker in ready}
            capacities = [presence.WorkerCapacity(worker.id, worker.tools, worker.free_slots) for worker in ready]
            try:
                assignments = await self._ledger.write(presence.assign_calls, capacities, node_id=self._node_id)
            except BaseException:
                self._may_have_calls = True
                raise
            for worker in ready:
                connection = worker.connection
                is_disconnected = worker.id in assignments.disconnected_workers
                if is_disconnected and connection is not None and connection is connections[worker.id]:
                    await self._disconnect(connection)
                if new_calls := assignments.calls_by_worker.get(worker.id):
                    self._turns += 1
                    worker.last_turn = self._turns
                    self._add_claimed(worker, new_calls)
            self._may_have_calls = self._may_have_calls or assignments.has_more

    async def _disconnect(self, connection: WorkerConnection) -> None:
        """Ends a connection that the database does not have any more."""
        is_elsewhere = await self._ledger.read(
            presence.is_connected_elsewhere, connection.worker_id, node_id=self._node_id
        )
        connection.disconnect("replaced" if is_elsewhere else "forgotten")

    def _add_claimed(self, worker: _Worker, calls: Iterable[CallRecord]) -> None:
        """The worker has claimed these calls: offers those that its connection did not offer yet."""
        for call in calls:
            if call.call_id not in worker.claimed_calls:
                worker.claimed_calls[call.call_id] = self._ledger.waiters.listen(
                    f"call:{call.call_id}", partial(self._note_change, call.call_id)
                )
                self._note_change(call.call_id, None)  # It may have changed between the claim and the listening.
            if worker.connection is not None:
                worker.connection.offer(call)

    def _withdraw(self, worker: _Worker, call_id: str, reason: WithdrawalReason) -> None:
        stop_listening = worker.claimed_calls.pop(call_id)
        stop_listening()
        if worker.connection is not None:
            worker.connection.withdraw(call_id, reason)
        self._may_have_calls = True


def _mark_left(worker_ids: Sequence[str], *, node_id: str) -> Program[None]:
    for worker_id in worker_ids:
        yield from presence.mark_left(worker_id, node_id=node_id)


def release_departed(effects: Effects, *, grace: float) -> Program[None]:
    """Lets others claim the calls of workers that left longer ago than the grace period."""
    now = yield from current_time()
    before = now - round(grace * 1000)
    effects.notify_workers(*(yield from presence.release_departed(before=before)))


def _retire(effects: Effects, worker_id: str, call_ids: Sequence[str]) -> Program[bool]:
    tools: Any = yield from presence.retire(worker_id, call_ids)
    effects.notify_workers(*(tools or ()))
    return tools is not None
