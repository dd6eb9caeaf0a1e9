"""SQL programs for the writes at the end of a transaction. Those of many programs share few statements."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.storage.database import DeferredWrites, Program, StaleError
from toolspace.storage.queries import calls, events, inbox


def resolve_calls(deferred: DeferredWrites) -> Program[None]:
    """Stores the results of calls. Raises `StaleError` if a call is not as it is remembered."""
    for resolution in deferred.resolved_calls:
        if not (yield from calls.apply_resolution(resolution)):
            raise StaleError


def write(writes: Sequence[DeferredWrites]) -> Program[None]:
    """Stores everything else. Events come last: an append locks the counter of its stream."""
    yield from inbox.add_rows([row for deferred in writes for row in deferred.inbox_rows])
    yield from events.append_deferred(writes)
