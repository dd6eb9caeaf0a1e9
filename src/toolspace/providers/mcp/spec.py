"""How to reach one MCP server. Data only: nothing here connects, or imports the MCP library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

Transport = Literal["stdio", "http", "sse", "websocket"]


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One MCP server: a command to start, or a URL to reach.

    `ServerSpec(command="npx", args=("-y", "@modelcontextprotocol/server-memory"))`
    """

    transport: Transport | None = None
    """None: `stdio` where there is a command, `websocket` for ws:// and wss://, else `http`."""
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    """Set for the process, over the variables that it inherits."""
    cwd: Path | None = None
    url: str | None = None
    headers: Mapping[str, str] = {}
    auth: Mapping[str, Any] = {}
    """OAuth, where the server wants it: `{type: authorization_code | client_credentials, clientId, …}`."""
    idle_timeout: float | None = None
    """Seconds without a call after which the server is stopped; the next call starts it again."""

    @property
    def kind(self) -> Transport:
        """The transport that holds."""
        if self.transport is not None:
            return self.transport
        if self.command is not None:
            return "stdio"
        return "websocket" if (self.url or "").startswith(("ws://", "wss://")) else "http"

    def __repr__(self) -> str:
        target = self.command if self.kind == "stdio" else "…"  # A URL and arguments may carry a key.
        return f"ServerSpec({self.kind} {target})"
