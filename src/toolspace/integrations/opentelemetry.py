"""OpenTelemetry spans: of every call while it runs, and of a finished run from its trace. Sends nothing by itself."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode, Tracer, TracerProvider

from toolspace.core import json_text
from toolspace.core.result import ToolResult
from toolspace.core.secret_masking import mask_secrets
from toolspace.integrations.protocols import (
    Instrumentable,
    InstrumentableToolspace,
    NextStage,
    OperationNode,
    TracedCall,
    TracedPipeline,
    TracedRun,
)

_log = logging.getLogger("toolspace.telemetry")
_NAMES = {
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
"""The facts of a call, as the books and the trace name them, and the attributes that carry them."""
_LONGEST_NAME = 200
"""Of a name that a model made up, as an attribute."""


def instrument(
    toolspace: InstrumentableToolspace | Instrumentable,
    tracer_provider: TracerProvider | None = None,
    *,
    capture_content: bool = False,
) -> Callable[[], None]:
    """Makes a span of every call, turn and run from now on. The answer ends that.

    Without a provider it is the global one. `capture_content` adds arguments and results, with secrets hidden.
    """
    owner = cast("Any", toolspace)
    orchestrator: Instrumentable = getattr(owner, "orchestrator", owner)
    runs = _Runs(_tracer(tracer_provider))
    remove = orchestrator.use(_CallSpans(runs, capture_content=capture_content))
    forget = orchestrator.on_run(runs.began)

    def uninstrument() -> None:
        remove()
        forget()

    return uninstrument


def export_run(operation: OperationNode | Mapping[str, Any], tracer: Tracer | None = None) -> None:
    """Makes spans of a run's trace, or of the JSON that it was exported as, with the times of then."""
    node = operation if isinstance(operation, Mapping) else operation.to_dict()
    _export(node, tracer or _tracer(None), None)


def _tracer(provider: TracerProvider | None) -> Tracer:
    return trace.get_tracer("toolspace", version("toolspace"), provider)


# Live spans


class _CallSpans:
    """The stage that keeps a span around every call: current while the tool runs, so that what it does nests."""

    def __init__(self, runs: _Runs, *, capture_content: bool) -> None:
        self._runs = runs
        self._capture_content = capture_content
        self._running: dict[TracedCall, Span] = {}

    def __call__(self, plan: TracedPipeline, next: NextStage, /) -> NextStage:
        entry = plan.entry
        name = _span_name(entry.tool.name, known=entry.known)
        fixed = _tool_attributes(entry.tool.name, entry.tool.description)

        async def run(call: TracedCall) -> ToolResult:
            span = self._begin(call, name, fixed)
            self._running[call] = span
            result = None
            try:
                with trace.use_span(span, record_exception=False, set_status_on_exception=False):
                    result = await next(call)
                    return result
            finally:
                del self._running[call]
                self._end(span, call, result or call.outcome)

        return run

    def _parent(self, call: TracedCall) -> tuple[Context | None, list[Link]]:
        """Where the span goes: below the call that made this one, else below its run's turn."""
        above = call.parent
        if call.run is not None and (above is None or above.run is not call.run):
            return self._runs.of(call.run).turn()
        span = self._running.get(above) if above is not None else None
        current = trace.get_current_span().get_span_context()
        if span is None or current.trace_id == span.get_span_context().trace_id:
            return None, []  # The current span is the call above, or one that its tool opened.
        return trace.set_span_in_context(span), []  # The tool called from a thread that knows nothing of it.

    def _begin(self, call: TracedCall, name: str, fixed: Mapping[str, Any]) -> Span:
        parent, links = self._parent(call)
        span = _start(self._runs.tracer, name, parent, fixed, call.started_at, links)
        if span.is_recording():
            span.set_attribute("gen_ai.tool.call.id", call.id)
            if call.run is not None:
                span.set_attribute("toolspace.run.id", call.run.id)
            if self._capture_content:
                span.set_attribute("gen_ai.tool.call.arguments", _arguments_text(call))
            span.add_event("tool_started", timestamp=_nanoseconds(call.started_at))
        return span

    def _end(self, span: Span, call: TracedCall, result: ToolResult | None) -> None:
        if span.is_recording() and result is not None:
            span.set_attributes(_call_attributes(_facts(call, result)))
            if self._capture_content and result.ok:
                span.set_attribute("gen_ai.tool.call.result", mask_secrets(result.text))
            _set_status(span, result.ok, mask_secrets(result.error or ""))
            span.add_event("tool_finished", {"status": "ok" if result.ok else "failed"})
        _finish(span)


class _Runs:
    """The spans of the runs that are going on."""

    def __init__(self, tracer: Tracer) -> None:
        self.tracer = tracer
        self._spans: weakref.WeakKeyDictionary[TracedRun, _RunSpans] = weakref.WeakKeyDictionary()

    def began(self, run: TracedRun) -> None:
        spans = self._spans[run] = _RunSpans(self.tracer, run.trace, run.id)
        # A run that nobody closes still shows, from when nobody holds it any more.
        weakref.finalize(run, spans.end).atexit = False

    def of(self, run: TracedRun) -> _RunSpans:
        if run not in self._spans:
            self.began(run)  # It is older than the instrumentation.
        return self._spans[run]


class _RunSpans:
    """The span of one run, and of the turn that it is in."""

    def __init__(self, tracer: Tracer, operation: OperationNode, run_id: str) -> None:
        self._tracer = tracer
        self._operation = operation
        self._made_in: SpanContext = trace.get_current_span().get_span_context()
        attributes = {"toolspace.run.id": run_id}
        self._span = _start(tracer, "toolspace.run", None, attributes, operation.started_at)
        _when_ended(operation, self._span)
        self._turn: tuple[OperationNode, Span] | None = None

    def turn(self) -> tuple[Context, list[Link]]:
        """The context of the open turn; and a link to the span that is current, where the run does not know it."""
        current = trace.get_current_span().get_span_context()
        known = not current.is_valid or current.span_id == self._made_in.span_id
        return trace.set_span_in_context(self._open_turn()), [] if known else [Link(current)]

    def end(self) -> None:
        if self._turn is not None:
            _finish(self._turn[1])
        _finish(self._span)

    def _open_turn(self) -> Span:
        operation = self._operation.last("turn")
        if operation is None:
            return self._span
        if self._turn is None or self._turn[0] is not operation:
            above = trace.set_span_in_context(self._span)
            attributes = {"toolspace.turn": int(operation.name)}
            span = _start(self._tracer, "toolspace.turn", above, attributes, operation.started_at)
            _when_ended(operation, span)
            self._turn = (operation, span)
        return self._turn[1]


def _when_ended(operation: OperationNode, span: Span) -> None:
    """Ends the span with the operation."""
    before = operation.on_end

    def end(ended: OperationNode) -> None:
        if before is not None:
            before(ended)
        _set_status(span, ended.status == "ok", ended.status)
        _finish(span, ended.ended_at)

    operation.on_end = end
    if operation.ended_at is not None:
        end(operation)


def _start(
    tracer: Tracer,
    name: str,
    parent: Context | None,
    attributes: Mapping[str, Any],
    at: float,
    links: list[Link] | None = None,
) -> Span:
    """A span, or one that records nothing: exporters are other people's code, and must not fail a call."""
    try:
        return tracer.start_span(name, parent, attributes=attributes, links=links, start_time=_nanoseconds(at))
    except Exception:
        _log.exception("the span %s could not be started", name)
        return trace.INVALID_SPAN


def _finish(span: Span, at: float | None = None) -> None:
    try:
        if span.is_recording():  # A run's span may end in more than one way, but only once.
            span.end(None if at is None else _nanoseconds(at))
    except Exception:
        _log.exception("a span could not be ended")


# Finished runs


def _export(node: Mapping[str, Any], tracer: Tracer, parent: Context | None) -> None:
    kind, status = node["kind"], node["status"]
    if kind == "call":
        name = _span_name(node["name"], known=node.get("errorKind") != "unknown_tool")
        attributes = _tool_attributes(node["name"]) | _call_attributes(node)
        attributes["gen_ai.tool.call.id"] = node["id"]
    else:
        name = f"toolspace.{kind}"
        attributes = {"toolspace.run.id": node["id"]} if kind == "run" else {"toolspace.turn": int(node["name"])}
    span = _start(tracer, name, parent, attributes, node["startedAt"])
    _set_status(span, status in ("ok", "running"), node.get("errorKind") or status)
    below = trace.set_span_in_context(span)
    for child in node["children"]:
        _export(child, tracer, below)
    _finish(span, node["endedAt"])


# Attributes


def _span_name(tool: str, *, known: bool) -> str:
    # A name that no tool has stays out: span names are what backends group by, and a model may send anything.
    return f"execute_tool {tool}" if known else "execute_tool"


def _tool_attributes(name: str, description: str = "") -> dict[str, Any]:
    attributes = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name[:_LONGEST_NAME],
        "gen_ai.tool.type": "function",
    }
    if description:
        attributes["gen_ai.tool.description"] = description
    return attributes


def _call_attributes(facts: Mapping[str, Any]) -> dict[str, Any]:
    attributes = {name: facts[fact] for fact, name in _NAMES.items() if facts.get(fact) not in (None, "")}
    if error := facts.get("errorKind"):
        attributes["error.type"] = error
    return attributes


def _facts(call: TracedCall, result: ToolResult) -> dict[str, Any]:
    arguments = call.arguments
    return {
        "requested": call.requested[:_LONGEST_NAME],
        "namespace": result.namespace,
        "errorKind": result.error_kind,
        "executed": result.executed,
        "cacheHit": call.cache_hit,
        "latencyMs": result.duration_ms,
        "queueWaitMs": call.queue_wait * 1000,
        "charactersIn": len(arguments) if isinstance(arguments, str | bytes) else len(_json(arguments)),
        "charactersOut": len(result.text),
        "parentId": call.parent.id if call.parent is not None else None,
        "agentId": call.base.agent_id,
        "userId": call.base.user_id,
    }


def _json(arguments: Mapping[str, Any] | None) -> str:
    return json_text.encode(arguments) if arguments else ""


def _arguments_text(call: TracedCall) -> str:
    try:
        return json_text.encode(mask_secrets(json_text.parse_arguments(call.arguments)))
    except ValueError:
        return "(not a JSON object)"


def _set_status(span: Span, ok: bool, reason: str) -> None:
    if not ok:  # By convention success is left unset.
        span.set_status(Status(StatusCode.ERROR, reason))


def _nanoseconds(milliseconds: float) -> int:
    return round(milliseconds * 1_000_000)
