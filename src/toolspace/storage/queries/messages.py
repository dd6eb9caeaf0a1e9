"""Programs for the messages of spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Message, MessageKind, MessageStatus
from toolspace.errors import RefusedError
from toolspace.storage.database import Program, Row

_COLUMNS = "id, space_id, seq, sender_id, kind, content, metadata, status, run_id, call_id, created_at, updated_at"
_UNSAID = "kind = 'message' AND status <> 'complete'"


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
    """Adds a message to the end of a space. None where there is no such space."""
    rows = yield "UPDATE spaces SET last_seq = last_seq + 1 WHERE id = ? RETURNING last_seq", (space_id,)
    if not rows:
        return None
    at = now_ms()
    rows = yield (
        f"INSERT INTO messages ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO NOTHING "
        f"RETURNING {_COLUMNS}",
        (
            message_id,
            space_id,
            rows[0][0],
            sender_id,
            kind,
            json_text.encode_for_storage(content),
            json_text.encode_for_storage(metadata or {}),
            status,
            run_id,
            call_id,
            at,
            at,
        ),
    )
    if not rows:
        raise RefusedError("conflict", f'there is a message "{message_id}" already')
    return _message(rows[0])


def update_status(
    message_id: str,
    *,
    status: MessageStatus,
    content: Any = None,
    unless: tuple[MessageStatus, MessageStatus] = ("complete", "error"),
) -> Program[Message | None]:
    """Moves a message on, with its new content. None where it had ended already."""
    rows = yield (
        "UPDATE messages SET status = ?, content = COALESCE(?, content), updated_at = ? "
        f"WHERE id = ? AND status NOT IN (?, ?) RETURNING {_COLUMNS}",
        (status, None if content is None else json_text.encode_for_storage(content), now_ms(), message_id, *unless),
    )
    return _message(rows[0]) if rows else None


def complete(message_id: str, content: Any, metadata: Mapping[str, Any] | None = None) -> Program[Message | None]:
    """Completes a message that was begun, or begun and abandoned. None where it is complete."""
    rows = yield (
        "UPDATE messages SET status = 'complete', content = ?, metadata = ?, updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status IN ('running', 'error') RETURNING {_COLUMNS}",
        (json_text.encode_for_storage(content), json_text.encode_for_storage(metadata or {}), now_ms(), message_id),
    )
    return _message(rows[0]) if rows else None


def restart(message_id: str) -> Program[Message | None]:
    """Begins a message anew that was abandoned. None where it was not."""
    rows = yield (
        "UPDATE messages SET status = 'running', metadata = '{}', updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status = 'error' RETURNING {_COLUMNS}",
        (now_ms(), message_id),
    )
    return _message(rows[0]) if rows else None


def abandon(message_id: str, reason: str) -> Program[Message | None]:
    """Ends a message that was begun, with what kept it from being said. None where it is not being said."""
    rows = yield (
        "UPDATE messages SET status = 'error', metadata = ?, updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status = 'running' RETURNING {_COLUMNS}",
        (json_text.encode_for_storage({"error": reason}), now_ms(), message_id),
    )
    return _message(rows[0]) if rows else None


def find_in_progress(message_id: str) -> Program[Message | None]:
    """A message that was begun, as long as its sender may go on."""
    rows = yield (
        f"SELECT {_COLUMNS} FROM messages WHERE id = ? AND kind = 'message' AND status = 'running' AND EXISTS "
        "(SELECT 1 FROM members WHERE members.space_id = messages.space_id AND entity_id = sender_id)",
        (message_id,),
    )
    return _message(rows[0]) if rows else None


def list_unfinished_of_run(run_id: str) -> Program[list[str]]:
    """The ids of the messages that a run has begun."""
    rows = yield (
        "SELECT id FROM messages WHERE run_id = ? AND kind = 'message' AND status = 'running' ORDER BY seq",
        (run_id,),
    )
    return [row[0] for row in rows]


def find(message_id: str) -> Program[Message | None]:
    rows = yield f"SELECT {_COLUMNS} FROM messages WHERE id = ?", (message_id,)
    return _message(rows[0]) if rows else None


def list_latest(
    space_id: str, *, limit: int = 50, offset: int = 0, complete_only: bool = False
) -> Program[tuple[list[Message], int]]:
    """The last messages of a space, oldest first, and how many it has; `offset` skips newer ones.

    `said`: without those that are only begun, or were abandoned.
    """
    rows = yield "SELECT COUNT(*) FROM messages WHERE space_id = ?", (space_id,)
    total: int = rows[0][0]
    only = ""
    if complete_only:
        # Not counted together: all and these few are each in an index, those that are left are not.
        rows = yield f"SELECT COUNT(*) FROM messages WHERE space_id = ? AND {_UNSAID}", (space_id,)
        total -= rows[0][0]
        only = f"AND NOT ({_UNSAID}) "
    rows = yield (
        f"SELECT {_COLUMNS} FROM messages WHERE space_id = ? {only}ORDER BY seq DESC LIMIT ? OFFSET ?",
        (space_id, limit, offset),
    )
    return [_message(row) for row in reversed(rows)], total


def list_between(
    space_id: str, *, after: int = 0, before: int | None = None, limit: int = 100
) -> Program[list[Message]]:
    """Messages by `seq`: those after one, or the last ones before one; oldest first."""
    if before is None:
        rows = yield (
            f"SELECT {_COLUMNS} FROM messages WHERE space_id = ? AND seq > ? ORDER BY seq LIMIT ?",
            (space_id, after, limit),
        )
        return [_message(row) for row in rows]
    rows = yield (
        f"SELECT {_COLUMNS} FROM messages WHERE space_id = ? AND seq > ? AND seq < ? ORDER BY seq DESC LIMIT ?",
        (space_id, after, before, limit),
    )
    return [_message(row) for row in reversed(rows)]


def _message(row: Row) -> Message:
    return Message(
        id=row[0],
        space_id=row[1],
        seq=row[2],
        sender_id=row[3],
        kind=row[4],
        content=json_text.decode(row[5]),
        metadata=json_text.decode(row[6]),
        status=row[7],
        run_id=row[8],
        call_id=row[9],
        created_at=row[10],
        updated_at=row[11],
    )
