"""Looking back on a task: what was learned goes to the agent's memory files."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import Village, agent, village
from tests.agents.scripted_sessions import Workers, at_rest
from toolspace.builtin.catalog import reflection_tools
from toolspace.builtin.memory import memory_tools
from toolspace.config.agent_settings import AgentLoopSettings
from toolspace.core.context import ToolContext
from toolspace.core.model import ModelRequest, ResultsTurn, UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import call
from toolspace.storage.database import Database
from toolspace.storage.queries import runs
from toolspace.storage.queries import tasks as rows

SPAWN = call("spawn_task", {"description": "look it up", "input": "How high is the Zugspitze?"})
LEARN = call("memory_write", {"path": "facts/mountains.md", "content": "> Summary: heights\n\nZugspitze: 2,962 m\n"})


def town_of(
    database: Database, folder: Path, workers: Workers, *, tools: Sequence[Any] = memory_tools, **spec: Any
) -> AbstractAsyncContextManager[Village]:
    return village(
        database,
        agent("ada", workers.model, **spec),
        tools=tools,
        folder=folder,
        owns=False,
        context=ToolContext(memory_dir=folder / "memory"),
        retry_delays=(1, 1),
    )


@pytest.mark.spec("11.5")
async def test_what_a_task_taught_is_kept_in_memory_files(database: Database, tmp_path: Path) -> None:
    workers = Workers(main=[SPAWN], task=["2,962 m"], reflection=[LEARN, "It went well."])
    async with town_of(database, tmp_path, workers) as town:
        await town.push("begin")
        (task,) = await at_rest(town)
        assert task.reflection == {"assessment": "It went well.", "toolCallsCount": 1}
        assert "2,962 m" in (tmp_path / "memory" / "facts" / "mountains.md").read_text()
        run = await town.ledger.read(runs.find, rows.run_id_of(rows.reflection_id_of(task.id)))
        assert run is not None
        assert (run.status, run.trigger["type"], run.trigger["taskId"]) == ("completed", "reflection", task.id)
        assert [one.tool_name for one in await town.calls(run.id)] == ["memory_write"]


@pytest.mark.spec("11.5")
@pytest.mark.spec("10.7")
async def test_looking_back_has_the_conversation_the_memory_index_and_its_tools(
    sqlite: Database, tmp_path: Path
) -> None:
    facts = tmp_path / "memory" / "facts"
    facts.mkdir(parents=True)
    (facts / "rivers.md").write_text("# Rivers\n> Summary: lengths of rivers\n")
    asked = call("memory_list")
    workers = Workers(main=[SPAWN], task=[asked, "2,962 m"], reflection=[[asked, call("skip")]])
    async with town_of(sqlite, tmp_path, workers) as town:
        await town.push("begin")
        (task,) = await at_rest(town)
    first, second = workers.asked("reflection")
    assert "- facts/rivers.md: lengths of rivers" in first.system
    assert {one.name for one in first.tools} == {one.name for one in reflection_tools}
    (told,) = first.turns
    assert isinstance(told, UserTurn)
    assert "How high is the Zugspitze?" in told.text
    assert "→ memory_list" in told.text
    assert 'It is completed: "2,962 m"' in told.text
    refused = second.turns[-1]
    assert isinstance(refused, ResultsTurn)
    assert all("is not for this kind of work" in one.text for one in refused.results)
    assert task.reflection["toolCallsCount"] == 2


@pytest.mark.spec("11.5")
async def test_a_reflection_is_shown_with_its_task(sqlite: Database, tmp_path: Path) -> None:
    workers = Workers(
        main=[SPAWN, "I wait.", "Thanks.", call("task_list"), "Seen."], task=["2,962 m"], reflection=["It went well."]
    )
    async with town_of(sqlite, tmp_path, workers) as town:
        await town.push("begin")
        await at_rest(town)
        await town.push("look")
        await at_rest(town)
    listed = workers.asked("main")[-1].turns[-1]
    assert isinstance(listed, ResultsTurn)
    assert '"reflection":{"assessment":"It went well.","toolCallsCount":0}' in listed.results[0].text.replace(" ", " ")


@pytest.mark.spec("11.5")
async def test_a_task_that_failed_is_looked_back_on_too(sqlite: Database, tmp_path: Path) -> None:
    workers = Workers(main=[SPAWN], task=[ModelError("invalid", "no")], reflection=["It could not begin."])
    async with town_of(sqlite, tmp_path, workers) as town:
        await town.push("begin")
        (task,) = await at_rest(town)
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
async def test_looking_back_that_fails_leaves_its_task_as_it_is(
    sqlite: Database, tmp_path: Path, script: list[Any], why: str
) -> None:
    workers = Workers(main=[SPAWN], task=["2,962 m"], reflection=script)
    async with town_of(sqlite, tmp_path, workers, loop=AgentLoopSettings(max_steps=3)) as town:
        await town.push("begin")
        (task,) = await at_rest(town)
        assert (task.status, task.result) == ("completed", "2,962 m")
        assert why in task.reflection["error"]
        assert [event.data["status"] for event in await town.inbox() if event.type == "task"] == ["completed"]


@pytest.mark.spec("11.5")
async def test_nobody_looks_back_where_nothing_could_be_kept(sqlite: Database, tmp_path: Path) -> None:
    workers = Workers(main=[SPAWN], task=["2,962 m"])
    async with town_of(sqlite, tmp_path, workers, tools=()) as town:
        await town.push("begin")
        (task,) = await at_rest(town)
        assert task.reflection is None
        assert workers.asked("reflection") == []


@pytest.mark.spec("11.5")
async def test_a_very_long_task_is_looked_back_on_in_part(sqlite: Database, tmp_path: Path) -> None:
    def long(request: ModelRequest) -> Any:
        return call("memory_write", {"path": f"facts/{len(request.turns)}.md", "content": "x" * 20_000})

    workers = Workers(main=[SPAWN], task=[*[long] * 10, "the end of it"])
    async with town_of(sqlite, tmp_path, workers) as town:
        await town.push("begin")
        await at_rest(town)
    (told,) = workers.asked("reflection")[0].turns
    assert isinstance(told, UserTurn)
    assert len(told.text) < 70_000
    assert "How high is the Zugspitze?" in told.text
    assert "the end of it" in told.text
