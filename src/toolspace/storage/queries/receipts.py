"""Programs for receipts: what an agent's call did is kept with what it was answered, so that it is done once.

A call may be made again under its id when its process was killed before the answer was written down, by two processes
at once if they disagree about who is dead. The effect and its receipt are one transaction.
"""

from __future__ import annotations

from typing import Any

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.storage.database import Program, large


def once(entity_id: str, call_id: str | None, work: Program[Any]) -> Program[Any]:
    """Does the work, unless it was done for this call of the agent already: then gives what it gave, as JSON has it."""
    if not call_id:
        return (yield from work)
    # Written before the work begins: whoever comes second waits here for the first.
    rows = yield (
        "INSERT INTO receipts (entity_id, call_id, at) VALUES (?, ?, ?) "
        "ON CONFLICT (entity_id, call_id) DO NOTHING RETURNING call_id",
        (entity_id, call_id, now_ms()),
    )
    if not rows:
        rows = yield "SELECT answer FROM receipts WHERE entity_id = ? AND call_id = ?", (entity_id, call_id)
        if rows:
            work.close()  # It never began.
            return json_text.decode(rows[0][0])
    answer = yield from work
    yield (
        "UPDATE receipts SET answer = ? WHERE entity_id = ? AND call_id = ?",
        (json_text.encode_kept(answer), entity_id, call_id),
    )
    return answer


@large
def forget(before: int, limit: int) -> Program[int]:
    """Removes receipts older than a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM receipts WHERE (entity_id, call_id) IN (SELECT entity_id, call_id FROM receipts "
        "WHERE at < ? ORDER BY at LIMIT ?) RETURNING call_id",
        (before, limit),
    )
    return len(rows)
