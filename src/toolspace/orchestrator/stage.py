"""What a stage is, and the services that stages work with.

Every stage, the pipeline and the orchestrator use it; extensions write stages against it. It runs no call.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from toolspace.core.events import CallEvent
from toolspace.core.interfaces import OutputStore, Policy, ResultCache, TokenCounter
from toolspace.core.result import ToolResult
from toolspace.orchestrator.call import Call
from toolspace.orchestrator.call_log import CallLog
from toolspace.orchestrator.catalog import CatalogEntry
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.queues import QueueRegistry
from toolspace.orchestrator.settings import CallDefaults, EffectiveSettings
from toolspace.orchestrator.worker_threads import WorkerThreads

CallHandler = Callable[[Call], Coroutine[Any, Any, ToolResult]]
InstantHandler = Callable[[Call], ToolResult | None]
"""Returns the result of a call that needs no waiting; None if the call has to take the `CallHandler`."""


class CallServices(msgspec.Struct, kw_only=True, eq=False):
    """The parts of an orchestrator that its stages share."""

    bus: EventBus
    call_log: CallLog
    queues: QueueRegistry
    threads: WorkerThreads
    count_tokens: TokenCounter
    cache: ResultCache | None = None
    outputs: OutputStore | None = None
    policies: Sequence[Policy] = ()
    defaults: CallDefaults = CallDefaults()
    deferred_completions: dict[str, CallEvent] = {}
    """By call id: completion events that the callers emit themselves, after they have updated their own state."""
    killed_count: int = 0
    """How many coroutines ignored their cancellation and were closed."""


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


async def return_result(result: ToolResult) -> ToolResult:
    """Returns the result: the coroutine of a call that a stage ends early."""
    return result
