"""The stream routes: permissions and ends of streams."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

import toolspace
from tests.server.gateway_api import ApiClient
from toolspace.core.stored_records import EVENT_TYPES
from toolspace.server.gateway import Gateway
from toolspace.spaces import messaging


@asynccontextmanager
async def open_stream(api: ApiClient, path: str) -> AsyncIterator[aiohttp.StreamReader]:
    async with api.session.get(api.url + path, headers=api.headers) as response:
        assert response.status == 200, await response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        yield response.content


async def until(stream: aiohttp.StreamReader, words: bytes) -> bytes:
    data = b""
    async with asyncio.timeout(30):
        while words not in data:
            piece = await stream.readany()
            assert piece, f"it ended before {words!r}: {data!r}"
            data += piece
    return data


async def people(api: ApiClient) -> None:
    for name, kind in (("ann", "human"), ("bob", "human"), ("bot", "agent")):
        await api.create("/api/entities", id=name, type=kind, name=name.title())
    await api.create("/api/spaces", id="den", name="The den", members=["ann", "bot"])


@pytest.mark.spec("7.4")
@pytest.mark.spec("12.1")
async def test_messages_are_streamed_and_can_be_replayed(api: ApiClient) -> None:
    await people(api)
    ann = await api.member("ann")
    async with open_stream(ann, "/api/spaces/den/stream") as stream:
        await api.create("/api/spaces/den/messages", entityId="bot", content="Hello Ann")
        await until(stream, b"event: message.done")
    resumed_api = api.with_headers(**ann.headers, last_event_id="1")
    async with open_stream(resumed_api, "/api/spaces/den/stream") as stream:
        data = await until(stream, b"message.done")
    assert b"Hello Ann" in data
    assert b"message.started" not in data


@pytest.mark.spec("9.1")
async def test_members_receive_a_message_while_it_is_written(gateway: Gateway, api: ApiClient) -> None:
    await people(api)
    ann, bob = await api.member("ann"), await api.member("bob")
    run = (await api.create("/api/runs", agentEntityId="bot", spaceId="den"))["id"]
    message_id = messaging.message_id_for_call("call_1")
    commit = gateway.ledger.commit
    async with open_stream(ann, "/api/spaces/den/stream") as stream:
        await commit(messaging.start_message, "den", "bot", message_id, run)
        await commit(messaging.append_to_message, message_id, "Hello ")
        assert b'"delta":"Hello "' in await until(stream, b"message.delta")
        (message,) = (await ann.get("/api/spaces/den/messages")).data["items"]
        assert (message["id"], message["status"], message["content"]) == (message_id, "running", "")
        duplicate = await api.post("/api/spaces/den/messages", {"id": message_id, "entityId": "ann", "content": "Mine"})
        assert duplicate.status == 409
        body = {"name": "send_message", "args": {"text": "Hello Ann"}, "callId": "call_1"}
        assert (await api.post(f"/api/runs/{run}/calls", body)).data["result"]["messageId"] == message_id
        assert b"Hello Ann" in await until(stream, b"message.done")
    (message,) = (await ann.get("/api/spaces/den/messages")).data["items"]
    assert (message["status"], message["content"]) == ("complete", "Hello Ann")
    assert (await bob.get("/api/spaces/den/messages")).status == 403


async def test_a_run_streams_its_start_and_its_end(api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den", trigger="why")
    path = f"/api/runs/{run['id']}/events?from=start"
    async with open_stream(api, path) as stream, open_stream(await api.member("ann"), path) as members:
        await api.create(f"/api/runs/{run['id']}/close", usage={"tokens": 4711})
        assert b"4711" in await until(stream, b"event: run.done")
        assert b"4711" not in await until(members, b"event: run.done")


async def test_an_operator_receives_the_events_of_all_streams(api: ApiClient) -> None:
    await people(api)
    async with open_stream(api, "/api/events") as stream:
        await api.create("/api/spaces/den/messages", entityId="ann", content="Hello")
        assert b"space:den" in await until(stream, b"message.done")


@pytest.mark.spec("8.1")
async def test_streams_require_membership(api: ApiClient) -> None:
    await people(api)
    run = await api.create("/api/runs", agentEntityId="bot", spaceId="den")
    ann, bob = await api.member("ann"), await api.member("bob")
    for path in ("/api/spaces/den/stream", f"/api/runs/{run['id']}/events"):
        assert (await bob.get(path)).status == 403
        assert (await api.with_headers().get(path)).status == 401
    for path in ("/api/spaces/lost/stream", "/api/runs/lost/events"):
        assert (await ann.get(path)).status == 404
    assert (await ann.get("/api/events")).status == 403


@pytest.mark.spec("8.1")
async def test_a_stream_ends_for_a_removed_member(gateway: Gateway, api: ApiClient) -> None:
    gateway.streams.recheck_after = 3600.0  # By the notification, not by the timer.
    await people(api)
    async with open_stream(await api.member("ann"), "/api/spaces/den/stream") as stream:
        await api.delete("/api/spaces/den/members/ann")
        await api.create("/api/spaces/den/messages", entityId="bot", content="Now that she is gone")
        async with asyncio.timeout(30):
            rest = await stream.read()
    assert b"she is gone" not in rest


@pytest.mark.parametrize("query", ["format=morse", "lastEventId=x", "from=yesterday", "until=run.over", "speed=9"])
async def test_an_invalid_stream_request_is_refused(api: ApiClient, query: str) -> None:
    await people(api)
    reply = await api.get(f"/api/spaces/den/stream?{query}")
    assert reply.status == 400
    assert reply.headers["content-type"] == "application/problem+json"
    assert (await api.request("HEAD", "/api/spaces/den/stream")).status == 405


async def test_an_unknown_event_type_is_refused_with_a_suggestion(api: ApiClient) -> None:
    await people(api)
    reply = await api.get("/api/spaces/den/stream?until=run.dome")
    assert reply.status == 400
    assert "run.done" in reply.detail
    assert "tool.started" not in reply.detail  # A suggestion instead of a list.


def test_every_event_type_can_end_a_stream() -> None:
    """`until` accepts every event type that is appended anywhere."""
    source = Path(toolspace.__file__).parent
    folders = ("spaces", "agent", "gateway/routes")
    text = "".join(path.read_text() for folder in folders for path in source.glob(f"{folder}/*.py"))
    types = set(re.findall(r'"((?:run|tool|message)\.[a-z]+)"', text))
    assert types >= {"run.started", "tool.done", "message.delta"}
    assert types <= set(EVENT_TYPES)
