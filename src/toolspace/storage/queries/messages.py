"""SQL programs for the messages of spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.stored_records import Message, MessageKind, MessageStatus
from toolspace.errors import RefusedError
from toolspace.storage.database import Program, current_time
from toolspace.storage.queries.entities_and_spaces import EXISTS
from toolspace.storage.queries.statement_builder import Table, first_column, first_value, json_or_null

_MESSAGE = Table("messages", Message, json=("content", "metadata"))
_IN_PROGRESS = "kind = 'message' AND status = 'running'"
_INCOMPLETE = "kind = 'message' AND status <> 'complete'"
_ADVANCE_TIME = "last_at = CASE WHEN last_at > ? THEN last_at ELSE ? END"
"""Gives a message a time that is not before that of an earlier one of its space, whatever the clocks say. The row of
the space is locked until the commit, so agents get the messages in their order."""


def create(
    message_id: str,
    space_id: str,
    sender_id: str,
    content: Any,
    *,
    kind: MessageKind = "message",
    metadata: Mapping[str, Any] | None = None,
    status: MessageStatus = "complete",
    run_id: str | None = None,
    call_id: str | None = None,
) -> Program[Message | None]:
    """Adds a message to a space. None if there is no such space; raises `RefusedError` if the id is in use."""
    now = yield from current_time()
    changes = f"last_seq = last_seq + 1, {_ADVANCE_TIME}"
    update = f"UPDATE spaces SET {changes} WHERE id = ? AND {EXISTS} RETURNING last_seq, last_at"
    rows = yield update, (now, now, space_id)
    if not rows:
        return None
    seq, now = rows[0]
    message = yield from _MESSAGE.insert(
        id=message_id,
        space_id=space_id,
        seq=seq,
        sender_id=sender_id,
        kind=kind,
        content=content,
        metadata=metadata or {},
        status=status,
        run_id=run_id,
        call_id=call_id,
        created_at=now,
        updated_at=now,
    )
    if message is None:
        raise RefusedError("conflict", f'there is a message "{message_id}" already')
    return message


def update_status(
    message_id: str,
    *,
    status: MessageStatus,
    content: Any = None,
    unless: tuple[MessageStatus, MessageStatus] = ("complete", "error"),
) -> Program[Message | None]:
    """Changes the status of a message, and its content if it is given. None if it has one of the statuses `unless`."""
    assignments = "status = ?, content = COALESCE(?, content), updated_at = ? WHERE id = ? AND status NOT IN (?, ?)"
    now = yield from current_time()
    return (yield from _MESSAGE.update(assignments, status, json_or_null(content), now, message_id, *unless))


def complete(message_id: str, content: Any, metadata: Mapping[str, Any] | None = None) -> Program[Message | None]:
    """Completes a message that was started, also one that was abandoned then. None if it is complete."""
    assignments = (
        "status = 'complete', content = ?, metadata = ?, updated_at = ? "
        "WHERE id = ? AND kind = 'message' AND status IN ('running', 'error')"
    )
    encode = json_text.encode_for_storage
    now = yield from current_time()
    update_space = f"UPDATE spaces SET {_ADVANCE_TIME} WHERE id = (SELECT space_id FROM messages WHERE id = ?)"
    now = (yield from first_value(f"{update_space} RETURNING last_at", now, now, message_id)) or now
    return (yield from _MESSAGE.update(assignments, encode(content), encode(metadata or {}), now, message_id))


def restart(message_id: str) -> Program[Message | None]:
    """Starts an abandoned message anew. None if it was not abandoned."""
    assignments = "status = 'running', metadata = '{}', updated_at = ?"
    now = yield from current_time()
    return (
        yield from _MESSAGE.update(
            f"{assignments} WHERE id = ? AND kind = 'message' AND status = 'error'", now, message_id
        )
    )


def abandon(message_id: str, reason: str) -> Program[Message | None]:
    """Ends a started message that will not be completed. None if it is not in progress."""
    assignments = f"status = 'error', metadata = ?, updated_at = ? WHERE id = ? AND {_IN_PROGRESS}"
    now = yield from current_time()
    return (yield from _MESSAGE.update(assignments, json_text.encode_for_storage({"error": reason}), now, message_id))


def delete_in_progress(message_id: str) -> Program[Message | None]:
    """Deletes a started message, and returns it. None if it is not in progress."""
    rows = yield f"DELETE FROM messages WHERE id = ? AND {_IN_PROGRESS} RETURNING {_MESSAGE.sql}", (message_id,)
    return _MESSAGE.decode(rows[0]) if rows else None


def find_in_progress(message_id: str) -> Program[Message | None]:
    """A started message, as long as its sender is a member of the space."""
    is_member = "SELECT 1 FROM members WHERE members.space_id = messages.space_id AND entity_id = sender_id"
    return _MESSAGE.find(f"WHERE id = ? AND {_IN_PROGRESS} AND EXISTS ({is_member})", message_id)


def list_unfinished_of_run(run_id: str) -> Program[list[str]]:
    """The ids of the messages that a run has started and not completed."""
    return first_column(f"SELECT id FROM messages WHERE run_id = ? AND {_IN_PROGRESS} ORDER BY seq", run_id)


def is_sent_by_run(run_id: str) -> Program[bool]:
    """Whether a run has sent a message."""
    select = "SELECT 1 FROM messages WHERE run_id = ? AND kind = 'message' AND status = 'complete' LIMIT 1"
    return bool((yield select, (run_id,)))


def find(message_id: str) -> Program[Message | None]:
    return _MESSAGE.find("WHERE id = ?", message_id)


def list_latest(
    space_id: str, *, limit: int = 50, offset: int = 0, complete_only: bool = False
) -> Program[tuple[list[Message], int]]:
    """The last messages of a space, oldest first, and how many it has; `offset` skips the newest ones."""
    # Not counted: the messages of a space have successive numbers.
    first_and_last = ", ".join(
        f"(SELECT seq FROM messages WHERE space_id = ? ORDER BY seq{order} LIMIT 1)" for order in ("", " DESC")
    )
    first_seq, last_seq = (yield f"SELECT {first_and_last}", (space_id, space_id))[0]
    total: int = 0 if first_seq is None else last_seq - first_seq + 1
    condition = ""
    if complete_only:
        # Counted apart: all messages and the incomplete ones have an index each, the complete ones have none.
        count = f"SELECT COUNT(*) FROM messages WHERE space_id = ? AND {_INCOMPLETE}"
        total -= yield from first_value(count, space_id)
        condition = f"AND NOT ({_INCOMPLETE}) "
    clauses = f"WHERE space_id = ? {condition}ORDER BY seq DESC LIMIT ? OFFSET ?"
    messages = yield from _MESSAGE.select(clauses, space_id, limit, offset)
    return messages[::-1], total


def list_between(
    space_id: str, *, after: int = 0, before: int | None = None, limit: int = 100
) -> Program[list[Message]]:
    """Messages by `seq`: the first after one; with `before`, the last before one. Oldest first."""
    if before is None:
        clauses = "WHERE space_id = ? AND seq > ? ORDER BY seq LIMIT ?"
        return (yield from _MESSAGE.select(clauses, space_id, after, limit))
    clauses = "WHERE space_id = ? AND seq > ? AND seq < ? ORDER BY seq DESC LIMIT ?"
    return (yield from _MESSAGE.select(clauses, space_id, after, before, limit))[::-1]
