"""Routes of calls: list them, submit and acknowledge their results, cancel them, read their stored outputs.

`tools_and_servers` has the routes that call tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import UNSET, Meta, UnsetType

from toolspace.core import json_text
from toolspace.core.approvals import ApprovalDecision
from toolspace.core.stored_records import CallRecord, CallStatus, ExecutionTarget, ResultSource, Visibility
from toolspace.errors import RefusedError
from toolspace.server.api_types import (
    Cursor,
    Id,
    JsonRequestBody,
    Limit,
    PageQuery,
    Principal,
    QueryParameters,
    ResponseBody,
    ResultPage,
    check_cursor,
)
from toolspace.server.authorization import CALL, RUN, Access, ToolKeyCaller, entity_id_of, get_visible
from toolspace.server.idempotency import submission_key
from toolspace.server.redaction import redact_calls, viewer_of
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, Response
from toolspace.server.routes.approvals import approver_of
from toolspace.server.routing import RouteTable
from toolspace.server.tool_permissions import principal_of
from toolspace.spaces.acknowledgements import acknowledge
from toolspace.spaces.call_transactions import Submission
from toolspace.storage.database import Program, read_page
from toolspace.storage.queries import approvals, call_lists, calls

_STATUSES: tuple[str, ...] = get_args(CallStatus)

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]

routes = RouteTable("calls")
output_routes = RouteTable("outputs")


class CallResponse(CallRecord, frozen=True, kw_only=True):
    """A tool call and its result. `toolCallId`, `startedAt` and `completedAt` repeat other fields."""

    tool_call_id: str
    """The id of the call."""
    started_at: int
    """When the call was made, in Unix milliseconds."""
    completed_at: int | None
    """When the call ended, in Unix milliseconds; null before."""


class RunCallResponse(ResponseBody, frozen=True, kw_only=True):
    """A call of a run. Members see only the first two fields of calls that are not visible."""

    tool_call_id: str
    """The id of the call."""
    tool_name: str
    """The name of the tool."""
    call_id: str | UnsetType = UNSET
    """The id of the call."""
    seq: int | UnsetType = UNSET
    """The number of the call in the run, from 1."""
    args: Any = UNSET
    """The arguments."""
    execution_type: str | UnsetType = UNSET
    """How the tool is executed."""
    execution_target: ExecutionTarget | UnsetType = UNSET
    """Who executes the call: `server`, `client` (a person in the space) or `external` (a worker)."""
    status: CallStatus | UnsetType = UNSET
    """The status of the call."""
    result: Any = UNSET
    """The result: any JSON; `null` and `false` are results too."""
    is_error: bool | UnsetType = UNSET
    """Whether the result is an error."""
    source: ResultSource | UnsetType | None = UNSET
    """Who submitted the result."""
    client_id: str | UnsetType | None = UNSET
    """The client that submitted the result, if it named itself."""
    output_schema: Mapping[str, Any] | UnsetType | None = UNSET
    """The schema of the result that someone else submits."""
    started_at: int | UnsetType = UNSET
    """When the call was made, in Unix milliseconds."""
    completed_at: int | UnsetType | None = UNSET
    """When the call ended, in Unix milliseconds; null before."""


class CallListQuery(PageQuery, frozen=True, kw_only=True):
    status: Annotated[str, Meta(max_length=200, examples=["pending"])] | None = None
    """Only calls with one of these statuses, separated by commas."""
    run_id: Id | None = None
    """Only calls of this run."""
    agent_entity_id: Id | None = None
    """Only calls of this agent."""
    space_id: Id | None = None
    """Only calls in this space."""
    tool_name: ToolName | None = None
    """Only calls of this tool."""
    principal: Principal | None = None
    """Only calls of this principal: an entity, or a key (`key/…`, `tools/…`). Only with a secret key."""


class RunCallListQuery(QueryParameters, frozen=True, kw_only=True):
    limit: Limit = 100
    cursor: Cursor | None = None

    def __post_init__(self) -> None:
        check_cursor(self.cursor, "[0-9]{1,15}")


class ResultBody(msgspec.Struct, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The result of a call that was executed elsewhere."""

    result: Any
    """The result: any JSON; `null` and `false` are results too."""
    is_error: bool = False
    """Whether the result is an error."""
    source: Literal["client", "server"] = "client"
    """Who submits the result; with a token always `client`."""
    client_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None
    """Which client submits the result, such as a browser tab; stored with the call."""


class RunResultBody(ResultBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The result of a call of a run."""

    call_id: Id
    """The id of the call."""


class SpaceResultBody(ResultBody, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The result of a call that is visible in a space."""

    run_id: Id | None = None
    """The run of the call; a call of another run is refused."""
    tool_call_id: Id
    """The id of the call."""


class AcknowledgeCallsBody(JsonRequestBody, frozen=True, kw_only=True):
    """Calls whose results the caller has."""

    call_ids: Annotated[tuple[Id, ...], Meta(min_length=1, max_length=500)]
    """The ids of the calls."""


class RefusedCall(ResponseBody, frozen=True, kw_only=True):
    """A call that was not acknowledged."""

    call_id: str
    """The id of the call."""
    reason: str
    """Why it was not acknowledged: it does not exist, has no result yet, or belongs to someone else."""


class AcknowledgedCalls(ResponseBody, frozen=True, kw_only=True):
    """The result of an acknowledgement."""

    acknowledged_ids: Sequence[str] = msgspec.field(name="acknowledged")
    """The calls whose results are not delivered again."""
    refusals: Sequence[RefusedCall] = msgspec.field(name="refused", default=())
    """Calls that were not acknowledged."""


@routes.add(
    "GET",
    "/api/calls",
    "List calls, newest first",
    access=Access.MEMBER,
    description="With a token: the visible calls in the spaces of the entity. "
    "Pending calls: `?status=waiting,pending`.",
    query=CallListQuery,
    response=ResultPage[CallResponse],
)
async def list_calls(request: Request) -> dict[str, Any]:
    query = request.query(CallListQuery)
    statuses = _parse_statuses(query.status)
    member = entity_id_of(request.caller)
    if query.principal is not None and member is not None:
        raise Problem(403, "principal requires a secret key; remove it", path="$.principal")

    def read(last: CallRecord | None, limit: int) -> Program[list[CallRecord]]:
        return call_lists.list_calls(
            statuses=statuses,
            run_id=query.run_id,
            agent_entity_id=query.agent_entity_id,
            space_id=query.space_id,
            member=member,
            tool_name=query.tool_name,
            principal=query.principal,
            before=query.cursor if last is None else last.call_id,
            limit=limit,
        )

    records, has_more = await request.read(read_page, read, _size, query.limit)
    return {"items": [call.wire() for call in records], "next": records[-1].call_id if has_more else None}


@routes.add("GET", "/api/calls/{callId}", "Get a call and its result", access=Access.MEMBER, response=CallResponse)
async def get_call(request: Request) -> dict[str, Any]:
    return (await get_visible(request, CALL)).wire()


@routes.add(
    "GET",
    "/api/runs/{runId}/calls",
    "List the calls of a run, in order",
    access=Access.MEMBER,
    tag="runs",
    description="With a token: only the id and the tool name of calls that are not visible.",
    query=RunCallListQuery,
    response=ResultPage[RunCallResponse],
)
async def list_run_calls(request: Request) -> dict[str, Any]:
    query = request.query(RunCallListQuery)
    start = int(query.cursor or 0)
    run = await get_visible(request, RUN)

    def read(last: tuple[CallRecord, Visibility] | None, limit: int) -> Program[list[tuple[CallRecord, Visibility]]]:
        return calls.list_of_run(run.id, after=start if last is None else last[0].seq, limit=limit)

    records, has_more = await request.read(read_page, read, lambda item: _size(item[0]), query.limit)
    next_cursor = str(records[-1][0].seq) if has_more else None
    return {"items": redact_calls(records, viewer_of(request.caller)), "next": next_cursor}


_SUBMISSION: dict[str, Any] = {
    "access": Access.MEMBER,
    "response": CallResponse,
    "error_statuses": (403, 404, 409, 422),
    "description": "A result that does not match the output schema of the tool is refused with 422; `errors` lists "
    "the `path` and the `message` of each mismatch. The call stays open. Errors (`isError`) are not checked.",
    "headers": {"Idempotency-Key": "A submission with the same key gets the first response again."},
}


@routes.add(
    "POST",
    "/api/runs/{runId}/tool-results",
    "Submit the result of a call of a run",
    tag="runs",
    body=RunResultBody,
    **_SUBMISSION,
)
async def submit_run_result(request: Request) -> bytes:
    body = await request.json(RunResultBody)
    return await _submit(request, body.call_id, body, run_id=request.params["runId"])


@routes.add(
    "POST",
    "/api/spaces/{spaceId}/tool-results",
    "Submit the result of a call that is visible in a space",
    tag="spaces",
    body=SpaceResultBody,
    **_SUBMISSION,
)
async def submit_space_result(request: Request) -> bytes:
    body = await request.json(SpaceResultBody)
    return await _submit(request, body.tool_call_id, body, run_id=body.run_id, space_id=request.params["spaceId"])


@routes.add("POST", "/api/calls/{callId}/result", "Submit the result of a call", body=ResultBody, **_SUBMISSION)
async def submit_call_result(request: Request) -> bytes:
    body = await request.json(ResultBody)
    return await _submit(request, request.params["callId"], body)


@routes.add("POST", "/api/calls/{callId}/cancel", "Cancel a call", error_statuses=(404, 409))
async def cancel_call(request: Request) -> dict[str, Any]:
    gateway = request.gateway
    call_id = request.params["callId"]
    try:
        return (await gateway.pending_calls.cancel(call_id)).wire()
    except RefusedError as error:
        # A call outside a run is not stored; if it runs in this process, it is cancelled.
        if error.reason == "not_found" and gateway.toolspace.cancel(call_id):
            return {"callId": call_id, "status": "canceled"}
        raise


@routes.add(
    "POST",
    "/api/calls/{callId}/ack",
    "Acknowledge the result of a call",
    access=Access.TOOLS,
    description="The caller has the result of the call: it is never delivered again, and an inbox event with it is "
    "removed. A repeated request has no further effect. With a tool key: only calls of this key.",
    response=AcknowledgedCalls,
    error_statuses=(403, 404, 409),
)
async def acknowledge_call(request: Request) -> AcknowledgedCalls:
    call_id = request.params["callId"]
    await request.ledger.write(acknowledge, call_id, _own_principal(request))
    return AcknowledgedCalls(acknowledged_ids=[call_id])


@routes.add(
    "POST",
    "/api/calls/ack",
    "Acknowledge the results of several calls",
    access=Access.TOOLS,
    description="As `POST /api/calls/{callId}/ack`, for many calls in one request. Calls that cannot be acknowledged "
    "do not prevent the others: `refused` lists them.",
    body=AcknowledgeCallsBody,
    response=AcknowledgedCalls,
)
async def acknowledge_calls(request: Request) -> AcknowledgedCalls:
    body = await request.json(AcknowledgeCallsBody)
    return await request.ledger.write(_acknowledge_all, list(dict.fromkeys(body.call_ids)), _own_principal(request))


def _acknowledge_all(call_ids: Sequence[str], principal: str | None) -> Program[AcknowledgedCalls]:
    acknowledged_ids: list[str] = []
    refusals: list[RefusedCall] = []
    for call_id in sorted(call_ids):  # Sorted, so that two writers cannot deadlock.
        try:
            yield from acknowledge(call_id, principal)
        except RefusedError as error:
            refusals.append(RefusedCall(call_id=call_id, reason=str(error)))
        else:
            acknowledged_ids.append(call_id)
    return AcknowledgedCalls(acknowledged_ids=acknowledged_ids, refusals=refusals)


def _own_principal(request: Request) -> str | None:
    """The principal of the only calls that the caller may acknowledge; None if it may acknowledge all."""
    return principal_of(request.caller) if isinstance(request.caller, ToolKeyCaller) else None


async def _submit(
    request: Request, call_id: str, body: ResultBody, *, run_id: str | None = None, space_id: str | None = None
) -> bytes:
    entity_id = entity_id_of(request.caller)
    if (response := await _decide_by_result(request, call_id, body.result)) is not None:
        return response
    submission = Submission(
        call_id=call_id,
        result=body.result,
        is_error=body.is_error,
        source=body.source if entity_id is None else "client",
        run_id=run_id,
        space_id=space_id,
        entity_id=entity_id,
        key=submission_key(request),
        client_id=body.client_id,
    )
    return (await request.gateway.pending_calls.submit(submission)).wire_text()


async def _decide_by_result(request: Request, call_id: str, result: Any) -> bytes | None:
    """Takes `{"confirmed": false}`, the result of a confirmation, as the decision about a call that needs approval."""
    if not isinstance(result, dict):
        return None
    is_confirmed, reason = cast("Any", result).get("confirmed"), cast("Any", result).get("reason")
    if not isinstance(is_confirmed, bool):
        return None
    approval = await request.read(approvals.find, call_id)
    if approval is None or approval.status != "requested":
        return None
    decision = ApprovalDecision(is_confirmed, reason if isinstance(reason, str) else None)
    await request.gateway.approvals.decide(call_id, decision, approver_of(request.caller))
    call = await request.read(calls.find, call_id)
    assert call is not None
    return call.wire_text()


def _size(call: CallRecord) -> int:
    return json_text.encoded_size(call.args) + json_text.encoded_size(call.result)


def _parse_statuses(text: str | None) -> list[str]:
    if text is None:
        return []
    statuses = list(dict.fromkeys(text.split(",")))
    for status in statuses:
        if status not in _STATUSES:
            raise Problem(400, f'Unknown status "{status}"; known: {", ".join(_STATUSES)}', path="$.status")
    return statuses


# Stored outputs

MAX_BYTES = 16 * 1024 * 1024
"""Limit of one response. The text is read at once, so that a slow client keeps no file open."""


class OutputQuery(QueryParameters, frozen=True, kw_only=True):
    max_bytes: Annotated[int, Meta(ge=1, le=MAX_BYTES)] = MAX_BYTES
    """Maximum number of bytes; the rest is cut off."""


@output_routes.add(
    "GET",
    "/api/outputs/{session}/{outputId}",
    "Get a stored output",
    description="The path is the handle in the tool's result. `x-output-bytes` is the size of the whole output.",
    parameter_descriptions={"session": "The part of the handle before the slash."},
    query=OutputQuery,
    media_type="text/plain",
)
async def get_output(request: Request) -> Response:
    query = request.query(OutputQuery)
    handle = f"{request.params['session']}/{request.params['outputId']}"
    outputs = request.gateway.toolspace.outputs
    output = await outputs.inspect(handle)
    if output is None:
        raise Problem(404, f'Stored output "{handle[:200]}" not found; it may have expired')
    text = await outputs.text(output, limit=query.max_bytes)
    headers = (
        (b"x-output-tool", output.tool.encode("ascii", "replace")),
        (b"x-output-bytes", b"%d" % output.bytes),
        (b"x-output-lines", b"%d" % output.lines),
    )
    # Always text/plain: a browser must not run a tool's result as a page or script of this server.
    return Response(text, media_type="text/plain; charset=utf-8", headers=headers)
