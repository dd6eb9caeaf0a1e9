"""Opens the way to one MCP server, whatever its transport. Knows nothing of tools, calls or reconnecting.

`async with open_transport("github", spec) as link: async with Client(link, cache=None) as client: …`
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from urllib.parse import urlsplit

import httpx2

from toolspace.core.secret_masking import is_secret_name, register_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.spec import ServerSpec
from toolspace.providers.mcp.transports.base import MAX_MESSAGE_BYTES, OpenTransport
from toolspace.providers.mcp.transports.trace import trace_streams

__all__ = ["OpenTransport", "open_transport", "prepare_transport", "validate_url"]

_SCHEMES = {"http": ("http", "https"), "sse": ("http", "https"), "websocket": ("ws", "wss")}
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?|")
_LOUD = {
    "httpx2": logging.WARNING,
    "httpcore2": logging.WARNING,
    "mcp.client": logging.CRITICAL,
    "mcp.shared": logging.CRITICAL,
}


@asynccontextmanager
async def open_transport(
    name: str,
    spec: ServerSpec,
    *,
    auth: httpx2.Auth | None = None,
    trace: bool = False,
    max_message: int = MAX_MESSAGE_BYTES,
) -> AsyncGenerator[OpenTransport]:
    """The way to a server for as long as the block runs; afterwards no process, socket or task of it is left.

    Raises ProviderError where it cannot be opened. What the peer does later is never raised into the block: see
    `Link.lost`. `max_message` is the most bytes that one message of the server may have.
    """
    prepare_transport(name, spec)
    async with _opened(name, spec, auth, max_message) as link:
        if trace:
            link.streams = trace_streams(name, link.streams)
        yield link


def _opened(
    name: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message: int
) -> AbstractAsyncContextManager[OpenTransport]:
    # Each is imported when it is used: most programs have servers of one or two kinds.
    if spec.kind == "stdio":
        from toolspace.providers.mcp.transports.stdio import open_stdio

        return open_stdio(name, spec, max_message=max_message)
    url = validate_url(name, spec)
    if spec.kind == "websocket":
        if auth is not None:
            raise ProviderError(f"server {name!r}: logging in works over http and sse; a websocket takes headers only")
        from toolspace.providers.mcp.transports.websocket import open_websocket

        return open_websocket(name, url, spec, max_message=max_message)
    from toolspace.providers.mcp.transports.streamable_http import open_streamable_http

    return open_streamable_http(name, url, spec, auth=auth, max_message=max_message)


def validate_url(name: str, spec: ServerSpec) -> str:
    """The URL, if it is one for this transport. It is never shown: a key may be in it."""
    allowed = _SCHEMES[spec.kind]
    expected = " or ".join(f"{scheme}://" for scheme in allowed)
    if not spec.url:
        raise ProviderError(f"server {name!r} ({spec.kind}) has no url; give it one that begins with {expected}")
    try:
        parts = urlsplit(spec.url)
        fits, _ = parts.scheme.lower() in allowed and bool(parts.hostname), parts.port
    except ValueError:
        fits = False
    if not fits or any(ord(one) <= 32 or ord(one) == 127 for one in spec.url):
        raise ProviderError(f"the url of server {name!r} is not one for {spec.kind}: it must be {expected}host/…")
    return spec.url


def prepare_transport(name: str, spec: ServerSpec) -> None:
    """Before anything is said to a server, over whatever transport: keeps what is secret out of logs and errors."""
    _remember(spec)
    _hush()
    for key, value in spec.headers.items():
        # The libraries would refuse them too, and show the value.
        if not _TOKEN.fullmatch(key) or not _VALUE.fullmatch(value):
            raise ProviderError(f"the header {key!r} of server {name!r} has characters that HTTP does not allow")


def _remember(spec: ServerSpec) -> None:
    """What servers are given under the name of a secret must not come back in what they write, or in a trace."""
    given = {**spec.env, **spec.headers}
    values = [value for key, value in given.items() if is_secret_name(key)]
    register_secrets([*values, *(value.rpartition(" ")[2] for value in values)])


def _hush() -> None:
    """They write URLs, session ids and messages, keys and all, and a traceback for each that is malformed.

    What matters of it reaches the caller as an error, and `trace` shows the rest.
    """
    for name, level in _LOUD.items():
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:  # Who set a level, asked for it.
            logger.setLevel(level)
