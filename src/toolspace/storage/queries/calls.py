"""SQL programs for tool calls. Each change of status is one compare-and-set: of several writers, exactly one succeeds.

A call whose result someone else submits is open: `waiting` while its caller waits, `pending` when the result will go to
the inbox. It ends as resolved, expired or cancelled. `call_delivery.py` has the queries about how results arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import msgspec

from toolspace.core import json_text
from toolspace.core.stored_records import OPEN_CALL, CallRecord, CallStatus, ExecutionTarget, ResultSource, Visibility
from toolspace.storage.database import SKIP_LOCKED, Program, current_time, long_running
from toolspace.storage.queries.statement_builder import (
    Table,
    delete_selected,
    first_column,
    first_value,
    has_changed,
    insert_into,
    json_or_null,
    placeholders,
)

OPEN: Final = "('waiting', 'pending')"
_ACTIVE: Final = "('running', 'waiting', 'pending')"


class NewCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call that starts."""

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
    visibility: Visibility
    status: CallStatus
    node_id: str
    created_at: int | None = None
    """When it was requested: its other times count from then. None: when it is stored."""
    expires_at: int | None = None
    wait_until: int | None = None
    """Until when its caller waits."""
    due_at: int | None = None
    """When the timer of a `wait` tool resolves it."""
    pauses_run: bool = False
    """Whether its run waits for the result."""
    output_schema: Mapping[str, Any] | None = None
    """What its result must match. Stored if someone else submits the result."""
    principal: str | None = None
    """For whom it runs."""
    input_schema: Mapping[str, Any] | None = None
    """The schema of its arguments, for its events. Not stored."""
    announced_streams: tuple[str, ...] = ()
    """Streams that have its `tool.started` already. Not stored."""
    session_id: str | None = None
    """The session of the agent whose inbox gets a late result; None: the main session."""


class CallTransition(msgspec.Struct, frozen=True):
    """A call after a change of status, and the columns of its row that the record does not have."""

    call: CallRecord
    visibility: Visibility
    delivery: str | None
    pauses_run: bool
    session_id: str | None = None


_CALL = Table("calls", CallRecord, json=("args", "result", "output_schema"), flags=("visible", "is_async", "is_error"))
_COLUMN_NAMES: Final = {"visibility": "exposure", "pauses_run": "pauses"}
_UNSTORED_FIELDS: Final = frozenset(("input_schema", "announced_streams"))
_NEW_FIELDS: Final = tuple(field for field in NewCall.__struct_fields__ if field not in _UNSTORED_FIELDS)
_NEW_COLUMNS: Final = tuple(_COLUMN_NAMES.get(field, field) for field in _NEW_FIELDS)
_INSERT = (
    f"{insert_into('calls', (*_NEW_COLUMNS, 'seq', 'message_id', 'is_error'))} "
    f"ON CONFLICT (call_id) DO NOTHING RETURNING {_CALL.sql}"
)
_COLUMN_COUNT: Final = len(_CALL.columns)

# How a result is stored. Every statement that resolves a call is made of these: a result that arrives in the same
# moment as another, or over the batch writer of SQLite, fills the same columns.

_RESULT_COLUMNS: Final = ("result", "is_error", "source", "submission", "submitted_by", "client_id", "resolved_at")
REMEMBERED_COLUMNS: Final = ("status", "created_at", "space_id")
"""What may have changed since a process started a call that is shown nowhere. `created_at` tells a call from another
one that got the same id later."""
RESOLUTION_COLUMNS: Final = ("call_id", *_RESULT_COLUMNS, *REMEMBERED_COLUMNS)
_SET_DELIVERY: Final = "delivery = CASE status WHEN 'waiting' THEN 'inline' ELSE 'inbox' END"


def resolution_assignments(parameter: Callable[[str], str]) -> str:
    """The SET clause that resolves a call, with an SQL expression for the value of each column."""
    values = ", ".join(f"{column} = {parameter(column)}" for column in _RESULT_COLUMNS)
    return f"{_SET_DELIVERY}, status = 'resolved', {values}"


_RESOLVE: Final = f"UPDATE calls SET {resolution_assignments(lambda _: '?')} WHERE call_id = ? AND status IN {OPEN}"


def resolve(
    call_id: str,
    *,
    result: Any,
    is_error: bool,
    source: ResultSource,
    submission: str | None,
    submitted_by: str | None = None,
    client_id: str | None = None,
    error_kind: str | None = None,
    was_read: bool = True,
    run_id: str | None = None,
    space_id: str | None = None,
) -> Program[CallTransition | None]:
    """waiting → resolved for the caller, pending → resolved for the inbox. None if the call was not open.

    `run_id`, `space_id`: only if it is in this run or space. `was_read` is False for a submitter who may resolve any
    call, so that nothing was checked before: then None also if the call runs in the gateway, pauses its run, or has a
    schema for its result.
    """
    conditions = "" if was_read else " AND execution_target <> 'server' AND pauses = 0 AND output_schema IS NULL"
    places = [(column, value) for column, value in (("run_id", run_id), ("space_id", space_id)) if value is not None]
    update = _RESOLVE + conditions + "".join(f" AND {column} = ?" for column, _ in places)
    now = yield from current_time()
    values = _result_values(result, is_error, source, submission, submitted_by, client_id, now=now)
    if error_kind is not None:
        update = update.replace(" SET ", " SET error_kind = ?, ", 1)
        values = (error_kind, *values)
    return (yield from transition(update, *values, call_id, *(value for _, value in places)))


def build_resolution(
    remembered_call: CallTransition,
    *,
    result: Any,
    is_error: bool,
    source: ResultSource,
    submission: str | None,
    now: int,
    client_id: str | None = None,
) -> tuple[CallTransition, Sequence[Any]]:
    """The resolution of an open call that this process remembers, and that is shown nowhere: nothing has to be read.

    Returns the call as it will be, and the values of `RESOLUTION_COLUMNS`, which `apply_resolution` or the batch writer
    of SQLite writes.
    """
    call = remembered_call.call
    values = _result_values(result, is_error, source, submission, client_id=client_id, now=now)
    resolved_call = msgspec.structs.replace(
        call,
        status="resolved",
        result=json_text.decode(values[0]),
        is_error=is_error,
        source=source,
        client_id=client_id,
        resolved_at=values[-1],
    )
    delivery = "inline" if call.status == "waiting" else "inbox"
    row = call.call_id, *values, call.status, call.created_at, call.space_id
    transition = msgspec.structs.replace(remembered_call, call=resolved_call, delivery=delivery, pauses_run=False)
    return transition, row


def apply_resolution(resolution: Sequence[Any]) -> Program[bool]:
    """Resolves a call that is as it is remembered. Returns False, and writes nothing, if it is not."""
    call_id, *values, status, created_at, space_id = resolution
    in_space = "IS NULL" if space_id is None else "= ?"
    update = f"{_RESOLVE} AND status = ? AND created_at = ? AND space_id {in_space}"
    return has_changed(update, *values, call_id, status, created_at, *(() if space_id is None else (space_id,)))


def _result_values(
    result: Any,
    is_error: bool,
    source: ResultSource,
    submission: str | None,
    submitted_by: str | None = None,
    client_id: str | None = None,
    *,
    now: int,
) -> tuple[Any, ...]:
    """The values of `_RESULT_COLUMNS`."""
    return json_text.encode_for_storage(result), int(is_error), source, submission, submitted_by, client_id, now


# Other changes of one call


def create(new: NewCall, *, seq: int, message_id: str | None) -> Program[CallRecord | None]:
    """None if the id is in use."""
    now = yield from current_time()
    values = {field: getattr(new, field) for field in _NEW_FIELDS} | {
        "args": json_text.encode_for_storage(new.args),
        "output_schema": json_or_null(new.output_schema) if new.status in OPEN_CALL else None,
        "visible": int(new.visible),
        "is_async": int(new.is_async),
        "pauses_run": int(new.pauses_run),
        "created_at": new.created_at if new.created_at is not None else now,
    }
    rows = yield _INSERT, (*values.values(), seq, message_id, 0)
    return _CALL.decode(rows[0]) if rows else None


def allocate_sequence_number(run_id: str) -> Program[tuple[int, str, str | None] | None]:
    """The number of the next call of a run, and the run's status and space. None if there is no such run."""
    update = "UPDATE runs SET last_call_seq = last_call_seq + 1 WHERE id = ? RETURNING last_call_seq, status, space_id"
    rows = yield update, (run_id,)
    return (rows[0][0], rows[0][1], rows[0][2]) if rows else None


def finish(
    call_id: str,
    *,
    status: CallStatus,
    result: Any,
    is_error: bool,
    error_kind: str | None,
    node_id: str | None = None,
) -> Program[CallTransition | None]:
    """running → completed, failed or cancelled; only if it runs in the process `node_id`, if that is given."""
    update = (
        "UPDATE calls SET status = ?, result = ?, is_error = ?, error_kind = ?, source = 'server', resolved_at = ? "
        "WHERE call_id = ? AND status = 'running' AND node_id = COALESCE(?, node_id)"
    )
    now = yield from current_time()
    values = status, json_text.encode_for_storage(result), int(is_error), error_kind, now, call_id, node_id
    return (yield from transition(update, *values))


def make_pending(call_id: str) -> Program[CallTransition | None]:
    """waiting → pending: its caller stopped waiting. None if it was not waiting."""
    update = "UPDATE calls SET status = 'pending', wait_until = NULL WHERE call_id = ? AND status = 'waiting'"
    return transition(update, call_id)


def end(
    call_id: str, status: CallStatus, *, error: str, error_kind: str, is_delivered: bool = False
) -> Program[CallTransition | None]:
    """waiting or pending → expired or cancelled. `is_delivered`: the caller knows of it already."""
    now = yield from current_time()
    update = (
        f"UPDATE calls SET {_SET_DELIVERY}, status = ?, result = ?, is_error = 1, error_kind = CASE WHEN "
        "execution_type = 'approval' AND ? = 'timeout' THEN 'not_permitted' ELSE ? END, source = 'server', "
        f"resolved_at = ?, delivered_at = ? WHERE call_id = ? AND status IN {OPEN}"
    )
    text, delivered_at = json_text.encode_for_storage(error), now if is_delivered else None
    values = status, text, error_kind, error_kind, now, delivered_at, call_id
    return (yield from transition(update, *values))


def set_error_kind(call_id: str, error_kind: str) -> Program[None]:
    yield "UPDATE calls SET error_kind = ? WHERE call_id = ?", (error_kind, call_id)


def adopt(call_id: str, node_id: str) -> Program[None]:
    """This process takes over a running call of a dead one."""
    yield "UPDATE calls SET node_id = ? WHERE call_id = ? AND status = 'running'", (node_id, call_id)


def lock_paused_run(call_id: str) -> Program[None]:
    """Locks the run that a call pauses, before the call changes.

    Whoever ends a run locks in that order too. And of two calls that end at once, the second sees the end of the first,
    so that one of them lets the run continue.
    """
    yield (
        "UPDATE runs SET steps = steps WHERE id = (SELECT run_id FROM calls WHERE call_id = ? AND pauses = 1)",
        (call_id,),
    )


def remove_from_space(space_id: str) -> Program[list[str]]:
    """Takes the open calls out of a space; returns their ids."""
    update = f"UPDATE calls SET space_id = NULL WHERE space_id = ? AND status IN {OPEN} RETURNING call_id"
    return sorted((yield from first_column(update, space_id)))


@long_running
def delete_old(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` calls that ended before a time; returns how many."""
    clauses = f"WHERE created_at < ? AND resolved_at < ? AND status NOT IN {_ACTIVE} ORDER BY created_at LIMIT ?"
    return len((yield from delete_selected("calls", "call_id", clauses, before, before, limit)))


# Claims of workers


def claim(worker_id: str, tools: Sequence[str], *, limit: int) -> Program[list[CallRecord]]:
    """Gives the oldest unclaimed external calls of these tools to one worker."""
    if not tools or limit <= 0:
        return []
    rows = yield (
        f"WITH picked AS MATERIALIZED (SELECT call_id FROM calls WHERE status IN {OPEN} "
        f"AND tool_name IN ({placeholders(tools)}) AND worker_id IS NULL AND execution_type = 'external' "
        f"ORDER BY created_at, call_id LIMIT ? {SKIP_LOCKED}) "
        f"UPDATE calls SET worker_id = ? WHERE status IN {OPEN} AND worker_id IS NULL "
        f"AND call_id IN (SELECT call_id FROM picked) RETURNING {_CALL.sql}",
        (*tools, limit, worker_id),
    )
    return sorted(_CALL.decode_all(rows), key=lambda call: (call.created_at, call.call_id))


def list_claimed(worker_id: str) -> Program[list[CallRecord]]:
    """The open calls that a worker has claimed."""
    return _CALL.select(f"WHERE status IN {OPEN} AND worker_id = ? ORDER BY created_at, call_id", worker_id)


def release_claims(worker_id: str, *, except_calls: Sequence[str] = ()) -> Program[list[str]]:
    """The open calls of a worker may be claimed again; returns the names of their tools."""
    condition = f" AND call_id NOT IN ({placeholders(except_calls)})" if except_calls else ""
    update = (
        f"UPDATE calls SET worker_id = NULL WHERE status IN {OPEN} AND worker_id = ?{condition} RETURNING tool_name"
    )
    return sorted(set((yield from first_column(update, worker_id, *except_calls))))


# One call


def find(call_id: str) -> Program[CallRecord | None]:
    return _CALL.find("WHERE call_id = ?", call_id)


def find_origin(call_id: str) -> Program[tuple[str | None, str | None]]:
    """For whom a call runs, and the process that opened it; None if that is not stored."""
    rows = yield "SELECT principal, node_id FROM calls WHERE call_id = ?", (call_id,)
    return (rows[0][0], rows[0][1]) if rows else (None, None)


def find_for_caller(call_id: str) -> Program[tuple[CallRecord, bool] | None]:
    """A call, and whether its result went or will go to the inbox, not to the caller that waited."""
    rows = yield f"SELECT {_CALL.sql}, delivery FROM calls WHERE call_id = ?", (call_id,)
    if not rows:
        return None
    call = _CALL.decode(rows[0])
    return call, call.status == "pending" or rows[0][_COLUMN_COUNT] == "inbox"


def find_with_submission(call_id: str) -> Program[tuple[CallRecord, str | None, str | None, bool] | None]:
    """A call, the key and the submitter of its result, and whether it pauses its run."""
    rows = yield f"SELECT {_CALL.sql}, submission, submitted_by, pauses FROM calls WHERE call_id = ?", (call_id,)
    if not rows:
        return None
    *_, submission, submitted_by, pauses = rows[0]
    return _CALL.decode(rows[0]), submission, submitted_by, bool(pauses)


def is_inline(call_id: str) -> Program[bool]:
    """Whether the result went to the caller that waited."""
    return bool((yield "SELECT 1 FROM calls WHERE call_id = ? AND delivery = 'inline'", (call_id,)))


def has_pausing_calls(run_id: str) -> Program[bool]:
    """Whether a run still waits for one of its calls. The asking transaction holds the lock of the run."""
    rows = yield f"SELECT 1 FROM calls WHERE run_id = ? AND pauses = 1 AND status IN {OPEN} LIMIT 1", (run_id,)
    return bool(rows)


def list_pausing(run_id: str) -> Program[list[str]]:
    """The ids of the open calls that a run waits for."""
    return first_column(f"SELECT call_id FROM calls WHERE run_id = ? AND pauses = 1 AND status IN {OPEN}", run_id)


# Lists of calls


def select_calls(clauses: str, *values: Any) -> Program[list[CallRecord]]:
    """The calls of a SELECT with these clauses. For `call_lists` alone."""
    return _CALL.select(clauses, *values)


def count_open(principal: str, *, limit: int) -> Program[int]:
    """How many calls of a principal are open: someone else submits their results. Counts up to `limit`."""
    open_calls = f"SELECT 1 FROM calls WHERE principal = ? AND status IN {OPEN} LIMIT ?"
    return (yield from first_value(f"SELECT COUNT(*) FROM ({open_calls}) AS open_calls", principal, limit))


def list_of_run(run_id: str, *, after: int = 0, limit: int = 1000) -> Program[list[tuple[CallRecord, Visibility]]]:
    """The calls of a run in their order, and what others may see of each."""
    select = f"SELECT {_CALL.sql}, exposure FROM calls WHERE run_id = ? AND seq > ? ORDER BY seq LIMIT ?"
    rows = yield select, (run_id, after, limit)
    return [(_CALL.decode(row), row[_COLUMN_COUNT]) for row in rows]


def list_stored(call_ids: Sequence[str]) -> Program[list[str]]:
    """Those of the ids that are in use."""
    return first_column(f"SELECT call_id FROM calls WHERE call_id IN ({placeholders(call_ids)})", *call_ids)


def list_open_of_run(run_id: str) -> Program[list[str]]:
    """The ids of the calls of a run that have not ended."""
    return first_column(f"SELECT call_id FROM calls WHERE run_id = ? AND status IN {_ACTIVE}", run_id)


def list_open_of_agent(agent_entity_id: str) -> Program[list[str]]:
    """The ids of an agent's open calls, in runs and outside."""
    select = f"SELECT call_id FROM calls WHERE agent_entity_id = ? AND status IN {OPEN} ORDER BY call_id"
    return first_column(select, agent_entity_id)


# What is due: for the sweeper


def list_expired(*, limit: int) -> Program[list[CallRecord]]:
    """The open calls that are past their expiry."""
    now = yield from current_time()
    return (
        yield from _CALL.select(f"WHERE status IN {OPEN} AND expires_at <= ? ORDER BY expires_at LIMIT ?", now, limit)
    )


def list_due(*, limit: int) -> Program[list[CallRecord]]:
    """The open calls whose timer has ended."""
    conditions = f"status IN {OPEN} AND due_at IS NOT NULL AND due_at <= ?"
    now = yield from current_time()
    return (yield from _CALL.select(f"WHERE {conditions} ORDER BY due_at LIMIT ?", now, limit))


def find_next_due() -> Program[int | None]:
    """When the next timer of an open call ends, or the next open call expires."""
    timer = yield from first_value(f"SELECT MIN(due_at) FROM calls WHERE status IN {OPEN} AND due_at IS NOT NULL")
    expiry = yield from first_value(f"SELECT MIN(expires_at) FROM calls WHERE status IN {OPEN}")
    return min((at for at in (timer, expiry) if at is not None), default=None)


def list_overdue(*, before: int, limit: int) -> Program[list[str]]:
    """The ids of waiting calls whose callers should have stopped waiting before a time, and did not say so."""
    conditions = "status = 'waiting' AND wait_until IS NOT NULL AND wait_until < ?"
    return first_column(f"SELECT call_id FROM calls WHERE {conditions} LIMIT ?", before, limit)


def list_orphaned(node_ids: Sequence[str], *, limit: int) -> Program[list[tuple[str, str]]]:
    """`(call id, status)` of calls of dead processes that were running, waiting, or not delivered.

    Not the calls of a session's run: the process that takes over the session handles those.
    """
    if not node_ids:
        return []
    rows = yield (
        f"SELECT call_id, status FROM calls WHERE node_id IN ({placeholders(node_ids)}) "
        "AND (status IN ('running', 'waiting') OR (delivery = 'inline' AND delivered_at IS NULL)) "
        "AND NOT EXISTS (SELECT 1 FROM sessions WHERE sessions.run_id = calls.run_id) LIMIT ?",
        (*node_ids, limit),
    )
    return [(row[0], row[1]) for row in rows]


def transition(update: str, *values: Any) -> Program[CallTransition | None]:
    """The call that an UPDATE has changed; None if it has changed none."""
    rows = yield f"{update} RETURNING {_CALL.sql}, exposure, delivery, pauses, session_id", values
    if not rows:
        return None
    *_, visibility, delivery, pauses, session_id = rows[0]
    return CallTransition(_CALL.decode(rows[0]), visibility, delivery, bool(pauses), session_id)
