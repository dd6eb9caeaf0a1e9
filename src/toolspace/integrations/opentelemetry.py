"""OpenTelemetry spans of runs, turns and calls.

`instrument` creates them while the calls run; `export_run` creates them from the trace of a finished run. Only uses the
OpenTelemetry API: the SDK and the exporter belong to the user's program. A failure of telemetry never fails a call.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, cast

from opentelemetry import trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from toolspace.core import json_text
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.core.tool_context import ToolContext
from toolspace.core.trace_context import TraceContext

if TYPE_CHECKING:
    from toolspace.orchestrator.call import Call
    from toolspace.orchestrator.orchestrator import ToolOrchestrator
    from toolspace.orchestrator.pipeline import CallHandler, StageContext
    from toolspace.orchestrator.run import Run
    from toolspace.orchestrator.run import Span as TraceSpan
    from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.telemetry")
_ATTRIBUTES = {
    "requested": "toolspace.requested",
    "namespace": "toolspace.namespace",
    "errorKind": "toolspace.error_kind",
    "executed": "toolspace.executed",
    "cacheHit": "toolspace.cache_hit",
    "latencyMs": "toolspace.latency_ms",
    "queueWaitMs": "toolspace.queue_wait_ms",
    "charactersIn": "toolspace.characters_in",
    "charactersOut": "toolspace.characters_out",
    "tokensOut": "toolspace.tokens_out",
    "parentId": "toolspace.parent_call.id",
    "agentId": "gen_ai.agent.id",
    "userId": "user.id",
}
"""The values of a call, by their name in the trace → the span attributes."""
_trace_propagator = TraceContextTextMapPropagator()
_baggage_propagator = W3CBaggagePropagator()
_MAX_NAME = 200
"""Characters of a tool name that a model invented, as an attribute."""


def instrument(
    toolspace: Toolspace | ToolOrchestrator,
    tracer_provider: TracerProvider | None = None,
    *,
    capture_content: bool = False,
) -> Callable[[], None]:
    """Creates spans for every run, turn and call from now on. Returns the function that ends this.

    The default provider is the global one. `capture_content` adds arguments and results, with secrets masked.
    """
    orchestrator = cast("ToolOrchestrator", getattr(toolspace, "orchestrator", toolspace))
    runs = _RunRegistry(_get_tracer(tracer_provider))
    remove_stage = orchestrator.add_stage(_CallSpans(runs, capture_content=capture_content))
    remove_listener = orchestrator.on_run(runs.add)

    def uninstrument() -> None:
        remove_stage()
        remove_listener()

    return uninstrument


def export_run(run_trace: TraceSpan | Mapping[str, Any], tracer: Tracer | None = None) -> None:
    """Creates the spans of a finished run from its trace, or from the JSON of the trace, with their original times."""
    node = run_trace if isinstance(run_trace, Mapping) else run_trace.to_dict()
    _export(node, tracer or _get_tracer(None), None)


def _get_tracer(provider: TracerProvider | None) -> Tracer:
    return trace.get_tracer("toolspace", version("toolspace"), provider)


# Spans of running calls


class _CallSpans:
    """The stage that wraps every call in a span. The span is current while the tool runs."""

    def __init__(self, runs: _RunRegistry, *, capture_content: bool) -> None:
        self._runs = runs
        self._capture_content = capture_content
        self._running_spans: dict[Call, Span] = {}

    def __call__(self, context: StageContext, next: CallHandler, /) -> CallHandler:
        entry = context.entry
        name = _span_name(entry.tool.name, is_registered=entry.is_registered)
        tool_attributes = _tool_attributes(entry.tool.name, entry.tool.description)

        async def run(call: Call) -> ToolResult:
            span = self._start_span(call, name, tool_attributes)
            self._running_spans[call] = span
            call.base_context = _with_own_trace(call.base_context, span)
            result = None
            try:
                with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    result = await next(call)
                    return result
            finally:
                del self._running_spans[call]
                self._end_span(span, call, result or call.outcome)

        return run

    def _parent(self, call: Call) -> tuple[Context | None, list[Link]]:
        """Returns the parent context and the links: the call that made this one, else the turn of its run."""
        parent = call.parent
        if call.run is not None and (parent is None or parent.run is not call.run):
            context, links = self._runs.get(call.run).turn_context()
            caller_context = _caller_context(call.base_context)
            if caller_context is not None and not links:
                caller_span = trace.get_current_span(caller_context).get_span_context()
                if caller_span.trace_id != trace.get_current_span(context).get_span_context().trace_id:
                    links = [Link(caller_span)]
            return context, links
        span = self._running_spans.get(parent) if parent is not None else None
        current = trace.get_current_span().get_span_context()
        if span is None and not current.is_valid:
            return _caller_context(call.base_context), []
        if span is None or current.trace_id == span.get_span_context().trace_id:
            return None, []  # The current span is the parent call, or a span that its tool opened.
        return trace.set_span_in_context(span), []  # The tool called from a thread without the context.

    def _start_span(self, call: Call, name: str, attributes: Mapping[str, Any]) -> Span:
        parent, links = self._parent(call)
        span = _start(self._runs.tracer, name, parent, attributes, call.started_at, links)
        if span.is_recording():
            span.set_attribute("gen_ai.tool.call.id", call.id)
            if call.run is not None:
                span.set_attribute("toolspace.run.id", call.run.id)
            if self._capture_content:
                span.set_attribute("gen_ai.tool.call.arguments", _arguments_text(call))
            span.add_event("tool_started", timestamp=_nanoseconds(call.started_at))
        return span

    def _end_span(self, span: Span, call: Call, result: ToolResult | None) -> None:
        if span.is_recording() and result is not None:
            span.set_attributes(_call_attributes(_call_values(call, result)))
            if self._capture_content and result.ok:
                span.set_attribute("gen_ai.tool.call.result", mask_secrets(result.text))
            _set_status(span, result.ok, mask_secrets(result.error or ""))
            span.add_event("tool_finished", {"status": "ok" if result.ok else "failed"})
        _finish(span)


def _caller_context(context: ToolContext) -> Context | None:
    """Returns the context of the caller's span, in another process; None if it named none."""
    if context.trace is None or context.trace.traceparent is None:
        return None
    return _trace_propagator.extract(context.trace.to_fields(), Context())


def _with_own_trace(context: ToolContext, span: Span) -> ToolContext:
    """Returns the context that providers pass on: with the span of the call, and the baggage of its caller."""
    if not span.get_span_context().is_valid:
        return context
    fields: dict[str, str] = {}
    _trace_propagator.inject(fields, trace.set_span_in_context(span))
    _baggage_propagator.inject(fields)
    baggage = fields.get("baggage") or (context.trace.baggage if context.trace is not None else None)
    own_trace = TraceContext(fields.get("traceparent"), fields.get("tracestate"), baggage)
    return ToolContext(trace=own_trace).with_defaults(context)


class _RunRegistry:
    """The spans of the runs that are not garbage collected yet."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._spans: weakref.WeakKeyDictionary[Run, _RunSpans] = weakref.WeakKeyDictionary()

    def add(self, run: Run) -> None:
        spans = self._spans[run] = _RunSpans(self.tracer, run.trace, run.id)
        # The span of a run that is never closed ends when the run is garbage collected.
        weakref.finalize(run, spans.end).atexit = False

    def get(self, run: Run) -> _RunSpans:
        if run not in self._spans:
            self.add(run)  # It was created before the instrumentation.
        return self._spans[run]


class _RunSpans:
    """The span of one run and of its current turn."""

    def __init__(self, tracer: Tracer, run_node: TraceSpan, run_id: str) -> None:
        self._tracer = tracer
        self._run_node = run_node
        self._outer_span: SpanContext = trace.get_current_span().get_span_context()
        attributes = {"toolspace.run.id": run_id}
        self._span = _start(tracer, "toolspace.run", None, attributes, run_node.started_at)
        _end_with(run_node, self._span)
        self._turn: tuple[TraceSpan, Span] | None = None

    def turn_context(self) -> tuple[Context, list[Link]]:
        """Returns the context of the current turn, and a link to the current span if the run was not created in it."""
        current = trace.get_current_span().get_span_context()
        is_outer_span = not current.is_valid or current.span_id == self._outer_span.span_id
        return trace.set_span_in_context(self._turn_span()), [] if is_outer_span else [Link(current)]

    def end(self) -> None:
        if self._turn is not None:
            _finish(self._turn[1])
        _finish(self._span)

    def _turn_span(self) -> Span:
        node = self._run_node.last_child("turn")
        if node is None:
            return self._span
        if self._turn is None or self._turn[0] is not node:
            parent = trace.set_span_in_context(self._span)
            attributes = {"toolspace.turn": int(node.name)}
            span = _start(self._tracer, "toolspace.turn", parent, attributes, node.started_at)
            _end_with(node, span)
            self._turn = (node, span)
        return self._turn[1]


def _end_with(node: TraceSpan, span: Span) -> None:
    """Ends the span when the node of the trace ends."""
    previous_listener = node.on_end

    def end(ended_node: TraceSpan) -> None:
        if previous_listener is not None:
            previous_listener(ended_node)
        _set_status(span, ended_node.status == "ok", ended_node.status)
        _finish(span, ended_node.ended_at)

    node.on_end = end
    if node.ended_at is not None:
        end(node)


def _start(
    tracer: Tracer,
    name: str,
    parent: Context | None,
    attributes: Mapping[str, Any],
    at: float,
    links: list[Link] | None = None,
) -> Span:
    """Starts a span. Returns one that records nothing if the SDK fails, because telemetry must not fail a call."""
    try:
        return tracer.start_span(name, parent, attributes=attributes, links=links, start_time=_nanoseconds(at))
    except Exception:
        _log.exception("span %s cannot be started", name)
        return trace.INVALID_SPAN


def _finish(span: Span, at: float | None = None) -> None:
    try:
        if span.is_recording():  # The span of a run may be ended twice: by its trace and by the garbage collector.
            span.end(None if at is None else _nanoseconds(at))
    except Exception:
        _log.exception("a span cannot be ended")


# Finished runs


def _export(node: Mapping[str, Any], tracer: Tracer, parent: Context | None) -> None:
    kind, status = node["kind"], node["status"]
    if kind == "call":
        name = _span_name(node["name"], is_registered=node.get("errorKind") != "unknown_tool")
        attributes = _tool_attributes(node["name"]) | _call_attributes(node)
        attributes["gen_ai.tool.call.id"] = node["id"]
    else:
        name = f"toolspace.{kind}"
        attributes = {"toolspace.run.id": node["id"]} if kind == "run" else {"toolspace.turn": int(node["name"])}
    span = _start(tracer, name, parent, attributes, node["startedAt"])
    _set_status(span, status in ("ok", "running"), node.get("errorKind") or status)
    context = trace.set_span_in_context(span)
    for child in node["children"]:
        _export(child, tracer, context)
    _finish(span, node["endedAt"])


# Attributes


def _span_name(tool: str, *, is_registered: bool) -> str:
    # Without the name of an unknown tool: backends group by span names, and a model may send any name.
    return f"execute_tool {tool}" if is_registered else "execute_tool"


def _tool_attributes(name: str, description: str = "") -> dict[str, Any]:
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name[:_MAX_NAME],
        "gen_ai.tool.type": "function",
    }
    if description:
        attributes["gen_ai.tool.description"] = description
    return attributes


def _call_attributes(values: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {name: values[key] for key, name in _ATTRIBUTES.items() if values.get(key) not in (None, "")}
    if error := values.get("errorKind"):
        attributes["error.type"] = error
    return attributes


def _call_values(call: Call, result: ToolResult) -> dict[str, Any]:
    arguments = call.arguments or ""
    text_or_bytes = arguments if isinstance(arguments, str | bytes) else json_text.encode(arguments)
    return {
        "requested": call.requested_name[:_MAX_NAME],
        "namespace": result.namespace,
        "errorKind": result.error_kind,
        "executed": result.executed,
        "cacheHit": call.cache_hit,
        "latencyMs": result.duration_ms,
        "queueWaitMs": call.queue_wait * 1000,
        "charactersIn": len(text_or_bytes),
        "charactersOut": len(result.text),
        "parentId": call.parent.id if call.parent is not None else None,
        "agentId": call.base_context.agent_id,
        "userId": call.base_context.user_id,
    }


def _arguments_text(call: Call) -> str:
    try:
        return json_text.encode(mask_secrets(json_text.parse_arguments(call.arguments)))
    except ValueError:
        return "(not a JSON object)"


def _set_status(span: Span, ok: bool, reason: str) -> None:
    if not ok:  # The conventions leave the status of a success unset.
        span.set_status(Status(StatusCode.ERROR, reason))


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1_000_000)
