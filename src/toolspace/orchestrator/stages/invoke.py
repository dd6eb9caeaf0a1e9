"""The stage `invoke`: runs the tool. Python functions are called directly: on the loop, in a thread, or as a stream.

Plain functions run in `WorkerThreads`. `concurrent.futures` is not used for that: it waits for every thread at exit,
so one stuck tool would keep the process alive. Here a thread whose call was given up is counted, and never joined.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import logging
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Literal

from toolspace.core.function_signature import execution_style
from toolspace.core.result import ToolResult
from toolspace.core.tool import FunctionTool
from toolspace.errors import ToolError
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.stages.hooks import prepare_for_hooks
from toolspace.orchestrator.stages.large_results import spill_settings

if TYPE_CHECKING:
    from toolspace.orchestrator.pipeline import CallHandler, StageContext

_IDLE_SECONDS = 10.0
"""How long an idle thread waits for its next job."""
_log = logging.getLogger("toolspace.calls")
_SELF_EXPLANATORY = (ValueError, RuntimeError, OSError)
"""Built-in exceptions whose text is a sentence. For others (`KeyError: 'x'`) the text needs the class name."""
_NOT_FAILURES = (asyncio.CancelledError, KeyboardInterrupt)
"""These end a call from outside. Everything else that a tool raises is a failure of the tool.

`GeneratorExit` is a failure too: a coroutine that the stage `timeout` closes may return a result, which is dropped.
"""

_Body = Callable[[Call], Awaitable[Any]]
"""Runs the tool and returns the value that it returned."""


def invoke(stage: StageContext, next: CallHandler, /) -> CallHandler:
    tool = stage.entry.tool
    if isinstance(tool, FunctionTool):
        signature = tool.signature
        if tool.style == "async" and signature.context_parameter is None and not signature.positional_only:
            return _simple_handler(tool.function)
        return _handler(stage, _function_body(stage, tool))
    if (handler := tool.handler) is not None:
        style = execution_style(handler, tool.name)
        return _handler(
            stage, _python_body(stage, style, lambda call: functools.partial(handler, call.values, call.context))
        )
    execute, name = stage.entry.provider.execute, stage.entry.local_name
    return _handler(stage, lambda call: execute(name, call.values, call.context))


def _handler(stage: StageContext, body: _Body) -> CallHandler:
    """Turns what the body returns or raises into a result."""
    for_model, for_program = (prepare_for_hooks(stage, spill) for spill in spill_settings(stage))

    async def run(call: Call) -> ToolResult:
        call.spill = for_program if call.is_for_program else for_model
        try:
            value = await body(call)
        except _NOT_FAILURES:
            raise
        except BaseException as error:
            return _failure(call, error)
        return call.complete(value)

    return run


def _simple_handler(function: Callable[..., Awaitable[Any]]) -> CallHandler:
    """The same for the most common tool, an async function without context. Faster: see benchmark `call`."""

    async def run(call: Call) -> ToolResult:
        try:
            value = await function(**call.values)
        except _NOT_FAILURES:
            raise
        except BaseException as error:
            return _failure(call, error)
        return call.complete(value)

    return run


def _failure(call: Call, error: BaseException) -> ToolResult:
    if isinstance(error, ToolError):
        return call.fail(error.kind, str(error), executed=error.executed)
    _log.debug("call %s: %s raised", call.id, call.entry.tool.name, exc_info=error)
    result = call.fail("execution_error", explain(error))
    result.extras["exception"] = type(error).__name__
    return result


def explain(error: BaseException) -> str:
    """Returns the message for an exception that a tool raised."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        return name  # Its own `__str__` fails.
    if not text:
        return name
    is_custom = type(error).__module__ != "builtins"
    is_sentence = type(error) is Exception or isinstance(error, _SELF_EXPLANATORY)
    return text if is_custom or is_sentence else f"{name}: {text}"


def _function_body(stage: StageContext, tool: FunctionTool) -> _Body:
    function, signature = tool.function, tool.signature

    def bind(call: Call) -> Callable[[], Any]:
        values = dict(call.values)
        if signature.context_parameter is not None:
            values[signature.context_parameter] = call.context
        positional = [values.pop(name) for name in signature.positional_only if name in values]
        return functools.partial(function, *positional, **values)

    return _python_body(stage, tool.style, bind)


def _python_body(stage: StageContext, style: str, bind: Callable[[Call], Callable[[], Any]]) -> _Body:
    """The body of a Python function, which `bind` gives the arguments of a call."""
    if style == "stream":
        return lambda call: call.collect(bind(call)())
    if style == "sync":
        return _thread_body(stage, bind)
    return lambda call: bind(call)()


def _thread_body(stage: StageContext, bind: Callable[[Call], Callable[[], Any]]) -> _Body:
    threads = stage.services.threads

    async def run(call: Call) -> Any:
        try:
            value = await threads.run(bind(call))
        except asyncio.CancelledError:
            call.is_over = True  # The thread cannot be stopped, but its context says that it should.
            raise
        return await value if inspect.isawaitable(value) else value

    return run


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
        self.abandoned_count = 0
        """How many threads still run a call that was cancelled or timed out."""

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
                self.abandoned_count += 1
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
                    self.abandoned_count -= 1
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
