"""Inboxes, on each database: order, uniqueness, leases and retries."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

import pytest

from toolspace.storage.database import Database, Program
from toolspace.storage.queries import inbox


async def _add(database: Database, event_id: str, *, agent: str = "ada", **fields: Any) -> bool:
    defaults: dict[str, Any] = {"priority": inbox.PLAN_OR_SERVICE}
    return await database.run(lambda: inbox.add(agent, event_id, "service", {"id": event_id}, **(defaults | fields)))


async def _claim(database: Database, claim: str = "claim", **options: Any) -> list[str]:
    defaults: dict[str, Any] = {"count": 10, "lease_ms": 60_000}
    claimed_events = await database.run(lambda: inbox.claim("ada", claim, **(defaults | options)))
    return [event.event_id for event in claimed_events]


def _make_available() -> Program[None]:
    """As if much time had passed: every delay is over and every lease has ended."""
    yield "UPDATE inbox SET available_at = 0, lease_until = CASE WHEN lease_until IS NULL THEN NULL ELSE 1 END", ()


@pytest.mark.spec("7.3")
async def test_events_are_claimed_by_priority_then_time_then_sequence(database: Database) -> None:
    at = database.clock.now_ms() - 100
    await _add(database, "agent", priority=inbox.AGENT_MESSAGE, at=at)
    await _add(database, "service late", at=at + 1)
    await _add(database, "service", at=at)
    await _add(database, "result", priority=inbox.TOOL_RESULT, at=at + 5)
    await _add(database, "human second", priority=inbox.HUMAN_MESSAGE, at=at + 9, seq=2)
    await _add(database, "human first", priority=inbox.HUMAN_MESSAGE, at=at + 9, seq=1)
    order = ["human first", "human second", "result", "service", "service late", "agent"]
    assert [event.event_id for event in await database.read(lambda: inbox.list_events("ada"))] == order
    assert await database.read(lambda: inbox.count_pending("ada")) == 6
    assert await _claim(database, count=4) == order[:4]
    assert await _claim(database) == order[4:]
    assert await _claim(database) == []
    assert await database.read(lambda: inbox.count_pending("ada")) == 0


@pytest.mark.spec("7.3")
async def test_event_is_added_to_an_inbox_once(database: Database) -> None:
    are_new = await asyncio.gather(*(_add(database, "same") for _ in range(10)))
    assert sorted(are_new) == [False] * 9 + [True]
    assert await _add(database, "same", agent="cleo") is True
    assert await _claim(database) == ["same"]
    await database.run(lambda: inbox.acknowledge("ada", "claim", ["same"]))
    assert await _add(database, "same") is False
    assert await _claim(database) == []


@pytest.mark.spec("7.3")
async def test_each_event_is_claimed_by_one_of_many(database: Database) -> None:
    for number in range(40):
        await _add(database, f"{number:02}")

    async def take(claim: str) -> list[str]:
        claimed_ids: list[str] = []
        while some := await _claim(database, claim, count=3):
            assert len(some) <= 3
            claimed_ids += some
        return claimed_ids

    shares = await asyncio.gather(*(take(f"claim {number}") for number in range(5)))
    assert sorted(chain(*shares)) == [f"{number:02}" for number in range(40)]


async def test_only_requested_types_are_claimed(database: Database) -> None:
    await _add(database, "a")
    await database.run(lambda: inbox.add("ada", "b", "task", None, priority=0))
    assert await _claim(database, types=["plan", "service"]) == ["a"]
    assert await _claim(database, types=["task"]) == ["b"]


@pytest.mark.spec("7.3")
async def test_only_the_claim_that_holds_an_event_acknowledges_it(database: Database) -> None:
    await _add(database, "a")
    await _add(database, "b")
    await _claim(database, "mine")
    assert await database.run(lambda: inbox.acknowledge("ada", "theirs", ["a"])) == []
    assert await database.run(lambda: inbox.release("ada", "theirs", ["a"], error=None)) == []
    assert await database.run(lambda: inbox.acknowledge("ada", "mine", ["a", "a", "x"])) == ["a"]
    assert await database.run(lambda: inbox.acknowledge("ada", None, ["b"])) == ["b"]
    processed_events = await database.read(lambda: inbox.list_events("ada", status="processed"))
    assert [event.event_id for event in processed_events] == ["a", "b"]


@pytest.mark.spec("7.3")
async def test_released_event_is_delayed_longer_each_time_and_fails_finally(database: Database) -> None:
    await _add(database, "a")
    waits: list[int] = []
    for attempt in range(1, inbox.MAX_ATTEMPTS + 1):
        assert await _claim(database) == ["a"]
        before = database.clock.now_ms()
        (event,) = await database.run(lambda: inbox.release("ada", "claim", ["a"], error="broken"))
        assert (event.attempts, event.error) == (attempt, "broken")
        if attempt < inbox.MAX_ATTEMPTS:
            assert event.status == "pending"
            assert await _claim(database) == []
            at = await database.read(lambda: inbox.find_next_available("ada"))
            assert at is not None
            waits.append(at - before)
            await database.run(_make_available)
    assert all(wait >= least for wait, least in zip(waits, (1000, 2000, 4000, 8000), strict=True))
    assert event.status == "failed"
    assert await _claim(database) == []
    assert await database.read(lambda: inbox.find_next_available("ada")) is None

    assert await database.run(lambda: inbox.retry("ada", "a")) is True
    assert await database.run(lambda: inbox.retry("ada", "a")) is False
    (repeated_event,) = await database.run(lambda: inbox.claim("ada", "c", count=1, lease_ms=1000))
    assert (repeated_event.attempts, repeated_event.error, repeated_event.data) == (1, None, {"id": "a"})


@pytest.mark.spec("7.3")
async def test_event_with_an_expired_lease_is_released(database: Database) -> None:
    await _add(database, "a")
    await _claim(database, "gone", lease_ms=60_000)
    assert await database.run(inbox.release_expired) == []
    await database.run(_make_available)
    backs = await asyncio.gather(*(database.run(inbox.release_expired) for _ in range(4)))
    (back,) = chain(*backs)
    assert (back.status, back.attempts) == ("pending", 1)
    assert back.error is not None
    await database.run(_make_available)
    assert await _claim(database, "new") == ["a"]
    assert await database.run(lambda: inbox.acknowledge("ada", "gone", ["a"])) == []
    assert await database.run(lambda: inbox.acknowledge("ada", "new", ["a"])) == ["a"]
