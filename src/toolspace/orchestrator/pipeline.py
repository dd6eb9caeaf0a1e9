"""Compiles the way of one tool's calls from just the stages that it needs. The order of the stages is here."""

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
    # Outside in. What has to happen after the provider answered, last first:
    announce,
    record,
    budget,
    cap,
    # What has to happen before it is asked, in order:
    permission,
    validate,
    limits,
    cache,
    queue,
    timeout,
    invoke,
)


def compile_handler(
    entry: CatalogEntry, services: CallServices, *, in_run: bool, stages: Sequence[Stage] = STAGES
) -> CallHandler:
    """The handler of a tool's calls, built once."""
    settings = resolve_settings(entry.tool, entry.local_name, entry.rules, services.defaults)
    plan = StageContext(entry, settings, services, in_run)
    handler: CallHandler = _nobody
    for stage in reversed(stages):
        handler = stage(plan, handler)
    return handler


def compile_instant(entry: CatalogEntry, services: CallServices) -> InstantHandler | None:
    """What the stages come to for a call that the cache answers at once, without the coroutines in between.

    Only for the stages as they are above: one that was added or replaced has to see every call.
    """
    settings = resolve_settings(entry.tool, entry.local_name, entry.rules, services.defaults)
    plan = StageContext(entry, settings, services, in_run=False)
    recall = cached_lookup(plan)
    if recall is None or services.policies or entry.denial_reason is not None:
        return None
    verbose, name = calls_log.isEnabledFor, entry.tool.name
    subscribers, deliver = services.bus.subscribers, services.bus.deliver
    add, stats = services.call_log.add, services.call_log.stats.for_tool(name)

    def answer(call: Call) -> ToolResult | None:
        # Logged, or told by whoever called, on the long way.
        if call.defers_completion or verbose(VERBOSE) or (result := recall(call)) is None:
            return None
        # As `announce` and `record` do it, without what cannot be here: a run, a failure.
        id, parent_id = call.id, None if call.parent is None else call.parent.id
        if (listeners := subscribers.get(_REQUESTED)) is not None:
            deliver(CallRequested(call.started_at, id, name, None, parent_id, call.arguments), listeners)
        add(call, result, stats)
        if (listeners := subscribers.get(_COMPLETED)) is not None:
            deliver(CallCompleted(result.completed_at, id, name, None, parent_id, result), listeners)
        return result

    return answer


_REQUESTED, _COMPLETED = EventType.TOOL_CALL_REQUESTED, EventType.TOOL_CALL_COMPLETED


async def _nobody(call: Call) -> ToolResult:
    return call.fail("internal_error", f'no stage runs tool "{call.entry.tool.name}"')
