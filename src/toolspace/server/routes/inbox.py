"""Routes for agents' inboxes: look, push, take under a lease, be done, give back, try again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from toolspace.core.ids import new_id, now_ms
from toolspace.core.records import InboxEvent, InboxStatus, InboxType
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_DATA,
    Id,
    JsonRequestBody,
    Limit,
    QueryParameters,
    ResponseBody,
    ResultPage,
    check_json_size,
)
from toolspace.server.authorization import Access, get_visible_agent
from toolspace.server.idempotency import run_once
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import Route
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import inbox

T = TypeVar("T")

MAX_WAIT = 60
"""Seconds that one request may wait for something new."""
_MAX_TAKEN = 100
_MAX_LEASE = 3600

Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT, description="Seconds to wait while there is nothing.")]
EventIds = Annotated[list[Id], Meta(min_length=1, max_length=_MAX_TAKEN)]


class InboxListQuery(QueryParameters, frozen=True, kw_only=True):
    status: InboxStatus | None = None
    limit: Limit = 100
    wait: Wait = 0


class NewInboxEvent(JsonRequestBody, frozen=True, kw_only=True):
    """News from a service for an agent."""

    data: Annotated[Any, Meta(description=f"Up to {MAX_DATA} bytes of JSON.", examples=[{"order": 4711}])]
    event_id: Annotated[Id, Meta(description="One that the agent was told of before changes nothing.")] | None = None

    def __post_init__(self) -> None:
        check_json_size("data", self.data, MAX_DATA)


class PushResponse(ResponseBody, frozen=True, kw_only=True):
    event_id: str
    fresh: bool
    """Whether the agent had not been told of it already."""


class ClaimBody(JsonRequestBody, frozen=True, kw_only=True):
    """How much to take, and for how long."""

    count: Annotated[int, Meta(ge=1, le=_MAX_TAKEN)] = 1
    lease_seconds: Annotated[float, Meta(ge=1, le=_MAX_LEASE, description="After which it is given to others.")] = 60
    types: Annotated[list[InboxType], Meta(max_length=10, description="Only of these.")] | None = None
    wait: Wait = 0


class ClaimResponse(ResponseBody, frozen=True, kw_only=True):
    """What was taken: say how it ended, under the same claim, before the lease ends."""

    claim: str
    lease_until: int
    items: Sequence[InboxEvent]


class AcknowledgeBody(JsonRequestBody, frozen=True, kw_only=True):
    """Events that were looked after."""

    event_ids: EventIds
    claim: Annotated[Id, Meta(description="Under which they were taken; any, where it is left out.")] | None = None


class ReleaseBody(AcknowledgeBody, frozen=True, kw_only=True):
    """Events that could not be looked after, and why."""

    error: Annotated[str, Meta(max_length=10_000, pattern="^[^\\u0000]*$")] | None = None


class AcknowledgeResponse(ResponseBody, frozen=True, kw_only=True):
    done: Sequence[str]
    not_held: Sequence[str]
    """Not in the claim's hands any more, or never: the lease ended, or someone else was faster."""


class ReleaseResponse(ResponseBody, frozen=True, kw_only=True):
    items: Sequence[InboxEvent]
    """As they are now: pending, or failed after the last attempt."""
    not_held: Sequence[str]


async def list_inbox(request: Request) -> ResultPage[InboxEvent]:
    query = request.query(InboxListQuery)
    agent_id = await _agent(request)
    ledger = request.gateway.ledger

    async def look() -> list[InboxEvent]:
        return await ledger.read(inbox.list_events, agent_id, status=query.status, limit=query.limit)

    return ResultPage(items=await _patiently(request, agent_id, query.wait, look), next=None)


async def push_event(request: Request) -> Response:
    body = await request.json(NewInboxEvent)
    agent_id = await _agent(request)
    event_id = body.event_id or new_id("evt")

    def pushing(effects: Effects) -> Program[PushResponse]:
        fresh = yield from inbox.add(agent_id, event_id, "service", body.data, priority=inbox.PLAN_OR_SERVICE)
        if fresh:
            effects.notify_inbox(agent_id)
        return PushResponse(event_id=event_id, fresh=fresh)

    return await run_once(request, pushing)


async def claim_events(request: Request) -> ClaimResponse:
    body = await request.json(ClaimBody)
    agent_id = await _agent(request)
    lease_ms, name = round(body.lease_seconds * 1000), new_id("clm")
    until = 0

    async def take() -> list[InboxEvent]:
        nonlocal until
        until = now_ms() + lease_ms
        return await request.gateway.ledger.write(
            inbox.claim, agent_id, name, count=body.count, lease_ms=lease_ms, types=body.types or ()
        )

    taken = await _patiently(request, agent_id, body.wait, take)
    return ClaimResponse(claim=name, lease_until=until, items=taken)


async def acknowledge_events(request: Request) -> AcknowledgeResponse:
    body = await request.json(AcknowledgeBody)
    agent_id = await _agent(request)
    ended = await request.gateway.ledger.write(inbox.acknowledge, agent_id, body.claim, body.event_ids)
    return AcknowledgeResponse(done=ended, not_held=_rest(body.event_ids, ended))


async def release_events(request: Request) -> ReleaseResponse:
    body = await request.json(ReleaseBody)
    agent_id = await _agent(request)
    back = await request.gateway.ledger.commit(_give_back, agent_id, body)
    return ReleaseResponse(items=back, not_held=_rest(body.event_ids, [event.event_id for event in back]))


async def retry_event(request: Request) -> InboxEvent:
    agent_id = await _agent(request)
    return await request.gateway.ledger.commit(_retry, agent_id, request.params["eventId"])


async def _agent(request: Request) -> str:
    return (await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])).id


async def _patiently(
    request: Request, agent_id: str, seconds: float, look: Callable[[], Awaitable[list[T]]]
) -> list[T]:
    """What there is; where that is nothing, what comes while someone waits for it."""
    if not seconds:
        return await look()
    ledger, key = request.gateway.ledger, f"inbox:{agent_id}"
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    gone = asyncio.ensure_future(request.wait_for_disconnect())
    try:
        while True:
            news = ledger.waiters.register(key)  # Before looking: nothing may fall in between.
            looked_at = now_ms()
            try:
                found = await look()
                left = end - loop.time()
                if found or left <= 0:
                    return found
                # What was given back is there again at its time, and nobody says so then.
                next_at = await ledger.read(inbox.find_next_available, agent_id, after=looked_at)
                if next_at is not None:
                    left = min(left, max((next_at - now_ms()) / 1000, 0.0))
                await asyncio.wait((news, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() or request.gateway.readiness.stopping:
                    return []  # Nothing more is taken for someone who is not there to get it.
            finally:
                ledger.waiters.unregister(key, news)
    finally:
        gone.cancel()


def _rest(named: Sequence[str], moved: Sequence[str]) -> list[str]:
    held = frozenset(moved)
    return [event_id for event_id in dict.fromkeys(named) if event_id not in held]


def _give_back(effects: Effects, agent_id: str, body: ReleaseBody) -> Program[list[InboxEvent]]:
    back = yield from inbox.release(agent_id, body.claim, body.event_ids, error=body.error)
    effects.notify_inbox(agent_id)
    return back


def _retry(effects: Effects, agent_id: str, event_id: str) -> Program[InboxEvent]:
    moved = yield from inbox.retry(agent_id, event_id)
    event = yield from inbox.find(agent_id, event_id)
    if event is None:
        raise RefusedError("not_found", f'the agent "{agent_id}" has no inbox event "{event_id}"')
    if not moved:
        raise RefusedError("conflict", f'the event "{event_id}" is {event.status}; only failed ones are tried again')
    effects.notify_inbox(agent_id)
    return event


ROUTES = [
    Route(
        method="GET",
        path="/api/agents/{agentId}/inbox",
        handler=list_inbox,
        access=Access.SECRET,
        tag="inbox",
        summary="What is in an agent's inbox, in the order in which it is looked at",
        query=InboxListQuery,
        response=ResultPage[InboxEvent],
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox",
        handler=push_event,
        access=Access.SECRET,
        tag="inbox",
        summary="Tell an agent something, as a service",
        body=NewInboxEvent,
        response=PushResponse,
        status=201,
        accepts_idempotency_key=True,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/claim",
        handler=claim_events,
        access=Access.SECRET,
        tag="inbox",
        summary="Take the next events",
        description="They are the claim's until the lease ends; then they are there for others again.",
        body=ClaimBody,
        response=ClaimResponse,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/done",
        handler=acknowledge_events,
        access=Access.SECRET,
        tag="inbox",
        summary="Events were looked after",
        body=AcknowledgeBody,
        response=AcknowledgeResponse,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/return",
        handler=release_events,
        access=Access.SECRET,
        tag="inbox",
        summary="Give events back",
        description="They are there again after a while that grows with each attempt; after the last one they failed.",
        body=ReleaseBody,
        response=ReleaseResponse,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/{eventId}/retry",
        handler=retry_event,
        access=Access.SECRET,
        tag="inbox",
        summary="Try a failed event again",
        response=InboxEvent,
        error_statuses=(409,),
    ),
]
