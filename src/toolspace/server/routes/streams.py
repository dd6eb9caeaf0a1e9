"""Routes that stream: what happens in a space, in a run, and everywhere."""

from __future__ import annotations

from toolspace.core.records import run_stream, space_stream
from toolspace.server.authorization import member_of, sees_run
from toolspace.server.callers import Access, Public
from toolspace.server.mcp.json_rpc import Receive, Scope, Send
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Stream
from toolspace.server.routing import Route
from toolspace.server.sse import Allowed, EventStream
from toolspace.server.stream_options import StreamQuery, reading_of
from toolspace.spaces.subscribers import Audience

_LAST_EVENT_ID = {"Last-Event-ID": "The last event that was read: what came behind it comes first."}
_HOW = (
    "Server-sent events. One with an id can be resumed behind: with `Last-Event-ID`, or `lastEventId` in the query. "
    "`format` is `native`, `ui-message-stream` or `ag-ui`."
)


async def stream_space(request: Request) -> Stream:
    space = await member_of(request.gateway.ledger, request.caller, request.params["spaceId"])
    caller, members = request.caller, request.gateway.members

    async def allowed() -> bool:
        return not isinstance(caller, Public) or await members.has(space.id, caller.entity_id)

    return await _open(request, space_stream(space.id), allowed)


async def stream_run(request: Request) -> Stream:
    run = await sees_run(request.gateway.ledger, request.caller, request.params["runId"])

    async def allowed() -> bool:
        if not isinstance(request.caller, Public):
            return True
        try:
            await sees_run(request.gateway.ledger, request.caller, run.id)
        except Problem:
            return False
        return True

    # A run may go to another space at any time, and its events with it.
    return await _open(request, run_stream(run.id), allowed, strict=isinstance(request.caller, Public))


async def stream_everything(request: Request) -> Stream:
    gateway, headers = request.gateway, request.scope["headers"]
    return await gateway.readers.open_tail(gateway.ledger.hub, allowed=lambda: gateway.authenticator.holds(headers))


async def _open(request: Request, name: str, allowed: Allowed, *, strict: bool = False) -> Stream:
    gateway, caller, headers = request.gateway, request.caller, request.scope["headers"]
    reading = reading_of(request.query(StreamQuery), request.header("last-event-id"))

    async def still() -> bool:
        return await gateway.authenticator.holds(headers) and await allowed()

    public = isinstance(caller, Public)
    stream = await gateway.readers.open(
        gateway.ledger.hub,
        name,
        reading,
        audience="public" if public else "secret",
        allowed=still,
        strict=strict,
        expires_at=caller.expires_at if isinstance(caller, Public) else None,
    )
    return _Attended(stream, gateway.audience, name)


class _Attended:
    """A stream that counts as read while it is: a call which is shown there may be answered by whoever reads it."""

    def __init__(self, stream: EventStream, audience: Audience, name: str) -> None:
        self._stream = stream
        self._audience = audience
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._audience.reading(self._name):
                await self._stream(scope, receive, send)
        finally:
            self._stream.close()


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/stream",
        handler=stream_space,
        access=Access.MEMBER,
        tag="spaces",
        summary="What happens in a space, as it happens",
        description=_HOW,
        query=StreamQuery,
        media_type="text/event-stream",
        stream=True,
        headers=_LAST_EVENT_ID,
    ),
    Route(
        method="GET",
        path="/api/runs/{runId}/events",
        handler=stream_run,
        access=Access.MEMBER,
        tag="runs",
        summary="What happens in a run, as it happens",
        description=_HOW,
        query=StreamQuery,
        media_type="text/event-stream",
        stream=True,
        headers=_LAST_EVENT_ID,
    ),
    Route(
        method="GET",
        path="/api/events",
        handler=stream_everything,
        access=Access.SECRET,
        tag="operations",
        summary="What happens anywhere, as it happens",
        description="Server-sent events of all streams, from now on; for people who watch, not for programs.",
        media_type="text/event-stream",
        stream=True,
    ),
]
