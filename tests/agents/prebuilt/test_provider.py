"""Prebuilt actions under the names that configurations use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace import Tool
from toolspace.agents.prebuilt.action import Action
from toolspace.agents.prebuilt.provider import ALL_ACTIONS, build_tool, get_action
from toolspace.errors import ToolDefinitionError
from toolspace.storage.sqlite.database import SqliteDatabase

CAMEL = (
    "setGoals",
    "getGoals",
    "setMemory",
    "getMemory",
    "createPlan",
    "getPlan",
    "searchKnowledge",
    "queryKnowledge",
    "sendNotification",
    "getSpaceContext",
    "updateSpaceMetadata",
)


def configured_tool(name: str) -> Tool:
    action = get_action(name)
    assert isinstance(action, Action)
    tool = build_tool(action)
    tool.name = name
    return tool


@pytest.mark.spec("9.6")
async def test_camel_case_action_names_work(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    async with service_harness(database, *(configured_tool(name) for name in CAMEL)) as harness:
        run_id = await harness.open_run(in_space=True)

        async def act(tool: str, **args: Any) -> Any:
            return (await harness.call(run_id, tool, args)).unwrap()

        result = await act("setGoals", goals=[{"description": "Rest"}])
        assert await act("getGoals") == {"goals": result["currentGoals"], "totalGoals": 1}
        assert await act("setMemory", key="deadline", value="Friday") == {"success": True, "count": 1}
        assert await act("getMemory", key="deadline") == {"memories": [{"key": "deadline", "value": "Friday"}]}
        plan = (await act("createPlan", name="Tea", instruction="Make tea", runAfter="2 hours"))["plan"]
        assert (plan["name"], plan["status"], plan["runAfter"]) == ("Tea", "active", "2 hours")
        assert await act("getPlan", id=plan["id"]) == {"plan": plan}
        assert await act("getPlan") == {"plans": [plan]}
        assert await act("getPlan", status="completed") == {"plans": []}
        change = await act("createPlan", id=plan["id"], name="Tea", instruction="Make tea", cron="0 16 * * *")
        assert (change["plan"]["id"], change["plan"]["cron"]) == (plan["id"], "0 16 * * *")
        await harness.save_document("faq", title="FAQ", text="Tea is in the kitchen.", source="faq.md")
        result = await act("searchKnowledge", query="where is tea")
        assert await act("queryKnowledge", query="where is tea", limit=5) == result
        assert result["total"] == 1
        assert {key: result["results"][0][key] for key in ("documentId", "title", "source", "text")} == {
            "documentId": "faq",
            "title": "FAQ",
            "source": "faq.md",
            "text": "Tea is in the kitchen.",
        }
        failed = await harness.call(run_id, "sendNotification", {"title": "Tea", "body": "Ready"})
        assert "is configured" in (failed.error or "")
        assert (await act("updateSpaceMetadata", metadata={"a": 1}))["metadata"] == {"a": 1}
        assert (await act("getSpaceContext"))["metadata"] == {"a": 1}


@pytest.mark.spec("9.6")
async def test_get_memory_finds_memories_by_topic(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    async with service_harness(database, configured_tool("setMemory"), configured_tool("getMemory")) as harness:
        run_id = await harness.open_run()
        memories = {
            "designer_prefers_png": "Designer always requests PNG exports",
            "project_alpha_deadline": "Q4 report due Feb 28",
            "team": {"alpha": ["Ann"]},
        }
        for key, value in memories.items():
            (await harness.call(run_id, "setMemory", {"key": key, "value": value})).unwrap()

        async def list_keys(**arguments: Any) -> list[str]:
            result = (await harness.call(run_id, "getMemory", arguments)).unwrap()
            assert all(memory["value"] == memories[memory["key"]] for memory in result["memories"])
            return [memory["key"] for memory in result["memories"]]

        assert await list_keys(topic="Deadlines of project Alpha") == ["project_alpha_deadline", "team"]
        assert await list_keys(topic="png") == ["designer_prefers_png"]
        assert await list_keys(topic="Tokyo") == []
        assert await list_keys(topic="?!") == []
        assert await list_keys(topic="alpha", keys=["team", "designer_prefers_png"]) == ["team"]
        assert await list_keys() == sorted(memories)
        assert (await harness.call(run_id, "getMemory", {"topic": ""})).error_kind == "invalid_parameters"


@pytest.mark.spec("9.6")
async def test_get_plan_does_not_return_a_plan_of_another_agent(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path / "toolspace.db")
    async with service_harness(database, configured_tool("getPlan"), configured_tool("createPlan")) as harness:
        run_id = await harness.open_run()
        for wrong in ("plan_none", "x" * 128):
            result = await harness.call(run_id, "getPlan", {"id": wrong})
            assert result.error == f'you have no plan "{wrong}"'
        result = await harness.call(run_id, "createPlan", {"name": "Tea", "instruction": "Tea"})
        assert "exactly one of runAfter, scheduledAt and cron" in (result.error or "")


@pytest.mark.spec("9.6")
def test_both_spellings_of_every_action_are_found() -> None:
    for name, action in ALL_ACTIONS.items():
        first, *rest = name.split("_")
        assert get_action(first + "".join(map(str.capitalize, rest))) is action
        assert get_action(name) is action
    with pytest.raises(ToolDefinitionError, match='"setGoal"; did you mean'):
        get_action("setGoal")


@pytest.mark.spec("9.5")
async def test_an_agent_searches_its_own_documents(tmp_path: Path) -> None:
    async with service_harness(
        await SqliteDatabase.open(tmp_path / "toolspace.db"), configured_tool("search_knowledge")
    ) as harness:
        await _check_search(harness, await harness.open_run())


async def _check_search(harness: ServiceHarness, run_id: str) -> None:
    for n in range(8):
        await harness.save_document(f"doc_{n}", title=f"Note {n}", text=f"A note about foxes, number {n}.")

    async def search(**args: Any) -> Any:
        return (await harness.call(run_id, "search_knowledge", args)).unwrap()

    result = await search(query="foxes")
    assert (len(result["results"]), result["total"]) == (5, 8)
    assert set(result["results"][0]) == {"documentId", "title", "source", "text", "score"}
    assert len((await search(query="fox", limit=20))["results"]) == 8
    assert await search(query="unicorn") == {"results": [], "total": 0}
    for wrong in ({"query": ""}, {"query": "a", "limit": 0}, {"query": "a", "limit": 21}, {"query": "a\0b"}):
        result = await harness.call(run_id, "search_knowledge", wrong)
        assert result.error_kind == "invalid_parameters", wrong
