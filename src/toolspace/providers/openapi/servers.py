"""Where an operation is sent: the document's servers, or what the configuration says instead."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from yarl import URL

from toolspace.errors import ProviderError
from toolspace.providers.openapi.document import Broken, Document, Json, mapping, members

_VARIABLE = re.compile(r"\{([^{}]+)\}")


class Server(NamedTuple):
    """The start of every URL, without a slash at its end; or why there is none."""

    url: URL | None
    reason: str = ""


class Servers:
    """Finds the server of each operation: its own, else its path's, else the document's."""

    def __init__(self, document: Document, base_url: str | None) -> None:
        self._document = document
        self._base = Server(_base(base_url)) if base_url is not None else None
        self._known: dict[int, Server] = {}

    def of(self, operation: Json, item: Json) -> Server:
        """Raises `Broken` where the document describes a server that cannot be."""
        if self._base is not None:
            return self._base
        listed: Any = operation.get("servers") or item.get("servers") or self._document.data.get("servers")
        key = id(listed)
        if key not in self._known:
            self._known[key] = self._first(listed)
        return self._known[key]

    def _first(self, listed: Any) -> Server:
        # A document that says nothing means the place where it is.
        said = mapping(members(listed)[0]) if members(listed) else {"url": "/"}
        if said is None or not isinstance(said.get("url"), str):
            raise Broken("its first server has no url")
        text = _fill(said["url"], said.get("variables"))
        try:
            url = URL(text)
            if not url.absolute:
                if self._document.url is None:
                    return Server(None, f'the document says "{text}", which has no host')
                url = self._document.url.join(url)
        except ValueError:
            raise Broken(f"its server {text!r} is no URL") from None
        if url.scheme not in ("http", "https") or not url.host:
            raise Broken(f"its server {text!r} is no http or https URL")
        return Server(_bare(url.with_user(None)))


def _fill(text: str, variables: Any) -> str:
    known = mapping(variables) or {}

    def value(match: re.Match[str]) -> str:
        default = (mapping(known.get(match[1])) or {}).get("default")
        if default is None:
            raise Broken(f"its server {text!r} has the variable {match[1]!r}, which has no default; set baseUrl")
        return str(default)

    return _VARIABLE.sub(value, text)


def _base(text: str) -> URL:
    try:
        url = URL(text)
    except ValueError:
        url = URL()
    if url.scheme not in ("http", "https") or not url.host:
        raise ProviderError("baseUrl: expected an absolute URL such as https://api.example.com/v1")
    return _bare(url)


def _bare(url: URL) -> URL:
    url = url.with_query(None).with_fragment(None)
    return url.with_path(url.raw_path.rstrip("/"), encoded=True)
