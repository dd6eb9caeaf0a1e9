"""Routes of workers: the stream that offers calls to a worker, the list of workers, and how a worker leaves."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from toolspace.core.ids import new_id
from toolspace.core.stored_records import CallRecord
from toolspace.server.api_types import Id, JsonRequestBody, NewId, QueryParameters, ResponseBody, ResultPage
from toolspace.server.requests import Receive, Request, Scope, Send
from toolspace.server.responses import NO_CONTENT, Problem, Response, StreamingResponse
from toolspace.server.routing import RouteTable
from toolspace.server.sse_encoding import EventSource, encode_event
from toolspace.server.sse_responses import SseResponse
from toolspace.spaces.workers import WorkerConnection, WorkerEvent
from toolspace.storage.queries import workers_and_presence as worker_rows
from toolspace.storage.streams.hub import StreamClosed
from toolspace.toolspace import Toolspace

MAX_CONCURRENCY = 1_000
_MAX_TOOLS = 500
_TOOL_NAME = re.compile(r"[!-~]{1,256}")

routes = RouteTable("workers")


class WorkerStreamQuery(QueryParameters, frozen=True, kw_only=True):
    tools: Annotated[str, Meta(min_length=1, max_length=65_536, examples=["move"])]
    """The names of external tools, separated by commas."""
    worker_id: NewId | None = None
    """The id of the worker. A worker that reconnects with it keeps its calls."""
    concurrency: Annotated[int, Meta(ge=1, le=MAX_CONCURRENCY)] = 4
    """Maximum number of calls that the worker executes at a time."""


class LeaveBody(JsonRequestBody, frozen=True, kw_only=True):
    """How a worker leaves."""

    call_ids: Annotated[tuple[Id, ...], Meta(max_length=MAX_CONCURRENCY)] = msgspec.field(name="finishing", default=())
    """Calls that the worker still finishes."""


class WorkerShape(ResponseBody, frozen=True, kw_only=True):
    """A worker that is connected to any gateway process."""

    worker_id: str
    """The id of the worker."""
    tools: Sequence[str]
    """The tools that it serves."""
    connected: bool
    """False if its connection was just lost; it may reconnect and keep its calls."""


@routes.add(
    "GET",
    "/api/tools/stream",
    "Serve external tools as a worker",
    description="Server-sent events: `worker.ready`; `call.offered` with a call that only this worker executes; "
    "`call.canceled` and `call.answered` if its result is no longer needed. Submit results with `POST "
    "/api/calls/{callId}/result`. A worker that reconnects with its `workerId` is offered its open calls again.",
    query=WorkerStreamQuery,
    media_type="text/event-stream",
    is_stream=True,
)
async def stream_calls(request: Request) -> StreamingResponse:
    query = request.query(WorkerStreamQuery)
    gateway = request.gateway
    tools = _parse_tool_names(query.tools)
    unknown_tools = _list_unknown_tools(gateway.toolspace, tools)

    worker_id = query.worker_id or new_id("wrk")

    async def respond(scope: Scope, receive: Receive, send: Send) -> None:
        async with gateway.workers.connect(worker_id, tools, query.concurrency) as connection:
            first = encode_event("worker.ready", {"workerId": worker_id, "tools": tools})
            if unknown_tools:
                names = ", ".join(f'"{name}"' for name in unknown_tools)
                message = f"unknown tools: {names}; their calls are offered once the tools exist"
                first += encode_event("worker.warning", {"message": message, "tools": unknown_tools})
            response = SseResponse(
                gateway.streams,
                OfferEventSource(connection),
                first,
                is_allowed=lambda: gateway.authenticator.is_valid(scope["headers"]),
            )
            await response(scope, receive, send)

    return respond


@routes.add("GET", "/api/workers", "List workers and the tools that they serve")
async def list_workers(request: Request) -> ResultPage[WorkerShape]:
    rows = await request.read(worker_rows.list_workers)
    workers = [WorkerShape(worker_id=id, tools=tools, connected=is_connected) for id, tools, is_connected in rows]
    return ResultPage(items=workers, next=None)


@routes.add(
    "POST",
    "/api/workers/{workerId}/leave",
    "Disconnect a worker",
    description="The worker finishes the calls that it names; its other calls are offered to other workers.",
    body=LeaveBody,
    status=204,
)
async def leave_worker(request: Request) -> Response:
    body = await request.json(LeaveBody)
    worker_id = request.params["workerId"]
    if not await request.gateway.workers.retire(worker_id, body.call_ids):
        raise Problem(404, f'Worker "{worker_id}" not found; GET /api/workers lists the workers')
    return NO_CONTENT


class OfferEventSource(EventSource):
    """Encodes the events of a worker's connection."""

    def __init__(self, connection: WorkerConnection) -> None:
        self._connection = connection
        self._is_closed = False

    async def next(self) -> bytes:
        if self._is_closed:
            raise StreamClosed("closed")
        events = await self._connection.next_events()
        if events:
            return b"".join(map(_encode_worker_event, events))
        if self._connection.disconnect_reason is not None:
            self._is_closed = True
            if self._connection.disconnect_reason == "replaced":
                return encode_event("worker.replaced", {"workerId": self._connection.worker_id})
        return b""

    def wake(self) -> None:
        self._connection.wake()

    def close(self) -> None:
        self._is_closed = True
        self._connection.wake()


def _encode_worker_event(event: WorkerEvent) -> bytes:
    kind, call = event
    if isinstance(call, CallRecord):
        offer = {
            "callId": call.call_id,
            "toolName": call.tool_name,
            "args": call.args,
            "outputSchema": call.output_schema,
            "runId": call.run_id,
            "spaceId": call.space_id,
            "agentEntityId": call.agent_entity_id,
            "createdAt": call.created_at,
            "expiresAt": call.expires_at,
        }
        return encode_event("call.offered", offer)
    return encode_event(f"call.{kind}", {"callId": call})


def _parse_tool_names(text: str) -> list[str]:
    names = list(dict.fromkeys(name for part in text.split(",") if (name := part.strip())))
    if not names:
        raise Problem(400, "tools is empty; send the names of external tools, separated by commas", path="$.tools")
    if len(names) > _MAX_TOOLS:
        raise Problem(400, f"tools has {len(names)} names; a worker serves at most {_MAX_TOOLS} tools", path="$.tools")
    for name in names:
        if _TOOL_NAME.fullmatch(name) is None:
            raise Problem(400, f"{name[:80]!r} is not a tool name", path="$.tools")
    return names


def _list_unknown_tools(toolspace: Toolspace, names: Sequence[str]) -> list[str]:
    """Returns the names of tools that do not exist. Raises `Problem` 400 if an existing tool is not for workers."""
    unknown_names: list[str] = []
    for name in names:
        tool = toolspace.find_tool(name)
        if _is_agent_tool(toolspace, name):
            continue
        if tool is None:
            unknown_names.append(name)
        elif tool.name != name:
            raise Problem(400, f'The full name of tool "{name}" is "{tool.name}"; use that name', path="$.tools")
        elif tool.execution_type != "external":
            raise Problem(
                400,
                f'Tool "{name}" is not for workers: its executionType is "{tool.execution_type}", not "external"',
                path="$.tools",
            )
    return unknown_names


def _is_agent_tool(toolspace: Toolspace, name: str) -> bool:
    """Whether an agent has its own external tool with this name."""
    configs = (agent.spec.config for agent in toolspace.agents if agent.spec is not None)
    definitions = (config.tools.definitions.get(name) for config in configs if config is not None)
    return any(
        definition is not None and definition.enabled and definition.execution_type == "external"
        for definition in definitions
    )
