"""Every database: a program is atomic and durable when acknowledged, and a read has one snapshot."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from toolspace.core.stored_records import NewEvent
from toolspace.errors import StorageError, StorageUnavailable
from toolspace.storage.database import Database, Program
from toolspace.storage.queries import entities_and_spaces, events, inbox


def _store_name(name: str, value: str = "", *, then: Exception | None = None) -> Program[str]:
    """Writes a row, and then raises the error if one is given."""
    rows = yield "INSERT INTO secrets (name, value, created_at) VALUES (?, ?, 0) RETURNING name", (name, value)
    if then is not None:
        raise then
    return rows[0][0]


def _list_names() -> Program[list[str]]:
    rows = yield "SELECT name FROM secrets ORDER BY name", ()
    return [row[0] for row in rows]


@pytest.mark.spec("15.1")
async def test_failed_program_changes_nothing(database: Database) -> None:
    with pytest.raises(LookupError, match="later"):
        await database.run(lambda: _store_name("a", then=LookupError("later")))
    assert await database.read(_list_names) == []


@pytest.mark.spec("15.1")
async def test_failed_program_does_not_affect_others_of_its_commit(database: Database) -> None:
    async def add_secret(number: int) -> None:
        fault = ValueError("no") if number % 3 == 0 else None
        await database.run(lambda: _store_name(f"{number:03}", then=fault))

    ends = await asyncio.gather(*map(add_secret, range(90)), return_exceptions=True)
    assert [type(end) for end in ends] == [ValueError if number % 3 == 0 else type(None) for number in range(90)]
    assert await database.read(_list_names) == [f"{number:03}" for number in range(90) if number % 3]


@pytest.mark.spec("15.1")
async def test_duplicate_row_fails_only_its_own_program(database: Database) -> None:
    ends = await asyncio.gather(
        *(database.run(lambda name=name: _store_name(name)) for name in ("a", "b", "a", "c")), return_exceptions=True
    )
    assert sorted(end for end in ends if isinstance(end, str)) == ["a", "b", "c"]
    (refusal,) = (end for end in ends if not isinstance(end, str))
    assert type(refusal) is StorageError


@pytest.mark.parametrize("value", ["a\0b", "\ud800", "x\udfff"])
async def test_unstorable_text_is_refused(database: Database, value: str) -> None:
    with pytest.raises(StorageError, match="cannot be stored") as failure:
        await database.run(lambda: _store_name("a", value))
    assert not isinstance(failure.value, StorageUnavailable)
    assert await database.run(lambda: _store_name("a", "fine")) == "a"


async def test_an_integer_beyond_64_bits_is_refused(database: Database) -> None:
    def late() -> Program[None]:
        yield "INSERT INTO secrets (name, value, created_at) VALUES ('a', '', ?)", (2**63,)

    with pytest.raises(StorageError, match="cannot be stored"):
        await database.run(late)
    assert await database.read(_list_names) == []


async def test_text_is_stored_unchanged_and_sorts_by_bytes(database: Database) -> None:
    texts = ["", " ", "A", "B", "Z", "_", "a", "b", "é", "ß", "日本", "🦉", "?", "'", "$1"]
    for text in texts:
        await database.run(lambda text=text: _store_name(text, text))
    assert await database.read(_list_names) == sorted(texts, key=str.encode)


async def test_large_value_is_stored_completely(database: Database) -> None:
    value = "é" * 3_000_000
    await database.run(lambda: _store_name("a", value))

    def look() -> Program[str]:
        rows = yield "SELECT value FROM secrets WHERE name = 'a'", ()
        return rows[0][0]

    assert await database.read(look) == value


async def test_program_without_statements_has_a_result(database: Database) -> None:
    def do_nothing() -> Program[int]:
        return 7
        yield "", ()

    assert await database.run(do_nothing) == 7
    assert await database.read(do_nothing) == 7


async def test_read_cannot_write(database: Database) -> None:
    def look_and_write() -> Program[None]:
        yield "SELECT 1", ()
        yield "INSERT INTO secrets (name, value, created_at) VALUES ('a', '', 0)", ()

    for program in (look_and_write, look_and_write, lambda: _store_name("a")):
        with pytest.raises(StorageError):
            await database.read(program)
    assert await database.read(_list_names) == []


async def test_read_sees_every_acknowledged_write(database: Database) -> None:
    for number in range(30):
        await database.run(lambda number=number: _store_name(f"{number:02}"))
        assert len(await database.read(_list_names)) == number + 1


@pytest.mark.spec("15.1")
async def test_all_statements_of_a_read_see_one_snapshot(database: Database) -> None:
    await database.run(lambda: _store_name("count", "0"))
    is_going = True

    def add(number: int) -> Program[None]:
        yield "UPDATE secrets SET created_at = created_at + 1 WHERE name = 'count'", ()
        yield from inbox.add("agent", str(number), "service", {}, priority=1)

    def compare() -> Program[tuple[int, int]]:
        count_rows = yield "SELECT created_at FROM secrets WHERE name = 'count'", ()
        rows = yield "SELECT COUNT(*) FROM inbox", ()
        return count_rows[0][0], rows[0][0]

    async def write() -> None:
        number = 0
        while is_going:
            number += 1
            await database.run(lambda number=number: add(number))

    writer = asyncio.create_task(write())
    snapshots = [await database.read(compare)]
    async with asyncio.timeout(60):
        while len(snapshots) < 100 or snapshots[-1][0] == snapshots[0][0]:
            snapshots.append(await database.read(compare))
    is_going = False
    await writer
    assert all(count == rows for count, rows in snapshots)


@pytest.mark.spec("6.4")
async def test_write_of_a_cancelled_caller_is_committed_and_announced(database: Database) -> None:
    announcements: asyncio.Queue[str] = asyncio.Queue()
    tasks = [
        asyncio.ensure_future(database.run(lambda name=name: _store_name(name), on_commit=announcements.put_nowait))
        for name in map(str, range(20))
    ]
    await asyncio.sleep(0)  # They have started; none has its result.
    for task in tasks:
        task.cancel()
    async with asyncio.timeout(30):
        assert sorted([await announcements.get() for _ in tasks]) == sorted(map(str, range(20)))
    assert await database.read(_list_names) == sorted(map(str, range(20)))
    await asyncio.wait(tasks)
    assert await database.run(lambda: _store_name("after")) == "after"


async def test_commits_are_announced_before_the_result_and_failures_are_not(database: Database) -> None:
    announcements: list[str] = []
    await database.run(lambda: _store_name("a"), on_commit=announcements.append)
    assert announcements == ["a"]
    with pytest.raises(LookupError):
        await database.run(lambda: _store_name("b", then=LookupError()), on_commit=announcements.append)
    assert announcements == ["a"]


async def test_failing_commit_listener_does_not_undo_the_commit(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(name: str) -> None:
        raise RuntimeError("deaf")

    assert await database.run(lambda: _store_name("a"), on_commit=fail) == "a"
    assert "deaf" in caplog.text


async def test_closed_database_is_a_clear_error(database: Database) -> None:
    await asyncio.gather(*(database.run(lambda name=name: _store_name(name)) for name in map(str, range(10))))
    await database.aclose()
    await database.aclose()
    with pytest.raises(StorageUnavailable, match="closed"):
        await database.run(lambda: _store_name("late"))
    with pytest.raises(StorageUnavailable, match="closed"):
        await database.read(_list_names)


@pytest.mark.spec("6.4")
async def test_exactly_one_of_many_compare_and_sets_succeeds(database: Database) -> None:
    def take(number: int) -> Program[int | None]:
        rows = yield "UPDATE secrets SET value = ? WHERE name = 'a' AND value = '' RETURNING value", (str(number),)
        return int(rows[0][0]) if rows else None

    for _ in range(5):
        await database.run(lambda: _store_name("a"))
        ends = await asyncio.gather(*(database.run(lambda number=number: take(number)) for number in range(40)))
        assert len([end for end in ends if end is not None]) == 1

        def clear() -> Program[None]:
            yield "DELETE FROM secrets", ()

        await database.run(clear)


async def test_program_gets_the_number_of_changed_rows(database: Database) -> None:
    def change(names: str) -> Program[int]:
        return len((yield f"UPDATE secrets SET value = 'new' WHERE name IN ({names}) RETURNING 1", ()))

    await database.run(lambda: _store_name("a"))
    await database.run(lambda: _store_name("b"))
    assert [await database.run(lambda names=names: change(names)) for names in ("'x'", "'a'", "'a', 'b'")] == [0, 1, 2]


async def test_exactly_one_of_many_inserts_the_first_row(database: Database) -> None:
    entities = await asyncio.gather(
        *(
            database.run(lambda number=number: entities_and_spaces.create_entity("ent_1", "human", str(number), {}))
            for number in range(30)
        )
    )
    (winner,) = [entity for entity in entities if entity is not None]
    stored_entity = await database.read(lambda: entities_and_spaces.find_entity("ent_1"))
    assert stored_entity is not None
    assert stored_entity.name == winner.name


@pytest.mark.spec("7.4")
async def test_reader_of_a_stream_with_eight_writers_gets_each_event_once(database: Database) -> None:
    writers, each = 8, 40
    read: list[Any] = []

    async def write(writer: int) -> None:
        for number in range(each):
            new = [
                NewEvent("said", {"writer": writer, "number": number, "part": part}) for part in range(number % 3 + 1)
            ]
            await database.run(lambda new=new: events.append("space:1", new))

    async def follow(is_done: asyncio.Event) -> None:
        while True:
            has_ended = is_done.is_set()
            some = await database.read(lambda: events.list_after("space:1", read[-1].id if read else 0, 50))
            read.extend(some)
            if has_ended and not some:
                return

    is_done = asyncio.Event()
    reader = asyncio.create_task(follow(is_done))
    await asyncio.gather(*map(write, range(writers)))
    is_done.set()
    await reader
    total = writers * sum(number % 3 + 1 for number in range(each))
    assert [event.id for event in read] == list(range(1, total + 1))
    for writer in range(writers):
        order = [(event.data["number"], event.data["part"]) for event in read if event.data["writer"] == writer]
        assert order == sorted(order)
        assert len(order) == total // writers
