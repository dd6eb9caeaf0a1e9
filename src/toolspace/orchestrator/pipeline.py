"""The pipeline of a tool's calls: what a stage is, the order of the stages, and how a handler is compiled from them.

The orchestrator compiles the handler when a tool is called for the first time, from just the stages that the tool
needs. Extensions write stages against `Stage`. Runs no call.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from toolspace.core.events import CallCompleted, CallEvent, CallRequested, EventType
from toolspace.core.extension_points import OutputStore, Policy, ResultCache, TokenCounter
from toolspace.core.quotas import MemoryQuotas, Quota, QuotaStore
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.catalog import CatalogEntry, Failure
from toolspace.orchestrator.effective_settings import CallDefaults, EffectiveSettings, resolve_settings
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.policy_rules import PolicyRule
from toolspace.orchestrator.stages.cache import cache, cached_lookup
from toolspace.orchestrator.stages.call_events import VERBOSE, announce, calls_log
from toolspace.orchestrator.stages.call_log import CallLog, record
from toolspace.orchestrator.stages.circuit_breaker import CircuitRegistry, circuit_breaker
from toolspace.orchestrator.stages.hooks import HookRegistry, after_hooks, before_hooks, error_hooks
from toolspace.orchestrator.stages.invoke import WorkerThreads, invoke
from toolspace.orchestrator.stages.large_results import budget, cap
from toolspace.orchestrator.stages.permission_and_validation import (
    limits,
    permission,
    restore_names,
    validate,
)
from toolspace.orchestrator.stages.policy import ProgramApprovals, find_policy, policy
from toolspace.orchestrator.stages.queue import QueueRegistry, queue
from toolspace.orchestrator.stages.quota import find_quotas, quota
from toolspace.orchestrator.stages.secrets import mask_secrets
from toolspace.orchestrator.stages.timeout import timeout

CallHandler = Callable[[Call], Coroutine[Any, Any, ToolResult]]
InstantHandler = Callable[[Call], ToolResult | None]
"""Returns the result of a call that needs no waiting; None if the call has to take the `CallHandler`."""


class CallServices(msgspec.Struct, kw_only=True, eq=False):
    """The parts of an orchestrator that its stages share."""

    bus: EventBus
    call_log: CallLog
    queues: QueueRegistry
    circuits: CircuitRegistry
    threads: WorkerThreads
    hooks: HookRegistry
    count_tokens: TokenCounter
    cache: ResultCache | None = None
    outputs: OutputStore | None = None
    permissions: Sequence[Policy] = ()
    """Decide on every call before its arguments are read: what a key may use."""
    policies: Sequence[Policy] = ()
    """Those of the program, which decide after validation."""
    policy_rules: Sequence[PolicyRule] = ()
    """Those of the configuration, which decide after the program's policies."""
    approvals: ProgramApprovals | None = None
    """Asks whoever a program names; None: calls that need approval fail, unless a gateway or a client is asked."""
    quotas: Sequence[Quota] = ()
    quota_store: QuotaStore = msgspec.field(default_factory=MemoryQuotas)
    """Counts what the quotas limit."""
    defaults: CallDefaults = CallDefaults()
    masks_secrets: bool = False
    """Whether the configuration has references to secrets, whose values no result may contain."""
    deferred_completions: dict[str, CallEvent] = {}
    """By call id: completion events that the callers emit themselves, after they have updated their own state."""
    killed_count: int = 0
    """How many coroutines ignored their cancellation and were closed."""

    def list_policies(self) -> Sequence[Policy]:
        """The permissions, then the policies of the program."""
        return (*self.permissions, *self.policies)


class StageContext(NamedTuple):
    """What a stage is compiled for: one tool, its settings, and whether its calls belong to runs."""

    entry: CatalogEntry
    settings: EffectiveSettings
    services: CallServices
    in_run: bool


class Stage(Protocol):
    """Returns a handler around `next`, or `next` itself if this tool does not need the stage.

    A stage that only acts before the call goes on is a plain function that returns `next(call)`, so that a waiting call
    does not hold its frame.
    """

    def __call__(self, stage: StageContext, next: CallHandler, /) -> CallHandler: ...


STAGES: tuple[Stage, ...] = (
    # From the outermost to the innermost. These act after the provider has returned, the last one first:
    announce,
    record,
    budget,
    cap,
    error_hooks,
    # These act before the provider is called, in this order:
    permission,
    validate,
    before_hooks,
    policy,
    limits,
    quota,
    cache,
    after_hooks,  # Acts after the provider has returned. Inside the cache, outside the queue and the timeout.
    circuit_breaker,
    queue,
    timeout,
    mask_secrets,  # Acts after the provider has returned.
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
    # Outside of all stages: events, records and policies see the tool's own names, too.
    return restore_names(context, handler)


def compile_failure(
    entry: CatalogEntry, services: CallServices, failure: Failure, outer_stages: Sequence[Stage]
) -> CallHandler:
    """Returns a handler that fails every call, but records and announces it."""

    async def run(call: Call) -> ToolResult:
        message = failure.message
        return call.fail(failure.kind, message if isinstance(message, str) else message(call), executed=False)

    def fail(stage: StageContext, next: CallHandler, /) -> CallHandler:
        return run

    return compile_handler(entry, services, in_run=True, stages=(announce, *outer_stages, record, fail))


def compile_instant(entry: CatalogEntry, services: CallServices) -> InstantHandler | None:
    """Returns a second path for calls that the cache answers at once; None if this tool cannot have one.

    It stays because the benchmark `cache` has a must (a hit costs at most 0.6 of a call) that fails without it. It is
    only for the stages of `STAGES`: a stage that was added or replaced has to see every call.
    """
    context = _stage_context(entry, services, in_run=False)
    find_cached = cached_lookup(context)
    if find_cached is None or entry.denial_reason is not None or services.permissions or services.policies:
        return None
    if services.hooks.select(entry.spellings).before or find_quotas(services, entry):
        return None
    if entry.tool.argument_names is not None:
        return None
    if not find_policy(context).always_allows:
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
    settings = resolve_settings(entry.tool, entry.spellings.names, entry.rules, services.defaults)
    return StageContext(entry, settings, services, in_run)


async def _no_invoke_stage(call: Call) -> ToolResult:
    return call.fail("internal_error", f'no stage runs tool "{call.entry.tool.name}"')
