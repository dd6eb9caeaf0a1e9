"""Programs for what others left to the end of a transaction: all of it together, so that many share few statements."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.storage.database import DeferredWrites, Program, StaleError
from toolspace.storage.queries import calls, events, inbox


def resolve_calls(tail: DeferredWrites) -> Program[None]:
    """Gives calls their results. Raises `StaleError` where one is not as it was taken to be."""
    for resolution in tail.resolved_calls:
        if not (yield from calls.apply_resolution(resolution)):
            raise StaleError


def write(tails: Sequence[DeferredWrites]) -> Program[None]:
    """All else. Events last: nobody waits long for a stream's counter."""
    yield from inbox.add_rows([entry for tail in tails for entry in tail.inbox_rows])
    yield from events.append_deferred(tails)
