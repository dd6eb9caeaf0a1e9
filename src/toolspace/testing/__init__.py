"""Helpers to test extensions: a contract test suite for each extension point, and in-memory implementations.

    from toolspace.testing import ProviderContract

    class TestWeather(ProviderContract):
        call = ("current", {"city": "Lisbon"})

        @pytest.fixture
        def provider(self) -> ToolProvider:
            return WeatherProvider()

The contracts need pytest and pytest-asyncio, in either of its modes. The rest needs neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from toolspace.core.events import CallEvent, Event, EventType
from toolspace.orchestrator.event_bus import EventBus

if TYPE_CHECKING:
    from toolspace.models.scripted import ScriptedModel as ScriptedModel
    from toolspace.models.scripted import call as call
    from toolspace.storage.memory_cache import MemoryCache as MemoryCache
    from toolspace.storage.memory_outputs import MemoryOutputs as MemoryOutputs
    from toolspace.testing.provider_contract import ProviderContract as ProviderContract
    from toolspace.testing.storage_contracts import CacheContract as CacheContract
    from toolspace.testing.storage_contracts import OutputsContract as OutputsContract

T = TypeVar("T")
_MODULES = {
    "CacheContract": "toolspace.testing.storage_contracts",
    "MemoryCache": "toolspace.storage.memory_cache",
    "MemoryOutputs": "toolspace.storage.memory_outputs",
    "OutputsContract": "toolspace.testing.storage_contracts",
    "ProviderContract": "toolspace.testing.provider_contract",
    "ScriptedModel": "toolspace.models.scripted",
    "call": "toolspace.models.scripted",
}

__all__ = ["EventRecorder", "FakeClock"]
__all__ += list(_MODULES)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Imports an exported name on first use: only the contracts need pytest."""
    if name not in _MODULES:
        raise AttributeError(f"module 'toolspace.testing' has no attribute {name!r}")
    from importlib import import_module

    try:
        if name.endswith("Contract"):
            import_module("pytest_asyncio")
            # So that a failed assertion shows its values, as in other tests.
            import_module("pytest").register_assert_rewrite(_MODULES[name])
        value = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        if error.name not in ("pytest", "pytest_asyncio"):
            raise
        missing = f"toolspace.testing.{name} runs under pytest, and {error.name} is not installed"
        raise ImportError(f"{missing}; install both: pip install pytest pytest-asyncio", name=error.name) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})


def mark_coroutine_tests(suite: type[T]) -> type[T]:
    """A class decorator for contract suites: its coroutines run in either mode of pytest-asyncio."""
    from inspect import iscoroutinefunction

    import pytest

    for test in filter(iscoroutinefunction, vars(suite).values()):
        pytest.mark.asyncio(test)
    return suite


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
