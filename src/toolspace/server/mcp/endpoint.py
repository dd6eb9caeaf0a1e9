"""The MCP endpoint as an ASGI application: who may in, how much is read, and which path a request takes."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Self

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.server.host_and_cors import Authorize, HostCheck, Refusal
from toolspace.server.mcp.fast_path import FastPath, FastRequest
from toolspace.server.mcp.json_rpc import Message, Receive, Scope, Send, send_error
from toolspace.server.mcp.sdk_server import CALLER_SCOPE_KEY, ChangeNotifier, ToolspaceMcpServer
from toolspace.server.mcp.service import McpService
from toolspace.server.mcp.sessions import (
    MAX_SESSIONS,
    MAX_SESSIONS_PER_CALLER,
    HandshakeSessions,
    parse_session_opening,
)
from toolspace.server.mcp.suspended_calls import SuspendedCalls
from toolspace.toolspace import Toolspace

MAX_BODY = 4 * 1024 * 1024
BODY_SECONDS = 30.0
"""How long a body may take to arrive: a client that sends a byte now and then would hold its connection for ever."""
IDLE_SECONDS = 1800.0
"""How long a session of the handshake era is kept for a client that asks nothing."""


class McpEndpoint:
    """Serves a toolspace over streamable HTTP, wherever it is mounted. Works inside its `async with`.

        async with Toolspace.open("toolspace.yaml") as ts, McpEndpoint(ts) as endpoint:
            ...  # endpoint(scope, receive, send)

    It answers to loopback names and to `allowed_hosts`; "*" is for a server behind something that checks.
    """

    def __init__(
        self,
        toolspace: Toolspace,
        *,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        authorize: Authorize | None = None,
        max_body: int = MAX_BODY,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._service = McpService(toolspace)
        self._changes = ChangeNotifier()
        self._parking = SuspendedCalls(self._service)
        self._server = ToolspaceMcpServer(self._service, self._changes, self._parking)
        self._names = HostCheck(allowed_hosts, allowed_origins)
        self._authorize = authorize
        self._max_body = max_body
        # The body is bounded and the names are checked here, before either path.
        self._manager = StreamableHTTPSessionManager(
            self._server, max_request_body_size=max_body, session_idle_timeout=idle_seconds, max_sessions=MAX_SESSIONS
        )
        self._fast = FastPath(self._service, self._parking, self._server.server_info_stamp)
        self._sessions = HandshakeSessions(idle_seconds)
        self._running: asyncio.Task[None] | None = None
        self._ended = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._service.on_tools_changed = self._tools_changed
        self._service.on_outputs_changed = self._changes.notify_resources_changed
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(started))
        await asyncio.wait((started, self._running), return_when=asyncio.FIRST_COMPLETED)
        if self._running.done():
            await self._running  # It failed, and says so.
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends sessions and streams. Calls under way are left to end, or to the server around to cut off."""
        self._ended.set()
        if self._running is not None:
            await self._running

    async def _run(self, started: asyncio.Future[None]) -> None:
        # A task of its own: the library's scopes have to be left by the task that entered them, and whoever opens
        # and closes us may be two.
        async with self._service, self._parking, self._manager.run():
            started.set_result(None)
            await self._ended.wait()
            await self._changes.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the MCP endpoint answers HTTP, not {scope['type']}; mount it below an application")
        if self._running is None or self._ended.is_set():
            await send_error(send, 503, "Service Unavailable: the server is starting or stopping")
            return
        pairs: list[tuple[bytes, bytes]] = scope["headers"]
        headers = dict(pairs)
        denied = self._names.check(headers.get(b"host"), headers.get(b"origin"))
        if len(headers) < len(pairs) and _is_said_twice(pairs):
            denied = Refusal(400, "Bad Request: Host, Origin or Mcp-Session-Id appears more than once")
        if denied is not None:
            await send_error(send, denied.status, denied.message, headers=denied.headers)
            return
        if (origin := headers.get(b"origin")) is not None:
            send = _shared_with(origin, send)
            if scope["method"] == "OPTIONS":
                await _preflight(send)
                return
        context, owner = None, None
        if self._authorize is not None:
            context = self._authorize(scope)
            if inspect.isawaitable(context):
                context = await context
            if isinstance(context, Refusal):
                await send_error(send, context.status, context.message, headers=context.headers)
                return
            if context is not None:
                owner = _owner(
                    context.user_id, context.agent_entity_id, context.agent_id, context.session_id, context.space_id
                )
                scope[CALLER_SCOPE_KEY] = context
        if scope["method"] != "POST":
            if scope["method"] == "DELETE" and (session := self._sessions.remove(headers, owner)) is not None:
                for call_id in session.running_calls.values():
                    self._service.cancel(call_id)
            await self._manage(scope, receive, send, owner)
            return
        body = await _read(receive, headers.get(b"content-length"), self._max_body)
        if isinstance(body, Refusal):
            await send_error(send, body.status, body.message, headers=body.headers)
            return
        # A header that is there twice hides one of its values in the mapping: the library looks at each.
        if len(headers) == len(pairs) and (job := self._job(headers, body, context, owner)) is not None:
            await job.run(receive, send)
            return
        if b"mcp-session-id" in headers:
            send = self._sessions.watch_for_loss(headers, owner, send)
        elif (opening := parse_session_opening(body)) is not None:
            if self._sessions.has_too_many(owner):
                await send_error(
                    send, 429, f"Too many sessions: {MAX_SESSIONS_PER_CALLER} are open; end one with DELETE"
                )
                return
            send = self._sessions.watch_opening(opening, owner, context, send)
        # Space around a value is no part of it, but some web servers leave it there.
        trimmed = {**scope, "headers": [(name, value.strip(b" \t")) for name, value in pairs]}
        await self._manage(trimmed, _replay(body, receive), send, owner)

    async def _manage(self, scope: Scope, receive: Receive, send: Send, owner: str | None) -> None:
        """Leaves a request to the library."""
        if owner is not None:
            # The caller as the library knows callers: a session is only for the one who opened it.
            scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
        await self._manager.handle_request(scope, receive, send)

    def _job(
        self, headers: Mapping[bytes, bytes], body: bytes, context: ToolContext | None, owner: str | None
    ) -> FastRequest | None:
        if b"mcp-session-id" not in headers:
            return self._fast.match_stateless(headers, body, context)
        session = self._sessions.find(headers, owner)
        return self._fast.match_in_session(session, headers, body) if session is not None else None

    def _tools_changed(self) -> None:
        self._server.refresh()
        self._changes.notify_tools_changed()


def _is_said_twice(pairs: list[tuple[bytes, bytes]]) -> bool:
    names = [name for name, _ in pairs if name in (b"host", b"origin", b"mcp-session-id")]
    return len(set(names)) < len(names)


async def _read(receive: Receive, declared: bytes | None, limit: int) -> bytes | Refusal:
    """The whole body. A part of one is as good as nothing, whatever it says: its client went away, or is too slow."""
    if declared is not None and declared.isdigit() and int(declared[:20]) > limit:
        return _too_large(limit)
    try:
        async with asyncio.timeout(BODY_SECONDS):
            message = await receive()
            if message["type"] == "http.request" and not message.get("more_body", False):  # The way of most.
                body: bytes = message.get("body", b"")
                return body if len(body) <= limit else _too_large(limit)
            pieces = bytearray()
            while message["type"] == "http.request":
                pieces += message.get("body", b"")
                if len(pieces) > limit:
                    return _too_large(limit)
                if not message.get("more_body", False):
                    return bytes(pieces)
                message = await receive()
    except TimeoutError:
        return Refusal(408, "Request Timeout: the body did not arrive in time", ((b"connection", b"close"),))
    return Refusal(400, "Bad Request: the connection was closed before the body had arrived")


def _too_large(limit: int) -> Refusal:
    return Refusal(413, f"Request body too large: at most {limit} bytes are taken")


def _replay(body: bytes, receive: Receive) -> Receive:
    """Gives the library a body that was read already."""
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed


@lru_cache(maxsize=1024)
def _owner(*who: str | None) -> str:
    """One text for one caller. Remembered: it is asked for with every request."""
    return hashlib.sha256(json_text.encode_bytes(list(who))).hexdigest()


def _shared_with(origin: bytes, send: Send) -> Send:
    """Lets a page that may use the server read its answers."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            shared = [
                (b"access-control-allow-origin", origin),
                (b"access-control-expose-headers", b"mcp-session-id"),
                (b"vary", b"origin"),
            ]
            message = {**message, "headers": [*message.get("headers", ()), *shared]}
        await send(message)

    return sending


async def _preflight(send: Send) -> None:
    headers = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", b"*, authorization"),
        (b"access-control-max-age", b"600"),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
