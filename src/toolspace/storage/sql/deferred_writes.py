"""Programs for what others left to the end of a transaction: all of it together, so that many share few statements."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.storage.database import Program, StaleError, Tail
from toolspace.storage.queries import calls, events, inbox


def resolve(tail: Tail) -> Program[None]:
    """Gives calls their results. Raises `StaleError` where one is not as it was taken to be."""
    for resolution in tail.resolved:
        if not (yield from calls.resolve_known(resolution)):
            raise StaleError


def write(tails: Sequence[Tail]) -> Program[None]:
    """All else. Events last: nobody waits long for a stream's counter."""
    yield from inbox.push_all([entry for tail in tails for entry in tail.pushed])
    yield from events.append_all(tails)
