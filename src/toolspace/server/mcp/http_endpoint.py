"""The MCP endpoint over HTTP, as ASGI applications: `McpEndpoint` stands alone, `McpMount` is for the gateway.

`McpEndpoint` authorizes a request, reads its body, and lets `fast_path` or the MCP SDK answer. `toolspace mcp --http`
serves it with `serve_mcp`. `McpMount` adds the gateway's keys and limits: each key has its own tools and sessions.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, Self

from mcp.server.auth.middleware.bearer_auth import AuthenticatedUser
from mcp.server.auth.provider import AccessToken
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

from toolspace.config.server_settings import ServerSettings
from toolspace.core import json_text
from toolspace.core.tool_context import ToolContext
from toolspace.server.authentication import Authenticator
from toolspace.server.authorization import Caller, EntityCaller
from toolspace.server.host_and_cors import MCP_CORS, CorsMiddleware, HostCheck, allowed_hosts
from toolspace.server.mcp.elicitation import SuspendedCalls
from toolspace.server.mcp.fast_path import FastPath
from toolspace.server.mcp.json_rpc import send_error
from toolspace.server.mcp.request_handlers import CALLER_SCOPE_KEY, ToolspaceMcpServer
from toolspace.server.mcp.sessions import (
    MAX_SESSIONS,
    MAX_SESSIONS_PER_CALLER,
    HandshakeSessions,
    parse_initialize,
)
from toolspace.server.mcp.tool_service import McpService
from toolspace.server.rate_limit import RequestLimiter
from toolspace.server.requests import MAX_BODY_BYTES, Application, Message, Receive, Scope, Send, read_body
from toolspace.server.responses import Problem, to_problem
from toolspace.server.tool_permissions import ToolKeyPolicy
from toolspace.server.uvicorn_server import bind_socket, serve
from toolspace.toolspace import Toolspace

_log = logging.getLogger("toolspace.mcp")
IDLE_SECONDS = 1800.0
"""How long a session of the handshake era is kept without a request."""
_STOP_SECONDS: Final = 2
_RECHECK_SECONDS: Final = 3.0
"""How often the keys of open connections are checked again."""
_RELEASE_SCOPE_KEY: Final = "toolspace.release"

Authorize = Callable[[Scope], "ToolContext | Awaitable[ToolContext | None] | None"]
"""Authenticates a request: returns the caller's context, or None for any caller. Raises `Problem` to refuse it."""


class McpEndpoint:
    """Serves a toolspace over streamable HTTP, wherever it is mounted. Works inside its `async with`.

        async with Toolspace.open("toolspace.yaml") as ts, McpEndpoint(ts) as endpoint:
            ...  # endpoint(scope, receive, send)

    It accepts loopback host names and `allowed_hosts`; "*" accepts all, for a server behind a proxy that checks them.
    """

    def __init__(
        self,
        toolspace: Toolspace,
        *,
        allowed_hosts: Iterable[str] = (),
        allowed_origins: Iterable[str] = (),
        authorize: Authorize | None = None,
        max_body: int = MAX_BODY_BYTES,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self._service = McpService(toolspace)
        self._suspended_calls = SuspendedCalls(self._service)
        self._server = ToolspaceMcpServer(self._service, self._suspended_calls)
        host_check = HostCheck(allowed_hosts, allowed_origins)
        self._app = CorsMiddleware(self._serve, host_check, MCP_CORS, refuse=_refuse)
        self._authorize = authorize
        self._max_body = max_body
        # Body size, Host and Origin are checked here, for both paths.
        self._manager = StreamableHTTPSessionManager(
            self._server, max_request_body_size=max_body, session_idle_timeout=idle_seconds, max_sessions=MAX_SESSIONS
        )
        self._fast_path = FastPath(self._service, self._suspended_calls, self._server.server_info_stamp)
        self._sessions = HandshakeSessions(idle_seconds)
        self._runner: asyncio.Task[None] | None = None
        self._stop_event = asyncio.Event()

    async def __aenter__(self) -> Self:
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._runner = asyncio.create_task(self._run(started))
        await asyncio.wait((started, self._runner), return_when=asyncio.FIRST_COMPLETED)
        if self._runner.done():
            await self._runner  # Raises the reason.
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends sessions and streams. Running calls end by themselves, or the web server cancels them."""
        self._stop_event.set()
        if self._runner is not None:
            await self._runner

    async def _run(self, started: asyncio.Future[None]) -> None:
        # In its own task: the SDK's scopes must be left by the task that entered them, and two different tasks may
        # enter and leave this endpoint.
        async with self._service, self._suspended_calls, self._manager.run():
            started.set_result(None)
            await self._stop_event.wait()
            await self._server.changes.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"the MCP endpoint serves HTTP, not {scope['type']}; mount it below an application")
        if self._runner is None or self._stop_event.is_set():
            await send_error(send, 503, "Service Unavailable: the server is starting or stopping")
            return
        await self._app(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request whose Host and Origin are allowed."""
        header_pairs: list[tuple[bytes, bytes]] = scope["headers"]
        headers = dict(header_pairs)
        has_duplicates = len(headers) < len(header_pairs)
        context, owner, body = None, None, b""
        try:
            if has_duplicates and sum(name == b"mcp-session-id" for name, _ in header_pairs) > 1:
                raise Problem(400, "The header Mcp-Session-Id appears more than once; send it once")
            if self._authorize is not None:
                context = self._authorize(scope)
                if inspect.isawaitable(context):
                    context = await context
            if scope["method"] == "POST":
                body = await read_body(receive, headers.get(b"content-length"), limit=self._max_body)
        except Exception as error:
            await _refuse(send, to_problem(error))
            return
        if context is not None:
            owner = _hash_caller(
                context.user_id, context.agent_entity_id, context.agent_id, context.session_id, context.space_id
            )
            scope[CALLER_SCOPE_KEY] = context
        if b"mcp-session-id" in headers:
            session = self._sessions.begin_use(headers, owner)
            try:
                await self._serve_in_session(scope, receive, send, owner, body, headers, has_duplicates=has_duplicates)
            finally:
                if session is not None:
                    session.end_use()
        elif scope["method"] != "POST":
            await self._serve_by_sdk(scope, receive, send, owner)
        elif has_duplicates or not await self._fast_path.answer_stateless(headers, body, context, receive, send):
            # `headers` hides one value of a duplicated header, so the SDK handles such requests.
            await self._serve_without_session(scope, receive, send, owner, body, context)

    async def _serve_in_session(
        self,
        scope: Scope,
        receive: Receive,
        send: Send,
        owner: str | None,
        body: bytes,
        headers: Mapping[bytes, bytes],
        *,
        has_duplicates: bool,
    ) -> None:
        if scope["method"] != "POST":
            if scope["method"] == "DELETE" and (session := self._sessions.remove(headers, owner)) is not None:
                for call_id in session.running_calls.values():
                    self._service.cancel(call_id)
            await self._serve_by_sdk(scope, receive, send, owner)
            return
        if not has_duplicates:
            session = self._sessions.find(headers, owner)
            if session is not None and await self._fast_path.answer_in_session(session, headers, body, receive, send):
                return
        send = self._sessions.watch_for_loss(headers, owner, send)
        await self._serve_by_sdk(_trim_headers(scope), _replay(body, receive), send, owner)

    async def _serve_without_session(
        self, scope: Scope, receive: Receive, send: Send, owner: str | None, body: bytes, context: ToolContext | None
    ) -> None:
        """Serves a POST that the fast path does not serve. It may open a session."""
        if (capabilities := parse_initialize(body)) is not None:
            if self._sessions.needs_room(owner, context) and not await self._end_least_recently_used(owner):
                if self._sessions.has_too_many(owner):
                    message = f"Too many sessions: {MAX_SESSIONS_PER_CALLER} are open and in use; end one with DELETE"
                    await send_error(send, 429, message)
                else:
                    await send_error(send, 503, "Service Unavailable: too many sessions of tool keys are open")
                return
            send = self._sessions.watch_opening(capabilities, owner, context, send)
        await self._serve_by_sdk(_trim_headers(scope), _replay(body, receive), send, owner)

    async def _end_least_recently_used(self, owner: str | None) -> bool:
        """Ends the session that a caller has not used for the longest time; False if all its sessions are in use.

        Its client gets 404 for the next request in it, and opens a new session.
        """
        session = self._sessions.remove_least_recently_used(owner)
        if session is None:
            return False
        _log.info("MCP: ended the least recently used session of a key, which has as many sessions as it may have")
        scope: Scope = {
            "type": "http",
            "method": "DELETE",
            "path": "/",
            "query_string": b"",
            "headers": session.headers,
        }
        await self._serve_by_sdk(scope, _replay(b"", _receive_nothing), _ignore_message, owner)
        return True

    async def _serve_by_sdk(self, scope: Scope, receive: Receive, send: Send, owner: str | None) -> None:
        if owner is not None:
            # The SDK lets only the user who opened a session use it.
            scope["user"] = AuthenticatedUser(AccessToken(token="", client_id=owner, scopes=[]))
        await self._manager.handle_request(scope, receive, send)


class McpMount:
    """An ASGI application for `/mcp`. Works inside its `async with`.

    Secret keys see every tool, tool keys those that they allow. Entities with a public key are refused.
    """

    def __init__(
        self,
        toolspace: Toolspace,
        *,
        authenticator: Authenticator,
        limits: RequestLimiter,
        tool_keys: ToolKeyPolicy,
        server: ServerSettings,
    ) -> None:
        self._authenticator = authenticator
        self._limits = limits
        self._tool_keys = tool_keys
        self._endpoint = McpEndpoint(
            toolspace,
            allowed_hosts=allowed_hosts(server),
            allowed_origins=server.allowed_origins,
            authorize=self._authorize,
            max_body=server.max_body_bytes,
        )
        self._keys_changed = asyncio.Event()
        authenticator.on_change(self._keys_changed.set)
        self._requests: dict[asyncio.Task[Any], _OpenRequest] = {}
        self._key_watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._endpoint.__aenter__()
        self._key_watcher = asyncio.create_task(self._watch_keys())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._key_watcher is not None:
            self._key_watcher.cancel()
            await asyncio.gather(self._key_watcher, return_exceptions=True)
        await self._endpoint.__aexit__()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        request = self._requests[task] = _OpenRequest(scope, send)
        try:
            await self._endpoint(scope, receive, request.send)
        except asyncio.CancelledError:
            if not request.is_revoked:
                raise
            task.uncancel()
            await request.end()
        finally:
            del self._requests[task]
            if (release := scope.pop(_RELEASE_SCOPE_KEY, None)) is not None:
                release()

    async def _authorize(self, scope: Scope) -> ToolContext:
        client = scope.get("client")
        caller = self._authenticator.authenticate(scope["headers"], client[0] if client else "")
        if not isinstance(caller, Caller):  # Not in the authenticator's cache.
            caller = await caller
        if isinstance(caller, EntityCaller):
            raise Problem(403, "the MCP endpoint accepts secret keys and tool keys, not public keys")
        scope[_RELEASE_SCOPE_KEY] = self._limits.admit(caller, stream=scope["method"] == "GET")
        return self._tool_keys.context_for(caller)

    async def _watch_keys(self) -> None:
        """Ends requests whose key has been revoked: a stream may stay open for days."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECHECK_SECONDS):
                    await self._keys_changed.wait()
            started_before = time.monotonic() - (0.0 if self._keys_changed.is_set() else _RECHECK_SECONDS)
            self._keys_changed.clear()
            for task, request in list(self._requests.items()):
                is_admitted = _RELEASE_SCOPE_KEY in request.scope
                if request.started_at > started_before or request.is_revoked or not is_admitted:
                    continue
                try:
                    is_valid = await self._authenticator.is_valid(request.scope["headers"])
                except Exception as error:  # The database cannot be reached: all requests stay.
                    to_problem(error)
                    break
                if not is_valid and task in self._requests:
                    request.is_revoked = True
                    task.cancel()


@dataclass(slots=True)
class _OpenRequest:
    """A request, and how much of its response has been sent."""

    scope: Scope
    forward: Send
    started_at: float = field(default_factory=time.monotonic)
    is_revoked: bool = False
    has_started: bool = False
    has_ended: bool = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
        elif not message.get("more_body", False):
            self.has_ended = True
        await self.forward(message)

    async def end(self) -> None:
        """Sends 401, or ends the response that has started."""
        if not self.has_started:
            await self.send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        if not self.has_ended:
            await self.send({"type": "http.response.body", "body": b""})


@asynccontextmanager
async def serve_mcp(
    app: Application, *, host: str = "127.0.0.1", port: int = 0, path: str = "/mcp"
) -> AsyncGenerator[str]:
    """Serves an endpoint at one path while the block runs; yields the URL. Port 0 is a free port.

    Raises `OSError` if the address cannot be bound.
    """
    paths = (path, path.rstrip("/") or "/", path.rstrip("/") + "/")

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in paths:
            await app(scope, receive, send)
        else:
            await send_error(send, 404, f"Not found: the MCP endpoint is at {path}")

    async with serve(route, bind_socket(host, port), stop_seconds=_STOP_SECONDS) as url:
        yield url + path


async def _refuse(send: Send, problem: Problem) -> None:
    """Sends a problem as MCP clients expect it: a JSON-RPC error."""
    await send_error(send, problem.status, problem.detail, headers=problem.headers)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that starts with a body that has already been read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replaying_receive() -> Message:
        return messages.pop() if messages else await receive()

    return replaying_receive


def _trim_headers(scope: Scope) -> Scope:
    """Some web servers leave white space around header values."""
    return {**scope, "headers": [(name, value.strip(b" \t")) for name, value in scope["headers"]]}


async def _receive_nothing() -> Message:
    return {"type": "http.disconnect"}


async def _ignore_message(message: Message) -> None: ...


@lru_cache(maxsize=1024)
def _hash_caller(*ids: str | None) -> str:
    """Cached, because it is needed for every request."""
    return hashlib.sha256(json_text.encode_bytes(list(ids))).hexdigest()
