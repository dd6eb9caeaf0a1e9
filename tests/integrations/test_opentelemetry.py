"""Spans of real calls, as OpenTelemetry's own SDK collects them."""

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import StatusCode

from toolspace import (
    QueueSpec,
    Settings,
    Tool,
    ToolContext,
    ToolOrchestrator,
    ToolProvider,
    ToolRegistry,
    ToolResult,
    Toolspace,
    tool,
)
from toolspace.core.trace_context import TraceContext
from toolspace.integrations.opentelemetry import export_run, instrument

EXAMPLES = Path(__file__).parents[2] / "examples"


class RecordedSpans:
    """What was exported, by name."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    @property
    def tracer(self) -> trace.Tracer:
        return self.provider.get_tracer("test")

    @property
    def all(self) -> list[ReadableSpan]:
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def list_named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def get(self, name: str) -> ReadableSpan:
        [span] = self.list_named(name)
        return span

    def tree(self, parent: int | None = None) -> list[Any]:
        """Names in lists: each span, and what is below it."""
        return [
            [span.name, *self.tree(span.context.span_id)]
            for span in self.all
            if (span.parent.span_id if span.parent else None) == parent
        ]


@pytest.fixture
def spans() -> RecordedSpans:
    return RecordedSpans()


@tool
async def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@tool
async def broken() -> None:
    """Always fails."""
    raise ValueError("the key is sk_0123456789abcdef0123")


@tool
async def twice(context: ToolContext) -> list[Any]:
    """Calls another tool two times."""
    return [(await context.call("add", {"a": n, "b": n})).result for n in (1, 2)]


@pytest.mark.spec("4.8")
async def test_a_call_is_a_span_with_the_attributes_of_the_conventions(spans: RecordedSpans) -> None:
    context = ToolContext(user_id="ada", agent_id="helper")
    async with Toolspace(tools=[add], context=context) as ts:
        instrument(ts, spans.provider)
        result = await ts.call("add", '{"a": 1, "b": 22}', call_id="c1")

    span = spans.get("execute_tool add")
    attributes = dict(span.attributes or {})
    assert attributes.pop("toolspace.latency_ms") == result.duration_ms
    assert attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "add",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.description": "Adds two numbers.",
        "gen_ai.tool.call.id": "c1",
        "gen_ai.agent.id": "helper",
        "user.id": "ada",
        "toolspace.requested": "add",
        "toolspace.executed": True,
        "toolspace.cache_hit": False,
        "toolspace.queue_wait_ms": 0.0,
        "toolspace.characters_in": 17,
        "toolspace.characters_out": 2,
    }
    assert span.status.status_code is StatusCode.UNSET
    assert span.parent is None
    assert span.start_time == pytest.approx(result.started_at * 1e6)
    assert span.instrumentation_scope is not None
    assert span.instrumentation_scope.name == "toolspace"


@pytest.mark.spec("4.10")
async def test_the_span_has_the_events_of_the_call(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts:
        instrument(ts, spans.provider)
        await ts.call("add", {"a": 1, "b": 2})

    assert [event.name for event in spans.get("execute_tool add").events] == ["tool_started", "tool_finished"]


@pytest.mark.spec("4.8")
async def test_a_failed_call_is_a_span_with_an_error_and_its_kind(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add, broken]) as ts:
        instrument(ts, spans.provider)
        await ts.call("broken")
        await ts.call("add", {"a": 1})

    failed, invalid = spans.get("execute_tool broken"), spans.get("execute_tool add")
    assert failed.status.status_code is invalid.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == failed.attributes["toolspace.error_kind"] == "execution_error"  # type: ignore[index]
    assert invalid.attributes["error.type"] == "invalid_parameters"  # type: ignore[index]
    assert invalid.attributes["toolspace.executed"] is False  # type: ignore[index]
    assert "b: required, but missing" in (invalid.status.description or "")


@pytest.mark.spec("4.11")
async def test_content_is_only_captured_on_request_and_secrets_are_masked(spans: RecordedSpans) -> None:
    async def login(user: str, password: str) -> str:
        """Logs in."""
        return f"{user} is in with Bearer abcdefghijkl"

    async with Toolspace(tools=[login, broken]) as ts:
        arguments = {"user": "ada", "password": "hunter2hunter2"}
        stop = instrument(ts, spans.provider)
        await ts.call("login", arguments)
        await ts.call("broken")
        stop()
        instrument(ts, spans.provider, capture_content=True)
        await ts.call("login", arguments)

    first, second = spans.list_named("execute_tool login")
    assert "gen_ai.tool.call.arguments" not in (first.attributes or {})
    assert "gen_ai.tool.call.result" not in (first.attributes or {})
    assert second.attributes["gen_ai.tool.call.arguments"] == '{"user":"ada","password":"[hidden]"}'  # type: ignore[index]
    assert second.attributes["gen_ai.tool.call.result"] == "ada is in with Bearer [hidden]"  # type: ignore[index]
    assert spans.get("execute_tool broken").status.description == "the key is [hidden]"


@pytest.mark.spec("4.8")
async def test_calls_nest_under_their_call_their_turn_and_their_run(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add, twice]) as ts:
        instrument(ts, spans.provider)
        with spans.tracer.start_as_current_span("request"):
            async with ts.run(id="run_1") as run:
                await run.call("twice")
                run.next_turn()
                await asyncio.gather(*(run.call("add", {"a": n, "b": n}) for n in (1, 2)))

    add_span = ["execute_tool add"]
    assert spans.tree() == [
        [
            "request",
            [
                "toolspace.run",
                ["toolspace.turn", ["execute_tool twice", add_span, add_span]],
                ["toolspace.turn", add_span, add_span],
            ],
        ]
    ]
    assert dict(spans.get("toolspace.run").attributes or {}) == {"toolspace.run.id": "run_1"}
    assert [span.attributes["toolspace.turn"] for span in spans.list_named("toolspace.turn")] == [1, 2]  # type: ignore[index]
    run_span, last_call = spans.get("toolspace.run"), spans.all[-1]
    assert run_span.start_time == pytest.approx(run.trace.started_at * 1e6)
    assert run_span.end_time >= last_call.end_time  # type: ignore[operator]
    assert all(not span.links for span in spans.all)


@pytest.mark.spec("4.8")
async def test_a_run_inside_a_call_nests_under_that_call(spans: RecordedSpans) -> None:
    async def delegate() -> Any:
        """Lets a child do it."""
        async with ts.run() as child:
            return (await child.call("add", {"a": 1, "b": 2})).result

    async with Toolspace(tools=[add, delegate]) as ts:
        instrument(ts, spans.provider)
        async with ts.run() as run:
            await run.call("delegate")

    inner = ["toolspace.run", ["toolspace.turn", ["execute_tool add"]]]
    assert spans.tree() == [["toolspace.run", ["toolspace.turn", ["execute_tool delegate", inner]]]]
    assert all(not span.links for span in spans.all)


@pytest.mark.spec("4.8")
async def test_the_span_is_current_while_the_tool_runs_on_the_loop_and_in_a_thread(spans: RecordedSpans) -> None:
    def work(name: str) -> None:
        with spans.tracer.start_as_current_span(name):
            pass

    async def coroutine() -> None:
        """Works on the loop."""
        work("inside coroutine")

    def function() -> None:
        """Works in a thread."""
        work("inside function")

    async def stream() -> Any:
        """Works piece by piece."""
        work("inside stream")
        yield "piece"

    async with Toolspace(tools=[coroutine, function, stream]) as ts:
        instrument(ts, spans.provider)
        for name in ("coroutine", "function", "stream"):
            await ts.call(name)
        assert not trace.get_current_span().get_span_context().is_valid

    assert spans.tree() == [
        [f"execute_tool {name}", [f"inside {name}"]] for name in ("coroutine", "function", "stream")
    ]


@pytest.mark.spec("4.8")
async def test_a_call_below_a_span_that_its_tool_opened_nests_there(spans: RecordedSpans) -> None:
    async def outer(context: ToolContext) -> None:
        """Opens a span of its own."""
        with spans.tracer.start_as_current_span("step"):
            await context.call("add", {"a": 1, "b": 2})

    async with Toolspace(tools=[add, outer]) as ts:
        instrument(ts, spans.provider)
        await ts.call("outer")

    assert spans.tree() == [["execute_tool outer", ["step", ["execute_tool add"]]]]


@pytest.mark.spec("4.8")
async def test_a_call_from_a_thread_that_lost_its_context_still_nests_under_its_call(spans: RecordedSpans) -> None:
    async def outer(context: ToolContext) -> None:
        """Calls from a bare thread."""
        loop, has_ended = asyncio.get_running_loop(), asyncio.Event()

        def work() -> None:
            asyncio.run_coroutine_threadsafe(context.call("add", {"a": 1, "b": 2}), loop).result()
            loop.call_soon_threadsafe(has_ended.set)

        threading.Thread(target=work).start()
        await has_ended.wait()

    async with Toolspace(tools=[add, outer]) as ts:
        instrument(ts, spans.provider)
        await ts.call("outer")

    assert spans.tree() == [["execute_tool outer", ["execute_tool add"]]]


@pytest.mark.spec("4.8")
async def test_a_call_of_a_run_links_to_the_current_span_outside_the_run(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts:
        instrument(ts, spans.provider)
        async with ts.run() as run:
            with spans.tracer.start_as_current_span("step of my own loop"):
                await run.call("add", {"a": 1, "b": 2})

    call, step = spans.get("execute_tool add"), spans.get("step of my own loop")
    assert call.parent is not None
    assert call.parent.span_id == spans.get("toolspace.turn").context.span_id
    assert [link.context.span_id for link in call.links] == [step.context.span_id]


@pytest.mark.spec("4.8")
async def test_queue_wait_cache_hit_and_namespace_are_attributes(spans: RecordedSpans) -> None:
    class Weather(ToolProvider):
        namespace = "weather"

        def list_tools(self) -> list[Tool]:
            return [Tool("now", "The weather.", cache=60)]

        async def execute(self, name: str, parameters: dict[str, Any], context: ToolContext) -> ToolResult:
            return ToolResult(ok=True, result="fine")

    is_running, free = asyncio.Event(), asyncio.Event()

    @tool(queue="one")
    async def slow() -> None:
        """Holds the only slot."""
        is_running.set()
        await free.wait()

    settings = Settings(queues={"one": QueueSpec(concurrent=1)})
    async with Toolspace(tools=[slow], providers=[Weather()], settings=settings) as ts:
        instrument(ts, spans.provider)
        await ts.call("weather__now")
        await ts.call("now")
        calls = [asyncio.create_task(ts.call("slow")) for _ in range(2)]
        await is_running.wait()
        free.set()
        await asyncio.gather(*calls)

    hits = [span.attributes or {} for span in spans.list_named("execute_tool weather__now")]
    assert [attributes["toolspace.cache_hit"] for attributes in hits] == [False, True]
    assert [attributes["toolspace.requested"] for attributes in hits] == ["weather__now", "now"]
    assert {attributes["toolspace.namespace"] for attributes in hits} == {"weather"}
    waits = sorted((span.attributes or {})["toolspace.queue_wait_ms"] for span in spans.list_named("execute_tool slow"))  # type: ignore[type-var]
    assert waits[0] < waits[1]  # type: ignore[operator]


@pytest.mark.spec("4.8")
async def test_an_unknown_tool_name_does_not_become_the_name_of_a_span(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts:
        instrument(ts, spans.provider)
        await ts.call("x" * 10_000)

    span = spans.get("execute_tool")
    assert span.attributes["error.type"] == "unknown_tool"  # type: ignore[index]
    assert all(len(str(value)) <= 200 for value in (span.attributes or {}).values())


@pytest.mark.spec("4.5")
async def test_a_cancelled_call_ends_its_span_and_those_of_its_run(spans: RecordedSpans) -> None:
    started = asyncio.Event()

    async def endless() -> None:
        """Never returns."""
        started.set()
        await asyncio.Event().wait()

    async with Toolspace(tools=[endless]) as ts:
        instrument(ts, spans.provider)
        async with ts.run() as run:
            call_task = asyncio.create_task(run.call("endless"))
            await started.wait()
            run.cancel()
            await call_task
        started.clear()
        caller = asyncio.create_task(ts.call("endless"))
        await started.wait()
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)

    calls = spans.list_named("execute_tool endless")
    assert [(span.attributes or {})["error.type"] for span in calls] == ["canceled", "canceled"]
    assert [span.status.description for span in spans.all[:2]] == ["canceled", "canceled"]
    assert len(spans.all) == 4


@pytest.mark.spec("4.8")
async def test_a_run_that_is_never_closed_still_has_a_span(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts:
        instrument(ts, spans.provider)
        await ts.run().call("add", {"a": 1, "b": 2})
        gc.collect()

    assert spans.tree() == [["toolspace.run", ["toolspace.turn", ["execute_tool add"]]]]


@pytest.mark.spec("4.8")
async def test_instrumenting_includes_open_runs_and_can_be_ended(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts:
        run = ts.run()
        await run.call("add", {"a": 1, "b": 1})
        stop = instrument(ts, spans.provider)
        await run.call("add", {"a": 1, "b": 2})
        stop()
        await run.call("add", {"a": 1, "b": 3})
        await ts.run().call("add", {"a": 1, "b": 4})
        run.close()

    assert spans.tree() == [["toolspace.run", ["toolspace.turn", ["execute_tool add"]]]]


@pytest.mark.spec("4.8")
async def test_two_providers_each_get_their_spans(spans: RecordedSpans) -> None:
    other_spans = RecordedSpans()
    async with Toolspace(tools=[add]) as ts:
        instrument(ts, spans.provider)
        instrument(ts, other_spans.provider)
        async with ts.run() as run:
            await run.call("add", {"a": 1, "b": 2})

    assert [span.name for span in spans.all] == [span.name for span in other_spans.all]
    assert {span.name for span in other_spans.all} == {"toolspace.run", "toolspace.turn", "execute_tool add"}


@pytest.mark.spec("4.8")
async def test_an_orchestrator_can_be_instrumented(spans: RecordedSpans) -> None:
    orchestrator = ToolOrchestrator()
    orchestrator.register(ToolRegistry([add]))
    instrument(orchestrator, spans.provider)
    await orchestrator.execute("add", {"a": 1, "b": 2})

    assert spans.tree() == [["execute_tool add"]]


class FailingProcessor(SpanProcessor):
    """A processor of someone else's that fails."""

    def __init__(self, failing_step: str) -> None:
        self._failing_step = failing_step

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        if self._failing_step == "start":
            raise RuntimeError("cannot start")

    def on_end(self, span: ReadableSpan) -> None:
        if self._failing_step == "end":
            raise RuntimeError("cannot end")


@pytest.mark.spec("1.6")
@pytest.mark.parametrize("failing_step", ["start", "end"])
async def test_telemetry_that_fails_never_fails_a_call(failing_step: str, caplog: pytest.LogCaptureFixture) -> None:
    provider = TracerProvider()
    provider.add_span_processor(FailingProcessor(failing_step))
    async with Toolspace(tools=[add, twice]) as ts:
        instrument(ts, provider)
        async with ts.run() as run:
            assert (await run.call("twice")).result == [2, 4]
        assert (await ts.call("add", {"a": 1, "b": 2})).result == 3

    assert f"cannot {failing_step}" in caplog.text


@pytest.mark.spec("4.8")
async def test_spans_that_are_not_sampled_cost_nothing_but_their_context() -> None:
    contexts: list[trace.SpanContext] = []

    async def look() -> None:
        """Looks at the current span."""
        contexts.append(trace.get_current_span().get_span_context())

    async with Toolspace(tools=[look]) as ts:
        instrument(ts, TracerProvider(sampler=ALWAYS_OFF), capture_content=True)
        assert (await ts.call("look")).ok

    assert contexts[0].is_valid
    assert not contexts[0].trace_flags.sampled


@pytest.mark.spec("4.8")
async def test_a_finished_run_is_exported_with_its_original_times(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add, twice, broken]) as ts, ts.run() as run:
        await run.call("twice")
        run.next_turn()
        await run.call("broken")
    trace_json = json.loads(json.dumps(run.trace.to_dict()))
    exported_spans = RecordedSpans()

    export_run(run.trace, spans.tracer)
    export_run(trace_json, exported_spans.tracer)

    add_span = ["execute_tool add"]
    assert (
        spans.tree()
        == exported_spans.tree()
        == [
            [
                "toolspace.run",
                ["toolspace.turn", ["execute_tool twice", add_span, add_span]],
                ["toolspace.turn", ["execute_tool broken"]],
            ]
        ]
    )
    top = spans.get("toolspace.run")
    assert top.start_time == trace_json["startedAt"] * 1_000_000
    assert top.end_time == trace_json["endedAt"] * 1_000_000
    failed = spans.get("execute_tool broken")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes["error.type"] == "execution_error"  # type: ignore[index]
    assert failed.attributes["toolspace.tokens_out"] > 0  # type: ignore[index,operator]
    assert failed.attributes["gen_ai.tool.call.id"] == trace_json["children"][1]["children"][0]["id"]  # type: ignore[index]


@pytest.mark.spec("4.8")
async def test_an_open_run_is_exported_as_far_as_it_is(spans: RecordedSpans) -> None:
    async with Toolspace(tools=[add]) as ts, ts.run() as run:
        await run.call("add", {"a": 1, "b": 2})
        export_run(run.trace, spans.tracer)

    assert spans.tree() == [["toolspace.run", ["toolspace.turn", ["execute_tool add"]]]]
    assert {span.status.status_code for span in spans.all} == {StatusCode.UNSET}


@pytest.mark.spec("4.8")
def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "telemetry.py"), run_name="__main__")

    assert capsys.readouterr().out.splitlines() == [
        "toolspace.run UNSET",
        "  toolspace.turn UNSET",
        "    execute_tool quadruple UNSET",
        "      execute_tool double UNSET",
        "      execute_tool double UNSET",
        "  toolspace.turn UNSET",
        "    execute_tool double ERROR",
    ]


@pytest.mark.spec("25.5")
async def test_call_of_a_run_has_a_link_to_the_span_of_its_caller(spans: RecordedSpans) -> None:
    caller_trace = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")

    @tool
    async def ping() -> str:
        return "pong"

    async with Toolspace(tools=[ping]) as ts:
        instrument(ts, spans.provider)
        async with ts.run() as run:
            await ts.orchestrator.execute("ping", {}, context=ToolContext(trace=caller_trace), run=run)
    call = spans.get("execute_tool ping")
    assert [f"{link.context.trace_id:032x}" for link in call.links] == ["0af7651916cd43dd8448eb211c80319c"]
