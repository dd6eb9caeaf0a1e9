"""What can be told of one MCP server at a moment, as `toolspace servers` shows it."""

from __future__ import annotations

from typing import Literal

import msgspec

ServerState = Literal["starting", "ready", "idle", "reconnecting", "failed", "stopped"]
"""`idle`: stopped for want of calls, the next one starts it. `failed`: never got ready; it is tried again."""
ProtocolEra = Literal["stateless", "handshake"]


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    state: ServerState
    transport: str
    """What is in use: an `http` server that only speaks `sse` says `sse`."""
    era: ProtocolEra | None = None
    protocol_version: str | None = None
    server: str | None = None
    """The server's own name and version."""
    pid: int | None = None
    tools: int = 0
    left_out: tuple[str, ...] = ()
    """Tools of the server that are not offered, and why: `name: needs MCP tasks`."""
    last_error: str | None = None
    last_error_at: float | None = None
    """Unix seconds."""
    restarts: int = 0
    """How often it was started again after its first start, whatever for."""
    since: float | None = None
    """When it got into this state, in Unix seconds."""
    calls_in_flight: int = 0
