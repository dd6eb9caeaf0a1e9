"""Runs plain (not async) functions in worker threads. A thread whose call has ended is counted, and never joined.

`concurrent.futures` is not used: it waits for every thread at exit, so one stuck tool would keep the process alive.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Literal

_IDLE_SECONDS = 10.0


class _Job:
    __slots__ = ("context", "function", "future", "is_abandoned", "loop", "state")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.function = function
        self.context = contextvars.copy_context()
        self.state: Literal["waiting", "running", "done"] = "waiting"
        self.is_abandoned = False


class WorkerThreads:
    """Runs functions in at most `limit` threads. Abandoned threads do not count against the limit."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._reset()

    def _reset(self) -> None:
        self._process_id = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job | None]] = []
        """The inboxes of the threads that wait for a job."""
        self._backlog: deque[_Job] = deque()
        self._size = 0
        self.abandoned = 0
        """How many threads still run a call that was canceled or timed out."""

    async def run(self, function: Callable[[], Any]) -> Any:
        """Returns the function's value. If this is cancelled, the thread goes on and its value is discarded."""
        job = _Job(function)
        self._submit(job)
        try:
            return await job.future
        except asyncio.CancelledError:
            self._abandon(job)
            raise

    def close(self) -> None:
        with self._lock:
            for inbox in self._idle:
                inbox.put(None)
            self._size -= len(self._idle)
            self._idle.clear()

    def _submit(self, job: _Job) -> None:
        if self._process_id != os.getpid():
            self._reset()  # A forked process has none of the threads.
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
            elif self._size < self._limit:
                self._start_thread(job)
            else:
                self._backlog.append(job)

    def _start_thread(self, job: _Job) -> None:
        threading.Thread(target=self._work, args=(job,), name="toolspace-worker", daemon=True).start()
        self._size += 1

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.is_abandoned = True
            if job.state == "running":
                self.abandoned += 1
                self._size -= 1
                if self._backlog:
                    self._start_thread(self._backlog.popleft())

    def _work(self, job: _Job | None) -> None:
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        while job is not None:
            self._run(job)
            with self._lock:
                was_running, job.state = job.state == "running", "done"
                if job.is_abandoned and was_running:
                    self.abandoned -= 1
                    return  # Another thread may have taken its place when it was abandoned.
                job = self._backlog.popleft() if self._backlog else None
                if job is None:
                    self._idle.append(inbox)
            if job is None:
                job = self._wait(inbox)

    def _wait(self, inbox: SimpleQueue[_Job | None]) -> _Job | None:
        try:
            return inbox.get(timeout=_IDLE_SECONDS)
        except Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    self._size -= 1
                    return None
            return inbox.get()  # A job arrived in the moment when the wait ended.

    def _run(self, job: _Job) -> None:
        with self._lock:
            if job.is_abandoned:
                return
            job.state = "running"
        error: BaseException | None = None
        value: Any = None
        try:
            value = job.context.run(job.function)
        except (StopIteration, GeneratorExit, KeyboardInterrupt) as exception:
            # A future cannot carry the first, and the others would end more than this call.
            error = RuntimeError(f"the function raised {type(exception).__name__}: {exception}")
        except BaseException as exception:
            error = exception
        with suppress(RuntimeError):  # The loop is closed: nobody waits for the value.
            job.loop.call_soon_threadsafe(_deliver, job.future, value, error)


def _deliver(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
