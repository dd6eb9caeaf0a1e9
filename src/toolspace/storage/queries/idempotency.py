"""SQL programs for idempotency: responses under a client's `Idempotency-Key`, and receipts of the calls of agents.

A receipt is stored in the transaction of the effect. An agent may make a call again under the same id if its process
was killed before the result was stored; two processes may even do so at once. The effect happens once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.storage.database import Program, current_time, long_running
from toolspace.storage.queries.statement_builder import Table, delete_selected, has_changed, insert_into


class StoredResponse(msgspec.Struct, frozen=True):
    """The fingerprint of the request under a key, and its response; None while the request is not answered."""

    fingerprint: str
    status: int | None
    body: str | None


_RESPONSE = Table("answers", StoredResponse)


def claim_key(key: str, fingerprint: str, node_id: str) -> Program[StoredResponse | None]:
    """Claims a key. None if it was free; otherwise what is stored under it.

    If the transaction of the request claims it, a repeated request waits for the response of the first one.
    """
    insert = insert_into("answers", ("key", "fingerprint", "node_id", "created_at"))
    now = yield from current_time()
    if (yield from has_changed(f"{insert} ON CONFLICT (key) DO NOTHING", key, fingerprint, node_id, now)):
        return None
    return (yield from _RESPONSE.find("WHERE key = ?", key))


def save_response(key: str, status: int, body: str) -> Program[None]:
    yield "UPDATE answers SET status = ?, body = ? WHERE key = ?", (status, body, key)


@long_running
def delete_old_responses(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` responses older than a time; returns how many."""
    clauses = "WHERE created_at < ? ORDER BY created_at LIMIT ?"
    return len((yield from delete_selected("answers", "key", clauses, before, limit)))


def run_once(entity_id: str, call_id: str | None, work: Program[Any]) -> Program[Any]:
    """Runs `work`, unless this call of the agent did so before: then returns its result of that time, as JSON data."""
    if not call_id:
        return (yield from work)
    # Stored before the work starts: a second process waits here for the first.
    insert = f"{insert_into('receipts', ('entity_id', 'call_id', 'at'))} ON CONFLICT (entity_id, call_id) DO NOTHING"
    now = yield from current_time()
    if not (yield from has_changed(insert, entity_id, call_id, now)):
        rows = yield "SELECT answer FROM receipts WHERE entity_id = ? AND call_id = ?", (entity_id, call_id)
        if rows:
            work.close()  # It has not started.
            return json_text.decode(rows[0][0])
    result = yield from work
    yield (
        "UPDATE receipts SET answer = ? WHERE entity_id = ? AND call_id = ?",
        (json_text.encode_for_storage(result), entity_id, call_id),
    )
    return result


@long_running
def delete_old_receipts(before: int, limit: int) -> Program[int]:
    """Deletes at most `limit` receipts older than a time; returns how many."""
    clauses = "WHERE at < ? ORDER BY at LIMIT ?"
    return len((yield from delete_selected("receipts", "entity_id, call_id", clauses, before, limit)))
