"""Routes that show calls: all of them, those of a run, one. Calling and answering is in `calling`."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from msgspec import UNSET, Meta, UnsetType

from toolspace.core import json_text
from toolspace.core.records import CallRecord, CallStatus, ExecutionTarget, ResultSource, Visibility
from toolspace.server.api_types import Id, Limit, PageQuery, QueryParameters, ResponseBody, ResultPage
from toolspace.server.authorization import Access, EntityCaller, get_visible_call, get_visible_run
from toolspace.server.problems import Problem
from toolspace.server.redaction import redact_calls
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.storage.database import Program, read_page
from toolspace.storage.queries import calls

_STATUSES: tuple[str, ...] = get_args(CallStatus)
_MOST = 2**53

_Exposed = tuple[CallRecord, Visibility]

ToolName = Annotated[str, Meta(min_length=1, max_length=256)]


class CallResponse(CallRecord, frozen=True, kw_only=True):
    """One tool call and its result. `toolCallId`, `startedAt` and `completedAt` say again what is there already."""

    tool_call_id: str
    started_at: int
    completed_at: int | None


class RunCallResponse(ResponseBody, frozen=True, kw_only=True):
    """A call of a run. Of one that is the agent's own, members see the first two."""

    tool_call_id: str
    tool_name: str
    call_id: str | UnsetType = UNSET
    seq: int | UnsetType = UNSET
    args: Any = UNSET
    execution_type: str | UnsetType = UNSET
    execution_target: ExecutionTarget | UnsetType = UNSET
    status: CallStatus | UnsetType = UNSET
    result: Any = UNSET
    is_error: bool | UnsetType = UNSET
    source: ResultSource | UnsetType | None = UNSET
    started_at: int | UnsetType = UNSET
    completed_at: int | UnsetType | None = UNSET


class CallListQuery(PageQuery, frozen=True, kw_only=True):
    status: (
        Annotated[str, Meta(max_length=200, description="One or more, with commas.", examples=["pending"])] | None
    ) = None
    run_id: Id | None = None
    agent_entity_id: Id | None = None
    space_id: Id | None = None
    tool_name: ToolName | None = None


class RunCallListQuery(QueryParameters, frozen=True, kw_only=True):
    limit: Limit = 100
    cursor: Annotated[int, Meta(ge=0, le=_MOST, description="`next` of the page before.")] = 0


async def list_calls(request: Request) -> dict[str, Any]:
    query = request.query(CallListQuery)
    caller = request.caller
    wanted = _statuses(query.status)

    def read(last: CallRecord | None, limit: int) -> Program[list[CallRecord]]:
        return calls.list_calls(
            statuses=wanted,
            run_id=query.run_id,
            agent_entity_id=query.agent_entity_id,
            space_id=query.space_id,
            member=caller.entity_id if isinstance(caller, EntityCaller) else None,
            tool_name=query.tool_name,
            before=query.cursor if last is None else last.call_id,
            limit=limit,
        )

    shown, more = await request.gateway.ledger.read(read_page, read, _size, query.limit)
    return {"items": [call.wire() for call in shown], "next": shown[-1].call_id if more else None}


async def get_call(request: Request) -> dict[str, Any]:
    return (await get_visible_call(request.gateway.ledger, request.caller, request.params["callId"])).wire()


async def list_calls_of_run(request: Request) -> dict[str, Any]:
    query = request.query(RunCallListQuery)
    run = await get_visible_run(request.gateway.ledger, request.caller, request.params["runId"])

    def read(last: _Exposed | None, limit: int) -> Program[list[_Exposed]]:
        return calls.list_of_run(run.id, after=query.cursor if last is None else last[0].seq, limit=limit)

    shown, more = await request.gateway.ledger.read(read_page, read, lambda one: _size(one[0]), query.limit)
    following = str(shown[-1][0].seq) if more else None
    audience = "public" if isinstance(request.caller, EntityCaller) else "secret"
    return {"items": redact_calls(shown, audience), "next": following}


def _size(call: CallRecord) -> int:
    return json_text.encoded_size(call.args) + json_text.encoded_size(call.result)


def _statuses(text: str | None) -> list[str]:
    if text is None:
        return []
    wanted = list(dict.fromkeys(text.split(",")))
    for status in wanted:
        if status not in _STATUSES:
            known = ", ".join(_STATUSES)
            raise Problem(400, f'"{status}" is no status of a call; there are {known}', path="$.status")
    return wanted


ROUTES = [
    Route(
        method="GET",
        path="/api/calls",
        handler=list_calls,
        access=Access.MEMBER,
        tag="calls",
        summary="List calls, newest first",
        description="With a token: visible ones in spaces of the entity. "
        "What waits for someone: `?status=waiting,pending`.",
        query=CallListQuery,
        response=ResultPage[CallResponse],
    ),
    Route(
        method="GET",
        path="/api/calls/{callId}",
        handler=get_call,
        access=Access.MEMBER,
        tag="calls",
        summary="One call and its result",
        response=CallResponse,
    ),
    Route(
        method="GET",
        path="/api/runs/{runId}/calls",
        handler=list_calls_of_run,
        access=Access.MEMBER,
        tag="runs",
        summary="The calls of a run, in their order",
        description="With a token: of calls that are the agent's own, the id and the tool's name alone.",
        query=RunCallListQuery,
        response=ResultPage[RunCallResponse],
    ),
]
