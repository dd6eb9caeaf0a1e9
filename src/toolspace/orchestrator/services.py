"""What the stages work with: one of each, owned by the orchestrator."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from toolspace.core.events import CallEvent
from toolspace.core.interfaces import OutputStore, Policy, ResultCache, TokenCounter
from toolspace.orchestrator.event_bus import EventBus
from toolspace.orchestrator.queues import QueueBook
from toolspace.orchestrator.recording import Accounting
from toolspace.orchestrator.settings import Defaults
from toolspace.orchestrator.threads import WorkerThreads


class Services(msgspec.Struct, kw_only=True, eq=False):
    """What a toolspace has one of."""

    bus: EventBus
    accounting: Accounting
    queues: QueueBook
    threads: WorkerThreads
    count_tokens: TokenCounter
    cache: ResultCache | None = None
    outputs: OutputStore | None = None
    policies: Sequence[Policy] = ()
    defaults: Defaults = Defaults()
    deferred: dict[str, CallEvent] = {}
    """Ends of calls that their callers announce themselves, once they have updated their own state."""
    killed: int = 0
    """Coroutines that ignored cancellation and were closed."""
