"""SPEC 3.1: the provider contract passes for all providers here, and fails for providers with faults."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from toolspace import Tool, ToolContext, ToolProvider, ToolRegistry, ToolResult, Toolspace, tool
from toolspace.providers.plugins import MountedProvider
from toolspace.testing import MemoryOutputs, ProviderContract

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_provider.py"


def load_example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_provider_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NotesProvider = load_example().NotesProvider


@pytest.mark.spec("3.1")
class TestNotes(ProviderContract):
    call = ("write", {"title": "a", "text": "b"})
    failing_call = ("write", {"title": "a", "text": "b" * 1001})
    slow_call = ("wait_for", {"title": "never written"})

    @pytest.fixture
    def provider(self, tmp_path: Path) -> ToolProvider:
        return NotesProvider(tmp_path / "notes.db")

    def is_working(self, provider: Any) -> bool:
        return provider.waiting_count > 0


@pytest.mark.spec("3.1")
class TestMounted(TestNotes):
    """The provider as a configuration creates it."""

    @pytest.fixture
    def provider(self, tmp_path: Path) -> ToolProvider:
        return MountedProvider(NotesProvider(tmp_path / "notes.db"), "my notes")

    def is_working(self, provider: Any) -> bool:
        return provider.inner.waiting_count > 0


@pytest.mark.spec("3.1")
class TestRegistry(ProviderContract):
    call = ("double", {"number": 2})
    failing_call = ("refuse", {})
    slow_call = ("rest", {})
    resting_calls = 0

    @pytest.fixture
    def provider(self) -> ToolProvider:
        @tool
        async def double(number: int) -> int:
            """Doubles a number."""
            return number * 2

        @tool
        def refuse() -> None:
            raise ValueError("not today")

        @tool
        async def rest() -> None:
            self.resting_calls += 1
            try:
                await asyncio.sleep(60)
            finally:
                self.resting_calls -= 1

        return ToolRegistry([double, refuse, rest])

    def is_working(self, provider: ToolProvider) -> bool:
        return self.resting_calls > 0


@pytest.mark.spec("3.1")
class TestInternal(ProviderContract):
    call = ("find_tools", {"query": "report"})
    failing_call = ("read_output", {"handle": "session-none/0123456789abcdef"})

    @pytest.fixture
    def provider(self) -> ToolProvider:
        self.outer_toolspace = Toolspace(outputs=MemoryOutputs())
        return next(
            candidate for candidate in self.outer_toolspace.orchestrator.providers if candidate.namespace == "agent"
        )

    def toolspace(self, provider: ToolProvider) -> Toolspace:
        return self.outer_toolspace


class Sound(ToolProvider):
    """A provider without faults; subclasses have one fault each."""

    kind = namespace = "sound"

    def list_tools(self) -> Sequence[Tool]:
        return [Tool("echo", "Echoes.", {"type": "object"}), Tool("rest", "Rests.", {"type": "object"})]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        if name == "rest":
            await asyncio.sleep(60)
        elif name != "echo":
            raise LookupError(name)
        return ToolResult(ok=True, result=parameters)


class Contract(ProviderContract):
    call = ("echo", {"a": 1})
    slow_call = ("rest", {})


class Twice(Sound):
    def list_tools(self) -> Sequence[Tool]:
        return [*super().list_tools(), *super().list_tools()]


class Restless(Sound):
    list_count = 0

    def list_tools(self) -> Sequence[Tool]:
        self.list_count += 1
        return [Tool(f"tool{self.list_count}")]


class WrongSchema(Sound):
    def list_tools(self) -> Sequence[Tool]:
        return [Tool("echo", "", {"type": "object", "properties": {"a": {"type": "strnig"}}})]


class NoObject(Sound):
    def list_tools(self) -> Sequence[Tool]:
        return [Tool("echo", "", {"type": "string"})]


class NoJson(Sound):
    def list_tools(self) -> Sequence[Tool]:
        return [Tool("echo", "", {"type": "object", "default": {1, 2}})]


class HasAll(Sound):
    def has_tool(self, name: str) -> bool:
        return True


class AnswersAll(Sound):
    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(ok=True)


class NoResult(Sound):
    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> Any:
        return parameters


class OneResult(Sound):
    result = ToolResult(ok=True)

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return self.result


class Stubborn(Sound):
    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return ToolResult(ok=True)


class LateList(Sound):
    """Knows its tools only after its start, and does not call `notify_changed`."""

    ready = False

    async def warmup(self) -> None:
        self.ready = True

    def list_tools(self) -> Sequence[Tool]:
        return super().list_tools() if self.ready else ()


class NotReady(Sound):
    def list_tools(self) -> Sequence[Tool]:
        raise RuntimeError("not connected")


class NoSuper(Sound):
    def __init__(self) -> None:
        pass


@pytest.mark.spec("3.1")
@pytest.mark.parametrize(
    ("provider", "check", "message"),
    [
        (Twice, "tool_names_are_unique_and_stable", "two tools have the same name"),
        (Restless, "tool_names_are_unique_and_stable", "returns other names"),
        (WrongSchema, "its_definitions_are_json_with_valid_schemas", "'echo' is not a valid JSON Schema"),
        (NoObject, "its_definitions_are_json_with_valid_schemas", "the input schema is no object"),
        (NoJson, "its_definitions_are_json_with_valid_schemas", "not JSON serializable"),
        (HasAll, "it_has_the_tools_that_it_lists_and_no_other", "no_tool_has_this_name"),
        (AnswersAll, "an_unknown_tool_fails", "ok"),
        (NoResult, "a_call_returns_a_result", "isinstance"),
        (OneResult, "parallel_calls_each_get_a_result", "callers share a result"),
        (Stubborn, "cancelling_a_call_stops_the_work", "swallows CancelledError"),
        (NotReady, "it_can_be_queried_before_it_starts", "not connected"),
        (NoSuper, "listeners_are_called_until_they_unsubscribe", "_listeners"),
    ],
)
async def test_the_contract_finds(provider: type[ToolProvider], check: str, message: str) -> None:
    await getattr(Contract(), f"test_{check}")(Sound())  # Without the fault it passes.
    with pytest.raises(Exception, match=message):
        await getattr(Contract(), f"test_{check}")(provider())


@pytest.mark.spec("3.1")
async def test_a_tool_list_that_is_known_only_after_the_start_applies() -> None:
    await Contract().test_a_toolspace_offers_the_tools_that_it_lists(LateList())


@pytest.mark.spec("3.1")
async def test_the_contract_finds_work_that_outlives_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    from toolspace.testing import provider_contract

    monkeypatch.setattr(provider_contract, "TIMEOUT", 0.2)

    class LeavesWork(Sound):
        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            self.work = asyncio.create_task(asyncio.sleep(60))
            await asyncio.shield(self.work)
            return ToolResult(ok=True)

    class Watching(Contract):
        def is_working(self, provider: Any) -> bool:
            return hasattr(provider, "work") and not provider.work.done()

    provider = LeavesWork()
    with pytest.raises(pytest.fail.Exception, match="its work still runs"):
        await Watching().test_cancelling_a_call_stops_the_work(provider)
    provider.work.cancel()


async def test_missing_contract_attributes_fail_or_skip() -> None:
    with pytest.raises(pytest.fail.Exception, match="needs a call that succeeds"):
        await ProviderContract().test_a_call_returns_a_result(Sound())
    with pytest.raises(pytest.skip.Exception, match="set failing_call"):
        await Contract().test_a_failure_says_why(Sound())


@pytest.mark.spec("3.1")
async def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    await load_example().main()
    assert capsys.readouterr().out.splitlines() == [
        "shopping: 11 characters",
        "bread, milk",
        '(tool failed: Parameter validation failed: title: expected one of "shopping", got "shoping")',
    ]


async def run(*code: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "\n".join(code), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    return (await process.communicate())[0].decode()


@pytest.mark.spec("3.1")
async def test_only_the_contracts_need_pytest() -> None:
    out = await run(
        "import sys",
        "sys.modules['pytest'] = sys.modules['_pytest'] = None",
        "from toolspace.testing import FakeClock, MemoryCache, MemoryOutputs, EventRecorder",
        "try:",
        "    from toolspace.testing import ProviderContract",
        "except ImportError as error:",
        "    print(error)",
    )
    assert out.startswith("toolspace.testing.ProviderContract runs under pytest, and pytest is not installed; install")


async def test_other_names_are_attribute_errors() -> None:
    import toolspace.testing

    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        toolspace.testing.Nonsense  # noqa: B018
    assert "ProviderContract" in dir(toolspace.testing)
