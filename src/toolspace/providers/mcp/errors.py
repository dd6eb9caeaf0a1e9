"""Errors between Toolspace and an MCP server, classified by what may be done next. Handles none of them."""

from __future__ import annotations

from typing import cast

import httpx2
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, UNSUPPORTED_PROTOCOL_VERSION

_SERVER_ERROR = CONNECTION_CLOSED
"""The code that servers use for errors without a code of their own."""
_SDK_CLOSED_MESSAGE = "Connection closed"
_UNKNOWN_SESSION_WORDS = ("session", "not initialized", "protocol version")


class ServerUnreachable(MCPError):
    """The server cannot be reached, or the connection was lost. `sent`: whether it may have received the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(CONNECTION_CLOSED, reason)
        self.sent = sent


class HttpStatusError(MCPError):
    """An HTTP response that is not JSON-RPC."""

    def __init__(self, status: int, reason: str, *, challenge: str = "") -> None:
        super().__init__(INVALID_REQUEST, reason)
        self.status = status
        self.challenge = challenge
        """The `WWW-Authenticate` header."""


def classify_error(error: MCPError) -> MCPError:
    """Returns the error that a transport encoded in the data of a JSON-RPC error, else the error itself."""
    data: object = error.data
    fields = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    if error.code == CONNECTION_CLOSED and isinstance(sent := fields.get("sent"), bool):
        return ServerUnreachable(error.message, sent=sent)
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
    return error.code in (INVALID_REQUEST, _SERVER_ERROR) and any(word in text for word in _UNKNOWN_SESSION_WORDS)


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
    if isinstance(error, httpx2.TransportError) and not str(error):
        return type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, TimeoutError) and not text:
        return "it did not answer in time"
    return text or type(error).__name__
