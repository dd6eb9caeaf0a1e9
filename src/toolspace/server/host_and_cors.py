"""Checks Host and Origin of every request, and answers CORS preflights. The HTTP API and the MCP endpoint use it.

It knows no routes and no credentials: it runs before anything else looks at a request.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from toolspace.config.server_settings import ServerSettings
from toolspace.server.requests import Application, Message, Receive, Scope, Send
from toolspace.server.responses import Problem, send_problem

MCP_PATHS: Final = ("/mcp", "/mcp/")
_LOOPBACK_HOSTS: Final = ("localhost", "127.0.0.1", "[::1]")
_MAX_CACHED: Final = 128
"""Anyone can send long headers; 128 of them need little memory."""


def allowed_hosts(server: ServerSettings) -> tuple[str, ...]:
    """Returns the configured host names, the one of `publicUrl`, and the address that the server listens on."""
    hosts = list(server.allowed_hosts)
    if server.public_url is not None:
        hosts.append(urlsplit(server.public_url).netloc)
    if server.host not in ("0.0.0.0", "::", ""):  # The address of all interfaces is no name.
        hosts.append(f"[{server.host}]" if ":" in server.host else server.host)
    return tuple(dict.fromkeys(hosts))


class HostCheck:
    """Decides which Host and Origin headers are accepted. Loopback names always are.

    This stops DNS rebinding: a foreign web page can make its own name resolve to this machine, but then its requests
    carry that name as their Host.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = {host.lower() for host in (*_LOOPBACK_HOSTS, *hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self.check = lru_cache(maxsize=_MAX_CACHED)(self._check)
        """Returns None if a request may pass. Cached, because clients send the same Host and Origin every time."""

    def _check(self, host_header: bytes | None, origin_header: bytes | None) -> Problem | None:
        host, origin = (host_header or b"").decode("latin-1"), (origin_header or b"").decode("latin-1")
        if not self._is_host_allowed(host.lower()):
            return Problem(
                421, f'Host "{host[:200]}" is not allowed; add it to server.allowedHosts (toolspace mcp: --allow-host)'
            )
        if origin and not self._is_origin_allowed(origin.lower()):
            return Problem(
                403,
                f'Origin "{origin[:200]}" is not allowed; '
                "add it to server.allowedOrigins (toolspace mcp: --allow-origin)",
            )
        return None

    def _is_host_allowed(self, host: str) -> bool:
        name, _, port = host.rpartition(":")
        bare_name = name if name and port.isdecimal() and not host.endswith("]") else host
        return bool(host) and ("*" in self._hosts or host in self._hosts or bare_name in self._hosts)

    def _is_origin_allowed(self, origin: str) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        try:
            parts = urlsplit(origin)
            return parts.scheme in ("http", "https") and self._is_host_allowed(parts.netloc) and "*" not in self._hosts
        except ValueError:
            return False


class CorsPolicy(NamedTuple):
    """What a web page of an allowed origin may send and read."""

    preflight_headers: tuple[tuple[bytes, bytes], ...]
    exposed_headers: tuple[bytes, bytes]
    every_options_is_preflight: bool = False
    """True for an application that does not answer OPTIONS itself."""


_MAX_AGE: Final = (b"access-control-max-age", b"600")
_MCP_EXPOSED_HEADERS: Final = (b"access-control-expose-headers", b"mcp-session-id")
API_CORS: Final = CorsPolicy(
    preflight_headers=(
        (b"access-control-allow-methods", b"GET, HEAD, POST, PUT, PATCH, DELETE"),
        (
            b"access-control-allow-headers",
            b"authorization, content-type, idempotency-key, last-event-id, x-public-key, x-secret-key",
        ),
        _MAX_AGE,
        (b"content-length", b"0"),
    ),
    exposed_headers=(
        b"access-control-expose-headers",
        b"retry-after, location, idempotency-replayed, www-authenticate",
    ),
)
MCP_CORS: Final = CorsPolicy(
    preflight_headers=(
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", b"*, authorization"),
        _MAX_AGE,
        _MCP_EXPOSED_HEADERS,
    ),
    exposed_headers=_MCP_EXPOSED_HEADERS,
    every_options_is_preflight=True,
)


class CorsMiddleware:
    """An ASGI application around another one. It refuses foreign hosts and origins and adds the CORS headers.

    `refuse` sends a problem in the format of the application. Requests to `excluded_paths` pass unchecked: the
    application there has a middleware of its own.
    """

    def __init__(
        self,
        app: Application,
        check: HostCheck,
        policy: CorsPolicy,
        *,
        refuse: Callable[[Send, Problem], Awaitable[None]] = send_problem,
        excluded_paths: Iterable[str] = (),
    ) -> None:
        self.app = app
        self._check = check
        self._policy = policy
        self._refuse = refuse
        self._excluded_paths = frozenset(excluded_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._excluded_paths:
            await self.app(scope, receive, send)
            return
        host = origin = None
        is_repeated = False
        is_preflight = self._policy.every_options_is_preflight
        for name, value in scope["headers"]:
            if name == b"host":
                is_repeated = is_repeated or host is not None
                host = value
            elif name == b"origin":
                is_repeated = is_repeated or origin is not None
                origin = value
            elif name == b"access-control-request-method":
                is_preflight = True
        if is_repeated:
            await self._refuse(send, Problem(400, "The header Host or Origin appears more than once; send it once"))
        elif (problem := self._check.check(host, origin)) is not None:
            await self._refuse(send, problem)
        elif origin is None:
            await self.app(scope, receive, send)
        elif is_preflight and scope["method"] == "OPTIONS":
            headers = [(b"access-control-allow-origin", origin), (b"vary", b"origin"), *self._policy.preflight_headers]
            await send({"type": "http.response.start", "status": 204, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
        else:
            await self.app(scope, receive, _add_cors_headers(send, origin, self._policy))


def _add_cors_headers(send: Send, origin: bytes, policy: CorsPolicy) -> Send:
    """Wraps `send` so that the page may read the response."""
    cors_headers = [
        (b"access-control-allow-origin", origin),
        policy.exposed_headers,
        (b"vary", b"origin"),
    ]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), *cors_headers]}
        await send(message)

    return send_with_headers
