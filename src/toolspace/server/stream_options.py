"""How someone wants to read a stream: in which language, and from where. Reads nothing itself."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from toolspace.core.names import did_you_mean
from toolspace.core.records import EVENT_TYPES
from toolspace.server.dialects import DIALECTS, NATIVE, Dialect
from toolspace.server.problems import Problem

_PLACE: Final = re.compile(r"(\d{1,18})(?:\.(\d{1,6}))?", re.ASCII)


class StreamQuery(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """How a stream is to be read."""

    format: str = NATIVE.name
    """`native`, `ui-message-stream` or `ag-ui`."""
    last_event_id: str = ""
    """The id of the last event that was read, where the header Last-Event-ID cannot be set."""
    from_: Literal["now", "start"] = msgspec.field(name="from", default="now")
    """Where to begin without an id: with what happens from now on, or with what is kept."""
    until: str | None = None
    """The type of event after which the stream ends, such as `run.done`."""


@dataclass(frozen=True)
class Reading:
    """What a reader wants: a language, and a place to begin."""

    dialect: Dialect = NATIVE
    after: int | None = None
    """The last event that was read whole; None: from now on."""
    skip: int = 0
    """How many frames of the event behind it were read too."""
    resumes: bool = False
    """Whether it was here before, and must be told if something is missing."""
    until: str | None = None


def reading_of(query: StreamQuery, last_event_id: str | None) -> Reading:
    """What the query and the header Last-Event-ID ask for. Raises `Problem` 400 where that means nothing.

    The header wins: a browser comes back with the same address, and the header says how far it came.
    """
    dialect = DIALECTS.get(query.format)
    if dialect is None:
        known = ", ".join(f'"{name}"' for name in DIALECTS)
        raise Problem(400, f'the format "{query.format[:80]}" is not known; there are {known}', path="$.format")
    if query.until is not None and query.until not in EVENT_TYPES:
        near = did_you_mean(query.until[:80], EVENT_TYPES) or f"; there are {', '.join(EVENT_TYPES)}"
        raise Problem(400, f'no event is a "{query.until[:80]}"{near}', path="$.until")
    place = last_event_id or query.last_event_id
    if not place:
        return Reading(dialect, 0 if query.from_ == "start" else None, until=query.until)
    match = _PLACE.fullmatch(place)
    after, skip = (int(match[1]), int(match[2]) + 1 if match[2] else 0) if match else (0, 0)
    if match is None or (skip and not after):
        raise Problem(400, f'"{place[:80]}" is no id of an event; send one that came in an "id:" line, or none')
    return Reading(dialect, after - 1 if skip else after, skip, resumes=True, until=query.until)
