"""Programs for the agents' inboxes: events wait, are taken under a lease, and are done with or come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import InboxEvent, InboxType
from toolspace.storage.database import SKIP_LOCKED, Program, Row, RowBatch, long_running

_COLUMNS = "event_id, agent_entity_id, type, at, data, priority, status, attempts, error"

_PUSH = (
    "INSERT INTO inbox (agent_entity_id, event_id, type, priority, at, seq, data, status, attempts, available_at) "
    "VALUES (?, ?, ?, ?, ?, ?, ?, 'pending', 0, ?) ON CONFLICT (agent_entity_id, event_id) DO NOTHING"
)

HUMAN_MESSAGE, TOOL_RESULT, PLAN_OR_SERVICE, AGENT_MESSAGE = range(4)
"""Priorities: the lowest number is looked at first."""

_NOT_AWAITED = (
    "AND NOT (type = 'tool_result' AND EXISTS (SELECT 1 FROM calls WHERE calls.call_id = SUBSTR(inbox.event_id, 13) "
    "AND calls.pauses = 1 AND EXISTS (SELECT 1 FROM history WHERE history.run_id = calls.run_id))) "
)
"""Not the result that a run of the agent waits for: it is for that run alone. (`tool_result:` has 12 characters.)"""

_PARTS = {"pending": "status = 'pending'", "taken": "status <> 'pending'"}
"""An inbox in the parts that each have an index by agents. What is new is in one of them."""

MAX_ATTEMPTS = 5
_FIRST_DELAY, _LONGEST_DELAY = 1_000, 60_000


def add(
    agent_entity_id: str,
    event_id: str,
    type: InboxType,
    data: Any,
    *,
    priority: int,
    at: int | None = None,
    seq: int = 0,
) -> Program[bool]:
    """Adds an event. False where this agent was told of it already. `seq` orders what happened at one moment."""
    row = build_row(agent_entity_id, event_id, type, data, priority=priority, at=at, seq=seq)
    return bool((yield f"{_PUSH} RETURNING 1", row))


def build_row(
    agent_entity_id: str,
    event_id: str,
    type: InboxType,
    data: Any,
    *,
    priority: int,
    at: int | None = None,
    seq: int = 0,
) -> Sequence[Any]:
    """An event as a row, which `push_all` adds."""
    at = now_ms() if at is None else at
    return (agent_entity_id, event_id, type, priority, at, seq, json_text.encode_for_storage(data), at)


def add_rows(entries: Sequence[Sequence[Any]]) -> Program[None]:
    """Adds events, but for those that their agents were told of already."""
    if entries:
        yield _PUSH, RowBatch(entries)


def claim(
    agent_entity_id: str,
    claim: str,
    *,
    count: int,
    lease_ms: int,
    types: Sequence[str] = (),
    include_awaited: bool = True,
) -> Program[list[InboxEvent]]:
    """Takes the next events, in order: pending → processing until the lease ends. `awaited`: also results that runs of
    the agent wait for."""
    now = now_ms()
    only = f"AND type IN ({', '.join('?' * len(types))}) " if types else ""
    only += "" if include_awaited else _NOT_AWAITED
    rows = yield (
        "WITH picked AS MATERIALIZED (SELECT event_id FROM inbox WHERE agent_entity_id = ? AND status = 'pending' "
        f"AND available_at <= ? {only}ORDER BY priority, at, seq LIMIT ? {SKIP_LOCKED}) "
        "UPDATE inbox SET status = 'processing', claim = ?, lease_until = ?, attempts = attempts + 1 "
        "WHERE status = 'pending' AND agent_entity_id = ? AND event_id IN (SELECT event_id FROM picked) "
        f"RETURNING {_COLUMNS}, seq",
        (agent_entity_id, now, *types, count, claim, now + lease_ms, agent_entity_id),
    )
    rows = sorted(rows, key=lambda row: (row[5], row[3], row[9]))
    return [_event(row) for row in rows]


def acknowledge(agent_entity_id: str, claim: str | None, event_ids: Sequence[str]) -> Program[list[str]]:
    """processing → processed, for those that this claim still holds (any claim, if none is named)."""
    return (yield from _finish(agent_entity_id, claim, event_ids))


def _finish(agent_entity_id: str, claim: str | None, event_ids: Sequence[str]) -> Program[list[str]]:
    done: list[str] = []
    for event_id in event_ids:
        rows = yield (
            "UPDATE inbox SET status = 'processed', lease_until = NULL, claim = NULL "
            "WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' "
            "AND claim = COALESCE(?, claim) RETURNING event_id",
            (agent_entity_id, event_id, claim),
        )
        done += [row[0] for row in rows]
    return done


def release(
    agent_entity_id: str, claim: str | None, event_ids: Sequence[str], *, error: str | None
) -> Program[list[InboxEvent]]:
    """processing → pending after a while that grows with each attempt; after the last one → failed."""
    returned: list[InboxEvent] = []
    for event_id in event_ids:
        rows = yield (
            f"SELECT {_COLUMNS}, claim FROM inbox WHERE agent_entity_id = ? AND event_id = ? "
            "AND status = 'processing' AND claim = COALESCE(?, claim)",
            (agent_entity_id, event_id, claim),
        )
        for row in rows:
            returned += yield from _return(_event(row), row[9], error)
    return returned


def undo_claim(agent_entity_id: str, claim: str, event_ids: Sequence[str]) -> Program[None]:
    """processing → pending at once, as if they had not been taken: it is not their turn yet."""
    for event_id in event_ids:
        yield (
            "UPDATE inbox SET status = 'pending', lease_until = NULL, claim = NULL, attempts = attempts - 1 "
            "WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' AND claim = ?",
            (agent_entity_id, event_id, claim),
        )


def transfer_claim(agent_entity_id: str, claim: str, event_ids: Sequence[str], to: str) -> Program[None]:
    """Another claim holds them from now on."""
    for event_id in event_ids:
        yield (
            "UPDATE inbox SET claim = ? WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' "
            "AND claim = ?",
            (to, agent_entity_id, event_id, claim),
        )


def list_claimed(agent_entity_id: str, claim: str) -> Program[list[str]]:
    """The events that a claim holds."""
    rows = yield (
        "SELECT event_id FROM inbox WHERE claim = ? AND status = 'processing' AND agent_entity_id = ? "
        "ORDER BY event_id",
        (claim, agent_entity_id),
    )
    return [row[0] for row in rows]


def list_waiting(agent_entity_id: str, *, limit: int) -> Program[tuple[list[InboxEvent], int]]:
    """The oldest events that wait and can be taken, and how many there are; but for results that runs wait for."""
    now = now_ms()
    rows = yield (
        f"SELECT {_COLUMNS} FROM inbox WHERE agent_entity_id = ? AND status = 'pending' AND available_at <= ? "
        f"{_NOT_AWAITED}ORDER BY at, seq LIMIT ?",
        (agent_entity_id, now, limit),
    )
    events = [_event(row) for row in rows]
    if len(events) < limit:
        return events, len(events)
    rows = yield (
        "SELECT COUNT(*) FROM inbox WHERE agent_entity_id = ? AND status = 'pending' AND available_at <= ? "
        f"{_NOT_AWAITED}",
        (agent_entity_id, now),
    )
    return events, rows[0][0]


def release_expired(*, limit: int = 100) -> Program[list[InboxEvent]]:
    """What was taken by someone who went away: back to pending, or failed, when its lease has ended."""
    rows = yield (
        f"SELECT {_COLUMNS}, claim FROM inbox WHERE status = 'processing' AND lease_until < ? LIMIT ? {SKIP_LOCKED}",
        (now_ms(), limit),
    )
    returned: list[InboxEvent] = []
    for row in rows:
        returned += yield from _return(_event(row), row[9], "it was taken, and nobody said how it ended")
    return returned


def retry(agent_entity_id: str, event_id: str) -> Program[bool]:
    """failed → pending, from the first attempt: an operator asked for it."""
    rows = yield (
        "UPDATE inbox SET status = 'pending', attempts = 0, available_at = ?, error = NULL "
        "WHERE agent_entity_id = ? AND event_id = ? AND status = 'failed' RETURNING 1",
        (now_ms(), agent_entity_id, event_id),
    )
    return bool(rows)


def list_events(agent_entity_id: str, *, status: str | None = None, limit: int = 100) -> Program[list[InboxEvent]]:
    """Events in the order in which they are looked at; of one status, if it is named."""
    parts = [part for name, part in _PARTS.items() if status is None or (status == "pending") is (name == "pending")]
    only, values = ("AND status = ? ", (status,)) if status is not None else ("", ())
    found: list[Row] = []
    for part in parts:
        found += yield (
            f"SELECT {_COLUMNS}, seq FROM inbox WHERE agent_entity_id = ? AND {part} {only}"
            "ORDER BY priority, at, seq LIMIT ?",
            (agent_entity_id, *values, limit),
        )
    found.sort(key=lambda row: (row[5], row[3], row[9]))
    return [_event(row) for row in found[:limit]]


def find(agent_entity_id: str, event_id: str) -> Program[InboxEvent | None]:
    rows = yield (
        f"SELECT {_COLUMNS} FROM inbox WHERE agent_entity_id = ? AND event_id = ?",
        (agent_entity_id, event_id),
    )
    return _event(rows[0]) if rows else None


def delete_all(agent_entity_id: str) -> Program[None]:
    """Removes everything."""
    for part in _PARTS.values():
        yield f"DELETE FROM inbox WHERE agent_entity_id = ? AND {part}", (agent_entity_id,)


def count_pending(agent_entity_id: str) -> Program[int]:
    """How many events wait, but for results that runs wait for."""
    rows = yield (
        f"SELECT COUNT(*) FROM inbox WHERE agent_entity_id = ? AND status = 'pending' {_NOT_AWAITED}",
        (agent_entity_id,),
    )
    return rows[0][0]


def find_next_available(agent_entity_id: str, *, after: int = 0) -> Program[int | None]:
    """When the next event can be taken, after a time that is past; None where none waits."""
    rows = yield (
        "SELECT MIN(available_at) FROM inbox WHERE agent_entity_id = ? AND status = 'pending' AND available_at > ?",
        (agent_entity_id, after),
    )
    return rows[0][0]


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Removes processed events older than a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM inbox WHERE (agent_entity_id, event_id) IN (SELECT agent_entity_id, event_id FROM inbox "
        "WHERE status = 'processed' AND at < ? ORDER BY at LIMIT ?) RETURNING event_id",
        (before, limit),
    )
    return len(rows)


def _return(event: InboxEvent, claim: str, error: str | None) -> Program[list[InboxEvent]]:
    again = event.attempts < MAX_ATTEMPTS
    delay = min(_FIRST_DELAY << max(event.attempts - 1, 0), _LONGEST_DELAY)
    rows = yield (
        "UPDATE inbox SET status = ?, available_at = ?, lease_until = NULL, claim = NULL, error = ? "
        f"WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' AND claim = ? RETURNING {_COLUMNS}",
        (
            "pending" if again else "failed",
            now_ms() + delay,
            error,
            event.agent_entity_id,
            event.event_id,
            claim,
        ),
    )
    return [_event(row) for row in rows]


def _event(row: Row) -> InboxEvent:
    return InboxEvent(
        event_id=row[0],
        agent_entity_id=row[1],
        type=row[2],
        timestamp=row[3],
        data=json_text.decode(row[4]),
        priority=row[5],
        status=row[6],
        attempts=row[7],
        error=row[8],
    )
