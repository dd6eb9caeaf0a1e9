"""The bytes of JSON-RPC answers and of server-sent events. Knows no tools and no sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from toolspace.server.asgi import Receive, Send
from toolspace.server.mcp.progress import WakeSignal

RequestId = int | str
Headers = Iterable[tuple[bytes, bytes]]

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603

PING = b": ping\r\n\r\n"
STREAM_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_JSON_HEADER = (b"content-type", b"application/json")


def encode_id(id: RequestId | None) -> bytes:
    return b"%d" % id if type(id) is int else msgspec.json.encode(id)


def encode_result(id: RequestId, result: bytes) -> bytes:
    """The answer to a request, with a result that is JSON already."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode_id(id), result)


def encode_error(id: RequestId | None, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})


def encode_notification(method: str, params: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params})


def encode_sse_event(message: bytes) -> bytes:
    """A message as one server-sent event. JSON has no raw line breaks, so one `data:` line holds it."""
    return b"event: message\r\ndata: %b\r\n\r\n" % message


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """One whole HTTP answer of JSON."""
    length = (b"content-length", b"%d" % len(body))
    await send(
        {"type": "http.response.start", "status": status, "headers": [_JSON_HEADER, length, *headers]},
    )
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, status: int, message: str, *, code: int = INVALID_REQUEST, headers: Headers = ()
) -> None:
    """An HTTP error whose body says why, as JSON-RPC says it where no request was understood."""
    await send_json(send, status, encode_error(None, code, message), headers)


# MERGED from http_exchange: One POST and its answer: a JSON body, or a stream of events once there is something to…

WATCH_AFTER_SECONDS = 0.02
"""A call that takes longer is worth a look at whether anyone still waits for it."""
PING_SECONDS = 15.0
"""Proxies and clients give a silent connection up."""


class HttpExchange:
    """Answers one request. `begin`, then exactly one of `finish` and `abandon`."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        on_disconnect: Callable[[], object],
        headers: Sequence[tuple[bytes, bytes]] = (),
        messages: Callable[[], list[bytes]] = list,
    ) -> None:
        self._receive = receive
        self._send = send
        self._on_gone = on_disconnect
        self._headers = headers
        self._messages = messages
        """What is to be sent before the answer, as JSON."""
        self._flow = WakeSignal()
        self._timers: list[asyncio.TimerHandle] = []
        self._watching: asyncio.Task[None] | None = None
        self._streaming: asyncio.Task[None] | None = None
        self.is_disconnected = False

    def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._timers = [loop.call_later(WATCH_AFTER_SECONDS, self._watch)]

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
                if not self.is_disconnected:
                    await self._send({"type": "http.response.body", "body": encode_sse_event(body), "more_body": False})
            elif not self.is_disconnected:
                await send_json(self._send, status, body, self._headers)
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
        self.is_disconnected = True
        self._flow.end()
        self._on_gone()

    def _stream(self) -> None:
        if self._streaming is None:
            self._streaming = asyncio.get_running_loop().create_task(self._send_events())

    async def _send_events(self) -> None:
        headers = [*STREAM_HEADERS, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        over = False
        while not over and not self.is_disconnected:
            over = self._flow.is_over  # Looked at first: what is said while we send is sent too.
            if events := b"".join(map(encode_sse_event, self._messages())):
                await self._body(events)
            if not over and not await self._flow.wait(PING_SECONDS):
                await self._body(PING)

    async def _body(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
