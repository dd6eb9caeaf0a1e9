"""The events of `Toolspace.stream_agent`, and the stream that a program reads them from.

The run is a task of its own. It never waits for the reader; if the reader is far behind, pieces of text are joined.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, Self, cast

import msgspec
from typing_extensions import TypeVar

from toolspace.agents.loop_hooks import LoopObserver, PlannedCall
from toolspace.agents.subagents import AgentResult
from toolspace.core import json_text
from toolspace.core.language_model import ModelStreamPart, ModelTurn, ResponseRestarted, TextDelta, ThinkingDelta
from toolspace.core.result import ToolResult
from toolspace.errors import ToolCanceledError

T = TypeVar("T", default=str)
_MAX_PIECES = 1_000
"""If more events than this were not read yet, further pieces of text are joined."""


class AgentEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The base of the events."""

    agent: str
    """The agent that works on the request."""

    @property
    def type(self) -> str:
        """The name of the kind of event."""
        return str(self.__struct_config__.tag)


class AgentStarted(AgentEvent, frozen=True, tag="started"):
    """An agent starts to work on the request: the first one, and each one that gets it by a handoff."""


class AgentText(AgentEvent, frozen=True, tag="text"):
    """A piece of the model's text."""

    text: str


class AgentThinking(AgentEvent, frozen=True, tag="thinking"):
    """A piece of the model's reasoning before its answer."""

    text: str


class AgentTextRestarted(AgentEvent, frozen=True, tag="restarted"):
    """The model's response broke off and is requested again. The pieces of this step so far are void."""


class AgentCallStarted(AgentEvent, frozen=True, tag="call"):
    """A call of a tool starts."""

    call_id: str
    name: str
    arguments: Any
    """JSON data; the text as the model wrote it if it is not JSON."""


class AgentCallFinished(AgentEvent, frozen=True, tag="result"):
    """A call of a tool has a result."""

    call_id: str
    name: str
    result: ToolResult


class AgentStepFinished(AgentEvent, frozen=True, tag="step"):
    """The model has had a turn, and its calls have results."""

    step: int
    turn: ModelTurn


class AgentFinished(AgentEvent, Generic[T], frozen=True, tag="finished"):
    """The last event: the result, as `run_agent` returns it."""

    result: AgentResult[T]


AgentStreamEvent = (
    AgentStarted
    | AgentText
    | AgentThinking
    | AgentTextRestarted
    | AgentCallStarted
    | AgentCallFinished
    | AgentStepFinished
    | AgentFinished[T]
)
StartRun = Callable[[LoopObserver], Coroutine[Any, Any, AgentResult[T]]]
"""Runs the agent, and tells the observer what happens."""
OwnTask = Callable[[asyncio.Task[Any]], None]
"""Makes the toolspace own a task: it ends the task when it closes."""


class AgentStream(AsyncIterator[AgentStreamEvent[T]], Generic[T]):
    """The events of one run, for `async for`. The run starts with the first step of the loop.

    Leaving the loop early cancels the run and everything below it. `async with` does so at its end, and waits until the
    run has ended; so does `aclose()`. `anext(stream)` reads single events without a loop.
    """

    def __init__(self, start: StartRun[T], own_task: OwnTask) -> None:
        self._start: StartRun[T] | None = start
        self._own_task = own_task
        self._events = _EventQueue()
        self._task: asyncio.Task[AgentResult[T]] | None = None
        self._is_finished = False

    def __aiter__(self) -> AsyncIterator[AgentStreamEvent[T]]:
        return _LoopIterator(self)

    async def __anext__(self) -> AgentStreamEvent[T]:
        if self._is_finished:
            raise StopAsyncIteration
        if self._task is None:
            self._start_run()
        task = cast("asyncio.Task[AgentResult[T]]", self._task)
        if (event := await self._events.next(task)) is not None:
            return cast("AgentStreamEvent[T]", event)
        self._is_finished = True
        if task.cancelled():
            raise ToolCanceledError("the run was canceled")
        result = task.result()  # Raises what the run raised, for example that there is no such agent.
        return AgentFinished(agent=result.agent, result=result)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancels the run if it has not ended, and waits for its end."""
        self._is_finished = True
        self._start = None
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def cancel(self) -> None:
        """Cancels the run if it has not ended. May be called from any thread."""
        task = self._task
        if task is not None and not task.done():
            with contextlib.suppress(RuntimeError):  # The event loop was closed.
                task.get_loop().call_soon_threadsafe(task.cancel)

    def __del__(self) -> None:
        self.cancel()

    def _start_run(self) -> None:
        start, self._start = self._start, None
        assert start is not None
        # The task must not refer to the stream: a stream that nobody reads any more is collected, and cancels it.
        self._task = asyncio.get_running_loop().create_task(start(_StreamObserver(self._events)))
        self._task.add_done_callback(self._events.wake)
        self._own_task(self._task)


class _LoopIterator(AsyncIterator[AgentStreamEvent[T]], Generic[T]):
    """What an `async for` holds. It is collected when the loop is left, also if the program holds the stream."""

    def __init__(self, stream: AgentStream[T]) -> None:
        self._stream = stream

    async def __anext__(self) -> AgentStreamEvent[T]:
        return await anext(self._stream)

    def __del__(self) -> None:
        self._stream.cancel()


class _EventQueue:
    """The events that the program has not read yet."""

    def __init__(self) -> None:
        self._events: deque[AgentEvent] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def put(self, event: AgentEvent) -> None:
        last = self._events[-1] if self._events else None
        is_behind = len(self._events) >= _MAX_PIECES
        if is_behind and isinstance(event, AgentText | AgentThinking) and type(last) is type(event):
            self._events[-1] = msgspec.structs.replace(event, text=cast("AgentText", last).text + event.text)
        else:
            self._events.append(event)
        self.wake()

    def wake(self, _: object = None) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self, task: asyncio.Task[Any]) -> AgentEvent | None:
        """Returns the next event; None if the task has ended and all events were read."""
        while not self._events:
            if task.done():
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events.popleft()


class _StreamObserver(LoopObserver):
    """Turns what happens in the loop into events."""

    def __init__(self, events: _EventQueue) -> None:
        self._put = events.put
        self._agent = ""

    def on_agent_started(self, name: str) -> None:
        self._agent = name
        self._put(AgentStarted(agent=name))

    def on_model_output(self, part: ModelStreamPart) -> None:
        if isinstance(part, TextDelta):
            self._put(AgentText(agent=self._agent, text=part.text))
        elif isinstance(part, ThinkingDelta):
            self._put(AgentThinking(agent=self._agent, text=part.text))
        elif isinstance(part, ResponseRestarted):
            self._put(AgentTextRestarted(agent=self._agent))

    def on_call_started(self, call: PlannedCall) -> None:
        try:
            arguments = json_text.decode(call.call.arguments or "{}")
        except ValueError:
            arguments = call.call.arguments
        self._put(AgentCallStarted(agent=self._agent, call_id=call.call_id, name=call.call.name, arguments=arguments))

    def on_call_finished(self, call: PlannedCall, result: ToolResult) -> None:
        self._put(AgentCallFinished(agent=self._agent, call_id=call.call_id, name=call.call.name, result=result))

    def on_step_finished(self, step: int, turn: ModelTurn) -> None:
        self._put(AgentStepFinished(agent=self._agent, step=step, turn=turn))
