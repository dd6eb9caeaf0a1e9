"""SPEC 2: full names, aliases, bare names, and unknown names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from toolspace import Settings, Tool, ToolContext, ToolNameConflict, ToolProvider, ToolResult, Toolspace, tool
from toolspace.orchestrator.effective_settings import ProviderRules

SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]}


class Echo(ToolProvider):
    """A provider whose tools return their own name."""

    kind = "echo"

    def __init__(self, namespace: str, *names: str, schema: dict[str, Any] = SCHEMA) -> None:
        super().__init__()
        self.namespace = namespace
        self.names = list(names)
        self._schema = schema

    def list_tools(self) -> Sequence[Tool]:
        return [Tool(name, f"Echoes {name}", self._schema) for name in self.names]

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(ok=True, result=f"{self.namespace}:{name}")


def names(ts: Toolspace) -> list[str]:
    return [listed_tool.name for listed_tool in ts.list_tools()]


@pytest.mark.spec("2.1")
async def test_local_tools_have_bare_names_and_providers_a_namespace() -> None:
    @tool
    async def local() -> None: ...

    async with Toolspace(tools=[local], providers=[Echo("github", "search_code")]) as ts:
        assert names(ts) == ["local", "github__search_code"]
        result = await ts.call("github__search_code", {"q": "x"})
    assert (result.result, result.namespace, result.kind) == ("github:search_code", "github", "echo")


@pytest.mark.spec("2.2")
async def test_names_are_sanitised_and_at_most_64_long() -> None:
    long = "a_very_long_tool_name_that_goes_on_and_on_" * 3
    async with Toolspace(providers=[Echo("my server", "My-Tool", long)]) as ts:
        first, second = names(ts)
        assert first == "my_server__My_Tool"
        assert len(second) <= 64
        assert second.startswith("my_server__a_very_long")
        assert (await ts.call(second, {"q": "x"})).result == f"my server:{long}"


@pytest.mark.spec("2.2")
async def test_a_tool_has_the_same_name_in_any_order() -> None:
    long = ["x" * 80 + "1", "x" * 80 + "2", "short"]
    forward = Toolspace(providers=[Echo("s", *long), Echo("t", *long)])
    backward = Toolspace(providers=[Echo("t", *reversed(long)), Echo("s", *reversed(long))])
    assert sorted(names(forward)) == sorted(names(backward))
    assert len(set(names(forward))) == 6


@pytest.mark.spec("2.3")
async def test_two_names_that_collide_after_sanitising_both_get_the_hash() -> None:
    async with Toolspace(providers=[Echo("s", "get-user", "get.user", "other")]) as ts:
        full_names = names(ts)
        assert "s__get_user" not in full_names
        assert len(full_names) == 3
        answers = {name: (await ts.call(name, {"q": "x"})).result for name in full_names}
    assert set(answers.values()) == {"s:get-user", "s:get.user", "s:other"}


@pytest.mark.spec("2.3")
def test_two_tools_with_one_name_are_an_error_that_names_both_owners() -> None:
    @tool(name="same")
    async def first() -> None: ...

    @tool(name="same")
    async def second() -> None: ...

    with pytest.raises(ToolNameConflict, match=r"first .* and .*second"):
        Toolspace(tools=[first, second])
    with pytest.raises(ToolNameConflict, match="by 'a' and 'a'"):
        Toolspace(providers=[Echo("a", "x"), Echo("a", "x")])


@pytest.mark.spec("2.3")
async def test_a_refused_tool_leaves_everything_as_it_was() -> None:
    @tool(name="same")
    async def first() -> str:
        return "first"

    @tool(name="same")
    async def second() -> str:
        return "second"

    @tool
    async def third() -> None: ...

    async with Toolspace(tools=[first]) as ts:
        with pytest.raises(ToolNameConflict):
            ts.registry.register_many([third, second])
        assert names(ts) == ["same"]
        assert (await ts.call("same")).result == "first"


@pytest.mark.spec("2.4")
@pytest.mark.parametrize("requested_name", ["github__search-code", "search-code", "search_code", "find"])
async def test_a_call_resolves_through_spelling_bare_name_and_alias(requested_name: str) -> None:
    settings = Settings(aliases={"find": "github__search_code"})
    async with Toolspace(providers=[Echo("github", "search-code")], settings=settings) as ts:
        result = await ts.call(requested_name, {"q": "x"})
        record = ts.orchestrator.call_log.recent[-1]
    assert result.result == "github:search-code"
    assert (record.requested_name, record.tool) == (requested_name, "github__search_code")


@pytest.mark.spec("2.4")
async def test_a_bare_name_that_several_offer_or_whose_arguments_do_not_fit_is_not_guessed() -> None:
    other_schema = {"type": "object", "properties": {"other": {"type": "string"}}, "required": ["other"]}
    providers = [Echo("a", "search"), Echo("b", "search", schema=other_schema), Echo("c", "only")]
    async with Toolspace(providers=providers) as ts:
        several = await ts.call("search", {"q": "x"})  # The arguments fit only one of them, but that does not decide.
        misfit = await ts.call("only", {"wrong": 1})
        fits = await ts.call("only", {"q": "x"})
    assert several.error_kind == misfit.error_kind == "unknown_tool"
    assert '"a__search"' in (several.error or "")
    assert '"b__search"' in (several.error or "")
    assert '"c__only"' in (misfit.error or "")
    assert fits.ok


@pytest.mark.spec("2.4")
async def test_an_alias_of_an_alias_and_a_circle_of_them_end() -> None:
    settings = Settings(aliases={"a": "b", "b": "s__x", "loop": "pool", "pool": "loop"})
    async with Toolspace(providers=[Echo("s", "x")], settings=settings) as ts:
        assert (await ts.call("a", {"q": "x"})).ok
        assert (await ts.call("loop", {"q": "x"})).error_kind == "unknown_tool"


@pytest.mark.spec("2.4")
async def test_a_bare_name_is_resolved_in_an_unusual_namespace() -> None:
    async with Toolspace(providers=[Echo("my-server", "do-it")]) as ts:
        for requested_name in ("do-it", "do_it", "my-server__do-it", "my_server__do_it"):
            result = await ts.call(requested_name, {"q": "x"})
            assert (result.tool, result.result) == ("my_server__do_it", "my-server:do-it"), requested_name


async def test_a_bare_name_of_a_tool_whose_schema_is_broken_fails_as_a_result() -> None:
    async with Toolspace(providers=[Echo("odd", "thing", schema={"type": "no such type"})]) as ts:
        full, bare = await ts.call("odd__thing", {}), await ts.call("thing", {})
        assert full.error_kind == bare.error_kind == "internal_error"
        assert full.error == bare.error


async def test_an_alias_of_a_tool_name_ends_there() -> None:
    settings = Settings(aliases={"a": "local", "local": "elsewhere"})

    @tool
    async def local() -> str:
        return "local"

    @tool
    async def elsewhere() -> str:
        return "elsewhere"

    async with Toolspace(tools=[local, elsewhere], settings=settings) as ts:
        assert (await ts.call("a")).result == (await ts.call("local")).result == "local"


@pytest.mark.spec("2.3")
async def test_adding_a_tool_with_a_used_name_is_an_error_that_names_both_providers() -> None:
    @tool
    async def my_tool() -> str:
        return "mine"

    class Bare(Echo):
        kind = "theirs"

    async with Toolspace(providers=[Bare("", "my_tool", schema={"type": "object"})]) as ts:
        with pytest.raises(ToolNameConflict, match=r'"my_tool" is offered by .theirs. and .local.'):
            ts.add_tool(my_tool)
        assert ts.registry.get("my_tool") is None
        assert (await ts.call("my_tool", {})).result == ":my_tool"


@pytest.mark.spec("2.3")
async def test_a_name_conflict_after_a_change_is_logged_and_ends_when_the_name_is_free(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = Echo("", "one"), Echo("", "two")
    first.kind, second.kind = "first", "second"
    async with Toolspace(providers=[first, second]) as ts:
        second.names = ["two", "one", "three"]
        second.notify_changed()
        assert names(ts) == ["one", "two", "three"]
        assert [record.getMessage() for record in caplog.records] == [
            "\"one\" is offered by 'first' and 'second'; using that of 'first'"
        ]
        first.names = []
        first.notify_changed()
        assert names(ts) == ["two", "one", "three"]
        assert (await ts.call("one", {"q": ""})).kind == "second"


async def test_a_changed_tool_list_keeps_its_position() -> None:
    first, second = Echo("a", "x"), Echo("b", "y")
    async with Toolspace(providers=[first, second]) as ts:
        first.names = ["x", "z"]
        first.notify_changed()
        assert names(ts) == ["a__x", "a__z", "b__y"]


async def test_a_provider_that_cannot_list_its_tools_keeps_its_last_list(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Breaking(Echo):
        broken = False

        def list_tools(self) -> Sequence[Tool]:
            if self.broken:
                raise ConnectionError("gone")
            return super().list_tools()

    breaking_provider = Breaking("a", "x", "y")
    async with Toolspace(providers=[breaking_provider, Echo("b", "z")]) as ts:
        breaking_provider.broken = True
        breaking_provider.notify_changed()
        assert names(ts) == ["a__x", "a__y", "b__z"]
        assert "a cannot list its tools: ConnectionError('gone')" in caplog.text
        ts.orchestrator.configure(rules={breaking_provider: ProviderRules(tools_denied=["x"])})
        assert names(ts) == ["a__y", "b__z"]
        assert (await ts.call("a__x", {"q": ""})).error_kind == "not_permitted"
