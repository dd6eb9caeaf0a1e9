"""Programs for answers that are kept under a caller's key, so that a request which is repeated happens once."""

from __future__ import annotations

from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import now_ms
from toolspace.storage.database import Program, long_running


class StoredResponse(msgspec.Struct, frozen=True):
    """What was asked under a key, as a fingerprint, and what was answered; None while that is not known yet."""

    fingerprint: str
    status: int | None
    body: str | None


def claim_key(key: str, fingerprint: str, node_id: str) -> Program[StoredResponse | None]:
    """Takes a key. None where it was free; else what it stands for already.

    Whoever takes it in the transaction that does the work makes others with the same key wait for the answer.
    """
    rows = yield (
        "INSERT INTO answers (key, fingerprint, node_id, status, body, created_at) VALUES (?, ?, ?, NULL, NULL, ?) "
        "ON CONFLICT (key) DO NOTHING RETURNING 1",
        (key, fingerprint, node_id, now_ms()),
    )
    if rows:
        return None
    rows = yield "SELECT fingerprint, status, body FROM answers WHERE key = ?", (key,)
    return StoredResponse(rows[0][0], rows[0][1], rows[0][2]) if rows else None


def save_response(key: str, status: int, body: str) -> Program[None]:
    """Writes down what was answered."""
    yield "UPDATE answers SET status = ?, body = ? WHERE key = ?", (status, body, key)


@long_running
def delete_old_responses(before: int, limit: int) -> Program[int]:
    """Removes answers older than a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM answers WHERE key IN (SELECT key FROM answers WHERE created_at < ? ORDER BY created_at LIMIT ?) "
        "RETURNING key",
        (before, limit),
    )
    return len(rows)


# MERGED from receipts: Programs for receipts: what an agent's call did is kept with what it was answered, so that …


def run_once(entity_id: str, call_id: str | None, work: Program[Any]) -> Program[Any]:
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
        (json_text.encode_for_storage(answer), entity_id, call_id),
    )
    return answer


@long_running
def delete_old_receipts(before: int, limit: int) -> Program[int]:
    """Removes receipts older than a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM receipts WHERE (entity_id, call_id) IN (SELECT entity_id, call_id FROM receipts "
        "WHERE at < ? ORDER BY at LIMIT ?) RETURNING call_id",
        (before, limit),
    )
    return len(rows)
