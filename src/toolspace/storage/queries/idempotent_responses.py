"""Programs for answers that are kept under a caller's key, so that a request which is repeated happens once."""

from __future__ import annotations

import msgspec

from toolspace.core.ids import now_ms
from toolspace.storage.database import Program, large


class Kept(msgspec.Struct, frozen=True):
    """What was asked under a key, as a fingerprint, and what was answered; None while that is not known yet."""

    fingerprint: str
    status: int | None
    body: str | None


def take(key: str, fingerprint: str, node_id: str) -> Program[Kept | None]:
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
    return Kept(rows[0][0], rows[0][1], rows[0][2]) if rows else None


def keep(key: str, status: int, body: str) -> Program[None]:
    """Writes down what was answered."""
    yield "UPDATE answers SET status = ?, body = ? WHERE key = ?", (status, body, key)


@large
def forget(before: int, limit: int) -> Program[int]:
    """Removes answers older than a time, some at once; says how many."""
    rows = yield (
        "DELETE FROM answers WHERE key IN (SELECT key FROM answers WHERE created_at < ? ORDER BY created_at LIMIT ?) "
        "RETURNING key",
        (before, limit),
    )
    return len(rows)
