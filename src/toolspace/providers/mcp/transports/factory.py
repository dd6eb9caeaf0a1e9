"""Opens the transport that a `ServerSpec` names, after checking its URL and headers. Does not reconnect.

`async with open_transport("github", spec) as transport: async with Client(transport, cache=None) as client: …`
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

_SCHEMES = {"http": ("http", "https"), "sse": ("http", "https"), "websocket": ("ws", "wss")}
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_HEADER_VALUE = re.compile(r"[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?|")
_LIBRARY_LOG_LEVELS = {
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
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> AsyncGenerator[OpenTransport]:
    """Opens the transport for the duration of the block; afterwards no process, socket or task of it is left.

    Raises ProviderError if it cannot be opened. A later failure is never raised into the block; it sets
    `OpenTransport.lost_event`.
    """
    prepare_transport(name, spec)
    async with _open(name, spec, auth, max_message_bytes) as transport:
        if trace:
            transport.streams = trace_streams(name, transport.streams)
        yield transport


def _open(
    name: str, spec: ServerSpec, auth: httpx2.Auth | None, max_message_bytes: int
) -> AbstractAsyncContextManager[OpenTransport]:
    # Each transport is imported when it is used, because most programs use one or two of them.
    if spec.kind == "stdio":
        from toolspace.providers.mcp.transports.stdio import open_stdio

        return open_stdio(name, spec, max_message_bytes=max_message_bytes)
    url = validate_url(name, spec)
    if spec.kind == "websocket":
        if auth is not None:
            raise ProviderError(f"server {name!r}: login works over http and sse; a websocket supports headers only")
        from toolspace.providers.mcp.transports.websocket import open_websocket

        return open_websocket(name, url, spec, max_message_bytes=max_message_bytes)
    from toolspace.providers.mcp.transports.streamable_http import open_streamable_http

    return open_streamable_http(name, url, spec, auth=auth, max_message_bytes=max_message_bytes)


def validate_url(name: str, spec: ServerSpec) -> str:
    """Returns the URL if it fits the transport, else raises ProviderError. No message shows it: it may hold a key."""
    schemes = _SCHEMES[spec.kind]
    expected = " or ".join(f"{scheme}://" for scheme in schemes)
    if not spec.url:
        raise ProviderError(f"server {name!r} ({spec.kind}) has no url; give it one that begins with {expected}")
    try:
        parts = urlsplit(spec.url)
        is_valid, _ = parts.scheme.lower() in schemes and bool(parts.hostname), parts.port
    except ValueError:
        is_valid = False
    if not is_valid or any(ord(character) <= 32 or ord(character) == 127 for character in spec.url):
        raise ProviderError(f"the url of server {name!r} is not valid for {spec.kind}: it must be {expected}host/…")
    return spec.url


def prepare_transport(name: str, spec: ServerSpec) -> None:
    """Registers the server's secrets for masking and checks its headers. Call it before anything is sent."""
    _register_secrets(spec)
    _quiet_libraries()
    for key, value in spec.headers.items():
        # The HTTP libraries would refuse them too, but show the value.
        if not _HEADER_NAME.fullmatch(key) or not _HEADER_VALUE.fullmatch(value):
            raise ProviderError(f"the header {key!r} of server {name!r} has characters that HTTP does not allow")


def _register_secrets(spec: ServerSpec) -> None:
    """A secret that a server receives must not appear in its output or in a trace."""
    settings = {**spec.env, **spec.headers}
    values = [value for key, value in settings.items() if is_secret_name(key)]
    register_secrets([*values, *(value.rpartition(" ")[2] for value in values)])


def _quiet_libraries() -> None:
    """The libraries log URLs, session ids and whole messages with their secrets, and tracebacks of malformed ones.

    Their errors reach the caller as exceptions, and `trace` logs messages with secrets masked.
    """
    for name, level in _LIBRARY_LOG_LEVELS.items():
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:  # A level that the program has set stays.
            logger.setLevel(level)
