"""Which names the gateway answers to and which web pages may call it, before anything else is looked at."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from toolspace.config.model import Server
from toolspace.server.mcp.access import Names
from toolspace.server.mcp.json_rpc import Application, Message, Receive, Scope, Send
from toolspace.server.problems import Problem
from toolspace.server.responses import respond_problem

MCP_PATHS: Final = ("/mcp", "/mcp/")
_EXPOSED: Final = b"retry-after, location, idempotency-replayed, www-authenticate"
_PREFLIGHT: Final = (
    (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
    (
        b"access-control-allow-headers",
        b"authorization, content-type, idempotency-key, last-event-id, x-public-key, x-secret-key",
    ),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
)


def answered_hosts(server: Server) -> tuple[str, ...]:
    """Names besides those of the loopback: as allowed, the public one, and the address that it listens on."""
    hosts = list(server.allowed_hosts)
    if server.public_url is not None:
        hosts.append(urlsplit(server.public_url).netloc)
    if server.host not in ("0.0.0.0", "::", ""):  # Everywhere is no name.
        hosts.append(f"[{server.host}]" if ":" in server.host else server.host)
    return tuple(dict.fromkeys(hosts))


class Origins:
    """An ASGI application around another one: refuses foreign names, and speaks CORS with browsers.

    `besides` are the paths of applications that do so for themselves.
    """

    def __init__(self, app: Application, server: Server, *, besides: Iterable[str] = MCP_PATHS) -> None:
        self._app = app
        self._names = Names(answered_hosts(server), server.allowed_origins)
        self._besides = frozenset(besides)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._besides:
            await self._app(scope, receive, send)
            return
        host = origin = None
        twice = preflight = False
        for name, value in scope["headers"]:
            if name == b"host":
                twice = twice or host is not None
                host = value
            elif name == b"origin":
                twice = twice or origin is not None
                origin = value
            elif name == b"access-control-request-method":
                preflight = scope["method"] == "OPTIONS"
        if twice:
            await respond_problem(send, Problem(400, "Host or Origin is there more than once; send it once"))
            return
        denied = self._names.check(host, origin)
        if denied is not None:
            await respond_problem(send, _refused(denied.status, host, origin))
            return
        if origin is None:
            await self._app(scope, receive, send)
        elif preflight:
            headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin"), *_PREFLIGHT]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self._app(scope, receive, _sharing(origin, send))


def _sharing(origin: bytes, send: Send) -> Send:
    """Lets the page read the answer."""
    shared = [
        (b"access-control-allow-origin", origin),
        (b"access-control-expose-headers", _EXPOSED),
        (b"vary", b"origin"),
    ]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *shared]}
        await send(message)

    return sending


def _refused(status: int, host: bytes | None, origin: bytes | None) -> Problem:
    if status == 421:
        name = (host or b"").decode("latin-1")[:200]
        return Problem(421, f'this server does not answer to the name "{name}"; add it to server.allowedHosts')
    page = (origin or b"").decode("latin-1")[:200]
    return Problem(403, f'pages of "{page}" may not call this server; add it to server.allowedOrigins')
