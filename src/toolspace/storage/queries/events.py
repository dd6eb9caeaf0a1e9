"""SQL programs for event streams, and for the deferred writes of transactions, which end with events.

Each stream has a counter, which an append locks until its commit. So ids become visible in their order, and a
subscriber that reads `id > last` misses none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Final

from toolspace.core import json_text
from toolspace.core.stored_records import NewEvent, StoredEvent
from toolspace.storage.database import DeferredWrites, Program, Row, RowBatch, StaleError, current_time, long_running
from toolspace.storage.queries import calls, inbox
from toolspace.storage.queries.statement_builder import delete_selected, first_value, insert_into, placeholders

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


def resolve_deferred_calls(deferred_writes: DeferredWrites) -> Program[None]:
    """Stores the results of calls. Raises `StaleError` if a call is not as it is remembered."""
    for resolution in deferred_writes.resolved_calls:
        if not (yield from calls.apply_resolution(resolution)):
            raise StaleError


def write_deferred(all_writes: Sequence[DeferredWrites]) -> Program[None]:
    """Stores the new inbox rows and events of several programs, with few statements.

    Events come last, because an append locks the counter of its stream.
    """
    yield from inbox.add_rows([row for writes in all_writes for row in writes.inbox_rows])
    new_events: dict[str, list[NewEvent]] = {}
    for writes in all_writes:
        for stream, events in writes.new_events.items():
            new_events.setdefault(stream, []).extend(events)
    if not new_events:
        return
    events_of = {stream: iter(events) for stream, events in (yield from _append(new_events)).items()}
    for writes in all_writes:
        for stream, events in writes.new_events.items():
            writes.stored_events += islice(events_of[stream], len(events))


def _append(new_events: Mapping[str, Sequence[NewEvent]]) -> Program[dict[str, list[StoredEvent]]]:
    streams = sorted(new_events)  # Sorted, so that two writers cannot deadlock.
    last_ids: dict[str, int] = {}
    for start in range(0, len(streams), _COUNTERS_AT_ONCE):
        counts: list[str | int] = []
        for stream in streams[start : start + _COUNTERS_AT_ONCE]:
            counts += (stream, len(new_events[stream]))
        counters = yield _advance_counters(len(counts) // 2), counts
        last_ids |= {row[0]: row[1] for row in counters}
    at = yield from current_time()
    stored_events: dict[str, list[StoredEvent]] = {}
    rows = RowBatch()
    for stream in streams:
        events = new_events[stream]
        first_id = last_ids[stream] - len(events) + 1
        pairs = [store(stream, event_id, event, at) for event_id, event in enumerate(events, first_id)]
        stored_events[stream] = [event for event, _ in pairs]
        rows += [row for _, row in pairs]
    yield _INSERT, rows
    return stored_events


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


def list_of_types(stream: str, types: Sequence[str]) -> Program[list[StoredEvent]]:
    """The events of some types, in order."""
    rows = yield (
        f"SELECT {', '.join(COLUMNS)} FROM events WHERE stream = ? AND type IN ({placeholders(types)}) ORDER BY id",
        (stream, *types),
    )
    return [_decode(row) for row in rows]


def get_bounds(stream: str) -> Program[tuple[int, int]]:
    """The id of the oldest stored event (without any, the next id), and the highest id that the stream ever had."""
    newest: int = (yield from first_value("SELECT last_id FROM streams WHERE stream = ?", stream)) or 0
    oldest: int | None = yield from first_value("SELECT MIN(id) FROM events WHERE stream = ?", stream)
    return (newest + 1 if oldest is None else oldest), newest


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` events older than a time; returns how many. Their ids are never used again."""
    clauses = "WHERE at < ? ORDER BY at LIMIT ?"
    return len((yield from delete_selected("events", "stream, id", clauses, before, limit)))


def _decode(row: Row) -> StoredEvent:
    stream, event_id, type, data, visibility, at = row
    return StoredEvent(stream, event_id, type, json_text.decode(data), at, visibility)
