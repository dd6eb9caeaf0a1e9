"""The bytes of JSON-RPC answers and of server-sent events. Knows no tools and no sessions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, MutableMapping
from typing import Any

import msgspec

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]
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


def result_body(id: RequestId, result: bytes) -> bytes:
    """The answer to a request, with a result that is JSON already."""
    return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (encode_id(id), result)


def error_body(id: RequestId | None, code: int, message: str, data: Mapping[str, Any] | None = None) -> bytes:
    error: dict[str, Any] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return msgspec.json.encode({"jsonrpc": "2.0", "id": id, "error": error})


def notification(method: str, params: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"jsonrpc": "2.0", "method": method, "params": params})


def event(message: bytes) -> bytes:
    """A message as one server-sent event. JSON has no raw line breaks, so one `data:` line holds it."""
    return b"event: message\r\ndata: %b\r\n\r\n" % message


async def respond(send: Send, status: int, body: bytes, headers: Headers = ()) -> None:
    """One whole HTTP answer of JSON."""
    length = (b"content-length", b"%d" % len(body))
    await send(
        {"type": "http.response.start", "status": status, "headers": [_JSON_HEADER, length, *headers]},
    )
    await send({"type": "http.response.body", "body": body})


async def refuse(send: Send, status: int, message: str, *, code: int = INVALID_REQUEST, headers: Headers = ()) -> None:
    """An HTTP error whose body says why, as JSON-RPC says it where no request was understood."""
    await respond(send, status, error_body(None, code, message), headers)
