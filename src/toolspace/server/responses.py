"""What a handler gives back, as bytes on the wire. Knows no routes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from toolspace.core import json_text
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.problems import MEDIA_TYPE, Problem

Headers = Sequence[tuple[bytes, bytes]]

_COMMON: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_JSON: Final = [(b"content-type", b"application/json"), *_COMMON]
_PROBLEM: Final = [(b"content-type", MEDIA_TYPE), *_COMMON]


class Response:
    """An answer with a status or headers of its own. `body` is encoded as JSON, unless it is bytes of `media_type`."""

    __slots__ = ("body", "headers", "media_type", "on_sent", "status")

    def __init__(
        self,
        body: Any = None,
        *,
        status: int = 200,
        headers: Headers = (),
        media_type: str | None = None,
        on_sent: Callable[[], None] | None = None,
    ) -> None:
        self.body = body
        self.status = status
        self.headers = headers
        self.media_type = media_type
        self.on_sent = on_sent
        """Called once the whole answer was handed to the connection."""

    def encode(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        if self.status in (204, 304):
            return [*_COMMON, *self.headers], b""
        if self.media_type is not None:
            body = self.body if isinstance(self.body, bytes) else str(self.body).encode("utf-8", "replace")
            return [(b"content-type", self.media_type.encode("latin-1")), *_COMMON, *self.headers], body
        return [*_JSON, *self.headers], json_text.encode_bytes(self.body)


class StreamingResponse(Protocol):
    """An answer that writes itself, as server-sent events do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


NO_CONTENT: Final = Response(status=204)


async def send_response(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, head: bool
) -> None:
    """One whole answer. The length is that of the body also where only the head is asked for."""
    if status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head else body})


async def send_json(send: Send, value: Any, *, status: int = 200, head: bool = False) -> None:
    await send_response(send, status, _JSON.copy(), json_text.encode_bytes(value), head=head)


async def send_encoded_json(send: Send, text: bytes, *, status: int = 200, head: bool = False) -> None:
    """As `respond_json`, of what is JSON already."""
    await send_response(send, status, _JSON.copy(), text, head=head)


async def send_problem(send: Send, problem: Problem, *, head: bool = False) -> None:
    await send_response(send, problem.status, [*_PROBLEM, *problem.headers], problem.body(), head=head)
