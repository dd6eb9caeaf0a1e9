"""What programs left to the end of a transaction, written by SQLite with one statement: a transaction of its own.

Where all programs of a batch did nothing but that (the results of calls that are known do), the statement and its
commit are one call of SQLite's. The thread that makes it leaves the event loop alone for all of it, where it would
take turns with it at each statement otherwise.

Nothing is looked up before: what is written says what it takes to be there, and writes nothing where that is wrong.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import StoredEvent
from toolspace.storage.database import DeferredWrites

_MOST_STREAMS = 4096
"""Streams whose last ids are remembered."""
_MOST_BYTES = 1 << 20
"""What is longer is written row by row."""


def _value(number: int) -> str:
    return f"json_extract(value, '$[{number}]')"


def _values(count: int) -> str:
    return ", ".join(map(_value, range(count)))


_SETUP = (
    "CREATE TEMP VIEW tails AS SELECT NULL AS calls, NULL AS inbox, NULL AS streams, NULL AS events",
    f"""CREATE TEMP TRIGGER write_tails INSTEAD OF INSERT ON tails BEGIN
        UPDATE calls SET status = 'resolved', delivery = {_value(1)}, result = {_value(2)}, is_error = {_value(3)},
            source = {_value(4)}, submission = {_value(5)}, resolved_at = {_value(6)} FROM json_each(NEW.calls)
            WHERE calls.call_id = {_value(0)} AND calls.status = {_value(7)} AND calls.created_at = {_value(8)}
            AND calls.space_id IS {_value(9)};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.calls);
        UPDATE streams SET last_id = {_value(1)} FROM json_each(NEW.streams)
            WHERE streams.stream = {_value(0)} AND streams.last_id = {_value(2)};
        SELECT RAISE(ROLLBACK, 'stale') WHERE changes() <> json_array_length(NEW.streams);
        INSERT INTO inbox (agent_entity_id, event_id, type, priority, at, seq, data, available_at, status, attempts)
            SELECT {_values(8)}, 'pending', 0 FROM json_each(NEW.inbox) WHERE TRUE
            ON CONFLICT (agent_entity_id, event_id) DO NOTHING;
        INSERT INTO events (stream, id, type, data, exposure, at) SELECT {_values(6)} FROM json_each(NEW.events);
    END""",
)
_WRITE = "INSERT INTO tails VALUES (?, ?, ?, ?)"


class PreparedBatch(NamedTuple):
    """What is to be written."""

    values: tuple[str, ...]
    stored: list[tuple[DeferredWrites, list[StoredEvent]]]
    """The events of each, as they are once that is done."""
    last: dict[str, int]
    """How far the streams are then."""


class BatchWriter:
    """Plans what a thread writes, and remembers how far the streams are: this process alone writes.

    It is the loop's, or while a commit is under way the thread's.
    """

    def __init__(self, connection: sqlite3.Connection | None) -> None:
        self._last: dict[str, int] = {}
        self._is_able = connection is not None and _is_set_up(connection)

    def plan(self, tails: Sequence[DeferredWrites]) -> PreparedBatch | None:
        """None where they are to be written row by row: something is not known, or too large."""
        try:
            return self._plan(tails) if self._is_able else None
        except Exception:  # What no database takes: it is said where it is found. Whoever waits must hear of it.
            return None

    def _plan(self, tails: Sequence[DeferredWrites]) -> PreparedBatch | None:
        at, kept = now_ms(), json_text.encode_for_storage
        calls: list[Sequence[Any]] = []
        pushed: list[Sequence[Any]] = []
        rows: list[Sequence[Any]] = []
        before, last = self._last, dict[str, int]()
        stored: list[tuple[DeferredWrites, list[StoredEvent]]] = []
        for tail in tails:
            calls += tail.resolved_calls
            pushed += tail.inbox_rows
            mine: list[StoredEvent] = []
            for stream, events in tail.new_events.items():
                number = last.get(stream) or before.get(stream)
                if number is None:
                    return None
                for event in events:
                    number += 1
                    type, data, exposure = event.type, event.data, event.visibility
                    mine.append(StoredEvent(stream, number, type, data, at, exposure))
                    rows.append((stream, number, type, kept(data), exposure, at))
                last[stream] = number
            stored.append((tail, mine))
        streams = [(stream, number, before[stream]) for stream, number in last.items()]
        values = tuple(_encoder.encode(each).decode() for each in (calls, pushed, streams, rows))
        if sum(map(len, values)) > _MOST_BYTES:
            return None
        return PreparedBatch(values, stored, last)

    def write(self, connection: sqlite3.Connection, plan: PreparedBatch) -> bool:
        """Writes it, durably. False where something was not as it was taken to be, or could not be written at all:
        nothing happened then."""
        try:
            connection.execute(_WRITE, plan.values)
        except Exception:  # Whatever it is: row by row it is said whose fault it is.
            return False
        return True

    def note_plan(self, plan: PreparedBatch) -> None:
        """It was written."""
        for tail, events in plan.stored:
            tail.stored_events = events
        self._last.update(plan.last)

    def note(self, tails: Iterable[DeferredWrites]) -> None:
        """These were written row by row."""
        last = self._last
        for tail in tails:
            for event in tail.stored_events:
                last[event.stream] = event.id
        while len(last) > _MOST_STREAMS:
            del last[next(iter(last))]


def _is_set_up(connection: sqlite3.Connection) -> bool:
    try:
        for statement in _SETUP:
            connection.execute(statement)
    except sqlite3.Error:  # An old SQLite, or one without JSON: all is written row by row.
        return False
    return True


UNABLE = BatchWriter(None)
"""Of a database that is not open."""
_encoder = msgspec.json.Encoder()
