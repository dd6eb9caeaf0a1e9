"""Where a redirect leads, and what may go along. Follows nothing itself."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from yarl import URL

from toolspace.core.addresses import is_same_origin
from toolspace.errors import ToolExecutionError, ToolPermissionError
from toolspace.providers.rest.client import HttpHeaders, HttpRequest

REDIRECT_STATUSES = frozenset((301, 302, 303, 307, 308))

_TRAVELLING = frozenset(("accept", "accept-language", "range", "user-agent"))
"""All that another origin gets to see: keys come in more headers than Authorization and Cookie."""


def redirect_request(request: HttpRequest, location: str) -> HttpRequest:
    """The request that a redirect of a safe one asks for. Raises where it leads to no place or to a less safe one."""
    source = request.url
    try:
        target = source.join(URL(location)).with_fragment(None).with_user(None)
        if target.scheme not in ("http", "https") or not target.raw_host or target.port == 0:
            raise ValueError("it is no http URL")
    except ValueError:
        raise ToolExecutionError(f"{display_url(source)} redirects to something that is no http URL") from None
    if source.scheme == "https" and target.scheme == "http":
        raise ToolPermissionError(
            f"{display_url(source)} redirects to {display_url(target)}, from https to http", executed=False
        )
    if is_same_origin(source, target):
        return msgspec.structs.replace(request, url=target)
    return msgspec.structs.replace(request, url=target, headers=_travelling(request.headers), body=None)


def display_url(url: URL) -> str:
    """A URL for messages, without its query and user: keys may be in them."""
    text = str(url.with_query(None).with_fragment(None).with_user(None))
    return text if len(text) <= 200 else f"{text[:200]}…"


def _travelling(headers: HttpHeaders) -> HttpHeaders:
    items = headers.items() if isinstance(headers, Mapping) else headers
    return [(name, value) for name, value in items if name.lower() in _TRAVELLING]
