"""Routes of tools and MCP servers: list and call tools, alone or in a run; show and restart servers.

`calls` has the routes that submit the results of pending calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Literal, cast

import msgspec
from msgspec import Meta

from toolspace.core import json_text
from toolspace.core.call_statistics import ToolStats
from toolspace.core.defaults import TOOL_TIMEOUT_SECONDS
from toolspace.core.ids import derived_id
from toolspace.core.names import did_you_mean
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.core.stored_records import OPEN_CALL, CallRecord
from toolspace.core.tool import Tool, ToolCategory
from toolspace.core.tool_context import ToolContext
from toolspace.core.trace_context import read_trace_headers
from toolspace.errors import ErrorKind, ProviderError
from toolspace.orchestrator.run import Run
from toolspace.providers.mcp.server_spec import ServerStatus
from toolspace.server.api_types import (
    NewId,
    PageQuery,
    Principal,
    QueryParameters,
    ResponseBody,
    ResultPage,
    build_page,
)
from toolspace.server.authorization import Access, ToolKeyCaller
from toolspace.server.redaction import conceal_addresses
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response, StreamingResponse
from toolspace.server.routing import RouteTable
from toolspace.server.sse_responses import CallStream
from toolspace.server.tool_permissions import principal_of
from toolspace.spaces.call_context import GatewayCallHost, result_of
from toolspace.storage.queries import calls as call_queries
from toolspace.storage.queries import runs as run_queries
from toolspace.storage.queries.call_delivery import claim_result

_UNRESOLVED = (*OPEN_CALL, "running")
_MAX_WAIT_SECONDS = 600.0
_TOOL_NAME = {"name": "The name of the tool."}
_SERVER_NAME = {"name": "The name of the MCP server."}

tool_routes = RouteTable("tools")
server_routes = RouteTable("servers")


class ToolShape(ResponseBody, frozen=True, kw_only=True):
    """A tool definition, without how the tool is executed."""

    name: str
    """The full name of the tool."""
    description: str
    """What the tool does."""
    input_schema: dict[str, Any]
    """The JSON Schema of the arguments."""
    category: str
    """The category of the tool."""
    execution_type: str
    """How the tool is executed."""
    visible: bool
    """Whether its calls are shown in the active space."""
    is_async: bool
    """Whether a call returns before its result is available."""


class ToolListQuery(PageQuery, frozen=True, kw_only=True):
    category: ToolCategory | None = None
    """Only tools of this category."""
    search: Annotated[str, Meta(min_length=1, max_length=500)] | None = None
    """Only the best matches for these words."""


class StatsQuery(QueryParameters, frozen=True, kw_only=True):
    principal: Principal | None = None
    """Only calls of this principal: an entity, or a key (`key/…`, `tools/…`)."""


class CallBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The arguments of a tool call."""

    args: dict[str, Any] | str | None = None
    """The arguments: an object, or the JSON text that a model wrote."""
    call_id: NewId | None = None
    """An id of your choice. The same call with the same id is not executed again."""


class RunCallBody(CallBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A tool call in a run."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    """The name of the tool."""
    turn: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None
    """The turn of the model that makes the call; a higher number than before starts a new turn."""


class CallToolResponse(ResponseBody, frozen=True, kw_only=True):
    """The outcome of a call. A failed call is a response too: `ok` is false, and `errorKind` says who has to act."""

    ok: bool
    """Whether the call succeeded or is pending."""
    tool: str
    """The full name of the tool."""
    call_id: str
    """The id of the call."""
    result: Any = None
    """What the tool returned."""
    error: str | None = None
    """Why the call failed, for a model to read."""
    error_kind: ErrorKind | None = None
    """The kind of the failure; docs/errors.md lists the kinds."""
    executed: bool = True
    """Whether the tool may have had an effect."""
    started_at: float = 0
    """When the call started, in Unix milliseconds."""
    completed_at: float = 0
    """When the call ended, in Unix milliseconds."""
    duration_ms: float = 0
    """How long the call took, in milliseconds."""
    kind: str = ""
    """The kind of provider of the tool."""
    namespace: str = ""
    """The server or service of the tool."""
    content: tuple[dict[str, Any], ...] = ()
    """The result as typed parts."""
    extras: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """Further data about the result."""
    status: Literal["pending"] | None = None
    """`pending` if the result comes later."""
    pending_tool_call_id: str | None = None
    """The id of the pending call, if the result comes later."""
    acknowledge: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    """Calls whose results this response delivers. If the gateway is killed now, they may come to the inbox again,
    unless they are acknowledged: `POST /api/calls/{callId}/ack`."""


@tool_routes.add(
    "GET",
    "/api/tools",
    "List the tools that the key may use, ordered by name",
    access=Access.TOOLS,
    query=ToolListQuery,
    response=ResultPage[ToolShape],
)
async def list_tools(request: Request) -> ResultPage[dict[str, Any]]:
    query = request.query(ToolListQuery)
    toolspace = request.gateway.toolspace
    await toolspace.orchestrator.wait_for_lists()
    tools = toolspace.list_tools(context=request.gateway.tool_key_policy.context_for(request.caller))
    if query.category is not None:
        tools = [tool for tool in tools if tool.category == query.category]
    if query.search is not None:
        allowed_names = {tool.name for tool in tools}
        search_results = toolspace.search(query.search, limit=len(allowed_names) + query.limit)
        matches = [tool for tool, _ in search_results if tool.name in allowed_names][: query.limit]
        return ResultPage(items=[_describe(tool) for tool in matches], next=None)
    after = query.cursor or ""
    tools = sorted((tool for tool in tools if tool.name > after), key=lambda tool: tool.name)
    return build_page([_describe(tool) for tool in tools[: query.limit + 1]], query.limit, lambda tool: tool["name"])


@tool_routes.add(
    "GET",
    "/api/tools/{name}",
    "Get a tool",
    parameter_descriptions=_TOOL_NAME,
    access=Access.TOOLS,
    response=ToolShape,
)
async def get_tool(request: Request) -> dict[str, Any]:
    name = request.params["name"]
    tool = request.gateway.toolspace.find_tool(name)
    if tool is None:
        raise Problem(404, f'Tool "{name[:200]}" not found; GET /api/tools lists the tools')
    if not request.gateway.tool_key_policy.may_use(request.caller, tool.name):
        raise Problem(403, f'This key may not use the tool "{tool.name}"')
    return _describe(tool)


@tool_routes.add("GET", "/api/tools/stats", "Get the call statistics of all tools", query=StatsQuery)
async def get_stats(request: Request) -> ToolStats:
    return request.gateway.toolspace.get_stats(request.query(StatsQuery).principal)


@tool_routes.add(
    "POST",
    "/api/tools/{name}/call",
    "Call a tool",
    parameter_descriptions=_TOOL_NAME,
    access=Access.TOOLS,
    description="Returns the result, or 202 with `pendingToolCallId` if the result comes later. With "
    "`Accept: text/event-stream` it streams the events `tool.progress`, `tool.streaming` and finally `result`.",
    body=CallBody,
    response=CallToolResponse,
    other_responses={202: CallToolResponse},
    error_statuses=(403, 404, 409),
)
async def call_tool(request: Request) -> Response | StreamingResponse:
    """Calls a tool outside a run."""
    body = await request.json(CallBody)
    name = request.params["name"]
    caller = request.caller
    agent_id = None
    if isinstance(caller, ToolKeyCaller):
        agent_id = caller.agent_entity_id
        if body.call_id is not None:
            # Each key has its own call ids, so that no key can name another key's call and get its result.
            body.call_id = derived_id("call", caller.key_id, body.call_id)
    if (response := await _find_earlier_response(request, body.call_id, None, name, body.args)) is not None:
        return response
    host = GatewayCallHost(request.gateway.pending_calls, agent_entity_id=agent_id, **_approval_options(request))
    return await _call(request, name, body, host)


@tool_routes.add(
    "POST",
    "/api/runs/{runId}/calls",
    "Call a tool in a run",
    tag="runs",
    description="Like `POST /api/tools/{name}/call`, with the limits and the space of the run; the call is stored.",
    body=RunCallBody,
    response=CallToolResponse,
    other_responses={202: CallToolResponse},
    error_statuses=(404, 409),
)
async def call_tool_in_run(request: Request) -> Response | StreamingResponse:
    """Calls a tool in a run: with its limits, in its space, and stored."""
    gateway = request.gateway
    body = await request.json(RunCallBody)
    run_id = request.params["runId"]
    if (response := await _find_earlier_response(request, body.call_id, run_id, body.name, body.args)) is not None:
        return response
    record, run = await gateway.open_runs.enter(run_id)
    if body.turn is not None and run.turn < body.turn:
        run.turn = body.turn - 1
        run.next_turn()
        await gateway.ledger.write(run_queries.advance_step, run_id, body.turn)
    host = GatewayCallHost(
        gateway.pending_calls,
        run_id=run_id,
        agent_entity_id=record.agent_entity_id,
        space_id=record.space_id,
        session_id=record.session_id,
        **_approval_options(request),
    )
    return await _call(request, body.name, body, host, run, principal=record.principal or record.agent_entity_id)


@server_routes.add("GET", "/api/servers", "List MCP servers and their status")
async def list_servers(request: Request) -> ResultPage[ServerStatus]:
    return ResultPage(items=request.gateway.toolspace.list_servers(), next=None)


@server_routes.add("GET", "/api/servers/{name}", "Get the status of an MCP server", parameter_descriptions=_SERVER_NAME)
async def get_server(request: Request) -> ServerStatus:
    return _get_status(request)


@server_routes.add(
    "POST",
    "/api/servers/{name}/restart",
    "Restart an MCP server",
    parameter_descriptions=_SERVER_NAME,
    error_statuses=(502,),
)
async def restart_server(request: Request) -> ServerStatus:
    name = _get_status(request).name
    try:
        return await request.gateway.toolspace.restart_server(name)
    except ProviderError as error:
        raise Problem(502, f'MCP server "{name}" did not start: {error}') from error


def _describe(tool: Tool) -> dict[str, Any]:
    """Returns the tool definition without `execution`, which may contain hosts and secrets."""
    definition = tool.to_dict()
    definition.pop("execution", None)
    return definition


def _approval_options(request: Request) -> dict[str, Any]:
    """Who makes a call that may need approval; and that it waits for the decision, if the caller prefers that."""
    prefers_waiting = "wait" in (request.header("prefer") or "").lower()
    return {"requester": principal_of(request.caller), "approval_mode": "wait" if prefers_waiting else "return"}


async def _call(
    request: Request,
    name: str,
    body: CallBody,
    host: GatewayCallHost,
    run: Run | None = None,
    *,
    principal: str | None = None,
) -> Response | StreamingResponse:
    toolspace = request.gateway.toolspace
    caller_context = request.gateway.tool_key_policy.context_for(request.caller)
    context = ToolContext(
        user_id=caller_context.user_id if principal is None else principal,
        session_id=caller_context.session_id if run is None else run.session,
        memory_dir=caller_context.memory_dir if run is None else None,
        agent_entity_id=host.agent_entity_id,
        space_id=host.space_id,
        host=host,
        trace=read_trace_headers(request.headers),
    )

    def start(call_id: str | None) -> Coroutine[Any, Any, ToolResult]:
        call = toolspace.orchestrator.execute(name, body.args, context=context, run=run, call_id=call_id)
        return _conceal_addresses(call, body.args) if isinstance(request.caller, ToolKeyCaller) else call

    if "text/event-stream" in (request.header("accept") or ""):
        return CallStream(toolspace, start, host, body.call_id)
    result = await _run_while_connected(request, host, start(body.call_id))
    if run is None and result.error_kind == "unknown_tool":
        raise Problem(404, result.error or f'Tool "{name[:200]}" not found')
    return _build_response(request, host, result)


async def _conceal_addresses(call: Coroutine[Any, Any, ToolResult], args: Any) -> ToolResult:
    result = await call
    conceal_addresses(result, args)
    return result


async def _run_while_connected(
    request: Request, host: GatewayCallHost, call: Coroutine[Any, Any, ToolResult]
) -> ToolResult:
    """Runs a call while the client is connected.

    If the client disconnects, the call is cancelled; results from elsewhere then go to the agent's inbox.
    """
    task = asyncio.current_task()
    assert task is not None
    is_disconnected = False

    async def cancel_on_disconnect() -> None:
        nonlocal is_disconnected
        await request.wait_for_disconnect()
        is_disconnected = True
        task.cancel()

    watcher = asyncio.create_task(cancel_on_disconnect())
    try:
        result = await call
    except asyncio.CancelledError:
        if not is_disconnected:
            raise
        task.uncancel()
        request.gateway.pending_calls.mark_undelivered(host.inline_call_ids)
        raise Problem(499, "The client disconnected") from None
    finally:
        watcher.cancel()
    if is_disconnected:
        task.uncancel()
        call_ids, host.inline_call_ids = host.inline_call_ids, []  # The client does not get the response.
        request.gateway.pending_calls.mark_undelivered(call_ids)
    return result


async def _find_earlier_response(
    request: Request, call_id: str | None, run_id: str | None, name: str, args: Any
) -> Response | None:
    """Returns the response for a call that was already made with this id, or None. Raises `Problem` 409."""
    if call_id is None:
        return None
    gateway = request.gateway
    call = await gateway.ledger.read(call_queries.find, call_id)
    if call is None:
        return None
    tool = gateway.toolspace.find_tool(name)
    is_same_tool = call.run_id == run_id and call.tool_name in (name, tool.name if tool is not None else name)
    if not is_same_tool or not _has_same_arguments(call, args):
        raise Problem(409, f'Call id "{call_id}" belongs to another call; use a new id for each call')
    if call.status in _UNRESOLVED and not call.is_async:
        seconds = tool.timeout if tool is not None and tool.timeout is not None else TOOL_TIMEOUT_SECONDS
        call = await gateway.pending_calls.wait_for_result(call_id, min(seconds, _MAX_WAIT_SECONDS))
    # A result from elsewhere goes either to the inbox or to this caller; one that was computed here is always readable.
    may_return = call.status not in _UNRESOLVED and (
        call.execution_target == "server" or await gateway.ledger.write(claim_result, call_id)
    )
    if not may_return:
        data = {"ok": True, "status": "pending", PENDING_CALL_KEY: call.call_id, "callId": call.call_id}
        return Response({**data, "tool": call.tool_name, "callStatus": call.status}, status=202)
    return Response(_rebuild_result(call).to_dict())


def _rebuild_result(call: CallRecord) -> ToolResult:
    if call.status == "canceled":
        result = ToolResult(False, error="the call was canceled", error_kind="canceled")
    else:
        result = result_of(call)
    result.tool, result.call_id = call.tool_name, call.call_id
    if not result.ok and call.error_kind is not None:
        result.error_kind = call.error_kind  # pyright: ignore[reportAttributeAccessIssue]
    result.started_at, result.completed_at = call.created_at, call.resolved_at or call.created_at
    return result


def _has_same_arguments(call: CallRecord, args: Any) -> bool:
    try:
        arguments = json_text.to_json_data(json_text.parse_arguments(args))
    except ValueError:
        return call.args == args
    # The stored arguments may have been converted to fit the schema, so only missing names count as a difference.
    stored_arguments: Any = call.args
    return not isinstance(stored_arguments, dict) or arguments.keys() <= cast("Any", stored_arguments).keys()


def _build_response(request: Request, host: GatewayCallHost, result: ToolResult) -> Response:
    if not result.ok and (storage_error := host.storage_errors.get(result.call_id)) is not None:
        raise storage_error
    data = result.to_dict()
    pending_id = result.extras.get(PENDING_CALL_KEY)
    if pending_id is not None:
        data[PENDING_CALL_KEY] = pending_id
        data["status"] = "pending"
    if host.acknowledgeable_ids:
        data["acknowledge"] = host.acknowledgeable_ids
    pending_calls = request.gateway.pending_calls
    return Response(
        data,
        status=202 if pending_id is not None and result.ok else 200,
        on_sent=(lambda: pending_calls.mark_delivered(host.inline_call_ids)) if host.inline_call_ids else None,
    )


def _get_status(request: Request) -> ServerStatus:
    name = request.params["name"]
    servers = {status.name: status for status in request.gateway.toolspace.list_servers()}
    if name not in servers:
        raise Problem(404, f'MCP server "{name[:200]}" not found{did_you_mean(name, servers)}')
    return servers[name]
