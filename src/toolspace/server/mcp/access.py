"""Who may reach an HTTP endpoint: the names it answers to, the pages it talks to, and a bearer token."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from toolspace.core.context import ToolContext
from toolspace.server.mcp.json_rpc import Scope

LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_MOST_REMEMBERED = 256
_LONGEST_REMEMBERED = 512


class Denied(NamedTuple):
    """A request that is refused, and how."""

    status: int
    message: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


Authorize = Callable[[Scope], "ToolContext | Denied | Awaitable[ToolContext | Denied | None] | None"]
"""Says who calls: a context, nobody in particular (None), or that the caller is refused."""


class Names:
    """The Host and Origin that a request may name.

    A page of anyone's can be made to reach a server on this machine by letting its own name point here. Its
    requests then carry that name, by which they are told apart.
    """

    def __init__(self, hosts: Iterable[str] = (), origins: Iterable[str] = ()) -> None:
        self._hosts = {host.lower() for host in (*LOOPBACK, *hosts)}
        self._origins = {origin.lower().rstrip("/") for origin in origins}
        self._known: dict[tuple[bytes | None, bytes | None], Denied | None] = {}

    def check(self, host: bytes | None, origin: bytes | None) -> Denied | None:
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

    def _judge(self, host: bytes | None, origin: bytes | None) -> Denied | None:
        if not self._answers_to((host or b"").decode("latin-1").lower()):
            return Denied(421, "Invalid Host header: this server does not answer to that name")
        if origin and not self._allows((origin).decode("latin-1").lower()):
            return Denied(403, "Invalid Origin header: this page may not use the server")
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


def bearer(token: str) -> Authorize:
    """Lets in who sends `Authorization: Bearer <token>`."""
    wanted = token.encode()
    if not wanted:
        raise ValueError("an empty token would let everyone in; give a longer one, or none")

    def authorize(scope: Scope) -> Denied | None:
        given: list[Any] = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, sent = given[0].partition(b" ") if len(given) == 1 else (b"", b"", b"")
        if kind.lower() == b"bearer" and hmac.compare_digest(sent.strip(), wanted):
            return None
        return Denied(401, "Unauthorized: a bearer token is needed", ((b"www-authenticate", b"Bearer"),))

    return authorize
