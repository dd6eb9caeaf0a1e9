"""SQL programs for the messages of spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.core.records import Message, MessageKind, MessageStatus
from toolspace.errors import RefusedError
from toolspace.storage.database import Program
from toolspace.storage.queries.columns import Columns, insert_into

_MESSAGE = Columns(Message, json=("content", "metadata"))
_INCOMPLETE = "kind = 'message' AND status <> 'complete'"


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
    rows = yield "UPDATE spaces SET last_seq = last_seq + 1 WHERE id = ? RETURNING last_seq", (space_id,)
    if not rows:
        return None
    seq, at = rows[0][0], now_ms()
    content_text, metadata_text = json_text.encode_for_storage(content), json_text.encode_for_storage(metadata or {})
    rows = yield (
        f"{insert_into('messages', _MESSAGE.names)} ON CONFLICT (id) DO NOTHING RETURNING {_MESSAGE.sql}",
        (message_id, space_id, seq, sender_id, kind, content_text, metadata_text, status, run_id, call_id, at, at),
    )
    if not rows:
        raise RefusedError("conflict", f'there is a message "{message_id}" already')
    return _MESSAGE.decode(rows[0])


def update_status(
    message_id: str,
    *,
    status: MessageStatus,
    content: Any = None,
    unless: tuple[MessageStatus, MessageStatus] = ("complete", "error"),
) -> Program[Message | None]:
    """Changes the status of a message, and its content if it is given. None if it has one of the statuses `unless`."""
    rows = yield (
        "UPDATE messages SET status = ?, content = COALESCE(?, content), updated_at = ? "
        f"WHERE id = ? AND status NOT IN (?, ?) RETURNING {_MESSAGE.sql}",
        (status, None if content is None else json_text.encode_for_storage(content), now_ms(), message_id, *unless),
    )
    return _MESSAGE.decode_first(rows)


def complete(message_id: str, content: Any, metadata: Mapping[str, Any] | None = None) -> Program[Message | None]:
    """Completes a message that was started, also one that was abandoned then. None if it is complete."""
    rows = yield (
        "UPDATE messages SET status = 'complete', content = ?, metadata = ?, updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status IN ('running', 'error') RETURNING {_MESSAGE.sql}",
        (
            json_text.encode_for_storage(content),
            json_text.encode_for_storage(metadata or {}),
            now_ms(),
            message_id,
        ),
    )
    return _MESSAGE.decode_first(rows)


def restart(message_id: str) -> Program[Message | None]:
    """Starts an abandoned message anew. None if it was not abandoned."""
    rows = yield (
        "UPDATE messages SET status = 'running', metadata = '{}', updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status = 'error' RETURNING {_MESSAGE.sql}",
        (now_ms(), message_id),
    )
    return _MESSAGE.decode_first(rows)


def abandon(message_id: str, reason: str) -> Program[Message | None]:
    """Ends a started message that will not be completed. None if it is not in progress."""
    rows = yield (
        "UPDATE messages SET status = 'error', metadata = ?, updated_at = ? "
        f"WHERE id = ? AND kind = 'message' AND status = 'running' RETURNING {_MESSAGE.sql}",
        (json_text.encode_for_storage({"error": reason}), now_ms(), message_id),
    )
    return _MESSAGE.decode_first(rows)


def find_in_progress(message_id: str) -> Program[Message | None]:
    """A started message, as long as its sender is a member of the space."""
    rows = yield (
        f"SELECT {_MESSAGE.sql} FROM messages WHERE id = ? AND kind = 'message' AND status = 'running' AND EXISTS "
        "(SELECT 1 FROM members WHERE members.space_id = messages.space_id AND entity_id = sender_id)",
        (message_id,),
    )
    return _MESSAGE.decode_first(rows)


def list_unfinished_of_run(run_id: str) -> Program[list[str]]:
    """The ids of the messages that a run has started and not completed."""
    rows = yield (
        "SELECT id FROM messages WHERE run_id = ? AND kind = 'message' AND status = 'running' ORDER BY seq",
        (run_id,),
    )
    return [row[0] for row in rows]


def find(message_id: str) -> Program[Message | None]:
    return _MESSAGE.decode_first((yield f"SELECT {_MESSAGE.sql} FROM messages WHERE id = ?", (message_id,)))


def list_latest(
    space_id: str, *, limit: int = 50, offset: int = 0, complete_only: bool = False
) -> Program[tuple[list[Message], int]]:
    """The last messages of a space, oldest first, and how many it has; `offset` skips the newest ones."""
    rows = yield "SELECT COUNT(*) FROM messages WHERE space_id = ?", (space_id,)
    total: int = rows[0][0]
    condition = ""
    if complete_only:
        # Counted apart: all messages and the incomplete ones have an index each, the complete ones have none.
        rows = yield f"SELECT COUNT(*) FROM messages WHERE space_id = ? AND {_INCOMPLETE}", (space_id,)
        total -= rows[0][0]
        condition = f"AND NOT ({_INCOMPLETE}) "
    rows = yield (
        f"SELECT {_MESSAGE.sql} FROM messages WHERE space_id = ? {condition}ORDER BY seq DESC LIMIT ? OFFSET ?",
        (space_id, limit, offset),
    )
    return _MESSAGE.decode_all(reversed(rows)), total


def list_between(
    space_id: str, *, after: int = 0, before: int | None = None, limit: int = 100
) -> Program[list[Message]]:
    """Messages by `seq`: the first after one; with `before`, the last before one. Oldest first."""
    if before is None:
        rows = yield (
            f"SELECT {_MESSAGE.sql} FROM messages WHERE space_id = ? AND seq > ? ORDER BY seq LIMIT ?",
            (space_id, after, limit),
        )
        return _MESSAGE.decode_all(rows)
    rows = yield (
        f"SELECT {_MESSAGE.sql} FROM messages WHERE space_id = ? AND seq > ? AND seq < ? ORDER BY seq DESC LIMIT ?",
        (space_id, after, before, limit),
    )
    return _MESSAGE.decode_all(reversed(rows))
