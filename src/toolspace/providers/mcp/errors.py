"""What goes wrong between us and an MCP server, told apart by what may be done next. Handles nothing."""

from __future__ import annotations

from typing import cast

import httpx2
from mcp.shared.exceptions import MCPError
from mcp_types import CONNECTION_CLOSED, INVALID_REQUEST, UNSUPPORTED_PROTOCOL_VERSION

_SERVER_ERROR = CONNECTION_CLOSED
"""What servers answer that have no better code."""
_CLOSED = "Connection closed"
"""The MCP library's own words."""
_FORGOTTEN = ("session", "not initialized", "protocol version")


class ServerUnreachable(MCPError):
    """The server cannot be reached, or went away. `sent`: whether it may have got the request."""

    def __init__(self, reason: str, *, sent: bool) -> None:
        super().__init__(CONNECTION_CLOSED, reason)
        self.sent = sent


class HttpStatusError(MCPError):
    """An HTTP answer that is no JSON-RPC."""

    def __init__(self, status: int, reason: str, *, challenge: str = "") -> None:
        super().__init__(INVALID_REQUEST, reason)
        self.status = status
        self.challenge = challenge
        """Its `WWW-Authenticate`: how to log in."""


def classify_error(error: MCPError) -> MCPError:
    """The fault that a transport told in the data of a JSON-RPC error, as what it is."""
    data: object = error.data
    facts = cast("dict[str, object]", data) if isinstance(data, dict) else {}
    if error.code == CONNECTION_CLOSED and isinstance(sent := facts.get("sent"), bool):
        return ServerUnreachable(error.message, sent=sent)
    if error.code == INVALID_REQUEST and len(facts) == 1 and type(status := facts.get("status")) is int:
        return HttpStatusError(status, error.message)
    return error


def is_connection_lost(error: MCPError) -> bool:
    """Whether the connection is gone; what was sent may have been executed."""
    if isinstance(error, ServerUnreachable):
        return True
    # The code alone does not tell: it is also the one that servers give to errors of no special kind.
    return error.code == CONNECTION_CLOSED and error.message == _CLOSED and error.data is None


def may_be_unknown_session(error: MCPError) -> bool:
    """Whether a server over HTTP may have refused because it knows our session or its era no more.

    Servers say it in many ways, and tools of theirs may say the same: to be confirmed.
    """
    if error.code == UNSUPPORTED_PROTOCOL_VERSION:
        return True
    text = error.message.casefold()
    return error.code in (INVALID_REQUEST, _SERVER_ERROR) and any(word in text for word in _FORGOTTEN)


def is_temporary(error: MCPError) -> bool:
    """Whether an HTTP answer says nothing of the server itself: who asks is refused, or something in between is ill."""
    return isinstance(error, HttpStatusError) and (error.status in (401, 403, 407, 408, 429) or error.status >= 500)


def unwrap_group(error: BaseException) -> BaseException:
    """The exception itself, out of the groups that task groups wrap around it."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error


def describe_error(error: BaseException) -> str:
    """The reason in one line."""
    error = unwrap_group(error)
    if isinstance(error, httpx2.TransportError) and not str(error):
        return type(error).__name__
    text = " ".join(str(error).split())
    if isinstance(error, TimeoutError) and not text:
        return "it did not answer in time"
    return text or type(error).__name__
