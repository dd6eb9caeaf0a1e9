"""Routes of the inbox of an agent: list, push, claim, acknowledge, release and retry events."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, TypeVar, cast

import msgspec
from msgspec import Meta

from toolspace.core.ids import agent_of_session, is_id, new_id
from toolspace.core.stored_records import InboxEvent, InboxStatus, InboxType
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    MAX_DATA,
    Id,
    JsonRequestBody,
    Limit,
    ResponseBody,
    ResultPage,
    check_json_size,
)
from toolspace.server.idempotency import run_once
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routes.agents import SessionId, SessionQuery, get_agent_id, get_session_id
from toolspace.server.routing import RouteTable
from toolspace.spaces import session_scope
from toolspace.spaces.ledger import Effects
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, inbox, sessions

T = TypeVar("T")

MAX_WAIT = 60
"""Seconds that a request may wait for an event."""
_MAX_EVENTS = 100
_MAX_LEASE_SECONDS = 3600

Wait = Annotated[float, Meta(ge=0, le=MAX_WAIT, description="Seconds to wait if there is no event.")]
EventIds = Annotated[list[Id], Meta(min_length=1, max_length=_MAX_EVENTS)]

routes = RouteTable("inbox")


class InboxListQuery(SessionQuery, frozen=True, kw_only=True):
    status: InboxStatus | None = None
    """Only events with this status."""
    limit: Limit = 100
    wait: Wait = 0


class NewInboxEvent(JsonRequestBody, frozen=True, kw_only=True):
    """An event from a service for an agent."""

    data: Annotated[
        Any, Meta(description=f"What happened; up to {MAX_DATA} bytes of JSON.", examples=[{"order": 4711}])
    ]
    event_id: Id | None = None
    """An id of your choice. An event whose id the inbox already has is ignored."""
    session: SessionId | None = None
    """The session of the agent that gets the event. Without it: that of the space `data.spaceId`, if the agent has a
    session for each space, or its main session."""

    def __post_init__(self) -> None:
        check_json_size("data", self.data, MAX_DATA)


class PushResponse(ResponseBody, frozen=True, kw_only=True):
    """The result of a push."""

    event_id: str
    """The id of the event."""
    fresh: bool
    """False if the inbox already had an event with this id."""


class ClaimBody(JsonRequestBody, frozen=True, kw_only=True):
    """How many events to claim, and for how long."""

    count: Annotated[int, Meta(ge=1, le=_MAX_EVENTS)] = 1
    """Maximum number of events."""
    lease_seconds: Annotated[float, Meta(ge=1, le=_MAX_LEASE_SECONDS)] = 60
    """After this time others can claim the events again."""
    types: Annotated[list[InboxType], Meta(max_length=10)] | None = None
    """Only events of these types."""
    session: SessionId | None = None
    """Only events of this session of the agent."""
    wait: Wait = 0


class ClaimResponse(ResponseBody, frozen=True, kw_only=True):
    """Claimed events. Acknowledge or release them before the lease ends."""

    claim: str
    """The id of the claim, for `done` and `return`."""
    lease_until: int
    """When the lease ends, in Unix milliseconds."""
    items: Sequence[InboxEvent]
    """The claimed events."""


class AcknowledgeBody(JsonRequestBody, frozen=True, kw_only=True):
    """Events that were handled."""

    event_ids: EventIds
    """The ids of the events."""
    claim: Id | None = None
    """The claim that holds the events; any claim if it is missing."""


class ReleaseBody(AcknowledgeBody, frozen=True, kw_only=True):
    """Events that were not handled."""

    error: Annotated[str, Meta(max_length=10_000, pattern="^[^\\u0000]*$")] | None = None
    """Why they were not handled."""


class AcknowledgeResponse(ResponseBody, frozen=True, kw_only=True):
    """The result of an acknowledgement."""

    acknowledged_ids: Sequence[str] = msgspec.field(name="done")
    """The events that are acknowledged."""
    not_held: Sequence[str]
    """Events that the claim does not hold, for example because its lease ended. They are unchanged."""


class ReleaseResponse(ResponseBody, frozen=True, kw_only=True):
    """The result of a release."""

    items: Sequence[InboxEvent]
    """The released events: pending, or failed after the last attempt."""
    not_held: Sequence[str]
    """Events that the claim does not hold. They are unchanged."""


@routes.add(
    "GET",
    "/api/agents/{agentId}/inbox",
    "List the inbox events of an agent, in the order in which they are handled",
    query=InboxListQuery,
)
async def list_inbox(request: Request) -> ResultPage[InboxEvent]:
    query = request.query(InboxListQuery)
    agent_id = agent_of_session(await get_session_id(request, query.session))
    ledger = request.gateway.ledger

    async def read() -> list[InboxEvent]:
        return await ledger.read(
            inbox.list_events, agent_id, status=query.status, session_id=query.session, limit=query.limit
        )

    return ResultPage(items=await _poll(request, agent_id, query.wait, read), next=None)


@routes.add(
    "POST",
    "/api/agents/{agentId}/inbox",
    "Push an event from a service to an agent",
    body=NewInboxEvent,
    creates=PushResponse,
)
async def push_event(request: Request) -> Response:
    body = await request.json(NewInboxEvent)
    agent_id = agent_of_session(await get_session_id(request, body.session))
    event_id = body.event_id or new_id("evt")

    def push(effects: Effects) -> Program[PushResponse]:
        session_id = yield from _find_session(agent_id, body)
        is_new = yield from inbox.add(session_id, event_id, "service", body.data, priority=inbox.PLAN_OR_SERVICE)
        if is_new:
            effects.notify_inbox(session_id)
        return PushResponse(event_id=event_id, fresh=is_new)

    return await run_once(request, push)


@routes.add(
    "POST",
    "/api/agents/{agentId}/inbox/claim",
    "Claim the next inbox events",
    description="The claim holds the events until its lease ends; then others can claim them.",
    body=ClaimBody,
)
async def claim_events(request: Request) -> ClaimResponse:
    body = await request.json(ClaimBody)
    agent_id = agent_of_session(await get_session_id(request, body.session))
    lease_ms, claim_id = round(body.lease_seconds * 1000), new_id("clm")
    lease_until = 0

    async def claim() -> list[InboxEvent]:
        nonlocal lease_until
        lease_until = request.ledger.now_ms() + lease_ms
        return await request.ledger.write(
            inbox.claim,
            agent_id,
            claim_id,
            count=body.count,
            lease_ms=lease_ms,
            types=body.types or (),
            session_id=body.session,
        )

    events = await _poll(request, agent_id, body.wait, claim)
    return ClaimResponse(claim=claim_id, lease_until=lease_until, items=events)


@routes.add("POST", "/api/agents/{agentId}/inbox/done", "Acknowledge claimed inbox events", body=AcknowledgeBody)
async def acknowledge_events(request: Request) -> AcknowledgeResponse:
    body = await request.json(AcknowledgeBody)
    agent_id = await get_agent_id(request)
    acknowledged_ids = await request.ledger.write(inbox.acknowledge, agent_id, body.claim, body.event_ids)
    return AcknowledgeResponse(acknowledged_ids=acknowledged_ids, not_held=_remaining(body.event_ids, acknowledged_ids))


@routes.add(
    "POST",
    "/api/agents/{agentId}/inbox/return",
    "Release claimed inbox events",
    description="They become pending again after a delay that grows with each attempt, or fail after the last.",
    body=ReleaseBody,
)
async def release_events(request: Request) -> ReleaseResponse:
    body = await request.json(ReleaseBody)
    agent_id = await get_agent_id(request)
    events = await request.ledger.commit(_release, agent_id, body)
    return ReleaseResponse(items=events, not_held=_remaining(body.event_ids, [event.event_id for event in events]))


@routes.add("POST", "/api/agents/{agentId}/inbox/{eventId}/retry", "Retry a failed inbox event", error_statuses=(409,))
async def retry_event(request: Request) -> InboxEvent:
    agent_id = await get_agent_id(request)
    return await request.ledger.commit(_retry, agent_id, request.params["eventId"])


async def _poll(request: Request, agent_id: str, seconds: float, read: Callable[[], Awaitable[list[T]]]) -> list[T]:
    """Returns what `read` returns; if that is nothing, waits up to `seconds` for events."""
    if not seconds:
        return await read()
    ledger, key = request.gateway.ledger, f"inbox:{agent_id}"
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    disconnect = asyncio.ensure_future(request.wait_for_disconnect())
    try:
        while True:
            wake_up = ledger.waiters.register(key)  # Before reading, so that no event is missed in between.
            read_at = ledger.now_ms()
            try:
                items = await read()
                remaining = deadline - loop.time()
                if items or remaining <= 0:
                    return items
                # A released event becomes available again after a delay, without a wake-up.
                next_at = await ledger.read(inbox.find_next_available, agent_id, after=read_at)
                if next_at is not None:
                    remaining = min(remaining, max((next_at - ledger.now_ms()) / 1000, 0.0))
                await asyncio.wait((wake_up, disconnect), timeout=remaining, return_when=asyncio.FIRST_COMPLETED)
                if disconnect.done() or request.gateway.readiness.is_stopping:
                    return []  # Events must not be claimed for a client that does not get them.
            finally:
                ledger.waiters.unregister(key, wake_up)
    finally:
        disconnect.cancel()


def _find_session(agent_id: str, body: NewInboxEvent) -> Program[str]:
    """The session that a pushed event is for. Raises `RefusedError` if the agent does not have it."""
    if body.session is not None:
        if body.session != agent_id and (yield from sessions.find(body.session)) is None:
            raise RefusedError("not_found", f'Session "{body.session}" not found')
        return body.session
    data: Any = body.data
    space_id = cast("dict[str, Any]", data).get("spaceId") if isinstance(data, dict) else None
    if not isinstance(space_id, str) or not is_id(space_id):
        return agent_id
    if not (yield from entities_and_spaces.is_member(space_id, agent_id)):
        return agent_id
    scope = (yield from sessions.find_scope(agent_id)).scope
    return (yield from session_scope.open_session(agent_id, scope, space_id=space_id, person_id=None))


def _remaining(event_ids: Sequence[str], handled_ids: Sequence[str]) -> list[str]:
    handled_set = frozenset(handled_ids)
    return [event_id for event_id in dict.fromkeys(event_ids) if event_id not in handled_set]


def _release(effects: Effects, agent_id: str, body: ReleaseBody) -> Program[list[InboxEvent]]:
    events = yield from inbox.release(agent_id, body.claim, body.event_ids, error=body.error)
    for session_id in {event.session_id for event in events}:
        effects.notify_inbox(session_id)
    return events


def _retry(effects: Effects, agent_id: str, event_id: str) -> Program[InboxEvent]:
    is_retried = yield from inbox.retry(agent_id, event_id)
    event = yield from inbox.find(agent_id, event_id)
    if event is None:
        raise RefusedError("not_found", f'Inbox event "{event_id}" of agent "{agent_id}" not found')
    if not is_retried:
        raise RefusedError("conflict", f'Inbox event "{event_id}" is {event.status}; only failed events can be retried')
    effects.notify_inbox(event.session_id)
    return event
