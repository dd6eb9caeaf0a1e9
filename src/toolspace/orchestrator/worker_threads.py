"""Worker threads for plain functions. A thread that nobody waits for any more is counted, never joined.

By hand because `concurrent.futures` waits for every thread at exit, so one stuck tool would keep the process.
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
    __slots__ = ("abandoned", "context", "function", "future", "loop", "state")

    def __init__(self, function: Callable[[], Any]) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.function = function
        self.context = contextvars.copy_context()
        self.state: Literal["waiting", "running", "done"] = "waiting"
        self.abandoned = False


class WorkerThreads:
    """Runs functions in at most `limit` threads. Abandoned ones do not count against the limit."""

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._backlog: deque[_Job] = deque()
        self._size = 0
        self.abandoned = 0
        """Threads that still run a call that was canceled or timed out."""

    async def run(self, function: Callable[[], Any]) -> Any:
        """The function's value. Cancelling leaves the thread to itself and discards what it returns."""
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
        if self._process != os.getpid():
            self._begin()  # A forked process has none of the threads.
        with self._lock:
            if self._idle:
                self._idle.pop().put(job)
            elif self._size < self._limit:
                self._start(job)
            else:
                self._backlog.append(job)

    def _start(self, job: _Job) -> None:
        threading.Thread(target=self._work, args=(job,), name="toolspace-worker", daemon=True).start()
        self._size += 1

    def _abandon(self, job: _Job) -> None:
        with self._lock:
            job.abandoned = True
            if job.state == "running":
                self.abandoned += 1
                self._size -= 1
                if self._backlog:
                    self._start(self._backlog.popleft())

    def _work(self, job: _Job | None) -> None:
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        while job is not None:
            self._run(job)
            with self._lock:
                was_running, job.state = job.state == "running", "done"
                if job.abandoned and was_running:
                    self.abandoned -= 1
                    return  # Its place was given away when it was abandoned.
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
            return inbox.get()  # A job was put in the moment the wait ended.

    def _run(self, job: _Job) -> None:
        with self._lock:
            if job.abandoned:
                return
            job.state = "running"
        error: BaseException | None = None
        value: Any = None
        try:
            value = job.context.run(job.function)
        except (StopIteration, GeneratorExit, KeyboardInterrupt) as odd:
            # A future cannot carry the first, and the others would end more than this call.
            error = RuntimeError(f"the function raised {type(odd).__name__}: {odd}")
        except BaseException as raised:
            error = raised
        with suppress(RuntimeError):  # The loop is closed: nobody is left to tell.
            job.loop.call_soon_threadsafe(_deliver, job.future, value, error)


def _deliver(future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
