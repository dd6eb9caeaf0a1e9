"""18: the registry without an orchestrator."""

from __future__ import annotations

from typing import Any

import pytest

from toolspace import Tool, ToolCategory, ToolContext, ToolDefinitionError, ToolNotFoundError, ToolRegistry, tool


@tool(category="data")
async def double(n: int) -> int:
    """Doubles a number."""
    return n * 2


@tool(category="system")
def shout(text: str, context: ToolContext) -> str:
    return f"{text.upper()} for {context.user_id}"


@pytest.mark.spec("18")
async def test_a_registry_stores_finds_lists_counts_and_runs_tools() -> None:
    registry = ToolRegistry()
    registry.register(double)
    registry.register_many([shout])
    assert registry.get("double") is double
    assert registry.get("triple") is None
    assert (registry.has("shout"), registry.has("whisper")) == (True, False)
    assert registry.list() == [double, shout]
    assert registry.list_by_category(ToolCategory.DATA) == [double]
    assert registry.list_by_category("system") == [shout]
    assert [definition["name"] for definition in registry.to_llm_tools(format="anthropic")] == ["double", "shout"]
    assert registry.to_llm_tools()[0]["function"]["parameters"]["required"] == ["n"]
    context = ToolContext(user_id="ann")
    assert (await registry.execute("double", {"n": 4}, context)).result == 8
    assert (await registry.execute("shout", {"text": "hi"}, context)).result == "HI for ann"
    with pytest.raises(ToolNotFoundError, match='did you mean "double"'):
        await registry.execute("duoble", {}, context)


@pytest.mark.spec("18")
def test_callers_can_update_the_statistics() -> None:
    registry = ToolRegistry([double, shout])
    for duration in (10.0, 20.0, 30.0):
        registry.update_call_stats("double", duration, True)
    registry.update_call_stats("double", 40.0, False)
    stats = registry.get_stats()
    assert (stats.total, stats.by_category) == (2, {"data": 1, "system": 1})
    assert stats.call_stats["double"]["count"] == 4
    assert stats.call_stats["double"]["failures"] == 1
    assert stats.call_stats["double"]["avgDuration"] == 25.0


def test_an_unsupported_type_hint_is_rejected_at_registration() -> None:
    @tool
    async def odd(value: NoSuchType) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    class Handle:
        pass

    async def opaque(handle: Handle) -> None: ...

    registry = ToolRegistry([double])
    for broken in (odd, opaque):
        with pytest.raises(ToolDefinitionError, match=r"odd|opaque"):
            registry.register(broken)
    assert registry.list() == [double]


def test_a_name_that_models_do_not_accept_is_rejected() -> None:
    for name in ("has space", "", "ü", "x" * 65, "a.b"):
        with pytest.raises(ToolDefinitionError, match="cannot name a tool"):
            ToolRegistry([Tool(name, handler=lambda parameters, context: None)])


def test_a_plain_function_becomes_a_tool() -> None:
    def greet(name: str = "you") -> Any:
        """Greets."""
        return name

    tool = ToolRegistry().register(greet)
    assert (tool.name, tool.description) == ("greet", "Greets.")
