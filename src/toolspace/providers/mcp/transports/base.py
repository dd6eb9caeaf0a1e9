"""What all transports share: a message to bytes and back, and the shape of the two streams. Connects nothing."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import anyio
from mcp.shared.message import SessionMessage
from mcp_types import PARSE_ERROR, ErrorData, JSONRPCError, jsonrpc_message_adapter
from pydantic import ValidationError

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.spec import Transport

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Bytes of one message. What is larger is no answer to a question, but an attack or an accident."""
_SHOWN = 200


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
    """What a peer says, as the SDK reads it. `anyio.EndOfStream` when nothing more will come."""

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
    """What a peer is told, as the SDK writes it. `anyio.BrokenResourceError` when it is gone."""

    @abstractmethod
    async def send(self, item: SessionMessage, /) -> None: ...


def encode_message(message: SessionMessage) -> bytes:
    return message.message.model_dump_json(by_alias=True, exclude_unset=True).encode()


class MessageDecoder:
    """Reads the messages of one peer. What is no message is skipped, and told of once."""

    def __init__(self, name: str) -> None:
        self._log = logging.getLogger(f"toolspace.mcp.{name}")
        self._told = False

    def __call__(self, data: bytes) -> SessionMessage | None:
        try:
            return SessionMessage(jsonrpc_message_adapter.validate_json(data, by_name=False))
        except ValidationError:
            return self._mend(data)

    def _mend(self, data: bytes) -> SessionMessage | None:
        """A message that is nearly one: in another encoding, with half a character, or an answer without form."""
        if not data or data.isspace():
            return None
        value: object = None
        try:
            value = json.loads(data.decode("utf-8", "replace"))
            text = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            return SessionMessage(jsonrpc_message_adapter.validate_json(text, by_name=False))
        except (ValueError, RecursionError):  # Of which the validation's error is one.
            pass
        if isinstance(value, dict):
            answer = cast("dict[str, Any]", value)
            key = answer.get("id")
            if "method" not in answer and isinstance(key, int | str) and not isinstance(key, bool):
                # Somebody waits for it: better an error now than a time-out.
                problem = ErrorData(code=PARSE_ERROR, message="the server's answer is not a JSON-RPC message")
                return SessionMessage(JSONRPCError(jsonrpc="2.0", id=key, error=problem))
        if not self._told:
            self._told = True
            shown = mask_secrets(data[: 4 * _SHOWN].decode("utf-8", "replace"))[:_SHOWN]
            self._log.warning("the server wrote what is not a message (said only once): %r", shown)
        return None


# MERGED from link: An open way to one MCP server: its streams, and whether the peer is still there. Opens and clos…

if TYPE_CHECKING:  # A private module of the SDK: for its names only.
    from mcp.client._transport import TransportStreams


class OpenTransport:
    """What `open_transport` gives. It is the SDK's `Transport` too: entering it gives the streams and owns nothing."""

    streams: TransportStreams
    """What to read and what to write: `SessionMessage`s. The first one ends when the peer is gone."""

    def __init__(self, transport: Transport) -> None:
        self.transport: Transport = transport
        """What is really in use: `http` becomes `sse` during the first exchange with a server that knows no better."""
        self.pid: int | None = None
        """The process of a stdio server, which leads a process group of its own."""
        self.lost_event = asyncio.Event()
        """Set when the peer is gone, whether anyone waits for an answer or not."""
        self.loss_reason: str | None = None
        """Why it is gone: `the server ended with exit code 1: no such file`."""

    def mark_lost(self, reason: str) -> None:
        if not self.lost_event.is_set():  # The first reason is the cause, what follows are its effects.
            self.loss_reason = reason
            self.lost_event.set()

    async def __aenter__(self) -> TransportStreams:
        return self.streams

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        """Nothing: who opened the link, closes it."""


# MERGED from ending: Waits for what must be finished, also when whoever waits is cancelled. Starts nothing.


async def wait_until_done(task: asyncio.Task[None]) -> None:
    """Returns or raises when the task has ended; a cancellation is raised then too, and not before.

    The task must end by itself within a bounded time.
    """
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # Else a cancelled scope would interrupt every single wait.
        while not task.done():
            try:
                await asyncio.wait((task,))
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    if not task.cancelled():
        task.result()
