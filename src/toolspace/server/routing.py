"""Routes, and the tree that finds a route by its path. Knows neither callers nor responses."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote_to_bytes

import msgspec

from toolspace.server.authorization import Access

if TYPE_CHECKING:
    from toolspace.server.requests import Request

Handler = Callable[["Request"], Awaitable[Any]]
"""Returns a `Response`, a `StreamingResponse`, bytes of encoded JSON, or any other value to be encoded as JSON."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One operation of the HTTP API. The OpenAPI document is built from it."""

    method: str
    path: str
    """With parameters in braces: `/api/spaces/{spaceId}`. A parameter whose name ends in `Id` must be a valid id."""
    handler: Handler
    access: Access
    summary: str
    tag: str
    description: str = ""
    parameter_descriptions: Mapping[str, str] = {}
    """Descriptions of path parameters whose name does not end in `Id`."""
    body: Any = None
    """The struct of the JSON body."""
    query: Any = None
    """The struct of the query parameters."""
    response: Any = None
    """The type of the response; None if it has no body, or if `media_type` describes it."""
    status: int = 200
    other_responses: Mapping[int, Any] = {}
    """Types of further successful responses, by status."""
    error_statuses: Sequence[int] = ()
    """Errors besides those that all routes of this kind have."""
    media_type: str = "application/json"
    is_stream: bool = False
    """Whether the response continues until the client or the server ends it."""
    accepts_idempotency_key: bool = False
    headers: Mapping[str, str] = {}
    """Descriptions of other request headers that the handler reads."""

    parameters: tuple[str, ...] = ()
    """The names of the path parameters, derived from `path`."""

    def __post_init__(self) -> None:
        names = tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))
        msgspec.structs.force_setattr(self, "parameters", names)

    @property
    def name(self) -> str:
        """The route in messages and documents: `GET /api/spaces/{spaceId}`."""
        return f"{self.method} {self.path}"


class RouteMatch(msgspec.Struct, frozen=True):
    """The routes of a path by method, and the values of its parameters in order."""

    routes: Mapping[str, Route]
    values: tuple[str, ...]


class _Node:
    __slots__ = ("children", "parameter", "routes")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.parameter: _Node | None = None
        self.routes: dict[str, Route] = {}


class Router:
    """Finds routes by path: a tree with one level per path segment."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._root = _Node()
        for route in self.routes:
            self._add(route)

    def find(self, path: str, raw_path: bytes | None = None) -> RouteMatch | None:
        """Returns the routes of a path, or None. In the raw path an encoded slash is part of a segment."""
        if raw_path is not None and b"%" in raw_path:
            try:
                segments = [unquote_to_bytes(part).decode() for part in raw_path.split(b"/")[1:]]
            except UnicodeDecodeError:
                return None
        else:
            segments = path.split("/")[1:]
        values: list[str] = []
        node = _find_node(self._root, segments, 0, values)
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


def _find_node(node: _Node, segments: Sequence[str], index: int, values: list[str]) -> _Node | None:
    if index == len(segments):
        return node if node.routes else None
    segment = segments[index]
    child = node.children.get(segment)
    if child is not None and (match := _find_node(child, segments, index + 1, values)) is not None:
        return match
    # A fixed segment takes precedence over a parameter, but does not hide it: a tool may be called "stats".
    if node.parameter is None or not segment:
        return None
    values.append(segment)
    match = _find_node(node.parameter, segments, index + 1, values)
    if match is None:
        values.pop()
    return match
