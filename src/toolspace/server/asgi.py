"""The ASGI types, and the one reader of request bodies. The HTTP API and the MCP endpoint use it."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, MutableMapping
from typing import Any, Final, cast

from toolspace.server.problems import Problem

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES: Final = 4 * 1024 * 1024
BODY_TIMEOUT_SECONDS: Final = 30.0
"""Time for a whole body to arrive. Without it, a client that sends one byte at a time would hold its connection."""
_CLOSE: Final = ((b"connection", b"close"),)
"""Sent if a body was not read to its end: the rest of the body must not be parsed as the next request."""


async def read_body(receive: Receive, content_length: bytes | None, *, limit: int) -> bytes:
    """Returns the whole request body.

    Raises `Problem`: 413 if the body is larger than `limit`, 408 if it takes too long, 400 if the connection closes
    before the body is complete. A partial body is never returned, even if it is valid JSON.
    """
    if content_length is not None and content_length.isdigit() and int(content_length[:20]) > limit:
        raise _too_large(limit)
    message, pending = _poll(receive())
    if message is not None and message["type"] == "http.request" and not message.get("more_body", False):
        body: bytes = message.get("body", b"")  # Most bodies have arrived already and need no timer.
        if len(body) > limit:
            raise _too_large(limit)
        return body
    try:
        async with asyncio.timeout(BODY_TIMEOUT_SECONDS):
            if message is None:
                message = await pending
            chunks = bytearray()
            while message["type"] == "http.request":
                chunks += message.get("body", b"")
                if len(chunks) > limit:
                    raise _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(chunks)
                message = await receive()
    except TimeoutError:
        raise Problem(
            408, f"The request body did not arrive within {BODY_TIMEOUT_SECONDS:g} s", headers=_CLOSE
        ) from None
    raise Problem(400, "The connection was closed before the request body was complete", headers=_CLOSE)


async def wait_for_disconnect(receive: Receive) -> None:
    """Returns when the client has disconnected. The body must have been read before."""
    while (await receive())["type"] != "http.disconnect":
        pass


def find_transport(receive: Receive) -> asyncio.Transport | None:
    """Returns the connection of a request, for `abort()`; None if the server is not uvicorn.

    A polite close would wait for a client that does not read.
    """
    # uvicorn's `receive` is a method of the object that has the transport.
    return getattr(getattr(receive, "__self__", None), "transport", None)


def _poll(receiving: Awaitable[Message]) -> tuple[Message | None, Awaitable[Message]]:
    """Returns the message if it is available without waiting, else None and what to await for it."""
    if not isinstance(receiving, Coroutine):
        return None, receiving
    coroutine = cast("Coroutine[Any, Any, Message]", receiving)
    try:
        return None, _resume(coroutine, coroutine.send(None))
    except StopIteration as stop:
        return stop.value, coroutine


@types.coroutine
def _resume(coroutine: Coroutine[Any, Any, Message], waiting: Any) -> Generator[Any, Any, Message]:
    """Continues a coroutine whose first step was made by hand and which waits for something."""
    while True:
        try:
            try:
                value = yield waiting
            except BaseException as error:
                waiting = coroutine.throw(error)
            else:
                waiting = coroutine.send(value)
        except StopIteration as stop:
            return stop.value


def _too_large(limit: int) -> Problem:
    return Problem(413, f"The request body is too large; at most {limit} bytes are accepted", headers=_CLOSE)
