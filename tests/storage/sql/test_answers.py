"""Answers that are kept under a key, on each database."""

from __future__ import annotations

from toolspace.core.ids import now_ms
from toolspace.storage.database import Database
from toolspace.storage.queries import idempotent_responses
from toolspace.storage.queries.idempotent_responses import Kept


async def test_a_key_is_taken_once_and_gives_its_answer_from_then_on(database: Database) -> None:
    assert await database.run(lambda: idempotent_responses.take("k1", "print", "node")) is None
    assert await database.run(lambda: idempotent_responses.take("k1", "other", "node")) == Kept("print", None, None)
    await database.run(lambda: idempotent_responses.keep("k1", 201, '{"a":1}'))
    assert await database.run(lambda: idempotent_responses.take("k1", "print", "node")) == Kept("print", 201, '{"a":1}')


async def test_old_answers_are_forgotten_some_at_a_time(database: Database) -> None:
    for key in ("k1", "k2", "k3"):
        await database.run(lambda key=key: idempotent_responses.take(key, "print", "node"))
    assert await database.run(lambda: idempotent_responses.forget(0, 10)) == 0
    later = now_ms() + 1_000
    assert await database.run(lambda: idempotent_responses.forget(later, 2)) == 2
    assert await database.run(lambda: idempotent_responses.forget(later, 2)) == 1
    assert await database.run(lambda: idempotent_responses.take("k1", "print", "node")) is None
