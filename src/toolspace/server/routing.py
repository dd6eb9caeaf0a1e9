"""The table of routes and the tree that finds one by its path. Knows neither who asks nor what is answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from toolspace.server.authorization import Access

if TYPE_CHECKING:
    from toolspace.server.requests import Request

Handler = Callable[["Request"], Awaitable[Any]]
"""Gives an `Answer`, a stream, bytes that are JSON already, or anything else to be encoded as JSON."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the API: what it is called, who may, what comes in and goes out. The document is made from it."""

    method: str
    path: str
    """With parameters in braces: `/api/spaces/{spaceId}`. One whose name ends in `Id` must look like an id."""
    handler: Handler
    access: Access
    summary: str
    tag: str
    description: str = ""
    body: Any = None
    """The struct of the JSON body."""
    query: Any = None
    """The struct of the query parameters."""
    response: Any = None
    """The type of the answer; None where there is no body, or it is described by `media_type`."""
    status: int = 200
    other_responses: Mapping[int, Any] = {}
    """Other good answers: the type of each by its status."""
    error_statuses: Sequence[int] = ()
    """Failures besides those that every route of its kind has."""
    media_type: str = "application/json"
    is_stream: bool = False
    """Whether the answer goes on until someone ends it."""
    accepts_idempotency_key: bool = False
    """Whether it takes an `Idempotency-Key`."""
    headers: Mapping[str, str] = {}
    """Request headers that it looks at besides, and what each is for."""

    parameters: tuple[str, ...] = ()
    """The names of the parameters in the path; made from it."""

    def __post_init__(self) -> None:
        names = tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))
        msgspec.structs.force_setattr(self, "parameters", names)

    @property
    def name(self) -> str:
        """What messages and the document call it: `GET /api/spaces/{spaceId}`."""
        return f"{self.method} {self.path}"


_MOST_REMEMBERED, _LONGEST_REMEMBERED = 1024, 200
"""Paths that are remembered, and their characters: anyone may make them up."""


class RouteMatch(msgspec.Struct, frozen=True):
    """Where a path leads: what answers there by method, and the values of the parameters in their order."""

    routes: Mapping[str, Route]
    values: tuple[str, ...]


class _Node:
    __slots__ = ("children", "parameter", "routes")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.parameter: _Node | None = None
        self.routes: dict[str, Route] = {}


class Router:
    """Finds routes by their paths: one step in a tree for each segment. Remembers where the latest paths led: most who
    ask ask again."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._root = _Node()
        self._remembered: dict[str, RouteMatch] = {}
        for route in self.routes:
            self._add(route)

    def find(self, path: str, raw_path: bytes | None = None) -> RouteMatch | None:
        """What is at a path. The raw one tells a slash that is a part of a name from one that parts names."""
        if raw_path is not None and b"%" in raw_path:
            try:
                return self._follow([unquote_to_bytes(part).decode() for part in raw_path.split(b"/")[1:]])
            except UnicodeDecodeError:
                return None
        known = self._remembered.get(path)
        if known is None and (known := self._follow(path.split("/")[1:])) is not None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            if len(path) <= _LONGEST_REMEMBERED:
                self._remembered[path] = known
        return known

    def _follow(self, segments: Sequence[str]) -> RouteMatch | None:
        values: list[str] = []
        node: _Node | None = self._root
        for segment in segments:  # The way of most: each name leads on.
            below = node.children.get(segment)
            if below is None:
                if (below := node.parameter) is None or not segment:
                    break
                values.append(segment)
            node = below
        else:
            if node.routes:
                return RouteMatch(node.routes, tuple(values))
        values.clear()
        node = _walk(self._root, segments, 0, values)
        return RouteMatch(node.routes, tuple(values)) if node is not None else None

    def _add(self, route: Route) -> None:
        node = self._root
        for part in route.path.split("/")[1:]:
            if part.startswith("{"):
                if node.parameter is None:
                    node.parameter = _Node()
                node = node.parameter
            else:
                node = node.children.setdefault(part, _Node())
        if route.method in node.routes:
            raise ValueError(f"two routes for {route.name}; remove one")
        node.routes[route.method] = route


def _walk(node: _Node, segments: Sequence[str], at: int, values: list[str]) -> _Node | None:
    if at == len(segments):
        return node if node.routes else None
    segment = segments[at]
    child = node.children.get(segment)
    if child is not None and (found := _walk(child, segments, at + 1, values)) is not None:
        return found
    # A fixed name goes before a parameter, but does not hide what is below it: a tool may be called "stats".
    if node.parameter is None or not segment:
        return None
    values.append(segment)
    found = _walk(node.parameter, segments, at + 1, values)
    if found is None:
        values.pop()
    return found
