"""SPEC 3.1 and 3.2: providers are added and removed, fail alone, and are filtered by rules."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests.orchestrator.test_catalog import Echo, names
from toolspace import EventType, ProviderError, Settings, Tool, ToolContext, ToolProvider, ToolResult, Toolspace, tool
from toolspace.core.events import ToolsChanged
from toolspace.orchestrator.effective_settings import ProviderRules, ToolRules
from toolspace.orchestrator.provider_startup import StartupWait
from toolspace.testing import EventRecorder


class Flaky(Echo):
    """A provider that cannot start while `broken` is true."""

    def __init__(self, namespace: str = "flaky") -> None:
        super().__init__(namespace)
        self.broken = True
        self.tries = 0
        self.closed = False

    async def warmup(self) -> None:
        self.tries += 1
        if self.broken:
            raise ConnectionError("nobody answers at 127.0.0.1:9")
        self.names = ["work"]

    def get_instructions(self) -> str:
        return "Be gentle."

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.spec("3.2")
async def test_a_provider_that_does_not_start_is_reported_and_does_not_affect_others() -> None:
    flaky = Flaky()
    async with Toolspace(providers=[flaky, Echo("good", "x")]) as ts:
        assert names(ts) == ["good__x"]
        assert ts.orchestrator.unavailable_providers() == {"flaky": "nobody answers at 127.0.0.1:9"}
        result = await ts.call("flaky__work", {"q": "x"})
        assert (result.error_kind, result.executed) == ("transport_error", False)
        assert "nobody answers" in (result.error or "")
        assert (await ts.call("good__x", {"q": "x"})).ok
    assert flaky.closed


@pytest.mark.spec("3.2")
async def test_it_is_retried_in_the_background_until_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    flaky = Flaky()
    monkeypatch.setattr("toolspace.orchestrator.provider_startup.RETRY_SECONDS", (0.01,))
    async with Toolspace(providers=[flaky]) as ts:
        recorder = EventRecorder(ts)
        flaky.broken = False
        await recorder.wait_for(lambda event: event.type is EventType.TOOLS_CHANGED)
        assert names(ts) == ["flaky__work"]
        assert (await ts.call("flaky__work", {"q": "x"})).ok
        assert ts.orchestrator.unavailable_providers() == {}


PROGRAM = """
import asyncio
from toolspace import Toolspace, tool
from tests.orchestrator.test_providers import Flaky

@tool
def fail() -> str:
    raise ValueError("the result says this")

async def main():
    async with Toolspace(tools=[fail], providers=[Flaky()]) as ts:
        assert not (await ts.call("fail")).ok

asyncio.run(main())
"""


@pytest.mark.spec("3.2")
def test_a_program_without_logging_sees_that_a_provider_did_not_start() -> None:
    process = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert process.stderr == "provider flaky is not available: nobody answers at 127.0.0.1:9\n"


@pytest.mark.spec("3.2")
async def test_a_provider_that_fails_for_changing_reasons_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("toolspace.orchestrator.provider_startup.RETRY_SECONDS", (0.001,))
    later_attempt = asyncio.Event()

    class Changing(Flaky):
        async def warmup(self) -> None:
            self.tries += 1
            if self.tries > 3:
                later_attempt.set()
            raise ConnectionError(f"attempt {self.tries} failed")

    with caplog.at_level(logging.INFO, logger="toolspace.providers"):
        async with Toolspace(providers=[Changing()]):
            await later_attempt.wait()
    records = [(record.levelno, record.getMessage()) for record in caplog.records][:2]
    assert records == [
        (logging.WARNING, "provider flaky is not available: attempt 1 failed"),
        (logging.INFO, "provider flaky is not available: attempt 2 failed"),
    ]
    assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1


@pytest.mark.spec("3.2")
async def test_a_required_provider_fails_the_start_and_everything_is_closed() -> None:
    flaky, good = Flaky(), Flaky("good")
    good.broken = False
    ts = Toolspace(providers=[good])
    ts.orchestrator.register(flaky, ProviderRules(required=True))
    with pytest.raises(ProviderError, match="flaky: nobody answers"):
        await ts.__aenter__()
    assert flaky.closed
    assert good.closed


@pytest.mark.spec("3.2")
@pytest.mark.parametrize(
    ("allowed", "denied", "expected"),
    [
        (None, (), ["get_user", "delete_user", "Delete_Repo"]),
        (["get_*"], (), ["get_user"]),
        (None, ["DELETE_*"], ["get_user"]),
        (["*_user"], ["delete_user"], ["get_user"]),
        ([], (), []),
    ],
)
async def test_tools_are_allowed_and_denied_by_globs_and_deny_wins(
    allowed: list[str] | None, denied: Sequence[str], expected: list[str]
) -> None:
    ts = Toolspace()
    ts.orchestrator.register(
        Echo("s", "get_user", "delete_user", "Delete_Repo"), ProviderRules(tools_allowed=allowed, tools_denied=denied)
    )
    async with ts:
        assert names(ts) == [f"s__{name}" for name in expected]
        for name in ("get_user", "delete_user", "Delete_Repo"):
            result = await ts.call(f"s__{name}", {"q": "x"})
            assert result.ok == (name in expected)
            if not result.ok:
                assert (result.error_kind, result.executed) == ("not_permitted", False)
                assert (result.error or "").startswith("Permission denied: ")


@pytest.mark.spec("4.1")
async def test_a_denied_call_never_reaches_the_provider() -> None:
    reached_names: list[str] = []

    class Watched(Echo):
        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            reached_names.append(name)
            return await super().execute(name, parameters, context)

    ts = Toolspace()
    ts.orchestrator.register(Watched("s", "a", "b"), ProviderRules(tools_denied=["b"]))
    async with ts:
        await ts.call("s__a", {"q": "x"})
        await ts.call("s__b", {"q": "x"})
        await ts.call("s__a", {"wrong": "x"})
    assert reached_names == ["a"]


@pytest.mark.spec("3.2")
async def test_rules_of_a_provider_apply_to_its_tools() -> None:
    class Slow(Echo):
        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            await asyncio.sleep(60)
            raise AssertionError

    ts = Toolspace()
    ts.orchestrator.register(
        Slow("s", "x"), ProviderRules(rules=ToolRules(timeout=0.02, source="file:3 (mcpServers.s)"))
    )
    async with ts:
        result = await ts.call("s__x", {"q": "1"})
        explanation = ts.orchestrator.explain("s__x")
    assert result.error == "Tool execution timed out after 20ms"
    assert explanation is not None
    assert explanation[1].timeout.source == "file:3 (mcpServers.s.timeout)"


@pytest.mark.spec("4.4")
async def test_a_tools_own_timeout_beats_its_providers_and_that_beats_the_default() -> None:
    class Slow(Echo):
        def list_tools(self) -> Sequence[Tool]:
            return [Tool("own", "", {"type": "object"}, timeout=0.02), Tool("other", "", {"type": "object"})]

        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            await asyncio.sleep(60)
            raise AssertionError

    ts = Toolspace()
    ts.orchestrator.register(Slow("s"), ProviderRules(rules=ToolRules(timeout=0.03)))
    async with ts:
        errors = [(await ts.call(name)).error for name in ("s__own", "s__other")]
    assert errors == ["Tool execution timed out after 20ms", "Tool execution timed out after 30ms"]


@pytest.mark.spec("3.1")
async def test_a_changed_tool_list_applies_without_a_restart() -> None:
    echo = Echo("s", "one")
    async with Toolspace(providers=[echo]) as ts:
        recorder = EventRecorder(ts)
        echo.names = ["two", "three"]
        echo.notify_changed()
        assert names(ts) == ["s__two", "s__three"]
        assert recorder.types() == ["TOOLS_CHANGED"]
        assert (await ts.call("s__one", {"q": "x"})).error_kind == "unknown_tool"
        assert (await ts.call("s__two", {"q": "x"})).ok


@pytest.mark.spec("3.1")
async def test_a_provider_added_at_run_time_is_warmed_up_and_can_be_removed() -> None:
    flaky = Flaky()
    flaky.broken = False
    async with Toolspace() as ts:
        await ts.add_provider(flaky)
        flaky.notify_changed()
        assert names(ts) == ["flaky__work"]
        assert "Be gentle." in ts.orchestrator.instructions()
        await ts.orchestrator.unregister(flaky)
        assert names(ts) == []
    assert flaky.closed


async def test_tools_are_added_and_removed_at_run_time() -> None:
    @tool
    async def late() -> str:
        return "here"

    async with Toolspace() as ts:
        recorder = EventRecorder(ts)
        ts.add_tool(late)
        assert (await ts.call("late")).result == "here"
        ts.remove_tool("late")
        assert (await ts.call("late")).error_kind == "unknown_tool"
        assert recorder.types().count("TOOLS_CHANGED") == 2


async def test_an_exception_of_a_provider_is_a_failed_result() -> None:
    class Broken(Echo):
        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            raise OSError("pipe broke")

    async with Toolspace(providers=[Broken("s", "x")]) as ts:
        result = await ts.call("s__x", {"q": "1"})
    assert (result.error_kind, result.error) == ("execution_error", "pipe broke")


async def test_arguments_are_validated_and_coerced_before_the_provider() -> None:
    received_items: list[dict[str, Any]] = []

    class Typed(ToolProvider):
        kind, namespace = "typed", "t"

        def list_tools(self) -> Sequence[Tool]:
            return [Tool("n", "", {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})]

        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            received_items.append(parameters)
            return ToolResult(ok=True, result=None)

    async with Toolspace(providers=[Typed()]) as ts:
        assert (await ts.call("t__n", '{"n": "5"}')).ok
        assert (await ts.call("t__n", {"n": "five"})).error_kind == "invalid_parameters"
    assert received_items == [{"n": 5}]


@pytest.mark.spec("3.2")
@pytest.mark.parametrize("name", ["x", "s__x", "S__*"])
async def test_an_override_names_a_tool_by_its_own_or_its_full_name(name: str) -> None:
    ts = Toolspace()
    ts.orchestrator.register(
        Echo("s", "x", "y"), ProviderRules(overrides={name: ToolRules(enabled=False, source="here")})
    )
    async with ts:
        result = await ts.call("s__x", {"q": "1"})
    assert result.error == 'Permission denied: tool "s__x" is disabled (here.enabled)'


@pytest.mark.spec("3.2")
async def test_an_unavailable_provider_with_an_unusual_namespace_reports_its_reason() -> None:
    async with Toolspace(providers=[Flaky("my-notes")]) as ts:
        for name in ("my_notes__work", "my-notes__work"):
            assert "nobody answers" in ((await ts.call(name)).error or "")


@pytest.mark.spec("5.3")
async def test_overrides_hold_key_by_key_and_the_most_specific_wins() -> None:
    overrides = {
        "get_*": ToolRules(timeout=7, enabled=False, source="b"),
        "*": ToolRules(timeout=9, cache=60, source="a"),
        "get_user": ToolRules(enabled=True, source="c"),
    }
    ts = Toolspace()
    ts.orchestrator.register(Echo("s", "get_user", "get_repo", "put"), ProviderRules(overrides=overrides))
    async with ts:
        assert names(ts) == ["s__get_user", "s__put"]
        explanation = ts.orchestrator.explain("s__get_user")
        assert explanation is not None
        assert (explanation[1].timeout.value, explanation[1].timeout.source) == (7, "b.timeout")
        assert (explanation[1].cache.value, explanation[1].cache.source) == (60, "a.cache")
        assert (await ts.call("s__get_repo", {"q": "1"})).error_kind == "not_permitted"


class Hanging(Echo):
    """A provider whose start never ends."""

    def __init__(self, namespace: str = "hanging") -> None:
        super().__init__(namespace)
        self.stopped = False

    async def warmup(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped = True


@pytest.mark.spec("3.2")
async def test_a_provider_that_hangs_delays_the_start_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolspace.orchestrator.provider_startup.DEFAULT_WAIT_SECONDS", 0.05)
    flaky, hanging_provider = Flaky(), Hanging()
    flaky.broken = False
    async with asyncio.timeout(5), Toolspace(providers=[hanging_provider, flaky]) as ts:
        assert names(ts) == ["flaky__work"]
        assert ts.orchestrator.unavailable_providers() == {
            "hanging": "it has not started within 50ms; it is still starting"
        }
        failed = await ts.call("hanging__work", {"q": "x"})
        assert (failed.error_kind, failed.executed) == ("transport_error", False)
    assert hanging_provider.stopped


async def test_a_required_provider_that_hangs_fails_the_start() -> None:
    hanging_provider = Hanging()
    ts = Toolspace()
    ts.startup_wait = StartupWait(seconds=0.05)
    ts.orchestrator.register(hanging_provider, ProviderRules(required=True))
    async with asyncio.timeout(5):
        with pytest.raises(ProviderError, match="hanging: it has not started within 50ms"):
            await ts.__aenter__()
    assert hanging_provider.stopped


async def test_tools_of_a_fast_provider_are_available_while_a_slow_one_starts() -> None:
    flaky, hanging_provider = Flaky(), Hanging()
    flaky.broken = False
    ts = Toolspace(providers=[hanging_provider, flaky])
    recorder = EventRecorder(ts)
    open_task = asyncio.create_task(ts.__aenter__())
    await recorder.wait_for(lambda event: isinstance(event, ToolsChanged) and event.namespace == "flaky")
    assert names(ts) == ["flaky__work"]
    open_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await open_task
    assert hanging_provider.stopped


async def test_a_provider_whose_start_is_cancelled_from_inside_fails_alone() -> None:
    class Cancelled(Echo):
        async def warmup(self) -> None:
            raise asyncio.CancelledError("a broken stream")

        async def aclose(self) -> None:
            raise asyncio.CancelledError("again")

    flaky = Flaky()
    flaky.broken = False
    async with Toolspace(providers=[Cancelled("odd"), flaky]) as ts:
        assert names(ts) == ["flaky__work"]
        assert "odd" in ts.orchestrator.unavailable_providers()
    assert flaky.closed


async def test_a_provider_removed_during_its_start_is_not_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Flaky):
        def __init__(self) -> None:
            super().__init__("slow")
            self.reached_names = asyncio.Event()
            self.go = asyncio.Event()

        async def warmup(self) -> None:
            self.reached_names.set()
            await self.go.wait()
            await super().warmup()

    slow = Slow()
    async with Toolspace() as ts:
        add_task = asyncio.create_task(ts.add_provider(slow))
        await slow.reached_names.wait()
        await ts.orchestrator.unregister(slow)
        slow.go.set()
        await add_task
        assert ts.orchestrator.unavailable_providers() == {}
        assert slow.tries == 0


async def test_a_provider_that_raises_does_not_affect_the_tools_of_others() -> None:
    class Mute(Echo):
        def get_instructions(self) -> str:
            raise ValueError("no words")

        def is_offered(self, tool: Tool, context: ToolContext) -> bool:
            raise ValueError("no idea")

    flaky = Flaky()
    flaky.broken = False
    async with Toolspace(providers=[Mute("mute", "work"), flaky]) as ts:
        assert names(ts) == ["flaky__work"]
        assert ts.orchestrator.instructions() == "## flaky\nBe gentle."


@pytest.mark.parametrize("pattern", ["x", "s__x", "S__*", "?"])
async def test_overrides_of_the_settings_apply_to_the_providers_of_a_program(pattern: str) -> None:
    overrides = {pattern: ToolRules(enabled=False, source="here")}
    async with Toolspace(providers=[Echo("s", "x")], settings=Settings(overrides=overrides)) as ts:
        await ts.add_provider(Echo("t", "x"), ProviderRules(overrides={"*": ToolRules(timeout=2)}))
        assert (await ts.call("s__x", {"q": "1"})).error == 'Permission denied: tool "s__x" is disabled (here.enabled)'
        assert (await ts.call("t__x", {"q": "1"})).ok is (pattern in ("s__x", "S__*"))
        explanation = ts.orchestrator.explain("t__x")
    assert explanation is not None
    assert explanation[1].timeout.value == 2


@pytest.mark.parametrize("pattern", ["agent__batch", "agent__*", "AGENT__b*"])
async def test_overrides_of_the_settings_remove_tools_of_the_agent_namespace(pattern: str) -> None:
    async with Toolspace(settings=Settings(overrides={pattern: ToolRules(enabled=False)})) as ts:
        run = ts.run()
        names = [tool["function"]["name"] for tool in ts.to_llm_tools(run=run)]
        result = await ts.call("agent__batch", {"calls": []}, run=run)
    assert "agent__batch" not in names
    assert ("agent__final_report" in names) is (pattern != "agent__*")
    assert result.error_kind == "not_permitted"


async def test_a_pattern_without_a_namespace_leaves_the_tools_that_control_a_run_alone() -> None:
    async with Toolspace(settings=Settings(overrides={"*": ToolRules(enabled=False)})) as ts:
        names = [tool["function"]["name"] for tool in ts.to_llm_tools(run=ts.run())]
    assert "agent__final_report" in names


async def test_a_denied_search_tool_is_not_shown_to_a_model() -> None:
    settings = Settings(overrides={"agent__find_tools": ToolRules(enabled=False)}, tool_search_threshold=0)
    async with Toolspace(providers=[Echo("s", "x")], settings=settings) as ts:
        names = [tool["function"]["name"] for tool in ts.to_llm_tools(run=ts.run())]
    assert "agent__find_tools" not in names
    assert "s__x" in names


SPELLINGS = ["fs__delete-file", "fs__delete_file", "delete-file", "delete_file", "FS__delete*", "rm", "erase"]


def deny(pattern: str) -> ProviderRules:
    return ProviderRules(tools_denied=[pattern])


@pytest.mark.parametrize("pattern", SPELLINGS)
@pytest.mark.parametrize("requested_name", ["fs__delete-file", "fs__delete_file", "delete_file", "rm"])
async def test_deny_lists_overrides_and_allow_lists_match_every_spelling(pattern: str, requested_name: str) -> None:
    aliases = {"rm": "fs__delete_file", "erase": "rm"}
    for rules in (deny(pattern), ProviderRules(overrides={pattern: ToolRules(enabled=False)})):
        async with Toolspace(settings=Settings(aliases=aliases)) as ts:
            await ts.add_provider(Echo("fs", "delete-file", "find"), rules)
            assert (await ts.call(requested_name, {"q": "1"})).error_kind == "not_permitted"
            assert (await ts.call("fs__find", {"q": "1"})).ok
    async with Toolspace(settings=Settings(aliases=aliases)) as ts:
        await ts.add_provider(Echo("fs", "delete-file", "find"), ProviderRules(tools_allowed=[pattern]))
        assert (await ts.call(requested_name, {"q": "1"})).ok
        assert (await ts.call("fs__find", {"q": "1"})).error_kind == "not_permitted"


async def test_a_pattern_without_a_namespace_does_not_match_the_namespace() -> None:
    async with Toolspace() as ts:
        await ts.add_provider(Echo("fs", "delete-file", "find"), ProviderRules(tools_allowed=["f*"]))
        assert (await ts.call("fs__delete_file", {"q": "1"})).error_kind == "not_permitted"
        assert (await ts.call("fs__find", {"q": "1"})).ok


async def test_a_pattern_that_fits_no_tool_of_its_provider_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    overrides = {"fs__nope": ToolRules(timeout=1), "other__x": ToolRules(timeout=1), "fs__find": ToolRules(timeout=1)}
    rules = ProviderRules(tools_denied=["delete_fil", "delete_file"], overrides=overrides)
    provider = Echo("fs", "delete-file", "find")
    async with Toolspace() as ts:
        await ts.add_provider(provider, rules)
        provider.notify_changed()
    assert [record.getMessage() for record in caplog.records if "matches no tool" in record.getMessage()] == [
        'provider fs: toolsDenied: "delete_fil" matches no tool',
        'provider fs: overrides: "fs__nope" matches no tool',
    ]


async def test_an_override_of_a_program_that_fits_no_tool_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    overrides = {name: ToolRules(enabled=False) for name in ("fnd", "gs__*", "find", "agent__batch")}
    async with Toolspace(providers=[Echo("fs", "find")], settings=Settings(overrides=overrides)):
        messages = [record.getMessage() for record in caplog.records]
    assert messages == [f'Settings.overrides: "{name}" matches no tool' for name in ("fnd", "gs__*")]
