"""The stage `queue` and the queues behind it: how many calls run at once, start per time window, and may wait.

Waiting calls of higher priority go first; among equals first in, first out. A call that is cancelled while it waits
leaves its queue at once. Runs use a queue for their own limit of concurrent calls. Queues know nothing of tools.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec

from toolspace.core.result import ToolResult
from toolspace.core.times import format_milliseconds
from toolspace.errors import ToolLimitError
from toolspace.orchestrator.call import Call, is_running_loop

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext


SlotFuture = asyncio.Future[bool]
"""What a call waits for: done when it has a slot. The result says whether a parent call lends it."""
_MAX_ENDED_WAITERS = 64
"""How many ended calls a queue may keep, beyond as many as wait."""


def queue(stage: StageContext, next: CallHandler, /) -> CallHandler:
    name = stage.settings.queue.value
    priority = stage.settings.priority.value
    tool_queue = stage.services.queues.get(name) if name is not None else None
    if name is not None and tool_queue is None:
        names = ", ".join(stage.services.queues) or "none are configured"
        return _fail(f'queue "{name}" does not exist ({stage.settings.queue.source}); known queues: {names}')

    async def run(call: Call) -> ToolResult:
        # The queue of the run first: a call that waits for it must not hold a slot that other runs need.
        run_queue = call.run.concurrency_queue if call.run is not None else None
        queues = [queue for queue in (run_queue, tool_queue) if queue is not None]
        if not queues:
            return await next(call)
        slots: list[QueueSlot] = []
        try:
            wait_start = time.perf_counter()
            try:
                for queue in queues:
                    inherited_slot = _ancestor_slot(call, queue)
                    slot = queue.try_acquire() if inherited_slot is None else None
                    if slot is None:
                        call.prepare_to_wait()
                        principal = call.base_context.limited_principal
                        waiting_slot = queue.acquire(inherited_slot, priority=priority, principal=principal)
                        slot = await call.within_deadline(waiting_slot)
                    slots.append(slot)
                    if call.slots is None:
                        call.slots = {}
                    call.slots[queue] = slot
            finally:
                call.queue_wait = time.perf_counter() - wait_start
            return await next(call)
        except ToolLimitError as error:
            return call.fail("limit_exceeded", str(error))
        finally:
            for slot in reversed(slots):
                slot.release()

    return run if tool_queue is not None or stage.in_run else next


def _ancestor_slot(call: Call, queue: CallQueue) -> QueueSlot | None:
    """Returns the slot of this queue that the nearest ancestor of the call has, or None."""
    ancestor = call.parent
    while ancestor is not None:
        if ancestor.slots is not None and (slot := ancestor.slots.get(queue)) is not None:
            return slot
        ancestor = ancestor.parent
    return None


def _fail(reason: str) -> CallHandler:
    async def run(call: Call) -> ToolResult:
        return call.fail("execution_error", reason, executed=False)

    return run


class RateLimit(msgspec.Struct, frozen=True):
    """At most `count` starts in any `window` seconds."""

    count: int
    window: float


class QueueSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The limits of one queue. Durations are seconds."""

    concurrent: int = 1
    rate: RateLimit | None = None
    max_waiting: int | None = None
    wait_timeout: float | None = None


class QueueSlot:
    """A slot of a queue, which one call has. The call can lend it to one child call at a time.

    Lending prevents deadlocks: a call never waits for a slot that its own ancestors have. Children that run side by
    side use the lent slot and free slots of the queue, so the limit holds for them too.
    """

    __slots__ = ("_is_released", "_lender", "_queue", "_waiters", "is_lent")

    def __init__(self, queue: CallQueue, lender: QueueSlot | None) -> None:
        self._queue = queue
        self._lender = lender
        self._is_released = False
        self._waiters: deque[SlotFuture] = deque()
        self.is_lent = False

    @property
    def is_open(self) -> bool:
        """Whether its call is still running, so that a child may borrow the slot."""
        return not self._is_released

    async def borrow(self, priority: int = 0) -> QueueSlot:
        """Returns a slot for a child: this one when it is not lent, or a free one of the queue if that comes first."""
        if not self.is_lent:
            self.is_lent = True
            return QueueSlot(self._queue, self)
        # A start that the rate limit has counted already must not take a free slot, which would count it again.
        can_use_queue = self._queue.spec.rate is None
        if can_use_queue and (slot := self._queue.try_acquire()) is not None:
            return slot
        waiter: SlotFuture = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        if can_use_queue:
            self._queue.add_waiter(waiter, priority)
        try:
            is_lent_slot = await waiter
        except asyncio.CancelledError:
            if waiter.cancel() or waiter.cancelled():
                self._queue.waiting_count -= can_use_queue
            elif waiter.result():
                self._queue.waiting_count -= can_use_queue
                self._child_released()  # The call got the slot and was cancelled in the same moment: pass it on.
            else:
                self._queue.release_slot()
            raise
        if not is_lent_slot:
            return QueueSlot(self._queue, None)
        self._queue.waiting_count -= can_use_queue
        return QueueSlot(self._queue, self)

    def release(self) -> None:
        if self._is_released:
            return
        self._is_released = True
        if not self.is_lent:
            self._return_slot()

    def _child_released(self) -> None:
        """Passes the slot to the next child that waits, or takes it back."""
        self.is_lent = False
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self.is_lent = True
                waiter.set_result(True)
                return
        if self._is_released:
            self._return_slot()

    def _return_slot(self) -> None:
        if self._lender is not None:
            self._lender._child_released()
        else:
            self._queue.release_slot()


class CallQueue:
    """One queue of this process."""

    def __init__(self, name: str, spec: QueueSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.spec = spec
        self.active = 0
        self.waiting_count = 0
        """How many calls wait for a slot."""
        self._clock = clock
        self._waiters: list[tuple[int, int, SlotFuture]] = []
        """A heap: the negative priority, the order of arrival, and what the call waits for."""
        self._waiting_by_principal: Counter[str] = Counter()
        """Waiting calls of principals that have a share; counted if `max_waiting` is set."""
        self._arrivals = itertools.count()
        self._start_times: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def try_acquire(self) -> QueueSlot | None:
        """Returns a slot if one is free and no call waits for it; else None."""
        if self.active < self.spec.concurrent and not self._waiters and self._rate_delay() <= 0:
            self._occupy()
            return QueueSlot(self, None)
        return None

    async def acquire(
        self, inherited_slot: QueueSlot | None = None, *, priority: int = 0, principal: str | None = None
    ) -> QueueSlot:
        """Waits for a slot and returns it. `inherited_slot` is the slot in this queue of an ancestor of the call.

        `principal`: who may use only a share of the places for waiting calls.
        """
        if inherited_slot is not None and inherited_slot.is_open:
            await self._wait_for_rate()
            return await inherited_slot.borrow(priority)
        slot = self.try_acquire()
        if slot is not None:
            return slot
        if principal is None or self.spec.max_waiting is None:
            await self._wait(priority)
        else:
            self._check_share(principal, self.spec.max_waiting)
            self._waiting_by_principal[principal] += 1
            try:
                await self._wait(priority)
            finally:
                self._waiting_by_principal[principal] -= 1
                if not self._waiting_by_principal[principal]:
                    del self._waiting_by_principal[principal]
        return QueueSlot(self, None)

    def _check_share(self, principal: str, max_waiting: int) -> None:
        """Raises if a principal has half of the places already, or if those of all but secret keys are taken."""
        count, limit = self._waiting_by_principal[principal], max(1, max_waiting // 2)
        if count >= limit and max_waiting > 1:
            raise ToolLimitError(
                f'queue "{self.name}": {count} calls of {principal} wait already, '
                f"and one principal may use half of maxWaiting ({max_waiting})"
            )
        if self._waiting_by_principal.total() >= max_waiting - max_waiting // 10:
            raise ToolLimitError(f'queue "{self.name}" is full: its last places are for secret keys (maxWaiting)')

    def release_slot(self) -> None:
        self.active -= 1
        self.admit_waiting()

    async def _wait(self, priority: int) -> None:
        spec = self.spec
        if spec.max_waiting is not None and self.waiting_count >= spec.max_waiting:
            raise ToolLimitError(
                f'queue "{self.name}" is full: {spec.concurrent} running, {spec.max_waiting} waiting (maxWaiting)'
            )
        loop = asyncio.get_running_loop()
        waiter: SlotFuture = loop.create_future()
        self.add_waiter(waiter, priority)
        timer = None
        if spec.wait_timeout is not None:
            timer = loop.call_later(spec.wait_timeout, self._expire, waiter, spec.wait_timeout)
        self.admit_waiting()
        try:
            await waiter
        except asyncio.CancelledError:
            # The exception may have been thrown in without cancelling the waiter: make sure that it gets no slot.
            if waiter.cancel() or waiter.cancelled():
                self.waiting_count -= 1
            elif waiter.exception() is None:
                self.release_slot()  # The call got the slot and was cancelled in the same moment: pass it on.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def add_waiter(self, waiter: SlotFuture, priority: int) -> None:
        """Adds a call that waits. Whoever cancels it, or gives it another slot, subtracts it from `waiting_count`."""
        heapq.heappush(self._waiters, (-priority, next(self._arrivals), waiter))
        self.waiting_count += 1
        if len(self._waiters) > 2 * self.waiting_count + _MAX_ENDED_WAITERS:
            # Calls of low priority that ended while they waited may never get to the front.
            self._waiters = [item for item in self._waiters if not item[2].done()]
            heapq.heapify(self._waiters)

    def _expire(self, waiter: SlotFuture, seconds: float) -> None:
        if not waiter.done():
            self.waiting_count -= 1
            waiter.set_exception(
                ToolLimitError(f'no slot in queue "{self.name}" within {format_milliseconds(seconds)}ms (waitTimeout)')
            )

    def admit_waiting(self) -> None:
        """Gives free slots to calls that wait. Sets a timer if the rate limit delays the next one."""
        while self._waiters and self.active < self.spec.concurrent:
            waiter = self._waiters[0][2]
            if waiter.done():  # Cancelled or expired.
                heapq.heappop(self._waiters)
                continue
            delay = self._rate_delay()
            if delay > 0:
                self._admit_in(delay, waiter.get_loop())
                return
            heapq.heappop(self._waiters)
            self.waiting_count -= 1
            self._occupy()
            if is_running_loop(waiter.get_loop()):
                waiter.set_result(False)
            else:
                waiter.get_loop().call_soon_threadsafe(self._admit, waiter)

    def _admit(self, waiter: SlotFuture) -> None:
        if waiter.done():
            # It was cancelled or got another slot in the meantime, which subtracted it from `waiting_count` again.
            self.waiting_count += 1
            self.release_slot()
        else:
            waiter.set_result(False)

    def _occupy(self) -> None:
        self.active += 1
        if self.spec.rate is not None:
            self._start_times.append(self._clock())

    def _rate_delay(self) -> float:
        rate = self.spec.rate
        if rate is None:
            return 0.0
        now = self._clock()
        while self._start_times and self._start_times[0] <= now - rate.window:
            self._start_times.popleft()
        return self._start_times[0] + rate.window - now if len(self._start_times) >= rate.count else 0.0

    async def _wait_for_rate(self) -> None:
        """Waits for the rate limit. A call with a borrowed slot counts as a start too."""
        if self.spec.rate is None:
            return
        while (delay := self._rate_delay()) > 0:  # noqa: ASYNC110 - it waits for the clock, not for a state
            await asyncio.sleep(delay)
        self._start_times.append(self._clock())

    def _admit_in(self, delay: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(delay, self.admit_waiting)


class QueueRegistry(dict[str, CallQueue]):
    """The queues of a toolspace, by name."""

    def configure(self, specs: Mapping[str, QueueSpec]) -> None:
        """Sets new limits. A queue that exists keeps its slots and its waiting calls."""
        for name, spec in specs.items():
            queue = self.get(name)
            if queue is None:
                self[name] = CallQueue(name, spec)
            elif queue.spec != spec:
                queue.spec = spec
                queue.admit_waiting()
        for name in self.keys() - specs.keys():
            del self[name]
