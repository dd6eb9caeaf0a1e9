"""The ASGI application of the HTTP API: finds the route, authenticates, runs the handler, sends the response.

`toolspace.server.routes` lists the routes; the gateway authenticates and limits. The path of one request is described
in docs/internals/server.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from toolspace.core.ids import is_id
from toolspace.server import responses
from toolspace.server.asgi import MAX_BODY_BYTES, Application, Message, Receive, Scope, Send
from toolspace.server.authorization import Access, AnonymousCaller, Caller, is_admitted
from toolspace.server.problems import Problem, to_problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response, StreamingResponse
from toolspace.server.routing import Route, RouteMatch, Router

if TYPE_CHECKING:
    from toolspace.server.gateway import Gateway

Observer = Callable[[Route | None, int, float], None]
"""Called after every response with the route, if one matched, the status, and the duration in seconds."""
_REQUIRED_CREDENTIALS = {
    Access.SECRET: "a secret key",
    Access.MEMBER: "a secret key, or a public key with a token",
    Access.TOOLS: "a secret key or a tool key",
}


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
        match = self.router.find(scope["path"], scope.get("raw_path"))
        method: str = scope["method"]
        head_only = method == "HEAD"
        route = match.routes.get("GET" if head_only else method) if match is not None else None
        if self._observe is None:
            await self._respond(match, route, head_only, scope, receive, send)
            return
        started_at = time.perf_counter()
        status = await self._respond(match, route, head_only, scope, receive, send)
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
            if isinstance(result, Response):
                headers, body = result.encode()
                await responses.send_response(send, result.status, headers, body, head_only=head_only)
                if result.on_sent is not None:
                    result.on_sent()
                return result.status
            if type(result) is bytes:
                await responses.send_encoded_json(send, result, status=route.status, head_only=head_only)
                return route.status
            if callable(result):
                return await _stream(cast("StreamingResponse", result), scope, receive, send, head_only=head_only)
            await responses.send_json(send, result, status=route.status, head_only=head_only)
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
            from toolspace.server.openapi import encode_document  # Here: few clients ask for it.

            self._openapi = encode_document(self.routes)
        return Response(self._openapi, media_type="application/json")


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
