"""Workers: programs elsewhere that execute external calls. Gives each call to one of them. Knows nothing of HTTP.

One task deals for all workers of this process. It is woken when a tool has a new call, when a call in someone's hands
was answered or canceled, and when workers come and go. Other processes deal to theirs; the database says who got what.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, Self

from toolspace.core.defaults import WORKER_GRACE_SECONDS
from toolspace.core.ids import now_ms
from toolspace.core.records import OPEN_CALL, CallRecord
from toolspace.errors import RefusedError, StorageError
from toolspace.spaces.ledger import Effects, Ledger
from toolspace.storage.database import Program
from toolspace.storage.queries import presence, workers

# MERGED from worker_connection: The line to a connected worker: what it should hear. Decides nothing.

DisconnectReason = Literal["stopping", "replaced", "forgotten"]
"""Why a line ends: the process stops; the same worker has connected again, here or elsewhere; or others took the
process for dead, and the worker for gone: it has to come again."""
WithdrawalReason = Literal["answered", "canceled"]
WorkerEvent = tuple[Literal["offered"], CallRecord] | tuple[WithdrawalReason, str]
"""A call to execute; or that one is answered already, or not wanted any more, by its id."""


class WorkerConnection:
    """A worker's line: what it should hear, in order. It holds no more than the calls that the worker may have."""

    def __init__(self, worker_id: str) -> None:
        self.worker_id = worker_id
        self.disconnect_reason: DisconnectReason | None = None
        """Why it was ended from here; None while it is not."""
        self._news: list[WorkerEvent] = []
        self._offered: set[str] = set()
        self._ready = asyncio.Event()

    async def next_events(self) -> list[WorkerEvent]:
        """Waits for what is new. Nothing where it was poked, or the line was ended."""
        if not self._news and self.disconnect_reason is None:
            self._ready.clear()
            await self._ready.wait()
        news, self._news = self._news, []
        return news

    def offer(self, call: CallRecord) -> None:
        if call.call_id not in self._offered:
            self._offered.add(call.call_id)
            self._tell(("offered", call))

    def withdraw(self, call_id: str, fate: WithdrawalReason) -> None:
        if call_id in self._offered:
            self._offered.discard(call_id)
            self._tell((fate, call_id))

    def disconnect(self, reason: DisconnectReason) -> None:
        self.disconnect_reason = self.disconnect_reason or reason
        self.wake()

    def wake(self) -> None:
        """Lets a `news` that waits return."""
        self._ready.set()

    def _tell(self, news: WorkerEvent) -> None:
        self._news.append(news)
        self.wake()


_log = logging.getLogger("toolspace.workers")
_LOOK_AGAIN_SECONDS = 5.0
"""How often to look without being told: a hint may be lost, a row may have been locked by its caller's time-out."""
_RETRY_SECONDS = 1.0
_FATES_AT_ONCE = 500


class _Worker:
    """A worker of this process, over all of its connections."""

    def __init__(self, worker_id: str) -> None:
        self.id = worker_id
        self.tools: tuple[str, ...] = ()
        self.concurrency = 0
        self.connection: WorkerConnection | None = None
        self.is_known = False
        """Whether the database says that it is connected here."""
        self.held: dict[str, Callable[[], None]] = {}
        """The calls in its hands, each with what ends the listening for it."""
        self.listening: list[Callable[[], None]] = []
        self.turn = 0
        """When it was given something last."""
        self.arriving = asyncio.Lock()

    @property
    def free(self) -> int:
        return self.concurrency - len(self.held) if self.connection is not None and self.is_known else 0

    def forget(self) -> None:
        for stop in (*self.listening, *self.held.values()):
            stop()
        self.listening.clear()
        self.held.clear()


class Workers:
    """The workers that are connected to this process. The dealing starts with the first of them; `aclose` ends it."""

    def __init__(
        self, ledger: Ledger, *, grace: float = WORKER_GRACE_SECONDS, look_again: float = _LOOK_AGAIN_SECONDS
    ) -> None:
        self._ledger = ledger
        self._grace = grace
        self._look_again = look_again
        self._workers: dict[str, _Worker] = {}
        self._left: list[str] = []
        """Those whose connection ended, which the database does not know yet."""
        self._moved: dict[str, str | None] = {}
        """Calls that may not be open any more, with their status where that is known."""
        self._wanted = False
        """Whether there may be calls for those who have room."""
        self._turns = 0
        self._departures: list[float] = []
        """When the grace of someone ends."""
        self._awake = asyncio.Event()
        self._dealing: asyncio.Task[None] | None = None
        self._ended = False

    def __len__(self) -> int:
        return sum(worker.connection is not None for worker in self._workers.values())

    def count_by_tool(self) -> dict[str, int]:
        """How many workers each tool has here."""
        counts: dict[str, int] = {}
        for worker in self._workers.values():
            for tool in worker.tools if worker.connection is not None else ():
                counts[tool] = counts.get(tool, 0) + 1
        return counts

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def disconnect_all(self) -> None:
        """Ends every connection, and takes no new one. The workers keep what they have for as long as the grace, and
        come back elsewhere."""
        self._ended = True
        for worker in self._workers.values():
            if worker.connection is not None:
                worker.connection.disconnect("stopping")

    async def aclose(self) -> None:
        self.disconnect_all()
        if self._dealing is not None:
            self._dealing.cancel()
            await asyncio.gather(self._dealing, return_exceptions=True)
        for worker in self._workers.values():
            worker.forget()
        ids, self._workers = list(self._workers), {}
        if ids:
            with suppress(StorageError):  # Then they are found to be gone with this process.
                await self._ledger.write(_leave, ids, node_id=self._ledger.node_id)

    @asynccontextmanager
    async def connect(self, worker_id: str, tools: Sequence[str], concurrency: int) -> AsyncGenerator[WorkerConnection]:
        """Connects a worker for as long as the block runs. The same worker connected again takes its own place.

        Raises `RefusedError` where nobody is connected any more.
        """
        if self._ended:
            raise RefusedError("unavailable", "the gateway stops; come back in a moment")
        if self._dealing is None:
            self._dealing = asyncio.create_task(self._deal_forever(), name="workers")
        tools = tuple(dict.fromkeys(tools))
        worker = self._workers.setdefault(worker_id, _Worker(worker_id))
        connection = WorkerConnection(worker_id)
        if worker.connection is not None:
            worker.connection.disconnect("replaced")
        worker.connection, worker.is_known = connection, False
        try:
            async with worker.arriving:
                held = await self._ledger.write(workers.register, worker_id, tools, node_id=self._ledger.node_id)
                if worker.connection is connection:
                    worker.tools, worker.concurrency, worker.is_known = tools, concurrency, True
                    self._listen(worker)
                    self._reconcile(worker, held)
            self._look()
            yield connection
        finally:
            if worker.connection is connection:
                worker.connection, worker.is_known = None, False
                self._left.append(worker_id)
                self._awake.set()

    async def retire(self, worker_id: str, finishing: Sequence[str]) -> bool:
        """A worker that is connected anywhere takes no more calls, and finishes the named ones; others get the rest.

        False where no such worker is there.
        """
        return await self._ledger.commit(_retire, worker_id, finishing)

    # What wakes the dealing

    def _listen(self, worker: _Worker) -> None:
        for stop in worker.listening:
            stop()
        listen = self._ledger.waiters.listen
        worker.listening = [listen(f"offers:{tool}", lambda _: self._look()) for tool in worker.tools]

    def _look(self) -> None:
        self._wanted = True
        self._awake.set()

    def _hear(self, call_id: str, call: CallRecord | None) -> None:
        self._moved[call_id] = None if call is None else call.status
        self._awake.set()

    # Dealing

    async def _deal_forever(self) -> None:
        loop = asyncio.get_running_loop()
        next_look = loop.time() + self._look_again
        while True:
            until = min((next_look, *self._departures)) - loop.time()
            if until > 0:
                with suppress(TimeoutError):
                    async with asyncio.timeout(until):
                        await self._awake.wait()
            self._awake.clear()
            try:
                await self._note_departures()
                await self._settle_moved()
                if loop.time() >= next_look:
                    next_look = loop.time() + self._look_again
                    await self._compare()
                await self._deal()
            except StorageError as error:
                _log.warning("workers get no calls for now: %s", error)
                await asyncio.sleep(_RETRY_SECONDS)
                self._look()
            except Exception:
                _log.exception("dealing calls to workers failed; it is tried again")
                await asyncio.sleep(_RETRY_SECONDS)
                self._look()

    async def _note_departures(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._left:
            worker_id = self._left[-1]
            worker = self._workers.get(worker_id)
            if worker is not None:
                async with worker.arriving:
                    if worker.connection is None:
                        await self._ledger.write(presence.mark_left, worker_id, node_id=self._ledger.node_id)
                        # A little later than the grace: rows tell the time in whole milliseconds.
                        self._departures.append(now + self._grace + 0.005)
                    if worker.connection is None:  # It may be coming back just now, and waits for the lock.
                        worker.forget()
                        del self._workers[worker_id]
            self._left.remove(worker_id)
        if any(at <= now for at in self._departures):
            await self._ledger.commit(_depart, before=now_ms() - round(self._grace * 1000))
            self._departures = [at for at in self._departures if at > now]

    async def _settle_moved(self) -> None:
        """Tells workers which calls are no longer theirs to answer."""
        while self._moved:
            moved, self._moved = self._moved, {}
            unknown = [call_id for call_id, status in moved.items() if status is None]
            found: dict[str, workers.ClaimedCallState] = {}
            try:
                for start in range(0, len(unknown), _FATES_AT_ONCE):
                    some = await self._ledger.read(workers.list_call_states, unknown[start : start + _FATES_AT_ONCE])
                    found |= {fate.call_id: fate for fate in some}
            except BaseException:
                self._moved = moved | self._moved
                raise
            for worker in self._workers.values():
                for call_id in worker.held.keys() & moved:
                    fate = found.get(call_id)
                    status = moved[call_id] or (fate.status if fate is not None else None)
                    if status not in OPEN_CALL or (fate is not None and fate.worker_id != worker.id):
                        self._let_go(worker, call_id, "answered" if status == "resolved" else "canceled")

    async def _compare(self) -> None:
        """Holds what is known here against the database."""
        self._wanted = True
        await self._ledger.commit(_depart, before=now_ms() - round(self._grace * 1000))
        here = await self._ledger.read(workers.list_connected, node_id=self._ledger.node_id)
        # Someone whose connection was lost while it was being noted.
        if ghosts := [worker_id for worker_id in here if worker_id not in self._workers]:
            await self._ledger.write(_leave, ghosts, node_id=self._ledger.node_id)
        for worker in tuple(self._workers.values()):
            connection = worker.connection
            if connection is None or not worker.is_known:
                continue
            held = await self._ledger.read(workers.find_claimed_calls, worker.id, node_id=self._ledger.node_id)
            if worker.connection is not connection:
                continue
            if held is None:
                await self._end_line(connection)
                continue
            self._moved |= dict.fromkeys(worker.held.keys() - {call.call_id for call in held})
            self._reconcile(worker, held)
        await self._settle_moved()

    async def _deal(self) -> None:
        while self._wanted:
            self._wanted = False
            ready = sorted(
                (worker for worker in self._workers.values() if worker.free > 0),
                key=lambda worker: (len(worker.held) / worker.concurrency, worker.turn),
            )
            if not ready:
                return
            lines = {worker.id: worker.connection for worker in ready}
            hands = [workers.WorkerCapacity(worker.id, worker.tools, worker.free) for worker in ready]
            try:
                deal = await self._ledger.write(workers.assign_calls, hands, node_id=self._ledger.node_id)
            except BaseException:
                self._wanted = True
                raise
            for worker in ready:
                if (
                    worker.id in deal.disconnected_workers
                    and worker.connection is lines[worker.id]
                    and worker.connection
                ):
                    await self._end_line(worker.connection)
                if given := deal.calls_by_worker.get(worker.id):
                    self._turns += 1
                    worker.turn = self._turns
                    self._reconcile(worker, given)
            self._wanted = self._wanted or deal.has_more

    async def _end_line(self, connection: WorkerConnection) -> None:
        """The database does not say any more that a worker is connected here."""
        taken = await self._ledger.read(
            workers.is_connected_elsewhere, connection.worker_id, node_id=self._ledger.node_id
        )
        connection.disconnect("replaced" if taken else "forgotten")

    def _reconcile(self, worker: _Worker, calls: Iterable[CallRecord]) -> None:
        """These calls are in the worker's hands: it hears of those that its connection did not offer yet."""
        for call in calls:
            if call.call_id not in worker.held:
                worker.held[call.call_id] = self._ledger.waiters.listen(
                    f"call:{call.call_id}", lambda moved, call_id=call.call_id: self._hear(call_id, moved)
                )
                self._hear(call.call_id, None)  # It may have moved between the claim and the listening.
            if worker.connection is not None:
                worker.connection.offer(call)

    def _let_go(self, worker: _Worker, call_id: str, fate: WithdrawalReason) -> None:
        worker.held.pop(call_id)()
        if worker.connection is not None:
            worker.connection.withdraw(call_id, fate)
        self._wanted = True


def _leave(worker_ids: Sequence[str], *, node_id: str) -> Program[None]:
    for worker_id in worker_ids:
        yield from presence.mark_left(worker_id, node_id=node_id)


def _depart(effects: Effects, *, before: int) -> Program[None]:
    effects.notify_workers(*(yield from workers.release_departed(before=before)))


def _retire(effects: Effects, worker_id: str, finishing: Sequence[str]) -> Program[bool]:
    tools: Any = yield from workers.retire(worker_id, finishing)
    effects.notify_workers(*(tools or ()))
    return tools is not None
