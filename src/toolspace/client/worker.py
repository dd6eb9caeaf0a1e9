"""`ToolWorker`: executes the external calls of a gateway with functions of this program."""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Final, Self, TypeVar, cast, overload

from toolspace.client.errors import ApiError, BadRequest, Conflict, GatewayUnreachable, TooLarge, Unprocessable
from toolspace.client.events import EventSubscription, StreamEvent
from toolspace.client.responses import decode_response
from toolspace.client.transport import GatewayCredentials, Transport, quote_segment, retry_delay, retry_delays
from toolspace.core.ids import new_id
from toolspace.core.records import Record
from toolspace.errors import ToolspaceError

_log = logging.getLogger("toolspace.worker")
F = TypeVar("F", bound=Callable[..., Any])

_MOST_PAUSE: Final = 2.0
"""Shorter than the gateway's grace: who comes back after a break keeps the calls that it is executing."""
_REMEMBERED: Final = 10_000
_LEAVE_SECONDS: Final = 5.0


class OfferedCall(Record, frozen=True):
    """A call as it is offered. A handler with a parameter of this type gets it there."""

    call_id: str
    tool_name: str
    args: Any = None
    run_id: str | None = None
    space_id: str | None = None
    agent_entity_id: str | None = None
    created_at: int = 0
    expires_at: int | None = None


class ToolWorker:
    """Serves tools whose calls are executed here.

    worker = ToolWorker("http://127.0.0.1:8787", secret_key="sk_…")

    @worker.tool("executeRobotAction")
    async def execute(action: str) -> dict:
        return {"done": action}

    worker.run_forever()

    Arguments come as keywords. A plain function runs in a thread. What is raised is the call's error. Each call is
    executed once by this worker, however often the connection breaks; its result is sent until the gateway has it.
    """

    def __init__(
        self, url: str, *, secret_key: str | None = None, concurrency: int = 4, worker_id: str | None = None
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}; a worker has to take at least 1 call at a time")
        self.id = worker_id or new_id("wrk")
        self.concurrency = concurrency
        self.ready = asyncio.Event()
        """Set once the gateway offers calls."""
        self._url = url
        self._credentials = GatewayCredentials(secret_key=secret_key)
        self._handlers: dict[str, _Handler] = {}
        self._jobs: dict[str, _Job] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._stopping = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    @overload
    def tool(self, name: F) -> F: ...
    @overload
    def tool(self, name: str | None = None) -> Callable[[F], F]: ...
    def tool(self, name: Any = None) -> Any:
        """Lets a function execute the calls of a tool: of this name, or of the function's own."""
        if callable(name):
            return self.tool()(name)

        def add(function: F) -> F:
            tool = name or function.__name__
            if tool in self._handlers:
                raise ValueError(f'"{tool}" has a handler already; one tool is executed by one function')
            self._handlers[tool] = _Handler(function)
            return function

        return add

    def run_forever(self) -> None:
        """Serves until Ctrl-C or SIGTERM: then it takes no more, and ends when what it executes is done and sent. A
        second Ctrl-C ends it at once."""

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            running = asyncio.ensure_future(self.run())

            def stop() -> None:
                if self._stopping.is_set():
                    running.cancel()
                self._stopping.set()

            for one in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(one, stop)
            try:
                await running
            except asyncio.CancelledError:
                if not self._stopping.is_set():
                    raise

        asyncio.run(serve())

    async def run(self) -> None:
        """Serves until `stop`. Raises where the gateway refuses the worker for good."""
        if not self._handlers:
            raise ValueError('this worker serves no tool; add one with @worker.tool("name")')
        transport = Transport(self._url, self._credentials)
        threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="worker")
        query = {"tools": sorted(self._handlers), "workerId": self.id, "concurrency": self.concurrency}
        offers = EventSubscription(transport, "/api/tools/stream", query=query, max_delay=_MOST_PAUSE)
        context = _Context(transport, threads)
        listening = asyncio.ensure_future(self._listen(offers, context))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((listening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if listening.done():
                await listening  # It ends only where it was refused.
            await self._leave(transport, list(self._jobs))
            while self._jobs:
                await asyncio.wait([job.task for job in self._jobs.values()], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks: list[asyncio.Future[Any]] = [listening, stopping, *(job.task for job in self._jobs.values())]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            offers.close()
            threads.shutdown(wait=False, cancel_futures=True)
            await transport.aclose()
            self.ready.clear()

    async def stop(self) -> None:
        """Takes no more calls, and returns once those that are being executed are done and sent."""
        self._stopping.set()
        if self._serving is not None:
            await asyncio.wait((self._serving,))

    async def __aenter__(self) -> Self:
        """Serves while the block runs."""
        self._serving = asyncio.ensure_future(self.run())
        ready = asyncio.ensure_future(self.ready.wait())
        try:
            await asyncio.wait((self._serving, ready), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._serving.cancel()
            raise
        finally:
            ready.cancel()
        if self._serving.done():
            await self._serving
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        serving = self._serving
        assert serving is not None
        self._stopping.set()
        try:
            await serving
        finally:
            self._serving = None

    async def _listen(self, offers: EventSubscription, context: _Context) -> None:
        async for event in offers:
            self._hear(event, context)

    def _hear(self, event: StreamEvent, context: _Context) -> None:
        data: dict[str, Any] = event.data or {}
        if event.type == "worker.ready":
            self.ready.set()
        elif event.type == "worker.warning":
            _log.warning("%s", data.get("message"))
        elif event.type == "worker.replaced":
            raise ToolspaceError(f'another worker has connected as "{self.id}"; give each its own worker_id')
        elif event.type == "call.offered":
            self._begin(decode_response(OfferedCall, data), context)
        elif event.type in ("call.canceled", "call.answered"):
            job = self._jobs.get(str(data.get("callId")))
            if job is not None and not job.is_sending:
                job.task.cancel()

    def _begin(self, call: OfferedCall, context: _Context) -> None:
        # Offered again after a break: it is being executed, or the result is on its way, or it arrived just now.
        if call.call_id in self._jobs or call.call_id in self._ended or self._stopping.is_set():
            return
        handler = self._handlers.get(call.tool_name)
        if handler is None:
            _log.warning('a call of "%s" was offered, which nobody asked for', call.tool_name)
            return
        job = self._jobs[call.call_id] = _Job(call, handler, context)
        job.task.add_done_callback(lambda task: self._end(call.call_id, task))

    def _end(self, call_id: str, task: asyncio.Future[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("call %s came to no end", call_id, exc_info=error)
        del self._jobs[call_id]
        self._ended[call_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)

    async def _leave(self, transport: Transport, finishing: list[str]) -> None:
        """Others get what this worker does not finish. Where that cannot be said, they get it a little later."""
        try:
            async with asyncio.timeout(_LEAVE_SECONDS):
                await transport.request(
                    "POST",
                    f"/api/workers/{quote_segment(self.id)}/leave",
                    body={"finishing": finishing},
                    is_repeatable=True,
                )
        except (ApiError, GatewayUnreachable, TimeoutError) as error:
            _log.debug("the gateway does not know that this worker leaves: %s", error)


class _Context:
    """What all calls of a run share."""

    def __init__(self, transport: Transport, threads: ThreadPoolExecutor) -> None:
        self.transport = transport
        self.threads = threads


class _Handler:
    """A function, and how to call it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object that is called may be async
        )
        self._call_parameter = _call_parameter(function)

    async def execute(self, call: OfferedCall, threads: ThreadPoolExecutor) -> Any:
        args: Any = {} if call.args is None else call.args
        if not isinstance(args, dict):
            raise TypeError(f"the arguments are not an object, but {type(args).__name__}")
        arguments = dict(cast("dict[str, Any]", args))
        if self._call_parameter is not None:
            arguments[self._call_parameter] = call
        if self._is_async:
            return await self._function(**arguments)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(threads, lambda: self._function(**arguments))
        return await result if inspect.isawaitable(result) else result


class _Job:
    """One call from its offer until the gateway has its result."""

    def __init__(self, call: OfferedCall, handler: _Handler, context: _Context) -> None:
        self.is_sending = False
        """Whether it has been executed: from here on its result is sent whatever happens."""
        self._call = call
        self._handler = handler
        self._context = context
        self.task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        call = self._call
        try:
            result, is_error = await self._handler.execute(call, self._context.threads), False
        except asyncio.CancelledError:
            _log.info("call %s of %s was canceled", call.call_id, call.tool_name)
            raise
        except Exception as error:
            _log.warning("call %s of %s failed", call.call_id, call.tool_name, exc_info=error)
            result, is_error = str(error) or type(error).__name__, True
        self.is_sending = True
        try:
            await self._send(result, is_error)
        except (BadRequest, TooLarge, Unprocessable) as error:
            # The gateway does not take the result as it is; whoever waits should know why there is none.
            _log.warning("the result of call %s is not taken: %s", call.call_id, error)
            await self._send(f"the result cannot be taken: {error.detail or error.title}", True)

    async def _send(self, result: Any, is_error: bool) -> None:
        call = self._call
        key = new_id("idk")  # One for all attempts: what arrived is known when it comes again.
        waits = retry_delays(first=0.1, most=5.0)
        while True:
            try:
                await self._context.transport.request(
                    "POST",
                    f"/api/calls/{quote_segment(call.call_id)}/result",
                    body={"result": result, "isError": is_error},
                    idempotency_key=key,
                )
            except GatewayUnreachable as error:
                _log.warning("the result of call %s cannot be sent: %s; trying again", call.call_id, error)
                await asyncio.sleep(next(waits))
            except Conflict as error:
                _log.info("the result of call %s came too late: %s", call.call_id, error.detail)
                return
            except (BadRequest, TooLarge, Unprocessable):
                raise
            except ApiError as error:
                if error.status < 500 and error.status not in (408, 425, 429):
                    _log.error("the result of call %s is refused: %s", call.call_id, error)
                    return
                _log.warning("the result of call %s cannot be taken now: %s; trying again", call.call_id, error)
                await asyncio.sleep(retry_delay(error, next(waits)))
            else:
                return


def _call_parameter(function: Callable[..., Any]) -> str | None:
    """The parameter that wants the call itself."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except Exception:  # Annotations that cannot be evaluated here are none of ours.
        return None
    return next((name for name, one in parameters.items() if one.annotation is OfferedCall), None)
