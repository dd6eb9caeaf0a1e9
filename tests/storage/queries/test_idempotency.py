"""Responses under an idempotency key, on each database."""

from __future__ import annotations

from toolspace.storage.database import Database
from toolspace.storage.queries import idempotency
from toolspace.storage.queries.idempotency import StoredResponse


async def test_key_is_claimed_once_and_returns_its_response_afterwards(database: Database) -> None:
    assert await database.run(lambda: idempotency.claim_key("k1", "print", "node")) is None
    assert await database.run(lambda: idempotency.claim_key("k1", "other", "node")) == StoredResponse(
        "print", None, None
    )
    await database.run(lambda: idempotency.save_response("k1", 201, '{"a":1}'))
    assert await database.run(lambda: idempotency.claim_key("k1", "print", "node")) == StoredResponse(
        "print", 201, '{"a":1}'
    )


async def test_old_responses_are_deleted_in_limited_batches(database: Database) -> None:
    for key in ("k1", "k2", "k3"):
        await database.run(lambda key=key: idempotency.claim_key(key, "print", "node"))
    assert await database.run(lambda: idempotency.delete_old_responses(0, 10)) == 0
    later = database.clock.now_ms() + 1_000
    assert await database.run(lambda: idempotency.delete_old_responses(later, 2)) == 2
    assert await database.run(lambda: idempotency.delete_old_responses(later, 2)) == 1
    assert await database.run(lambda: idempotency.claim_key("k1", "print", "node")) is None
