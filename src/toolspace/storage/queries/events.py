"""SQL programs for event streams.

Each stream has a counter, which an append locks until its commit. So ids become visible in their order, and a
subscriber that reads `id > last` misses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Final

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import NewEvent, StoredEvent
from toolspace.storage.database import DeferredWrites, Program, Row, RowBatch, StaleError, long_running
from toolspace.storage.queries import calls, inbox
from toolspace.storage.queries.columns import insert_into

COLUMNS: Final = ("stream", "id", "type", "data", "exposure", "at")
_INSERT: Final = insert_into("events", COLUMNS)
_COUNTERS_AT_ONCE: Final = 100
"""Counters that one statement advances."""


def store(stream: str, event_id: int, event: NewEvent, at: int) -> tuple[StoredEvent, Sequence[str | int]]:
    """An event with its id, and its row."""
    type, data, visibility = event.type, event.data, event.visibility
    row = stream, event_id, type, json_text.encode_for_storage(data), visibility, at
    return StoredEvent(stream, event_id, type, data, at, visibility), row


def append(stream: str, events: Sequence[NewEvent]) -> Program[list[StoredEvent]]:
    """Adds events to the end of a stream."""
    return (yield from _append({stream: events}))[stream]


def append_deferred(writes: Sequence[DeferredWrites]) -> Program[None]:
    """Stores the new events of several programs, streams in the order of their names, so that no two deadlock."""
    new_events: dict[str, list[NewEvent]] = {}
    for deferred in writes:
        for stream, events in deferred.new_events.items():
            new_events.setdefault(stream, []).extend(events)
    if not new_events:
        return
    stored = yield from _append(new_events)
    positions = dict.fromkeys(new_events, 0)
    for deferred in writes:
        for stream, events in deferred.new_events.items():
            start = positions[stream]
            positions[stream] = start + len(events)
            deferred.stored_events += stored[stream][start : positions[stream]]


def _append(new_events: Mapping[str, Sequence[NewEvent]]) -> Program[dict[str, list[StoredEvent]]]:
    streams = sorted(new_events)
    last_ids: dict[str, int] = {}
    for start in range(0, len(streams), _COUNTERS_AT_ONCE):
        counts: list[str | int] = []
        for stream in streams[start : start + _COUNTERS_AT_ONCE]:
            counts += (stream, len(new_events[stream]))
        counters = yield _advance_counters(len(counts) // 2), counts
        last_ids |= {row[0]: row[1] for row in counters}
    at = now_ms()
    stored: dict[str, list[StoredEvent]] = {}
    rows = RowBatch()
    for stream in streams:
        events = new_events[stream]
        first_id = last_ids[stream] - len(events) + 1
        pairs = [store(stream, event_id, event, at) for event_id, event in enumerate(events, first_id)]
        stored[stream] = [event for event, _ in pairs]
        rows += [row for _, row in pairs]
    yield _INSERT, rows
    return stored


@lru_cache(maxsize=_COUNTERS_AT_ONCE)
def _advance_counters(streams: int) -> str:
    return (
        f"INSERT INTO streams (stream, last_id) VALUES {', '.join(['(?, ?)'] * streams)} ON CONFLICT (stream) "
        "DO UPDATE SET last_id = streams.last_id + excluded.last_id RETURNING stream, last_id"
    )


def list_after(stream: str, last_id: int, limit: int) -> Program[list[StoredEvent]]:
    """The events after an id, in order."""
    rows = yield (
        f"SELECT {', '.join(COLUMNS)} FROM events WHERE stream = ? AND id > ? ORDER BY id LIMIT ?",
        (stream, last_id, limit),
    )
    return [_decode(row) for row in rows]


def get_bounds(stream: str) -> Program[tuple[int, int]]:
    """The id of the oldest stored event (without any, the next id), and the highest id that the stream ever had."""
    rows = yield "SELECT last_id FROM streams WHERE stream = ?", (stream,)
    newest: int = rows[0][0] if rows else 0
    rows = yield "SELECT MIN(id) FROM events WHERE stream = ?", (stream,)
    oldest: int | None = rows[0][0]
    return (newest + 1 if oldest is None else oldest), newest


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` events older than a time; returns how many. Their ids are never used again."""
    rows = yield (
        "DELETE FROM events WHERE (stream, id) IN (SELECT stream, id FROM events WHERE at < ? ORDER BY at LIMIT ?) "
        "RETURNING id",
        (before, limit),
    )
    return len(rows)


def delete_events_of_stream(stream: str) -> Program[None]:
    """Deletes the events of a stream. Its counter stays, so no old id means another event."""
    yield "DELETE FROM events WHERE stream = ?", (stream,)


def _decode(row: Row) -> StoredEvent:
    stream, event_id, type, data, visibility, at = row
    return StoredEvent(stream, event_id, type, json_text.decode(data), at, visibility)


# MERGED from deferred_writes: SQL programs for the writes at the end of a transaction. Those of many programs share fe


def resolve_deferred_calls(deferred: DeferredWrites) -> Program[None]:
    """Stores the results of calls. Raises `StaleError` if a call is not as it is remembered."""
    for resolution in deferred.resolved_calls:
        if not (yield from calls.apply_resolution(resolution)):
            raise StaleError


def write_deferred(writes: Sequence[DeferredWrites]) -> Program[None]:
    """Stores everything else. Events come last: an append locks the counter of its stream."""
    yield from inbox.add_rows([row for deferred in writes for row in deferred.inbox_rows])
    yield from append_deferred(writes)
