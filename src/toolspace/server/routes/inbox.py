"""Routes for agents' inboxes: look, push, take under a lease, be done, give back, try again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from toolspace.core.ids import new_id, now_ms
from toolspace.core.records import InboxEvent, InboxStatus, InboxType
from toolspace.errors import RefusedError
from toolspace.server.authorization import sees_agent
from toolspace.server.body_types import MAX_DATA, Body, Id, Limit, Page, Query, Shape, check_size
from toolspace.server.callers import Access
from toolspace.server.idempotency import once
from toolspace.server.requests import Request
from toolspace.server.responses import Answer
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


class InboxList(Query, frozen=True, kw_only=True):
    status: InboxStatus | None = None
    limit: Limit = 100
    wait: Wait = 0


class NewInboxEvent(Body, frozen=True, kw_only=True):
    """News from a service for an agent."""

    data: Annotated[Any, Meta(description=f"Up to {MAX_DATA} bytes of JSON.", examples=[{"order": 4711}])]
    event_id: Annotated[Id, Meta(description="One that the agent was told of before changes nothing.")] | None = None

    def __post_init__(self) -> None:
        check_size("data", self.data, MAX_DATA)


class Pushed(Shape, frozen=True, kw_only=True):
    event_id: str
    fresh: bool
    """Whether the agent had not been told of it already."""


class Claim(Body, frozen=True, kw_only=True):
    """How much to take, and for how long."""

    count: Annotated[int, Meta(ge=1, le=_MAX_TAKEN)] = 1
    lease_seconds: Annotated[float, Meta(ge=1, le=_MAX_LEASE, description="After which it is given to others.")] = 60
    types: Annotated[list[InboxType], Meta(max_length=10, description="Only of these.")] | None = None
    wait: Wait = 0


class Claimed(Shape, frozen=True, kw_only=True):
    """What was taken: say how it ended, under the same claim, before the lease ends."""

    claim: str
    lease_until: int
    items: Sequence[InboxEvent]


class Done(Body, frozen=True, kw_only=True):
    """Events that were looked after."""

    event_ids: EventIds
    claim: Annotated[Id, Meta(description="Under which they were taken; any, where it is left out.")] | None = None


class Returned(Done, frozen=True, kw_only=True):
    """Events that could not be looked after, and why."""

    error: Annotated[str, Meta(max_length=10_000, pattern="^[^\\u0000]*$")] | None = None


class DoneAnswer(Shape, frozen=True, kw_only=True):
    done: Sequence[str]
    not_held: Sequence[str]
    """Not in the claim's hands any more, or never: the lease ended, or someone else was faster."""


class ReturnedAnswer(Shape, frozen=True, kw_only=True):
    items: Sequence[InboxEvent]
    """As they are now: pending, or failed after the last attempt."""
    not_held: Sequence[str]


async def list_inbox(request: Request) -> Page[InboxEvent]:
    query = request.query(InboxList)
    agent_id = await _agent(request)
    ledger = request.gateway.ledger

    async def look() -> list[InboxEvent]:
        return await ledger.read(inbox.listing, agent_id, status=query.status, limit=query.limit)

    return Page(items=await _patiently(request, agent_id, query.wait, look), next=None)


async def push(request: Request) -> Answer:
    body = await request.json(NewInboxEvent)
    agent_id = await _agent(request)
    event_id = body.event_id or new_id("evt")

    def pushing(effects: Effects) -> Program[Pushed]:
        fresh = yield from inbox.push(agent_id, event_id, "service", body.data, priority=inbox.PLAN_OR_SERVICE)
        if fresh:
            effects.tell_agent(agent_id)
        return Pushed(event_id=event_id, fresh=fresh)

    return await once(request, pushing)


async def claim(request: Request) -> Claimed:
    body = await request.json(Claim)
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
    return Claimed(claim=name, lease_until=until, items=taken)


async def done(request: Request) -> DoneAnswer:
    body = await request.json(Done)
    agent_id = await _agent(request)
    ended = await request.gateway.ledger.write(inbox.finish, agent_id, body.claim, body.event_ids)
    return DoneAnswer(done=ended, not_held=_rest(body.event_ids, ended))


async def give_back(request: Request) -> ReturnedAnswer:
    body = await request.json(Returned)
    agent_id = await _agent(request)
    back = await request.gateway.ledger.commit(_give_back, agent_id, body)
    return ReturnedAnswer(items=back, not_held=_rest(body.event_ids, [event.event_id for event in back]))


async def retry(request: Request) -> InboxEvent:
    agent_id = await _agent(request)
    return await request.gateway.ledger.commit(_retry, agent_id, request.params["eventId"])


async def _agent(request: Request) -> str:
    return (await sees_agent(request.gateway.ledger, request.caller, request.params["agentId"])).id


async def _patiently(
    request: Request, agent_id: str, seconds: float, look: Callable[[], Awaitable[list[T]]]
) -> list[T]:
    """What there is; where that is nothing, what comes while someone waits for it."""
    if not seconds:
        return await look()
    ledger, key = request.gateway.ledger, f"inbox:{agent_id}"
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    gone = asyncio.ensure_future(request.disconnected())
    try:
        while True:
            news = ledger.waiters.expect(key)  # Before looking: nothing may fall in between.
            looked_at = now_ms()
            try:
                found = await look()
                left = end - loop.time()
                if found or left <= 0:
                    return found
                # What was given back is there again at its time, and nobody says so then.
                next_at = await ledger.read(inbox.next_at, agent_id, after=looked_at)
                if next_at is not None:
                    left = min(left, max((next_at - now_ms()) / 1000, 0.0))
                await asyncio.wait((news, gone), timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if gone.done() or request.gateway.readiness.stopping:
                    return []  # Nothing more is taken for someone who is not there to get it.
            finally:
                ledger.waiters.forget(key, news)
    finally:
        gone.cancel()


def _rest(named: Sequence[str], moved: Sequence[str]) -> list[str]:
    held = frozenset(moved)
    return [event_id for event_id in dict.fromkeys(named) if event_id not in held]


def _give_back(effects: Effects, agent_id: str, body: Returned) -> Program[list[InboxEvent]]:
    back = yield from inbox.give_back(agent_id, body.claim, body.event_ids, error=body.error)
    effects.tell_agent(agent_id)
    return back


def _retry(effects: Effects, agent_id: str, event_id: str) -> Program[InboxEvent]:
    moved = yield from inbox.retry(agent_id, event_id)
    event = yield from inbox.one(agent_id, event_id)
    if event is None:
        raise RefusedError("not_found", f'the agent "{agent_id}" has no inbox event "{event_id}"')
    if not moved:
        raise RefusedError("conflict", f'the event "{event_id}" is {event.status}; only failed ones are tried again')
    effects.tell_agent(agent_id)
    return event


ROUTES = [
    Route(
        method="GET",
        path="/api/agents/{agentId}/inbox",
        handler=list_inbox,
        access=Access.SECRET,
        tag="inbox",
        summary="What is in an agent's inbox, in the order in which it is looked at",
        query=InboxList,
        answer=Page[InboxEvent],
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox",
        handler=push,
        access=Access.SECRET,
        tag="inbox",
        summary="Tell an agent something, as a service",
        body=NewInboxEvent,
        answer=Pushed,
        status=201,
        creates=True,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/claim",
        handler=claim,
        access=Access.SECRET,
        tag="inbox",
        summary="Take the next events",
        description="They are the claim's until the lease ends; then they are there for others again.",
        body=Claim,
        answer=Claimed,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/done",
        handler=done,
        access=Access.SECRET,
        tag="inbox",
        summary="Events were looked after",
        body=Done,
        answer=DoneAnswer,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/return",
        handler=give_back,
        access=Access.SECRET,
        tag="inbox",
        summary="Give events back",
        description="They are there again after a while that grows with each attempt; after the last one they failed.",
        body=Returned,
        answer=ReturnedAnswer,
    ),
    Route(
        method="POST",
        path="/api/agents/{agentId}/inbox/{eventId}/retry",
        handler=retry,
        access=Access.SECRET,
        tag="inbox",
        summary="Try a failed event again",
        answer=InboxEvent,
        problems=(409,),
    ),
]
