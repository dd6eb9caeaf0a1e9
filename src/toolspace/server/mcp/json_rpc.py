"""Encodes JSON-RPC messages, and sends the response of one HTTP request as JSON or as server-sent events.

Used by `fast_path`, `http_endpoint` and `stdio`. Knows nothing of tools or sessions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:  # A stdio server needs nothing of HTTP.
    from toolspace.server.requests import Receive, Send

RequestId = int | str
Headers = Iterable[tuple[bytes, bytes]]

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
INVALID_PARAMS = -32602

WATCH_AFTER_SECONDS = 0.02
"""After this time a disconnect of the client is watched for. Most requests are done before."""
PING_SECONDS = 15.0
"""Proxies and clients close a connection that stays silent."""
_PING = b": ping\r\n\r\n"
_SSE_HEADERS = (
    (b"content-type", b"text/event-stream"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
_JSON_HEADER = (b"content-type", b"application/json")


def encode_result(request_id: RequestId, result: bytes) -> bytes:
    """Encodes a response. The result is JSON already."""
    encoded_id = b"%d" % request_id if type(request_id) is int else msgspec.json.encode(request_id)
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encoded_id, result)


def encode_error(request_id: RequestId | None, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return msgspec.json.encode({"jsonrpc": "2.0", "id": request_id, "error": error})


def encode_notification(method: str, params: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params})


def encode_sse_event(message: bytes) -> bytes:
    """JSON has no raw line breaks, so one `data:` line holds the message."""
    return b"event: message\r\ndata: %b\r\n\r\n" % message


async def send_json(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """Sends a complete HTTP response with a JSON body."""
    length = (b"content-length", b"%d" % len(body))
    await send({"type": "http.response.start", "status": status, "headers": [_JSON_HEADER, length, *headers]})
    await send({"type": "http.response.body", "body": body})


async def send_error(send: Send, status: int, message: str, *, headers: Headers = ()) -> None:
    """Sends an HTTP error with a JSON-RPC error without a request id as its body."""
    await send_json(send, status, encode_error(None, INVALID_REQUEST, message), headers)


class HttpExchange:
    """The response of one POST: JSON, or server-sent events once there is a message to send before the result.

    Pass the result to `finish`, and call `close` in any case.
    """

    def __init__(
        self,
        receive: Receive,
        send: Send,
        *,
        on_disconnect: Callable[[], object],
        headers: Sequence[tuple[bytes, bytes]] = (),
        drain_messages: Callable[[], list[bytes]] = list,
    ) -> None:
        self._receive = receive
        self._send = send
        self._on_disconnect = on_disconnect
        self._headers = headers
        self._drain_messages = drain_messages
        """Returns the messages to send before the result, as JSON."""
        self._wake_event = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(WATCH_AFTER_SECONDS, self._start_watching)
        self._disconnect_watcher: asyncio.Task[None] | None = None
        self._event_sender: asyncio.Task[None] | None = None
        self._is_over = self._is_disconnected = False

    def wake(self) -> None:
        """Sends the messages that are waiting."""
        self._start_stream()
        self._wake_event.set()

    async def finish(self, status: int, body: bytes) -> None:
        """Sends the result, unless the client has disconnected."""
        self._timer.cancel()
        if self._event_sender is not None:
            self._is_over = True
            self._wake_event.set()
            await self._event_sender  # Sends the earlier messages first.
            if not self._is_disconnected:
                await self._send({"type": "http.response.body", "body": encode_sse_event(body), "more_body": False})
        elif not self._is_disconnected:
            await send_json(self._send, status, body, self._headers)

    async def close(self) -> None:
        self._timer.cancel()
        for task in (self._disconnect_watcher, self._event_sender):
            if task is not None and not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def _start_watching(self) -> None:
        loop = asyncio.get_running_loop()
        self._disconnect_watcher = loop.create_task(self._watch_for_disconnect())
        self._timer = loop.call_later(PING_SECONDS, self._start_stream)

    async def _watch_for_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._is_disconnected = True
        self._wake_event.set()
        self._on_disconnect()

    def _start_stream(self) -> None:
        if self._event_sender is None:
            self._event_sender = asyncio.get_running_loop().create_task(self._send_events())

    async def _send_events(self) -> None:
        headers = [*_SSE_HEADERS, *self._headers]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while not self._is_disconnected:
            is_over = self._is_over  # Read first, so that messages that arrive during a send are sent, too.
            if events := b"".join(map(encode_sse_event, self._drain_messages())):
                await self._send({"type": "http.response.body", "body": events, "more_body": True})
            if is_over:
                return
            try:
                async with asyncio.timeout(PING_SECONDS):
                    await self._wake_event.wait()
                self._wake_event.clear()
            except TimeoutError:
                await self._send({"type": "http.response.body", "body": _PING, "more_body": True})
