"""SPEC 4.1, the order of the stages: if two stages would act on a call, the earlier one does."""

from __future__ import annotations

import asyncio

import pytest

from toolspace import QueueSpec, Settings, ToolRules, Toolspace, tool
from toolspace.testing import EventRecorder

pytestmark = pytest.mark.spec("4.1")


@tool(cache=60, queue="one")
async def square(n: int) -> int:
    return n * n


def space(**settings: object) -> Toolspace:
    return Toolspace(tools=[square], settings=Settings(queues={"one": QueueSpec(concurrent=1)}, **settings))  # type: ignore[arg-type]


async def test_a_name_is_resolved_before_policies_decide() -> None:
    denied = {"square": ToolRules(enabled=False, source="here")}
    async with space(aliases={"power": "square"}, overrides=denied) as ts:
        result = await ts.call("power", {"n": 2})
    assert (result.error_kind, result.tool) == ("not_permitted", "square")


async def test_permission_is_checked_before_validation() -> None:
    async with space(overrides={"square": ToolRules(enabled=False, source="here")}) as ts:
        assert (await ts.call("square", {"n": "many"})).error_kind == "not_permitted"


async def test_invalid_arguments_do_not_count_as_calls_of_the_turn() -> None:
    async with space() as ts:
        run = ts.run(max_tool_calls_per_turn=1)
        kinds = [(await run.call("square", {"n": n})).error_kind for n in ("many", 2, 3)]
    assert kinds == ["invalid_parameters", None, "limit_exceeded"]


async def test_a_cache_hit_counts_as_a_call_of_the_turn() -> None:
    async with space() as ts:
        await ts.call("square", {"n": 2})
        run = ts.run(max_tool_calls_per_turn=1)
        results = [await run.call("square", {"n": 2}) for _ in range(2)]
        hits = [record.cache_hit for record in ts.orchestrator.call_log.recent]
    assert [result.error_kind for result in results] == [None, "limit_exceeded"]
    assert hits == [False, True, False]


@pytest.mark.parametrize("in_run", [False, True])
async def test_a_cache_hit_takes_no_slot_in_the_queue(in_run: bool) -> None:
    release = asyncio.Event()

    @tool(queue="one")
    async def hold() -> None:
        await release.wait()

    async with space() as ts:
        ts.add_tool(hold)
        await ts.call("square", {"n": 3})
        recorder = EventRecorder(ts)
        hold_task = asyncio.create_task(ts.call("hold"))
        await recorder.wait_for_start("hold")
        call = ts.run().call if in_run else ts.call
        hit = await asyncio.wait_for(call("square", {"n": 3}), 10)
        assert not hold_task.done()
        release.set()
        assert (await hold_task).ok
    assert (hit.result, hit.executed) == (9, False)


async def test_a_result_stored_by_the_size_limit_costs_the_budget_only_its_handle() -> None:
    @tool
    async def big() -> str:
        return "word " * 20_000

    async with space(tool_response_max_bytes=1_000) as ts:
        ts.add_tool(big)
        run = ts.run(context_window=5_000)
        result = await run.call("big")
        output = result.result["tool_output"]
    assert output["reason"] == "size_limit_exceeded"
    assert run.tokens_used < 1_000 < output["tokens"]
    assert not run.tool_budget_exceeded
