"""Routes for workers: the stream that offers them calls, who is connected, and how one leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from toolspace.core import json_text
from toolspace.core.ids import new_id
from toolspace.core.records import CallRecord
from toolspace.server.api_types import Id, JsonRequestBody, NewId, QueryParameters, ResponseBody, ResultPage
from toolspace.server.asgi import Receive, Scope, Send
from toolspace.server.authorization import Access
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import NO_CONTENT, Response
from toolspace.server.routing import Route
from toolspace.server.sse import PermissionCheck, SseResponse, StreamRegistry
from toolspace.spaces.workers import WorkerConnection, WorkerEvent, Workers
from toolspace.storage.queries import workers as claims
from toolspace.storage.streams.hub import StreamClosed
from toolspace.toolspace import Toolspace

MAX_CONCURRENCY = 1_000
_MOST_TOOLS = 500
_NAME = re.compile(r"[!-~]{1,256}")


class WorkerStreamQuery(QueryParameters, frozen=True, kw_only=True):
    tools: Annotated[
        str,
        Meta(min_length=1, max_length=65_536, description="Names of external tools, with commas.", examples=["move"]),
    ]
    worker_id: Annotated[NewId, Meta(description="Who comes back under it keeps its calls.")] | None = None
    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY, description="Unanswered calls to have at a time.")] = 4


class LeaveBody(JsonRequestBody, frozen=True, kw_only=True):
    """How a worker leaves."""

    finishing: Annotated[
        tuple[Id, ...], Meta(max_length=MAX_CONCURRENCY, description="Calls that it still answers.")
    ] = ()


class WorkerShape(ResponseBody, frozen=True, kw_only=True):
    """A worker, wherever it is connected."""

    worker_id: str
    tools: Sequence[str]
    connected: bool
    """False where its connection broke just now: it may come back, and still has its calls."""


async def stream_calls(request: Request) -> CallOfferStream:
    query = request.query(WorkerStreamQuery)
    gateway = request.gateway
    tools = _names(query.tools)
    unknown = _unknown(gateway.toolspace, tools)

    async def allowed() -> bool:
        return await gateway.authenticator.is_valid(request.scope["headers"])

    return CallOfferStream(
        gateway.workers,
        gateway.streams,
        query.worker_id or new_id("wrk"),
        tools,
        unknown=unknown,
        concurrency=query.concurrency,
        allowed=allowed,
    )


async def list_workers(request: Request) -> ResultPage[WorkerShape]:
    found = await request.gateway.ledger.read(claims.list_workers)
    return ResultPage(
        items=[WorkerShape(worker_id=id, tools=tools, connected=here) for id, tools, here in found], next=None
    )


async def leave_worker(request: Request) -> Response:
    body = await request.json(LeaveBody)
    worker_id = request.params["workerId"]
    if not await request.gateway.workers.retire(worker_id, body.finishing):
        raise Problem(404, f'there is no worker "{worker_id}"; GET /api/workers lists them')
    return NO_CONTENT


class CallOfferStream:
    """The answer to a worker: offers it calls for as long as it is connected."""

    def __init__(
        self,
        workers: Workers,
        readers: StreamRegistry,
        worker_id: str,
        tools: Sequence[str],
        *,
        unknown: Sequence[str],
        concurrency: int,
        allowed: PermissionCheck,
    ) -> None:
        self._workers = workers
        self._readers = readers
        self._worker_id = worker_id
        self._tools = tools
        self._unknown = unknown
        self._concurrency = concurrency
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self._workers.connect(self._worker_id, self._tools, self._concurrency) as connection:
            first = _frame("worker.ready", {"workerId": self._worker_id, "tools": self._tools})
            if self._unknown:
                names = ", ".join(f'"{name}"' for name in self._unknown)
                message = f"there is no tool {names} now; if one comes, its calls are offered"
                first += _frame("worker.warning", {"message": message, "tools": self._unknown})
            stream = SseResponse(self._readers, OfferEventSource(connection), first, allowed=self._allowed)
            await stream(scope, receive, send)


class OfferEventSource:
    """What a worker's connection says, as bytes."""

    is_complete = False
    has_lost_events = False

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._closed = False

    async def next(self) -> bytes:
        if self._closed:
            raise StreamClosed("closed")
        news = await self._connection.next_events()
        if news:
            return b"".join(map(_said, news))
        if self._connection.disconnect_reason is not None:
            self._closed = True
            if self._connection.disconnect_reason == "replaced":
                return _frame("worker.replaced", {"workerId": self._connection.worker_id})
        return b""

    def ping(self) -> bytes:
        return b": ping\n\n"

    def final_frame(self) -> bytes:
        return b""

    def wake(self) -> None:
        self._connection.wake()

    def close(self) -> None:
        self._closed = True
        self._connection.wake()


def _said(news: WorkerEvent) -> bytes:
    kind, what = news
    if isinstance(what, CallRecord):
        return _frame("call.offered", _offer(what))
    return _frame(f"call.{kind}", {"callId": what})


def _offer(call: CallRecord) -> dict[str, Any]:
    return {
        "callId": call.call_id,
        "toolName": call.tool_name,
        "args": call.args,
        "runId": call.run_id,
        "spaceId": call.space_id,
        "agentEntityId": call.agent_entity_id,
        "createdAt": call.created_at,
        "expiresAt": call.expires_at,
    }


def _frame(type: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (type.encode(), json_text.encode_bytes(data))


def _names(text: str) -> list[str]:
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise Problem(400, "tools names none; give the names of external tools, with commas", path="$.tools")
    if len(names) > _MOST_TOOLS:
        raise Problem(400, f"tools names {len(names)}; one worker serves at most {_MOST_TOOLS}", path="$.tools")
    for name in names:
        if _NAME.fullmatch(name) is None:
            raise Problem(400, f"{name[:80]!r} is no name of a tool", path="$.tools")
    return names


def _unknown(toolspace: Toolspace, names: Sequence[str]) -> list[str]:
    """Those of the tools that are not there. Raises where one is there, and not for workers."""
    unknown: list[str] = []
    for name in names:
        tool = toolspace.find_tool(name)
        if _is_an_agents(toolspace, name):
            continue
        if tool is None:
            unknown.append(name)
        elif tool.name != name:
            raise Problem(400, f'"{name}" is called "{tool.name}" here; serve it under that name', path="$.tools")
        elif tool.execution_type != "external":
            raise Problem(
                400,
                f'"{name}" is not for workers: its executionType is "{tool.execution_type}"; '
                'a tool with executionType "external" is',
                path="$.tools",
            )
    return unknown


def _is_an_agents(toolspace: Toolspace, name: str) -> bool:
    """Whether an agent has an external tool of that name for itself."""
    configs = (agent.spec.config for agent in toolspace.agents if agent.spec is not None)
    own = (config.tools.definitions.get(name) for config in configs if config is not None)
    return any(one is not None and one.enabled and one.execution_type == "external" for one in own)


ROUTES = [
    Route(
        method="GET",
        path="/api/tools/stream",
        handler=stream_calls,
        access=Access.SECRET,
        tag="workers",
        summary="Serve external tools as a worker",
        description=(
            "A stream of events: `worker.ready`; `call.offered` with a call that this worker alone has to execute; "
            "`call.canceled` and `call.answered` where one is not wanted any more. Results go to `POST "
            "/api/calls/{callId}/result`. Who comes back under its `workerId` is offered its unanswered calls again."
        ),
        query=WorkerStreamQuery,
        media_type="text/event-stream",
        is_stream=True,
    ),
    Route(
        method="GET",
        path="/api/workers",
        handler=list_workers,
        access=Access.SECRET,
        tag="workers",
        summary="The workers, and which tools each serves",
        response=ResultPage[WorkerShape],
    ),
    Route(
        method="POST",
        path="/api/workers/{workerId}/leave",
        handler=leave_worker,
        access=Access.SECRET,
        tag="workers",
        summary="Let a worker take no more calls",
        description="It finishes those that it names; others get the rest at once.",
        body=LeaveBody,
        status=204,
    ),
]
