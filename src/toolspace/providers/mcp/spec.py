"""Describes how to reach one MCP server. Plain data: connects to nothing and does not import the MCP SDK."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Transport = Literal["stdio", "http", "sse", "websocket"]


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One MCP server: a command to start, or a URL to connect to.

    `ServerSpec(command="npx", args=("-y", "@modelcontextprotocol/server-memory"))`
    """

    transport: Transport | None = None
    """None: `stdio` if there is a command, `websocket` for ws:// and wss://, else `http`."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Environment variables of the process, in addition to those that it inherits."""
    cwd: Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    auth: Mapping[str, Any] = {}
    """OAuth, if the server needs it: `{type: authorization_code | client_credentials, clientId, …}`."""
    idle_timeout: float | None = None
    """Seconds without a call after which the server is stopped. The next call starts it again."""

    @property
    def kind(self) -> Transport:
        """The transport in effect."""
        if self.transport is not None:
            return self.transport
        if self.command is not None:
            return "stdio"
        return "websocket" if (self.url or "").startswith(("ws://", "wss://")) else "http"

    def __repr__(self) -> str:
        target = self.command if self.kind == "stdio" else "…"  # URLs and arguments may contain keys.
        return f"ServerSpec({self.kind} {target})"
