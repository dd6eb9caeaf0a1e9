"""A program for what others left to the end of a transaction: all of it together, so that many share few statements."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.abc.database import Program, StaleError, Tail
from toolspace.stores.sql import calls, events, inbox


def write(tails: Sequence[Tail]) -> Program[None]:
    """Events last: nobody waits long for a stream's counter. Raises `StaleError` where a call is not as known."""
    for tail in tails:
        for resolution in tail.resolved:
            if not (yield from calls.resolve_known(resolution)):
                raise StaleError
    yield from inbox.push_all([entry for tail in tails for entry in tail.pushed])
    yield from events.append_all(tails)
