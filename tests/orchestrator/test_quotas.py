"""Quotas: each caller, agent or tool may make so many calls in a minute, an hour or a day."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from toolspace import Agent, Settings, ToolContext, Toolspace, tool
from toolspace.core.language_model import ResultsTurn
from toolspace.core.quotas import MemoryQuotas, Quota
from toolspace.core.times import parse_iso_time, to_milliseconds
from toolspace.models.scripted import ScriptedModel, call
from toolspace.orchestrator.pipeline import STAGES
from toolspace.orchestrator.stages.quota import find_quotas

pytestmark = pytest.mark.spec("22.1")


class Clock:
    def __init__(self) -> None:
        self.set("2026-03-01T10:20:30Z")

    def set(self, time: str) -> None:
        self.milliseconds = to_milliseconds(parse_iso_time(time))

    def __call__(self) -> int:
        return self.milliseconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@tool
async def echo(text: str = "") -> str:
    """Echoes."""
    return text


@tool(cache=60)
async def look(text: str = "") -> str:
    """Looks."""
    return text


def open_toolspace(*items: Quota, clock: Clock | None = None, **options: Any) -> Toolspace:
    ts = Toolspace([echo, look], settings=Settings(quotas=items, **options))
    ts.orchestrator.configure(quota_store=MemoryQuotas(clock=clock or Clock()))
    return ts


async def count_allowed(ts: Toolspace, name: str = "echo", *, calls: int = 5, **context: Any) -> int:
    results = [await ts.call(name, context=ToolContext(**context)) for _ in range(calls)]
    assert {result.error_kind for result in results} <= {None, "limit_exceeded"}
    return sum(result.ok for result in results)


@pytest.mark.parametrize(
    ("limit", "reset"),
    [
        ("calls_per_minute", "2026-03-01T10:21:00Z"),
        ("calls_per_hour", "2026-03-01T11:00:00Z"),
        ("calls_per_day", "2026-03-02T00:00:00Z"),
    ],
)
async def test_an_exceeded_quota_says_when_it_resets_and_does(clock: Clock, limit: str, reset: str) -> None:
    async with open_toolspace(Quota(**{limit: 2}), clock=clock) as ts:
        assert [(await ts.call("echo")).ok for _ in range(2)] == [True, True]
        result = await ts.call("echo")
        assert (result.error_kind, result.executed) == ("limit_exceeded", False)
        window = limit.removeprefix("calls_per_")
        assert result.error == f"the quota of 2 calls per {window} (quotas) is used up; it resets at {reset}"
        clock.set(reset)
        assert await count_allowed(ts) == 2


async def test_each_principal_key_agent_and_tool_has_its_own_counter() -> None:
    async with open_toolspace(Quota(per="principal", calls_per_day=2)) as ts:
        assert [await count_allowed(ts, user_id=user) for user in ("ann", "bob", "ann")] == [2, 2, 0]
        assert await count_allowed(ts) == 2  # `local`
    async with open_toolspace(Quota(per="key", calls_per_day=2)) as ts:
        assert [await count_allowed(ts, user_id=user) for user in ("key/1", "tools/1", "key/1", "ann")] == [2, 2, 0, 5]
    async with open_toolspace(Quota(per="agent", calls_per_day=2)) as ts:
        assert [await count_allowed(ts, agent_id=agent) for agent in ("ada", "bot", "ada", None)] == [2, 2, 0, 5]
    async with open_toolspace(Quota(per="tool", calls_per_day=2)) as ts:
        assert [await count_allowed(ts, name) for name in ("echo", "look", "echo")] == [2, 2, 0]
    async with open_toolspace(Quota(calls_per_day=2)) as ts:
        assert [await count_allowed(ts, user_id=user) for user in ("ann", "bob")] == [2, 0]


async def test_a_quota_can_be_for_some_principals_keys_and_agents() -> None:
    async with open_toolspace(Quota(per="principal", principals=["ann"], calls_per_day=1)) as ts:
        assert [await count_allowed(ts, user_id=user) for user in ("ann", "bob")] == [1, 5]
    async with open_toolspace(Quota(per="key", keys=["tools/*", "k2"], calls_per_day=1)) as ts:
        assert [await count_allowed(ts, user_id=user) for user in ("tools/a", "key/k1", "key/k2")] == [1, 5, 1]
    async with open_toolspace(Quota(agents=["a*"], calls_per_day=1)) as ts:
        assert [await count_allowed(ts, agent_id=agent) for agent in ("ada", "bot", "anna")] == [1, 5, 0]


async def test_a_glob_matches_all_spellings_of_a_tool() -> None:
    for pattern, name in (("ec*", "echo"), ("say", "echo"), ("say", "say"), ("ECHO", "say")):
        async with open_toolspace(Quota(tools=[pattern], calls_per_day=1), aliases={"say": "echo"}) as ts:
            assert await count_allowed(ts, name) == 1
            assert await count_allowed(ts, "look") == 5


async def test_refused_and_invalid_calls_leave_the_other_counters_alone(clock: Clock) -> None:
    quotas = Quota(calls_per_day=3), Quota(per="tool", calls_per_minute=2)
    async with open_toolspace(*quotas, clock=clock) as ts:
        assert await count_allowed(ts) == 2
        assert (await ts.call("echo", {"text": {}})).error_kind == "invalid_parameters"
        clock.set("2026-03-01T10:22:00Z")
        assert await count_allowed(ts) == 1  # The three refused calls have not used the day's quota.


async def test_equal_quotas_count_a_call_once() -> None:
    async with open_toolspace(Quota(calls_per_day=4), Quota(calls_per_day=3)) as ts:
        assert await count_allowed(ts) == 3


async def test_cached_results_count() -> None:
    async with open_toolspace(Quota(calls_per_day=3)) as ts:
        results = [await ts.call("look", '{"text": "x"}') for _ in range(4)]
        assert [(result.ok, result.executed) for result in results] == [
            (True, True),
            (True, False),
            (True, False),
            (False, False),
        ]


async def test_a_batch_counts_each_of_its_calls_and_not_itself() -> None:
    async with open_toolspace(Quota(calls_per_day=2)) as ts, ts.run() as run:
        calls = [{"id": number, "tool": "echo", "parameters": {}} for number in range(3)]
        result = await run.call("agent__batch", {"calls": calls})
        assert [entry["ok"] for entry in result.result["results"]].count(True) == 2
        assert (await run.call("agent__task_status", {"status": "in-progress"})).ok


async def test_tools_that_control_a_run_count_if_a_pattern_names_them() -> None:
    for patterns, allowed in ((None, 5), (["*"], 5), (["agent__task_*"], 1)):
        async with open_toolspace(Quota(tools=patterns, calls_per_day=1)) as ts, ts.run() as run:
            results = [await run.call("agent__task_status", {"status": "in-progress"}) for _ in range(5)]
            assert sum(result.ok for result in results) == allowed


async def test_the_quota_comes_after_the_limits_of_the_run_and_before_the_cache() -> None:
    names = [stage.__name__ for stage in STAGES]  # type: ignore[attr-defined]
    assert names.index("limits") + 1 == names.index("quota") == names.index("cache") - 1


async def test_the_calls_of_an_agent_and_of_its_sub_agent_are_counted_by_agent() -> None:
    def results(turns: Sequence[Any]) -> list[bool]:
        return [item.is_error for turn in turns if isinstance(turn, ResultsTurn) for item in turn.results]

    bob = Agent("bob", model=ScriptedModel([[call("echo"), call("look")], "Done."]))
    script = [[call("echo"), call("agent__bob", {"prompt": "Go."})], "Done."]
    ada = Agent("ada", model=ScriptedModel(script), agents=[bob])
    settings = Settings(quotas=[Quota(per="agent", calls_per_day=2)])
    async with Toolspace([echo, look], agents=[ada], settings=settings) as ts:
        assert results((await ts.run_agent("ada", "Go.")).turns) == [False, False]
        assert await count_allowed(ts, agent_id="bob") == 0


async def test_a_tool_without_a_quota_is_compiled_without_the_stage() -> None:
    async with open_toolspace(Quota(tools=["look"], calls_per_day=1), Quota(tokens_per_day=1)) as ts:
        entries = {entry.tool.name: entry for entry in ts.orchestrator.entries()}
        assert find_quotas(ts.orchestrator.services, entries["echo"]) == []
        assert len(find_quotas(ts.orchestrator.services, entries["look"])) == 1


async def test_the_memory_of_ended_windows_is_released(clock: Clock) -> None:
    store = MemoryQuotas(clock=clock)
    async with open_toolspace(Quota(per="principal", calls_per_minute=1)) as ts:
        ts.orchestrator.configure(quota_store=store)
        for number in range(50):
            await count_allowed(ts, calls=1, user_id=f"user {number}")
        assert len(store._amounts) == 50
        clock.set("2026-03-01T10:22:00Z")
        await count_allowed(ts, calls=1)
        assert len(store._amounts) == 1
