"""Responses that handlers return, and how they are sent. Knows no routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Protocol

from toolspace.core import json_text
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.problems import MEDIA_TYPE, Headers, Problem

_COMMON_HEADERS: Final = ((b"cache-control", b"no-store"), (b"x-content-type-options", b"nosniff"))
_JSON_HEADERS: Final = [(b"content-type", b"application/json"), *_COMMON_HEADERS]
_PROBLEM_HEADERS: Final = [(b"content-type", MEDIA_TYPE), *_COMMON_HEADERS]


class Response:
    """A response with its own status or headers. `body` is encoded as JSON, unless there is a `media_type`."""

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
        """Called once the whole response was passed to the connection."""

    def encode(self) -> tuple[list[tuple[bytes, bytes]], bytes]:
        """Returns the headers and the body."""
        if self.status in (204, 304):
            return [*_COMMON_HEADERS, *self.headers], b""
        if self.media_type is not None:
            body = self.body if isinstance(self.body, bytes) else str(self.body).encode("utf-8", "replace")
            return [(b"content-type", self.media_type.encode("latin-1")), *_COMMON_HEADERS, *self.headers], body
        return [*_JSON_HEADERS, *self.headers], json_text.encode_bytes(self.body)


class StreamingResponse(Protocol):
    """A response that sends itself, as server-sent events do."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


NO_CONTENT: Final = Response(status=204)


async def send_response(
    send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes, *, head_only: bool
) -> None:
    """Sends a whole response. `head_only` leaves out the body but keeps its content-length."""
    if status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b"" if head_only else body})


async def send_json(send: Send, value: Any, *, status: int = 200, head_only: bool = False) -> None:
    await send_encoded_json(send, json_text.encode_bytes(value), status=status, head_only=head_only)


async def send_encoded_json(send: Send, body: bytes, *, status: int = 200, head_only: bool = False) -> None:
    await send_response(send, status, _JSON_HEADERS.copy(), body, head_only=head_only)


async def send_problem(send: Send, problem: Problem, *, head_only: bool = False) -> None:
    headers = [*_PROBLEM_HEADERS, *problem.headers]
    await send_response(send, problem.status, headers, problem.body(), head_only=head_only)
