"""Who may reach an HTTP endpoint: the names it answers to, the pages it talks to, and a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

from toolspace.config.model import ServerSettings
from toolspace.core.context import ToolContext
from toolspace.server.mcp.json_rpc import Application, Message, Receive, Scope, Send
from toolspace.server.problems import Problem
from toolspace.server.responses import send_problem

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_MOST_REMEMBERED = 256
_LONGEST_REMEMBERED = 512


class Refusal(NamedTuple):
    """A request that is refused, and how."""

    status: int
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


Authorize = Callable[[Scope], "ToolContext | Refusal | Awaitable[ToolContext | Refusal | None] | None"]
"""Says who calls: a context, nobody in particular (None), or that the caller is refused."""


class HostCheck:
    """The Host and Origin that a request may name.

    A page of anyone's can be made to reach a server on this machine by letting its own name point here. Its
    requests then carry that name, by which they are told apart.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = {host.lower() for host in (*LOOPBACK, *hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._known: dict[tuple[bytes | None, bytes | None], Refusal | None] = {}

    def check(self, host: bytes | None, origin: bytes | None) -> Refusal | None:
        """None where the request may pass. Remembered: clients send the same names every time."""
        try:
            return self._known[host, origin]
        except KeyError:
            verdict = self._judge(host, origin)
            if len(host or b"") + len(origin or b"") < _LONGEST_REMEMBERED:
                if len(self._known) >= _MOST_REMEMBERED:
                    self._known.clear()
                self._known[host, origin] = verdict
            return verdict

    def _judge(self, host: bytes | None, origin: bytes | None) -> Refusal | None:
        if not self._answers_to((host or b"").decode("latin-1").lower()):
            return Refusal(421, "Invalid Host header: this server does not answer to that name")
        if origin and not self._allows((origin).decode("latin-1").lower()):
            return Refusal(403, "Invalid Origin header: this page may not use the server")
        return None

    def _answers_to(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        bare = name if name and port.isdecimal() and not host.endswith("]") else host
        return bool(host) and ("*" in self._hosts or host in self._hosts or bare in self._hosts)

    def _allows(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            return parts.scheme in ("http", "https") and self._answers_to(parts.netloc) and "*" not in self._hosts
        except ValueError:
            return False


def require_bearer_token(token: str) -> Authorize:
    """Lets in who sends `Authorization: Bearer <token>`."""
    wanted = token.encode()
    if not wanted:
        raise ValueError("an empty token would let everyone in; give a longer one, or none")

    def authorize(scope: Scope) -> Refusal | None:
        given: list[Any] = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, sent = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() == b"bearer" and hmac.compare_digest(sent.strip(), wanted):
            return None
        return Refusal(401, "Unauthorized: a bearer token is needed", ((b"www-authenticate", b"Bearer"),))

    return authorize


# MERGED from origins: Which names the gateway answers to and which web pages may call it, before anything else is …

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


def allowed_hosts(server: ServerSettings) -> tuple[str, ...]:
    """Names besides those of the loopback: as allowed, the public one, and the address that it listens on."""
    hosts = list(server.allowed_hosts)
    if server.public_url is not None:
        hosts.append(urlsplit(server.public_url).netloc)
    if server.host not in ("0.0.0.0", "::", ""):  # Everywhere is no name.
        hosts.append(f"[{server.host}]" if ":" in server.host else server.host)
    return tuple(dict.fromkeys(hosts))


class CorsMiddleware:
    """An ASGI application around another one: refuses foreign names, and speaks CORS with browsers.

    `besides` are the paths of applications that do so for themselves.
    """

    def __init__(self, app: Application, server: ServerSettings, *, excluded_paths: Iterable[str] = MCP_PATHS) -> None:
        self._app = app
        self._names = HostCheck(allowed_hosts(server), server.allowed_origins)
        self._besides = frozenset(excluded_paths)

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
            await send_problem(send, Problem(400, "Host or Origin is there more than once; send it once"))
            return
        denied = self._names.check(host, origin)
        if denied is not None:
            await send_problem(send, _refused(denied.status, host, origin))
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
