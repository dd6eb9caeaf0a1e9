"""What all MCP transports share: message streams, encoding, the trace of messages, and errors. Connects to nothing.

Every transport builds on it. The rest of `providers.mcp` uses the errors, which say what may be done next.
"""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from contextvars import Context
from types import TracebackType
from typing import Any, Self, cast

import anyio
from mcp.shared.exceptions import MCPError
from mcp.shared.message import SessionMessage
from mcp_types import (
    CONNECTION_CLOSED,
    INVALID_REQUEST,
    PARSE_ERROR,
    UNSUPPORTED_PROTOCOL_VERSION,
    ErrorData,
    JSONRPCError,
    jsonrpc_message_adapter,
)
from pydantic import ValidationError

from toolspace.core.secret_masking import mask_secrets
from toolspace.providers.mcp.server_spec import Transport

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""The largest message that a server may send. A larger one is an attack or an accident."""
UNKNOWN_SESSION_DATA = {"status": 404, "isSessionKnown": False}
"""The data of the JSON-RPC error that a transport makes of HTTP 404 to a request with a session id."""
_LOGGED_CHARACTERS = 200
_TRACED_CHARACTERS = 4_000
_SDK_CLOSED_MESSAGE = "Connection closed"
_UNKNOWN_SESSION_WORDS = ("session", "not initialized", "protocol version")
_log = logging.getLogger("toolspace.mcp")


class _Stream:
    async def aclose(self) -> None:
        """Does nothing unless overridden: most transports close both streams together."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        await self.aclose()


class MessageReader(_Stream, ABC):
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


class MessageWriter(_Stream, ABC):
    """Messages to a server, in the shape that the MCP SDK writes. Raises `anyio.BrokenResourceError` if it is gone."""

    @abstractmethod
    async def send(self, item: SessionMessage, /) -> None: ...


class WrappedReader(MessageReader):
    """Passes on the messages of another reader, which may be the SDK's own."""

    def __init__(self, inner: MessageReader) -> None:
        self.inner = inner

    @property
    def last_context(self) -> Context | None:
        """The SDK handles a message in the context of its sender, if the reader knows it."""
        return getattr(self.inner, "last_context", None)

    async def receive(self) -> SessionMessage | Exception:
        return await self.inner.receive()

    async def aclose(self) -> None:
        await self.inner.aclose()


class WrappedWriter(MessageWriter):
    """Passes messages on to another writer."""

    def __init__(self, inner: MessageWriter) -> None:
        self.inner = inner

    async def send(self, item: SessionMessage, /) -> None:
        await self.inner.send(item)

    async def aclose(self) -> None:
        await self.inner.aclose()


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
        self.doubt_event = asyncio.Event()
        """Set when the server refused a message that no call waits for, as if it did not know the session."""

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
                # A request waits for this response: an error now is better than a timeout.
                return error_message(request_id, PARSE_ERROR, "the server's answer is not a JSON-RPC message")
        if not self._has_warned:
            self._has_warned = True
            start = mask_secrets(data[: 4 * _LOGGED_CHARACTERS].decode("utf-8", "replace"))[:_LOGGED_CHARACTERS]
            self._log.warning("the server wrote something that is not a message (logged only once): %r", start)
        return None


def error_message(request_id: int | str, code: int, text: str, data: object = None) -> SessionMessage:
    """Returns an error response for a request, as if the server had sent it."""
    error = ErrorData(code=code, message=text, data=data)
    return SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=error))


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


# Trace (`traceMCP`)


class MessageTrace:
    """Logs the messages to (`→`) and from (`←`) one server, with secrets masked."""

    def __init__(self, server_name: str) -> None:
        self._server_name = server_name

    def __call__(self, direction: str, message: bytes | SessionMessage | Exception) -> None:
        if not _log.isEnabledFor(logging.DEBUG):
            return
        if isinstance(message, bytes):
            try:
                value = json.loads(message)
            except (ValueError, RecursionError):
                value = message[: 2 * _TRACED_CHARACTERS].decode("utf-8", "replace")
        elif isinstance(message, Exception):
            value = str(message)
        else:
            value = message.message.model_dump(mode="json", by_alias=True, exclude_unset=True)
        # Masked before it is cut, because a part of a secret must not be logged either.
        text = json.dumps(mask_secrets(value), ensure_ascii=False, separators=(",", ":"))
        suffix = f"… ({len(text):,} characters)" if len(text) > _TRACED_CHARACTERS else ""
        _log.debug("%s %s %s%s", self._server_name, direction, text[:_TRACED_CHARACTERS], suffix)


def trace_streams(server_name: str, streams: MessageStreams) -> MessageStreams:
    """Wraps streams so that every message is logged."""
    trace = MessageTrace(server_name)

    class TracedReader(WrappedReader):
        async def receive(self) -> SessionMessage | Exception:
            item = await self.inner.receive()
            trace("←", item)
            return item

    class TracedWriter(WrappedWriter):
        async def send(self, item: SessionMessage, /) -> None:
            trace("→", item)
            await self.inner.send(item)

    reader, writer = streams
    return TracedReader(reader), TracedWriter(writer)


# Errors


class ServerUnreachable(MCPError):
    """The server cannot be reached, or the connection was lost. `was_sent`: whether the request may have arrived."""

    def __init__(self, reason: str, *, was_sent: bool) -> None:
        super().__init__(CONNECTION_CLOSED, reason)
        self.was_sent = was_sent


class HttpStatusError(MCPError):
    """An HTTP response that is not JSON-RPC."""

    def __init__(self, status: int, reason: str, *, challenge: str = "") -> None:
        super().__init__(INVALID_REQUEST, reason)
        self.status = status
        self.challenge = challenge
        """The `WWW-Authenticate` header."""


class UnknownSession(MCPError):
    """The server answered with HTTP 404: it does not know the session, so it did not take the request."""

    def __init__(self) -> None:
        super().__init__(INVALID_REQUEST, "the server does not know the session (HTTP 404)", UNKNOWN_SESSION_DATA)


def classify_error(error: MCPError) -> MCPError:
    """Returns the error that a transport encoded in the data of a JSON-RPC error, else the error itself."""
    data: object = error.data
    fields = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    if error.code == CONNECTION_CLOSED and isinstance(was_sent := fields.get("sent"), bool):
        return ServerUnreachable(error.message, was_sent=was_sent)
    if error.code == INVALID_REQUEST and fields == UNKNOWN_SESSION_DATA:
        return UnknownSession()
    if error.code == INVALID_REQUEST and len(fields) == 1 and type(status := fields.get("status")) is int:
        return HttpStatusError(status, error.message)
    return error


def is_connection_lost(error: MCPError) -> bool:
    """Whether the connection is gone. A request that was sent may have run."""
    if isinstance(error, ServerUnreachable):
        return True
    # The code alone is not enough: servers also use it for errors of no special kind.
    return error.code == CONNECTION_CLOSED and error.message == _SDK_CLOSED_MESSAGE and error.data is None


def may_be_unknown_session(error: MCPError) -> bool:
    """Whether an HTTP server may have refused because it no longer knows the session or the protocol version.

    Servers word it differently, and a tool's own error may contain the same words. Confirm it with a probe.
    """
    if error.code == UNSUPPORTED_PROTOCOL_VERSION:
        return True
    text = error.message.casefold()
    # Servers also use the code of a closed connection for errors without a code of their own.
    return error.code in (INVALID_REQUEST, CONNECTION_CLOSED) and any(word in text for word in _UNKNOWN_SESSION_WORDS)


def is_temporary(error: MCPError) -> bool:
    """Whether an HTTP status says nothing about the server: the caller is refused, or a proxy has a problem."""
    return isinstance(error, HttpStatusError) and (error.status in (401, 403, 407, 408, 429) or error.status >= 500)


def unwrap_group(error: BaseException) -> BaseException:
    """Returns the first exception inside the exception groups of task groups."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """Returns the reason in one line."""
    error = unwrap_group(error)
    text = " ".join(str(error).split())
    return text or ("no answer in time" if isinstance(error, TimeoutError) else type(error).__name__)
