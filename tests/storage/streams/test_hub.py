"""The hub: what readers of streams get, over a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from toolspace.core.records import NewEvent, StoredEvent
from toolspace.errors import StorageUnavailable
from toolspace.storage.queries import events
from toolspace.storage.sqlite.database import SqliteDatabase
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.subscriptions import Ring, StreamClosed, SubscriberTooSlow, Subscription


class Log:
    """A stored log of events, and the hub over it."""

    def __init__(self, database: SqliteDatabase, *, ring: int = 4096, ring_bytes: int = 1 << 24) -> None:
        self.database = database
        self.loads = 0
        self.fails = 0
        self.hub = Hub(self.load, self.bounds, max_events=ring, max_bytes=ring_bytes)

    async def load(self, stream: str, after: int, limit: int) -> list[StoredEvent]:
        self.loads += 1
        if self.fails:
            self.fails -= 1
            raise StorageUnavailable("the database does not answer")
        return await self.database.read(lambda: events.list_after(stream, after, limit))

    async def bounds(self, stream: str) -> tuple[int, int]:
        return await self.database.read(lambda: events.get_bounds(stream))

    async def store(self, stream: str, count: int = 1, *, text: str = "") -> list[StoredEvent]:
        """Appends, and tells nobody: as another process does."""
        new = [NewEvent("tool.progress", {"n": n, "text": text}) for n in range(count)]
        return await self.database.run(lambda: events.append(stream, new))

    async def append(self, stream: str, count: int = 1, *, text: str = "") -> list[StoredEvent]:
        stored = await self.store(stream, count, text=text)
        self.hub.publish(stored)
        return stored


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    database = await SqliteDatabase.open(tmp_path / "hub.db")
    yield database
    await database.aclose()


@pytest.fixture
async def log(database: SqliteDatabase) -> AsyncIterator[Log]:
    log = Log(database)
    yield log
    await log.hub.aclose()


async def read(subscription: Subscription, count: int) -> list[int]:
    """The ids of the next events."""
    ids: list[int] = []
    while len(ids) < count:
        ids += [event.id for event in await subscription.next_batch()]
    return ids


def numbers(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.spec("7.4")
async def test_a_reader_gets_what_is_stored_and_then_what_happens(log: Log) -> None:
    await log.append("space:a", 600)
    subscription = await log.hub.subscribe("space:a", after=3)
    await log.append("space:a", 2)
    assert await read(subscription, 599) == numbers(4, 602)
    waiting = asyncio.create_task(read(subscription, 2))
    await log.append("space:a", 2)
    assert await waiting == [603, 604]


async def test_a_reader_without_a_place_begins_now(log: Log) -> None:
    await log.append("space:a", 3)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:b", 1)
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [4]
    assert subscription.reset_id is None


async def test_events_that_are_told_in_time_are_not_read_from_the_store(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    for _ in range(50):
        await log.append("space:a", 2)
    assert await read(subscription, 100) == numbers(1, 100)
    assert log.loads == 0


async def test_streams_that_nobody_reads_are_not_kept(log: Log) -> None:
    await log.append("space:a", 10)
    log.hub.notify_appended("space:a", 11)
    assert (log.hub.stream_count, log.loads) == (0, 0)
    subscription = await log.hub.subscribe("space:a")
    assert (log.hub.stream_count, log.hub.subscription_count) == (1, 1)
    subscription.close()
    assert (log.hub.stream_count, log.hub.subscription_count) == (0, 0)


async def test_what_another_process_wrote_in_between_is_read_from_the_store(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 1)
    await log.store("space:a", 3)
    await log.append("space:a", 1)
    assert await read(subscription, 5) == numbers(1, 5)


async def test_events_that_are_told_out_of_order_come_in_order(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    first, second, third = [await log.store("space:a") for _ in range(3)]
    log.hub.publish([*third, *first])
    log.hub.publish(second)
    log.hub.publish(second)
    assert await read(subscription, 3) == [1, 2, 3]
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [4]


async def test_a_hint_of_another_process_brings_its_events(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    stored = await log.store("space:a", 700)
    log.hub.notify_appended("space:a", stored[-1].id)
    log.hub.notify_appended("space:a", 5)
    assert await read(subscription, 700) == numbers(1, 700)


async def test_after_a_gap_in_the_hints_everything_is_looked_at_again(log: Log) -> None:
    one, other = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:b")
    await log.store("space:a", 300)
    await log.store("space:b", 1)
    log.hub.resync()
    assert await read(one, 300) == numbers(1, 300)
    assert await read(other, 1) == [1]


async def test_a_store_that_does_not_answer_is_asked_again(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    log.fails = 2
    await log.store("space:a", 3)
    log.hub.notify_appended("space:a", 3)
    assert await read(subscription, 3) == [1, 2, 3]


@pytest.mark.spec("7.4")
async def test_a_hint_that_comes_while_nothing_is_found_is_not_lost(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    load = log.hub.load

    async def load_and_hear(stream: str, after: int, limit: int) -> list[StoredEvent]:
        found = await load(stream, after, limit)
        log.hub.load = load
        await log.store("space:a")  # Behind what was looked at, and told before that look is over.
        log.hub.notify_appended("space:a", 1)
        return found

    log.hub.load = load_and_hear
    log.hub.resync()
    assert await read(subscription, 1) == [1]


async def test_a_hint_of_events_that_are_not_there_ends_the_search(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    log.hub.notify_appended("space:a", 10)
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [1]


@pytest.mark.spec("7.4")
async def test_a_place_that_is_not_kept_any_more_is_told(log: Log) -> None:
    stored = await log.append("space:a", 10)
    await log.database.run(lambda: events.delete_old(stored[-1].at + 1, 6))
    subscription = await log.hub.subscribe("space:a", after=2)
    assert subscription.reset_id == 7
    assert await read(subscription, 4) == numbers(7, 10)
    kept = await log.hub.subscribe("space:a", after=6)
    assert kept.reset_id is None
    beyond = await log.hub.subscribe("space:a", after=99)  # Of another database, or made up.
    assert beyond.reset_id == 7


async def test_a_place_at_the_end_is_kept_even_where_no_event_is(log: Log) -> None:
    stored = await log.append("space:a", 4)
    await log.database.run(lambda: events.delete_old(stored[-1].at + 1, 100))
    subscription = await log.hub.subscribe("space:a", after=4)
    assert subscription.reset_id is None
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [5]


@pytest.mark.spec("7.4")
async def test_a_reader_that_is_busy_while_the_ring_goes_on_is_too_slow(database: SqliteDatabase) -> None:
    log = Log(database, ring=8)
    slow, quick = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:a")
    await log.append("space:a", 2)
    assert await read(slow, 2) == [1, 2]
    seen = await read(quick, 2)
    for _ in range(10):
        await log.append("space:a", 3)
        seen += await read(quick, 3)
    assert seen == numbers(1, 32)
    assert slow.has_fallen_behind
    with pytest.raises(SubscriberTooSlow, match="space:a"):
        await slow.next_batch()
    again = await log.hub.subscribe("space:a", after=2)
    assert await read(again, 30) == numbers(3, 32)
    await log.hub.aclose()


async def test_a_reader_that_only_had_no_turn_reads_what_it_missed_from_the_store(database: SqliteDatabase) -> None:
    log = Log(database, ring=8)
    subscription = await log.hub.subscribe("space:a")
    waiting = asyncio.create_task(read(subscription, 100))
    await asyncio.sleep(0)
    await log.append("space:a", 100)
    assert await waiting == numbers(1, 100)
    await log.hub.aclose()


async def test_large_events_are_let_go_sooner(database: SqliteDatabase) -> None:
    log = Log(database, ring_bytes=100_000)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 50, text="x" * 10_000)
    assert subscription.ring.byte_count <= 100_000
    assert len(subscription.ring) < 10
    await log.hub.aclose()


async def test_one_event_that_is_too_large_is_still_handed_on(database: SqliteDatabase) -> None:
    log = Log(database, ring_bytes=1000)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 1, text="x" * 10_000)
    assert await read(subscription, 1) == [1]
    await log.hub.aclose()


@pytest.mark.spec("7.4")
async def test_many_writers_and_readers_who_come_and_go_miss_nothing(database: SqliteDatabase) -> None:
    log = Log(database, ring=64)

    async def write() -> None:
        for n in range(60):
            # Some tell here, some elsewhere, so that only a hint comes.
            stored = await log.store("space:a", 1 + n % 3)
            if n % 4:
                log.hub.publish(stored)
            else:
                log.hub.notify_appended("space:a", stored[-1].id)

    async def follow() -> list[int]:
        seen: list[int] = []
        while len(seen) < 8 * 120:
            subscription = await log.hub.subscribe("space:a", after=seen[-1] if seen else 0)
            async with subscription:
                for _ in range(5):
                    try:
                        seen += [event.id for event in await subscription.next_batch()]
                    except SubscriberTooSlow:
                        break
                    if len(seen) >= 8 * 120:
                        break
        return seen

    followers = [asyncio.create_task(follow()) for _ in range(5)]
    await asyncio.gather(*(write() for _ in range(8)))
    for seen in await asyncio.gather(*followers):
        assert seen == numbers(1, 8 * 120)
    assert log.hub.subscription_count == 0
    await log.hub.aclose()


async def test_a_reader_can_be_poked_and_closed_while_it_waits(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a")
    waiting = asyncio.create_task(subscription.next_batch())
    await asyncio.sleep(0)
    subscription.wake()
    assert await waiting == []
    waiting = asyncio.create_task(subscription.next_batch())
    await asyncio.sleep(0)
    await log.hub.aclose()
    with pytest.raises(StreamClosed):
        await waiting
    with pytest.raises(StreamClosed):
        await log.hub.subscribe("space:a")


async def test_a_reader_that_is_cancelled_disturbs_no_other(log: Log) -> None:
    one, other = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:a")
    waiting, gone = asyncio.create_task(read(one, 1)), asyncio.create_task(other.next_batch())
    await asyncio.sleep(0)
    gone.cancel()
    await log.append("space:a", 1)
    assert await waiting == [1]
    with pytest.raises(asyncio.CancelledError):
        await gone


async def test_batches_can_be_iterated_until_the_end(log: Log) -> None:
    subscription = await log.hub.subscribe("space:a", after=0)
    await log.append("space:a", 2)
    seen: list[int] = []
    async for batch in subscription:
        seen += [event.id for event in batch]
        if len(seen) == 2:
            subscription.close()
    assert seen == [1, 2]


# Everything that happens


def places(batch: Sequence[StoredEvent]) -> list[tuple[str, int]]:
    return [(event.stream, event.id) for event in batch]


async def test_a_follower_gets_the_events_of_all_streams_from_now_on(log: Log) -> None:
    await log.append("space:a", 5)
    follower = log.hub.subscribe_all()
    await log.append("space:a", 1)
    await log.append("run:b", 2)
    assert places(await follower.next_batch()) == [("space:a", 6), ("run:b", 1), ("run:b", 2)]


async def test_a_follower_gets_what_other_processes_wrote(log: Log) -> None:
    await log.append("space:a", 1)
    follower = log.hub.subscribe_all()
    await log.append("space:a", 1)
    await log.store("space:a", 2)
    await log.append("space:a", 1)
    seen = places(await follower.next_batch())
    while len(seen) < 4:
        seen += places(await follower.next_batch())
    assert seen == [("space:a", n) for n in range(2, 6)]
    stored = await log.store("run:b", 300)
    log.hub.notify_appended("run:b", stored[-1].id)
    seen = places(await follower.next_batch())
    assert seen[-1] == ("run:b", 300)
    log.hub.notify_appended("run:b", 12)
    await log.store("run:b", 1)
    log.hub.resync()
    assert places(await follower.next_batch()) == [("run:b", 301)]


async def test_a_follower_gets_what_another_process_wrote_before_what_is_told_meanwhile(log: Log) -> None:
    follower = log.hub.subscribe_all()
    load = log.hub.load

    async def load_and_append(stream: str, after: int, limit: int) -> list[StoredEvent]:
        events = await load(stream, after, limit)
        log.hub.load = load
        await log.append("space:a")
        return events

    log.hub.load = load_and_append
    await log.store("space:a", 2)
    log.hub.notify_appended("space:a", 2)
    seen: list[int] = []
    while len(seen) < 3:
        seen += [event.id for event in await follower.next_batch()]
    assert seen == [1, 2, 3]


async def test_a_follower_that_does_not_keep_up_is_too_slow(database: SqliteDatabase) -> None:
    log = Log(database, ring=8)
    follower = log.hub.subscribe_all()
    await log.append("space:a", 20)
    assert follower.has_fallen_behind
    with pytest.raises(SubscriberTooSlow):
        await follower.next_batch()
    follower.close()
    assert log.hub.subscription_count == 0


def test_a_ring_gives_nothing_for_a_place_that_it_has_let_go() -> None:
    ring = Ring(10, max_events=4)
    for n in range(11, 30):
        ring.append(StoredEvent("s", n, "t", {}, at=0))
    assert ring.last == 29
    assert not ring.has_all_after(12)
    assert ring.list_after(12, 5) == []
    assert [event.id for event in ring.list_after(27, 5)] == [28, 29]


@pytest.mark.spec("7.4")
async def test_a_reader_who_looks_back_at_large_events_holds_few_of_them(log: Log) -> None:
    for _ in range(20):
        await log.store("s", 1, text="x" * 200_000)
        await log.store("s", 3)
    async with await log.hub.subscribe("s", after=0) as reader:
        assert [event.id for event in await reader.replay()] == numbers(1, 16)
        ids = numbers(1, 16)
        while ids[-1] < 80:
            batch = await reader.replay()
            assert len(batch) <= 4
            ids += [event.id for event in batch]
        assert ids == numbers(1, 80)
