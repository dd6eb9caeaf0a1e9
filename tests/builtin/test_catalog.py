"""10.7: the collections, and rules for all built-in tools."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from toolspace import ToolContext, Toolspace
from toolspace.builtin.catalog import (
    all_task_tools,
    builtin_tools,
    main_agent_tools,
    reflection_tools,
    tool_collections,
)
from toolspace.builtin.task_tools import agent_tools, session_tools, task_tools
from toolspace.core.tool_export import export_tools


def names(tools: Sequence[Any]) -> list[str]:
    return [tool.name for tool in tools]


@pytest.mark.spec("10.7")
def test_the_collections_contain_the_documented_tools() -> None:
    assert names(main_agent_tools) == [
        "current_time",
        "memory_list",
        "memory_read",
        "task_list",
        "task_replay",
        "session_archive_read",
        "spawn_task",
        "reply",
    ]
    assert names(reflection_tools) == ["memory_read", "memory_write", "memory_patch", "memory_append"]
    assert names(session_tools) == ["session_archive_read"]
    task = set(names(all_task_tools))
    assert {"spawn_task", "reply"}.isdisjoint(task)
    assert {tool_.category.value for tool_ in all_task_tools} == {"system", "file", "network", "data", "memory"}
    assert {"task_list", "task_replay", "read_file", "http_get", "json_parse", "memory_append"} <= task
    assert set(tool_collections) == {"allTaskTools", "mainAgentTools", "reflectionTools", "sessionTools"}


@pytest.mark.spec("10.7")
@pytest.mark.parametrize("name", ["allTaskTools", "mainAgentTools", "reflectionTools", "sessionTools"])
async def test_a_toolspace_can_use_a_collection(name: str) -> None:
    async with Toolspace(tools=tool_collections[name]) as ts:
        assert names(ts.list_tools()) == names(tool_collections[name])


@pytest.mark.spec("1.1")
@pytest.mark.parametrize("tool", builtin_tools, ids=names(builtin_tools))
def test_every_built_in_tool_is_fully_described(tool: Any) -> None:
    wire = tool.to_dict()
    assert len(wire["description"]) > 10
    assert wire["visible"] is False
    assert wire["annotations"]
    for name, schema in wire["inputSchema"]["properties"].items():
        assert schema.get("description"), f"{tool.name}.{name} has no description"
    assert export_tools([tool], "mcp")[0]["inputSchema"]["type"] == "object"


@pytest.mark.spec("1.2")
def test_categories_are_valid() -> None:
    from toolspace import Tool, ToolCategory, ToolDefinitionError

    categories = ["system", "file", "network", "data", "memory", "code", "mcp", "rest", "agent", "space", "custom"]
    assert [category.value for category in ToolCategory] == categories
    assert [str(Tool("x", category=name).category) for name in categories] == categories
    with pytest.raises(ToolDefinitionError, match=r"'fun'.*system, file"):
        Tool("x", category="fun")


class Host:
    """A task host that records its calls."""

    def __init__(self) -> None:
        self.replies: list[tuple[str, str, str | None]] = []

    async def list_tasks(self, date: str | None, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        return [{"taskId": "t1", "date": date}]

    async def replay_task(self, task_id: str, context: ToolContext) -> Sequence[Mapping[str, Any]]:
        return [{"role": "user", "content": task_id}]

    async def spawn_task(self, description: str, input: str, context: ToolContext) -> str:
        return f"task of {description}: {input}"

    async def reply(self, text: str, channel_id: str, reply_to: str | None, context: ToolContext) -> Mapping[str, Any]:
        self.replies.append((text, channel_id, reply_to))
        return {"delivered": True}


async def test_the_task_tools_call_the_task_host() -> None:
    host = Host()
    async with Toolspace(tools=[*task_tools, *agent_tools], context=ToolContext(tasks=host)) as ts:
        assert (await ts.call("task_list", {"date": "2026-01-31"})).result == [{"taskId": "t1", "date": "2026-01-31"}]
        assert (await ts.call("task_list", {"date": "tomorrow"})).error_kind == "invalid_parameters"
        assert (await ts.call("task_replay", {"taskId": "t1"})).result == [{"role": "user", "content": "t1"}]
        spawn_result = await ts.call("spawn_task", {"description": "d", "input": "i"})
        assert spawn_result.result == {"taskId": "task of d: i"}
        assert (await ts.call("reply", {"text": "hi", "channelId": "c", "replyTo": "m"})).result == {"delivered": True}
    assert host.replies == [("hi", "c", "m")]


@pytest.mark.parametrize("tool", [*task_tools, *agent_tools], ids=names([*task_tools, *agent_tools]))
async def test_without_an_agent_the_task_tools_fail_clearly(tool: Any) -> None:
    arguments = {"taskId": "x", "description": "d", "input": "i", "text": "t", "channelId": "c"}
    properties = tool.input_schema["properties"]
    async with Toolspace(tools=[tool]) as ts:
        result = await ts.call(tool.name, {name: value for name, value in arguments.items() if name in properties})
    assert "only in calls of a running agent" in (result.error or "")


async def test_a_session_archive_is_read_by_its_agent_and_in_a_run_only(tmp_path: Path) -> None:
    folder = tmp_path / "sessions"
    for name in ("ada", "bob"):
        (folder / name).mkdir(parents=True)
        (folder / name / "one.md").write_text(f"earlier words of {name}")
    (folder / "shared.md").write_text("secret")
    (folder / "ada" / "link.md").symlink_to(folder / "bob" / "one.md")
    context = ToolContext(session_dir=folder)
    async with Toolspace(tools=session_tools, context=context) as ts:
        for name in ("ada", "bob"):
            run = ts.run(context=ToolContext(agent_id=name))
            assert (await run.call("session_archive_read", {"file": "one.md"})).result == f"earlier words of {name}"
        run = ts.run(context=ToolContext(agent_id="ada"))
        for path in ("../bob/one.md", "../shared.md", "link.md", str(folder / "bob" / "one.md")):
            assert (await run.call("session_archive_read", {"file": path})).error_kind == "not_permitted"
        caller = ToolContext(agent_id="ada", run_id="run_1")
        for result in (
            await ts.call("session_archive_read", {"file": "one.md"}),
            await ts.call("session_archive_read", {"file": "one.md"}, context=caller),
            await ts.run().call("session_archive_read", {"file": "one.md"}),
            await ts.run(context=ToolContext(agent_id="..")).call("session_archive_read", {"file": "shared.md"}),
        ):
            assert not result.ok
    async with Toolspace(tools=session_tools) as ts:
        assert "sessionDir" in ((await ts.call("session_archive_read", {"file": "one.md"})).error or "")
