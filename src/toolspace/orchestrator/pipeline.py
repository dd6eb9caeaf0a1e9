"""Compiles the handler of one tool's calls from just the stages that it needs. Defines the order of the stages.

The orchestrator uses it when a tool is called for the first time.
"""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.events import CallCompleted, CallRequested, EventType
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.settings import resolve_settings
from toolspace.orchestrator.stage import CallHandler, CallServices, InstantHandler, Stage, StageContext
from toolspace.orchestrator.stages.admission import limits, permission, validate
from toolspace.orchestrator.stages.announce import VERBOSE, announce, calls_log
from toolspace.orchestrator.stages.cache import cache, cached_lookup
from toolspace.orchestrator.stages.invoke import invoke
from toolspace.orchestrator.stages.queue import queue
from toolspace.orchestrator.stages.record import record
from toolspace.orchestrator.stages.result_size import budget, cap
from toolspace.orchestrator.stages.timeout import timeout

STAGES: tuple[Stage, ...] = (
    # From the outermost to the innermost. These act after the provider has returned, the last one first:
    announce,
    record,
    budget,
    cap,
    # These act before the provider is called, in this order:
    permission,
    validate,
    limits,
    cache,
    queue,
    timeout,
    invoke,
)
_REQUESTED, _COMPLETED = EventType.TOOL_CALL_REQUESTED, EventType.TOOL_CALL_COMPLETED


def compile_handler(
    entry: CatalogEntry, services: CallServices, *, in_run: bool, stages: Sequence[Stage] = STAGES
) -> CallHandler:
    """Returns the handler of a tool's calls."""
    context = _stage_context(entry, services, in_run=in_run)
    handler: CallHandler = _no_invoke_stage
    for stage in reversed(stages):
        handler = stage(context, handler)
    return handler


def compile_instant(entry: CatalogEntry, services: CallServices) -> InstantHandler | None:
    """Returns a second path for calls that the cache answers at once; None if this tool cannot have one.

    It stays because the benchmark `cache` has a must (a hit costs at most 0.6 of a call) that fails without it. It is
    only for the stages of `STAGES`: a stage that was added or replaced has to see every call.
    """
    find_cached = cached_lookup(_stage_context(entry, services, in_run=False))
    if find_cached is None or services.policies or entry.denial_reason is not None:
        return None
    is_logged, name = calls_log.isEnabledFor, entry.tool.name
    subscribers, deliver = services.bus.subscribers, services.bus.deliver
    log_call, stats = services.call_log.add, services.call_log.stats.for_tool(name)

    def handle(call: Call) -> ToolResult | None:
        # A call that is logged, or whose completion is deferred, takes the stages.
        if call.defers_completion or is_logged(VERBOSE) or (result := find_cached(call)) is None:
            return None
        # The same as `announce` and `record` for a call that has no run and does not fail.
        id, parent_id = call.id, None if call.parent is None else call.parent.id
        if (listeners := subscribers.get(_REQUESTED)) is not None:
            deliver(CallRequested(call.started_at, id, name, None, parent_id, call.arguments), listeners)
        log_call(call, result, stats)
        if (listeners := subscribers.get(_COMPLETED)) is not None:
            deliver(CallCompleted(result.completed_at, id, name, None, parent_id, result), listeners)
        return result

    return handle


def _stage_context(entry: CatalogEntry, services: CallServices, *, in_run: bool) -> StageContext:
    settings = resolve_settings(entry.tool, entry.local_name, entry.rules, services.defaults)
    return StageContext(entry, settings, services, in_run)


async def _no_invoke_stage(call: Call) -> ToolResult:
    return call.fail("internal_error", f'no stage runs tool "{call.entry.tool.name}"')
