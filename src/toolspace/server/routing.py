"""The HTTP API as an ASGI application: finds the route of a request, authenticates, runs the handler, responds.

`toolspace.server.routes` lists the routes; the gateway authenticates and limits. docs/internals/server.md follows one
request.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_type_hints
from urllib.parse import unquote_to_bytes

import msgspec

from toolspace.core import json_text
from toolspace.core.ids import is_id
from toolspace.server import responses
from toolspace.server.authorization import Access, AnonymousCaller, Caller, is_admitted
from toolspace.server.requests import MAX_BODY_BYTES, Application, Message, Receive, Request, Scope, Send
from toolspace.server.responses import Problem, Response, StreamingResponse, to_problem

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

Handler = Callable[[Request], Awaitable[Any]]
"""Returns a `Response`, a `StreamingResponse`, bytes of encoded JSON, or any other value to be encoded as JSON."""
HandlerT = TypeVar("HandlerT", bound=Handler)
Observer = Callable[["Route | None", int, float], None]
"""Called after every response with the route, if one matched, the status, and the duration in seconds."""
_REQUIRED_CREDENTIALS = {
    Access.SECRET: "a secret key",
    Access.MEMBER: "a secret key, or a public key with a token",
    Access.TOOLS: "a secret key or a tool key",
}


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

    has_cursor: bool = False
    """Whether it returns a page of a list, derived from `query`."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "has_cursor", "cursor" in getattr(self.query, "__struct_fields__", ()))
        names = tuple(part[1:-1] for part in self.path.split("/") if part.startswith("{"))
        msgspec.structs.force_setattr(self, "parameters", names)

    @property
    def name(self) -> str:
        """The route in messages and documents: `GET /api/spaces/{spaceId}`."""
        return f"{self.method} {self.path}"


class RouteTable(list[Route]):
    """The routes of one module. `add` decorates their handlers."""

    def __init__(self, tag: str) -> None:
        super().__init__()
        self._tag = tag

    def add(
        self,
        method: str,
        path: str,
        summary: str,
        *,
        access: Access = Access.SECRET,
        creates: Any = None,
        **fields: Any,
    ) -> Callable[[HandlerT], HandlerT]:
        """Adds a route with further `fields` of `Route`. Its response has the type that the handler returns.

        A handler that returns a `Response` or bytes names the type of its content as `response`. `creates`: the type of
        what a handler creates with `run_once`.
        """
        if creates is not None:
            fields |= {"response": creates, "status": 201, "accepts_idempotency_key": True}

        def decorate(handler: HandlerT) -> HandlerT:
            content = get_type_hints(handler)["return"]
            has_no_type = content is Response or "is_stream" in fields
            defaults: dict[str, Any] = {"tag": self._tag, "response": None if has_no_type else content}
            self.append(
                Route(method=method, path=path, summary=summary, access=access, handler=handler, **(defaults | fields))
            )
            return handler

        return decorate


class App:
    """Serves a table of routes. `mounts` are other ASGI applications, each at one path."""

    def __init__(
        self,
        gateway: Gateway,
        routes: Iterable[Route],
        *,
        mounts: Mapping[str, Application] | None = None,
        max_body: int = MAX_BODY_BYTES,
        observe: Observer | None = None,
    ) -> None:
        document_route = Route(
            method="GET",
            path="/openapi.json",
            handler=self._get_openapi,
            access=Access.OPEN,
            tag="operations",
            summary="Get the OpenAPI document",
            response=dict[str, Any],
        )
        self.router = Router((*routes, document_route))
        self._gateway = gateway
        self._mounts = dict(mounts or {})
        self._max_body = max_body
        self._observe = observe
        self._openapi: bytes | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _serve_other_scope(scope, receive, send)
            return
        mount = self._mounts.get(scope["path"])
        if mount is not None:
            await mount(scope, receive, send)
            return
        started_at = time.perf_counter()
        match = self.router.find(scope["path"], scope.get("raw_path"))
        method: str = scope["method"]
        head_only = method == "HEAD"
        route = match.routes.get("GET" if head_only else method) if match is not None else None
        status = await self._respond(match, route, head_only, scope, receive, send)
        if self._observe is not None:
            self._observe(route, status, time.perf_counter() - started_at)

    async def _respond(
        self,
        match: RouteMatch | None,
        route: Route | None,
        head_only: bool,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> int:
        """Sends the response, also if the handler fails. Returns the status."""
        release: Callable[[], object] | None = None
        try:
            if match is None:
                raise _path_not_found(scope["path"])
            if route is None or (head_only and route.is_stream):
                if scope["method"] == "OPTIONS":
                    headers = [(b"allow", _allowed_methods(match))]
                    await responses.send_response(send, 204, headers, b"", head_only=True)
                    return 204
                raise _method_not_allowed(scope["method"], match)
            names = route.parameters
            params = dict(zip(names, match.values, strict=True)) if names else {}
            request = Request(self._gateway, route, scope, receive, params=params, max_body=self._max_body)
            if route.access is not Access.OPEN:
                caller = self._gateway.authenticate(request)
                if not isinstance(caller, Caller):  # Not in the authenticator's cache.
                    caller = await caller
                request.caller = caller
                if not is_admitted(route.access, caller):
                    raise _not_admitted(route, caller)
            release = self._gateway.admit(request)
            for name, value in params.items():
                if not is_id(value):
                    _check_parameter(name, value)
            result = await route.handler(request)
            if route.has_cursor:
                result = _with_cursor(request, result)
            if isinstance(result, Response):
                headers, body = result.encode()
                await responses.send_response(send, result.status, headers, body, head_only=head_only)
                if result.on_sent is not None:
                    result.on_sent()
                return result.status
            if callable(result):
                return await _stream(cast("StreamingResponse", result), scope, receive, send, head_only=head_only)
            body = result if type(result) is bytes else json_text.encode_bytes(result)
            await responses.send_json(send, body, status=route.status, head_only=head_only)
            return route.status
        except Exception as error:  # Every exception of a handler becomes a response.
            problem = to_problem(error)
            await responses.send_problem(send, problem, head_only=head_only)
            return problem.status
        finally:
            if release is not None:
                release()

    async def _get_openapi(self, _: Request) -> Response:
        if self._openapi is None:
            from toolspace.server.openapi import encode_document  # Imported here: few clients ask for it.

            self._openapi = encode_document(self.routes)
        return Response(self._openapi, media_type="application/json")


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
        candidates: list[tuple[_Node, int, tuple[str, ...]]] = [(self._root, 0, ())]
        while candidates:
            node, index, values = candidates.pop()
            if index == len(segments):
                if node.routes:
                    return RouteMatch(node.routes, values)
                continue
            segment = segments[index]
            # A fixed segment takes precedence over a parameter, but does not hide it: a tool may be called "stats".
            if node.parameter is not None and segment:
                candidates.append((node.parameter, index + 1, (*values, segment)))
            if (child := node.children.get(segment)) is not None:
                candidates.append((child, index + 1, values))
        return None

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


class RouteMatch(msgspec.Struct, frozen=True):
    """The routes of a path by method, and the values of its parameters in order."""

    routes: Mapping[str, Route]
    values: tuple[str, ...]


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict[str, "_Node"])
    parameter: _Node | None = None
    routes: dict[str, Route] = field(default_factory=dict[str, Route])


def _with_cursor(request: Request, page: Any) -> Any:
    """Returns a page whose `next` only this caller can use, and only for this list."""
    if isinstance(page, dict):
        fields = cast("dict[str, Any]", page)
        return fields if fields["next"] is None else {**fields, "next": request.create_cursor(fields["next"])}
    return page if page.next is None else msgspec.structs.replace(page, next=request.create_cursor(page.next))


async def _stream(response: StreamingResponse, scope: Scope, receive: Receive, send: Send, *, head_only: bool) -> int:
    """Sends a streaming response; returns the status. After the response has started, an error can only end it."""
    status = 0

    async def observed_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif head_only:
            message = {**message, "body": b""}
        await send(message)

    try:
        await response(scope, receive, observed_send)
    except Exception as error:
        if not status:
            raise
        to_problem(error)  # Logs it.
    return status


def _check_parameter(name: str, value: str) -> None:
    """Refuses a path parameter that is no id but has to be one. Names, such as those of tools, may be other texts."""
    if name.endswith("Id"):
        raise Problem(404, f"{name} {value[:80]!r} is not a valid id; an id has 1 to 128 letters, digits and _.:@~-")
    if "\0" in value:
        raise Problem(404, f"{name} {value[:80]!r} not found")


def _path_not_found(path: str) -> Problem:
    if len(path) > 1 and path.endswith("/"):
        return Problem(404, f"Path {path[:200]} not found; remove the slash at the end")
    return Problem(404, f"Path {path[:200]} not found; GET /openapi.json lists all paths")


def _allowed_methods(match: RouteMatch) -> bytes:
    methods = set(match.routes)
    if "GET" in methods and not match.routes["GET"].is_stream:
        methods.add("HEAD")
    return ", ".join(sorted({*methods, "OPTIONS"})).encode()


def _method_not_allowed(method: str, match: RouteMatch) -> Problem:
    allowed = _allowed_methods(match)
    return Problem(
        405, f"Method {method[:20]} not allowed; allowed: {allowed.decode()}", headers=((b"allow", allowed),)
    )


def _not_admitted(route: Route, caller: Caller) -> Problem:
    if isinstance(caller, AnonymousCaller):
        return Problem(401, "Credentials are required", headers=((b"www-authenticate", b"Bearer"),))
    return Problem(403, f"{route.name} requires {_REQUIRED_CREDENTIALS.get(route.access, 'other credentials')}")


async def _serve_other_scope(scope: Scope, receive: Receive, send: Send) -> None:
    """Rejects websockets, and acknowledges the lifespan events: the gateway is started and closed by its owner."""
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    if scope["type"] != "lifespan":
        raise RuntimeError(f"the gateway serves HTTP, not {scope['type']}")
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
