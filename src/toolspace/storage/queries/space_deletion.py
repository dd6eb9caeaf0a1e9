"""SQL programs that delete a space: at once for everybody who asks for it, then its rows in slices.

A space that is being deleted has `deleted_at`. Nobody finds it any more, but its id stays in use until its last row is
deleted: another space with that id must show nothing of it.
"""

from __future__ import annotations

from toolspace.core.stored_records import run_stream, space_stream
from toolspace.storage.database import Program, current_time, long_running
from toolspace.storage.queries.statement_builder import (
    count_changes,
    delete_selected,
    first_column,
    has_changed,
    placeholders,
)


def start(space_id: str) -> Program[bool]:
    """Nobody finds the space from now on, and it has no members. False if there is no such space."""
    update = "UPDATE spaces SET deleted_at = ? WHERE id = ? AND deleted_at IS NULL"
    now = yield from current_time()
    if not (yield from has_changed(update, now, space_id)):
        return False
    yield "DELETE FROM members WHERE space_id = ?", (space_id,)
    return True


def is_started(space_id: str) -> Program[bool]:
    """Whether a space is being deleted, and its id is still in use."""
    return bool((yield "SELECT 1 FROM spaces WHERE id = ? AND deleted_at IS NOT NULL", (space_id,)))


def list_unfinished(*, limit: int) -> Program[list[str]]:
    """The ids of the spaces that are being deleted."""
    return first_column("SELECT id FROM spaces WHERE deleted_at IS NOT NULL ORDER BY id LIMIT ?", limit)


@long_running
def delete_rows(space_id: str, limit: int) -> Program[bool]:
    """Deletes at most `limit` rows of a space that is being deleted. True if nothing of it is left.

    Calls and events that were visible there become invisible: they stay until their retention ends.
    """
    select = "SELECT seq, call_id, run_id FROM messages WHERE space_id = ? ORDER BY seq LIMIT ?"
    rows = yield select, (space_id, limit)
    if rows:
        yield from _delete_messages(space_id, rows[-1][0], [row[1] for row in rows], [row[2] for row in rows], limit)
        return False
    events = "WHERE stream = ? ORDER BY id LIMIT ?"
    if (yield from delete_selected("events", "stream, id", events, space_stream(space_id), limit)):
        return False
    of_space = "SELECT id FROM runs WHERE space_id = ? LIMIT ?"
    if (yield from has_changed(f"UPDATE runs SET space_id = NULL WHERE id IN ({of_space})", space_id, limit)):
        return False
    yield "DELETE FROM spaces WHERE id = ? AND deleted_at IS NOT NULL", (space_id,)
    return True


def _delete_messages(
    space_id: str, last_seq: int, call_ids: list[str | None], run_ids: list[str | None], limit: int
) -> Program[None]:
    """Deletes the messages up to a number, after hiding their calls and the events of their runs."""
    visible_calls = [call_id for call_id in call_ids if call_id is not None]
    if visible_calls:
        marks = placeholders(visible_calls)
        yield f"UPDATE calls SET visible = 0, exposure = 'none' WHERE call_id IN ({marks})", tuple(visible_calls)
    visible_events = "SELECT stream, id FROM events WHERE stream = ? AND exposure <> 'none' LIMIT ?"
    for run_id in dict.fromkeys(run_id for run_id in run_ids if run_id is not None):
        update = f"UPDATE events SET exposure = 'none' WHERE (stream, id) IN ({visible_events})"
        limit -= yield from count_changes(update, run_stream(run_id), limit)
        if limit <= 0:
            return  # The next slice continues here.
    yield "DELETE FROM messages WHERE space_id = ? AND seq <= ?", (space_id, last_seq)
