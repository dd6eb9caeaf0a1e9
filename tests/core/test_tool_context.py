"""The context of a call: what a tool knows about its caller, and what it can do while it runs."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from toolspace import EventType, Settings, ToolCanceledError, ToolContext, ToolError, Toolspace, tool


@pytest.mark.spec("1.5")
async def test_a_tool_sees_its_caller_and_its_limits() -> None:
    contexts: list[ToolContext] = []

    @tool
    async def look(ctx: ToolContext) -> None:
        contexts.append(ctx)

    value = ToolContext(
        task_id="task",
        user_id="ann",
        allowed_paths=["/a"],
        memory_dir="/m",
        session_dir=Path("/s"),
        run_id="run",
        agent_id="agent",
        agent_entity_id="entity",
        space_id="space",
    )
    result = await Toolspace(tools=[look]).call("look", context=value)
    ctx = contexts[0]
    assert (ctx.task_id, ctx.user_id, ctx.allowed_paths) == ("task", "ann", ["/a"])
    assert (ctx.memory_dir, ctx.session_dir) == ("/m", Path("/s"))
    assert (ctx.run_id, ctx.agent_id, ctx.agent_entity_id, ctx.space_id) == ("run", "agent", "entity", "space")
    assert ctx.call_id == result.call_id
    assert ctx is not value
    assert value.call_id == ""


@pytest.mark.spec("1.5")
async def test_each_call_has_a_context_of_its_own() -> None:
    both = asyncio.Barrier(2)

    @tool
    async def look(ctx: ToolContext) -> list[Any]:
        await both.wait()
        return [ctx.user_id, ctx.call_id]

    ts = Toolspace(tools=[look], context=ToolContext(user_id="base"))
    first, second = await asyncio.gather(ts.call("look", context=ToolContext(user_id="ann")), ts.call("look"))
    assert first.result == ["ann", first.call_id]
    assert second.result == ["base", second.call_id]
    assert first.call_id != second.call_id


@pytest.mark.spec("1.5")
def test_unset_fields_of_a_context_come_from_the_base() -> None:
    base = ToolContext(user_id="base", allowed_paths=["/b"], memory_dir="/m", task_id="t")
    context = ToolContext(user_id="ann").with_defaults(base)
    assert (context.user_id, context.allowed_paths, context.memory_dir, context.task_id) == ("ann", ["/b"], "/m", "t")
    assert (base.user_id, base.allowed_paths) == ("base", ["/b"])


def test_an_empty_allow_list_allows_nothing() -> None:
    base = ToolContext(allowed_paths=["/"], allowed_env=["*"], allowed_hosts=["*"])
    context = ToolContext(allowed_paths=[], allowed_env=(), allowed_hosts=[]).with_defaults(base)
    assert (list(context.allowed_paths or "?"), list(context.allowed_env or "?")) == (["?"], ["?"])
    assert (context.allowed_paths, context.allowed_env, context.allowed_hosts) == ([], (), [])


@pytest.mark.spec("1.5")
async def test_progress_and_partial_results_are_events_of_the_call() -> None:
    @tool
    async def work(ctx: ToolContext) -> str:
        ctx.report_progress(1, 2, "half")
        ctx.emit_partial({"piece": 1})
        return "done"

    ts = Toolspace(tools=[work])
    events: list[Any] = []
    ts.bus.subscribe(events.append)
    result = await ts.call("work")
    assert [event.type for event in events] == [
        EventType.TOOL_CALL_REQUESTED,
        EventType.TOOL_CALL_PROGRESS,
        EventType.TOOL_CALL_PARTIAL,
        EventType.TOOL_CALL_COMPLETED,
    ]
    assert {event.call_id for event in events} == {result.call_id}
    assert (events[1].progress, events[1].total, events[1].message) == (1, 2, "half")
    assert events[2].to_dict()["value"] == {"piece": 1}


@pytest.mark.spec("1.5")
async def test_a_plain_function_can_check_whether_it_was_cancelled() -> None:
    started, was_observed = threading.Event(), threading.Event()

    @tool
    def spin(ctx: ToolContext) -> None:
        started.set()
        while True:
            try:
                ctx.check_canceled()
            except ToolCanceledError:
                assert ctx.canceled
                was_observed.set()
                raise

    ts = Toolspace(tools=[spin], settings=Settings(tool_timeout=60))
    call = asyncio.create_task(ts.call("spin", call_id="c1"))
    assert await asyncio.to_thread(started.wait, 20)
    assert ts.cancel("c1")
    result = await call
    assert (result.error_kind, result.text) == ("canceled", "(tool failed: the call was canceled)")
    assert await asyncio.to_thread(was_observed.wait, 20)


@pytest.mark.spec("1.5")
async def test_the_logger_carries_the_ids_of_the_call(caplog: pytest.LogCaptureFixture) -> None:
    @tool
    async def say(ctx: ToolContext) -> None:
        ctx.logger.info("hello %s", "there")

    caplog.set_level(logging.INFO, logger="toolspace.tool")
    result = await Toolspace(tools=[say]).call("say", context=ToolContext(task_id="t1", run_id="r1"))
    record = next(item for item in caplog.records if item.name == "toolspace.tool")
    assert record.getMessage() == "hello there"
    assert (vars(record)["callId"], vars(record)["taskId"], vars(record)["runId"]) == (result.call_id, "t1", "r1")


async def test_a_tool_can_call_another_through_its_context() -> None:
    @tool
    async def inner(n: int) -> int:
        return n + 1

    @tool
    async def outer(ctx: ToolContext) -> Any:
        good = await ctx.call("inner", {"n": "1"})
        bad = await ctx.call("inner", "{}")
        return [good.result, bad.error_kind]

    assert (await Toolspace(tools=[inner, outer]).call("outer")).unwrap() == [2, "invalid_parameters"]


async def test_a_context_outside_a_call_emits_nothing() -> None:
    ctx = ToolContext()
    ctx.report_progress(1)
    ctx.emit_partial("x")
    ctx.check_canceled()
    assert (ctx.call_id, ctx.canceled, ctx.run) == ("", False, None)
    with pytest.raises(ToolError, match="belongs to no call; call the tool through a Toolspace"):
        await ctx.call("x")


def test_a_calls_context_has_every_field_of_the_callers_context() -> None:
    caller_context = ToolContext()
    for name in ToolContext.__slots__:
        setattr(caller_context, name, f"the {name}")
    ts = Toolspace()
    bound = caller_context.bind(ts.orchestrator, run_id="r", session_id="s")  # pyright: ignore[reportArgumentType]
    assert (bound.handle, bound.run_id, bound.session_id) == (ts.orchestrator, "r", "s")
    for name in set(ToolContext.__slots__) - {"handle", "run_id", "session_id"}:
        assert getattr(bound, name) == f"the {name}"
