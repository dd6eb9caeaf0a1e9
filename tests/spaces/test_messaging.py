"""Messages that are said piece by piece, on both databases."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.core.records import InboxEvent, Message, StoredEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.spaces import deletion, messaging
from toolspace.storage.database import Database
from toolspace.storage.queries import entities, inbox, messages

pytestmark = [pytest.mark.spec("9.1")]


@pytest.fixture
async def harness(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as services:
        await services.ledger.write(entities.create_entity, "bob", "agent", "Bob", {})
        await services.ledger.write(entities.add_member, services.space, "bob")
        yield services


async def begin(harness: ServiceHarness, message_id: str = "msg_1", run_id: str | None = "run_1") -> Message:
    return await harness.ledger.commit(messaging.start_message, harness.space, harness.agent, message_id, run_id)


async def grow(harness: ServiceHarness, delta: str, message_id: str = "msg_1", **options: Any) -> bool:
    return await harness.ledger.commit(messaging.append_to_message, message_id, delta, **options)


async def say(harness: ServiceHarness, content: str, message_id: str = "msg_1", **options: Any) -> Message:
    options = {"run_id": "run_1", **options}
    return await harness.ledger.commit(
        messaging.send_message, harness.space, harness.agent, content, message_id=message_id, **options
    )


async def told(harness: ServiceHarness) -> list[StoredEvent]:
    return [event for event in await harness.events(space_stream(harness.space)) if event.type.startswith("message.")]


async def bobs(harness: ServiceHarness) -> list[InboxEvent]:
    return await harness.ledger.read(inbox.list_events, "bob")


@pytest.mark.spec("7.5")
async def test_a_message_is_streamed_while_it_is_written_and_delivered_when_it_is_said(harness: ServiceHarness) -> None:
    begun = await begin(harness)
    assert (begun.status, begun.content, begun.seq, begun.run_id) == ("running", "", 1, "run_1")
    assert await grow(harness, "On ")
    assert await grow(harness, "it.")
    assert await bobs(harness) == []
    assert [(message.id, message.status) for message in await harness.messages()] == [("msg_1", "running")]
    await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "Well?")
    said = await say(harness, "On it.")
    assert (said.status, said.content, said.seq) == ("complete", "On it.", 1)
    events = [event for event in await told(harness) if event.data.get("messageId", "msg_1") == "msg_1"]
    assert [event.type for event in events[:3]] == ["message.started", "message.delta", "message.delta"]
    assert [event.data["delta"] for event in events[1:3]] == ["On ", "it."]
    assert events[-1].data["message"]["content"] == "On it."
    assert {event.visibility for event in events} == {"full"}  # Members of the space see them.
    from_agent = [event for event in await bobs(harness) if event.data["senderId"] == harness.agent]
    assert [event.data["content"] for event in from_agent] == ["On it."]


async def test_only_what_is_said_is_in_the_history_that_agents_read(harness: ServiceHarness) -> None:
    await begin(harness)
    await begin(harness, "msg_2")
    await harness.ledger.commit(messaging.abandon_message, "msg_2", "the model broke off")
    await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "Hello")
    found, total = await harness.ledger.read(messages.list_latest, harness.space, complete_only=True)
    assert ([message.content for message in found], total) == (["Hello"], 1)
    assert [message.status for message in await harness.messages()] == ["running", "error", "complete"]


async def test_what_was_written_so_far_can_be_void(harness: ServiceHarness) -> None:
    await begin(harness)
    await grow(harness, "No")
    await grow(harness, "Yes", restart=True)
    assert (await told(harness))[-1].data == {"messageId": "msg_1", "delta": "Yes", "restart": True}
    again = await begin(harness)  # Whoever took over begins anew.
    assert again.seq == 1
    assert (await told(harness))[-1].data == {"messageId": "msg_1", "delta": "", "restart": True}
    assert len(await harness.messages()) == 1


async def test_an_abandoned_message_is_told_of_once_and_reaches_no_inbox(harness: ServiceHarness) -> None:
    await begin(harness)
    await grow(harness, "On")
    left = await harness.ledger.commit(messaging.abandon_message, "msg_1", "the model broke off")
    assert left is not None
    assert (left.status, left.metadata) == ("error", {"error": "the model broke off"})
    assert await harness.ledger.commit(messaging.abandon_message, "msg_1", "again") is None
    assert not await grow(harness, " it.")
    assert [event.type for event in await told(harness)] == ["message.started", "message.delta", "message.done"]
    assert await bobs(harness) == []


async def test_an_abandoned_message_can_be_begun_anew_or_said(harness: ServiceHarness) -> None:
    for message_id in ("msg_1", "msg_2"):
        await begin(harness, message_id)
    assert await harness.ledger.commit(messaging.abandon_messages_of_run, "run_1") == 2
    resumed = await begin(harness)
    assert (resumed.status, resumed.metadata, resumed.seq) == ("running", {}, 1)
    assert await grow(harness, "So")
    assert (await say(harness, "So.")).status == "complete"
    assert (await say(harness, "Now.", "msg_2")).metadata == {}
    assert sorted(event.data["content"] for event in await bobs(harness)) == ["Now.", "So."]


async def test_the_messages_of_one_run_are_ended_and_no_others(harness: ServiceHarness) -> None:
    await begin(harness, "msg_1", "run_1")
    await begin(harness, "msg_2", "run_2")
    await begin(harness, "msg_3", "run_1")
    await say(harness, "Said.", "msg_3")
    assert await harness.ledger.commit(messaging.abandon_messages_of_run, "run_1", "it was canceled") == 1
    assert [message.status for message in await harness.messages()] == ["error", "running", "complete"]


async def test_what_is_said_is_said_for_good(harness: ServiceHarness) -> None:
    await begin(harness)
    await say(harness, "On it.")
    with pytest.raises(RefusedError, match="already"):
        await say(harness, "Something else.")
    with pytest.raises(RefusedError, match="already"):
        await begin(harness)
    assert not await grow(harness, "!")
    assert await harness.ledger.commit(messaging.abandon_message, "msg_1", "too late") is None
    assert [message.content for message in await harness.messages()] == ["On it."]
    assert len(await bobs(harness)) == 1


async def test_nobody_finishes_what_another_began(harness: ServiceHarness) -> None:
    await begin(harness)
    for sender, run_id in (
        (harness.person, None),
        (harness.person, "run_1"),
        ("bob", "run_1"),
        (harness.agent, "run_2"),
    ):
        with pytest.raises(RefusedError, match="already"):
            await harness.ledger.commit(
                messaging.send_message, harness.space, sender, "Mine", message_id="msg_1", run_id=run_id
            )
        with pytest.raises(RefusedError, match="already"):
            await harness.ledger.commit(messaging.start_message, harness.space, sender, "msg_1", run_id)
    assert [message.status for message in await harness.messages()] == ["running"]


async def test_one_who_left_says_no_more_of_it(harness: ServiceHarness) -> None:
    await begin(harness)
    await harness.ledger.commit(deletion.remove_member, harness.space, harness.agent)
    assert not await grow(harness, "secret")
    with pytest.raises(RefusedError, match="not a member"):
        await say(harness, "secret")
    assert [event.type for event in await told(harness)] == ["message.started"]


async def test_only_members_begin_a_message(harness: ServiceHarness) -> None:
    await harness.ledger.write(entities.create_space, "den", "Den", {})
    for space_id, sender, error in (
        ("den", harness.agent, "not a member"),
        ("none", harness.agent, "no space"),
        (harness.space, "x", "no entity"),
    ):
        with pytest.raises(RefusedError, match=error):
            await harness.ledger.commit(messaging.start_message, space_id, sender, "msg_1")


async def test_a_message_that_was_begun_elsewhere_is_said_where_its_sender_is_now(harness: ServiceHarness) -> None:
    await harness.ledger.write(entities.create_space, "den", "Den", {})
    await harness.ledger.write(entities.add_member, "den", harness.agent)
    await begin(harness)
    said = await harness.ledger.commit(
        messaging.send_message, "den", harness.agent, "Here.", message_id="msg_1", run_id="run_1"
    )
    assert (said.space_id, said.status, said.content) == ("den", "complete", "Here.")
    assert [(message.id, message.status) for message in await harness.messages()] == [("msg_1", "error")]


async def test_deltas_are_text_that_every_reader_can_read(harness: ServiceHarness) -> None:
    await begin(harness)
    assert await grow(harness, "a\ud800b\0c")
    assert (await told(harness))[-1].data["delta"] == "a?b\0c"
    assert await grow(harness, "")
    assert len(await told(harness)) == 2  # Nothing is told of nothing.
