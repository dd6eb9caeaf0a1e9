"""Routes of event streams: of a space, of a run, and of everything. `sse_responses` sends the events.

`StreamSubscribers` stores which streams have subscribers: an external call that neither a worker nor a subscriber may
execute says so when it times out, or fails at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from toolspace.agents.agent import entity_id_for
from toolspace.core.stored_records import StreamFormat, run_stream, space_stream
from toolspace.errors import StorageError
from toolspace.server.authorization import RUN, SPACE, Access, EntityCaller, get_visible
from toolspace.server.redaction import viewer_of
from toolspace.server.requests import Receive, Request, Scope, Send
from toolspace.server.responses import Problem, StreamingResponse
from toolspace.server.routing import RouteTable
from toolspace.server.sse_responses import PermissionCheck, StreamQuery, parse_stream_options
from toolspace.spaces.ledger import Ledger
from toolspace.storage.queries import entities_and_spaces
from toolspace.storage.queries import workers_and_presence as presence

_log = logging.getLogger("toolspace.subscribers")
_STREAM: dict[str, Any] = {"media_type": "text/event-stream", "is_stream": True}
_RESUMABLE_STREAM: dict[str, Any] = {
    **_STREAM,
    "access": Access.MEMBER,
    "description": "Server-sent events. Resume after an event id with `Last-Event-ID`, or with `lastEventId` in the "
    "query. `format` is `native`, `ui-message-stream` or `ag-ui`; without it, the format that the agent chooses.",
    "query": StreamQuery,
    "headers": {"Last-Event-ID": "The last event id that was received; the stream continues after it."},
}

routes = RouteTable("spaces")


@routes.add("GET", "/api/spaces/{spaceId}/stream", "Stream the events of a space", **_RESUMABLE_STREAM)
async def stream_space(request: Request) -> StreamingResponse:
    space = await get_visible(request, SPACE)
    caller, memberships = request.caller, request.gateway.memberships

    async def is_allowed() -> bool:
        return not isinstance(caller, EntityCaller) or await memberships.is_member(space.id, caller.entity_id)

    default_format: StreamFormat = "native"
    if request.query(StreamQuery).format is None and (formats := _list_response_formats(request)):
        agents = await request.read(entities_and_spaces.list_agents, space.id)
        default_format = _get_common_format([formats.get(agent_id, "native") for agent_id, _ in agents])
    return await _open(request, space_stream(space.id), is_allowed, default_format=default_format)


@routes.add("GET", "/api/runs/{runId}/events", "Stream the events of a run", tag="runs", **_RESUMABLE_STREAM)
async def stream_run(request: Request) -> StreamingResponse:
    run = await get_visible(request, RUN)

    async def is_allowed() -> bool:
        if not isinstance(request.caller, EntityCaller):
            return True
        try:
            await get_visible(request, RUN)
        except Problem:
            return False
        return True

    # Strict (checked before every event), because a run can move to another space at any time, and its events with it.
    return await _open(
        request,
        run_stream(run.id),
        is_allowed,
        check_each_write=isinstance(request.caller, EntityCaller),
        default_format=_list_response_formats(request).get(run.agent_entity_id, "native"),
    )


@routes.add(
    "GET",
    "/api/events",
    "Stream the events of all spaces and runs",
    tag="operations",
    description="Server-sent events of all streams, from the present on, for operators. It cannot be resumed.",
    **_STREAM,
)
async def stream_all_events(request: Request) -> StreamingResponse:
    gateway, headers = request.gateway, request.scope["headers"]
    return await gateway.streams.open_all_events(
        gateway.ledger.hub, is_allowed=lambda: gateway.authenticator.is_valid(headers)
    )


def _list_response_formats(request: Request) -> dict[str, StreamFormat]:
    """The formats that configured agents choose, by the id of the agent."""
    specs = (agent.spec for agent in request.gateway.toolspace.agents)
    return {
        entity_id_for(spec.name): spec.response_format
        for spec in specs
        if spec is not None and spec.response_format is not None
    }


def _get_common_format(formats: Sequence[StreamFormat]) -> StreamFormat:
    """The format of all agents of a space; native if they have different ones."""
    return formats[0] if len(set(formats)) == 1 else "native"


async def _open(
    request: Request,
    stream: str,
    is_allowed: PermissionCheck,
    *,
    check_each_write: bool = False,
    default_format: StreamFormat = "native",
) -> StreamingResponse:
    gateway, caller, headers = request.gateway, request.caller, request.scope["headers"]
    options = parse_stream_options(
        request.query(StreamQuery), request.header("last-event-id"), default_format=default_format
    )

    async def is_still_allowed() -> bool:
        return await gateway.authenticator.is_valid(headers) and await is_allowed()

    response = await gateway.streams.open_stream(
        gateway.ledger.hub,
        stream,
        options,
        viewer=viewer_of(caller),
        is_allowed=is_still_allowed,
        check_each_write=check_each_write,
        expires_at=caller.expires_at if isinstance(caller, EntityCaller) else None,
    )

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            # A call for the client needs someone who can answer it.
            async with gateway.subscribers.register(stream):
                await response(scope, receive, send)
        finally:
            response.close()

    return respond


class StreamSubscribers:
    """Counts the subscribers of each stream in this process, and stores whether there are any."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._counts: dict[str, int] = {}
        self._stored_streams: set[str] = set()
        """Streams that are stored as having subscribers here."""
        self._locks: dict[str, asyncio.Lock] = {}

    @asynccontextmanager
    async def register(self, stream: str) -> AsyncGenerator[None]:
        """Counts a subscriber while the block runs. Other processes know of it when the block starts."""
        self._counts[stream] = self._counts.get(stream, 0) + 1
        try:
            await self._register(stream)
            yield
        finally:
            self._counts[stream] -= 1
            if not self._counts[stream]:
                # Shielded, because a lost connection cancels this task.
                await asyncio.shield(asyncio.ensure_future(self._register(stream)))

    async def register_again(self) -> None:
        """Stores all streams again: other processes declared this one dead and deleted them."""
        self._stored_streams.clear()
        for stream in tuple(self._counts):
            await self._register(stream)

    async def _register(self, stream: str) -> None:
        """Stores whether a stream has subscribers. One write at a time, so that the last one is correct."""
        lock = self._locks.setdefault(stream, asyncio.Lock())
        async with lock:
            has_subscribers = self._counts.get(stream, 0) > 0
            if has_subscribers == (stream in self._stored_streams):
                return
            node_id = self._ledger.node_id
            holder = f"{node_id}/{stream}"
            try:
                if has_subscribers:
                    await self._ledger.write(presence.register_holder, holder, [stream], node_id=node_id)
                    self._stored_streams.add(stream)
                else:
                    await self._ledger.write(presence.mark_left, holder, node_id=node_id)
                    self._stored_streams.discard(stream)
            except StorageError as error:
                _log.warning("stream %s: cannot store whether it has subscribers: %s", stream, error)
        if not self._counts.get(stream):
            self._counts.pop(stream, None)
            if not lock.locked():
                self._locks.pop(stream, None)
