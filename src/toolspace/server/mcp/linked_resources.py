"""Resources of MCP servers behind: which ones a caller may read, because a result named them to it.

`tool_service` uses it. It keeps no contents, and decides nothing about tools.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from toolspace.core.result import ResourcePart, ToolResult

MAX_LINKS, MAX_LINKS_PER_READER = 50_000, 2_000
MAX_URI_CHARACTERS = 2_048


class ResourceLink(NamedTuple):
    """Who named a resource: the server that has it, and the tool whose result it was part of."""

    server: str
    tool: str


class LinkedResources:
    """The resources that results have named, by reader. The oldest are forgotten first."""

    def __init__(self) -> None:
        self._links: OrderedDict[str, OrderedDict[tuple[str, str], ResourceLink]] = OrderedDict()
        """By reader; then by URI and server, the newest last."""
        self._count = 0

    def add(self, result: ToolResult, reader: str) -> None:
        """Adds the resources that a result of an MCP server names or embeds."""
        uris = [
            part.uri for part in result.parts if isinstance(part, ResourcePart) and len(part.uri) <= MAX_URI_CHARACTERS
        ]
        if not uris:
            return
        links = self._links.setdefault(reader, OrderedDict())
        self._links.move_to_end(reader)
        for uri in uris:
            key = uri, result.namespace
            self._count += key not in links
            links[key] = ResourceLink(result.namespace, result.tool)
            links.move_to_end(key)
        while len(links) > MAX_LINKS_PER_READER:
            links.popitem(last=False)
            self._count -= 1
        while self._count > MAX_LINKS:
            _, oldest_links = self._links.popitem(last=False)
            self._count -= len(oldest_links)

    def find(self, uri: str, reader: str) -> list[ResourceLink]:
        """Returns who named a resource to a reader, the newest first. Several servers may use the same URI."""
        links = self._links.get(reader)
        if links is None:
            return []
        return [link for (link_uri, _), link in reversed(links.items()) if link_uri == uri]
