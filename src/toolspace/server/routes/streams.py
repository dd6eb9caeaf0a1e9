"""Routes that stream: what happens in a space, in a run, and everywhere."""

from __future__ import annotations

from toolspace.core.records import run_stream, space_stream
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.authorization import Access, EntityCaller, get_visible_run, get_visible_space
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import StreamingResponse
from toolspace.server.routing import Route
from toolspace.server.sse import PermissionCheck, SseResponse, StreamQuery, parse_stream_options
from toolspace.spaces.subscribers import StreamSubscribers

_LAST_EVENT_ID = {"Last-Event-ID": "The last event that was read: what came behind it comes first."}
_HOW = (
    "Server-sent events. One with an id can be resumed behind: with `Last-Event-ID`, or `lastEventId` in the query. "
    "`format` is `native`, `ui-message-stream` or `ag-ui`."
)


async def stream_space(request: Request) -> StreamingResponse:
    space = await get_visible_space(request.gateway.ledger, request.caller, request.params["spaceId"])
    caller, members = request.caller, request.gateway.memberships

    async def allowed() -> bool:
        return not isinstance(caller, EntityCaller) or await members.is_member(space.id, caller.entity_id)

    return await _open(request, space_stream(space.id), allowed)


async def stream_run(request: Request) -> StreamingResponse:
    run = await get_visible_run(request.gateway.ledger, request.caller, request.params["runId"])

    async def allowed() -> bool:
        if not isinstance(request.caller, EntityCaller):
            return True
        try:
            await get_visible_run(request.gateway.ledger, request.caller, run.id)
        except Problem:
            return False
        return True

    # A run may go to another space at any time, and its events with it.
    return await _open(request, run_stream(run.id), allowed, strict=isinstance(request.caller, EntityCaller))


async def stream_everything(request: Request) -> StreamingResponse:
    gateway, headers = request.gateway, request.scope["headers"]
    return await gateway.streams.open_firehose(
        gateway.ledger.hub, allowed=lambda: gateway.authenticator.is_valid(headers)
    )


async def _open(request: Request, name: str, allowed: PermissionCheck, *, strict: bool = False) -> StreamingResponse:
    gateway, caller, headers = request.gateway, request.caller, request.scope["headers"]
    reading = parse_stream_options(request.query(StreamQuery), request.header("last-event-id"))

    async def still() -> bool:
        return await gateway.authenticator.is_valid(headers) and await allowed()

    public = isinstance(caller, EntityCaller)
    stream = await gateway.streams.open_stream(
        gateway.ledger.hub,
        name,
        reading,
        audience="public" if public else "secret",
        allowed=still,
        strict=strict,
        expires_at=caller.expires_at if isinstance(caller, EntityCaller) else None,
    )
    return _Attended(stream, gateway.subscribers, name)


class _Attended:
    """A stream that counts as read while it is: a call which is shown there may be answered by whoever reads it."""

    def __init__(self, stream: SseResponse, audience: StreamSubscribers, name: str) -> None:
        self._stream = stream
        self._audience = audience
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._audience.subscribed(self._name):
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
        is_stream=True,
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
        is_stream=True,
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
        is_stream=True,
    ),
]
