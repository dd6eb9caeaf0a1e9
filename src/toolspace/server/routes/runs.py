"""Routes of runs. Calls of tools in a run are in `tools_and_servers`, their results in `calls`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from toolspace.core.stored_records import RunRecord, RunStatus
from toolspace.server.api_types import (
    MAX_DATA,
    Id,
    JsonRequestBody,
    NewId,
    PageQuery,
    ResponseBody,
    ResultPage,
    build_page,
    check_json_size,
)
from toolspace.server.authorization import RUN, Access, get_visible
from toolspace.server.idempotency import run_once
from toolspace.server.redaction import redact_run, viewer_of
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import RouteTable
from toolspace.spaces import runs
from toolspace.storage.queries import runs as run_queries

_MAX_ERROR = 10_000

routes = RouteTable("runs")


class NewRun(JsonRequestBody, frozen=True, kw_only=True):
    """A run to open."""

    agent_entity_id: Id
    """The agent that runs."""
    space_id: Id | None = None
    """The active space, where visible calls are shown."""
    trigger: Annotated[Any, Meta(description=f"Why the run starts; up to {MAX_DATA} bytes of JSON.")] = None
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_json_size("trigger", self.trigger, MAX_DATA)


class RunEnd(JsonRequestBody, frozen=True, kw_only=True):
    """The end of a run."""

    status: Literal["completed", "failed"] = "completed"
    """The final status."""
    error: Annotated[str, Meta(max_length=_MAX_ERROR, pattern="^[^\\u0000]*$")] | None = None
    """Why the run failed."""
    usage: dict[str, Any] | None = None
    """What the run cost: tokens, money."""

    def __post_init__(self) -> None:
        check_json_size("usage", self.usage, MAX_DATA)


class AgentRunListQuery(PageQuery, frozen=True, kw_only=True):
    status: RunStatus | None = None
    """Only runs with this status."""


class RunListQuery(AgentRunListQuery, frozen=True, kw_only=True):
    agent_entity_id: Id | None = None
    """Only runs of this agent."""
    space_id: Id | None = None
    """Only runs in this space."""


class RunShape(ResponseBody, frozen=True, kw_only=True):
    """A run. Members of its space do not see `trigger`, `usage`, `error`, `principal` and
    `sessionId`."""

    id: str
    """The id of the run."""
    agent_entity_id: str
    """The agent that runs."""
    space_id: str | None
    """The active space, where visible calls are shown; null for none."""
    status: RunStatus
    """The status of the run."""
    steps: int
    """How many turns of the model the run has had."""
    created_at: int
    """When the run was opened, in Unix milliseconds."""
    completed_at: int | None
    """When the run ended, in Unix milliseconds; null before."""
    trigger: Any = msgspec.UNSET
    """Why the run started."""
    usage: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    """What the run cost, as reported when it was closed."""
    error: str | msgspec.UnsetType | None = msgspec.UNSET
    """Why the run failed."""
    principal: str | msgspec.UnsetType | None = msgspec.UNSET
    """For whom the run works: an entity or a key (`key/…`); null for runs of earlier versions."""
    session_id: str | msgspec.UnsetType | None = msgspec.UNSET
    """The session of the agent that the run belongs to; null for runs of earlier versions."""


@routes.add(
    "POST",
    "/api/runs",
    "Open a run of an agent",
    description="For programs with their own model loop, which call tools in the run and then close it. "
    "If the agent already has a run with this id, that run is returned.",
    body=NewRun,
    creates=RunRecord,
    error_statuses=(404,),
)
async def create_run(request: Request) -> Response:
    body = await request.json(NewRun)
    principal = request.gateway.tool_key_policy.context_for(request.caller).user_id
    return await run_once(
        request,
        lambda effects: runs.open_run(
            effects,
            body.agent_entity_id,
            run_id=body.id,
            space_id=body.space_id,
            trigger=body.trigger,
            principal=principal,
        ),
    )


@routes.add("GET", "/api/runs", "List runs, newest first", query=RunListQuery)
async def list_runs(request: Request) -> ResultPage[RunRecord]:
    query = request.query(RunListQuery)
    records = await request.read(
        run_queries.list_runs,
        agent_entity_id=query.agent_entity_id,
        space_id=query.space_id,
        status=query.status,
        before=query.cursor,
        limit=query.limit + 1,
    )
    return build_page(records, query.limit)


@routes.add(
    "GET",
    "/api/runs/{runId}",
    "Get a run",
    access=Access.MEMBER,
    description="With a token: a run in a space of the entity, without trigger, usage, error, principal and session.",
    response=RunShape,
)
async def get_run(request: Request) -> dict[str, Any]:
    run = await get_visible(request, RUN)
    return redact_run(run, viewer_of(request.caller))


@routes.add(
    "POST",
    "/api/runs/{runId}/close",
    "Close a run",
    description="Pending calls stay open; their results go to the agent's inbox.",
    body=RunEnd,
    error_statuses=(409,),
)
async def close_run(request: Request) -> RunRecord:
    body = await request.json(RunEnd)
    run_id = request.params["runId"]
    run = await request.ledger.commit(runs.close_run, run_id, body.status, error=body.error, usage=body.usage)
    request.gateway.open_runs.remove(run_id)
    return run


@routes.add("POST", "/api/runs/{runId}/cancel", "Cancel a run and its calls", error_statuses=(409,))
async def cancel_run(request: Request) -> RunRecord:
    return await request.ledger.commit(runs.cancel_run, request.params["runId"])
