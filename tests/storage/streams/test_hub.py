"""The hub: which events subscribers get, over a real database."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from toolspace.core.stored_records import NewEvent, StoredEvent
from toolspace.errors import StorageUnavailable
from toolspace.storage.queries import events
from toolspace.storage.sqlite.database import SqliteDatabase
from toolspace.storage.streams.hub import Hub
from toolspace.storage.streams.subscriptions import Ring, StreamClosed, SubscriberTooSlow, Subscription


class EventLog:
    """Stored events, and the hub over them."""

    def __init__(self, database: SqliteDatabase, *, ring: int = 4096, ring_bytes: int = 1 << 24) -> None:
        self.database = database
        self.loads = 0
        self.fails = 0
        load = lambda *place: self.load(*place)  # noqa: E731, PLW0108 - a test may replace `load`
        self.hub = Hub(load, self.bounds, max_events=ring, max_bytes=ring_bytes)

    async def load(self, stream: str, after: int, limit: int) -> list[StoredEvent]:
        self.loads += 1
        if self.fails:
            self.fails -= 1
            raise StorageUnavailable("the database does not answer")
        return await self.database.read(lambda: events.list_after(stream, after, limit))

    async def bounds(self, stream: str) -> tuple[int, int]:
        return await self.database.read(lambda: events.get_bounds(stream))

    async def store(self, stream: str, count: int = 1, *, text: str = "") -> list[StoredEvent]:
        """Appends without publishing, as another process does."""
        new = [NewEvent("tool.progress", {"n": n, "text": text}) for n in range(count)]
        return await self.database.run(lambda: events.append(stream, new))

    async def append(self, stream: str, count: int = 1, *, text: str = "") -> list[StoredEvent]:
        stored_events = await self.store(stream, count, text=text)
        self.hub.publish(stored_events)
        return stored_events


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    database = await SqliteDatabase.open(tmp_path / "hub.db")
    yield database
    await database.aclose()


@pytest.fixture
async def log(database: SqliteDatabase) -> AsyncIterator[EventLog]:
    log = EventLog(database)
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
async def test_subscriber_gets_stored_events_and_then_new_ones(log: EventLog) -> None:
    await log.append("space:a", 600)
    subscription = await log.hub.subscribe("space:a", after=3)
    await log.append("space:a", 2)
    assert await read(subscription, 599) == numbers(4, 602)
    read_task = asyncio.create_task(read(subscription, 2))
    await log.append("space:a", 2)
    assert await read_task == [603, 604]


async def test_subscriber_without_a_position_gets_new_events_only(log: EventLog) -> None:
    await log.append("space:a", 3)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:b", 1)
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [4]
    assert subscription.reset_id is None


async def test_published_events_are_not_read_from_the_database(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    for _ in range(50):
        await log.append("space:a", 2)
    assert await read(subscription, 100) == numbers(1, 100)
    assert log.loads == 0


async def test_streams_without_subscribers_use_no_memory(log: EventLog) -> None:
    await log.append("space:a", 10)
    log.hub.notify_appended("space:a", 11)
    assert (log.hub.stream_count, log.loads) == (0, 0)
    subscription = await log.hub.subscribe("space:a")
    assert (log.hub.stream_count, log.hub.subscription_count) == (1, 1)
    subscription.close()
    assert (log.hub.stream_count, log.hub.subscription_count) == (0, 0)


async def test_events_of_another_process_in_between_are_read_from_the_database(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 1)
    await log.store("space:a", 3)
    await log.append("space:a", 1)
    assert await read(subscription, 5) == numbers(1, 5)


async def test_events_published_out_of_order_are_delivered_in_order(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    first, second, third = [await log.store("space:a") for _ in range(3)]
    log.hub.publish([*third, *first])
    log.hub.publish(second)
    log.hub.publish(second)
    assert await read(subscription, 3) == [1, 2, 3]
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [4]


async def test_hint_of_another_process_delivers_its_events(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    stored_events = await log.store("space:a", 700)
    log.hub.notify_appended("space:a", stored_events[-1].id)
    log.hub.notify_appended("space:a", 5)
    assert await read(subscription, 700) == numbers(1, 700)


async def test_resync_delivers_events_whose_hints_were_lost(log: EventLog) -> None:
    first, second = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:b")
    await log.store("space:a", 300)
    await log.store("space:b", 1)
    log.hub.resync()
    assert await read(first, 300) == numbers(1, 300)
    assert await read(second, 1) == [1]


async def test_reading_events_is_retried_while_the_database_fails(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    log.fails = 2
    await log.store("space:a", 3)
    log.hub.notify_appended("space:a", 3)
    assert await read(subscription, 3) == [1, 2, 3]


@pytest.mark.spec("7.4")
async def test_hint_during_an_empty_read_is_not_lost(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    load = log.load

    async def load_and_hear(stream: str, after: int, limit: int) -> list[StoredEvent]:
        events = await load(stream, after, limit)
        log.load = load
        await log.store("space:a")  # After the events that are being read, and announced before that read ends.
        log.hub.notify_appended("space:a", 1)
        return events

    log.load = load_and_hear
    log.hub.resync()
    assert await read(subscription, 1) == [1]


async def test_hint_for_missing_events_does_not_read_forever(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    log.hub.notify_appended("space:a", 10)
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [1]


@pytest.mark.spec("7.4")
async def test_subscriber_is_told_if_its_position_is_no_longer_stored(log: EventLog) -> None:
    stored_events = await log.append("space:a", 10)
    await log.database.run(lambda: events.delete_old(stored_events[-1].at + 1, 6))
    subscription = await log.hub.subscribe("space:a", after=2)
    assert subscription.reset_id == 7
    assert await read(subscription, 4) == numbers(7, 10)
    second_subscription = await log.hub.subscribe("space:a", after=6)
    assert second_subscription.reset_id is None
    beyond_subscription = await log.hub.subscribe("space:a", after=99)  # An id of another database, or an invented one.
    assert beyond_subscription.reset_id == 7


async def test_position_at_the_end_is_valid_without_stored_events(log: EventLog) -> None:
    stored_events = await log.append("space:a", 4)
    await log.database.run(lambda: events.delete_old(stored_events[-1].at + 1, 100))
    subscription = await log.hub.subscribe("space:a", after=4)
    assert subscription.reset_id is None
    await log.append("space:a", 1)
    assert await read(subscription, 1) == [5]


@pytest.mark.spec("7.4")
async def test_subscriber_that_is_busy_while_events_are_dropped_is_too_slow(database: SqliteDatabase) -> None:
    log = EventLog(database, ring=8)
    slow, quick = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:a")
    await log.append("space:a", 2)
    assert await read(slow, 2) == [1, 2]
    ids = await read(quick, 2)
    for _ in range(10):
        await log.append("space:a", 3)
        ids += await read(quick, 3)
    assert ids == numbers(1, 32)
    assert slow.has_fallen_behind
    with pytest.raises(SubscriberTooSlow, match="space:a"):
        await slow.next_batch()
    second_subscription = await log.hub.subscribe("space:a", after=2)
    assert await read(second_subscription, 30) == numbers(3, 32)
    await log.hub.aclose()


async def test_waiting_subscriber_replays_dropped_events_from_the_database(database: SqliteDatabase) -> None:
    log = EventLog(database, ring=8)
    subscription = await log.hub.subscribe("space:a")
    read_task = asyncio.create_task(read(subscription, 100))
    await asyncio.sleep(0)
    await log.append("space:a", 100)
    assert await read_task == numbers(1, 100)
    await log.hub.aclose()


async def test_large_events_are_dropped_sooner(database: SqliteDatabase) -> None:
    log = EventLog(database, ring_bytes=100_000)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 50, text="x" * 10_000)
    assert subscription.ring.byte_count <= 100_000
    assert len(subscription.ring) < 10
    await log.hub.aclose()


async def test_single_event_above_the_byte_limit_is_delivered(database: SqliteDatabase) -> None:
    log = EventLog(database, ring_bytes=1000)
    subscription = await log.hub.subscribe("space:a")
    await log.append("space:a", 1, text="x" * 10_000)
    assert await read(subscription, 1) == [1]
    await log.hub.aclose()


@pytest.mark.spec("7.4")
async def test_subscribers_that_come_and_go_miss_no_event_of_many_writers(database: SqliteDatabase) -> None:
    log = EventLog(database, ring=64)

    async def write() -> None:
        for n in range(60):
            # Some publish here; of others, only a hint arrives.
            stored_events = await log.store("space:a", 1 + n % 3)
            if n % 4:
                log.hub.publish(stored_events)
            else:
                log.hub.notify_appended("space:a", stored_events[-1].id)

    async def follow() -> list[int]:
        ids: list[int] = []
        while len(ids) < 8 * 120:
            subscription = await log.hub.subscribe("space:a", after=ids[-1] if ids else 0)
            async with subscription:
                for _ in range(5):
                    try:
                        ids += [event.id for event in await subscription.next_batch()]
                    except SubscriberTooSlow:
                        break
                    if len(ids) >= 8 * 120:
                        break
        return ids

    followers = [asyncio.create_task(follow()) for _ in range(5)]
    await asyncio.gather(*(write() for _ in range(8)))
    for ids in await asyncio.gather(*followers):
        assert ids == numbers(1, 8 * 120)
    assert log.hub.subscription_count == 0
    await log.hub.aclose()


async def test_waiting_subscriber_can_be_woken_and_closed(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a")
    batch_task = asyncio.create_task(subscription.next_batch())
    await asyncio.sleep(0)
    subscription.wake()
    assert await batch_task == []
    batch_task = asyncio.create_task(subscription.next_batch())
    await asyncio.sleep(0)
    await log.hub.aclose()
    with pytest.raises(StreamClosed):
        await batch_task
    with pytest.raises(StreamClosed):
        await log.hub.subscribe("space:a")


async def test_cancelled_subscriber_does_not_affect_others(log: EventLog) -> None:
    first, second = await log.hub.subscribe("space:a"), await log.hub.subscribe("space:a")
    read_task, canceled = asyncio.create_task(read(first, 1)), asyncio.create_task(second.next_batch())
    await asyncio.sleep(0)
    canceled.cancel()
    await log.append("space:a", 1)
    assert await read_task == [1]
    with pytest.raises(asyncio.CancelledError):
        await canceled


async def test_batches_can_be_iterated_until_the_stream_closes(log: EventLog) -> None:
    subscription = await log.hub.subscribe("space:a", after=0)
    await log.append("space:a", 2)
    ids: list[int] = []
    async for batch in subscription:
        ids += [event.id for event in batch]
        if len(ids) == 2:
            subscription.close()
    assert ids == [1, 2]


# Subscriptions to all streams


def positions(batch: Sequence[StoredEvent]) -> list[tuple[str, int]]:
    return [(event.stream, event.id) for event in batch]


async def test_subscription_to_all_streams_gets_new_events(log: EventLog) -> None:
    await log.append("space:a", 5)
    subscription = log.hub.subscribe_all()
    await log.append("space:a", 1)
    await log.append("run:b", 2)
    assert positions(await subscription.next_batch()) == [("space:a", 6), ("run:b", 1), ("run:b", 2)]


async def test_subscription_to_all_streams_gets_events_of_other_processes(log: EventLog) -> None:
    await log.append("space:a", 1)
    subscription = log.hub.subscribe_all()
    await log.append("space:a", 1)
    await log.store("space:a", 2)
    await log.append("space:a", 1)
    received_positions = positions(await subscription.next_batch())
    while len(received_positions) < 4:
        received_positions += positions(await subscription.next_batch())
    assert received_positions == [("space:a", n) for n in range(2, 6)]
    stored_events = await log.store("run:b", 300)
    log.hub.notify_appended("run:b", stored_events[-1].id)
    received_positions = positions(await subscription.next_batch())
    assert received_positions[-1] == ("run:b", 300)
    log.hub.notify_appended("run:b", 12)
    await log.store("run:b", 1)
    log.hub.resync()
    assert positions(await subscription.next_batch()) == [("run:b", 301)]


async def test_subscription_to_all_streams_keeps_the_order_of_a_stream(log: EventLog) -> None:
    subscription = log.hub.subscribe_all()
    load = log.load

    async def load_and_append(stream: str, after: int, limit: int) -> list[StoredEvent]:
        events = await load(stream, after, limit)
        log.load = load
        await log.append("space:a")
        return events

    log.load = load_and_append
    await log.store("space:a", 2)
    log.hub.notify_appended("space:a", 2)
    ids: list[int] = []
    while len(ids) < 3:
        ids += [event.id for event in await subscription.next_batch()]
    assert ids == [1, 2, 3]


async def test_slow_subscription_to_all_streams_is_too_slow(database: SqliteDatabase) -> None:
    log = EventLog(database, ring=8)
    subscription = log.hub.subscribe_all()
    await log.append("space:a", 20)
    assert subscription.has_fallen_behind
    with pytest.raises(SubscriberTooSlow):
        await subscription.next_batch()
    subscription.close()
    assert log.hub.subscription_count == 0


def test_ring_has_no_events_after_a_dropped_position() -> None:
    ring = Ring(10, max_events=4)
    for n in range(11, 30):
        ring.append(StoredEvent("s", n, "t", {}, at=0))
    assert ring.last == 29
    assert not ring.has_all_after(12)
    assert ring.list_after(12, 5) == []
    assert [event.id for event in ring.list_after(27, 5)] == [28, 29]


@pytest.mark.spec("7.4")
async def test_replay_of_large_events_reads_few_at_once(log: EventLog) -> None:
    for _ in range(20):
        await log.store("s", 1, text="x" * 200_000)
        await log.store("s", 3)
    async with await log.hub.subscribe("s", after=0) as subscription:
        assert [event.id for event in await subscription.replay()] == numbers(1, 16)
        ids = numbers(1, 16)
        while ids[-1] < 80:
            batch = await subscription.replay()
            assert len(batch) <= 4
            ids += [event.id for event in batch]
        assert ids == numbers(1, 80)
