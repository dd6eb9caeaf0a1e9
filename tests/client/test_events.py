"""Subscriptions against a real gateway: no event is missed or repeated over lost connections."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.client.unreliable_proxy import open_unreliable_proxy
from tests.server.gateway_api import SECRET
from toolspace.client.client import ToolspaceClient
from toolspace.client.errors import NotFound
from toolspace.client.events import StreamEvent, read_event
from toolspace.core.sse_decoder import SseDecoder
from toolspace.server.gateway import Gateway
from toolspace.server.uvicorn_server import bind_socket, serve_gateway, socket_url

TEXT = b': hi\n\nretry: 250\n\nid: 7\nevent: a\ndata: {"x": 1}\n\ndata: one\r\ndata: two\r\n\r\nid: 9\n\n'
EVENTS = [
    StreamEvent(id="7", type="a", data={"x": 1}),
    StreamEvent(id=None, type="message", data="one\ntwo"),
    StreamEvent(id="9", type="", data=None),
]


@given(st.lists(st.integers(1, len(TEXT) - 1), max_size=8))
def test_events_do_not_depend_on_how_their_bytes_are_split(cuts: list[int]) -> None:
    decoder, events, start = SseDecoder(), list[StreamEvent](), 0
    for end in [*sorted(cuts), len(TEXT)]:
        events += map(read_event, decoder.feed(TEXT[start:end]))
        start = end
    assert [(event.id, event.type, event.data) for event in events] == [
        (event.id, event.type, event.data) for event in EVENTS
    ]
    assert decoder.retry == 0.25


@pytest.mark.spec("13.1")
async def test_a_subscription_returns_the_events_of_a_space(client: ToolspaceClient) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    await client.spaces.send_message(space.id, "before", entity_id=ada.id)
    async with client.spaces.subscribe(space.id, from_start=True) as events:
        received_events = [await anext(events), await anext(events)]
        assert [event.type for event in received_events] == ["message.started", "message.done"]
        assert received_events[1].data["message"]["content"] == "before"
        await client.spaces.send_message(space.id, "after", entity_id=ada.id)
        assert (await anext(events)).type == "message.started"
        assert events.last_event_id == "3"
    async with client.spaces.subscribe(space.id, last_event_id=events.last_event_id) as rest:
        assert (await anext(rest)).data["message"]["content"] == "after"


@pytest.mark.spec("7.4")
@pytest.mark.spec("13.1")
async def test_lost_connections_neither_lose_nor_repeat_events(client: ToolspaceClient, url: str) -> None:
    chance = random.Random(4)
    people = [await client.entities.create("human", f"Person {number}") for number in range(8)]
    space = await client.spaces.create("Support", members=[person.id for person in people])
    count = 40

    async def talk(entity_id: str) -> None:
        for number in range(count // len(people)):
            await client.spaces.send_message(space.id, f"{entity_id} {number}", entity_id=entity_id)

    async with (
        # Each connection brings a few events, and breaks in the middle of person.
        open_unreliable_proxy(url, lambda: chance.randint(500, 6_000)) as proxy,
        ToolspaceClient(proxy.url, secret_key=SECRET) as reader,
        reader.spaces.subscribe(space.id, from_start=True) as events,
        asyncio.TaskGroup() as group,
    ):
        for person in people:
            group.create_task(talk(person.id))
        received_events = [await anext(events) for _ in range(2 * count)]
        assert proxy.dropped_count > 2
    assert [event.id for event in received_events] == [str(number) for number in range(1, 2 * count + 1)]
    contents = [event.data["message"]["content"] for event in received_events if event.type == "message.done"]
    assert len(set(contents)) == len(contents) == count


@pytest.mark.spec("13.1")
async def test_a_subscription_continues_after_a_restart_of_the_gateway(config: Path) -> None:
    server_socket = bind_socket("127.0.0.1", 0)
    url, port = socket_url(server_socket), server_socket.getsockname()[1]
    async with ToolspaceClient(url, secret_key=SECRET) as client, asyncio.timeout(30):
        async with Gateway.open(config) as gateway, serve_gateway(gateway, server_socket):
            ada = await client.entities.create("human", "Ada")
            space = await client.spaces.create("Support", members=[ada.id])
            events = client.spaces.subscribe(space.id, from_start=True)
            await client.spaces.send_message(space.id, "before", entity_id=ada.id)
            received_events = [await anext(events) for _ in range(2)]
        next_event = asyncio.ensure_future(anext(events))
        async with Gateway.open(config) as gateway, serve_gateway(gateway, bind_socket("127.0.0.1", port)):
            await client.spaces.send_message(space.id, "after", entity_id=ada.id)
            received_events += [await next_event, await anext(events)]
        events.close()
    assert [event.id for event in received_events] == ["1", "2", "3", "4"]


async def test_a_subscription_of_a_deleted_space_raises(client: ToolspaceClient, url: str) -> None:
    space = await client.spaces.create("Support")
    async with open_unreliable_proxy(url) as proxy, ToolspaceClient(proxy.url, secret_key=SECRET) as reader:
        events = reader.spaces.subscribe(space.id)
        next_event = asyncio.ensure_future(anext(events))
        await events.connected.wait()
        await client.spaces.delete(space.id)
        proxy.disconnect_all()
        with pytest.raises(NotFound):
            await next_event


async def test_closing_ends_a_waiting_iteration(client: ToolspaceClient) -> None:
    space = await client.spaces.create("Support")
    events = client.spaces.subscribe(space.id)

    async def read() -> list[StreamEvent]:
        return [event async for event in events]

    read_task = asyncio.ensure_future(read())
    await events.connected.wait()
    events.close()
    assert await read_task == []


async def test_leaving_the_loop_closes_the_connection(client: ToolspaceClient, gateway: Gateway) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    await client.spaces.send_message(space.id, "hello", entity_id=ada.id)
    async for _ in client.spaces.subscribe(space.id, from_start=True):
        assert len(gateway.streams) == 1
        break
    gc.collect()
    while len(gateway.streams):
        await client.spaces.get(space.id)


async def test_the_stream_of_all_events_has_every_space_and_run(client: ToolspaceClient) -> None:
    ada = await client.entities.create("human", "Ada")
    space = await client.spaces.create("Support", members=[ada.id])
    async with client.subscribe() as events:
        next_event = asyncio.ensure_future(anext(events))
        await events.connected.wait()
        await client.spaces.send_message(space.id, "hello", entity_id=ada.id)
        event = await next_event
    assert (event.type, event.data["stream"]) == ("message.started", f"space:{space.id}")
