"""The reflection on a task stores what was learned in the agent's memory files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import AgentHarness, agent, run_agents
from tests.agents.scripted_sessions import ScriptedSessions, wait_until_done
from toolspace.builtin.catalog import reflection_tools
from toolspace.builtin.memory import memory_tools
from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.core.language_model import ModelRequest, ResultsTurn, UserTurn
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError
from toolspace.models.scripted import call
from toolspace.storage.database import Database
from toolspace.storage.queries import runs
from toolspace.storage.queries import tasks as rows

SPAWN = call("spawn_task", {"description": "look it up", "input": "How high is the Zugspitze?"})
LEARN = call("memory_write", {"path": "facts/mountains.md", "content": "> Summary: heights\n\nZugspitze: 2,962 m\n"})


def run_with_memory(
    database: Database, folder: Path, scripts: ScriptedSessions, *, tools: Sequence[Any] = memory_tools, **spec: Any
) -> AbstractAsyncContextManager[AgentHarness]:
    return run_agents(
        database,
        agent("ada", scripts.model, **spec),
        tools=tools,
        session_dir=folder,
        context=ToolContext(memory_dir=folder / "memory"),
        retry_delays=(1, 1),
    )


@pytest.mark.spec("11.5")
async def test_a_reflection_writes_memory_files(database: Database, tmp_path: Path) -> None:
    scripts = ScriptedSessions(main=[SPAWN], task=["2,962 m"], reflection=[LEARN, "It went well."])
    async with run_with_memory(database, tmp_path, scripts) as harness:
        await harness.push_event("begin")
        (task,) = await wait_until_done(harness)
        assert task.reflection == {"assessment": "It went well.", "toolCallsCount": 1}
        assert "2,962 m" in (tmp_path / "memory-agents" / "ada" / "main" / "facts" / "mountains.md").read_text()
        run = await harness.ledger.read(runs.find, rows.run_id_of(rows.reflection_id_of(task.id)))
        assert run is not None
        assert (run.status, run.trigger["type"], run.trigger["taskId"]) == ("completed", "reflection", task.id)
        assert [record.tool_name for record in await harness.calls(run.id)] == ["memory_write"]


@pytest.mark.spec("11.5")
@pytest.mark.spec("10.7")
async def test_a_reflection_gets_the_conversation_the_memory_index_and_its_tools(
    sqlite: Database, tmp_path: Path
) -> None:
    facts = tmp_path / "memory-agents" / "ada" / "main" / "facts"
    facts.mkdir(parents=True)
    (facts / "rivers.md").write_text("# Rivers\n> Summary: lengths of rivers\n")
    list_call = call("memory_list")
    scripts = ScriptedSessions(main=[SPAWN], task=[list_call, "2,962 m"], reflection=[[list_call, call("skip")]])
    async with run_with_memory(sqlite, tmp_path, scripts) as harness:
        await harness.push_event("begin")
        (task,) = await wait_until_done(harness)
    first, second = scripts.requests_of("reflection")
    assert "- facts/rivers.md: lengths of rivers" in first.system
    assert {tool_item.name for tool_item in first.tools} == {tool_item.name for tool_item in reflection_tools}
    (prompt,) = first.turns
    assert isinstance(prompt, UserTurn)
    assert "How high is the Zugspitze?" in prompt.text
    assert "→ memory_list" in prompt.text
    assert 'It is completed: "2,962 m"' in prompt.text
    refusal = second.turns[-1]
    assert isinstance(refusal, ResultsTurn)
    assert all("is not for this kind of work" in result.text for result in refusal.results)
    assert task.reflection["toolCallsCount"] == 2


@pytest.mark.spec("11.5")
async def test_a_reflection_is_listed_with_its_task(sqlite: Database, tmp_path: Path) -> None:
    scripts = ScriptedSessions(
        main=[SPAWN, "I wait.", "Thanks.", call("task_list"), "Seen."], task=["2,962 m"], reflection=["It went well."]
    )
    async with run_with_memory(sqlite, tmp_path, scripts) as harness:
        await harness.push_event("begin")
        await wait_until_done(harness)
        await harness.push_event("look")
        await wait_until_done(harness)
    listing = scripts.requests_of("main")[-1].turns[-1]
    assert isinstance(listing, ResultsTurn)
    assert '"reflection":{"assessment":"It went well.","toolCallsCount":0}' in listing.results[0].text.replace(" ", " ")


@pytest.mark.spec("11.5")
async def test_a_failed_task_gets_a_reflection_too(sqlite: Database, tmp_path: Path) -> None:
    scripts = ScriptedSessions(main=[SPAWN], task=[ModelError("invalid", "no")], reflection=["It could not begin."])
    async with run_with_memory(sqlite, tmp_path, scripts) as harness:
        await harness.push_event("begin")
        (task,) = await wait_until_done(harness)
        assert (task.status, task.reflection["assessment"]) == ("failed", "It could not begin.")


@pytest.mark.spec("11.5")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ([ModelError("invalid", "the model says no")], "the model says no"),
        ([ModelError("overloaded", "the model is busy")] * 9, "the model is busy"),
        ([LEARN] * 9, "loop.maxSteps"),
    ],
)
async def test_a_failed_reflection_does_not_change_the_task(
    sqlite: Database, tmp_path: Path, script: list[Any], why: str
) -> None:
    scripts = ScriptedSessions(main=[SPAWN], task=["2,962 m"], reflection=script)
    async with run_with_memory(sqlite, tmp_path, scripts, loop=AgentLoopSettings(max_steps=3)) as harness:
        await harness.push_event("begin")
        (task,) = await wait_until_done(harness)
        assert (task.status, task.result) == ("completed", "2,962 m")
        assert why in task.reflection["error"]
        assert [event.data["status"] for event in await harness.inbox() if event.type == "task"] == ["completed"]


@pytest.mark.spec("11.5")
async def test_there_is_no_reflection_without_memory_write(sqlite: Database, tmp_path: Path) -> None:
    scripts = ScriptedSessions(main=[SPAWN], task=["2,962 m"])
    async with run_with_memory(sqlite, tmp_path, scripts, tools=()) as harness:
        await harness.push_event("begin")
        (task,) = await wait_until_done(harness)
        assert task.reflection is None
        assert scripts.requests_of("reflection") == []


@pytest.mark.spec("11.5")
async def test_a_reflection_gets_a_shortened_conversation_of_a_long_task(sqlite: Database, tmp_path: Path) -> None:
    def long(request: ModelRequest) -> Any:
        return call("memory_write", {"path": f"facts/{len(request.turns)}.md", "content": "x" * 20_000})

    scripts = ScriptedSessions(main=[SPAWN], task=[*[long] * 10, "the end of it"])
    async with run_with_memory(sqlite, tmp_path, scripts) as harness:
        await harness.push_event("begin")
        await wait_until_done(harness)
    (prompt,) = scripts.requests_of("reflection")[0].turns
    assert isinstance(prompt, UserTurn)
    assert len(prompt.text) < 70_000
    assert "How high is the Zugspitze?" in prompt.text
    assert "the end of it" in prompt.text
