"""Measure: events of one space to 100 subscribers, stored before they are published, for members only."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

import uvloop

from benchmarks.gateway_process import Callers, StreamSubscriber, gateway_serving, member
from benchmarks.gateway_roles import BURST, MARK
from benchmarks.harness import Contestant, Report, race
from benchmarks.processes import Server, start_server

loop_factory = uvloop.new_event_loop
READERS = 100
OURS = "the gateway"
EACH = "Starlette, one frame for each event"
JOINED = "Starlette, what waits is joined"


async def measure() -> Report:
    report = Report(f"Events to {READERS} readers, in bursts of {BURST}")
    with ExitStack() as servers:
        gateway_server = servers.enter_context(gateway_serving())
        audiences = {
            OURS: await _members(gateway_server),
            EACH: await _open_to_all(servers.enter_context(start_server("fan-out", "each"))),
            JOINED: await _open_to_all(servers.enter_context(start_server("fan-out", "joined"))),
        }
        contestants = [Contestant(name, audience.receive) for name, audience in audiences.items()]
        for audience in audiences.values():
            await audience.receive(5)
        counts_before = {name: (group.server.cpu(), group.expected) for name, group in audiences.items()}
        timings = await race(contestants, rounds=14, slice_ms=150)
        work = {
            name: (group.server.cpu() - counts_before[name][0]) / (group.expected - counts_before[name][1]) / READERS
            for name, group in audiences.items()
        }
        for audience in audiences.values():
            audience.close()
        await asyncio.sleep(0.1)  # The connections are closed by the loop: a server would wait for that.
    wrong = audiences[OURS].faults()
    report.ratio(
        "deliveries per second, against a frame for each", timings.ratio(EACH, OURS), must=1.5, more_is_better=True
    )
    report.ratio(
        "deliveries per second, against joined frames", timings.ratio(JOINED, OURS), aim=0.7, more_is_better=True
    )
    report.figure("work in its process, against joined frames", work[OURS] / work[JOINED], "×")
    report.figure(f"gaps and repeats in {audiences[OURS].expected:,} events", len(wrong), "", must=0)
    report.notes.extend(wrong[:1])
    for name in audiences:
        report.figure(f"{name}", READERS * BURST / timings.best(name), "/s")
        report.figure("      work in its process for each delivery", work[name] * 1e6, "µs")
    report.notes.append("ours are stored durably, can be read again, and are for members with a token; theirs are not")
    return report


async def _members(server: Server) -> _SubscriberGroup:
    callers = await Callers.open(server.url, 1)
    space = await callers.ask("/api/spaces", {"name": "Room"})
    headers: list[dict[str, str]] = []
    for number in range(READERS):
        entity = await callers.ask("/api/entities", {"type": "human", "name": f"Reader {number}"})
        await callers.ask(f"/api/spaces/{space['id']}/members", {"entityId": entity["id"]})
        headers.append(member(entity["id"]))
    callers.close()
    path = f"/api/spaces/{space['id']}/stream"
    return await _SubscriberGroup.open(server, path, headers, {"space_id": space["id"]})


async def _open_to_all(server: Server) -> _SubscriberGroup:
    return await _SubscriberGroup.open(server, "/stream", [{}] * READERS, {})


class _SubscriberGroup:
    """All subscribers of one server. `await receive(count)` requests bursts and waits until all have arrived."""

    def __init__(self, server: Server, callers: Callers, body: dict[str, str]) -> None:
        self.server = server
        self.expected = 0
        """Events that each reader should have by now."""
        self._callers = callers
        self._body = body
        self._readers: list[StreamSubscriber] = []
        self._event_counts: list[int] = []
        self._unfinished_count = 0
        self._completion: asyncio.Future[None] | None = None
        self._text: list[bytes] = []
        """The bytes of one subscriber, which are checked at the end."""

    @classmethod
    async def open(
        cls, server: Server, path: str, headers: list[dict[str, str]], body: dict[str, str]
    ) -> _SubscriberGroup:
        self = cls(server, await Callers.open(server.url, 1), body)
        for number, subscriber_headers in enumerate(headers):
            self._event_counts.append(0)
            self._readers.append(
                await StreamSubscriber.open(server.url, path, subscriber_headers, self._counter(number))
            )
        return self

    async def receive(self, count: int) -> None:
        self.expected += count * BURST
        self._unfinished_count = READERS
        self._completion = asyncio.get_running_loop().create_future()
        request = asyncio.ensure_future(self._callers.ask("/bench/bursts", {"count": count, **self._body}))
        try:
            async with asyncio.timeout(60):
                await self._completion
        except TimeoutError:
            raise RuntimeError(
                f"{self._unfinished_count} readers did not get {self.expected} events: {self._event_counts}"
            ) from None
        await request

    def faults(self) -> list[str]:
        """What is wrong with the events of the reader that was listened to: gaps, repeats, other data."""
        text = _without_chunks(b"".join(self._text))
        frames = [_fields(frame) for frame in text.split("\n\n") if MARK in frame]
        ids = [int(frame["id"]) for frame in frames]
        wrong = [
            f"{event_id} follows {previous}"
            for previous, event_id in itertools.pairwise(ids)
            if event_id != previous + 1
        ]
        wrong += [f"the data is {frame['data']}" for frame in frames if MARK not in json.loads(frame["data"])["delta"]]
        return wrong + ([] if len(ids) == self.expected else [f"{len(ids)} events instead of {self.expected}"])

    def close(self) -> None:
        self._callers.close()
        for reader in self._readers:
            reader.close()

    def _counter(self, number: int) -> Callable[[bytes], None]:
        counts, mark, text = self._event_counts, MARK.encode(), self._text if number == 0 else None

        def count(data: bytes) -> None:
            counts[number] += data.count(mark)
            if text is not None:
                text.append(data)
            if counts[number] == self.expected and self._completion is not None and not self._completion.done():
                self._unfinished_count -= 1
                if not self._unfinished_count:
                    self._completion.set_result(None)

        return count


def _without_chunks(text: bytes) -> str:
    """The body of a stream that is not at its end."""
    parts: list[bytes] = []
    at = text.index(b"\r\n\r\n") + 4
    while at < len(text):
        end = text.index(b"\r\n", at)
        length = int(text[at:end], 16)
        parts.append(text[end + 2 : end + 2 + length])
        at = end + 4 + length
    return b"".join(parts).decode()


def _fields(frame: str) -> dict[str, str]:
    return dict(cast("tuple[str, str]", line.split(": ", 1)) for line in frame.splitlines())
