"""Programs for event streams. Each stream counts for itself: whoever appends holds its counter until the commit, so
that ids become visible in their order and a reader of `id > last` misses none."""

from __future__ import annotations

from collections.abc import Sequence

from toolspace.abc.database import Program, Row, Tail, large
from toolspace.core import jsontext
from toolspace.core.ids import now_ms
from toolspace.core.records import NewEvent, StreamEvent

_AT_ONCE = 100
"""Events that are stored with one statement."""


def append(stream: str, events: Sequence[NewEvent]) -> Program[list[StreamEvent]]:
    """Adds events to the end of a stream."""
    rows = yield (
        "INSERT INTO streams (stream, last_id) VALUES (?, ?) "
        "ON CONFLICT (stream) DO UPDATE SET last_id = streams.last_id + excluded.last_id RETURNING last_id",
        (stream, len(events)),
    )
    first, at = rows[0][0] - len(events) + 1, now_ms()
    stored = [
        StreamEvent(stream, number, event.type, event.data, exposure=event.exposure, at=at)
        for number, event in enumerate(events, first)
    ]
    for start in range(0, len(stored), _AT_ONCE):
        some = stored[start : start + _AT_ONCE]
        marks = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(some))
        values: list[str | int] = []
        for event in some:
            values += (stream, event.id, event.type, jsontext.encode_kept(event.data), event.exposure, at)
        yield f"INSERT INTO events (stream, id, type, data, exposure, at) VALUES {marks}", values
    return stored


def append_all(tails: Sequence[Tail]) -> Program[None]:
    """Stores what programs left to the end, each stream's events together, streams in the order of their names: no two
    transactions wait for each other."""
    streams: dict[str, list[Tail]] = {}
    for tail in tails:
        for stream in tail.new:
            streams.setdefault(stream, []).append(tail)
    for stream in sorted(streams):
        given = streams[stream]
        stored = yield from append(stream, [event for tail in given for event in tail.new[stream]])
        start = 0
        for tail in given:
            end = start + len(tail.new[stream])
            tail.events += stored[start:end]
            start = end


def after(stream: str, last: int, limit: int) -> Program[list[StreamEvent]]:
    """The events behind `last`, in order."""
    rows = yield (
        "SELECT stream, id, type, data, exposure, at FROM events WHERE stream = ? AND id > ? ORDER BY id LIMIT ?",
        (stream, last, limit),
    )
    return [_event(row) for row in rows]


def bounds(stream: str) -> Program[tuple[int, int]]:
    """The id of the oldest event that is kept (one beyond the newest where none is), and that of the newest ever."""
    rows = yield "SELECT last_id FROM streams WHERE stream = ?", (stream,)
    newest: int = rows[0][0] if rows else 0
    rows = yield "SELECT MIN(id) FROM events WHERE stream = ?", (stream,)
    oldest: int | None = rows[0][0]
    return (newest + 1 if oldest is None else oldest), newest


@large
def forget(before: int, limit: int) -> Program[int]:
    """Removes events older than a time, some at once; says how many. Their ids are never given again."""
    rows = yield (
        "DELETE FROM events WHERE (stream, id) IN (SELECT stream, id FROM events WHERE at < ? ORDER BY at LIMIT ?) "
        "RETURNING id",
        (before, limit),
    )
    return len(rows)


def clear(stream: str) -> Program[None]:
    """Removes the events of a stream. Its counter stays: whoever read it finds no other event under an old id."""
    yield "DELETE FROM events WHERE stream = ?", (stream,)


def _event(row: Row) -> StreamEvent:
    stream, number, type, data, exposure, at = row
    return StreamEvent(stream, number, type, jsontext.decode(data), exposure=exposure, at=at)
