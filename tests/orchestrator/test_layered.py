"""Layered orchestrators: tools on top of those of a parent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolspace import (
    Allow,
    Deny,
    EventType,
    QueueSpec,
    Settings,
    Tool,
    ToolContext,
    ToolProvider,
    ToolResult,
    ToolRules,
    Toolspace,
    tool,
)
from toolspace.orchestrator.pipeline import CallHandler, StageContext


@tool
async def low() -> str:
    """A tool of the parent."""
    return "low"


@tool
async def high() -> str:
    """A tool of the layer."""
    return "high"


@tool(name="both")
async def both_low() -> str:
    """A tool of the parent."""
    return "low"


@tool(name="both")
async def both_high() -> str:
    """A tool of the layer."""
    return "high"


class Notes(ToolProvider):
    """A provider with a namespace."""

    kind = "notes"
    namespace = "notes"

    def __init__(self, *names: str) -> None:
        super().__init__()
        self._names = names

    def list_tools(self) -> list[Tool]:
        return [Tool(name) for name in self._names]

    def get_instructions(self) -> str:
        return f"Notes of {', '.join(self._names)}."

    async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
        return ToolResult(ok=True, result=name)


def names(ts: Toolspace) -> list[str]:
    return sorted(listed_tool.name for listed_tool in ts.list_tools())


async def test_names_of_a_layer_win_and_the_parents_other_tools_remain() -> None:
    async with Toolspace([low, both_low]) as parent, Toolspace([high, both_high], parent=parent) as layer:
        assert names(layer) == ["both", "high", "low"]
        assert names(parent) == ["both", "low"]
        assert [(await layer.call(name)).result for name in ("low", "high", "both")] == ["low", "high", "high"]
        assert (await parent.call("both")).result == "low"


async def test_a_name_that_a_layer_removes_is_the_parents_again() -> None:
    async with Toolspace([both_low]) as parent, Toolspace([both_high], parent=parent) as layer:
        layer.remove_tool("both")
        assert (await layer.call("both")).result == "low"
        layer.add_tool(both_high)
        assert (await layer.call("both")).result == "high"
        assert names(layer) == ["both"]


async def test_tools_added_to_the_parent_later_are_inherited() -> None:
    async with Toolspace() as parent, Toolspace([high], parent=parent) as layer:
        parent.add_tool(low)
        assert (await layer.call("low")).result == "low"
        parent.remove_tool("low")
        assert (await layer.call("low")).error_kind == "unknown_tool"


async def test_a_namespace_of_a_layer_hides_the_same_namespace_of_the_parent() -> None:
    async with (
        Toolspace(providers=[Notes("read", "write")]) as parent,
        Toolspace(providers=[Notes("read")], parent=parent) as layer,
        Toolspace([high], parent=parent) as other_toolspace,
    ):
        assert names(layer) == ["notes__read"]
        assert names(other_toolspace) == ["high", "notes__read", "notes__write"]
        assert layer.orchestrator.instructions() == "## notes\nNotes of read."
        assert other_toolspace.orchestrator.instructions() == "## notes\nNotes of read, write."
        result = await other_toolspace.call("notes__write")
        assert (result.result, result.kind, result.namespace) == ("write", "notes", "notes")


async def test_queues_caches_rules_and_policies_of_the_parent_apply() -> None:
    ran = active = most = 0

    @tool(queue="narrow", cache=60.0)
    async def slow(n: int) -> int:
        """Takes a while."""
        nonlocal ran, active, most
        ran, active = ran + 1, active + 1
        most = max(most, active)
        await asyncio.sleep(0)
        active -= 1
        return n

    class NotLow:
        rule = "low is for others"

        def decide(self, tool: Tool, context: ToolContext) -> Any:
            return Deny("no") if tool.name in ("low", "high") else Allow()

    settings = Settings(
        queues={"narrow": QueueSpec(concurrent=1)}, overrides={"both": ToolRules(enabled=False)}, policies=[NotLow()]
    )
    async with (
        Toolspace([slow, low, both_low], settings=settings) as parent,
        Toolspace([high], parent=parent) as layer,
        Toolspace(parent=parent) as other_toolspace,
    ):
        await asyncio.gather(*(ts.call("slow", {"n": n}) for ts in (layer, other_toolspace, parent) for n in (1, 2, 3)))
        assert (ran, most) == (3, 1)
        assert [(await layer.call(name)).error_kind for name in ("low", "high")] == ["not_permitted"] * 2
        assert (await layer.call("both")).error_kind == "unknown_tool"
        assert names(layer) == ["slow"]
        parent.orchestrator.configure(policies=())
        assert [(await layer.call(name)).result for name in ("low", "high")] == ["low", "high"]


async def test_subscribers_of_the_parent_see_the_calls_of_its_layers() -> None:
    tool_names: list[str] = []
    stage_names: list[str] = []

    def stage(plan: StageContext, next: CallHandler, /) -> CallHandler:
        async def run(call: Any) -> ToolResult:
            stage_names.append(call.entry.tool.name)
            return await next(call)

        return run

    async with Toolspace([low]) as parent, Toolspace([high], parent=parent) as layer:
        parent.bus.subscribe(lambda event: tool_names.append(event.tool_name), EventType.TOOL_CALL_COMPLETED)
        await layer.call("high")
        remove = parent.orchestrator.add_stage(stage)
        await layer.call("low")
        await layer.call("high")
        remove()
        await layer.call("high")
        assert tool_names == ["high", "low", "high", "high"]
        assert stage_names == ["low", "high"]
        assert [record.tool for record in parent.orchestrator.call_log.recent] == tool_names


async def test_a_parent_cancels_calls_of_its_layers_and_closing_a_layer_leaves_it_open() -> None:
    reached_event = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hangs."""
        reached_event.set()
        await asyncio.Event().wait()

    async with Toolspace([low]) as parent:
        async with Toolspace([hang], parent=parent) as layer:
            call_task = asyncio.create_task(layer.call("hang", call_id="call_1"))
            await reached_event.wait()
            assert parent.cancel("call_1")
            assert (await call_task).error_kind == "canceled"
        assert (await layer.call("low")).error_kind == "canceled"
        assert (await parent.call("low")).result == "low"


async def test_a_function_of_a_layer_calls_tools_of_its_parent() -> None:
    @tool
    async def twice(context: ToolContext) -> list[Any]:
        """Calls both."""
        return [(await context.call("low")).result, (await context.call("high")).result]

    async with Toolspace([low]) as parent, Toolspace([high, twice], parent=parent) as layer:
        assert (await layer.call("twice")).result == ["low", "high"]
        run = layer.run()
        await run.call("twice")
        node = run.trace.children[0].children[0]
        assert [child.name for child in node.children] == ["low", "high"]


async def test_tools_of_the_same_name_in_layers_do_not_share_a_cache() -> None:
    @tool(name="same", cache=60.0)
    async def parent_tool() -> str:
        """A tool of the parent."""
        return "parent"

    @tool(name="same", cache=60.0)
    async def layer_tool() -> str:
        """A tool of the layer."""
        return "layer"

    async with Toolspace([parent_tool]) as parent, Toolspace([layer_tool], parent=parent) as layer:
        assert [(await ts.call("same")).result for ts in (parent, layer, parent, layer)] == ["parent", "layer"] * 2


@pytest.mark.spec("4.9")
async def test_a_search_in_a_layer_finds_the_tools_of_both() -> None:
    async with Toolspace([low]) as parent, Toolspace([high], parent=parent) as layer:
        matches = {match.name for match, _ in layer.search("layer parent", 10)}
        assert {"low", "high"} <= matches
