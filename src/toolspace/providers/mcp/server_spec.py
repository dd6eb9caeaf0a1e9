"""What other packages need to know of MCP servers: how to reach one, its status, and callbacks for its requests.

Plain data and functions: connects to nothing and does not import the MCP SDK.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from toolspace.core.tool_context import ElicitationResult, ToolContext
from toolspace.errors import ToolError

Transport = Literal["stdio", "http", "sse", "websocket"]
ServerState = Literal["starting", "ready", "idle", "reconnecting", "failed", "stopped"]
"""`idle`: stopped because of `idleTimeout`; the next call starts it. `failed`: never became ready; it is retried."""
ProtocolEra = Literal["stateless", "handshake"]


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
    description_prefix: bool = True
    """Whether the descriptions of its tools begin with `[name] `, so that a model knows whose they are."""
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

    @property
    def uses_http(self) -> bool:
        """Whether it is reached over streamable HTTP, or over SSE if it supports only that."""
        return self.kind in ("http", "sse")

    def __repr__(self) -> str:
        target = self.command if self.kind == "stdio" else "…"  # URLs and arguments may contain keys.
        return f"ServerSpec({self.kind} {target})"


class ServerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The state of one server at one moment, as `toolspace servers` and the HTTP API show it."""

    name: str
    """The name of the MCP server."""
    state: ServerState
    """The state of the server."""
    transport: str
    """The transport in use: `sse` for a server that supports only SSE, else `http`, `stdio` or `websocket`."""
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
    circuit: Literal["closed", "open"] = "closed"
    """`open` after repeated transport errors or timeouts of calls: then further calls fail at once."""
    next_probe_at: float | None = None
    """When the next call is let through an open circuit breaker, in Unix seconds."""


class ElicitationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's question to the user."""

    server: str
    message: str
    schema: Mapping[str, Any] | None = None
    """The JSON Schema of the answer: an object of flat fields. None if the user is to open `url` instead."""
    url: str | None = None


class SamplingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server's request for a model's response. `params` are the request's parameters as on the wire."""

    server: str
    params: Mapping[str, Any]


ElicitationCallback = Callable[[ElicitationRequest, ToolContext | None], Awaitable[ElicitationResult]]
"""Asks the user. The context is that of the call during which the server asks; None if that call is not certain."""
SamplingCallback = Callable[[SamplingRequest, ToolContext | None], Awaitable[Mapping[str, Any]]]
"""Asks a model. Returns `{role, content, model, stopReason?}` as on the wire."""
RootsCallback = Callable[[], Sequence[Path]]
"""Returns the folders that a server should work in."""


class McpCallbacks(msgspec.Struct, frozen=True, kw_only=True):
    """Answer the requests of all MCP servers of a toolspace. A server may send only requests that have a callback."""

    elicit: ElicitationCallback | None = None
    sample: SamplingCallback | None = None
    roots: RootsCallback | None = None


NO_CALLBACKS = McpCallbacks()


async def _elicit_from_caller(request: ElicitationRequest, context: ToolContext | None) -> ElicitationResult:
    if context is None or context.caller_client is None:
        return ElicitationResult(action="decline")
    try:
        return await context.caller_client.elicit(request.message, schema=request.schema, url=request.url)
    except ToolError:  # The caller cannot be asked. The server need not wait or ask again.
        return ElicitationResult(action="decline")


async def _sample_from_caller(request: SamplingRequest, context: ToolContext | None) -> Mapping[str, Any]:
    if context is None or context.caller_client is None:
        raise ToolError("no model to ask: the caller is not certain, or does not support sampling")
    return await context.caller_client.sample(request.params)


FORWARD_TO_CALLER = McpCallbacks(elicit=_elicit_from_caller, sample=_sample_from_caller)
"""Forwards a server's requests to whoever made the call. For a toolspace that serves other clients.

Roots are not forwarded: a server would keep the folders of one caller for all others.
"""
