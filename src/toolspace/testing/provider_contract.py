"""What every `ToolProvider` does. Subclass `ProviderContract`, give it a `provider`, and pytest runs the rest."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import pytest

from toolspace.core.context import ToolContext
from toolspace.core.events import EventType
from toolspace.core.interfaces import ToolProvider
from toolspace.core.names import qualify_all
from toolspace.core.result import ToolResult
from toolspace.core.validation import compile_schema
from toolspace.errors import ERROR_CLASSES
from toolspace.orchestrator.settings import ProviderRules, ToolRules
from toolspace.storage.outputs.memory import MemoryOutputs
from toolspace.testing.doubles import EventRecorder
from toolspace.toolspace import Toolspace

T = TypeVar("T")
Call = tuple[str, Mapping[str, Any]]
"""The name of a tool, as the provider itself calls it, and arguments for it."""

PATIENCE = 10.0
"""Seconds within which everything has to end. No test takes that long unless it fails."""
NO_TOOL = "no_tool_has_this_name"
_BEGIN = EventType.TOOL_CALL_REQUESTED
_ENDS = (EventType.TOOL_CALL_COMPLETED, EventType.TOOL_CALL_FAILED)


class ProviderContract:
    """Yours gives the fixture `provider` and one `call`, and what it can of the rest.

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
    """A call that fails, though its arguments fit the schema; where there is none, its checks are skipped."""
    slow_call: Call | None = None
    """A call that takes seconds if nobody stops it; where there is none, its checks are skipped."""

    @pytest.fixture
    def provider(self) -> ToolProvider:
        """A new provider that has not started. The contract starts it and closes it."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture `provider` of its own")

    def is_working(self, provider: ToolProvider) -> bool | None:
        """Whether the slow call is at work, seen from outside; None where that cannot be seen.

        With it the contract knows that stopping the call stops the work, and not just the waiting for it.
        """
        return None

    def toolspace(self, provider: ToolProvider) -> Toolspace:
        """The toolspace that the provider's tools are called through."""
        return Toolspace(providers=[provider], outputs=MemoryOutputs())

    # What it says of itself

    @pytest.mark.asyncio
    async def test_it_can_be_asked_before_it_starts(self, provider: ToolProvider) -> None:
        assert isinstance(provider.kind, str)
        assert provider.kind, "say what sort of provider it is"
        assert isinstance(provider.namespace, str)
        list(provider.list_tools())
        assert provider.has_tool(NO_TOOL) is False
        assert isinstance(provider.get_instructions(), str)
        await within(provider.aclose())

    @pytest.mark.asyncio
    async def test_its_tools_have_names_of_their_own(self, provider: ToolProvider) -> None:
        async with started(provider):
            names = [tool.name for tool in provider.list_tools()]
            assert all(isinstance(name, str) and name for name in names)
            assert sorted(names) == sorted(set(names)), "two tools of one name"
            assert [tool.name for tool in provider.list_tools()] == names, "asked again, it lists other tools"

    @pytest.mark.asyncio
    async def test_its_definitions_are_json_with_valid_schemas(self, provider: ToolProvider) -> None:
        async with started(provider):
            for tool in provider.list_tools():
                json.dumps(tool.to_dict(), allow_nan=False)
                compile_schema(tool.input_schema, owner=f"the tool {tool.name!r}")
                assert tool.input_schema.get("type") == "object", f"{tool.name}: arguments are always an object"
                if tool.output_schema is not None:
                    compile_schema(tool.output_schema, owner=f"the output of {tool.name!r}")

    @pytest.mark.asyncio
    async def test_it_has_the_tools_that_it_lists_and_no_other(self, provider: ToolProvider) -> None:
        async with started(provider):
            for tool in provider.list_tools():
                assert provider.has_tool(tool.name) is True
            assert provider.has_tool(NO_TOOL) is False
            assert provider.has_tool("") is False

    @pytest.mark.asyncio
    async def test_a_change_is_heard_until_the_listener_is_forgotten(self, provider: ToolProvider) -> None:
        heard: list[str] = []
        forget_first = provider.on_change(lambda: heard.append("first"))
        forget_second = provider.on_change(lambda: heard.append("second"))
        provider.notify_changed()
        assert sorted(heard) == ["first", "second"]
        forget_first()
        provider.notify_changed()
        assert sorted(heard) == ["first", "second", "second"]
        forget_first()
        forget_second()
        provider.notify_changed()
        assert len(heard) == 3
        await within(provider.aclose())

    # Its calls, by themselves

    @pytest.mark.asyncio
    async def test_a_call_gives_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("call")
        async with started(provider):
            assert provider.has_tool(name), f"it does not list {name!r}"
            result = await within(provider.execute(name, dict(arguments), ToolContext()))
        assert isinstance(result, ToolResult)
        assert result.ok, result.error
        json.dumps(result.to_dict(), allow_nan=False)

    @pytest.mark.asyncio
    async def test_calls_at_once_each_get_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("call")
        async with started(provider):
            calls = (provider.execute(name, dict(arguments), ToolContext()) for _ in range(8))
            results = await within(asyncio.gather(*calls))
        assert [result.error for result in results] == [None] * 8
        assert len({id(result) for result in results}) == 8, "callers may change what they get, so none is shared"

    @pytest.mark.asyncio
    async def test_an_unknown_tool_fails(self, provider: ToolProvider) -> None:
        async with started(provider):
            assert await outcome(provider.execute(NO_TOOL, {}, ToolContext())) != "ok"

    @pytest.mark.asyncio
    async def test_a_failure_says_why(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("failing_call")
        async with started(provider):
            assert await outcome(provider.execute(name, dict(arguments), ToolContext())) not in ("ok", "")

    @pytest.mark.asyncio
    async def test_cancelling_a_call_stops_the_work(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("slow_call")
        async with started(provider):
            task = asyncio.ensure_future(provider.execute(name, dict(arguments), ToolContext()))
            await self._at_work(provider, task)
            task.cancel()
            await asyncio.wait((task,), timeout=PATIENCE)
            assert task.done(), "the call goes on, though it was cancelled"
            assert task.cancelled(), "it swallows CancelledError; clean up in `finally`, or raise it again"
            await self._at_rest(provider)

    @pytest.mark.asyncio
    async def test_it_closes_after_it_has_worked(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("call")
        await within(provider.warmup())
        await within(provider.execute(name, dict(arguments), ToolContext()))
        await within(provider.aclose())

    # Its calls, through all stages

    @pytest.mark.asyncio
    async def test_a_toolspace_offers_the_tools_that_it_lists(self, provider: ToolProvider) -> None:
        async with self.toolspace(provider) as ts:
            for own, full in full_names(provider).items():
                assert ts.find_tool(full) is not None, f"{own!r} is missing; did `warmup` say `self.changed()`?"

    @pytest.mark.asyncio
    async def test_a_call_takes_its_way_through_all_stages(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("call")
        async with self.toolspace(provider) as ts:
            seen, full = EventRecorder(ts), full_names(provider)[name]
            result = await within(ts.call(full, arguments))
            assert result.ok, result.error
            assert (result.tool, result.namespace, result.kind) == (full, provider.namespace, provider.kind)
            assert begins_and_ends(seen, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]

    @pytest.mark.asyncio
    async def test_arguments_that_do_not_fit_are_refused(self, provider: ToolProvider) -> None:
        name, _ = self._wanted("call")
        async with self.toolspace(provider) as ts:
            result = await within(ts.call(full_names(provider)[name], '["no object"]'))
        assert (result.error_kind, result.executed) == ("invalid_parameters", False)

    @pytest.mark.asyncio
    async def test_a_failure_is_a_result(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("failing_call")
        async with self.toolspace(provider) as ts:
            seen = EventRecorder(ts)
            result = await within(ts.call(full_names(provider)[name], arguments))
            assert begins_and_ends(seen, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
        assert result.error
        assert result.error_kind in ERROR_CLASSES
        assert result.error_kind not in ("unknown_tool", "internal_error"), result.error

    @pytest.mark.asyncio
    async def test_a_call_that_takes_too_long_is_stopped(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("slow_call")
        async with self.toolspace(provider) as ts:
            # An override, because it wins over what the tool itself says.
            hurry = ProviderRules(overrides={"*": ToolRules(timeout=0.05)})
            ts.orchestrator.configure(rules={provider: hurry})
            seen = EventRecorder(ts)
            result = await within(ts.call(full_names(provider)[name], arguments))
            assert result.error_kind == "timeout", result.error
            assert begins_and_ends(seen, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
            assert ts.orchestrator.abandoned_count == 0, "it had to be ended by force"
            await self._at_rest(provider)

    @pytest.mark.asyncio
    async def test_a_call_can_be_canceled_from_outside(self, provider: ToolProvider) -> None:
        name, arguments = self._wanted("slow_call")
        async with self.toolspace(provider) as ts:
            seen, full = EventRecorder(ts), full_names(provider)[name]
            task = asyncio.ensure_future(ts.call(full, arguments, call_id="contract"))
            await seen.wait_for_start(full)
            await self._at_work(provider, task)
            assert ts.cancel("contract")
            result = await within(task)
            assert result.error_kind == "canceled", result.error
            assert begins_and_ends(seen, result) == ["TOOL_CALL_REQUESTED", "TOOL_CALL_FAILED"]
            await self._at_rest(provider)

    # Inside

    def _wanted(self, which: str) -> Call:
        call: Call | None = getattr(self, which)
        if call is not None:
            return call
        if which == "call":
            pytest.fail(f'{type(self).__name__} needs a call that succeeds: call = ("tool", {{arguments}})')
        pytest.skip(f"give {which} = (tool, arguments) to check it")

    async def _at_work(self, provider: ToolProvider, task: asyncio.Future[Any]) -> None:
        if self.is_working(provider) is None:
            await asyncio.wait((task,), timeout=0.05)  # It cannot be seen: a moment to begin in.
        else:
            await until(lambda: task.done() or self.is_working(provider) is True, "the slow call does not begin")
        assert not task.done(), "the slow call has ended by itself; name one that takes seconds"

    async def _at_rest(self, provider: ToolProvider) -> None:
        await until(lambda: not self.is_working(provider), "the call has ended, but its work goes on")


@asynccontextmanager
async def started(provider: ToolProvider) -> AsyncGenerator[ToolProvider]:
    """The provider, started and closed again as a toolspace does it."""
    try:
        await within(provider.warmup())
        yield provider
    finally:
        await within(provider.aclose())


async def within(work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
    """What the work gives. Fails where it hangs."""
    async with asyncio.timeout(PATIENCE):
        return await work


async def outcome(work: Coroutine[Any, Any, ToolResult]) -> str:
    """How a call ended: `ok`, or what its failure says. It may raise or give a failed result, but must end."""
    limit = asyncio.timeout(PATIENCE)
    try:
        async with limit:
            result = await work
    except Exception as error:
        if limit.expired():
            pytest.fail(f"the call has not ended after {PATIENCE:.0f} s")
        return str(error) or type(error).__name__
    assert isinstance(result, ToolResult)
    return "ok" if result.ok else result.error or ""


async def until(condition: Callable[[], bool], failure: str) -> None:
    """Waits for what only looking can tell."""
    try:
        async with asyncio.timeout(PATIENCE):
            while not condition():  # noqa: ASYNC110 - it may happen in a thread or another process.
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(failure)


def full_names(provider: ToolProvider) -> Mapping[str, str]:
    """The provider's own name of each tool → the one it has in a toolspace."""
    names = [tool.name for tool in provider.list_tools()]
    return qualify_all(provider.namespace, names) if provider.namespace else {name: name for name in names}


def begins_and_ends(seen: EventRecorder, result: ToolResult) -> list[str]:
    return [event.type.name for event in seen.of_call(result.call_id) if event.type in (_BEGIN, *_ENDS)]
