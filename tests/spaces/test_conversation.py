"""Messages that are said piece by piece, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.rig import Rig, rig
from toolspace.core.records import InboxEvent, Message, StoredEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces import deletion, messaging
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, inbox, messages

pytestmark = [pytest.mark.spec("9.1")]


@pytest.fixture
async def r(database: Database) -> AsyncIterator[Rig]:
    async with rig(database) as made:
        await made.ledger.write(entities.create_entity, "bob", "agent", "Bob", {})
        await made.ledger.write(entities.add_member, made.space, "bob")
        yield made


async def begin(r: Rig, message_id: str = "msg_1", run_id: str | None = "run_1") -> Message:
    return await r.ledger.commit(messaging.start_message, r.space, r.agent, message_id, run_id)


async def grow(r: Rig, delta: str, message_id: str = "msg_1", **options: Any) -> bool:
    return await r.ledger.commit(messaging.append_to_message, message_id, delta, **options)


async def say(r: Rig, content: str, message_id: str = "msg_1", **options: Any) -> Message:
    options = {"run_id": "run_1", **options}
    return await r.ledger.commit(messaging.send_message, r.space, r.agent, content, message_id=message_id, **options)


async def told(r: Rig) -> list[StoredEvent]:
    return [event for event in await r.events(space_stream(r.space)) if event.type.startswith("message.")]


async def bobs(r: Rig) -> list[InboxEvent]:
    return await r.ledger.read(inbox.list_events, "bob")


@pytest.mark.spec("7.5")
async def test_a_message_is_streamed_while_it_is_written_and_delivered_when_it_is_said(r: Rig) -> None:
    begun = await begin(r)
    assert (begun.status, begun.content, begun.seq, begun.run_id) == ("running", "", 1, "run_1")
    assert await grow(r, "On ")
    assert await grow(r, "it.")
    assert await bobs(r) == []
    assert [(message.id, message.status) for message in await r.messages()] == [("msg_1", "running")]
    await r.ledger.commit(messaging.send_message, r.space, r.person, "Well?")
    said = await say(r, "On it.")
    assert (said.status, said.content, said.seq) == ("complete", "On it.", 1)
    events = [event for event in await told(r) if event.data.get("messageId", "msg_1") == "msg_1"]
    assert [event.type for event in events[:3]] == ["message.started", "message.delta", "message.delta"]
    assert [event.data["delta"] for event in events[1:3]] == ["On ", "it."]
    assert events[-1].data["message"]["content"] == "On it."
    assert {event.visibility for event in events} == {"full"}  # Members of the space see them.
    from_agent = [event for event in await bobs(r) if event.data["senderId"] == r.agent]
    assert [event.data["content"] for event in from_agent] == ["On it."]


async def test_only_what_is_said_is_in_the_history_that_agents_read(r: Rig) -> None:
    await begin(r)
    await begin(r, "msg_2")
    await r.ledger.commit(messaging.abandon_message, "msg_2", "the model broke off")
    await r.ledger.commit(messaging.send_message, r.space, r.person, "Hello")
    found, total = await r.ledger.read(messages.list_latest, r.space, complete_only=True)
    assert ([message.content for message in found], total) == (["Hello"], 1)
    assert [message.status for message in await r.messages()] == ["running", "error", "complete"]


async def test_what_was_written_so_far_can_be_void(r: Rig) -> None:
    await begin(r)
    await grow(r, "No")
    await grow(r, "Yes", restart=True)
    assert (await told(r))[-1].data == {"messageId": "msg_1", "delta": "Yes", "restart": True}
    again = await begin(r)  # Whoever took over begins anew.
    assert again.seq == 1
    assert (await told(r))[-1].data == {"messageId": "msg_1", "delta": "", "restart": True}
    assert len(await r.messages()) == 1


async def test_an_abandoned_message_is_told_of_once_and_reaches_no_inbox(r: Rig) -> None:
    await begin(r)
    await grow(r, "On")
    left = await r.ledger.commit(messaging.abandon_message, "msg_1", "the model broke off")
    assert left is not None
    assert (left.status, left.metadata) == ("error", {"error": "the model broke off"})
    assert await r.ledger.commit(messaging.abandon_message, "msg_1", "again") is None
    assert not await grow(r, " it.")
    assert [event.type for event in await told(r)] == ["message.started", "message.delta", "message.done"]
    assert await bobs(r) == []


async def test_an_abandoned_message_can_be_begun_anew_or_said(r: Rig) -> None:
    for message_id in ("msg_1", "msg_2"):
        await begin(r, message_id)
    assert await r.ledger.commit(messaging.abandon_messages_of_run, "run_1") == 2
    resumed = await begin(r)
    assert (resumed.status, resumed.metadata, resumed.seq) == ("running", {}, 1)
    assert await grow(r, "So")
    assert (await say(r, "So.")).status == "complete"
    assert (await say(r, "Now.", "msg_2")).metadata == {}
    assert sorted(event.data["content"] for event in await bobs(r)) == ["Now.", "So."]


async def test_the_messages_of_one_run_are_ended_and_no_others(r: Rig) -> None:
    await begin(r, "msg_1", "run_1")
    await begin(r, "msg_2", "run_2")
    await begin(r, "msg_3", "run_1")
    await say(r, "Said.", "msg_3")
    assert await r.ledger.commit(messaging.abandon_messages_of_run, "run_1", "it was canceled") == 1
    assert [message.status for message in await r.messages()] == ["error", "running", "complete"]


async def test_what_is_said_is_said_for_good(r: Rig) -> None:
    await begin(r)
    await say(r, "On it.")
    with pytest.raises(RefusedError, match="already"):
        await say(r, "Something else.")
    with pytest.raises(RefusedError, match="already"):
        await begin(r)
    assert not await grow(r, "!")
    assert await r.ledger.commit(messaging.abandon_message, "msg_1", "too late") is None
    assert [message.content for message in await r.messages()] == ["On it."]
    assert len(await bobs(r)) == 1


async def test_nobody_finishes_what_another_began(r: Rig) -> None:
    await begin(r)
    for sender, run_id in ((r.person, None), (r.person, "run_1"), ("bob", "run_1"), (r.agent, "run_2")):
        with pytest.raises(RefusedError, match="already"):
            await r.ledger.commit(messaging.send_message, r.space, sender, "Mine", message_id="msg_1", run_id=run_id)
        with pytest.raises(RefusedError, match="already"):
            await r.ledger.commit(messaging.start_message, r.space, sender, "msg_1", run_id)
    assert [message.status for message in await r.messages()] == ["running"]


async def test_one_who_left_says_no_more_of_it(r: Rig) -> None:
    await begin(r)
    await r.ledger.commit(deletion.remove_member, r.space, r.agent)
    assert not await grow(r, "secret")
    with pytest.raises(RefusedError, match="not a member"):
        await say(r, "secret")
    assert [event.type for event in await told(r)] == ["message.started"]


async def test_only_members_begin_a_message(r: Rig) -> None:
    await r.ledger.write(entities.create_space, "den", "Den", {})
    for space_id, sender, error in (
        ("den", r.agent, "not a member"),
        ("none", r.agent, "no space"),
        (r.space, "x", "no entity"),
    ):
        with pytest.raises(RefusedError, match=error):
            await r.ledger.commit(messaging.start_message, space_id, sender, "msg_1")


async def test_a_message_that_was_begun_elsewhere_is_said_where_its_sender_is_now(r: Rig) -> None:
    await r.ledger.write(entities.create_space, "den", "Den", {})
    await r.ledger.write(entities.add_member, "den", r.agent)
    await begin(r)
    said = await r.ledger.commit(messaging.send_message, "den", r.agent, "Here.", message_id="msg_1", run_id="run_1")
    assert (said.space_id, said.status, said.content) == ("den", "complete", "Here.")
    assert [(message.id, message.status) for message in await r.messages()] == [("msg_1", "error")]


async def test_deltas_are_text_that_every_reader_can_read(r: Rig) -> None:
    await begin(r)
    assert await grow(r, "a\ud800b\0c")
    assert (await told(r))[-1].data["delta"] == "a?b\0c"
    assert await grow(r, "")
    assert len(await told(r)) == 2  # Nothing is told of nothing.
