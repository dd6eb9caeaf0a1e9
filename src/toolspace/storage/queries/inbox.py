"""SQL programs for the inboxes of agents: events are added, claimed under a lease, then acknowledged or released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import InboxEvent, InboxType
from toolspace.storage.database import SKIP_LOCKED, Program, Row, RowBatch, long_running
from toolspace.storage.queries.columns import Columns, placeholders

HUMAN_MESSAGE, TOOL_RESULT, PLAN_OR_SERVICE, AGENT_MESSAGE = range(4)
"""Priorities: an agent gets the lowest number first."""
MAX_ATTEMPTS: Final = 5
_FIRST_DELAY, _LONGEST_DELAY = 1_000, 60_000
"""Milliseconds before a released event may be claimed again; each attempt doubles them."""

_EVENT = Columns(InboxEvent, names={"timestamp": "at"}, json=("data",))

NEW_ROW_COLUMNS: Final = ("agent_entity_id", "event_id", "type", "priority", "at", "seq", "data", "available_at")
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

_BY_INDEX: Final = {"pending": "status = 'pending'", "claimed": "status <> 'pending'"}
"""The two parts of an inbox that each have an index by agent."""


def insert_rows_from(select: str) -> str:
    """An INSERT of the rows of a SELECT of `NEW_ROW_COLUMNS`; it ends with a WHERE clause, as SQLite's syntax needs."""
    return f"{_INSERT_INTO} {select} {_IF_NEW}"


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
    """Adds an event. False if the inbox has it already. `seq` orders events of the same moment."""
    row = build_row(agent_entity_id, event_id, type, data, priority=priority, at=at, seq=seq)
    return bool((yield f"{_INSERT} RETURNING 1", row))


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
    """The row of an event, for `add_rows`."""
    at = now_ms() if at is None else at
    return agent_entity_id, event_id, type, priority, at, seq, json_text.encode_for_storage(data), at


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
) -> Program[list[InboxEvent]]:
    """Claims the next events, in order: pending → processing until the lease ends.

    `include_awaited`: also the results that runs of the agent wait for.
    """
    now = now_ms()
    condition = f"AND type IN ({placeholders(types)}) " if types else ""
    condition += "" if include_awaited else _NOT_AWAITED
    rows = yield (
        "WITH picked AS MATERIALIZED (SELECT event_id FROM inbox WHERE agent_entity_id = ? AND status = 'pending' "
        f"AND available_at <= ? {condition}ORDER BY priority, at, seq LIMIT ? {SKIP_LOCKED}) "
        "UPDATE inbox SET status = 'processing', claim = ?, lease_until = ?, attempts = attempts + 1 "
        "WHERE status = 'pending' AND agent_entity_id = ? AND event_id IN (SELECT event_id FROM picked) "
        f"RETURNING {_EVENT.sql}, seq",
        (agent_entity_id, now, *types, count, claim, now + lease_ms, agent_entity_id),
    )
    return _in_order(rows)


def acknowledge(agent_entity_id: str, claim: str | None, event_ids: Sequence[str]) -> Program[list[str]]:
    """processing → processed, for events of this claim; of any claim if it is None. Returns their ids."""
    processed: list[str] = []
    for event_id in event_ids:
        rows = yield (
            "UPDATE inbox SET status = 'processed', lease_until = NULL, claim = NULL "
            "WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' "
            "AND claim = COALESCE(?, claim) RETURNING event_id",
            (agent_entity_id, event_id, claim),
        )
        processed += [row[0] for row in rows]
    return processed


def release(
    agent_entity_id: str, claim: str | None, event_ids: Sequence[str], *, error: str | None
) -> Program[list[InboxEvent]]:
    """processing → pending after a delay that grows with each attempt; after the last attempt → failed."""
    released: list[InboxEvent] = []
    for event_id in event_ids:
        rows = yield (
            f"SELECT {_EVENT.sql}, claim FROM inbox WHERE agent_entity_id = ? AND event_id = ? "
            "AND status = 'processing' AND claim = COALESCE(?, claim)",
            (agent_entity_id, event_id, claim),
        )
        released += yield from _release_rows(rows, error)
    return released


def release_expired(*, limit: int = 100) -> Program[list[InboxEvent]]:
    """As `release`, for events whose lease has ended: whoever claimed them is gone."""
    rows = yield (
        f"SELECT {_EVENT.sql}, claim FROM inbox WHERE status = 'processing' AND lease_until < ? LIMIT ? {SKIP_LOCKED}",
        (now_ms(), limit),
    )
    return (
        yield from _release_rows(rows, "it was claimed, but neither acknowledged nor released before the lease ended")
    )


def undo_claim(agent_entity_id: str, claim: str, event_ids: Sequence[str]) -> Program[None]:
    """processing → pending at once, as if they had not been claimed: it is not their turn yet."""
    for event_id in event_ids:
        yield (
            "UPDATE inbox SET status = 'pending', lease_until = NULL, claim = NULL, attempts = attempts - 1 "
            "WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' AND claim = ?",
            (agent_entity_id, event_id, claim),
        )


def transfer_claim(agent_entity_id: str, old_claim: str, event_ids: Sequence[str], new_claim: str) -> Program[None]:
    """Another claim holds these events from now on."""
    for event_id in event_ids:
        yield (
            "UPDATE inbox SET claim = ? WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' "
            "AND claim = ?",
            (new_claim, agent_entity_id, event_id, old_claim),
        )


def retry(agent_entity_id: str, event_id: str) -> Program[bool]:
    """failed → pending, from the first attempt: an operator asked for it."""
    rows = yield (
        "UPDATE inbox SET status = 'pending', attempts = 0, available_at = ?, error = NULL "
        "WHERE agent_entity_id = ? AND event_id = ? AND status = 'failed' RETURNING 1",
        (now_ms(), agent_entity_id, event_id),
    )
    return bool(rows)


def delete_all(agent_entity_id: str) -> Program[None]:
    for condition in _BY_INDEX.values():
        yield f"DELETE FROM inbox WHERE agent_entity_id = ? AND {condition}", (agent_entity_id,)


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` processed events older than a time; returns how many."""
    rows = yield (
        "DELETE FROM inbox WHERE (agent_entity_id, event_id) IN (SELECT agent_entity_id, event_id FROM inbox "
        "WHERE status = 'processed' AND at < ? ORDER BY at LIMIT ?) RETURNING event_id",
        (before, limit),
    )
    return len(rows)


def find(agent_entity_id: str, event_id: str) -> Program[InboxEvent | None]:
    rows = yield (
        f"SELECT {_EVENT.sql} FROM inbox WHERE agent_entity_id = ? AND event_id = ?",
        (agent_entity_id, event_id),
    )
    return _EVENT.decode_first(rows)


def list_events(agent_entity_id: str, *, status: str | None = None, limit: int = 100) -> Program[list[InboxEvent]]:
    """Events in the order in which they are claimed; only those of one status, if it is given."""
    condition, values = ("AND status = ? ", (status,)) if status is not None else ("", ())
    rows: list[Row] = []
    for part, by_index in _BY_INDEX.items():
        if status is None or (status == "pending") is (part == "pending"):
            rows += yield (
                f"SELECT {_EVENT.sql}, seq FROM inbox WHERE agent_entity_id = ? AND {by_index} {condition}"
                "ORDER BY priority, at, seq LIMIT ?",
                (agent_entity_id, *values, limit),
            )
    return _in_order(rows)[:limit]


def list_claimed(agent_entity_id: str, claim: str) -> Program[list[str]]:
    """The ids of the events that a claim holds."""
    rows = yield (
        "SELECT event_id FROM inbox WHERE claim = ? AND status = 'processing' AND agent_entity_id = ? "
        "ORDER BY event_id",
        (claim, agent_entity_id),
    )
    return [row[0] for row in rows]


def list_waiting(agent_entity_id: str, *, limit: int) -> Program[tuple[list[InboxEvent], int]]:
    """The oldest events that can be claimed now, and how many there are; without results that runs wait for."""
    now = now_ms()
    where = f"WHERE agent_entity_id = ? AND status = 'pending' AND available_at <= ? {_NOT_AWAITED}"
    rows = yield f"SELECT {_EVENT.sql} FROM inbox {where}ORDER BY at, seq LIMIT ?", (agent_entity_id, now, limit)
    events = _EVENT.decode_all(rows)
    if len(events) < limit:
        return events, len(events)
    rows = yield f"SELECT COUNT(*) FROM inbox {where}", (agent_entity_id, now)
    return events, rows[0][0]


def count_pending(agent_entity_id: str) -> Program[int]:
    """How many events are pending, without results that runs wait for."""
    rows = yield (
        f"SELECT COUNT(*) FROM inbox WHERE agent_entity_id = ? AND status = 'pending' {_NOT_AWAITED}",
        (agent_entity_id,),
    )
    return rows[0][0]


def find_next_available(agent_entity_id: str, *, after: int = 0) -> Program[int | None]:
    """When the next pending event can be claimed, after a time; None if there is none."""
    rows = yield (
        "SELECT MIN(available_at) FROM inbox WHERE agent_entity_id = ? AND status = 'pending' AND available_at > ?",
        (agent_entity_id, after),
    )
    return rows[0][0]


def _release_rows(rows: Sequence[Row], error: str | None) -> Program[list[InboxEvent]]:
    released: list[InboxEvent] = []
    for row in rows:
        event, claim = _EVENT.decode(row), row[len(_EVENT)]
        delay = min(_FIRST_DELAY << max(event.attempts - 1, 0), _LONGEST_DELAY)
        updated = yield (
            "UPDATE inbox SET status = ?, available_at = ?, lease_until = NULL, claim = NULL, error = ? "
            "WHERE agent_entity_id = ? AND event_id = ? AND status = 'processing' AND claim = ? "
            f"RETURNING {_EVENT.sql}",
            (
                "pending" if event.attempts < MAX_ATTEMPTS else "failed",
                now_ms() + delay,
                error,
                event.agent_entity_id,
                event.event_id,
                claim,
            ),
        )
        released += _EVENT.decode_all(updated)
    return released


def _in_order(rows: Sequence[Row]) -> list[InboxEvent]:
    """The events of rows that end with `seq`, by priority, time and `seq`."""
    pairs = [(_EVENT.decode(row), row[len(_EVENT)]) for row in rows]
    pairs.sort(key=lambda pair: (pair[0].priority, pair[0].timestamp, pair[1]))
    return [event for event, _ in pairs]
