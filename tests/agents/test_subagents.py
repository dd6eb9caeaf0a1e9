"""Agents as tools of agents: `agent__{name}`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from toolspace import Agent, LoopSettings, RunLimits, Settings, ToolContext, ToolProvider, Toolspace, tool
from toolspace.agents.agent_run import AgentRun
from toolspace.agents.subagents import AgentProvider
from toolspace.core.language_model import ModelRequest, ResultsTurn, Usage, UserTurn
from toolspace.errors import ModelError
from toolspace.models.scripted import ScriptedModel, call
from toolspace.orchestrator.run import Span
from toolspace.testing import ProviderContract

COST = Usage(requests=1, input_tokens=10, output_tokens=5, cost=0.01)


@tool
async def add(a: int, b: int) -> int:
    """Adds."""
    return a + b


def call_agent(name: str, prompt: str = "Help.", **more: Any) -> Any:
    return call(f"agent__{name}", {"prompt": prompt, "reason": "a test", **more})


def last_results(model: ScriptedModel, request: int = -1) -> list[str]:
    turn = model.requests[request].turns[-1]
    assert isinstance(turn, ResultsTurn), turn
    return [answer.text for answer in turn.results]


def names_in(operation: Span, kind: str) -> list[str]:
    names = [operation.attributes.get("agent", operation.name)] if operation.kind == kind else []
    return names + [name for child in operation.children for name in names_in(child, kind)]


@pytest.mark.spec("3.40")
async def test_a_subagent_has_its_own_conversation() -> None:
    child = ScriptedModel([call("add", {"a": 1, "b": 2}), "It is 3."], usage=COST)
    parent = ScriptedModel([call_agent("child", "1 + 2?"), "The child says 3."], usage=COST)
    agents = [
        Agent("child", description="Adds numbers.", system="You add.", model=child),
        Agent("parent", model=parent, agents=["child"]),
    ]
    async with Toolspace([add], agents=agents) as ts:
        result = await ts.run_agent("parent", "Ask the child.")
    assert result.text == "The child says 3."
    assert last_results(parent) == ["It is 3."]
    assert child.requests[0].turns == (UserTurn("1 + 2?\n\nREASON: a test"),)
    assert 'called by the agent "parent": your answer goes to it' in child.requests[0].system
    descriptions = {tool_item.name: tool_item.description for tool_item in parent.requests[0].tools}
    assert descriptions["agent__child"] == "Adds numbers."
    assert "agent__parent" not in descriptions
    assert not {"agent__child", "agent__parent"} & {tool_item.name for tool_item in child.requests[0].tools}


@pytest.mark.spec("3.40")
async def test_trace_and_usage_of_a_subagent_nest_below_its_parent() -> None:
    child = ScriptedModel([call("add", {"a": 1, "b": 2}), "3"], usage=COST)
    parent = ScriptedModel([call_agent("child"), "Done."], usage=COST)
    async with Toolspace(
        [add], agents=[Agent("parent", model=parent, agents=[Agent("child", model=child, tools=[add])])]
    ) as ts:
        result = await ts.run_agent("parent", "Go.")
        assert result.usage == Usage(requests=4, input_tokens=40, output_tokens=20, cost=0.04)
        assert result.trace is not None
        assert names_in(result.trace, "run") == ["parent", "child"]
        assert names_in(result.trace, "call") == ["agent__child", "add"]
        inner = result.trace.children[0].children[0].children[0]
        assert inner.attributes["usage"]["requests"] == 2
        records = {record.tool: record for record in ts.orchestrator.call_log.recent}
        assert records["add"].parent_id == records["agent__child"].call_id
        assert records["add"].run_id == inner.id


async def test_a_program_calls_an_agent_as_a_tool() -> None:
    model = ScriptedModel(["Found it."], usage=COST)
    async with Toolspace(agents=[Agent("researcher", model=model)]) as ts:
        result = await ts.call("agent__researcher", {"prompt": "Look.", "topic": "tools", "depth": 2})
        assert (result.ok, result.result, result.kind, result.namespace) == (True, "Found it.", "agent", "agent")
        assert result.extras["agent"] == "researcher"
        assert result.extras["steps"] == 1
        assert result.extras["usage"]["inputTokens"] == 10
        assert result.extras["runId"].startswith("run_")
        assert model.requests[0].turns == (UserTurn('Look.\n\nINPUT: {"topic":"tools","depth":2}'),)
        for wrong in ({}, {"prompt": ""}, {"prompt": 3.5}):
            assert (await ts.call("agent__researcher", wrong)).error_kind == "invalid_parameters"


async def test_a_json_report_is_returned_as_data() -> None:
    report = {"status": "success", "format": "json", "content_json": {"n": [1, 2]}}
    async with Toolspace(agents=[Agent("a", model=ScriptedModel([call("agent__final_report", report)]))]) as ts:
        assert (await ts.call("agent__a", {"prompt": "x"})).result == {"n": [1, 2]}


async def test_the_report_format_for_subagents_is_accepted() -> None:
    report = {"status": "partial", "format": "sub-agent", "content": "Half of it."}
    async with Toolspace(agents=[Agent("a", model=ScriptedModel([call("agent__final_report", report)]))]) as ts:
        assert (await ts.call("agent__a", {"prompt": "x"})).result == "Half of it."


@pytest.mark.spec("3.40")
async def test_recursion_through_ancestors_is_refused() -> None:
    a = ScriptedModel([call_agent("b"), "a is done"])
    b = ScriptedModel([call_agent("c"), "b is done"])
    c = ScriptedModel([[call_agent("a"), call_agent("b"), call_agent("c")], "c is done"])
    agents = [
        Agent("a", model=a, agents=["b"]),
        Agent("b", model=b, agents=["c"]),
        Agent("c", model=c, agents=["a", "b", "c"]),
    ]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("a", "Go.")).text == "a is done"
        assert [text.removeprefix("(tool failed: ") for text in last_results(c)] == [
            "Recursion detected: a → b → c → a)",
            "Recursion detected: b → c → b)",
            "Recursion detected: c → c)",
        ]
        run = AgentRun(Agent("b", agents=["a"]), parent=AgentRun(Agent("a")))
        refusal = await ts.call("agent__a", {"prompt": "x"}, context=ToolContext(agent=run))
        assert (refusal.error, refusal.error_kind) == ("Recursion detected: a → b → a", "not_permitted")
        assert not refusal.executed


@pytest.mark.spec("3.40")
async def test_a_chain_of_agent_calls_has_at_most_eight_agents() -> None:
    models = [ScriptedModel([call_agent(f"n{n + 1}"), f"{n} done"]) for n in range(9)]
    agents = [Agent(f"n{n}", model=model, agents=[f"n{n + 1}"] if n < 8 else []) for n, model in enumerate(models)]
    async with Toolspace(agents=agents) as ts:
        assert (await ts.run_agent("n0", "Go.")).text == "0 done"
    assert "at most 8 agents may call one another (limits.maxDepth)" in last_results(models[7])[0]
    assert models[8].requests == []


async def test_the_smallest_max_depth_of_the_chain_applies() -> None:
    model = ScriptedModel([call_agent("b"), "done"])
    agents = [
        Agent("a", model=model, agents=["b"], limits=RunLimits(max_depth=1)),
        Agent("b", model=ScriptedModel(["unasked"]), limits=RunLimits(max_depth=50)),
    ]
    async with Toolspace(agents=agents) as ts:
        await ts.run_agent("a", "Go.")
    assert "number 2 in the chain a; at most 1" in last_results(model)[0]


async def test_an_agent_can_call_only_its_subagents() -> None:
    model = ScriptedModel([[call_agent("stranger"), call_agent("friend")], "Done."])
    agents = [
        Agent("a", model=model, agents=["friend"]),
        Agent("friend", model=ScriptedModel(["Hi."])),
        Agent("stranger", model=ScriptedModel(["Never."])),
    ]
    async with Toolspace(agents=agents) as ts:
        await ts.run_agent("a", "Go.")
    assert last_results(model)[0] == (
        '(tool failed: Permission denied: the agent "a" may not call the agent "stranger"; it may call friend)'
    )
    assert last_results(model)[1] == "Hi."


@pytest.mark.spec("3.40")
async def test_canceling_the_parent_cancels_the_subagent() -> None:
    reached_event, stopped = asyncio.Event(), asyncio.Event()

    async def think(request: ModelRequest) -> str:
        reached_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()
        return "never"

    agents = [
        Agent("child", model=ScriptedModel([think])),
        Agent("parent", model=ScriptedModel([call_agent("child"), "Done."]), agents=["child"]),
    ]
    async with Toolspace(agents=agents) as ts:
        request_task = asyncio.create_task(ts.run_agent("parent", "Go."))
        await reached_event.wait()
        request_task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request_task
        assert stopped.is_set()
        assert ts.orchestrator.active_calls.ids == []


async def test_canceling_the_call_stops_the_subagent_and_the_parent_continues() -> None:
    reached_event, stopped = asyncio.Event(), asyncio.Event()

    @tool
    async def work() -> None:
        """Works for ever."""
        reached_event.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.set()

    parent = ScriptedModel([call_agent("child"), "Without the child, then."])
    agents = [
        Agent("child", model=ScriptedModel([call("work"), "Done."]), tools=[work]),
        Agent("parent", model=parent, agents=["child"]),
    ]
    async with Toolspace(agents=agents) as ts:
        request_task = asyncio.create_task(ts.run_agent("parent", "Go."))
        await reached_event.wait()
        assert ts.cancel(ts.orchestrator.active_calls.ids[0])
        result = await request_task
        assert (result.ok, result.text) == (True, "Without the child, then.")
        assert last_results(parent) == ["(tool failed: the call was canceled)"]
        assert stopped.is_set()


async def test_a_failed_subagent_is_a_failed_call_with_its_last_text() -> None:
    cases = {
        "broken": ScriptedModel([ModelError("overloaded", "busy")]),
        "endless": ScriptedModel.loop([call("add", {"a": 1, "b": 1})]),
        "honest": ScriptedModel(
            [call("agent__final_report", {"status": "failure", "format": "tty", "content": "No."})]
        ),
    }
    parent = ScriptedModel([[call_agent(name) for name in cases], "Done."])
    agents = [Agent(name, model=model, settings=LoopSettings(max_steps=2)) for name, model in cases.items()]
    async with Toolspace([add], agents=[*agents, Agent("parent", model=parent, agents=cases)]) as ts:
        assert (await ts.run_agent("parent", "Go.")).ok
        direct = await ts.call("agent__endless", {"prompt": "x"})
    assert last_results(parent) == [
        '(tool failed: the agent "broken" did not finish: busy)',
        '(tool failed: the agent "endless" did not finish: it reached the maximum of 2 steps (loop.maxSteps))',
        '(tool failed: the agent "honest" did not finish: No.)',
    ]
    assert (direct.error_kind, direct.executed, direct.extras["end"]) == ("limit_exceeded", True, "max_steps")


async def test_a_subagent_cannot_exceed_the_budget_of_its_parent() -> None:
    child = ScriptedModel.loop([call("add", {"a": 1, "b": 1})], usage=COST)
    parent = ScriptedModel([call_agent("child"), "Done."], usage=COST)
    agents = [
        Agent("child", model=child, limits=RunLimits(max_tokens=1_000_000), settings=LoopSettings(max_steps=1_000)),
        Agent("parent", model=parent, agents=["child"], limits=RunLimits(max_tokens=60)),
    ]
    async with Toolspace([add], agents=agents) as ts:
        result = await ts.run_agent("parent", "Go.")
    assert (result.ok, result.end) == (False, "limit")
    assert result.usage.tokens == 60
    assert len(child.requests) == 3


@pytest.mark.spec("3.40")
@pytest.mark.parametrize(
    ("bounds", "requests"), [(RunLimits(max_tokens=90), 6), (RunLimits(max_cost=0.06), 6), (RunLimits(), 31)]
)
async def test_parallel_subagents_cannot_exceed_the_budget_of_their_parent(bounds: RunLimits, requests: int) -> None:
    under_way = most = 0

    async def think(request: ModelRequest) -> str:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0)
        under_way -= 1
        return "Thought."

    names = [f"child{number}" for number in range(30)]
    children = [Agent(name, model=ScriptedModel(think, usage=COST)) for name in names]
    parent = ScriptedModel([list(map(call_agent, names)), "Done."], usage=COST)
    async with Toolspace(
        agents=[*children, Agent("parent", model=parent, agents=names, limits=bounds)],
        settings=Settings(max_concurrent_tools=30, max_tool_calls_per_turn=30),
    ) as ts:
        result = await ts.run_agent("parent", "Go.")
    assert result.usage.requests in (requests, requests + 1)
    assert result.usage.tokens <= (bounds.max_tokens or 15 * 32)
    assert most > 1  # While the budget allows it, they run in parallel.


async def test_a_subagent_has_no_more_time_than_its_parent() -> None:
    async def never(request: ModelRequest) -> str:
        await asyncio.Event().wait()
        return ""

    agents = [
        Agent("child", model=ScriptedModel([never]), limits=RunLimits(timeout=3600)),
        Agent(
            "parent", model=ScriptedModel([call_agent("child"), "x"]), agents=["child"], limits=RunLimits(timeout=0.05)
        ),
    ]
    async with Toolspace(agents=agents) as ts:
        result = await ts.run_agent("parent", "Go.")
    assert (result.ok, result.end) == (False, "limit")


async def test_many_subagents_run_in_parallel() -> None:
    met_count = 0
    all_started = asyncio.Event()

    async def meet(request: ModelRequest) -> str:
        nonlocal met_count
        met_count += 1
        if met_count == 20:
            all_started.set()
        await all_started.wait()
        return "here"

    names = [f"c{n}" for n in range(20)]
    parent = ScriptedModel([[call_agent(name) for name in names], "All here."])
    agents = [Agent(name, model=ScriptedModel([meet])) for name in names]
    async with Toolspace(
        agents=[*agents, Agent("parent", model=parent, agents=names)], settings=Settings(max_concurrent_tools=20)
    ) as ts:
        result = await ts.run_agent("parent", "Go.")
    assert last_results(parent) == ["here"] * 20
    assert result.usage.requests == 22


async def test_a_huge_answer_is_stored_and_the_parent_reads_it(tmp_path: Path) -> None:
    def read(request: ModelRequest) -> Any:
        turn = request.turns[-1]
        assert isinstance(turn, ResultsTurn)
        handle = turn.results[0].text.split('"handle":"')[1].split('"')[0]
        return call("agent__read_output", {"handle": handle, "pattern": "^line 70000$"})

    parent = ScriptedModel([call_agent("child"), read, "Read."])
    agents = [
        Agent("child", model=ScriptedModel(["\n".join(f"line {n}" for n in range(80_000))])),
        Agent("parent", model=parent, agents=["child"], tools=[add]),
    ]
    async with Toolspace(agents=agents, settings=Settings(state_dir=tmp_path)) as ts:
        assert (await ts.run_agent("parent", "Go.")).text == "Read."
    assert "line 70000" in last_results(parent)[0]


async def test_the_parent_can_read_outputs_that_a_subagent_stored(tmp_path: Path) -> None:
    @tool
    async def dump() -> str:
        """Says a lot."""
        return "\n".join(f"line {n}" for n in range(80_000))

    def pass_on(request: ModelRequest) -> str:
        turn = request.turns[-1]
        assert isinstance(turn, ResultsTurn)
        return turn.results[0].text.split('"handle":"')[1].split('"')[0]

    def read(request: ModelRequest) -> Any:
        turn = request.turns[-1]
        assert isinstance(turn, ResultsTurn)
        return call("agent__read_output", {"handle": turn.results[0].text, "offset": 80_000})

    parent = ScriptedModel([call_agent("child"), read, "Read."])
    agents = [
        Agent("child", model=ScriptedModel([call("dump"), pass_on]), tools=[dump]),
        Agent("parent", model=parent, agents=["child"]),
    ]
    async with Toolspace(agents=agents, settings=Settings(state_dir=tmp_path)) as ts:
        await ts.run_agent("parent", "Go.")
    assert "line 79999" in last_results(parent)[0]


class TestAgentProvider(ProviderContract):
    """Agents keep the contract of every provider."""

    call = ("helper", {"prompt": "Go."})
    failing_call = ("sick", {"prompt": "Go."})
    slow_call = ("slow", {"prompt": "Go."})

    @pytest.fixture
    def provider(self) -> ToolProvider:
        async def think(request: ModelRequest) -> str:
            await asyncio.sleep(30)
            return "late"

        agents = [
            Agent("helper", model=ScriptedModel.loop(["Done."])),
            Agent("sick", model=ScriptedModel.loop([ModelError("broken", "cut off")])),
            Agent("slow", model=ScriptedModel.loop([think])),
        ]
        return AgentProvider(Toolspace(agents=agents).agents)


async def test_canceling_at_any_moment_leaves_nothing_running() -> None:
    working_count = 0

    @tool
    async def work(n: int) -> int:
        """Waits a few times."""
        nonlocal working_count
        working_count += 1
        try:
            for _ in range(3):
                await asyncio.sleep(0)
            return n
        finally:
            working_count -= 1

    async def think(request: ModelRequest) -> Any:
        await asyncio.sleep(0)
        return [call("work", {"n": n}) for n in range(3)] if len(request.turns) == 1 else "Done."

    async def delegate(request: ModelRequest) -> Any:
        await asyncio.sleep(0)
        return [call_agent("child"), call_agent("desk")] if len(request.turns) == 1 else "All done."

    handoff_model = ScriptedModel.loop([call("router__handoff-to", {"agent": "child"})])
    agents = [
        Agent("child", model=ScriptedModel(think), tools=[work]),
        Agent("desk", model=handoff_model, destinations=["child"]),
        Agent("parent", model=ScriptedModel(delegate), agents=["child", "desk"]),
    ]
    ended_count = canceled = 0
    async with Toolspace([work], agents=agents) as ts:
        assert (await ts.run_agent("parent", "Go.")).ok
        for moments in range(40):
            request_task = asyncio.create_task(ts.run_agent("parent", "Go."))
            for _ in range(moments):
                await asyncio.sleep(0)
            request_task.cancel()
            try:
                ended_count += (await request_task).ok
            except asyncio.CancelledError:
                canceled += 1
            assert ts.orchestrator.active_calls.ids == []
            assert working_count == 0
        assert (await ts.run_agent("parent", "Go.")).text == "All done."
    assert canceled > 10
    assert ended_count + canceled == 40
