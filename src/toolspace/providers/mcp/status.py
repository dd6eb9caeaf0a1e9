"""The status of one MCP server, as `toolspace servers` and the HTTP API show it. Plain data."""

from __future__ import annotations

from typing import Literal

import msgspec

ServerState = Literal["starting", "ready", "idle", "reconnecting", "failed", "stopped"]
"""`idle`: stopped because of `idleTimeout`; the next call starts it. `failed`: never became ready; it is retried."""
ProtocolEra = Literal["stateless", "handshake"]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of one server at one moment."""

    name: str
    """The name of the MCP server."""
    state: ServerState
    """The state of the server."""
    transport: str
    """The transport in use: `sse` for an `http` server that supports only SSE."""
    era: ProtocolEra | None = None
    """The generation of the MCP protocol in use."""
    protocol_version: str | None = None
    """The version of the MCP protocol in use."""
    server: str | None = None
    """The name and version that the server reports."""
    pid: int | None = None
    """The process id of a local server."""
    tools: int = 0
    """How many tools it offers."""
    left_out: tuple[str, ...] = ()
    """Tools of the server that are not offered, with the reason: `name: needs MCP tasks`."""
    last_error: str | None = None
    """The last error."""
    last_error_at: float | None = None
    """Unix seconds."""
    restarts: int = 0
    """How often the server was started again after its first start, for any reason."""
    since: float | None = None
    """When the server entered this state, in Unix seconds."""
    calls_in_flight: int = 0
    """How many calls are running."""
