"""Routes of event streams: of a space, of a run, and of everything. `sse` sends the events."""

from __future__ import annotations

from toolspace.core.records import run_stream, space_stream
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.authorization import Access, EntityCaller, get_visible_run, get_visible_space
from toolspace.server.problems import Problem
from toolspace.server.redaction import viewer_of
from toolspace.server.requests import Request
from toolspace.server.responses import StreamingResponse
from toolspace.server.routing import Route
from toolspace.server.sse import PermissionCheck, SseResponse, StreamQuery, parse_stream_options
from toolspace.spaces.subscriber_presence import StreamSubscribers

_LAST_EVENT_ID = {"Last-Event-ID": "The last event id that was received; the stream continues after it."}
_DESCRIPTION = (
    "Server-sent events. Resume after an event id with `Last-Event-ID`, or with `lastEventId` in the query. "
    "`format` is `native`, `ui-message-stream` or `ag-ui`."
)


async def stream_space(request: Request) -> StreamingResponse:
    space = await get_visible_space(request.gateway.ledger, request.caller, request.params["spaceId"])
    caller, memberships = request.caller, request.gateway.memberships

    async def allowed() -> bool:
        return not isinstance(caller, EntityCaller) or await memberships.is_member(space.id, caller.entity_id)

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

    # Strict, because a run can move to another space at any time, and its events with it.
    return await _open(request, run_stream(run.id), allowed, strict=isinstance(request.caller, EntityCaller))


async def stream_all_events(request: Request) -> StreamingResponse:
    gateway, headers = request.gateway, request.scope["headers"]
    return await gateway.streams.open_firehose(
        gateway.ledger.hub, allowed=lambda: gateway.authenticator.is_valid(headers)
    )


async def _open(request: Request, stream: str, allowed: PermissionCheck, *, strict: bool = False) -> StreamingResponse:
    gateway, caller, headers = request.gateway, request.caller, request.scope["headers"]
    options = parse_stream_options(request.query(StreamQuery), request.header("last-event-id"))

    async def is_still_allowed() -> bool:
        return await gateway.authenticator.is_valid(headers) and await allowed()

    response = await gateway.streams.open_stream(
        gateway.ledger.hub,
        stream,
        options,
        viewer=viewer_of(caller),
        allowed=is_still_allowed,
        strict=strict,
        expires_at=caller.expires_at if isinstance(caller, EntityCaller) else None,
    )
    return _SubscribedResponse(response, gateway.subscribers, stream)


class _SubscribedResponse:
    """Registers a subscriber while the response is sent: a call for the client needs someone who can answer it."""

    def __init__(self, response: SseResponse, subscribers: StreamSubscribers, stream: str) -> None:
        self._response = response
        self._subscribers = subscribers
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._subscribers.subscribed(self._stream):
                await self._response(scope, receive, send)
        finally:
            self._response.close()


ROUTES = [
    Route(
        method="GET",
        path="/api/spaces/{spaceId}/stream",
        handler=stream_space,
        access=Access.MEMBER,
        tag="spaces",
        summary="Stream the events of a space",
        description=_DESCRIPTION,
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
        summary="Stream the events of a run",
        description=_DESCRIPTION,
        query=StreamQuery,
        media_type="text/event-stream",
        is_stream=True,
        headers=_LAST_EVENT_ID,
    ),
    Route(
        method="GET",
        path="/api/events",
        handler=stream_all_events,
        access=Access.SECRET,
        tag="operations",
        summary="Stream the events of all spaces and runs",
        description="Server-sent events of all streams, from the present on, for operators. It cannot be resumed.",
        media_type="text/event-stream",
        is_stream=True,
    ),
]
