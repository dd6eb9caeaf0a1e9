"""A model that makes the same call over and over is stopped, and told why."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.agents.agent_harness import agent, run_agents
from tests.agents.crashing_database import CrashingDatabase
from toolspace import Agent, RunLimits, ToolContext, Toolspace, tool
from toolspace.config.agent_settings import AgentLimits
from toolspace.core.call_limits import RepeatedCallLimits
from toolspace.core.language_model import ModelRequest, ResultsTurn, Turn
from toolspace.core.tool import Annotations
from toolspace.models.scripted import ScriptedModel, call
from toolspace.spaces.ledger import Ledger
from toolspace.storage.database import Database
from toolspace.storage.queries import sessions

pytestmark = pytest.mark.spec("22.3")


def list_errors(turns: Sequence[Turn]) -> list[bool]:
    """Whether each result of a conversation is a refusal because of the limit."""
    return [
        "limits.maxRepeatedCalls" in result.text
        for turn in turns
        if isinstance(turn, ResultsTurn)
        for result in turn.results
    ]


async def run_calls(*calls: Any, tools: Sequence[Any], **limits: Any) -> list[bool]:
    """Lets an agent of a program make calls in one turn. Returns which of them were refused."""
    ada = Agent("ada", model=ScriptedModel([list(calls), "Done."]), limits=RunLimits(**limits))
    async with Toolspace(tools=tools, agents=[ada]) as ts:
        result = await ts.run_agent("ada", "Go.")
        assert result.ok
        return list_errors(result.turns)


def make_tool(executed: list[Any], *, read_only: bool = False) -> Any:
    @tool(visible=False, annotations=Annotations(read_only=read_only))
    async def act(number: int = 0, text: str = "") -> str:
        """Acts."""
        executed.append(number)
        return "acted"

    return act


@pytest.mark.parametrize(("read_only", "limit"), [(False, 5), (True, 20)])
async def test_the_default_limit_is_higher_for_read_only_tools(read_only: bool, limit: int) -> None:
    executed: list[int] = []
    calls = [call("act", {"number": 1})] * (limit + 2) + [call("act", {"number": 2})]
    refusals = await run_calls(*calls, tools=[make_tool(executed, read_only=read_only)])
    assert refusals == [False] * limit + [True, True, False]
    assert executed == [1] * limit + [2]


async def test_equal_arguments_are_recognized_however_they_are_written() -> None:
    executed: list[int] = []
    calls = [
        call("act", '{"number": 1, "text": "x"}'),
        call("act", '{ "text":"x", "number":1 }'),
        call("act", {"number": "1", "text": "x"}),
    ]
    assert await run_calls(*calls, tools=[make_tool(executed)], max_repeated_calls=2) == [False, False, True]


async def test_the_model_is_told_why_and_what_to_do_instead() -> None:
    model = ScriptedModel([[call("act")] * 2, "Done."])
    ada = Agent("ada", model=model, limits=RunLimits(max_repeated_calls=1))
    async with Toolspace(tools=[make_tool([])], agents=[ada]) as ts:
        results = (await ts.run_agent("ada", "Go.")).turns[2]
    assert isinstance(results, ResultsTurn)
    text = results.results[1].text
    assert text.startswith("(tool failed: this run has called act with exactly these arguments once already")
    assert "change the arguments" in text


async def test_the_calls_of_a_batch_count_each() -> None:
    executed: list[int] = []
    batch = call("agent__batch", {"calls": [{"id": n, "tool": "act", "parameters": {}} for n in range(3)]})
    ada = Agent("ada", model=ScriptedModel([batch, "Done."]), limits=RunLimits(max_repeated_calls=2))
    async with Toolspace(tools=[make_tool(executed)], agents=[ada]) as ts:
        turn = (await ts.run_agent("ada", "Go.")).turns[2]
    assert isinstance(turn, ResultsTurn)
    assert turn.results[0].text.count("limits.maxRepeatedCalls") == 1
    assert '"errorKind":"limit_exceeded"' in turn.results[0].text
    assert executed == [0, 0]


async def test_tools_that_control_the_run_and_the_code_of_tools_may_repeat_calls() -> None:
    executed: list[int] = []

    @tool
    async def act_often(context: ToolContext) -> int:
        """Acts several times."""
        return len([await context.call("act", {}) for _ in range(4)])

    status = call("agent__task_status", {"status": "in-progress"})
    tools = [make_tool(executed), act_often]
    assert await run_calls(*[status] * 3, call("act_often"), tools=tools, max_repeated_calls=1) == [False] * 4
    assert executed == [0] * 4


async def test_each_run_counts_for_itself() -> None:
    executed: list[int] = []

    def act_twice(request: ModelRequest) -> Any:
        return "Done." if isinstance(request.turns[-1], ResultsTurn) else [call("act")] * 2

    bob = Agent("bob", model=ScriptedModel(act_twice), limits=RunLimits(max_repeated_calls=1))
    ask = [call("agent__bob", {"prompt": "Act."})] * 2
    ada = Agent("ada", model=ScriptedModel([ask, "Done."]), agents=[bob], limits=RunLimits(max_repeated_calls=1))
    async with Toolspace(tools=[make_tool(executed)], agents=[ada]) as ts:
        assert list_errors((await ts.run_agent("ada", "Go.")).turns) == [False, False]
        assert executed == [0, 0]


async def test_the_runs_of_programs_have_no_limit() -> None:
    executed: list[int] = []
    async with Toolspace(tools=[make_tool(executed)]) as ts, ts.run() as run:
        assert all([(await run.call("act")).ok for _ in range(30)])
    assert len(executed) == 30


async def test_prebuilt_tools_have_no_limit(database: Database, tmp_path: Path) -> None:
    model = ScriptedModel([[call("get_goals")] * 3, "Done."])
    ada = agent("ada", model, limits=AgentLimits(max_repeated_calls=RepeatedCallLimits(1, 1)))
    async with run_agents(database, ada, session_dir=tmp_path) as harness:
        await harness.send_message("Go.")
        await harness.wait_for_run()
        assert list_errors(model.requests[1].turns) == [False] * 3


async def test_the_count_continues_in_the_process_after_a_crash(database: Database, tmp_path: Path) -> None:
    executed: list[int] = []
    crashing_database = CrashingDatabase(database)
    limits = AgentLimits(max_repeated_calls=RepeatedCallLimits(3, 3))

    async def crash(request: ModelRequest) -> str:
        crashing_database.crash()
        await crashing_database.check_alive()
        return "never"

    batch = call("agent__batch", {"calls": [{"id": 1, "tool": "act", "parameters": {"number": 0}}]})
    same_call = call("act", {"number": 0})
    first = agent("ada", ScriptedModel([same_call, [same_call, batch], crash]), limits=limits)
    async with run_agents(crashing_database, first, tools=[make_tool(executed)], session_dir=tmp_path) as harness:
        await harness.send_message("Act.")
        await crashing_database.has_crashed.wait()
    await Ledger(database).write(sessions.release_all_leases, "")
    model = ScriptedModel([[same_call, call("act", {"number": 1})], "Done."])
    second = agent("ada", model, limits=limits)
    async with run_agents(database, second, tools=[make_tool(executed)], session_dir=tmp_path) as harness:
        assert (await harness.wait_for_run()).status == "completed"
        assert list_errors(model.requests[-1].turns[-1:]) == [True, False]
        assert executed == [0, 0, 0, 1]
