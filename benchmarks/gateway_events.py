"""Measure: events to a hundred readers of one space, stored before they are told, and only to those who are members."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable
from contextlib import ExitStack
from typing import cast

import uvloop

from benchmarks.gateway_process import Callers, Reader, gateway_serving, member
from benchmarks.gateway_serving import BURST, MARK
from benchmarks.harness import Contestant, Report, race
from benchmarks.processes import Server, serving

loop_factory = uvloop.new_event_loop
READERS = 100
OURS = "the gateway"
EACH = "Starlette, one frame for each event"
JOINED = "Starlette, what waits is joined"


async def measure() -> Report:
    report = Report(f"Events to {READERS} readers, in bursts of {BURST}")
    with ExitStack() as servers:
        ours = servers.enter_context(gateway_serving())
        audiences = {
            OURS: await _members(ours),
            EACH: await _anyone(servers.enter_context(serving("fan-out", "each"))),
            JOINED: await _anyone(servers.enter_context(serving("fan-out", "joined"))),
        }
        contestants = [Contestant(name, audience.hear) for name, audience in audiences.items()]
        for audience in audiences.values():
            await audience.hear(5)
        begun = {name: (one.server.cpu(), one.expected) for name, one in audiences.items()}
        timings = await race(contestants, rounds=14, slice_ms=150)
        work = {
            name: (one.server.cpu() - begun[name][0]) / (one.expected - begun[name][1]) / READERS
            for name, one in audiences.items()
        }
        for audience in audiences.values():
            audience.close()
        await asyncio.sleep(0.1)  # The connections are closed by the loop: a server would wait for that.
    wrong = audiences[OURS].faults()
    report.ratio("deliveries per second, against a frame for each", timings.ratio(EACH, OURS), must=1.5, more=True)
    report.ratio("deliveries per second, against joined frames", timings.ratio(JOINED, OURS), aim=0.7, more=True)
    report.figure("work in its process, against joined frames", work[OURS] / work[JOINED], "×")
    report.figure(f"gaps and repeats in {audiences[OURS].expected:,} events", len(wrong), "", must=0)
    report.notes.extend(wrong[:1])
    for name in audiences:
        report.figure(f"{name}", READERS * BURST / timings.best(name), "/s")
        report.figure("      work in its process for each delivery", work[name] * 1e6, "µs")
    report.notes.append("ours are stored durably, can be read again, and are for members with a token; theirs are not")
    return report


async def _members(server: Server) -> _Audience:
    callers = await Callers.open(server.url, 1)
    space = await callers.ask("/api/spaces", {"name": "Room"})
    headers: list[dict[str, str]] = []
    for number in range(READERS):
        entity = await callers.ask("/api/entities", {"type": "human", "name": f"Reader {number}"})
        await callers.ask(f"/api/spaces/{space['id']}/members", {"entityId": entity["id"]})
        headers.append(member(entity["id"]))
    callers.close()
    path = f"/api/spaces/{space['id']}/stream"
    return await _Audience.open(server, path, headers, {"space_id": space["id"]})


async def _anyone(server: Server) -> _Audience:
    return await _Audience.open(server, "/stream", [{}] * READERS, {})


class _Audience:
    """All readers of one server. `await hear(count)` lets it send so many bursts, and waits until everyone has them."""

    def __init__(self, server: Server, callers: Callers, body: dict[str, str]) -> None:
        self.server = server
        self.expected = 0
        """Events that each reader should have by now."""
        self._callers = callers
        self._body = body
        self._readers: list[Reader] = []
        self._heard: list[int] = []
        self._left = 0
        self._over: asyncio.Future[None] | None = None
        self._text: list[bytes] = []
        """What one of them got, to be looked at in the end."""

    @classmethod
    async def open(cls, server: Server, path: str, headers: list[dict[str, str]], body: dict[str, str]) -> _Audience:
        self = cls(server, await Callers.open(server.url, 1), body)
        for number, own in enumerate(headers):
            self._heard.append(0)
            self._readers.append(await Reader.open(server.url, path, own, self._counter(number)))
        return self

    async def hear(self, count: int) -> None:
        self.expected += count * BURST
        self._left = READERS
        self._over = asyncio.get_running_loop().create_future()
        asked = asyncio.ensure_future(self._callers.ask("/bench/bursts", {"count": count, **self._body}))
        try:
            async with asyncio.timeout(60):
                await self._over
        except TimeoutError:
            raise RuntimeError(f"{self._left} readers did not get {self.expected} events: {self._heard}") from None
        await asked

    def faults(self) -> list[str]:
        """What is wrong with the events of the reader that was listened to: gaps, repeats, other data."""
        text = _without_chunks(b"".join(self._text))
        frames = [_fields(frame) for frame in text.split("\n\n") if MARK in frame]
        ids = [int(frame["id"]) for frame in frames]
        wrong = [f"{one} follows {before}" for before, one in itertools.pairwise(ids) if one != before + 1]
        wrong += [f"the data is {frame['data']}" for frame in frames if MARK not in json.loads(frame["data"])["delta"]]
        return wrong + ([] if len(ids) == self.expected else [f"{len(ids)} events instead of {self.expected}"])

    def close(self) -> None:
        self._callers.close()
        for reader in self._readers:
            reader.close()

    def _counter(self, number: int) -> Callable[[bytes], None]:
        heard, mark, text = self._heard, MARK.encode(), self._text if number == 0 else None

        def count(data: bytes) -> None:
            heard[number] += data.count(mark)
            if text is not None:
                text.append(data)
            if heard[number] == self.expected and self._over is not None and not self._over.done():
                self._left -= 1
                if not self._left:
                    self._over.set_result(None)

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
