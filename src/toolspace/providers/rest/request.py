"""One HTTP request as data, ready to send. Knows nothing of templates, tools or connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from yarl import URL

if TYPE_CHECKING:
    from aiohttp.payload import Payload

SAFE = frozenset(("GET", "HEAD", "OPTIONS"))
"""Methods that change nothing, so that their redirects may be followed."""
IDEMPOTENT = frozenset((*SAFE, "PUT", "DELETE"))
"""Methods that do no more when they are sent twice, so that they may be sent again."""

Headers = Mapping[str, str] | Sequence[tuple[str, str]]
Body = bytes | Callable[[], "Payload"] | None
"""Bytes, or what makes the payload anew for each time the request is sent."""


class Request(msgspec.Struct, frozen=True):
    """What goes over the wire. Its text shows no header, query or body: keys may be in them."""

    method: str
    """In capitals."""
    url: URL
    """Encoded, without user, password and fragment. `URL(text, encoded=True)` costs nothing to make."""
    headers: Headers = ()
    body: Body = None
    idempotent: bool = False
    """Whether it may be sent again after 429 and 503."""
    safe: bool = False
    """Whether it changes nothing, so that a redirect may be followed."""
    public: bool = False
    """Whether it may reach public addresses only: not the operator has chosen the host, but somebody on the web."""

    def __repr__(self) -> str:
        return f"Request({self.method} {self.url.with_query(None)})"


Build = Callable[[dict[str, Any]], Request]
"""Makes the request of one call from its arguments. Compiled once per tool; raises `ToolValidationError`."""
