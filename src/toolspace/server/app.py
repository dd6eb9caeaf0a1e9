"""The gateway as an ASGI application: finds the route, asks who calls, runs the handler, writes its answer.

What it answers is in the table of routes; who may in is for the gateway to say.
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
"""Hears of every answer: the route if there was one, the status, and the seconds until it was written."""


class App:
    """Serves a table of routes. `mounts` are applications of their own, at one path each."""

    def __init__(
        self,
        gateway: Gateway,
        routes: Iterable[Route],
        *,
        mounts: Mapping[str, Application] | None = None,
        max_body: int = MAX_BODY_BYTES,
        observe: Observer | None = None,
    ) -> None:
        document = Route(
            method="GET",
            path="/openapi.json",
            handler=self._describe,
            access=Access.OPEN,
            tag="operations",
            summary="This document",
            response=dict[str, Any],
        )
        self.router = Router((*routes, document))
        self._gateway = gateway
        self._mounts = dict(mounts or {})
        self._max_body = max_body
        self._observe = observe
        self._document: bytes | None = None

    @property
    def routes(self) -> tuple[Route, ...]:
        return self.router.routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await _refuse_other(scope, receive, send)
            return
        mount = self._mounts.get(scope["path"])
        if mount is not None:
            await mount(scope, receive, send)
            return
        match = self.router.find(scope["path"], scope.get("raw_path"))
        method: str = scope["method"]
        head = method == "HEAD"
        route = match.routes.get("GET" if head else method) if match is not None else None
        if self._observe is None:
            await self._answer(match, route, head, scope, receive, send)
            return
        began = time.perf_counter()
        status = await self._answer(match, route, head, scope, receive, send)
        self._observe(route, status, time.perf_counter() - began)

    async def _answer(
        self, match: RouteMatch | None, route: Route | None, head: bool, scope: Scope, receive: Receive, send: Send
    ) -> int:
        """Answers, whatever happens; gives the status."""
        leave: Callable[[], object] | None = None
        try:
            if match is None:
                raise _unknown(scope["path"])
            if route is None or (head and route.is_stream):
                if scope["method"] == "OPTIONS":
                    await responses.send_response(send, 204, [(b"allow", _allowed(match))], b"", head=True)
                    return 204
                raise _wrong_method(scope["method"], match)
            names = route.parameters
            params = dict(zip(names, match.values, strict=True)) if names else {}
            request = Request(self._gateway, route, scope, receive, params=params, max_body=self._max_body)
            if route.access is not Access.OPEN:
                caller = self._gateway.authenticate(request)
                if not isinstance(caller, Caller):  # The way of those who were not seen lately.
                    caller = await caller
                request.caller = caller
                if not is_admitted(route.access, caller):
                    raise _not_for(route, caller)
            leave = self._gateway.admit(request)
            for name, value in params.items():
                if not is_id(value):
                    _check_parameter(name, value)
            result = await route.handler(request)
            if isinstance(result, Response):
                headers, body = result.encode()
                await responses.send_response(send, result.status, headers, body, head=head)
                if result.on_sent is not None:
                    result.on_sent()
                return result.status
            if type(result) is bytes:
                await responses.send_encoded_json(send, result, status=route.status, head=head)
                return route.status
            if callable(result):
                return await _run(cast("StreamingResponse", result), scope, receive, send, head=head)
            await responses.send_json(send, result, status=route.status, head=head)
            return route.status
        except Exception as error:  # Whatever a handler raises is an answer.
            problem = to_problem(error)
            await responses.send_problem(send, problem, head=head)
            return problem.status
        finally:
            if leave is not None:
                leave()

    async def _describe(self, _: Request) -> Response:
        if self._document is None:
            from toolspace.server.openapi import encode_document

            self._document = encode_document(self.routes)
        return Response(self._document, media_type="application/json")


async def _run(stream: StreamingResponse, scope: Scope, receive: Receive, send: Send, *, head: bool) -> int:
    """Lets an answer write itself. Once it has begun, a fault can only end it."""
    status = 0

    async def noted(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        elif head:
            message = {**message, "body": b""}
        await send(message)

    try:
        await stream(scope, receive, noted)
    except Exception as error:
        if not status:
            raise
        to_problem(error)  # Logged.
    return status


def _check_parameter(name: str, value: str) -> None:
    """Of one that is no id. What has a name of its own, as tools do, may be much else."""
    if name.endswith("Id"):
        raise Problem(404, f"{name} {value[:80]!r} is no id: 1 to 128 letters, digits and _.:@~- make one")
    if "\0" in value:
        raise Problem(404, f"nothing has the {name} {value[:80]!r}")


def _unknown(path: str) -> Problem:
    if len(path) > 1 and path.endswith("/"):
        return Problem(404, f"nothing is at {path[:200]}; paths here have no slash at the end")
    return Problem(404, f"nothing is at {path[:200]}; /openapi.json lists what there is")


def _allowed(match: RouteMatch) -> bytes:
    methods = set(match.routes)
    if "GET" in methods and not match.routes["GET"].is_stream:
        methods.add("HEAD")
    return ", ".join(sorted({*methods, "OPTIONS"})).encode()


def _wrong_method(method: str, match: RouteMatch) -> Problem:
    allowed = _allowed(match)
    return Problem(405, f"{method[:20]} is not taken here, but {allowed.decode()}", headers=((b"allow", allowed),))


def _not_for(route: Route, caller: Caller) -> Problem:
    if isinstance(caller, AnonymousCaller):
        return Problem(401, "credentials are needed", headers=((b"www-authenticate", b"Bearer"),))
    wanted = {
        Access.SECRET: "a secret key",
        Access.MEMBER: "a secret key, or a public key with a token",
        Access.TOOLS: "a secret key or a tool key",
    }.get(route.access, "other credentials")
    return Problem(403, f"{route.name} needs {wanted}")


async def _refuse_other(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
        return
    if scope["type"] != "lifespan":
        raise RuntimeError(f"the gateway answers HTTP, not {scope['type']}")
    while True:  # Whoever opened the gateway has started it already, and closes it.
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return
