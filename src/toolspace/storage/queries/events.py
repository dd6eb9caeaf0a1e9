"""Programs for event streams. Each stream counts for itself: whoever appends holds its counter until the commit, so
that ids become visible in their order and a reader of `id > last` misses none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import NewEvent, StoredEvent
from toolspace.storage.database import DeferredWrites, Program, Row, RowBatch, long_running

_AT_ONCE = 100
"""Streams that count with one statement."""


def append(stream: str, events: Sequence[NewEvent]) -> Program[list[StoredEvent]]:
    """Adds events to the end of a stream."""
    return (yield from _append({stream: events}))[stream]


def append_deferred(tails: Sequence[DeferredWrites]) -> Program[None]:
    """Stores what programs left to the end, all of it together, streams in the order of their names: no two
    transactions wait for each other."""
    new: dict[str, list[NewEvent]] = {}
    for tail in tails:
        for stream, events in tail.new_events.items():
            new.setdefault(stream, []).extend(events)
    if not new:
        return
    stored = yield from _append(new)
    told = dict.fromkeys(new, 0)
    for tail in tails:
        for stream, events in tail.new_events.items():
            start, told[stream] = told[stream], told[stream] + len(events)
            tail.stored_events += stored[stream][start : told[stream]]


def _append(new: Mapping[str, Sequence[NewEvent]]) -> Program[dict[str, list[StoredEvent]]]:
    streams = sorted(new)
    last: dict[str, int] = {}
    for start in range(0, len(streams), _AT_ONCE):
        counts: list[str | int] = []
        for stream in streams[start : start + _AT_ONCE]:
            counts += (stream, len(new[stream]))
        counted = yield _count(len(counts) // 2), counts
        last |= {row[0]: row[1] for row in counted}
    at = now_ms()
    stored: dict[str, list[StoredEvent]] = {}
    rows = RowBatch()
    for stream in streams:
        events = new[stream]
        first = last[stream] - len(events) + 1
        mine = stored[stream] = []
        for number, event in enumerate(events, first):
            mine.append(StoredEvent(stream, number, event.type, event.data, at, event.visibility))
            rows.append((stream, number, event.type, json_text.encode_for_storage(event.data), event.visibility, at))
    yield "INSERT INTO events (stream, id, type, data, exposure, at) VALUES (?, ?, ?, ?, ?, ?)", rows
    return stored


@lru_cache(maxsize=_AT_ONCE)
def _count(streams: int) -> str:
    return (
        f"INSERT INTO streams (stream, last_id) VALUES {', '.join(['(?, ?)'] * streams)} ON CONFLICT (stream) "
        "DO UPDATE SET last_id = streams.last_id + excluded.last_id RETURNING stream, last_id"
    )


def list_after(stream: str, last: int, limit: int) -> Program[list[StoredEvent]]:
    """The events behind `last`, in order."""
    rows = yield (
        "SELECT stream, id, type, data, exposure, at FROM events WHERE stream = ? AND id > ? ORDER BY id LIMIT ?",
        (stream, last, limit),
    )
    return [_event(row) for row in rows]


def get_bounds(stream: str) -> Program[tuple[int, int]]:
    """The id of the oldest event that is kept (one beyond the newest where none is), and that of the newest ever."""
    rows = yield "SELECT last_id FROM streams WHERE stream = ?", (stream,)
    newest: int = rows[0][0] if rows else 0
    rows = yield "SELECT MIN(id) FROM events WHERE stream = ?", (stream,)
    oldest: int | None = rows[0][0]
    return (newest + 1 if oldest is None else oldest), newest


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Removes events older than a time, some at once; says how many. Their ids are never given again."""
    rows = yield (
        "DELETE FROM events WHERE (stream, id) IN (SELECT stream, id FROM events WHERE at < ? ORDER BY at LIMIT ?) "
        "RETURNING id",
        (before, limit),
    )
    return len(rows)


def delete_events_of_stream(stream: str) -> Program[None]:
    """Removes the events of a stream. Its counter stays: whoever read it finds no other event under an old id."""
    yield "DELETE FROM events WHERE stream = ?", (stream,)


def _event(row: Row) -> StoredEvent:
    stream, number, type, data, exposure, at = row
    return StoredEvent(stream, number, type, json_text.decode(data), at, exposure)
