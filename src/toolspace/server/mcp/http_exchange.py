"""One POST and its answer: a JSON body, or a stream of events once there is something to say before the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from toolspace.server.mcp import json_rpc
from toolspace.server.mcp.json_rpc import Receive, Send
from toolspace.server.mcp.progress import Flow

PATIENCE_SECONDS = 0.02
"""A call that takes longer is worth a look at whether anyone still waits for it."""
PING_SECONDS = 15.0
"""Proxies and clients give a silent connection up."""


class Exchange:
    """Answers one request. `begin`, then exactly one of `finish` and `abandon`."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        on_gone: Callable[[], object],
        headers: Sequence[tuple[bytes, bytes]] = (),
        messages: Callable[[], list[bytes]] = list,
    ) -> None:
        self._receive = receive
        self._send = send
        self._on_gone = on_gone
        self._headers = headers
        self._messages = messages
        """What is to be sent before the answer, as JSON."""
        self._flow = Flow()
        self._timers: list[asyncio.TimerHandle] = []
        self._watching: asyncio.Task[None] | None = None
        self._streaming: asyncio.Task[None] | None = None
        self.gone = False

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(PATIENCE_SECONDS, self._watch)]

    def wake(self) -> None:
        """There is something to send."""
        self._stream()
        self._flow.wake()

    async def finish(self, status: int, body: bytes) -> None:
        self._stop_timers()
        try:
            if self._streaming is not None:
                self._flow.end()
                await self._streaming  # Everything before the answer, in its order.
                if not self.gone:
                    await self._send({"type": "http.response.body", "body": json_rpc.event(body), "more_body": False})
            elif not self.gone:
                await json_rpc.respond(self._send, status, body, self._headers)
        finally:
            await self.abandon()

    async def abandon(self) -> None:
        self._stop_timers()
        tasks = [task for task in (self._watching, self._streaming) if task is not None and not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)

    def _stop_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()

    def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        self._watching = loop.create_task(self._await_end())
        self._timers.append(loop.call_later(PING_SECONDS, self._stream))

    async def _await_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._flow.end()
        self._on_gone()

    def _stream(self) -> None:
        if self._streaming is None:
            self._streaming = asyncio.get_running_loop().create_task(self._send_events())

    async def _send_events(self) -> None:
        headers = [*json_rpc.STREAM_HEADERS, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        over = False
        while not over and not self.gone:
            over = self._flow.over  # Looked at first: what is said while we send is sent too.
            if events := b"".join(map(json_rpc.event, self._messages())):
                await self._body(events)
            if not over and not await self._flow.wait(PING_SECONDS):
                await self._body(json_rpc.PING)

    async def _body(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
