"""Tools of its own above those of another orchestrator."""

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
from toolspace.orchestrator.stage import CallHandler, StageContext


@tool
async def low() -> str:
    """Below."""
    return "low"


@tool
async def high() -> str:
    """Above."""
    return "high"


@tool(name="both")
async def both_low() -> str:
    """Below."""
    return "low"


@tool(name="both")
async def both_high() -> str:
    """Above."""
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
    return sorted(one.name for one in ts.list_tools())


async def test_names_above_win_and_the_others_are_there_too() -> None:
    async with Toolspace([low, both_low]) as below, Toolspace([high, both_high], parent=below) as above:
        assert names(above) == ["both", "high", "low"]
        assert names(below) == ["both", "low"]
        assert [(await above.call(name)).result for name in ("low", "high", "both")] == ["low", "high", "high"]
        assert (await below.call("both")).result == "low"


async def test_a_name_that_is_given_back_is_that_of_the_one_below_again() -> None:
    async with Toolspace([both_low]) as below, Toolspace([both_high], parent=below) as above:
        above.remove_tool("both")
        assert (await above.call("both")).result == "low"
        above.add_tool(both_high)
        assert (await above.call("both")).result == "high"
        assert names(above) == ["both"]


async def test_what_is_added_below_later_is_there_above() -> None:
    async with Toolspace() as below, Toolspace([high], parent=below) as above:
        below.add_tool(low)
        assert (await above.call("low")).result == "low"
        below.remove_tool("low")
        assert (await above.call("low")).error_kind == "unknown_tool"


async def test_a_namespace_above_hides_the_same_one_below_as_a_whole() -> None:
    async with (
        Toolspace(providers=[Notes("read", "write")]) as below,
        Toolspace(providers=[Notes("read")], parent=below) as above,
        Toolspace([high], parent=below) as other,
    ):
        assert names(above) == ["notes__read"]
        assert names(other) == ["high", "notes__read", "notes__write"]
        assert above.orchestrator.instructions() == "## notes\nNotes of read."
        assert other.orchestrator.instructions() == "## notes\nNotes of read, write."
        result = await other.call("notes__write")
        assert (result.result, result.kind, result.namespace) == ("write", "notes", "notes")


async def test_queues_caches_rules_and_policies_of_the_one_below_hold() -> None:
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
        Toolspace([slow, low, both_low], settings=settings) as below,
        Toolspace([high], parent=below) as above,
        Toolspace(parent=below) as other,
    ):
        await asyncio.gather(*(ts.call("slow", {"n": n}) for ts in (above, other, below) for n in (1, 2, 3)))
        assert (ran, most) == (3, 1)
        assert [(await above.call(name)).error_kind for name in ("low", "high")] == ["not_permitted"] * 2
        assert (await above.call("both")).error_kind == "unknown_tool"
        assert names(above) == ["slow"]
        below.orchestrator.configure(policies=())
        assert [(await above.call(name)).result for name in ("low", "high")] == ["low", "high"]


async def test_whoever_watches_the_one_below_sees_the_calls_of_both() -> None:
    seen: list[str] = []
    around: list[str] = []

    def stage(plan: StageContext, next: CallHandler, /) -> CallHandler:
        async def run(call: Any) -> ToolResult:
            around.append(call.entry.tool.name)
            return await next(call)

        return run

    async with Toolspace([low]) as below, Toolspace([high], parent=below) as above:
        below.bus.subscribe(lambda event: seen.append(event.tool_name), EventType.TOOL_CALL_COMPLETED)
        await above.call("high")
        remove = below.orchestrator.add_stage(stage)
        await above.call("low")
        await above.call("high")
        remove()
        await above.call("high")
        assert seen == ["high", "low", "high", "high"]
        assert around == ["low", "high"]
        assert [record.tool for record in below.orchestrator.call_log.recent] == seen


async def test_calls_above_are_stopped_from_below_and_closing_leaves_the_one_below_open() -> None:
    reached = asyncio.Event()

    @tool
    async def hang() -> None:
        """Hangs."""
        reached.set()
        await asyncio.Event().wait()

    async with Toolspace([low]) as below:
        async with Toolspace([hang], parent=below) as above:
            calling = asyncio.create_task(above.call("hang", call_id="call_1"))
            await reached.wait()
            assert below.cancel("call_1")
            assert (await calling).error_kind == "canceled"
        assert (await above.call("low")).error_kind == "canceled"
        assert (await below.call("low")).result == "low"


async def test_a_function_above_calls_tools_below() -> None:
    @tool
    async def twice(context: ToolContext) -> list[Any]:
        """Calls both."""
        return [(await context.call("low")).result, (await context.call("high")).result]

    async with Toolspace([low]) as below, Toolspace([high, twice], parent=below) as above:
        assert (await above.call("twice")).result == ["low", "high"]
        run = above.run()
        await run.call("twice")
        node = run.trace.children[0].children[0]
        assert [child.name for child in node.children] == ["low", "high"]


async def test_two_tools_of_one_name_do_not_share_their_caches() -> None:
    @tool(name="same", cache=60.0)
    async def below_tool() -> str:
        """Below."""
        return "below"

    @tool(name="same", cache=60.0)
    async def above_tool() -> str:
        """Above."""
        return "above"

    async with Toolspace([below_tool]) as below, Toolspace([above_tool], parent=below) as above:
        assert [(await ts.call("same")).result for ts in (below, above, below, above)] == ["below", "above"] * 2


@pytest.mark.spec("4.9")
async def test_a_search_above_finds_the_tools_of_both() -> None:
    async with Toolspace([low]) as below, Toolspace([high], parent=below) as above:
        found = {one.name for one, _ in above.search("above below", 10)}
        assert {"low", "high"} <= found
