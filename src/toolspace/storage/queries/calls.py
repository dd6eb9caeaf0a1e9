"""Programs for tool calls. Every move is one compare-and-set on the row: whoever loses a race sees what the winner did.

A call that someone else answers waits (`waiting`: its caller is there; `pending`: it goes to the inbox) until it is
resolved, expires or is canceled. `delivery` says which way the result went, and `delivered_at` that it arrived: what
was on its way to a process that died goes to the inbox instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import CallRecord, CallStatus, ExecutionTarget, ResultSource, Visibility
from toolspace.storage.database import SKIP_LOCKED, Program, Row, long_running

_COLUMNS = (
    "call_id, run_id, seq, agent_entity_id, space_id, tool_name, args, execution_type, execution_target, visible, "
    "is_async, status, result, is_error, error_kind, source, message_id, created_at, resolved_at, expires_at"
)
_OPEN = "('waiting', 'pending')"


_RESOLVE_SIMPLY = {
    (in_run, in_space): (
        "UPDATE calls SET delivery = CASE status WHEN 'waiting' THEN 'inline' ELSE 'inbox' END, status = 'resolved', "
        "result = ?, is_error = ?, source = ?, submission = ?, resolved_at = ? "
        f"WHERE call_id = ? AND status IN {_OPEN} AND execution_target <> 'server' AND pauses = 0"
        f"{' AND run_id = ?' if in_run else ''}{' AND space_id = ?' if in_space else ''} "
        f"RETURNING {_COLUMNS}, exposure, delivery, pauses"
    )
    for in_run in (False, True)
    for in_space in (False, True)
}
"""Written once: results come in by the thousand, and SQLite finds a statement again by its text."""

_RESOLVE_KNOWN = {
    in_space: (
        "UPDATE calls SET delivery = ?, status = 'resolved', result = ?, is_error = ?, source = ?, submission = ?, "
        "resolved_at = ? WHERE call_id = ? AND status = ? AND created_at = ? "
        f"AND space_id {'= ?' if in_space else 'IS NULL'} RETURNING 1"
    )
    for in_space in (False, True)
}
"""What a call that is shown nowhere can lose while it is open is its status and its space. Nobody else has its id, and
had it been given again, it would be that of another time."""


class NewCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that begins."""

    call_id: str
    run_id: str | None
    agent_entity_id: str | None
    space_id: str | None
    tool_name: str
    args: Any
    execution_type: str
    execution_target: ExecutionTarget
    visible: bool
    is_async: bool = False
    exposure: Visibility
    status: CallStatus
    node_id: str
    created_at: int | None = None
    """When it was asked for, which its other times are counted from; without it when it is written down."""
    expires_at: int | None = None
    wait_until: int | None = None
    """Until when its caller waits."""
    due_at: int | None = None
    """When it answers itself."""
    pauses_run: bool = False
    """Whether its run waits for it."""


class CallTransition(msgspec.Struct, frozen=True):
    """A call that was moved, and what else its row said."""

    call: CallRecord
    exposure: Visibility
    delivery: str | None
    pauses_run: bool


def create(new: NewCall, *, seq: int, message_id: str | None) -> Program[CallRecord | None]:
    """None where the id is taken."""
    rows = yield (
        "INSERT INTO calls (call_id, run_id, seq, agent_entity_id, space_id, tool_name, args, execution_type, "
        "execution_target, visible, is_async, exposure, status, is_error, message_id, created_at, expires_at, "
        "wait_until, due_at, node_id, pauses) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?) "
        f"ON CONFLICT (call_id) DO NOTHING RETURNING {_COLUMNS}",
        (
            new.call_id,
            new.run_id,
            seq,
            new.agent_entity_id,
            new.space_id,
            new.tool_name,
            json_text.encode_for_storage(new.args),
            new.execution_type,
            new.execution_target,
            int(new.visible),
            int(new.is_async),
            new.exposure,
            new.status,
            message_id,
            new.created_at if new.created_at is not None else now_ms(),
            new.expires_at,
            new.wait_until,
            new.due_at,
            new.node_id,
            int(new.pauses_run),
        ),
    )
    return _call(rows[0]) if rows else None


def allocate_sequence_number(run_id: str) -> Program[tuple[int, str, str | None] | None]:
    """The next place among the calls of a run, and the run's status and space."""
    rows = yield (
        "UPDATE runs SET last_call_seq = last_call_seq + 1 WHERE id = ? RETURNING last_call_seq, status, space_id",
        (run_id,),
    )
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


def find(call_id: str) -> Program[CallRecord | None]:
    rows = yield f"SELECT {_COLUMNS} FROM calls WHERE call_id = ?", (call_id,)
    return _call(rows[0]) if rows else None


def find_for_caller(call_id: str) -> Program[tuple[CallRecord, bool] | None]:
    """A call, and whether its result went, or will go, to the inbox instead of to the caller who waited."""
    rows = yield f"SELECT {_COLUMNS}, delivery FROM calls WHERE call_id = ?", (call_id,)
    return (_call(rows[0]), rows[0][11] == "pending" or rows[0][20] == "inbox") if rows else None


def find_with_submission(call_id: str) -> Program[tuple[CallRecord, str | None, str | None, bool] | None]:
    """A call, under which key and by whom its result was given, and whether its run waits for it."""
    rows = yield f"SELECT {_COLUMNS}, submission, submitted_by, pauses FROM calls WHERE call_id = ?", (call_id,)
    return (_call(rows[0]), rows[0][20], rows[0][21], bool(rows[0][22])) if rows else None


def finish(
    call_id: str,
    *,
    status: CallStatus,
    result: Any,
    is_error: bool,
    error_kind: str | None,
    node_id: str | None = None,
) -> Program[CallTransition | None]:
    """running → completed, failed or canceled: a call that ran has ended, in this process if one is named."""
    rows = yield (
        "UPDATE calls SET status = ?, result = ?, is_error = ?, error_kind = ?, source = 'server', resolved_at = ? "
        "WHERE call_id = ? AND status = 'running' AND node_id = COALESCE(?, node_id) "
        f"RETURNING {_COLUMNS}, exposure, delivery, pauses",
        (status, json_text.encode_for_storage(result), int(is_error), error_kind, now_ms(), call_id, node_id),
    )
    return _moved(rows[0]) if rows else None


def resolve(
    call_id: str,
    *,
    result: Any,
    is_error: bool,
    source: ResultSource,
    submission: str | None,
    submitted_by: str | None,
) -> Program[CallTransition | None]:
    """waiting → resolved for the caller who waits, pending → resolved for the inbox. None where it was not open."""
    return (
        yield from _move(
            call_id,
            ("waiting", "pending"),
            "delivery = CASE status WHEN 'waiting' THEN 'inline' ELSE 'inbox' END, status = 'resolved', result = ?, "
            "is_error = ?, source = ?, submission = ?, submitted_by = ?, resolved_at = ?",
            (json_text.encode_for_storage(result), int(is_error), source, submission, submitted_by, now_ms()),
        )
    )


def resolve_directly(
    call_id: str,
    *,
    result: Any,
    is_error: bool,
    source: ResultSource,
    submission: str | None,
    run_id: str | None,
    space_id: str | None,
) -> Program[CallTransition | None]:
    """As `resolve`, at once, where nothing has to be looked at before: someone who may answer anything brings the
    result of a call that others execute, that no run waits for, and that is where they say. None otherwise."""
    said = [one for one in (run_id, space_id) if one is not None]
    rows = yield (
        _RESOLVE_SIMPLY[run_id is not None, space_id is not None],
        (json_text.encode_for_storage(result), int(is_error), source, submission, now_ms(), call_id, *said),
    )
    return _moved(rows[0]) if rows else None


def build_resolution(
    known: CallTransition, *, result: Any, is_error: bool, source: ResultSource, submission: str | None
) -> tuple[CallTransition, Sequence[Any]]:
    """As `resolve_simply`, of a call that is known from when it was begun, and shown nowhere: nothing of its row has to
    be read. Gives the call as it will be, and what `resolve_known` does for that."""
    call = known.call
    delivery, kept, now = (
        "inline" if call.status == "waiting" else "inbox",
        json_text.encode_for_storage(result),
        now_ms(),
    )
    resolved = msgspec.structs.replace(
        call, status="resolved", result=json_text.decode(kept), is_error=is_error, source=source, resolved_at=now
    )
    before = call.status, call.created_at, call.space_id
    return (
        CallTransition(resolved, known.exposure, delivery, pauses_run=False),
        (call.call_id, delivery, kept, int(is_error), source, submission, now, *before),
    )


def apply_resolution(resolution: Sequence[Any]) -> Program[bool]:
    """Resolves a call that is as it was known. False where it is not, and nothing was done."""
    call_id, delivery, result, is_error, source, submission, now, status, created_at, space_id = resolution
    values = delivery, result, is_error, source, submission, now, call_id, status, created_at
    space = () if space_id is None else (space_id,)
    return bool((yield _RESOLVE_KNOWN[space_id is not None], (*values, *space)))


def make_pending(call_id: str) -> Program[CallTransition | None]:
    """waiting → pending: its caller stopped waiting. None where it did not wait any more."""
    return (yield from _move(call_id, ("waiting",), "status = 'pending', wait_until = NULL", ()))


def end(
    call_id: str, status: CallStatus, *, error: str, error_kind: str, is_delivered: bool = False
) -> Program[CallTransition | None]:
    """waiting or pending → expired or canceled. `is_told`: whoever made the call needs no telling."""
    now = now_ms()
    return (
        yield from _move(
            call_id,
            ("waiting", "pending"),
            "delivery = CASE status WHEN 'waiting' THEN 'inline' ELSE 'inbox' END, status = ?, result = ?, "
            "is_error = 1, error_kind = ?, source = 'server', resolved_at = ?, delivered_at = ?",
            (status, json_text.encode_for_storage(error), error_kind, now, now if is_delivered else None),
        )
    )


def mark_delivered(call_ids: Sequence[str]) -> Program[None]:
    """The callers have the results in their hands."""
    if not call_ids:
        return
    marks = ", ".join("?" * len(call_ids))
    yield (
        f"UPDATE calls SET delivered_at = ? WHERE call_id IN ({marks}) AND delivery = 'inline' "
        "AND delivered_at IS NULL",
        (now_ms(), *call_ids),
    )


def claim_result(call_id: str) -> Program[bool]:
    """Whoever made a call asks for its result again: whether it is theirs, not an inbox's. Then it stays theirs."""
    rows = yield (
        "UPDATE calls SET delivered_at = COALESCE(delivered_at, ?) WHERE call_id = ? "
        "AND (delivery = 'inline' OR agent_entity_id IS NULL) RETURNING call_id",
        (now_ms(), call_id),
    )
    return bool(rows)


def redirect_to_inbox(call_id: str) -> Program[CallTransition | None]:
    """A result that never reached its caller goes to the inbox instead. None where it arrived."""
    rows = yield (
        "UPDATE calls SET delivery = 'inbox' WHERE call_id = ? AND delivery = 'inline' AND delivered_at IS NULL "
        f"RETURNING {_COLUMNS}, exposure, delivery, pauses",
        (call_id,),
    )
    return _moved(rows[0]) if rows else None


def is_inline(call_id: str) -> Program[bool]:
    """Whether the result went to the caller who waited."""
    rows = yield "SELECT 1 FROM calls WHERE call_id = ? AND delivery = 'inline'", (call_id,)
    return bool(rows)


def list_expired(*, limit: int) -> Program[list[str]]:
    """Open calls that are past their time."""
    rows = yield (
        f"SELECT call_id FROM calls WHERE status IN {_OPEN} AND expires_at <= ? ORDER BY expires_at LIMIT ?",
        (now_ms(), limit),
    )
    return [row[0] for row in rows]


def list_due(*, limit: int) -> Program[list[CallRecord]]:
    """Open calls that answer themselves by now."""
    rows = yield (
        f"SELECT {_COLUMNS} FROM calls WHERE status IN {_OPEN} AND due_at IS NOT NULL AND due_at <= ? "
        "ORDER BY due_at LIMIT ?",
        (now_ms(), limit),
    )
    return [_call(row) for row in rows]


def find_next_due() -> Program[int | None]:
    """When the next open call answers itself or expires."""
    rows = yield f"SELECT MIN(due_at) FROM calls WHERE status IN {_OPEN} AND due_at IS NOT NULL", ()
    dues = [rows[0][0]]
    rows = yield f"SELECT MIN(expires_at) FROM calls WHERE status IN {_OPEN}", ()
    dues.append(rows[0][0])
    return min((at for at in dues if at is not None), default=None)


def list_overdue(*, before: int, limit: int) -> Program[list[str]]:
    """Calls whose callers should have stopped waiting long ago, and did not say so."""
    rows = yield (
        "SELECT call_id FROM calls WHERE status = 'waiting' AND wait_until < ? LIMIT ?",
        (before, limit),
    )
    return [row[0] for row in rows]


def list_orphaned(node_ids: Sequence[str], *, limit: int) -> Program[list[tuple[str, str]]]:
    """What dead processes left: `(call id, status)` of calls that ran, waited, or were not delivered."""
    if not node_ids:
        return []
    marks = ", ".join("?" * len(node_ids))
    rows = yield (
        f"SELECT call_id, status FROM calls WHERE node_id IN ({marks}) AND (status IN ('running', 'waiting') "
        "OR (delivery = 'inline' AND delivered_at IS NULL)) "
        # Whoever goes on with a session sees to the calls of its run.
        "AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.run_id = calls.run_id) LIMIT ?",
        (*node_ids, limit),
    )
    return [(row[0], row[1]) for row in rows]


def adopt(call_id: str, node_id: str) -> Program[None]:
    """A call that runs is this process's: the one that ran it is gone, and it is made again here, or ended."""
    yield "UPDATE calls SET node_id = ? WHERE call_id = ? AND status = 'running'", (node_id, call_id)


def claim(worker_id: str, tools: Sequence[str], *, limit: int) -> Program[list[CallRecord]]:
    """Gives the oldest unclaimed external calls of these tools to one worker."""
    if not tools or limit <= 0:
        return []
    marks = ", ".join("?" * len(tools))
    rows = yield (
        f"WITH picked AS MATERIALIZED (SELECT call_id FROM calls WHERE status IN {_OPEN} AND tool_name IN ({marks}) "
        f"AND worker_id IS NULL AND execution_type = 'external' ORDER BY created_at, call_id LIMIT ? {SKIP_LOCKED}) "
        f"UPDATE calls SET worker_id = ? WHERE status IN {_OPEN} AND worker_id IS NULL "
        f"AND call_id IN (SELECT call_id FROM picked) RETURNING {_COLUMNS}",
        (*tools, limit, worker_id),
    )
    return sorted((_call(row) for row in rows), key=lambda call: (call.created_at, call.call_id))


def list_claimed(worker_id: str) -> Program[list[CallRecord]]:
    """Open calls that a worker took and has not answered."""
    rows = yield (
        f"SELECT {_COLUMNS} FROM calls WHERE status IN {_OPEN} AND worker_id = ? ORDER BY created_at, call_id",
        (worker_id,),
    )
    return [_call(row) for row in rows]


def release_claims(worker_id: str) -> Program[list[str]]:
    """A worker is gone: what it took is offered again. Says which tools that concerns."""
    rows = yield (
        f"UPDATE calls SET worker_id = NULL WHERE status IN {_OPEN} AND worker_id = ? RETURNING tool_name",
        (worker_id,),
    )
    return sorted({row[0] for row in rows})


def list_calls(
    *,
    statuses: Sequence[str] = (),
    run_id: str | None = None,
    agent_entity_id: str | None = None,
    space_id: str | None = None,
    member: str | None = None,
    tool_name: str | None = None,
    before: str | None = None,
    limit: int = 100,
) -> Program[list[CallRecord]]:
    """Calls, newest first. `member`: only visible ones in spaces that this entity is in."""
    wanted = {
        "run_id": run_id,
        "agent_entity_id": agent_entity_id,
        "space_id": space_id,
        "tool_name": tool_name,
    }
    given = {column: value for column, value in wanted.items() if value is not None}
    where = [f"{column} = ?" for column in given]
    values: list[Any] = list(given.values())
    if statuses:
        where.append(f"status IN ({', '.join('?' * len(statuses))})")
        values += statuses
    if member is not None:
        where.append("exposure = 'full' AND space_id IN (SELECT space_id FROM members WHERE entity_id = ?)")
        values.append(member)
    if before is not None:
        where.append("(created_at, call_id) < (SELECT created_at, call_id FROM calls WHERE call_id = ?)")
        values.append(before)
    condition = f"WHERE {' AND '.join(where)} " if where else ""
    rows = yield (
        f"SELECT {_COLUMNS} FROM calls {condition}ORDER BY created_at DESC, call_id DESC LIMIT ?",
        (*values, limit),
    )
    return [_call(row) for row in rows]


def list_of_run(run_id: str, *, after: int = 0, limit: int = 1000) -> Program[list[tuple[CallRecord, Visibility]]]:
    """The calls of a run in their order, and what others may see of each."""
    rows = yield (
        f"SELECT {_COLUMNS}, exposure FROM calls WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?",
        (run_id, after, limit),
    )
    return [(_call(row), row[20]) for row in rows]


def list_open_of_run(run_id: str) -> Program[list[str]]:
    """The calls of a run that have not ended."""
    rows = yield (
        "SELECT call_id FROM calls WHERE run_id = ? AND status IN ('running', 'waiting', 'pending')",
        (run_id,),
    )
    return [row[0] for row in rows]


def list_open_of_agent(agent_entity_id: str) -> Program[list[str]]:
    """Calls of an agent that someone else has to answer, in runs and outside."""
    rows = yield (
        f"SELECT call_id FROM calls WHERE agent_entity_id = ? AND status IN {_OPEN} ORDER BY call_id",
        (agent_entity_id,),
    )
    return [row[0] for row in rows]


def remove_from_space(space_id: str) -> Program[list[str]]:
    """Open calls are not in a space any more. Says which were."""
    rows = yield (
        f"UPDATE calls SET space_id = NULL WHERE space_id = ? AND status IN {_OPEN} RETURNING call_id",
        (space_id,),
    )
    return sorted(row[0] for row in rows)


def lock_paused_run(call_id: str) -> Program[None]:
    """Takes hold of the run that waits for a call, before the call is moved: whoever ends a run does it in that order,
    and of two calls that end at once the second sees the end of the first, and does not leave the run waiting."""
    yield (
        "UPDATE runs SET steps = steps WHERE id = (SELECT run_id FROM calls WHERE call_id = ? AND pauses = 1)",
        (call_id,),
    )


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Removes calls that ended before a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM calls WHERE call_id IN (SELECT call_id FROM calls WHERE created_at < ? AND resolved_at < ? "
        "AND status NOT IN ('running', 'waiting', 'pending') ORDER BY created_at LIMIT ?) RETURNING call_id",
        (before, before, limit),
    )
    return len(rows)


def has_pausing_calls(run_id: str) -> Program[bool]:
    """Whether a run still waits for one of its calls. To be asked by who holds the run."""
    rows = yield (
        f"SELECT 1 FROM calls WHERE run_id = ? AND pauses = 1 AND status IN {_OPEN} LIMIT 1",
        (run_id,),
    )
    return bool(rows)


def _move(call_id: str, before: Sequence[str], change: str, values: Sequence[Any]) -> Program[CallTransition | None]:
    marks = ", ".join("?" * len(before))
    rows = yield (
        f"UPDATE calls SET {change} WHERE call_id = ? AND status IN ({marks}) "
        f"RETURNING {_COLUMNS}, exposure, delivery, pauses",
        (*values, call_id, *before),
    )
    return _moved(rows[0]) if rows else None


def _moved(row: Row) -> CallTransition:
    return CallTransition(_call(row), row[20], row[21], bool(row[22]))


def _call(row: Row) -> CallRecord:
    return CallRecord(
        call_id=row[0],
        run_id=row[1],
        seq=row[2],
        agent_entity_id=row[3],
        space_id=row[4],
        tool_name=row[5],
        args=json_text.decode(row[6]),
        execution_type=row[7],
        execution_target=row[8],
        visible=bool(row[9]),
        is_async=bool(row[10]),
        status=row[11],
        result=None if row[12] is None else json_text.decode(row[12]),
        is_error=bool(row[13]),
        error_kind=row[14],
        source=row[15],
        message_id=row[16],
        created_at=row[17],
        resolved_at=row[18],
        expires_at=row[19],
    )
