"""Compiles the way of one tool's calls from just the stages that it needs. The order of the stages is here."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.core.events import CallCompleted, CallRequested, EventType
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import Entry
from toolspace.orchestrator.services import Services
from toolspace.orchestrator.settings import effective
from toolspace.orchestrator.stage import Handler, Instant, Plan, Stage
from toolspace.orchestrator.stages.announce import VERBOSE, announce, calls_log
from toolspace.orchestrator.stages.budget import budget
from toolspace.orchestrator.stages.cache import cache, recollection
from toolspace.orchestrator.stages.cap import cap
from toolspace.orchestrator.stages.invoke import invoke
from toolspace.orchestrator.stages.limits import limits
from toolspace.orchestrator.stages.permission import permission
from toolspace.orchestrator.stages.queue import queue
from toolspace.orchestrator.stages.record import record
from toolspace.orchestrator.stages.timeout import timeout
from toolspace.orchestrator.stages.validate import validate

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


def compile_handler(entry: Entry, services: Services, *, in_run: bool, stages: Sequence[Stage] = STAGES) -> Handler:
    """The handler of a tool's calls, built once."""
    settings = effective(entry.tool, entry.own_name, entry.rules, services.defaults)
    plan = Plan(entry, settings, services, in_run)
    handler: Handler = _nobody
    for stage in reversed(stages):
        handler = stage(plan, handler)
    return handler


def compile_instant(entry: Entry, services: Services) -> Instant | None:
    """What the stages come to for a call that the cache answers at once, without the coroutines in between.

    Only for the stages as they are above: one that was added or replaced has to see every call.
    """
    settings = effective(entry.tool, entry.own_name, entry.rules, services.defaults)
    plan = Plan(entry, settings, services, in_run=False)
    recall = recollection(plan)
    if recall is None or services.policies or entry.refusal is not None:
        return None
    verbose, name = calls_log.isEnabledFor, entry.tool.name
    subscribers, deliver = services.bus.subscribers, services.bus.deliver
    add, stats = services.accounting.add, services.accounting.stats.book(name)

    def answer(call: Call) -> ToolResult | None:
        # Logged, or told by whoever called, on the long way.
        if call.deferred or verbose(VERBOSE) or (result := recall(call)) is None:
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
