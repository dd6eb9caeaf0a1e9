"""Contract tests of `ToolProvider`. Subclass `ProviderContract`, add its fixture, and pytest runs the tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from toolspace.core.argument_validation import compile_schema
from toolspace.core.events import EventType
from toolspace.core.extension_points import ToolProvider
from toolspace.core.names import qualify_all
from toolspace.core.result import ToolResult
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ERROR_CLASSES
from toolspace.orchestrator.effective_settings import ProviderRules, ToolRules
from toolspace.storage.memory_outputs import MemoryOutputs
from toolspace.testing import mark_coroutine_tests
from toolspace.testing.doubles import EventRecorder
from toolspace.toolspace import Toolspace

T = TypeVar("T")
Call = tuple[str, Mapping[str, Any]]
"""The local name of a tool, and arguments for it."""

TIMEOUT = 10.0
"""Seconds after which a test fails. No test takes that long unless it fails."""
NO_TOOL = "no_tool_has_this_name"
_STARTS_AND_ENDS = (EventType.TOOL_CALL_REQUESTED, EventType.TOOL_CALL_COMPLETED, EventType.TOOL_CALL_FAILED)


@mark_coroutine_tests
class ProviderContract:
    """Tests of a provider. A subclass defines the fixture `provider`, a `call`, and the other attributes if it can.

    class TestNotes(ProviderContract):
        call = ("write", {"title": "a", "text": "b"})
        failing_call = ("read", {"title": "missing"})
        slow_call = ("wait_for", {"title": "never"})

        @pytest.fixture
        def provider(self, tmp_path: Path) -> ToolProvider:
            return NotesProvider(tmp_path / "notes.db")
    """

    call: Call | None = None
    """A call that succeeds, however often it is made."""
    failing_call: Call | None = None
    """A call that fails although its arguments fit the schema. Without one, its tests are skipped."""
    slow_call: Call | None = None
    """A call that takes seconds if nobody stops it. Without one, its tests are skipped."""

    @pytest.fixture
    def provider(self) -> ToolProvider:
        """Returns a new provider that has not started. The tests start and close it."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `provider` of its own")

    def is_working(self, provider: ToolProvider) -> bool | None:
        """Whether the slow call is running, observed from outside; None if that is impossible.

        With it the tests check that cancelling the call stops the work, and not only the wait for it.
        """
        return None

    def toolspace(self, provider: ToolProvider) -> Toolspace:
        """Returns the toolspace in which the provider's tools are called."""
        return Toolspace(providers=[provider], outputs=MemoryOutputs())

    # Metadata

    async def test_it_can_be_queried_before_it_starts(self, provider: ToolProvider) -> None:
        assert isinstance(provider.kind, str)
        assert provider.kind, "set `kind`, the kind of provider"
        assert isinstance(provider.namespace, str)
        list(provider.list_tools())
        assert provider.has_tool(NO_TOOL) is False
        assert isinstance(provider.get_instructions(), str)
        await with_timeout(provider.aclose())

    async def test_tool_names_are_unique_and_stable(self, provider: ToolProvider) -> None:
        async with started(provider):
            names = [tool.name for tool in provider.list_tools()]
            assert all(isinstance(name, str) and name for name in names)
            assert sorted(names) == sorted(set(names)), "two tools have the same name"
            assert [tool.name for tool in provider.list_tools()] == names, "list_tools returns other names now"

    async def test_its_definitions_are_json_with_valid_schemas(self, provider: ToolProvider) -> None:
        async with started(provider):
            for tool in provider.list_tools():
                json.dumps(tool.to_dict(), allow_nan=False)
                compile_schema(tool.input_schema, owner=f"the tool {tool.name!r}")
                assert tool.input_schema.get("type") == "object", f"{tool.name}: the input schema is no object"
                if tool.output_schema is not None:
                    compile_schema(tool.output_schema, owner=f"the output of {tool.name!r}")

    async def test_it_has_the_tools_that_it_lists_and_no_other(self, provider: ToolProvider) -> None:
        async with started(provider):
            for tool in provider.list_tools():
                assert provider.has_tool(tool.name) is True
            assert provider.has_tool(NO_TOOL) is False
            assert provider.has_tool("") is False

    async def test_listeners_are_called_until_they_unsubscribe(self, provider: ToolProvider) -> None:
        notified_listeners: list[str] = []
        unsubscribe_first = provider.on_change(lambda: notified_listeners.append("first"))
        unsubscribe_second = provider.on_change(lambda: notified_listeners.append("second"))
        provider.notify_changed()
        assert sorted(notified_listeners) == ["first", "second"]
        unsubscribe_first()
        provider.notify_changed()
        assert sorted(notified_listeners) == ["first", "second", "second"]
        unsubscribe_first()
        unsubscribe_second()
        provider.notify_changed()
        assert len(notified_listeners) == 3
        await with_timeout(provider.aclose())

    # Calls of the provider itself

    async def test_a_call_returns_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("call")
        async with started(provider):
            assert provider.has_tool(name), f"the provider does not list {name!r}"
            result = await with_timeout(provider.execute(name, dict(arguments), ToolContext()))
        assert isinstance(result, ToolResult)
        assert result.ok, result.error
        json.dumps(result.to_dict(), allow_nan=False)

    async def test_parallel_calls_each_get_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("call")
        async with started(provider):
            calls = (provider.execute(name, dict(arguments), ToolContext()) for _ in range(8))
            results = await with_timeout(asyncio.gather(*calls))
        assert [result.error for result in results] == [None] * 8
        assert len({id(result) for result in results}) == 8, "callers share a result, and one may change it"

    async def test_an_unknown_tool_fails(self, provider: ToolProvider) -> None:
        async with started(provider):
            assert await outcome(provider.execute(NO_TOOL, {}, ToolContext())) != "ok"

    async def test_a_failure_says_why(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("failing_call")
        async with started(provider):
            assert await outcome(provider.execute(name, dict(arguments), ToolContext())) not in ("ok", "")

    async def test_cancelling_a_call_stops_the_work(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("slow_call")
        async with started(provider):
            task = asyncio.ensure_future(provider.execute(name, dict(arguments), ToolContext()))
            await self._wait_until_working(provider, task)
            task.cancel()
            await asyncio.wait((task,), timeout=TIMEOUT)
            assert task.done(), "the call still runs after its cancellation"
            assert task.cancelled(), "execute swallows CancelledError; clean up in `finally`, or raise it again"
            await self._wait_until_stopped(provider)

    async def test_it_closes_after_a_call(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("call")
        await with_timeout(provider.warmup())
        await with_timeout(provider.execute(name, dict(arguments), ToolContext()))
        await with_timeout(provider.aclose())

    # Calls through all stages

    async def test_a_toolspace_offers_the_tools_that_it_lists(self, provider: ToolProvider) -> None:
        async with self.toolspace(provider) as ts:
            for local_name, full_name in full_names(provider).items():
                message = f"{local_name!r} is missing; did `warmup` call `self.notify_changed()`?"
                assert ts.find_tool(full_name) is not None, message

    async def test_a_call_passes_all_stages(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("call")
        async with self.toolspace(provider) as ts:
            recorder, full_name = EventRecorder(ts), full_names(provider)[name]
            result = await with_timeout(ts.call(full_name, arguments))
            assert result.ok, result.error
            assert (result.tool, result.namespace, result.kind) == (full_name, provider.namespace, provider.kind)
            assert starts_and_ends(recorder, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]

    async def test_arguments_that_do_not_fit_are_refused(self, provider: ToolProvider) -> None:
        name, _ = self._get_call("call")
        async with self.toolspace(provider) as ts:
            result = await with_timeout(ts.call(full_names(provider)[name], '["no object"]'))
        assert (result.error_kind, result.executed) == ("invalid_parameters", False)

    async def test_a_failure_is_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("failing_call")
        async with self.toolspace(provider) as ts:
            recorder = EventRecorder(ts)
            result = await with_timeout(ts.call(full_names(provider)[name], arguments))
            assert starts_and_ends(recorder, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
        assert result.error
        assert result.error_kind in ERROR_CLASSES
        assert result.error_kind not in ("unknown_tool", "internal_error"), result.error

    async def test_a_call_that_takes_too_long_is_stopped(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("slow_call")
        async with self.toolspace(provider) as ts:
            # An override, because it wins over the timeout of the tool itself.
            short_timeout = ProviderRules(overrides={"*": ToolRules(timeout=0.05)})
            ts.orchestrator.configure(rules={provider: short_timeout})
            recorder = EventRecorder(ts)
            result = await with_timeout(ts.call(full_names(provider)[name], arguments))
            assert result.error_kind == "timeout", result.error
            assert starts_and_ends(recorder, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
            assert ts.orchestrator.abandoned_count == 0, "the call ignored its cancellation and was closed by force"
            await self._wait_until_stopped(provider)

    async def test_a_call_can_be_cancelled_from_outside(self, provider: ToolProvider) -> None:
        name, arguments = self._get_call("slow_call")
        async with self.toolspace(provider) as ts:
            recorder, full_name = EventRecorder(ts), full_names(provider)[name]
            task = asyncio.ensure_future(ts.call(full_name, arguments, call_id="contract"))
            await recorder.wait_for_start(full_name)
            await self._wait_until_working(provider, task)
            assert ts.cancel("contract")
            result = await with_timeout(task)
            assert result.error_kind == "canceled", result.error
            assert starts_and_ends(recorder, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
            await self._wait_until_stopped(provider)

    # Internals

    def _get_call(self, attribute: str) -> Call:
        call: Call | None = getattr(self, attribute)
        if call is not None:
            return call
        if attribute == "call":
            pytest.fail(f'{type(self).__name__} needs a call that succeeds: call = ("tool", {{arguments}})')
        pytest.skip(f"set {attribute} = (tool, arguments) to run this test")

    async def _wait_until_working(self, provider: ToolProvider, task: asyncio.Future[Any]) -> None:
        if self.is_working(provider) is None:
            await asyncio.wait((task,), timeout=0.05)  # Its start cannot be observed, so it gets a moment.
        else:
            await wait_until(lambda: task.done() or self.is_working(provider) is True, "the slow call has not started")
        assert not task.done(), "the slow call has ended by itself; set slow_call to one that takes seconds"

    async def _wait_until_stopped(self, provider: ToolProvider) -> None:
        await wait_until(lambda: not self.is_working(provider), "the call has ended, but its work still runs")


@asynccontextmanager
async def started(provider: ToolProvider) -> AsyncGenerator[ToolProvider]:
    """Starts the provider and closes it afterwards, as a toolspace does."""
    try:
        await with_timeout(provider.warmup())
        yield provider
    finally:
        await with_timeout(provider.aclose())


async def with_timeout(awaitable: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """Returns the awaited value. Raises `TimeoutError` if that takes too long."""
    async with asyncio.timeout(TIMEOUT):
        return await awaitable


async def outcome(call: Coroutine[Any, Any, ToolResult]) -> str:
    """Returns `ok`, or the error message. The call may raise or return a failed result, but must end."""
    limit = asyncio.timeout(TIMEOUT)
    try:
        async with limit:
            result = await call
    except Exception as error:
        if limit.expired():
            pytest.fail(f"the call has not ended after {TIMEOUT:.0f} s")
        return str(error) or type(error).__name__
    assert isinstance(result, ToolResult)
    return "ok" if result.ok else result.error or ""


async def wait_until(condition: Callable[[], bool], failure: str) -> None:
    """Polls until the condition is true."""
    try:
        async with asyncio.timeout(TIMEOUT):
            while not condition():  # noqa: ASYNC110 - it may happen in a thread or another process.
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(failure)


def full_names(provider: ToolProvider) -> Mapping[str, str]:
    """Returns local name → full name, for each tool of the provider."""
    names = [tool.name for tool in provider.list_tools()]
    return qualify_all(provider.namespace, names) if provider.namespace else {name: name for name in names}


def starts_and_ends(recorder: EventRecorder, result: ToolResult) -> list[str]:
    return [event.type.name for event in recorder.of_call(result.call_id) if event.type in _STARTS_AND_ENDS]
