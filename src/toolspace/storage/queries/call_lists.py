"""SQL programs that list calls by filters, newest first. Each reads few rows, however many calls there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from toolspace.core.stored_records import CallRecord
from toolspace.storage.database import Program
from toolspace.storage.queries.calls import select_calls
from toolspace.storage.queries.statement_builder import placeholders, where_clause, without_index

_Condition = tuple[str, Any]


def list_calls(
    *,
    statuses: Sequence[str] = (),
    run_id: str | None = None,
    agent_entity_id: str | None = None,
    space_id: str | None = None,
    member: str | None = None,
    tool_name: str | None = None,
    principal: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[CallRecord]]:
    """Calls, newest first. `member`: only visible ones in spaces of this entity. `before`: older than this call."""
    filters: list[_Condition] = [
        ("run_id = ?", run_id),
        ("agent_entity_id = ?", agent_entity_id),
        ("space_id = ?", space_id),
        ("tool_name = ?", tool_name),
        ("principal = ?", principal),
    ]
    older: _Condition = ("(created_at, call_id) < (SELECT created_at, call_id FROM calls WHERE call_id = ?)", before)
    if member is None and all(value is None for _, value in filters):
        return (yield from _list_by_status(statuses, older, limit))
    has_status = f"{without_index('status')} IN ({placeholders(statuses)})", list(statuses) or None
    if member is not None and run_id is None and space_id is None:
        return (yield from _list_of_member(member, [*filters, has_status, older], before, limit))
    of_member = "exposure = 'full' AND space_id IN (SELECT space_id FROM members WHERE entity_id = ?)", member
    return (yield from _select_newest([*filters, has_status, of_member, older], limit))


def _list_by_status(statuses: Sequence[str], older: _Condition, limit: int) -> Program[list[CallRecord]]:
    """The newest calls of each status, merged: the index has the calls of one status in order, not those of several."""
    calls: list[CallRecord] = []
    for status in dict.fromkeys(statuses) or (None,):
        calls += yield from _select_newest([("status = ?", status), older], limit)
    return _keep_newest(calls, limit)


def _list_of_member(
    member: str, conditions: Sequence[_Condition], before: str | None, limit: int
) -> Program[list[CallRecord]]:
    """The newest visible calls in the spaces of an entity.

    The first statement finds the newest call of each space. Then the spaces are read, the one with the newest call
    first, until no other has a newer call than those of the page: at most one space for each call of the page.
    """
    older = "" if before is None else "AND calls.created_at <= (SELECT created_at FROM calls WHERE call_id = ?) "
    rows = yield (
        "SELECT space_id, (SELECT MAX(calls.created_at) FROM calls WHERE calls.space_id = members.space_id "
        f"AND calls.exposure = 'full' {older}) FROM members WHERE entity_id = ?",
        (member,) if before is None else (before, member),
    )
    calls: list[CallRecord] = []
    for newest_at, space_id in sorted(((row[1], row[0]) for row in rows if row[1] is not None), reverse=True):
        if len(calls) == limit and newest_at < calls[-1].created_at:
            break
        in_space = ("exposure = 'full' AND space_id = ?", space_id)
        calls = _keep_newest(calls + (yield from _select_newest([in_space, *conditions], limit)), limit)
    return calls


def _select_newest(conditions: Sequence[_Condition], limit: int) -> Program[list[CallRecord]]:
    clause, values = where_clause(*conditions)
    return select_calls(f"{clause}ORDER BY created_at DESC, call_id DESC LIMIT ?", *values, limit)


def _keep_newest(calls: Sequence[CallRecord], limit: int) -> list[CallRecord]:
    return sorted(calls, key=lambda call: (call.created_at, call.call_id), reverse=True)[:limit]


def has_foreign_calls(run_id: str, entity_id: str) -> Program[bool]:
    """Whether a run has a call in a space that an entity is not a member of."""
    foreign = "space_id IS NOT NULL AND space_id NOT IN (SELECT space_id FROM members WHERE entity_id = ?)"
    return bool((yield f"SELECT 1 FROM calls WHERE run_id = ? AND {foreign} LIMIT 1", (run_id, entity_id)))
