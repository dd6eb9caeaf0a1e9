"""The routes that call tools and take their results in: alone, in a run, or from whoever executed them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Annotated, Any, Literal

import msgspec

from toolspace.core import json_text
from toolspace.core.context import ToolContext
from toolspace.core.defaults import TOOL_TIMEOUT_SECONDS
from toolspace.core.ids import derived_id
from toolspace.core.records import OPEN_CALL, CallRecord
from toolspace.core.result import PENDING_CALL_KEY, ToolResult
from toolspace.errors import ErrorKind, RefusedError
from toolspace.orchestrator.run import Run
from toolspace.server.api_types import Id, NewId, ResponseBody
from toolspace.server.authorization import Access, EntityCaller, ToolKeyCaller
from toolspace.server.call_stream import CallStream
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.responses import Response, StreamingResponse
from toolspace.server.routes.calls import CallResponse
from toolspace.server.routing import Route
from toolspace.spaces.call_host import GatewayCallHost
from toolspace.spaces.call_transactions import Submission
from toolspace.spaces.pending_calls import result_of
from toolspace.storage.queries import calls as call_rows
from toolspace.storage.queries import runs as run_rows

_LONGEST_KEY = 255


class CallBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What to call a tool with."""

    args: dict[str, Any] | str | None = None
    """The arguments: an object, or the JSON text that a model sent."""
    call_id: NewId | None = None
    """An id of the caller's own. The same call sent again under it is not made again."""


class RunCallBody(CallBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    turn: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    """The turn of the model that asks; a higher one than before begins a new turn."""


class ResultBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The result of a call, from whoever executed it. `null` and `false` are results."""

    result: Any
    is_error: bool = False
    source: Literal["client", "server"] = "client"


class RunResultBody(ResultBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    call_id: Id


class SpaceResultBody(ResultBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    run_id: Id
    tool_call_id: Id


class CallToolResponse(ResponseBody, frozen=True, kw_only=True):
    """What became of a call. A failure is an answer too: `ok` is false, and `errorKind` says who should act next."""

    ok: Annotated[bool, msgspec.Meta(description="Whether it went well; a pending call did so far.")]
    tool: Annotated[str, msgspec.Meta(description="The tool, under its full name.")]
    call_id: str
    result: Annotated[Any, msgspec.Meta(description="What the tool gave.")] = None
    error: Annotated[str, msgspec.Meta(description="Why it failed, for a model to read.")] | None = None
    error_kind: ErrorKind | None = None
    executed: Annotated[bool, msgspec.Meta(description="Whether the effect may have happened.")] = True
    started_at: float = 0
    completed_at: float = 0
    duration_ms: Annotated[float, msgspec.Meta(description="How long it took.")] = 0
    kind: Annotated[str, msgspec.Meta(description="Where the tool comes from.")] = ""
    namespace: Annotated[str, msgspec.Meta(description="The server or service that it belongs to.")] = ""
    content: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(description="The result as typed parts.")] = ()
    extras: Annotated[dict[str, Any], msgspec.Meta(description="What else is known of it.")] | msgspec.UnsetType = (
        msgspec.UNSET
    )
    status: Annotated[Literal["pending"], msgspec.Meta(description="Where the result comes later.")] | None = None
    pending_tool_call_id: (
        Annotated[str, msgspec.Meta(description="Where the result comes later: the id of the call to ask for.")] | None
    ) = None


async def call_tool(request: Request) -> Response | StreamingResponse:
    """Runs one tool outside a run."""
    gateway = request.gateway
    body = await request.json(CallBody)
    name = request.params["name"]
    caller = request.caller
    agent = caller.agent_entity_id if isinstance(caller, ToolKeyCaller) else None
    if isinstance(caller, ToolKeyCaller) and body.call_id is not None:
        # The ids of a key's calls are its own: by naming one, nobody finds another's call and takes its result.
        body.call_id = derived_id("call", caller.key_id, body.call_id)
    room = GatewayCallHost(gateway.pending_calls, agent_entity_id=agent)
    if (known := await _known_call(request, body.call_id, None, name, body.args)) is not None:
        return known
    if "text/event-stream" in (request.header("accept") or ""):
        return CallStream(
            gateway.toolspace, lambda call_id: _make(request, name, body, room, call_id), room, body.call_id
        )
    result = await _while_connected(request, room, _make(request, name, body, room))
    if result.error_kind == "unknown_tool":
        raise _no_tool(result)
    return _answer(request, room, result)


async def call_in_run(request: Request) -> Response | StreamingResponse:
    """Calls a tool in a run: under its limits, in its space, and written down."""
    gateway = request.gateway
    body = await request.json(RunCallBody)
    run_id = request.params["runId"]
    if (known := await _known_call(request, body.call_id, run_id, body.name, body.args)) is not None:
        return known
    record, run = await gateway.open_runs.enter(run_id)
    if body.turn is not None and run.turn < body.turn:
        run.turn = body.turn - 1
        run.next_turn()
        await gateway.ledger.write(run_rows.advance_step, run_id, body.turn)
    room = GatewayCallHost(
        gateway.pending_calls, run_id=run_id, agent_entity_id=record.agent_entity_id, space_id=record.space_id
    )
    if "text/event-stream" in (request.header("accept") or ""):
        return CallStream(
            gateway.toolspace,
            lambda call_id: _make(request, body.name, body, room, call_id, run=run),
            room,
            body.call_id,
        )
    result = await _while_connected(request, room, _make(request, body.name, body, room, run=run))
    return _answer(request, room, result)


async def submit_to_run(request: Request) -> Any:
    body = await request.json(RunResultBody)
    submission = _submission(request, body.call_id, body, run_id=request.params["runId"])
    return (await request.gateway.pending_calls.submit(submission)).wire_text()


async def submit_to_space(request: Request) -> Any:
    body = await request.json(SpaceResultBody)
    space_id = request.params["spaceId"]
    submission = _submission(request, body.tool_call_id, body, run_id=body.run_id, space_id=space_id)
    return (await request.gateway.pending_calls.submit(submission)).wire_text()


async def submit_to_call(request: Request) -> Any:
    body = await request.json(ResultBody)
    submission = _submission(request, request.params["callId"], body)
    return (await request.gateway.pending_calls.submit(submission)).wire_text()


async def cancel_call(request: Request) -> Any:
    gateway = request.gateway
    call_id = request.params["callId"]
    try:
        return (await gateway.pending_calls.cancel(call_id)).wire()
    except RefusedError as error:
        # One outside a run is not written down; if it runs in this process, it is stopped.
        if error.reason == "not_found" and gateway.toolspace.cancel(call_id):
            return {"callId": call_id, "status": "canceled"}
        raise


def _submission(
    request: Request, call_id: str, body: ResultBody, *, run_id: str | None = None, space_id: str | None = None
) -> Submission:
    caller = request.caller
    entity_id = caller.entity_id if isinstance(caller, EntityCaller) else None
    key = request.header("idempotency-key")
    if key is not None:
        if not 0 < len(key) <= _LONGEST_KEY:
            raise Problem(400, f"an Idempotency-Key has 1 to {_LONGEST_KEY} characters, not {len(key)}")
        key = f"{caller.subject} {key}"
    return Submission(
        call_id=call_id,
        result=body.result,
        is_error=body.is_error,
        source=body.source if entity_id is None else "client",
        run_id=run_id,
        space_id=space_id,
        entity_id=entity_id,
        key=key,
    )


def _make(
    request: Request,
    name: str,
    body: CallBody,
    room: GatewayCallHost,
    call_id: str | None = None,
    *,
    run: Run | None = None,
) -> Coroutine[Any, Any, ToolResult]:
    gateway = request.gateway
    own = gateway.tool_key_policy.context_for(request.caller)
    context = ToolContext(
        user_id=own.user_id if run is None else room.agent_entity_id,
        session_id=own.session_id if run is None else run.session,
        agent_entity_id=room.agent_entity_id,
        space_id=room.space_id,
        host=room,
    )
    return gateway.toolspace.call(name, body.args, context=context, run=run, call_id=call_id or body.call_id)


async def _while_connected(
    request: Request, room: GatewayCallHost, work: Coroutine[Any, Any, ToolResult]
) -> ToolResult:
    """Runs a call for as long as someone waits for it. Who goes away stops it; what others answer goes to the inbox."""
    task = asyncio.current_task()
    gone = False

    async def watch() -> None:
        nonlocal gone
        await request.wait_for_disconnect()
        gone = True
        if task is not None:
            task.cancel()

    watching = asyncio.create_task(watch())
    try:
        result = await work
    except asyncio.CancelledError:
        if not gone or task is None:
            raise
        task.uncancel()
        request.gateway.pending_calls.mark_undelivered(room.inline_call_ids)
        raise Problem(499, "the caller went away") from None
    finally:
        watching.cancel()
    if gone:
        if task is not None:
            task.uncancel()
        inline, room.inline_call_ids = room.inline_call_ids, []  # Whatever is sent now, nobody gets it.
        request.gateway.pending_calls.mark_undelivered(inline)
    return result


async def _known_call(
    request: Request, call_id: str | None, run_id: str | None, name: str, args: Any
) -> Response | None:
    """The answer to a call that was made before under the same id: it is not made again."""
    if call_id is None:
        return None
    gateway = request.gateway
    call = await gateway.ledger.read(call_rows.find, call_id)
    if call is None:
        return None
    tool = gateway.toolspace.find_tool(name)
    same = call.run_id == run_id and call.tool_name in (name, tool.name if tool is not None else name)
    if not same or not _same_arguments(call, args):
        raise Problem(409, f'there is another call "{call_id}"; give each call an id of its own')
    if call.status in (*OPEN_CALL, "running") and not call.is_async:
        seconds = tool.timeout if tool is not None and tool.timeout is not None else TOOL_TIMEOUT_SECONDS
        call = await gateway.pending_calls.wait_for_result(call_id, min(seconds, 600.0))
    ended = call.status not in (*OPEN_CALL, "running")
    # What others answered is the inbox's or this caller's, never both's; what ran here is in the row for whoever asks.
    theirs = ended and (
        call.execution_target == "server" or await gateway.ledger.write(call_rows.claim_result, call_id)
    )
    return _known_answer(call, theirs=theirs)


def _known_answer(call: CallRecord, *, theirs: bool) -> Response:
    if not theirs:
        data = {"ok": True, "status": "pending", PENDING_CALL_KEY: call.call_id, "callId": call.call_id}
        return Response({**data, "tool": call.tool_name, "callStatus": call.status}, status=202)
    result = (
        result_of(call)
        if call.status != "canceled"
        else ToolResult(False, error="the call was canceled", error_kind="canceled")
    )
    result.tool, result.call_id = call.tool_name, call.call_id
    if not result.ok and call.error_kind is not None:
        result.error_kind = call.error_kind  # pyright: ignore[reportAttributeAccessIssue]
    result.started_at, result.completed_at = call.created_at, call.resolved_at or call.created_at
    return Response(result.to_dict())


def _same_arguments(call: CallRecord, args: Any) -> bool:
    try:
        given = json_text.to_json_data(json_text.parse_arguments(args))
    except ValueError:
        return call.args == args
    # What was written down may have been converted to fit the schema: only what is certainly different is refused.
    kept: Any = call.args
    return kept == given or not isinstance(kept, dict) or set(kept) >= set(given)  # pyright: ignore[reportUnknownArgumentType]


def _answer(request: Request, room: GatewayCallHost, result: ToolResult) -> Response:
    if not result.ok and (fault := room.storage_errors.get(result.call_id)) is not None:
        raise fault
    data = result.to_dict()
    pending = result.extras.get(PENDING_CALL_KEY)
    if pending is not None:
        data[PENDING_CALL_KEY] = pending
        data["status"] = "pending"
    desk = request.gateway.pending_calls
    return Response(
        data,
        status=202 if pending is not None and result.ok else 200,
        on_sent=(lambda: desk.mark_delivered(room.inline_call_ids)) if room.inline_call_ids else None,
    )


def _no_tool(result: ToolResult) -> Problem:
    return Problem(404, result.error or "there is no such tool")


_RESULT_PROBLEMS = (403, 404, 409)
_KEY = {"Idempotency-Key": "Makes a repetition of the same submission known as one: it gets the first answer again."}

ROUTES = [
    Route(
        method="POST",
        path="/api/tools/{name}/call",
        handler=call_tool,
        access=Access.TOOLS,
        tag="tools",
        summary="Call a tool",
        description=(
            "Answers with the result; 202 with `pendingToolCallId` where it comes later; with "
            "`Accept: text/event-stream` as events: `tool.progress`, `tool.streaming`, and at the end `result`."
        ),
        body=CallBody,
        response=CallToolResponse,
        other_responses={202: CallToolResponse},
        error_statuses=(403, 404, 409),
    ),
    Route(
        method="POST",
        path="/api/runs/{runId}/calls",
        handler=call_in_run,
        access=Access.SECRET,
        tag="runs",
        summary="Call a tool in a run",
        description="As `POST /api/tools/{name}/call`, under the run's limits and in its space; it is written down.",
        body=RunCallBody,
        response=CallToolResponse,
        other_responses={202: CallToolResponse},
        error_statuses=(404, 409),
    ),
    Route(
        method="POST",
        path="/api/runs/{runId}/tool-results",
        handler=submit_to_run,
        access=Access.MEMBER,
        tag="runs",
        summary="Bring the result of a call of a run",
        body=RunResultBody,
        response=CallResponse,
        error_statuses=_RESULT_PROBLEMS,
        headers=_KEY,
    ),
    Route(
        method="POST",
        path="/api/spaces/{spaceId}/tool-results",
        handler=submit_to_space,
        access=Access.MEMBER,
        tag="spaces",
        summary="Bring the result of a call that is shown in a space",
        body=SpaceResultBody,
        response=CallResponse,
        error_statuses=_RESULT_PROBLEMS,
        headers=_KEY,
    ),
    Route(
        method="POST",
        path="/api/calls/{callId}/result",
        handler=submit_to_call,
        access=Access.MEMBER,
        tag="calls",
        summary="Bring the result of a call, also of one outside a run",
        body=ResultBody,
        response=CallResponse,
        error_statuses=_RESULT_PROBLEMS,
        headers=_KEY,
    ),
    Route(
        method="POST",
        path="/api/calls/{callId}/cancel",
        handler=cancel_call,
        access=Access.SECRET,
        tag="calls",
        summary="Cancel a call",
        response=dict[str, Any],
        error_statuses=(404, 409),
    ),
]
