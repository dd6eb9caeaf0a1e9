"""Event streams over real HTTP: resuming, slow subscribers, permissions, many subscribers."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.server.stream_server import Frame, Streams, open_events, streaming
from toolspace.core.stored_records import NewEvent
from toolspace.server.sse_responses import StreamRegistry
from toolspace.storage.queries import events

WRITERS = 8


@pytest.fixture
async def streams(tmp_path: Path) -> AsyncIterator[Streams]:
    async with streaming(tmp_path) as streams:
        yield streams


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


def progress(n: int, text: str = "") -> NewEvent:
    return NewEvent("tool.progress", {"toolCallId": "call_1", "toolName": "t", "progress": n, "message": text})


def ids(frames: list[Frame]) -> list[int]:
    return [int(frame.id) for frame in frames]


@pytest.mark.spec("7.4")
async def test_a_subscriber_gets_new_events_with_ids(streams: Streams, session: aiohttp.ClientSession) -> None:
    await streams.append("space:a", progress(1), progress(2))
    async with open_events(session, f"{streams.url}/space:a") as reader:
        await streams.append("space:a", progress(3))
        data = {"toolCallId": "call_1", "toolName": "t", "progress": 3, "message": ""}
        assert await reader.take(1) == [Frame("3", "tool.progress", data)]
        assert reader.raw.startswith(b"retry: 1000\n\nid: 2\n\n")
        assert reader.response.headers["cache-control"] == "no-store, no-transform"


@pytest.mark.spec("7.4")
async def test_a_subscriber_resumes_with_the_header_or_the_query(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    await streams.append("space:a", *map(progress, range(1, 6)))
    async with open_events(session, f"{streams.url}/space:a", last_event_id="3") as reader:
        assert ids(await reader.take(2)) == [4, 5]
    async with open_events(session, f"{streams.url}/space:a", lastEventId="1") as reader:
        assert ids(await reader.take(4)) == [2, 3, 4, 5]
    async with open_events(session, f"{streams.url}/space:a", last_event_id="4", lastEventId="1") as reader:
        assert ids(await reader.take(1)) == [
            5
        ]  # A browser reconnects with the same URL, so the header takes precedence.
    async with open_events(session, f"{streams.url}/space:a", **{"from": "start"}) as reader:
        assert ids(await reader.take(5)) == [1, 2, 3, 4, 5]


async def test_a_subscriber_disconnected_before_the_first_event_can_resume(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    await streams.append("space:a", progress(1))
    async with open_events(session, f"{streams.url}/space:a") as reader:
        await reader.until(b"id: 1\n\n")
    await streams.append("space:a", progress(2))
    async with open_events(session, f"{streams.url}/space:a", last_event_id=reader.last_id) as reader:
        assert ids(await reader.take(1)) == [2]


@pytest.mark.parametrize("place", ["x", "-1", "1.", ".1", "1.2.3", "0.1", "1e3", "٣", "9" * 19, "1, 2", "null"])
async def test_an_invalid_event_id_is_refused(streams: Streams, session: aiohttp.ClientSession, place: str) -> None:
    async with session.get(f"{streams.url}/space:a", params={"lastEventId": place}) as response:
        assert response.status == 400
        problem = await response.json(content_type="application/problem+json")
    assert "is not an event id" in problem["detail"]


async def test_an_unknown_format_is_refused_with_the_known_ones(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    async with session.get(f"{streams.url}/space:a", params={"format": "xml"}) as response:
        assert response.status == 400
        detail = (await response.json(content_type="application/problem+json"))["detail"]
    assert detail == 'Unknown format "xml"; known: "native", "ui-message-stream", "ag-ui"'


@pytest.mark.spec("7.4")
async def test_a_position_that_is_no_longer_stored_starts_with_a_reset(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    stored_events = await streams.append("space:a", *map(progress, range(1, 7)))
    await streams.database.run(lambda: events.delete_old(stored_events[-1].at + 1, 4))
    async with open_events(session, f"{streams.url}/space:a", last_event_id="2") as reader:
        reset, *rest = await reader.take(3)
        assert (reset.type, reset.data) == ("stream.reset", {"oldest": 5})
        assert ids(rest) == [5, 6]
    async with open_events(session, f"{streams.url}/space:a", last_event_id="77") as reader:  # This id was never sent.
        assert [frame.type for frame in await reader.take(2)] == ["stream.reset", "tool.progress"]
    async with open_events(session, f"{streams.url}/space:a", **{"from": "start"}) as reader:
        assert ids(await reader.take(2)) == [5, 6]


async def test_a_stream_ends_after_the_event_type_until(streams: Streams, session: aiohttp.ClientSession) -> None:
    done_event = NewEvent("run.done", {"runId": "run_1", "status": "completed"})
    await streams.append("run:a", progress(1), done_event, progress(2))
    async with open_events(session, f"{streams.url}/run:a", until="run.done", **{"from": "start"}) as reader:
        assert [frame.type for frame in await reader.rest()] == ["tool.progress", "run.done"]
    async with open_events(session, f"{streams.url}/run:a", until="run.done") as reader:
        await streams.append("run:a", progress(3), done_event, progress(4))
        assert ids(await reader.rest()) == [4, 5]


@pytest.mark.spec("7.5")
async def test_the_ai_sdk_format_has_its_header_and_its_final_frame(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    async with open_events(session, f"{streams.url}/run:a", format="ui-message-stream", until="run.done") as reader:
        assert reader.response.headers["x-vercel-ai-ui-message-stream"] == "v1"
        await streams.append("run:a", NewEvent("run.done", {"runId": "run_1", "status": "completed"}))
        assert [frame.data for frame in await reader.rest()] == [
            {"type": "start", "messageId": "a"},
            {"type": "finish", "finishReason": "stop", "messageMetadata": {"runId": "run_1", "status": "completed"}},
            "[DONE]",
        ]


@pytest.mark.spec("7.5")
async def test_a_new_subscriber_in_another_format_gets_what_is_open(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    message = {"id": "msg_1", "spaceId": "a", "seq": 1, "senderId": "ent_1", "content": "Hello", "runId": None}
    await streams.append("space:a", NewEvent("message.started", {"messageId": "msg_1", "senderId": "ent_1", "seq": 1}))
    await streams.append("space:a", NewEvent("message.delta", {"messageId": "msg_1", "delta": "Hel"}))
    url = f"{streams.url}/space:a"
    async with (
        open_events(session, url, format="ui-message-stream") as first_reader,
        open_events(session, url, format="ui-message-stream") as second_reader,
        open_events(session, url, format="ui-message-stream", last_event_id="2") as back,
    ):
        await streams.append("space:a", NewEvent("message.delta", {"messageId": "msg_1", "delta": "lo"}))
        await streams.append("space:a", NewEvent("message.done", {"message": message}))
        assert [frame.data["type"] for frame in await back.take(2)] == ["text-delta", "text-end"]
        for reader in (first_reader, second_reader):
            frames = [frame.data for frame in await reader.take(5)]
            assert [frame["type"] for frame in frames] == [
                "start",
                "text-start",
                "text-delta",
                "text-delta",
                "text-end",
            ]
            assert [frame.get("delta") for frame in frames[2:4]] == ["Hel", "lo"]


@pytest.mark.spec("7.4")
async def test_heartbeats_have_the_event_id(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with (
        streaming(tmp_path, heartbeat=0.05) as streams,
        open_events(session, f"{streams.url}/space:a", audience="public") as reader,
    ):
        await reader.until(b": ping\nid: 0\n\n: ping\n")
        # Hidden events move the position too.
        await streams.append("space:a", NewEvent("tool.progress", {"progress": 1}, "none"))
        await reader.until(b": ping\nid: 1\n\n")


async def test_heartbeats_are_sent_every_15_seconds_by_default() -> None:
    assert StreamRegistry().heartbeat == 15.0


@pytest.mark.spec("7.4")
@pytest.mark.parametrize(("format", "each"), [("native", 60), ("ui-message-stream", 12), ("ag-ui", 12)])
async def test_a_subscriber_that_reconnects_often_gets_every_event_once(
    streams: Streams, session: aiohttp.ClientSession, format: str, each: int
) -> None:
    total = WRITERS * each

    async def write(writer: int) -> None:
        for n in range(each):
            await streams.append("space:a", progress(writer * each + n))

    async def read(drop_after: int) -> list[Frame]:
        frames: list[Frame] = []
        last = "0"
        while sum(_progress(frame, format) is not None for frame in frames) < total:
            async with open_events(session, f"{streams.url}/space:a", last_event_id=last, format=format) as reader:
                for _ in range(drop_after):
                    frame = await reader.next()
                    assert frame is not None
                    frames.append(frame)
                    last = frame.id  # Later frames of the same chunk count as not received.
                    if int(last.partition(".")[0]) == total and "." not in last:
                        break
        return frames

    readers = [asyncio.create_task(read(count)) for count in (1, 3, 7, 40)]
    await asyncio.gather(*map(write, range(WRITERS)))
    for frames in await asyncio.gather(*readers):
        places = [frame.id for frame in frames]
        assert len(set(places)) == len(places)
        received_values = [value for frame in frames if (value := _progress(frame, format)) is not None]
        assert sorted(received_values) == list(range(total))
        if format == "native":
            assert ids(frames) == list(range(1, total + 1))


def _progress(frame: Frame, format: str) -> int | None:
    """The number of the event that a frame belongs to."""
    match format, frame.data:
        case "native", {"progress": int(n)}:
            return n
        case "ui-message-stream", {"type": "data-tool-progress", "data": {"progress": int(n)}}:
            return n
        case "ag-ui", {"type": "CUSTOM", "value": {"progress": int(n)}}:
            return n
    return None


@pytest.mark.spec("7.4")
async def test_a_subscriber_that_stops_reading_is_disconnected_and_does_not_affect_others(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with (
        streaming(tmp_path, max_events=64, stall=30.0) as streams,
        open_events(session, f"{streams.url}/space:a") as reader,
    ):
        stuck_socket = await _open_and_never_read(streams, "space:a")
        write_count = 0
        while not streams.readers.dropped_count:
            await streams.append("space:a", *(progress(n, "x" * 20_000) for n in range(8)))
            write_count += 8
            assert ids(await reader.take(8))[-1] == write_count
        assert len(streams.readers) == 1
        with stuck_socket:
            unread_bytes = 0  # The connection is aborted; only buffered bytes arrive.
            while piece := await asyncio.get_running_loop().sock_recv(stuck_socket, 1 << 20):
                unread_bytes += len(piece)
            assert unread_bytes < write_count * 20_000
        await streams.append("space:a", progress(0))
        assert len(await reader.take(1)) == 1


@pytest.mark.spec("7.4")
async def test_a_stuck_write_ends_the_stream_even_without_new_events(tmp_path: Path) -> None:
    async with streaming(tmp_path, stall=0.2) as streams:
        stuck_socket = await _open_and_never_read(streams, "space:a")
        await streams.append("space:a", *(progress(n, "x" * 1_000_000) for n in range(12)))
        await _until(lambda: streams.readers.dropped_count == 1 and len(streams.readers) == 0)
        assert streams.hub.subscription_count == 0
        stuck_socket.close()


async def _open_and_never_read(streams: Streams, stream: str) -> socket.socket:
    """Opens a connection, reads the start of the stream, and then nothing more."""
    address = urlsplit(streams.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, (address.hostname or "", address.port or 0))
    await loop.sock_sendall(connection, f"GET /{stream} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    data = b""
    while b"id: 0" not in data:
        data += await loop.sock_recv(connection, 256)
    return connection


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not true():  # noqa: ASYNC110 - what is waited for is in the server, which tells nobody
            await asyncio.sleep(0.005)


async def test_a_disconnect_is_noticed_at_once(streams: Streams, session: aiohttp.ClientSession) -> None:
    async with open_events(session, f"{streams.url}/space:a") as reader:
        await reader.until(b"id: 0")
        assert (len(streams.readers), streams.hub.subscription_count) == (1, 1)
    await _until(lambda: len(streams.readers) == 0 and streams.hub.stream_count == 0)
    assert streams.readers.dropped_count == 0


@pytest.mark.spec("7.4")
async def test_a_thousand_subscribers_of_one_stream_all_get_everything(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    count, total = 1_000, 48
    async with streaming(tmp_path) as streams:
        ready = asyncio.Semaphore(0)

        async def read() -> list[int]:
            async with open_events(session, f"{streams.url}/space:a") as reader:
                await reader.until(b"id: 0")
                ready.release()
                return ids(await reader.take(total))

        readers = [asyncio.create_task(read()) for _ in range(count)]
        for _ in range(count):
            await ready.acquire()
        assert streams.hub.subscription_count == count
        for n in range(0, total, 16):
            await streams.append("space:a", *map(progress, range(n, n + 16)))
        for frames in await asyncio.gather(*readers):
            assert frames == list(range(1, total + 1))


@pytest.mark.spec("8.1")
async def test_a_stream_ends_when_its_subscriber_loses_the_permission(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with streaming(tmp_path, recheck=3600.0) as streams:
        rights = {"member": True}

        async def allowed() -> bool:
            return rights["member"]

        streams.allowed = allowed
        async with open_events(session, f"{streams.url}/space:a", audience="public") as reader:
            await streams.append("space:a", progress(1))
            assert len(await reader.take(1)) == 1
            rights["member"] = False
            streams.readers.recheck_permissions()  # As a change of members does.
            await streams.append("space:a", progress(2))
            assert await reader.rest() == []


@pytest.mark.spec("8.1")
async def test_a_quiet_stream_checks_the_permission_of_its_subscriber(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with streaming(tmp_path, recheck=0.05) as streams:
        check_event = asyncio.Event()
        rights = {"member": True}

        async def allowed() -> bool:
            check_event.set()
            return rights["member"]

        streams.allowed = allowed
        async with open_events(session, f"{streams.url}/space:a", audience="public") as reader:
            await check_event.wait()
            rights["member"] = False
            assert await reader.rest() == []


async def test_a_stream_sends_nothing_if_the_permission_cannot_be_checked(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with streaming(tmp_path, recheck=0.0001) as streams:

        async def allowed() -> bool:
            raise OSError("the database is away")

        streams.allowed = allowed
        async with open_events(session, f"{streams.url}/space:a", audience="public") as reader:
            await reader.until(b"id: 0")
            await streams.append("space:a", progress(1))
            assert await reader.rest() == []


async def test_a_stream_ends_when_its_token_expires(tmp_path: Path, session: aiohttp.ClientSession) -> None:
    async with streaming(tmp_path, recheck=0.05) as streams:
        streams.expires_at = int(time.time() * 1000) + 50
        async with open_events(session, f"{streams.url}/space:a") as reader:
            assert await reader.rest() == []


async def test_all_streams_end_properly_when_the_gateway_stops(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    async with open_events(session, f"{streams.url}/space:a") as reader:
        await reader.until(b"id: 0")
        streams.readers.close_all()
        assert await reader.rest() == []
        async with session.get(f"{streams.url}/space:a") as response:
            assert response.status == 503
            assert response.headers["retry-after"]


async def test_the_stream_of_all_events_has_the_events_of_all_streams(
    streams: Streams, session: aiohttp.ClientSession
) -> None:
    async with open_events(session, f"{streams.url}/everything") as reader:
        await reader.until(b"retry")
        await streams.append("space:a", progress(1))
        await streams.append("run:b", progress(2))
        first, two = await reader.take(2)
    assert (first.type, first.data["stream"], first.data["id"]) == ("tool.progress", "space:a", 1)
    assert (two.data["stream"], two.data["data"]["progress"]) == ("run:b", 2)
    assert isinstance(two.data["at"], int)


async def test_a_subscriber_that_replays_a_long_stream_is_not_disconnected(
    tmp_path: Path, session: aiohttp.ClientSession
) -> None:
    async with streaming(tmp_path, max_events=16) as streams:
        await streams.append("space:a", *(progress(n, "x" * 1000) for n in range(1_000)))
        async with open_events(session, f"{streams.url}/space:a", **{"from": "start"}) as reader:
            first = await reader.take(100)
            await streams.append("space:a", *map(progress, range(50)))
            assert ids(first + await reader.take(950)) == list(range(1, 1051))


async def test_special_characters_stay_within_their_frame(streams: Streams, session: aiohttp.ClientSession) -> None:
    text = "a\nb\r\n\r\nid: 9\x00\u2028data: x\ud83d"
    async with open_events(session, f"{streams.url}/space:a") as reader:
        await reader.until(b"id: 0")
        await streams.append("space:a", progress(2**70, text), progress(1))
        first, two = await reader.take(2)
    assert first.data["message"] == text.replace("\ud83d", "?")
    assert (first.id, two.id) == ("1", "2")
    assert msgspec.json.encode(two.data)
