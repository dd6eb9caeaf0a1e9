"""Twin path: commits a batch that consists of deferred writes alone (results of remembered calls) in one statement.

Pays for itself in `benchmarks/gateway_results.py` (results per second over the gateway with SQLite); the plain path is
`queries.deferred_writes`, and `tests/storage/sqlite/test_batch_writer.py` compares the two. The statement and its
commit are one call into SQLite, made by the writer thread without the interpreter's lock, while the event loop goes on.

Nothing is read before the write. The rows go in as JSON; a temporary trigger writes them into the tables, compares what
the process remembers with what is there, and rolls everything back if they differ.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from toolspace.core.ids import now_ms
from toolspace.core.records import StoredEvent
from toolspace.storage.database import DeferredWrites
from toolspace.storage.queries import calls, events, inbox

_MAX_STREAMS: Final = 4096
"""Streams whose last ids are remembered."""
_MAX_BYTES: Final = 1 << 20
"""A larger batch is written row by row."""


def _json_value(index: int) -> str:
    return f"json_extract(value, '$[{index}]')"


def _json_values(columns: Sequence[str]) -> str:
    return ", ".join(map(_json_value, range(len(columns))))


def _resolution_value(column: str) -> str:
    return _json_value(calls.RESOLUTION_COLUMNS.index(column))


_IS_REMEMBERED: Final = " AND ".join(
    f"calls.{column} IS {_resolution_value(column)}" for column in calls.REMEMBERED_COLUMNS
)
_INSERT_INBOX_ROWS: Final = inbox.insert_rows_from(
    f"SELECT {_json_values(inbox.NEW_ROW_COLUMNS)}, 'pending', 0 FROM json_each(NEW.inbox) WHERE TRUE"
)
_SETUP: Final = (
    "CREATE TEMP VIEW batches AS SELECT NULL AS calls, NULL AS inbox, NULL AS streams, NULL AS events",
    f"""CREATE TEMP TRIGGER write_batch INSTEAD OF INSERT ON batches BEGIN
        UPDATE calls SET {calls.resolution_assignments(_resolution_value)} FROM json_each(NEW.calls)
            WHERE calls.call_id = {_resolution_value("call_id")} AND {_IS_REMEMBERED};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.calls);
        UPDATE streams SET last_id = {_json_value(1)} FROM json_each(NEW.streams)
            WHERE streams.stream = {_json_value(0)} AND streams.last_id = {_json_value(2)};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.streams);
        {_INSERT_INBOX_ROWS};
        INSERT INTO events ({", ".join(events.COLUMNS)})
            SELECT {_json_values(events.COLUMNS)} FROM json_each(NEW.events);
    END""",
)
_WRITE: Final = "INSERT INTO batches VALUES (?, ?, ?, ?)"


class PreparedBatch(NamedTuple):
    """A batch as values of one statement."""

    values: list[str]
    stored_events: list[tuple[DeferredWrites, list[StoredEvent]]]
    """The events of each of the deferred writes, as they are after the commit."""
    last_ids: dict[str, int]
    """The last ids of the streams after the commit."""


class BatchWriter:
    """Prepares and writes batches. Remembers the last ids of streams: no other process writes to the file.

    Used by the event loop; while a commit is under way, by the writer thread alone.
    """

    def __init__(self, connection: sqlite3.Connection | None) -> None:
        self._last_ids: dict[str, int] = {}
        self._is_available = connection is not None and _set_up(connection)

    def prepare(self, writes: Sequence[DeferredWrites]) -> PreparedBatch | None:
        """None if the rows have to be written one by one: the last id of a stream is unknown, or they are too large."""
        try:
            return self._prepare(writes) if self._is_available else None
        except Exception:  # A value that no database can store: writing it row by row reports whose it is.
            return None

    def _prepare(self, writes: Sequence[DeferredWrites]) -> PreparedBatch | None:
        at = now_ms()
        call_rows: list[Sequence[Any]] = []
        inbox_rows: list[Sequence[Any]] = []
        event_rows: list[Sequence[Any]] = []
        previous_ids, last_ids = self._last_ids, dict[str, int]()
        stored_events: list[tuple[DeferredWrites, list[StoredEvent]]] = []
        for deferred in writes:
            call_rows += deferred.resolved_calls
            inbox_rows += deferred.inbox_rows
            stored: list[StoredEvent] = []
            for stream, new_events in deferred.new_events.items():
                event_id = last_ids.get(stream) or previous_ids.get(stream)
                if event_id is None:
                    return None
                for new_event in new_events:
                    event_id += 1
                    event, row = events.store(stream, event_id, new_event, at)
                    stored.append(event)
                    event_rows.append(row)
                last_ids[stream] = event_id
            stored_events.append((deferred, stored))
        stream_rows = [(stream, event_id, previous_ids[stream]) for stream, event_id in last_ids.items()]
        rows_of_tables = call_rows, inbox_rows, stream_rows, event_rows
        values = [_encoder.encode(rows).decode() for rows in rows_of_tables]
        if sum(map(len, values)) > _MAX_BYTES:
            return None
        return PreparedBatch(values, stored_events, last_ids)

    def write(self, connection: sqlite3.Connection, batch: PreparedBatch) -> bool:
        """Commits the batch. Returns False, and writes nothing, if a row is not as remembered or cannot be written."""
        try:
            connection.execute(_WRITE, batch.values)
        except Exception:  # Any fault: writing row by row reports whose it is.
            return False
        for deferred, stored in batch.stored_events:
            deferred.stored_events = stored
        self._last_ids.update(batch.last_ids)
        return True

    def remember(self, writes: Iterable[DeferredWrites]) -> None:
        """Takes the last ids from writes that were made row by row."""
        last_ids = self._last_ids
        for deferred in writes:
            for event in deferred.stored_events:
                last_ids[event.stream] = event.id
        while len(last_ids) > _MAX_STREAMS:
            del last_ids[next(iter(last_ids))]


def _set_up(connection: sqlite3.Connection) -> bool:
    try:
        for statement in _SETUP:
            connection.execute(statement)
    except sqlite3.Error:  # An old SQLite, or one without JSON: everything is written row by row.
        return False
    return True


NO_BATCH_WRITER: Final = BatchWriter(None)
"""Of a database that is not open."""
_encoder = msgspec.json.Encoder()
