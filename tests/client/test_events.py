"""Subscriptions: nothing is missed and nothing comes twice, however often the line breaks."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.breaker import breaking
from tests.server.gateway_api import SECRET
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import NotFound
from toolspace.client.events import StreamEvent, read_event
from toolspace.core.sse import SseDecoder
from toolspace.server.gateway import Gateway
from toolspace.server.web_server import bind_socket, serve_gateway, socket_url

TEXT = b': hi\n\nretry: 250\n\nid: 7\nevent: a\ndata: {"x": 1}\n\ndata: one\r\ndata: two\r\n\r\nid: 9\n\n'
EVENTS = [
    StreamEvent(id="7", type="a", data={"x": 1}),
    StreamEvent(id=None, type="message", data="one\ntwo"),
    StreamEvent(id="9", type="", data=None),
]


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=8))
def test_events_are_the_same_however_their_bytes_are_cut(cuts: list[int]) -> None:
    decoder, events, start = SseDecoder(), list[StreamEvent](), 0
    for end in [*sorted(cuts), len(TEXT)]:
        events += map(read_event, decoder.feed(TEXT[start:end]))
        start = end
    assert [(one.id, one.type, one.data) for one in events] == [(one.id, one.type, one.data) for one in EVENTS]
    assert decoder.retry == 0.25


@pytest.mark.spec("13.1")
async def test_subscription_gives_what_happens_in_a_space(client: ToolspaceClient) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    await client.spaces.send_message(space.id, "before", entity_id=ada.id)
    async with client.spaces.subscribe(space.id, from_start=True) as events:
        seen = [await anext(events), await anext(events)]
        assert [event.type for event in seen] == ["message.started", "message.done"]
        assert seen[1].data["message"]["content"] == "before"
        await client.spaces.send_message(space.id, "after", entity_id=ada.id)
        assert (await anext(events)).type == "message.started"
        assert events.last_event_id == "3"
    async with client.spaces.subscribe(space.id, last_event_id=events.last_event_id) as rest:
        assert (await anext(rest)).data["message"]["content"] == "after"


@pytest.mark.spec("7.4")
@pytest.mark.spec("13.1")
async def test_line_that_breaks_again_and_again_loses_and_repeats_nothing(client: ToolspaceClient, url: str) -> None:
    chance = random.Random(4)
    people = [await client.entities.create("human", f"Person {number}") for number in range(8)]
    space = await client.spaces.create("Support", members=[one.id for one in people])
    count = 40

    async def talk(entity_id: str) -> None:
        for number in range(count // len(people)):
            await client.spaces.send_message(space.id, f"{entity_id} {number}", entity_id=entity_id)

    async with (
        # Each connection brings a few events, and breaks in the middle of one.
        breaking(url, lambda: chance.randint(500, 6_000)) as breaker,
        ToolspaceClient(breaker.url, secret_key=SECRET) as reader,
        reader.spaces.subscribe(space.id, from_start=True) as events,
        asyncio.TaskGroup() as group,
    ):
        for person in people:
            group.create_task(talk(person.id))
        seen = [await anext(events) for _ in range(2 * count)]
        assert breaker.broken > 2
    assert [event.id for event in seen] == [str(number) for number in range(1, 2 * count + 1)]
    said = [event.data["message"]["content"] for event in seen if event.type == "message.done"]
    assert len(set(said)) == len(said) == count


@pytest.mark.spec("13.1")
async def test_subscription_goes_on_when_the_gateway_was_restarted(config: Path) -> None:
    listening = bind_socket("127.0.0.1", 0)
    url, port = socket_url(listening), listening.getsockname()[1]
    async with ToolspaceClient(url, secret_key=SECRET) as client, asyncio.timeout(30):
        async with Gateway.open(config) as gateway, serve_gateway(gateway, listening):
            ada = await client.entities.create("human", "Ada")
            space = await client.spaces.create("Support", members=[ada.id])
            events = client.spaces.subscribe(space.id, from_start=True)
            await client.spaces.send_message(space.id, "before", entity_id=ada.id)
            seen = [await anext(events) for _ in range(2)]
        waiting = asyncio.ensure_future(anext(events))
        async with Gateway.open(config) as gateway, serve_gateway(gateway, bind_socket("127.0.0.1", port)):
            await client.spaces.send_message(space.id, "after", entity_id=ada.id)
            seen += [await waiting, await anext(events)]
        events.close()
    assert [event.id for event in seen] == ["1", "2", "3", "4"]


async def test_subscription_of_what_is_removed_ends_with_an_error(client: ToolspaceClient, url: str) -> None:
    space = await client.spaces.create("Support")
    async with breaking(url) as breaker, ToolspaceClient(breaker.url, secret_key=SECRET) as reader:
        events = reader.spaces.subscribe(space.id)
        waiting = asyncio.ensure_future(anext(events))
        await events.connected.wait()
        await client.spaces.delete(space.id)
        breaker.cut()
        with pytest.raises(NotFound):
            await waiting


async def test_closing_ends_an_iteration_that_waits(client: ToolspaceClient) -> None:
    space = await client.spaces.create("Support")
    events = client.spaces.subscribe(space.id)

    async def read() -> list[StreamEvent]:
        return [event async for event in events]

    reading = asyncio.ensure_future(read())
    await events.connected.wait()
    events.close()
    assert await reading == []


async def test_loop_that_is_left_gives_its_connection_back(client: ToolspaceClient, gateway: Gateway) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    await client.spaces.send_message(space.id, "hello", entity_id=ada.id)
    async for _ in client.spaces.subscribe(space.id, from_start=True):
        assert len(gateway.streams) == 1
        break
    gc.collect()
    while len(gateway.streams):
        await client.spaces.get(space.id)


async def test_everything_is_for_those_who_watch(client: ToolspaceClient) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    async with client.subscribe() as events:
        waiting = asyncio.ensure_future(anext(events))
        await events.connected.wait()
        await client.spaces.send_message(space.id, "hello", entity_id=ada.id)
        event = await waiting
    assert (event.type, event.data["stream"]) == ("message.started", f"space:{space.id}")
