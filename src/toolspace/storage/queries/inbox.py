"""SQL programs for the inboxes of agents: events are added, claimed under a lease, then acknowledged or released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from toolspace.core import json_text
from toolspace.core.ids import agent_of_session, scope_key_of
from toolspace.core.stored_records import InboxEvent, InboxType
from toolspace.storage.database import SKIP_LOCKED, Program, Row, RowBatch, current_time, long_running
from toolspace.storage.queries.statement_builder import (
    Table,
    delete_selected,
    first_column,
    first_value,
    has_changed,
    placeholders,
    where_clause,
)

HUMAN_MESSAGE, TOOL_RESULT, PLAN_OR_SERVICE, AGENT_MESSAGE = range(4)
"""Priorities: an agent gets the lowest number first."""
MAX_ATTEMPTS: Final = 5
_FIRST_DELAY, _LONGEST_DELAY = 1_000, 60_000
"""Milliseconds before a released event may be claimed again; each attempt doubles the delay, up to the longest."""

_EVENT = Table("inbox", InboxEvent, columns={"timestamp": "at"}, json=("data",))

NEW_ROW_COLUMNS: Final = (
    "agent_entity_id", "event_id", "type", "priority", "at", "seq", "data", "available_at", "session_id"
)  # fmt: skip
"""The values that `build_row` gives."""
_INSERT_INTO: Final = f"INSERT INTO inbox ({', '.join(NEW_ROW_COLUMNS)}, status, attempts)"
_IF_NEW: Final = "ON CONFLICT (agent_entity_id, event_id) DO NOTHING"
_INSERT: Final = f"{_INSERT_INTO} VALUES ({placeholders(NEW_ROW_COLUMNS)}, 'pending', 0) {_IF_NEW}"

_NOT_AWAITED: Final = (
    "AND NOT (type = 'tool_result' AND EXISTS (SELECT 1 FROM calls WHERE calls.call_id = SUBSTR(inbox.event_id, 13) "
    "AND calls.pauses = 1 AND EXISTS (SELECT 1 FROM history WHERE history.run_id = calls.run_id))) "
)
"""Excludes the result that a run of the agent waits for: only that run may claim it. The event id of a result is
`tool_result:` (12 characters) and the id of its call."""

_CLAIMED_EVENT: Final = "agent_entity_id = ? AND event_id = ? AND status = 'processing' AND claim = COALESCE(?, claim)"
"""One event of a claim; of any claim if that is NULL."""
FAILED_EVENTS_BY_AGENT: Final = (
    "SELECT agent_entity_id, COUNT(*) FROM inbox WHERE status = 'failed' GROUP BY agent_entity_id ORDER BY 1"
)
"""How many events of each agent wait for an operator."""
_PENDING: Final = "status = 'pending'"
_STATUSES: Final = ("pending", "processing", "processed", "failed")
"""Each has an index by agent. Statements name the status as a literal: only then the index can be used."""


def insert_rows_from(select: str) -> str:
    """An INSERT of the rows of a SELECT of `NEW_ROW_COLUMNS`. For SQLite, `select` must end with a WHERE clause."""
    return f"{_INSERT_INTO} {select} {_IF_NEW}"


def add(
    session_id: str,
    event_id: str,
    type: InboxType,
    data: Any,
    *,
    priority: int,
    at: int | None = None,
    seq: int = 0,
) -> Program[bool]:
    """Adds an event for a session. False if the agent has it already. `seq` orders events of the same moment."""
    at = (yield from current_time()) if at is None else at
    row = build_row(session_id, event_id, type, data, priority=priority, at=at, seq=seq)
    return (yield from has_changed(_INSERT, *row))


def build_row(
    session_id: str,
    event_id: str,
    type: InboxType,
    data: Any,
    *,
    priority: int,
    at: int,
    seq: int = 0,
) -> Sequence[Any]:
    """The row of an event, for `add_rows`. It is available at once, whatever the clock says."""
    text = json_text.encode_for_storage(data)
    return agent_of_session(session_id), event_id, type, priority, at, seq, text, 0, session_id


def add_rows(rows: Sequence[Sequence[Any]]) -> Program[None]:
    """Adds events, except those that their inboxes have already."""
    if rows:
        yield _INSERT, RowBatch(rows)


def claim(
    agent_entity_id: str,
    claim: str,
    *,
    count: int,
    lease_ms: int,
    types: Sequence[str] = (),
    include_awaited: bool = True,
    session_id: str | None = None,
) -> Program[list[InboxEvent]]:
    """Claims the next events, in order: pending → processing until the lease ends.

    `include_awaited`: also the results that runs of the agent wait for. `session_id`: only the events of this session.
    """
    now = yield from current_time()
    inbox = "agent_entity_id = ?" if session_id is None else _select_session(session_id)
    condition = f"AND type IN ({placeholders(types)}) " if types else ""
    condition += "" if include_awaited else _NOT_AWAITED
    rows = yield (
        f"WITH picked AS MATERIALIZED (SELECT event_id FROM inbox WHERE {inbox} "
        f"AND status = 'pending' AND available_at <= ? {condition}ORDER BY priority, at, seq LIMIT ? {SKIP_LOCKED}) "
        "UPDATE inbox SET status = 'processing', claim = ?, lease_until = ?, attempts = attempts + 1 "
        "WHERE status = 'pending' AND agent_entity_id = ? AND event_id IN (SELECT event_id FROM picked) "
        f"RETURNING {_EVENT.sql}, seq",
        (session_id or agent_entity_id, now, *types, count, claim, now + lease_ms, agent_entity_id),
    )
    return _in_order(rows)


def acknowledge(agent_entity_id: str, claim: str | None, event_ids: Sequence[str]) -> Program[list[str]]:
    """processing → processed, for events of this claim; of any claim if it is None. Returns their ids."""
    changes = "status = 'processed', lease_until = NULL, claim = NULL"
    update = f"UPDATE inbox SET {changes} WHERE {_CLAIMED_EVENT} RETURNING event_id"
    processed_ids: list[str] = []
    for event_id in event_ids:
        processed_ids += yield from first_column(update, agent_entity_id, event_id, claim)
    return processed_ids


def release(
    agent_entity_id: str, claim: str | None, event_ids: Sequence[str], *, error: str | None
) -> Program[list[InboxEvent]]:
    """processing → pending after a delay that grows with each attempt; after the last attempt → failed."""
    select = f"SELECT {_EVENT.sql}, claim FROM inbox WHERE {_CLAIMED_EVENT}"
    events: list[InboxEvent] = []
    for event_id in event_ids:
        rows = yield select, (agent_entity_id, event_id, claim)
        events += yield from _release_rows(rows, error)
    return events


def release_expired(*, limit: int = 100) -> Program[list[InboxEvent]]:
    """As `release`, for events whose lease has ended: whoever claimed them is gone."""
    now = yield from current_time()
    rows = yield (
        f"SELECT {_EVENT.sql}, claim FROM inbox WHERE status = 'processing' AND lease_until < ? LIMIT ? {SKIP_LOCKED}",
        (now, limit),
    )
    error = "it was claimed, but neither acknowledged nor released before the lease ended"
    return (yield from _release_rows(rows, error))


def set_aside(agent_entity_id: str, claim: str, event_ids: Sequence[str], *, error: str) -> Program[None]:
    """processing → failed at once, whatever the number of attempts: only an operator may retry them."""
    changes = "status = 'failed', lease_until = NULL, claim = NULL, error = ?"
    for event_id in event_ids:
        yield f"UPDATE inbox SET {changes} WHERE {_CLAIMED_EVENT}", (error, agent_entity_id, event_id, claim)


def end_impossible_delays() -> Program[None]:
    """Makes pending events available whose delay is longer than any: the clock was ahead when they were released."""
    latest = (yield from current_time()) + _LONGEST_DELAY
    yield f"UPDATE inbox SET available_at = 0 WHERE {_PENDING} AND available_at > ?", (latest,)


def undo_claim(agent_entity_id: str, claim: str, event_ids: Sequence[str]) -> Program[None]:
    """processing → pending at once, as if they had not been claimed: it is not their turn yet."""
    changes = "status = 'pending', lease_until = NULL, claim = NULL, attempts = attempts - 1"
    for event_id in event_ids:
        yield f"UPDATE inbox SET {changes} WHERE {_CLAIMED_EVENT}", (agent_entity_id, event_id, claim)


def transfer_claim(agent_entity_id: str, old_claim: str, event_ids: Sequence[str], new_claim: str) -> Program[None]:
    """Another claim holds these events from now on."""
    for event_id in event_ids:
        yield f"UPDATE inbox SET claim = ? WHERE {_CLAIMED_EVENT}", (new_claim, agent_entity_id, event_id, old_claim)


def retry(agent_entity_id: str, event_id: str) -> Program[bool]:
    """failed → pending, from the first attempt: an operator asked for it."""
    update = (
        "UPDATE inbox SET status = 'pending', attempts = 0, available_at = ?, error = NULL "
        "WHERE agent_entity_id = ? AND event_id = ? AND status = 'failed'"
    )
    now = yield from current_time()
    return (yield from has_changed(update, now, agent_entity_id, event_id))


def result_event_id(call_id: str) -> str:
    """The id of the event with the result of a call."""
    return f"tool_result:{call_id}"


def withdraw(agent_entity_id: str, event_id: str) -> Program[None]:
    """Whatever its status → processed: nobody needs to handle this event any more."""
    yield (
        "UPDATE inbox SET status = 'processed', lease_until = NULL, claim = NULL, error = NULL "
        "WHERE agent_entity_id = ? AND event_id = ? AND status <> 'processed'",
        (agent_entity_id, event_id),
    )


def delete_all(agent_entity_id: str, *, session_id: str | None = None) -> Program[None]:
    """Deletes the events of an agent; only those of one session, if it is given."""
    conditions, values = where_clause(("agent_entity_id = ?", agent_entity_id), ("session_id = ?", session_id))
    for status in _STATUSES:
        yield f"DELETE FROM inbox {conditions}AND status = '{status}'", values


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` processed events older than a time; returns how many."""
    clauses = "WHERE status = 'processed' AND at < ? ORDER BY at LIMIT ?"
    return len((yield from delete_selected("inbox", "agent_entity_id, event_id", clauses, before, limit)))


def find(agent_entity_id: str, event_id: str) -> Program[InboxEvent | None]:
    return _EVENT.find("WHERE agent_entity_id = ? AND event_id = ?", agent_entity_id, event_id)


def list_events(
    agent_entity_id: str, *, status: str | None = None, session_id: str | None = None, limit: int = 100
) -> Program[list[InboxEvent]]:
    """Events in the order in which they are claimed; only those of one status or session, if it is given."""
    conditions, values = where_clause(("agent_entity_id = ?", agent_entity_id), ("session_id = ?", session_id))
    rows: list[Row] = []
    for name in _STATUSES:
        if status in (None, name):
            clauses = f"{conditions}AND status = '{name}' ORDER BY priority, at, seq LIMIT ?"
            rows += yield f"SELECT {_EVENT.sql}, seq FROM inbox {clauses}", (*values, limit)
    return _in_order(rows)[:limit]


def list_claimed(agent_entity_id: str, claim: str) -> Program[list[str]]:
    """The ids of the events that a claim holds."""
    condition = "claim = ? AND status = 'processing' AND agent_entity_id = ?"
    return first_column(f"SELECT event_id FROM inbox WHERE {condition} ORDER BY event_id", claim, agent_entity_id)


def list_waiting(session_id: str, *, limit: int) -> Program[tuple[list[InboxEvent], int]]:
    """The oldest events that a session can claim now, and how many there are; without results that runs wait for."""
    now = yield from current_time()
    claimable = f"WHERE {_select_session(session_id)} AND {_PENDING} AND available_at <= ? {_NOT_AWAITED}"
    events = yield from _EVENT.select(f"{claimable}ORDER BY at, seq LIMIT ?", session_id, now, limit)
    if len(events) < limit:
        return events, len(events)
    return events, (yield from first_value(f"SELECT COUNT(*) FROM inbox {claimable}", session_id, now))


def count_pending(session_id: str) -> Program[int]:
    """How many events of a session are pending, without results that runs wait for."""
    select = f"SELECT COUNT(*) FROM inbox WHERE {_select_session(session_id)} AND {_PENDING} {_NOT_AWAITED}"
    return first_value(select, session_id)


def find_next_available(agent_entity_id: str, *, after: int = 0) -> Program[int | None]:
    """When the next pending event can be claimed, after a time; None if there is none."""
    select = f"SELECT MIN(available_at) FROM inbox WHERE agent_entity_id = ? AND {_PENDING} AND available_at > ?"
    return first_value(select, agent_entity_id, after)


def _select_session(session_id: str) -> str:
    """The condition for events of a session, whose id is the only value. Each form has an index."""
    if scope_key_of(session_id):
        return "session_id = ? AND session_id <> agent_entity_id"
    return "agent_entity_id = ? AND session_id = agent_entity_id"


def _release_rows(rows: Sequence[Row], error: str | None) -> Program[list[InboxEvent]]:
    assignments = "status = ?, available_at = ?, lease_until = NULL, claim = NULL, error = ?"
    events: list[InboxEvent] = []
    for row in rows:
        event, claim = _EVENT.decode(row), row[len(_EVENT.columns)]
        status = "pending" if event.attempts < MAX_ATTEMPTS else "failed"
        now = yield from current_time()
        available_at = now + min(_FIRST_DELAY << max(event.attempts - 1, 0), _LONGEST_DELAY)
        values = status, available_at, error, event.agent_entity_id, event.event_id, claim
        released_event = yield from _EVENT.update(f"{assignments} WHERE {_CLAIMED_EVENT}", *values)
        if released_event is not None:
            events.append(released_event)
    return events


def _in_order(rows: Sequence[Row]) -> list[InboxEvent]:
    """The events of rows that end with `seq`, by priority, time and `seq`."""
    pairs = [(_EVENT.decode(row), row[len(_EVENT.columns)]) for row in rows]
    pairs.sort(key=lambda pair: (pair[0].priority, pair[0].timestamp, pair[1]))
    return [event for event, _ in pairs]
