"""Entities, spaces, members and messages, on each database."""

from __future__ import annotations

import asyncio

import pytest

from toolspace.errors import StorageError
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, messages, runs, space_deletion


async def _create_entities(database: Database) -> None:
    for name, type in (("ada", "agent"), ("bob", "human"), ("cleo", "agent"), ("dan", "service")):
        await database.run(lambda name=name, type=type: entities_and_spaces.create_entity(name, type, name.title(), {}))  # type: ignore[arg-type]
    for space in ("one", "two"):
        await database.run(lambda space=space: entities_and_spaces.create_space(space, space.title(), {"of": space}))
    for space, name in (("one", "ada"), ("one", "bob"), ("two", "bob"), ("two", "cleo")):
        await database.run(lambda space=space, name=name: entities_and_spaces.add_member(space, name))


@pytest.mark.spec("7.1")
async def test_entity_is_created_once_updated_and_deleted(database: Database) -> None:
    metadata = {"nested": {"list": [1, 2.5, None, True, "é\0"]}, "big": 2**62}
    entity = await database.run(lambda: entities_and_spaces.create_entity("ent_1", "human", "Ann", metadata))
    assert entity is not None
    assert entity.metadata == metadata
    assert await database.run(lambda: entities_and_spaces.create_entity("ent_1", "agent", "Other", {})) is None

    entity = await database.run(lambda: entities_and_spaces.update_entity("ent_1", name="Anna"))
    assert entity is not None
    assert (entity.name, entity.type, entity.metadata) == ("Anna", "human", metadata)
    entity = await database.run(lambda: entities_and_spaces.update_entity("ent_1", metadata={}))
    assert entity is not None
    assert (entity.name, entity.metadata, entity.created_at) == ("Anna", {}, entity.created_at)
    assert await database.run(lambda: entities_and_spaces.update_entity("ent_2", name="Nobody")) is None

    assert await database.run(lambda: entities_and_spaces.delete_entity("ent_1")) is True
    assert await database.run(lambda: entities_and_spaces.delete_entity("ent_1")) is False
    assert await database.read(lambda: entities_and_spaces.find_entity("ent_1")) is None


async def test_entities_are_listed_by_page_type_and_shared_space(database: Database) -> None:
    await _create_entities(database)

    async def names(**filters: object) -> list[str]:
        return [entity.id for entity in await database.read(lambda: entities_and_spaces.list_entities(**filters))]  # type: ignore[arg-type]

    assert await names() == ["ada", "bob", "cleo", "dan"]
    assert await names(limit=2) == ["ada", "bob"]
    assert await names(after="bob", limit=2) == ["cleo", "dan"]
    assert await names(type="agent") == ["ada", "cleo"]
    assert await names(sharing_with="ada") == ["ada", "bob"]
    assert await names(sharing_with="bob", type="agent") == ["ada", "cleo"]
    assert await names(sharing_with="dan") == ["dan"]
    assert await database.read(lambda: entities_and_spaces.share_space("ada", "bob")) is True
    assert await database.read(lambda: entities_and_spaces.share_space("ada", "cleo")) is False


@pytest.mark.spec("7.1")
async def test_space_has_members(database: Database) -> None:
    await _create_entities(database)
    assert await database.run(lambda: entities_and_spaces.add_member("one", "ada")) is False
    members = await database.read(lambda: entities_and_spaces.list_members("one"))
    assert [(member.entity_id, member.type, member.name) for member in members] == [
        ("ada", "agent", "Ada"),
        ("bob", "human", "Bob"),
    ]
    assert await database.read(lambda: entities_and_spaces.is_member("one", "bob")) is True
    assert await database.read(lambda: entities_and_spaces.is_member("one", "cleo")) is False
    assert await database.read(lambda: entities_and_spaces.list_agents("two", except_entity="bob")) == [
        ("cleo", "agent")
    ]
    assert await database.read(lambda: entities_and_spaces.list_agents("two", except_entity="cleo")) == []
    assert [space.id for space in await database.read(lambda: entities_and_spaces.list_spaces(member="bob"))] == [
        "one",
        "two",
    ]
    assert [
        space.id for space in await database.read(lambda: entities_and_spaces.list_spaces(member="bob", after="one"))
    ] == ["two"]
    assert [space.id for space in await database.read(lambda: entities_and_spaces.list_spaces(limit=1))] == ["one"]

    assert await database.run(lambda: entities_and_spaces.remove_member("one", "bob")) is True
    assert await database.run(lambda: entities_and_spaces.remove_member("one", "bob")) is False
    with pytest.raises(StorageError):
        await database.run(lambda: entities_and_spaces.add_member("one", "nobody"))
    with pytest.raises(StorageError):
        await database.run(lambda: entities_and_spaces.add_member("nowhere", "bob"))


async def test_deletion_removes_what_belongs_to_a_record(database: Database) -> None:
    await _create_entities(database)
    await database.run(lambda: messages.create("msg_1", "one", "ada", "hello"))
    await database.run(lambda: runs.create("run_1", "ada", space_id="one", trigger=None))
    await database.run(lambda: entities_and_spaces.delete_entity("ada"))
    assert [member.entity_id for member in await database.read(lambda: entities_and_spaces.list_members("one"))] == [
        "bob"
    ]
    assert await database.read(lambda: runs.find("run_1")) is None
    assert await database.read(lambda: messages.find("msg_1")) is not None

    assert await database.run(lambda: space_deletion.start("one")) is True
    assert await database.run(lambda: space_deletion.start("one")) is False
    while not await database.run(lambda: space_deletion.delete_rows("one", 10)):
        pass
    assert await database.read(lambda: messages.find("msg_1")) is None
    assert await database.read(lambda: entities_and_spaces.is_member("one", "bob")) is False


async def test_space_can_be_updated(database: Database) -> None:
    await _create_entities(database)
    assert await database.run(lambda: entities_and_spaces.create_space("one", "Again", {})) is None
    space = await database.run(lambda: entities_and_spaces.update_space("one", name="First"))
    assert space is not None
    assert (space.name, space.metadata) == ("First", {"of": "one"})
    space = await database.run(lambda: entities_and_spaces.update_space("one", metadata={"a": 1}))
    assert space is not None
    assert await database.read(lambda: entities_and_spaces.find_space("one")) is not None
    assert (space.name, space.metadata) == ("First", {"a": 1})
    assert await database.run(lambda: entities_and_spaces.update_space("three", name="No")) is None


@pytest.mark.spec("7.1")
async def test_messages_of_concurrent_senders_are_numbered_without_gaps(database: Database) -> None:
    await _create_entities(database)

    async def say(number: int) -> int:
        space = "one" if number % 2 else "two"
        message = await database.run(lambda: messages.create(f"msg_{number}", space, "bob", {"n": number}))
        assert message is not None
        return message.seq

    seqs = await asyncio.gather(*map(say, range(60)))
    assert sorted(seqs[1::2]) == sorted(seqs[::2]) == list(range(1, 31))
    all_messages = await database.read(lambda: messages.list_between("one", limit=1000))
    assert [message.seq for message in all_messages] == list(range(1, 31))
    assert await database.run(lambda: messages.create("msg_x", "nowhere", "bob", "lost")) is None


async def test_messages_are_read_forwards_backwards_and_from_the_end(database: Database) -> None:
    await _create_entities(database)
    for number in range(1, 11):
        await database.run(lambda number=number: messages.create(f"msg_{number}", "one", "bob", number))

    async def seqs(**filters: int) -> list[int]:
        return [message.seq for message in await database.read(lambda: messages.list_between("one", **filters))]

    assert await seqs(after=3, limit=4) == [4, 5, 6, 7]
    assert await seqs(before=5, limit=2) == [3, 4]
    assert await seqs(after=2, before=5) == [3, 4]
    assert await seqs(after=10) == []
    last, total = await database.read(lambda: messages.list_latest("one", limit=3, offset=1))
    assert ([message.seq for message in last], total) == ([7, 8, 9], 10)


@pytest.mark.spec("7.1")
async def test_ended_message_keeps_its_status(database: Database) -> None:
    await _create_entities(database)
    message = await database.run(
        lambda: messages.create(
            "msg_1", "one", "ada", {"input": 1}, kind="tool", status="requires_action", run_id="run_1", call_id="call_1"
        )
    )
    assert message is not None
    assert (message.kind, message.status, message.run_id, message.call_id) == (
        "tool",
        "requires_action",
        "run_1",
        "call_1",
    )
    ends = await asyncio.gather(
        database.run(lambda: messages.update_status("msg_1", status="complete", content={"output": 1})),
        database.run(lambda: messages.update_status("msg_1", status="error", content={"error": "late"})),
    )
    (winner,) = [end for end in ends if end is not None]
    stored_message = await database.read(lambda: messages.find("msg_1"))
    assert stored_message is not None
    assert (stored_message.status, stored_message.content) == (winner.status, winner.content)
    assert stored_message.updated_at >= stored_message.created_at
