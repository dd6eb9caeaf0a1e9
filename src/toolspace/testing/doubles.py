"""Keeps the events of a toolspace, and waits for one that is to come. Needs no test framework."""

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
    """Every event of a toolspace or an orchestrator from now on, in order.

    seen = Recorder(ts)
    task = asyncio.create_task(ts.call("slow"))
    call = await seen.started("slow")
    """

    def __init__(self, source: _HasBus, *, timeout: float = 20.0) -> None:
        self.events: list[Event] = []
        self.timeout = timeout
        """Seconds after which waiting for an event fails."""
        self._arrived = asyncio.Event()
        self.stop = source.bus.subscribe(self._take)
        """Ends the recording."""

    def types(self) -> list[str]:
        return [event.type.name for event in self.events]

    def of_type(self, kind: EventType) -> list[Event]:
        return [event for event in self.events if event.type is kind]

    def of_call(self, call_id: str) -> list[CallEvent]:
        return [event for event in self.events if isinstance(event, CallEvent) and event.call_id == call_id]

    async def wait_for(self, fits: Callable[[Event], bool]) -> Event:
        """The first event that fits, be it here already or to come. Raises `TimeoutError` where none comes."""
        async with asyncio.timeout(self.timeout):
            while True:
                for event in self.events:
                    if fits(event):
                        return event
                self._arrived.clear()
                await self._arrived.wait()

    async def wait_for_start(self, tool: str) -> CallEvent:
        """The beginning of a call of this tool."""
        event = await self.wait_for(
            lambda one: (
                isinstance(one, CallEvent) and one.type is EventType.TOOL_CALL_REQUESTED and one.tool_name == tool
            )
        )
        assert isinstance(event, CallEvent)
        return event

    def _take(self, event: Event) -> None:
        self.events.append(event)
        self._arrived.set()


# MERGED from clock: A clock that stands still until a test moves it.


class FakeClock:
    """Give it as `clock=` to whatever takes one: `MemoryCache(clock=clock)`."""

    def __init__(self, now: float = 1_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds
