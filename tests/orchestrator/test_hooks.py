"""Hooks of a program: what they see, change and deny, and what happens if they fail."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from toolspace import (
    EventType,
    Hook,
    HookCall,
    HookDecision,
    ImagePart,
    Settings,
    TextPart,
    ToolContext,
    ToolExecutionError,
    ToolResult,
    ToolRules,
    Toolspace,
    tool,
)
from toolspace.orchestrator.stages import hooks as hook_stages
from toolspace.storage.memory_cache import MemoryCache

pytestmark = pytest.mark.spec("23.1")


def make_toolspace(*tools: Any, hooks: list[Hook], **settings: Any) -> Toolspace:
    return Toolspace(tools, settings=Settings(hooks=hooks, **settings))


@tool
async def add(a: int, b: int) -> int:
    return a + b


@tool
async def fail(text: str = "no such user") -> str:
    raise ToolExecutionError(text)


async def test_a_hook_sees_the_call_with_principal_run_and_definition() -> None:
    calls: list[HookCall] = []
    ts = make_toolspace(
        add, fail, hooks=[Hook(use=calls.append, on="before"), Hook(use=calls.append, on="after"),
                          Hook(use=calls.append, on="error")]
    )  # fmt: skip
    run = ts.run(context=ToolContext(user_id="ent_carla", space_id="spc_1", agent_entity_id="ent_bot"))
    assert (await run.call("add", {"a": "1", "b": 2}, call_id="call_1")).result == 3
    assert not (await ts.call("fail")).ok
    before, after, _, error = calls
    assert (before.on, before.arguments, before.result) == ("before", {"a": 1, "b": 2}, None)
    assert (before.principal, before.run_id, before.call_id) == ("ent_carla", run.id, "call_1")
    assert (before.agent_entity_id, before.space_id) == ("ent_bot", "spc_1")
    assert before.tool.name == "add"
    assert (after.on, after.result, after.arguments) == ("after", 3, before.arguments)
    assert (error.on, error.error, error.error_kind, error.principal) == (
        "error", "no such user", "execution_error", "local",
    )  # fmt: skip


async def test_hooks_change_arguments_and_results_in_their_order() -> None:
    hooks = [
        Hook(use=lambda call: HookDecision(arguments={**call.arguments, "a": 10})),
        Hook(use=lambda call: {"arguments": {**call.arguments, "a": call.arguments["a"] * 2}}),
        Hook(use=lambda call: HookDecision(result=call.result + 1), on="after"),
        Hook(use=lambda call: HookDecision(result={"sum": call.result}), on="after"),
    ]
    assert (await make_toolspace(add, hooks=hooks).call("add", {"a": 1, "b": 2})).result == {"sum": 23}


@pytest.mark.spec("4.1")
async def test_changed_arguments_are_validated_again() -> None:
    seen_calls: list[Any] = []
    hooks = [
        Hook(use=lambda call: HookDecision(arguments={"a": "7", "b": 0})),
        Hook(use=lambda call: seen_calls.append(call.arguments["a"])),
        Hook(use=lambda call: HookDecision(arguments={"a": "many"}), tools="nobody"),
    ]
    ts = make_toolspace(add, hooks=hooks)
    assert (await ts.call("add", {"a": 1, "b": 2})).result == 7
    assert seen_calls == [7]
    ts = make_toolspace(add, hooks=[Hook(use=lambda call: HookDecision(arguments={"a": "many"}), name="widen")])
    result = await ts.call("add", {"a": 1, "b": 2})
    assert (result.error_kind, result.executed) == ("invalid_parameters", False)
    assert "widen" in (result.error or "")


async def test_a_hook_that_changes_what_it_sees_changes_nothing() -> None:
    received_items: list[list[int]] = []

    @tool
    async def collect(items: list[int]) -> dict[str, list[int]]:
        received_items.append(items)
        return {"items": [1]}

    def vandalise(call: HookCall) -> None:
        call.arguments["items"].append(13)
        if call.outcome is not None:
            call.result["items"].append(13)
            call.outcome.ok = False

    ts = make_toolspace(collect, hooks=[Hook(use=vandalise), Hook(use=vandalise, on="after")])
    assert (await ts.call("collect", {"items": [5]})).result == {"items": [1]}
    assert received_items == [[5]]


async def test_a_before_hook_denies_and_the_tool_never_runs() -> None:
    runs: list[int] = []

    @tool
    async def delete() -> None:
        runs.append(1)

    ts = make_toolspace(delete, hooks=[Hook(use=lambda call: HookDecision(deny=f"not for {call.principal}"))])
    result = await ts.call("delete", context=ToolContext(user_id="ent_dave"))
    assert (result.error_kind, result.executed) == ("not_permitted", False)
    assert result.error == "Permission denied: not for ent_dave"
    assert runs == []


async def test_an_after_hook_withholds_a_result_that_was_executed() -> None:
    @tool
    async def secret() -> list[TextPart]:
        return [TextPart(text="gold")]

    ts = make_toolspace(secret, hooks=[Hook(use=lambda call: HookDecision(deny="it is gold"), on="after")])
    result = await ts.call("secret")
    assert (result.error_kind, result.executed, result.error) == (
        "not_permitted",
        True,
        "Permission denied: it is gold",
    )
    assert "gold" not in str(result.parts) + str(result.result)


async def test_an_error_hook_replaces_the_text_or_returns_a_result() -> None:
    ts = make_toolspace(fail, hooks=[Hook(use=lambda call: HookDecision(error="it failed"), on="error")])
    result = await ts.call("fail")
    assert (result.ok, result.error, result.error_kind) == (False, "it failed", "execution_error")
    ts = make_toolspace(fail, add, hooks=[Hook(use=lambda call: HookDecision(result=None), on="error")])
    result = await ts.call("fail")
    assert (result.ok, result.result, result.executed) == (True, None, True)
    # Failures before the execution are failures, too.
    assert (await ts.call("add", {"a": "x"})).ok


async def test_a_result_of_an_error_hook_is_not_cached() -> None:
    ts = Toolspace(
        [fail],
        settings=Settings(
            hooks=[Hook(use=lambda call: HookDecision(result=[]), on="error")], overrides={"fail": ToolRules(cache=60)}
        ),
    )
    for _ in range(2):
        await ts.call("fail")
    assert [entry.cache_hit for entry in ts.orchestrator.call_log.recent] == [False, False]


async def test_typed_parts_survive_in_a_result_and_go_with_a_replaced_one() -> None:
    @tool
    async def draw() -> list[Any]:
        return [TextPart(text="a cat"), ImagePart(data="aGk=")]

    def keep_image(call: HookCall) -> HookDecision:
        return HookDecision(result=[part for part in call.content if isinstance(part, ImagePart)])

    result = await make_toolspace(draw, hooks=[Hook(use=keep_image, on="after")]).call("draw")
    assert [type(part).__name__ for part in result.parts] == ["ImagePart"]
    ts = make_toolspace(draw, hooks=[Hook(use=lambda call: HookDecision(result="nothing"), on="after")])
    assert (await ts.call("draw")).parts == ()


@pytest.mark.parametrize("pattern", ["fs__delete_file", "fs__delete-file", "delete-file", "delete_*", "*file", "rm"])
async def test_a_glob_matches_every_spelling_of_a_tool(pattern: str) -> None:
    from toolspace.core.extension_points import ToolProvider
    from toolspace.core.tool import Tool

    class Files(ToolProvider):
        namespace = "fs"

        def list_tools(self) -> list[Tool]:
            return [Tool("delete-file")]

        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            return ToolResult(True, "deleted")

    hooks = [Hook(use=lambda call: HookDecision(deny="no"), tools=["nothing", pattern])]
    ts = Toolspace([add], providers=[Files()], settings=Settings(hooks=hooks, aliases={"rm": "fs__delete_file"}))
    for name in ("fs__delete_file", "rm", "delete-file"):
        assert (await ts.call(name)).error_kind == "not_permitted"
    assert (await ts.call("add", {"a": 1, "b": 2})).ok


# Failures of hooks


async def _raise(call: HookCall) -> None:
    raise RuntimeError("http://10.0.0.1/internal is down")


async def _wait(call: HookCall) -> None:
    await asyncio.Event().wait()


def _cancel(call: HookCall) -> None:
    raise asyncio.CancelledError


def _return_text(call: HookCall) -> Any:
    return "yes"


def _replace_wrong_field(call: HookCall) -> Any:
    return {"error": "x"} if call.on == "before" else {"arguments": {}}


@pytest.mark.parametrize("on", ["before", "after"])
@pytest.mark.parametrize("function", [_raise, _wait, _cancel, _return_text, _replace_wrong_field])
async def test_a_failing_hook_denies_or_passes_as_configured(
    on: Any, function: Callable[[HookCall], Any], caplog: pytest.LogCaptureFixture
) -> None:
    def hook(**options: Any) -> Hook:
        return Hook(use=function, on=on, timeout=0.02, name="check", source="toolspace.yaml:7", **options)

    with caplog.at_level(logging.WARNING, "toolspace.hooks"):
        result = await make_toolspace(add, hooks=[hook()]).call("add", {"a": 1, "b": 2})
        assert (result.error_kind, result.executed) == ("not_permitted", on == "after")
        assert f"Permission denied: the {on}-hook check: it " in (result.error or "")
        assert "10.0.0.1" not in (result.error or "")
        assert (await make_toolspace(add, hooks=[hook(on_failure="open")]).call("add", {"a": 1, "b": 2})).result == 3
    assert "toolspace.yaml:7" in caplog.text
    assert "the call is denied" in caplog.text
    assert "the call passes" in caplog.text


async def test_a_hook_that_takes_too_long_is_cancelled() -> None:
    cancelled = asyncio.Event()

    async def hang(call: HookCall) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    result = await make_toolspace(add, hooks=[Hook(use=hang, timeout=0.02)]).call("add", {"a": 1, "b": 2})
    assert result.error == "Permission denied: the before-hook hang: it took longer than 20ms"
    assert cancelled.is_set()


async def test_cancelling_a_call_cancels_its_hook() -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def hang(call: HookCall) -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    ts = make_toolspace(add, hooks=[Hook(use=hang, timeout=60)])
    call_task = asyncio.create_task(ts.call("add", {"a": 1, "b": 2}, call_id="call_1"))
    await started.wait()
    assert ts.cancel("call_1")
    assert (await call_task).error_kind == "canceled"
    await cancelled.wait()


async def test_a_hook_ends_with_the_deadline_of_the_run() -> None:
    run = make_toolspace(add, hooks=[Hook(use=_wait, timeout=60)]).run(deadline=0.02)
    assert (await run.call("add", {"a": 1, "b": 2})).error_kind == "not_permitted"


async def test_plain_functions_run_in_a_thread_and_async_ones_on_the_loop() -> None:
    threads: list[threading.Thread] = []

    async def on_the_loop(call: HookCall) -> None:
        threads.append(threading.current_thread())

    def in_a_thread(call: HookCall) -> None:
        threads.append(threading.current_thread())

    await make_toolspace(add, hooks=[Hook(use=on_the_loop), Hook(use=in_a_thread)]).call("add", {"a": 1, "b": 2})
    assert threads[0] is threading.main_thread()
    assert threads[1] is not threading.main_thread()


# Caches, streams and large results


async def test_what_is_cached_is_what_the_after_hooks_returned() -> None:
    runs: list[int] = []

    @tool(cache=60)
    async def lookup(key: str) -> str:
        runs.append(1)
        return "gold"

    seen_calls: list[HookCall] = []

    def mask(call: HookCall) -> HookDecision:
        seen_calls.append(call)
        return HookDecision(result="***")

    cache = MemoryCache()
    ts = Toolspace([lookup], settings=Settings(hooks=[Hook(use=mask, on="after")]), cache=cache)
    results = [await ts.call("lookup", '{"key": "a"}') for _ in range(3)]
    assert [result.result for result in results] == ["***"] * 3
    assert (len(runs), len(seen_calls)) == (1, 1)
    # A toolspace with other hooks must not get those results, nor results from before there were hooks.
    toolspace_without_hooks = Toolspace([lookup], cache=cache)
    assert (await toolspace_without_hooks.call("lookup", '{"key": "a"}')).result == "gold"


async def test_before_hooks_see_calls_that_the_cache_answers() -> None:
    @tool(cache=60)
    async def lookup(key: str) -> str:
        return key

    allowed = [True, True, False]

    def check(call: HookCall) -> HookDecision | None:
        return None if allowed.pop(0) else HookDecision(deny="no")

    ts = make_toolspace(lookup, hooks=[Hook(use=check)])
    results = [await ts.call("lookup", '{"key": "a"}') for _ in range(3)]
    assert [result.ok for result in results] == [True, True, False]


async def test_parts_of_a_stream_are_withheld_if_an_after_hook_decides_about_the_result() -> None:
    @tool
    async def stream(context: ToolContext) -> AsyncIterator[str]:
        context.report_progress(1, 2, "gold is near")
        context.emit_partial("gold")
        yield "go"
        yield "ld"

    events: list[Any] = []
    ts = make_toolspace(
        stream, hooks=[Hook(use=lambda call: HookDecision(result=call.result.replace("gold", "***")), on="after")]
    )
    ts.bus.subscribe(events.append, EventType.TOOL_CALL_PARTIAL, EventType.TOOL_CALL_PROGRESS)
    assert (await ts.call("stream")).result == "***"
    (progress,) = events
    assert (progress.progress, progress.total, progress.message) == (1, 2, None)


@pytest.mark.spec("4.6")
async def test_a_stored_result_is_what_the_after_hooks_returned() -> None:
    @tool
    async def stream() -> AsyncIterator[str]:
        for _ in range(100):
            yield "gold " * 100

    ts = make_toolspace(
        stream,
        hooks=[Hook(use=lambda call: HookDecision(result=call.result.replace("gold", "lead")), on="after")],
        tool_response_max_bytes=1000,
    )
    result = await ts.run().call("stream")
    handle = result.result["tool_output"]["handle"]
    output = await ts.outputs.inspect(handle)
    assert output is not None
    text = await ts.outputs.text(output, limit=100_000)
    assert text == "lead " * 10_000
    assert "gold" not in result.text


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_result_that_is_too_large_for_hooks_is_denied_or_passes(
    is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hook_stages, "MAX_RESULT_BYTES", 5_000)

    @tool
    async def big() -> AsyncIterator[str]:
        for _ in range(100):
            yield "gold " * 20

    @tool(name="big")
    async def big_text() -> str:
        return "gold " * 2_000

    seen_calls: list[Any] = []
    for on_failure, is_ok in (("closed", False), ("open", True)):
        hooks = [
            Hook(use=lambda call: HookDecision(result="lead"), on="after", tools="other"),
            Hook(use=seen_calls.append, on="after", on_failure=on_failure),  # pyright: ignore[reportArgumentType]
        ]
        ts = make_toolspace(big if is_stream else big_text, hooks=hooks)
        result = await ts.call("big")
        assert (result.ok, result.executed) == (is_ok, True)
        assert ("gold" in result.text) is is_ok
        assert is_ok or result.error_kind == "not_permitted"
    assert not seen_calls


async def test_calls_of_a_batch_and_calls_inside_calls_have_their_hooks() -> None:
    @tool
    async def twice(a: int, context: ToolContext) -> Any:
        return (await context.call("add", {"a": a, "b": a})).result

    hooks = [Hook(use=lambda call: HookDecision(result=call.result * 100), on="after", tools="add")]
    ts = make_toolspace(add, twice, hooks=hooks)
    assert (await ts.call("twice", {"a": 1})).result == 200
    batch = await ts.run().call("agent__batch", {"calls": [{"id": "x", "tool": "add", "parameters": {"a": 1, "b": 1}}]})
    assert batch.result["results"][0]["output"] == 200, batch.result


def test_a_decision_is_one_thing() -> None:
    with pytest.raises(ValueError, match="a hook decides one thing, not result and deny"):
        HookDecision(deny="no", result=1)


def test_a_tool_without_hooks_has_no_stage_for_them() -> None:
    ts = make_toolspace(add, hooks=[Hook(use=_raise, tools="other")])
    for stage in (hook_stages.before_hooks, hook_stages.after_hooks, hook_stages.error_hooks):
        match = ts.orchestrator.explain("add")
        assert match is not None
        from toolspace.orchestrator.pipeline import StageContext

        context = StageContext(match[0], match[1], ts.orchestrator._services, False)  # pyright: ignore[reportPrivateUsage]
        assert stage(context, _no_handler) is _no_handler


async def _no_handler(call: Any) -> ToolResult:
    raise NotImplementedError
