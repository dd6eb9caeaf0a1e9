"""Queues: how many calls run at once, how many start in a time, how many may wait. First come, first served."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

import msgspec

from toolspace.core.times import format_milliseconds
from toolspace.errors import ToolLimitError
from toolspace.orchestrator.call import is_running_loop


class RateLimit(msgspec.Struct, frozen=True):
    """At most `count` starts in any `window` seconds."""

    count: int
    window: float


class QueueSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What configuration says of one queue. Durations are seconds."""

    concurrent: int = 1
    rate: RateLimit | None = None
    max_waiting: int | None = None
    wait_timeout: float | None = None


class QueueSlot:
    """A slot, held by one call; it can be lent to one call inside that call at a time.

    Lending is what keeps a queue from deadlock: a call never waits for a slot that its own ancestors hold. Children
    that run side by side take turns on the lent slot, so the limit holds for them too.
    """

    __slots__ = ("_lender", "_over", "_queue", "_turns", "is_lent")

    def __init__(self, queue: CallQueue, lender: QueueSlot | None) -> None:
        self._queue = queue
        self._lender = lender
        self._over = False
        self._turns: deque[asyncio.Future[None]] = deque()
        self.is_lent = False
        """Whether it is lent out now."""

    @property
    def is_open(self) -> bool:
        """Whether its call still runs, so that a child may borrow."""
        return not self._over

    async def borrow(self) -> QueueSlot:
        """A lease on the same slot for a child, when it is its turn."""
        if self.is_lent:
            turn = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancel() and not turn.cancelled():
                    self._child_released()  # The turn came and the call left in the same moment: pass it on.
                raise
        self.is_lent = True
        return QueueSlot(self._queue, self)

    def release(self) -> None:
        if self._over:
            return
        self._over = True
        if not self.is_lent:
            self._give_back()

    def _child_released(self) -> None:
        """A child is done with the slot: the next child's turn, or the holder's own again."""
        self.is_lent = False
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                self.is_lent = True
                turn.set_result(None)
                return
        if self._over:
            self._give_back()

    def _give_back(self) -> None:
        if self._lender is not None:
            self._lender._child_released()
        else:
            self._queue.release_slot()


class CallQueue:
    """One queue in this process."""

    def __init__(self, name: str, spec: QueueSpec, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.name = name
        self.spec = spec
        self.active = 0
        self.waiting = 0
        """Calls that wait for a slot."""
        self._clock = clock
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._starts: deque[float] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def try_acquire(self) -> QueueSlot | None:
        """A slot at once, where one is free and nobody came before."""
        if self.active < self.spec.concurrent and not self._waiting and self._rate_delay() <= 0:
            self._take()
            return QueueSlot(self, None)
        return None

    async def acquire(self, ancestor: QueueSlot | None = None) -> QueueSlot:
        """A slot, when it is this call's turn. `ancestor` is the slot that a call around this one holds."""
        if ancestor is not None and ancestor.is_open:
            await self._wait_for_rate()
            return await ancestor.borrow()
        lease = self.try_acquire()
        if lease is not None:
            return lease
        await self._wait()
        return QueueSlot(self, None)

    def release_slot(self) -> None:
        """A slot came back."""
        self.active -= 1
        self.admit_waiting()

    async def _wait(self) -> None:
        spec = self.spec
        if spec.max_waiting is not None and self.waiting >= spec.max_waiting:
            raise ToolLimitError(
                f'queue "{self.name}" is full: {spec.concurrent} running, {spec.max_waiting} waiting (maxWaiting)'
            )
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        self._waiting.append(future)
        self.waiting += 1
        timer = None
        if spec.wait_timeout is not None:
            timer = loop.call_later(spec.wait_timeout, self._give_up, future, spec.wait_timeout)
        self.admit_waiting()
        try:
            await future
        except asyncio.CancelledError:
            # Whoever threw this may not have cancelled the future: nobody is to be let in for it any more.
            if future.cancel() or future.cancelled():
                self.waiting -= 1
            elif future.exception() is None:
                self.release_slot()  # The slot came and the call left in the same moment: it is the next one's.
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def _give_up(self, future: asyncio.Future[None], waited: float) -> None:
        if not future.done():
            self.waiting -= 1
            future.set_exception(
                ToolLimitError(f'no slot in queue "{self.name}" within {format_milliseconds(waited)}ms (waitTimeout)')
            )

    def admit_waiting(self) -> None:
        """Lets in whoever may start now; asks to be woken where the rate says later."""
        while self._waiting and self.active < self.spec.concurrent:
            if self._waiting[0].done():  # Canceled, or gave up.
                self._waiting.popleft()
                continue
            delay = self._rate_delay()
            if delay > 0:
                self._wake_in(delay, self._waiting[0].get_loop())
                return
            future = self._waiting.popleft()
            self.waiting -= 1
            self._take()
            if is_running_loop(future.get_loop()):
                future.set_result(None)
            else:
                future.get_loop().call_soon_threadsafe(self._let_in, future)

    def _let_in(self, future: asyncio.Future[None]) -> None:
        if future.done():  # It left while it was being told, and was counted as leaving the others that wait.
            self.waiting += 1
            self.release_slot()
        else:
            future.set_result(None)

    def _take(self) -> None:
        self.active += 1
        if self.spec.rate is not None:
            self._starts.append(self._clock())

    def _rate_delay(self) -> float:
        rate = self.spec.rate
        if rate is None:
            return 0.0
        now = self._clock()
        while self._starts and self._starts[0] <= now - rate.window:
            self._starts.popleft()
        return self._starts[0] + rate.window - now if len(self._starts) >= rate.count else 0.0

    async def _wait_for_rate(self) -> None:
        """A borrowed slot is still a start, and the rate counts starts."""
        if self.spec.rate is None:
            return
        while (delay := self._rate_delay()) > 0:  # noqa: ASYNC110 - it waits for the clock, not for a state
            await asyncio.sleep(delay)
        self._starts.append(self._clock())

    def _wake_in(self, delay: float, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_later(delay, self.admit_waiting)


class QueueRegistry:
    """The queues of a toolspace, by name."""

    def __init__(self, specs: dict[str, QueueSpec] | None = None) -> None:
        self._queues = {name: CallQueue(name, spec) for name, spec in (specs or {}).items()}

    def get(self, name: str) -> CallQueue | None:
        return self._queues.get(name)

    def names(self) -> list[str]:
        return list(self._queues)

    def configure(self, specs: dict[str, QueueSpec]) -> None:
        """Takes new limits over. A queue that stays the same keeps its slots and its waiting calls."""
        for name, spec in specs.items():
            queue = self._queues.get(name)
            if queue is None:
                self._queues[name] = CallQueue(name, spec)
            elif queue.spec != spec:
                queue.spec = spec
                queue.admit_waiting()  # There may be room now for some that wait.
        for name in self._queues.keys() - specs.keys():
            del self._queues[name]
