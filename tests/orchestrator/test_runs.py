"""Runs: limits per turn, traces, policies, the order of events, and the call log."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest

from toolspace import (
    Allow,
    Deny,
    EventType,
    Settings,
    Tool,
    ToolContext,
    ToolOrchestrator,
    ToolRegistry,
    Toolspace,
    tool,
)
from toolspace.core.extension_points import Decision
from toolspace.core.token_count import estimate_tokens
from toolspace.orchestrator.stages.call_events import VERBOSE
from toolspace.testing import EventRecorder


@tool
async def add(a: int, b: int = 0) -> int:
    return a + b


@tool
async def fail() -> None:
    raise ValueError("boom")


@pytest.mark.spec("4.1")
async def test_the_limit_of_calls_applies_per_turn() -> None:
    async with Toolspace(tools=[add]) as ts:
        run = ts.run(max_tool_calls_per_turn=2)
        kinds = [(await run.call("add", {"a": n})).error_kind for n in range(3)]
        assert kinds == [None, None, "limit_exceeded"]
        assert run.next_turn() == 2
        assert (await run.call("add", {"a": 1})).ok


@pytest.mark.spec("4.1")
async def test_calls_of_a_batch_count_too() -> None:
    async with Toolspace(tools=[add]) as ts:
        run = ts.run(max_tool_calls_per_turn=3)
        calls = [{"id": str(n), "tool": "add", "parameters": {"a": n}} for n in range(4)]
        batch = await run.call("agent__batch", {"calls": calls})
    assert [entry["ok"] for entry in batch.result["results"]] == [True, True, False, False]


async def test_the_limits_of_a_run_come_from_the_settings() -> None:
    async with Toolspace(tools=[add], settings=Settings(max_tool_calls_per_turn=1, context_window=50)) as ts:
        run = ts.run()
        assert (run.max_tool_calls_per_turn, run.context_window) == (1, 50)


class OnlyFor:
    """A policy that allows one tool to one user only."""

    def __init__(self, tool: str, user: str) -> None:
        self.rule = f"{tool} is for {user}"
        self._tool, self._user = tool, user

    def decide(self, tool: Tool, context: ToolContext) -> Decision:
        if tool.name == self._tool and context.user_id != self._user:
            return Deny(self.rule)
        return Allow()


@pytest.mark.spec("4.1")
async def test_policies_decide_by_tool_and_caller() -> None:
    async with Toolspace(tools=[add], settings=Settings(policies=[OnlyFor("add", "ann")])) as ts:
        denied = await ts.call("add", {"a": 1}, context=ToolContext(user_id="bob"))
        allowed = await ts.call("add", {"a": 1}, context=ToolContext(user_id="ann"))
        names = {
            user: [listed_tool.name for listed_tool in ts.list_tools(context=ToolContext(user_id=user))]
            for user in ("ann", "bob")
        }
    assert (denied.error_kind, denied.error) == ("not_permitted", "Permission denied: add is for ann")
    assert allowed.ok
    assert names == {"ann": ["add"], "bob": []}


@pytest.mark.spec("4.1")
async def test_a_run_may_have_a_policy_of_its_own() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        run = ts.run(policy=OnlyFor("fail", "nobody"))
        assert (await run.call("add", {"a": 1})).ok
        assert (await run.call("fail")).error_kind == "not_permitted"
        assert "fail" not in [definition["name"] for definition in ts.to_llm_tools("anthropic", run=run)]
        assert (await ts.call("fail")).error_kind == "execution_error"


@pytest.mark.spec("4.8")
async def test_every_call_is_recorded_however_it_ended() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        caller = ToolContext(user_id="ann", agent_id="a1")
        run = ts.run()
        await run.call("add", '{"a": 20, "b": 22}', context=caller)
        await run.call("fail", context=caller)
        await run.call("nothing", context=caller)
        records = [record.to_dict() for record in ts.orchestrator.call_log.recent]
    assert [(r["tool"], r["status"], r.get("errorKind")) for r in records] == [
        ("add", "ok", None),
        ("fail", "failed", "execution_error"),
        ("nothing", "failed", "unknown_tool"),
    ]
    first = records[0]
    assert (first["charactersIn"], first["charactersOut"]) == (18, 2)
    assert first["tokensOut"] >= 1
    assert (first["userId"], first["agentId"], first["runId"], first["cacheHit"]) == ("ann", "a1", run.id, False)
    assert first["latencyMs"] > 0
    assert {"queueWaitMs", "startedAt", "namespace"} <= first.keys()


@pytest.mark.spec("4.8")
async def test_statistics_by_category_and_by_tool() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        for _ in range(9):
            await ts.call("add", {"a": 1})
        await ts.call("fail")
        stats = ts.get_stats().to_dict()
        local = ts.registry.get_stats().to_dict()
    assert stats["byCategory"]["custom"] == 2
    assert (stats["callStats"]["add"]["count"], stats["callStats"]["add"]["failures"]) == (9, 0)
    assert (stats["callStats"]["fail"]["count"], stats["callStats"]["fail"]["failures"]) == (1, 1)
    assert {"avgDuration", "p50", "p95"} <= stats["callStats"]["add"].keys()
    assert local["total"] == 2
    assert local["callStats"]["add"]["count"] == 9


@pytest.mark.spec("4.8")
async def test_unknown_names_do_not_grow_the_statistics() -> None:
    async with Toolspace() as ts:
        for n in range(100):
            await ts.call(f"made_up_{n}")
        assert ts.get_stats().call_stats == {}


@pytest.mark.spec("4.8")
async def test_calls_form_a_tree_of_run_turn_call_and_child_run() -> None:
    @tool
    async def delegate(context: ToolContext) -> Any:
        child = ts.run()
        result = await child.call("add", {"a": 1})
        child.close()
        return (await context.call("add", {"a": result.result})).result

    ts = Toolspace(tools=[add, delegate])
    async with ts:
        run = ts.run()
        await run.call("delegate")
        run.next_turn()
        await run.call("fail_not_there")
        run.close()
    tree = run.trace.to_dict()
    json.dumps(tree)
    assert (tree["kind"], tree["id"], tree["status"]) == ("run", run.id, "ok")
    first, second = tree["children"]
    assert [first["kind"], second["kind"]] == ["turn", "turn"]
    call = first["children"][0]
    assert (call["kind"], call["name"], call["status"]) == ("call", "delegate", "ok")
    assert call["latencyMs"] > 0
    child_run, nested = call["children"]
    assert (child_run["kind"], nested["kind"], nested["name"]) == ("run", "call", "add")
    assert child_run["children"][0]["children"][0]["name"] == "add"
    assert second["children"][0]["status"] == "failed"


@pytest.mark.spec("4.10")
async def test_each_call_has_one_beginning_and_one_end_in_order() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        recorder = EventRecorder(ts)
        for name, arguments in (("add", {"a": 1}), ("fail", None), ("add", {"x": 1}), ("gone", None)):
            await ts.call(name, arguments)
    assert [(event.type.name, int(event.type)) for event in recorder.events] == [
        ("TOOL_CALL_REQUESTED", 400),
        ("TOOL_CALL_COMPLETED", 410),
        *[("TOOL_CALL_REQUESTED", 400), ("TOOL_CALL_FAILED", 420)] * 3,
    ]
    first, last = recorder.events[0].to_dict(), recorder.events[1].to_dict()
    assert (first["toolName"], first["params"]) == ("add", {"a": 1})
    assert (last["toolName"], last["result"]) == ("add", 1)
    assert last["durationMs"] >= 0


@pytest.mark.spec("4.10")
async def test_completion_is_emitted_only_after_it_is_recorded() -> None:
    was_recorded: list[bool] = []
    async with Toolspace(tools=[add]) as ts:
        ts.bus.subscribe(
            lambda event: was_recorded.append(ts.orchestrator.call_log.recent[-1].call_id == event.call_id),
            EventType.TOOL_CALL_COMPLETED,
        )
        await ts.call("add", {"a": 1})
    assert was_recorded == [True]


@pytest.mark.spec("4.10")
async def test_subscribers_choose_types_and_can_unsubscribe() -> None:
    async with Toolspace(tools=[add, fail]) as ts:
        received_items: list[str] = []
        leave = ts.bus.subscribe(lambda event: received_items.append(event.type.name), EventType.TOOL_CALL_FAILED)
        await ts.call("add", {"a": 1})
        await ts.call("fail")
        leave()
        leave()
        await ts.call("fail")
    assert received_items == ["TOOL_CALL_FAILED"]


@pytest.mark.spec("4.10")
async def test_a_subscriber_that_raises_fails_no_call_and_an_async_one_is_awaited_at_the_end() -> None:
    finished_names: list[str] = []

    def broken(event: Any) -> None:
        raise RuntimeError("subscriber broke")

    async def slow(event: Any) -> None:
        await asyncio.sleep(0.01)
        finished_names.append(event.type.name)

    async with Toolspace(tools=[add]) as ts:
        ts.bus.subscribe(broken)
        ts.bus.subscribe(slow, EventType.TOOL_CALL_COMPLETED)
        assert (await ts.call("add", {"a": 1})).ok
    assert finished_names == ["TOOL_CALL_COMPLETED"]


@pytest.mark.spec("4.10")
async def test_a_slow_consumer_of_events_loses_the_oldest() -> None:
    async with Toolspace(tools=[add]) as ts:
        with ts.bus.open_queue(EventType.TOOL_CALL_COMPLETED, limit=3) as queue:
            for n in range(5):
                await ts.call("add", {"a": n})
            assert [queue.get_nowait().to_dict()["result"] for _ in range(queue.qsize())] == [2, 3, 4]


@pytest.mark.spec("18")
async def test_a_deferred_completion_is_emitted_by_the_caller() -> None:
    orchestrator = ToolOrchestrator()
    orchestrator.register(ToolRegistry([add]))
    steps: list[str] = []
    orchestrator.bus.subscribe(lambda event: steps.append(event.type.name))
    result = await orchestrator.execute("add", {"a": 1}, defer_completion=True)
    assert steps == ["TOOL_CALL_REQUESTED"]
    assert orchestrator.emit_completion(result)
    assert not orchestrator.emit_completion(result)
    assert steps == ["TOOL_CALL_REQUESTED", "TOOL_CALL_COMPLETED"]
    await orchestrator.execute("add", {"a": 1}, defer_completion=True)
    await orchestrator.cleanup()
    assert steps.count("TOOL_CALL_COMPLETED") == 2


@pytest.mark.spec("4.11")
async def test_calls_are_logged_in_and_out_and_secrets_never_appear(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def login(user: str, password: str, headers: dict[str, str]) -> None:
        raise PermissionError("bad token Bearer abcdef0123456789")

    async with Toolspace(tools=[login, add]) as ts:
        with caplog.at_level(VERBOSE, logger="toolspace"):
            await ts.call("add", {"a": 1})
            await ts.call("login", {"user": "ann", "password": "hunter2!", "headers": {"Authorization": "Basic Zm9v"}})
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert 'tool request → add\n    parameters: {"a":1}' in text
    assert "tool response ← add\n    latency: " in text
    assert "output: 1 chars, status: ok" in text
    assert "ann" in text
    for secret in ("hunter2!", "Zm9v", "abcdef0123456789"):
        assert secret not in text
    failed = caplog.records[-1]
    assert failed.levelno == logging.WARNING
    assert "status: failed, error: " in failed.getMessage()
    assert {record.event for record in caplog.records} == {"tool_started", "tool_finished"}  # type: ignore[attr-defined]


@pytest.mark.spec("4.1")
async def test_a_stage_can_be_replaced_by_itself() -> None:
    from toolspace.orchestrator.pipeline import STAGES
    from toolspace.orchestrator.stages.permission_and_validation import validate

    def trusting_stage(plan: Any, next: Any) -> Any:
        async def run(call: Any) -> Any:
            call.values = dict(call.arguments)
            return await next(call)

        return run

    stages = [trusting_stage if stage is validate else stage for stage in STAGES]
    orchestrator = ToolOrchestrator(stages=stages)
    orchestrator.register(ToolRegistry([add]))
    assert (await orchestrator.execute("add", {"a": "un", "b": "checked"})).result == "unchecked"


@pytest.mark.spec("4.1")
async def test_a_tool_has_only_the_stages_that_it_needs() -> None:
    from toolspace.orchestrator.pipeline import STAGES
    from toolspace.orchestrator.stages.cache import cache
    from toolspace.orchestrator.stages.permission_and_validation import limits, permission
    from toolspace.orchestrator.stages.queue import queue

    skipped: list[Any] = []

    def watch_stage(stage: Any) -> Any:
        def wrap(context: Any, next: Any) -> Any:
            handler = stage(context, next)
            if handler is next:
                skipped.append(stage)
            return handler

        return wrap

    orchestrator = ToolOrchestrator(stages=[watch_stage(stage) for stage in STAGES])
    orchestrator.register(ToolRegistry([add]))
    assert (await orchestrator.execute("add", {"a": 1, "b": 2})).result == 3
    assert {cache, limits, permission, queue} <= set(skipped)


async def test_a_call_in_a_run_has_the_runs_caller_in_every_interface() -> None:
    @tool
    async def caller(context: ToolContext) -> list[Any]:
        return [context.user_id, context.space_id]

    @tool
    async def ask(context: ToolContext) -> Any:
        return (await context.call("caller")).result

    async with Toolspace(tools=[caller, ask]) as ts:
        run = ts.run(context=ToolContext(user_id="ada"))
        more = ToolContext(space_id="s")
        assert (await run.call("caller")).result == ["ada", None]
        assert (await ts.call("caller", run=run)).result == ["ada", None]
        assert (await ts.call("ask", run=run)).result == ["ada", None]
        assert (await run.call("caller", context=more)).result == ["ada", "s"]
        assert (await run.call("ask", context=more)).result == ["ada", "s"]
        assert {entry.user_id for entry in ts.orchestrator.call_log.recent} == {"ada"}


@pytest.mark.spec("4.5")
async def test_a_tool_that_cancels_its_run_ends_where_it_next_waits() -> None:
    reached_names: list[str] = []

    @tool
    async def give_up() -> None:
        run.cancel()
        await asyncio.sleep(0)
        reached_names.append("never")

    async with Toolspace(tools=[give_up]) as ts:
        run = ts.run()
        assert (await run.call("give_up")).error_kind == "canceled"
    assert reached_names == []


@pytest.mark.spec("4.1")
@pytest.mark.parametrize("decision", [None, True, "allow"])
async def test_a_policy_that_does_not_allow_denies(decision: Any) -> None:
    class Vague:
        rule = "vague"

        def decide(self, tool: Tool, context: ToolContext) -> Any:
            return decision

    async with Toolspace(tools=[add], settings=Settings(policies=[Vague()])) as ts:
        result = await ts.call("add", {"a": 1})
    assert (result.error_kind, result.executed) == ("internal_error", False)
    assert "vague" in (result.error or "")


async def test_calls_of_an_async_subscriber_are_not_children_of_the_call() -> None:
    @tool
    async def note() -> None: ...

    async with Toolspace(tools=[add, note]) as ts:

        async def listen(event: Any) -> None:
            if event.tool_name == "add":
                await ts.call("note")

        ts.bus.subscribe(listen, EventType.TOOL_CALL_COMPLETED)
        run = ts.run(max_tool_calls_per_turn=1)
        await run.call("add", {"a": 1})
        await ts.bus.aclose()
        entry = ts.orchestrator.call_log.recent[-1]
    assert (entry.tool, entry.status, entry.parent_id, entry.run_id) == ("note", "ok", None, None)


async def test_a_token_counter_that_fails_does_not_fail_a_call() -> None:
    def broken(text: str, /) -> int:
        raise ValueError("no vocabulary")

    async with Toolspace(tools=[add], settings=Settings(count_tokens=broken)) as ts:
        result = await ts.call("add", {"a": 1, "b": 2})
        assert result.result == 3
        long = await ts.call("x" * 1_000, {"a": 1})
        assert long.error_kind == "unknown_tool"
        token_counts = [entry.tokens_out for entry in ts.orchestrator.call_log.recent]
        assert token_counts == [estimate_tokens(result.text), estimate_tokens(long.text)]
