"""Defines what all transports share: message encoding, the two streams of a transport, and how its loss is reported.

Every transport module builds on it, and `session` reads the streams. It connects to nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Any, Self, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.spec import Transport

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that a server may send. A larger one is an attack or an accident."""
_LOGGED_CHARACTERS = 200


class _Stream(ABC):
    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


class MessageReader(_Stream):
    """Messages from a server, in the shape that the MCP SDK reads. Raises `anyio.EndOfStream` after the last one."""

    @abstractmethod
    async def receive(self) -> SessionMessage | Exception: ...

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SessionMessage | Exception:
        try:
            return await self.receive()
        except anyio.EndOfStream:
            raise StopAsyncIteration from None


class MessageWriter(_Stream):
    """Messages to a server, in the shape that the MCP SDK writes. Raises `anyio.BrokenResourceError` if it is gone."""

    @abstractmethod
    async def send(self, item: SessionMessage, /) -> None: ...


MessageStreams = tuple[MessageReader, MessageWriter]


class OpenTransport:
    """An open transport, as `open_transport` yields it.

    The MCP SDK accepts it as a transport, too. Entering it returns the streams; leaving it closes nothing, because
    `open_transport` does that.
    """

    streams: MessageStreams
    """The reader ends when the server is gone."""

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = transport
        """The transport in use: `http` becomes `sse` during the first exchange with a server that supports only SSE."""
        self.pid: int | None = None
        """The process of a stdio server, which leads its own process group."""
        self.lost_event = asyncio.Event()
        """Set when the server is gone, whether a request is waiting or not."""
        self.loss_reason: str | None = None
        """For example `the server ended with exit code 1: no such file`."""

    def mark_lost(self, reason: str) -> None:
        if not self.lost_event.is_set():  # The first reason is the cause, later ones are its effects.
            self.loss_reason = reason
            self.lost_event.set()

    async def __aenter__(self) -> MessageStreams:
        return self.streams

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Closes nothing."""


def encode_message(message: SessionMessage) -> bytes:
    return message.message.model_dump_json(by_alias=True, exclude_unset=True).encode()


class MessageDecoder:
    """Decodes the messages of one server. Skips what is not a message, and logs the first of those."""

    def __init__(self, server_name: str) -> None:
        self._log = logging.getLogger(f"toolspace.mcp.{server_name}")
        self._has_warned = False

    def __call__(self, data: bytes) -> SessionMessage | None:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
        except ValidationError:
            return self._repair(data)

    def _repair(self, data: bytes) -> SessionMessage | None:
        """Decodes invalid UTF-8 with replacement characters; turns a malformed response into an error response."""
        if not data or data.isspace():
            return None
        value: object = None
        try:
            value = json.loads(data.decode("utf-8", "replace"))
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
        except (ValueError, RecursionError):  # pydantic's ValidationError is a ValueError.
            pass
        if isinstance(value, dict):
            message = cast("dict[str, Any]", value)
            request_id = message.get("id")
            if "method" not in message and isinstance(request_id, int | str) and not isinstance(request_id, bool):
                # A request waits for this response: an error now is better than a time-out.
                error = ErrorData(code=PARSE_ERROR, message="the server's answer is not a JSON-RPC message")
                return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))
        if not self._has_warned:
            self._has_warned = True
            start = mask_secrets(data[: 4 * _LOGGED_CHARACTERS].decode("utf-8", "replace"))[:_LOGGED_CHARACTERS]
            self._log.warning("the server wrote something that is not a message (logged only once): %r", start)
        return None


async def wait_until_done(task: asyncio.Task[None]) -> None:
    """Waits until the task has ended, even if the caller is cancelled; a cancellation is raised afterwards.

    The task must end by itself within a bounded time.
    """
    cancellation: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # Otherwise a cancelled scope would interrupt every wait.
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError as error:
                cancellation = error
    if cancellation is not None:
        raise cancellation
    if not task.cancelled():
        task.result()
