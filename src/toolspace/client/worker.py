"""`ToolWorker`: executes external calls of a gateway with functions of this program.

The gateway offers calls over an event stream; the worker executes each call once and submits its result.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, Self, TypeVar, cast, overload

from toolspace.client.errors import ApiError, BadRequest, Conflict, GatewayUnreachable, TooLarge, Unprocessable
from toolspace.client.events import EventSubscription, StreamEvent
from toolspace.client.resources import decode_response
from toolspace.client.transport import GatewayCredentials, Transport, api_path, retry_delay, retry_delays
from toolspace.core.ids import new_id
from toolspace.core.stored_records import Record
from toolspace.errors import ToolspaceError

_log = logging.getLogger("toolspace.worker")
F = TypeVar("F", bound=Callable[..., Any])

_MAX_RECONNECT_DELAY: Final = 2.0
"""Shorter than the grace period of the gateway, so that a worker that reconnects keeps its calls."""
_MAX_ENDED_CALLS: Final = 10_000
_LEAVE_SECONDS: Final = 5.0


class OfferedCall(Record, frozen=True):
    """A call that the gateway offers. A handler gets it in a parameter of this type."""

    call_id: str
    tool_name: str
    args: Any = None
    output_schema: Mapping[str, Any] | None = None
    """What the result must match; None: anything."""
    run_id: str | None = None
    space_id: str | None = None
    agent_entity_id: str | None = None
    created_at: int = 0
    expires_at: int | None = None


class ToolWorker:
    """Executes the calls of some tools of a gateway.

    worker = ToolWorker("http://127.0.0.1:8787", secret_key="sk_…")

    @worker.tool("executeRobotAction")
    async def execute(action: str) -> dict:
        return {"done": action}

    worker.run_forever()

    Arguments are passed as keywords. A function that is not async runs in a thread. An exception becomes the error of
    the call. This worker executes a call once, even if it loses the connection, and sends the result until it arrives.
    """

    def __init__(
        self, url: str, *, secret_key: str | None = None, concurrency: int = 4, worker_id: str | None = None
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; a worker needs at least 1")
        self.id = worker_id or new_id("wrk")
        self.concurrency = concurrency
        self.ready = asyncio.Event()
        """Set once the gateway offers calls."""
        self._url = url
        self._credentials = GatewayCredentials(secret_key=secret_key)
        self._handlers: dict[str, _Handler] = {}
        self._jobs: dict[str, _Job] = {}
        self._ended_calls: OrderedDict[str, None] = OrderedDict()
        self._stop_event = asyncio.Event()
        self._run_task: asyncio.Task[None] | None = None

    @overload
    def tool(self, name: F) -> F: ...
    @overload
    def tool(self, name: str | None = None) -> Callable[[F], F]: ...
    def tool(self, name: Any = None) -> Any:
        """Decorates a function that executes the calls of a tool: of the given name, or of the function's name."""
        if callable(name):
            return self.tool()(name)

        def add(function: F) -> F:
            tool = name or function.__name__
            if tool in self._handlers:
                raise ValueError(f'"{tool}" has a handler already; a tool can have only one')
            self._handlers[tool] = _Handler(function)
            return function

        return add

    def run_forever(self) -> None:
        """Runs until Ctrl-C or SIGTERM, then finishes the running calls. A second Ctrl-C ends it at once."""

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            task = asyncio.ensure_future(self.run())

            def stop() -> None:
                if self._stop_event.is_set():
                    task.cancel()
                self._stop_event.set()

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop)
            try:
                await task
            except asyncio.CancelledError:
                if not self._stop_event.is_set():
                    raise

        asyncio.run(serve())

    async def run(self) -> None:
        """Runs until `stop`. Raises `ApiError` if the gateway refuses it, `ToolspaceError` if another has its id."""
        if not self._handlers:
            raise ValueError('this worker has no tools; add one with @worker.tool("name")')
        transport = Transport(self._url, self._credentials)
        threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="worker")
        query = {"tools": sorted(self._handlers), "workerId": self.id, "concurrency": self.concurrency}
        offers = EventSubscription(transport, "/api/tools/stream", query=query, max_delay=_MAX_RECONNECT_DELAY)
        context = _JobContext(transport, threads)
        listen_task = asyncio.ensure_future(self._listen(offers, context))
        stop_task = asyncio.ensure_future(self._stop_event.wait())
        try:
            await asyncio.wait((listen_task, stop_task), return_when=asyncio.FIRST_COMPLETED)
            if listen_task.done():
                await listen_task  # It only ends with an error.
            await self._leave(transport, list(self._jobs))
            while self._jobs:
                await asyncio.wait([job.task for job in self._jobs.values()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks: list[asyncio.Future[Any]] = [listen_task, stop_task, *(job.task for job in self._jobs.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            offers.close()
            threads.shutdown(wait=False, cancel_futures=True)
            await transport.aclose()
            self.ready.clear()

    async def stop(self) -> None:
        """Accepts no more calls. Returns when the results of the running calls are submitted."""
        self._stop_event.set()
        if self._run_task is not None:
            await asyncio.wait((self._run_task,))

    async def __aenter__(self) -> Self:
        """Runs the worker while the block runs."""
        self._run_task = asyncio.ensure_future(self.run())
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            await asyncio.wait((self._run_task, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._run_task.cancel()
            raise
        finally:
            ready.cancel()
        if self._run_task.done():
            await self._run_task
        return self

    async def __aexit__(self, *_: object) -> None:
        task = self._run_task
        assert task is not None
        self._stop_event.set()
        try:
            await task
        finally:
            self._run_task = None

    async def _listen(self, offers: EventSubscription, context: _JobContext) -> None:
        async for event in offers:
            self._handle_event(event, context)

    def _handle_event(self, event: StreamEvent, context: _JobContext) -> None:
        data: dict[str, Any] = event.data or {}
        if event.type == "worker.ready":
            self.ready.set()
        elif event.type == "worker.warning":
            _log.warning("%s", data.get("message"))
        elif event.type == "worker.replaced":
            raise ToolspaceError(f'another worker has connected with the id "{self.id}"; give each its own worker_id')
        elif event.type == "call.offered":
            self._start_job(decode_response(OfferedCall, data), context)
        elif event.type in ("call.canceled", "call.answered"):
            job = self._jobs.get(str(data.get("callId")))
            if job is not None and not job.is_sending:
                job.task.cancel()

    def _start_job(self, call: OfferedCall, context: _JobContext) -> None:
        # After a reconnect the gateway offers again the calls that run here, or whose results it has just received.
        if call.call_id in self._jobs or call.call_id in self._ended_calls or self._stop_event.is_set():
            return
        handler = self._handlers.get(call.tool_name)
        if handler is None:
            _log.warning('the gateway offered a call of "%s", which this worker does not serve', call.tool_name)
            return
        job = self._jobs[call.call_id] = _Job(call, handler, context)
        job.task.add_done_callback(lambda task: self._end_job(call.call_id, task))

    def _end_job(self, call_id: str, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call %s: the worker failed", call_id, exc_info=error)
        del self._jobs[call_id]
        self._ended_calls[call_id] = None
        if len(self._ended_calls) > _MAX_ENDED_CALLS:
            self._ended_calls.popitem(last=False)

    async def _leave(self, transport: Transport, call_ids: list[str]) -> None:
        """Announces the end of this worker, so that the gateway offers its other calls to other workers at once."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                path = api_path("workers", self.id, "leave")
                await transport.request("POST", path, body={"finishing": call_ids}, is_repeatable=True)
        except (ApiError, GatewayUnreachable, TimeoutError) as error:
            _log.debug("the gateway could not be told that this worker is stopping: %s", error)


class _JobContext(NamedTuple):
    """What all jobs share."""

    transport: Transport
    threads: ThreadPoolExecutor


class _Handler:
    """A function that executes calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - a callable object may be async
        )
        self._call_parameter = _call_parameter(function)

    async def execute(self, call: OfferedCall, threads: ThreadPoolExecutor) -> Any:
        args: Any = {} if call.args is None else call.args
        if not isinstance(args, dict):
            raise TypeError(f"the arguments must be an object, got {type(args).__name__}")
        arguments = dict(cast("dict[str, Any]", args))
        if self._call_parameter is not None:
            arguments[self._call_parameter] = call
        if self._is_async:
            return await self._function(**arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(threads, lambda: self._function(**arguments))
        return await result if inspect.isawaitable(result) else result


class _Job:
    """One call, from its offer until the gateway has its result."""

    def __init__(self, call: OfferedCall, handler: _Handler, context: _JobContext) -> None:
        self.is_sending = False
        """Whether the call was executed. Then its result is sent, even if the call is cancelled."""
        self._call = call
        self._handler = handler
        self._context = context
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        call = self._call
        try:
            result, is_error = await self._handler.execute(call, self._context.threads), False
        except asyncio.CancelledError:
            _log.info("call %s of %s: canceled", call.call_id, call.tool_name)
            raise
        except Exception as error:
            _log.warning("call %s of %s: failed", call.call_id, call.tool_name, exc_info=error)
            result, is_error = str(error) or type(error).__name__, True
        self.is_sending = True
        try:
            await self._send(result, is_error)
        except (BadRequest, TooLarge, Unprocessable) as error:
            # The gateway rejects the result, so the call gets an error that says why.
            _log.warning("call %s: the gateway rejects the result: %s", call.call_id, error)
            await self._send(f"the gateway rejects the result: {error.detail or error.title}", True)

    async def _send(self, result: Any, is_error: bool) -> None:
        call = self._call
        key = new_id("idk")  # All attempts have the same key, so the gateway accepts a repetition.
        delays = retry_delays(first=0.1, longest=5.0)
        while True:
            try:
                await self._context.transport.request(
                    "POST",
                    api_path("calls", call.call_id, "result"),
                    body={"result": result, "isError": is_error},
                    idempotency_key=key,
                )
            except GatewayUnreachable as error:
                _log.warning("call %s: the result cannot be sent: %s; retrying", call.call_id, error)
                await asyncio.sleep(next(delays))
            except Conflict as error:
                _log.info("call %s: the result is too late: %s", call.call_id, error.detail)
                return
            except (BadRequest, TooLarge, Unprocessable):
                raise
            except ApiError as error:
                if error.status < 500 and error.status not in (408, 425, 429):
                    _log.error("call %s: the result is refused: %s", call.call_id, error)
                    return
                _log.warning("call %s: the gateway cannot accept the result now: %s; retrying", call.call_id, error)
                await asyncio.sleep(retry_delay(error, next(delays)))
            else:
                return


def _call_parameter(function: Callable[..., Any]) -> str | None:
    """Returns the parameter of type `OfferedCall`, or None."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # Annotations that cannot be evaluated here cannot name `OfferedCall`.
        return None
    return next((name for name, parameter in parameters.items() if parameter.annotation is OfferedCall), None)
