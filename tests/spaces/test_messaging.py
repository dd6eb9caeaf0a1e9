"""Messages that are sent in pieces, on each database."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.spaces.service_harness import ServiceHarness, service_harness
from toolspace.core.stored_records import InboxEvent, Message, StoredEvent, space_stream
from toolspace.errors import RefusedError
from toolspace.server.routes.entities_and_spaces import remove_member_transaction
from toolspace.spaces import messaging
from toolspace.storage.database import Database
from toolspace.storage.queries import entities_and_spaces, inbox, messages

pytestmark = [pytest.mark.spec("9.1")]


@pytest.fixture
async def harness(database: Database) -> AsyncIterator[ServiceHarness]:
    async with service_harness(database) as services:
        await services.ledger.write(entities_and_spaces.create_entity, "bob", "agent", "Bob", {})
        await services.ledger.write(entities_and_spaces.add_member, services.space, "bob")
        yield services


async def start(harness: ServiceHarness, message_id: str = "msg_1", run_id: str | None = "run_1") -> Message:
    return await harness.ledger.commit(messaging.start_message, harness.space, harness.agent, message_id, run_id)


async def append(harness: ServiceHarness, delta: str, message_id: str = "msg_1", **options: Any) -> bool:
    return await harness.ledger.commit(messaging.append_to_message, message_id, delta, **options)


async def send(harness: ServiceHarness, content: str, message_id: str = "msg_1", **options: Any) -> Message:
    options = {"run_id": "run_1", **options}
    return await harness.ledger.commit(
        messaging.send_message, harness.space, harness.agent, content, message_id=message_id, **options
    )


async def message_events(harness: ServiceHarness) -> list[StoredEvent]:
    return [event for event in await harness.events(space_stream(harness.space)) if event.type.startswith("message.")]


async def inbox_of_bob(harness: ServiceHarness) -> list[InboxEvent]:
    return await harness.ledger.read(inbox.list_events, "bob")


@pytest.mark.spec("7.5")
async def test_message_is_streamed_while_written_and_delivered_when_complete(harness: ServiceHarness) -> None:
    started = await start(harness)
    assert (started.status, started.content, started.seq, started.run_id) == ("running", "", 1, "run_1")
    assert await append(harness, "On ")
    assert await append(harness, "it.")
    assert await inbox_of_bob(harness) == []
    assert [(message.id, message.status) for message in await harness.messages()] == [("msg_1", "running")]
    await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "Well?")
    sent_message = await send(harness, "On it.")
    assert (sent_message.status, sent_message.content, sent_message.seq) == ("complete", "On it.", 1)
    events = [event for event in await message_events(harness) if event.data.get("messageId", "msg_1") == "msg_1"]
    assert [event.type for event in events[:3]] == ["message.started", "message.delta", "message.delta"]
    assert [event.data["delta"] for event in events[1:3]] == ["On ", "it."]
    assert events[-1].data["message"]["content"] == "On it."
    assert {event.visibility for event in events} == {"full"}  # Members of the space see them.
    from_agent = [event for event in await inbox_of_bob(harness) if event.data["senderId"] == harness.agent]
    assert [event.data["content"] for event in from_agent] == ["On it."]


async def test_history_for_agents_has_complete_messages_only(harness: ServiceHarness) -> None:
    await start(harness)
    await start(harness, "msg_2")
    await harness.ledger.commit(messaging.abandon_message, "msg_2", "the model broke off")
    await harness.ledger.commit(messaging.send_message, harness.space, harness.person, "Hello")
    latest, total = await harness.ledger.read(messages.list_latest, harness.space, complete_only=True)
    assert ([message.content for message in latest], total) == (["Hello"], 1)
    assert [message.status for message in await harness.messages()] == ["running", "error", "complete"]


async def test_streamed_text_can_be_restarted(harness: ServiceHarness) -> None:
    await start(harness)
    await append(harness, "No")
    await append(harness, "Yes", restart=True)
    assert (await message_events(harness))[-1].data == {"messageId": "msg_1", "delta": "Yes", "restart": True}
    second_start = await start(harness)  # The process that takes over starts it anew.
    assert second_start.seq == 1
    assert (await message_events(harness))[-1].data == {"messageId": "msg_1", "delta": "", "restart": True}
    assert len(await harness.messages()) == 1


async def test_abandoned_message_is_announced_once_and_reaches_no_inbox(harness: ServiceHarness) -> None:
    await start(harness)
    await append(harness, "On")
    abandoned_message = await harness.ledger.commit(messaging.abandon_message, "msg_1", "the model broke off")
    assert abandoned_message is not None
    assert (abandoned_message.status, abandoned_message.metadata) == ("error", {"error": "the model broke off"})
    assert await harness.ledger.commit(messaging.abandon_message, "msg_1", "again") is None
    assert not await append(harness, " it.")
    assert [event.type for event in await message_events(harness)] == [
        "message.started",
        "message.delta",
        "message.done",
    ]
    assert await inbox_of_bob(harness) == []


async def test_abandoned_message_can_be_restarted_or_completed(harness: ServiceHarness) -> None:
    for message_id in ("msg_1", "msg_2"):
        await start(harness, message_id)
    assert await harness.ledger.commit(messaging.abandon_messages_of_run, "run_1") == 2
    resumed_message = await start(harness)
    assert (resumed_message.status, resumed_message.metadata, resumed_message.seq) == ("running", {}, 1)
    assert await append(harness, "So")
    assert (await send(harness, "So.")).status == "complete"
    assert (await send(harness, "Now.", "msg_2")).metadata == {}
    assert sorted(event.data["content"] for event in await inbox_of_bob(harness)) == ["Now.", "So."]


async def test_only_messages_of_one_run_are_abandoned(harness: ServiceHarness) -> None:
    await start(harness, "msg_1", "run_1")
    await start(harness, "msg_2", "run_2")
    await start(harness, "msg_3", "run_1")
    await send(harness, "Said.", "msg_3")
    assert await harness.ledger.commit(messaging.abandon_messages_of_run, "run_1", "it was canceled") == 1
    assert [message.status for message in await harness.messages()] == ["error", "running", "complete"]


async def test_complete_message_cannot_change(harness: ServiceHarness) -> None:
    await start(harness)
    await send(harness, "On it.")
    with pytest.raises(RefusedError, match="already"):
        await send(harness, "Something else.")
    with pytest.raises(RefusedError, match="already"):
        await start(harness)
    assert not await append(harness, "!")
    assert await harness.ledger.commit(messaging.abandon_message, "msg_1", "too late") is None
    assert [message.content for message in await harness.messages()] == ["On it."]
    assert len(await inbox_of_bob(harness)) == 1


async def test_only_the_sender_completes_its_message(harness: ServiceHarness) -> None:
    await start(harness)
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


async def test_sender_that_left_the_space_appends_nothing(harness: ServiceHarness) -> None:
    await start(harness)
    await harness.ledger.commit(remove_member_transaction, harness.space, harness.agent)
    assert not await append(harness, "secret")
    with pytest.raises(RefusedError, match="not a member"):
        await send(harness, "secret")
    assert [event.type for event in await message_events(harness)] == ["message.started"]


async def test_only_members_start_a_message(harness: ServiceHarness) -> None:
    await harness.ledger.write(entities_and_spaces.create_space, "den", "Den", {})
    for space_id, sender, error in (
        ("den", harness.agent, "not a member"),
        ("none", harness.agent, "no space"),
        (harness.space, "x", "no entity"),
    ):
        with pytest.raises(RefusedError, match=error):
            await harness.ledger.commit(messaging.start_message, space_id, sender, "msg_1")


async def test_message_started_in_another_space_is_sent_in_the_current_one(harness: ServiceHarness) -> None:
    await harness.ledger.write(entities_and_spaces.create_space, "den", "Den", {})
    await harness.ledger.write(entities_and_spaces.add_member, "den", harness.agent)
    await start(harness)
    sent_message = await harness.ledger.commit(
        messaging.send_message, "den", harness.agent, "Here.", message_id="msg_1", run_id="run_1"
    )
    assert (sent_message.space_id, sent_message.status, sent_message.content) == ("den", "complete", "Here.")
    assert [(message.id, message.status) for message in await harness.messages()] == [("msg_1", "error")]


async def test_deltas_are_valid_text(harness: ServiceHarness) -> None:
    await start(harness)
    assert await append(harness, "a\ud800b\0c")
    assert (await message_events(harness))[-1].data["delta"] == "a?b\0c"
    assert await append(harness, "")
    assert len(await message_events(harness)) == 2  # An empty delta emits no event.
