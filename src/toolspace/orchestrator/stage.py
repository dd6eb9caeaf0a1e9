"""What a stage is: a function that wraps the way of a call, or leaves it as it is."""

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

# MERGED from services: What the stages work with: one of each, owned by the orchestrator.


class CallServices(msgspec.Struct, kw_only=True, eq=False):
    """What a toolspace has one of."""

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
    """Ends of calls that their callers announce themselves, once they have updated their own state."""
    killed_count: int = 0
    """Coroutines that ignored cancellation and were closed."""


CallHandler = Callable[[Call], Coroutine[Any, Any, ToolResult]]


InstantHandler = Callable[[Call], ToolResult | None]


class StageContext(NamedTuple):
    """What a stage is compiled from: one tool, what holds for it, and whether its calls belong to runs."""

    entry: CatalogEntry
    settings: EffectiveSettings
    services: CallServices
    in_run: bool


async def return_result(result: ToolResult) -> ToolResult:
    """The way of a call that a stage ended before it went further."""
    return result


class Stage(Protocol):
    """Returns a handler around `next`, or `next` itself where this tool does not need the stage.

    One that only looks before the call goes on is a plain function that returns `next(call)`: a call that waits does
    not keep its frame.
    """

    def __call__(self, plan: StageContext, next: CallHandler, /) -> CallHandler: ...
