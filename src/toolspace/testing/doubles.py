"""`EventRecorder` and `FakeClock`, for tests of programs and extensions. Needs no pytest."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from toolspace.core.events import CallEvent, Event, EventType
from toolspace.orchestrator.event_bus import EventBus


class _HasBus(Protocol):
    @property
    def bus(self) -> EventBus: ...


class EventRecorder:
    """Records every event of a toolspace or an orchestrator from now on, in order.

    recorder = EventRecorder(ts)
    task = asyncio.create_task(ts.call("slow"))
    event = await recorder.wait_for_start("slow")
    """

    def __init__(self, source: _HasBus, *, timeout: float = 20.0) -> None:
        self.events: list[Event] = []
        self.timeout = timeout
        """Seconds after which waiting for an event fails."""
        self._change = asyncio.Event()
        self.stop = source.bus.subscribe(self._record)
        """Ends the recording."""

    def types(self) -> list[str]:
        return [event.type.name for event in self.events]

    def of_type(self, type: EventType) -> list[Event]:
        return [event for event in self.events if event.type is type]

    def of_call(self, call_id: str) -> list[CallEvent]:
        return [event for event in self.events if isinstance(event, CallEvent) and event.call_id == call_id]

    async def wait_for(self, matches: Callable[[Event], bool]) -> Event:
        """Returns the first event that matches, recorded or still to come. Raises `TimeoutError` if there is none."""
        async with asyncio.timeout(self.timeout):
            while True:
                for event in self.events:
                    if matches(event):
                        return event
                self._change.clear()
                await self._change.wait()

    async def wait_for_start(self, tool: str) -> CallEvent:
        """Returns the event of the start of a call of this tool."""

        def is_start(event: Event) -> bool:
            is_request = event.type is EventType.TOOL_CALL_REQUESTED
            return is_request and isinstance(event, CallEvent) and event.tool_name == tool

        event = await self.wait_for(is_start)
        assert isinstance(event, CallEvent)
        return event

    def _record(self, event: Event) -> None:
        self.events.append(event)
        self._change.set()


class FakeClock:
    """A clock that stands still until a test moves it. Pass it as `clock=`: `MemoryCache(clock=clock)`."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
