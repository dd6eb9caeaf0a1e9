"""Routes for runs: opened, looked at, closed and canceled. Calls in a run are made elsewhere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from toolspace.core.records import RunRecord, RunStatus
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
from toolspace.server.authorization import Access, EntityCaller, get_visible_run
from toolspace.server.idempotency import run_once
from toolspace.server.redaction import redact_run
from toolspace.server.requests import Request
from toolspace.server.responses import Response
from toolspace.server.routing import Route
from toolspace.spaces import runs
from toolspace.storage.queries import runs as run_rows

_MAX_ERROR = 10_000


class NewRun(JsonRequestBody, frozen=True, kw_only=True):
    """A think cycle to begin."""

    agent_entity_id: Id
    space_id: Annotated[Id, Meta(description="The active space: where visible calls show.")] | None = None
    trigger: Annotated[Any, Meta(description=f"What it is about; up to {MAX_DATA} bytes of JSON.")] = None
    id: NewId | None = None

    def __post_init__(self) -> None:
        check_json_size("trigger", self.trigger, MAX_DATA)


class RunEnd(JsonRequestBody, frozen=True, kw_only=True):
    """How a run ended."""

    status: Literal["completed", "failed"] = "completed"
    error: Annotated[str, Meta(max_length=_MAX_ERROR, pattern="^[^\\u0000]*$")] | None = None
    usage: Annotated[dict[str, Any], Meta(description="What it cost: tokens, money.")] | None = None

    def __post_init__(self) -> None:
        check_json_size("usage", self.usage, MAX_DATA)


class AgentRunListQuery(PageQuery, frozen=True, kw_only=True):
    status: RunStatus | None = None


class RunListQuery(AgentRunListQuery, frozen=True, kw_only=True):
    agent_entity_id: Id | None = None
    space_id: Id | None = None


class RunShape(ResponseBody, frozen=True, kw_only=True):
    """A run as members see it; an operator also sees why it began, what it cost and how it failed."""

    id: str
    agent_entity_id: str
    space_id: str | None
    status: RunStatus
    steps: int
    created_at: int
    completed_at: int | None
    trigger: Any = msgspec.UNSET
    usage: dict[str, Any] | msgspec.UnsetType = msgspec.UNSET
    error: str | msgspec.UnsetType | None = msgspec.UNSET


async def create_run(request: Request) -> Response:
    body = await request.json(NewRun)
    return await run_once(
        request,
        lambda effects: runs.open_run(
            effects, body.agent_entity_id, run_id=body.id, space_id=body.space_id, trigger=body.trigger
        ),
    )


async def list_runs(request: Request) -> ResultPage[RunRecord]:
    query = request.query(RunListQuery)
    found = await request.gateway.ledger.read(
        run_rows.list_runs,
        agent_entity_id=query.agent_entity_id,
        space_id=query.space_id,
        status=query.status,
        before=query.cursor,
        limit=query.limit + 1,
    )
    return build_page(found, query.limit, lambda run: run.id)


async def get_run(request: Request) -> dict[str, Any]:
    run = await get_visible_run(request.gateway.ledger, request.caller, request.params["runId"])
    return redact_run(run, "public" if isinstance(request.caller, EntityCaller) else "secret")


async def close_run(request: Request) -> RunRecord:
    body = await request.json(RunEnd)
    run_id = request.params["runId"]
    run = await request.gateway.ledger.commit(runs.close_run, run_id, body.status, error=body.error, usage=body.usage)
    request.gateway.open_runs.remove(run_id)
    return run


async def cancel_run(request: Request) -> RunRecord:
    return await request.gateway.ledger.commit(runs.cancel_run, request.params["runId"])


ROUTES = [
    Route(
        method="POST",
        path="/api/runs",
        handler=create_run,
        access=Access.SECRET,
        tag="runs",
        summary="Open a run of an agent",
        description="For a program with a model loop of its own: it calls tools in the run, and closes it. "
        "The id of a run that the agent has already gives that run.",
        body=NewRun,
        response=RunRecord,
        status=201,
        accepts_idempotency_key=True,
        error_statuses=(404,),
    ),
    Route(
        method="GET",
        path="/api/runs",
        handler=list_runs,
        access=Access.SECRET,
        tag="runs",
        summary="List runs, newest first",
        query=RunListQuery,
        response=ResultPage[RunRecord],
    ),
    Route(
        method="GET",
        path="/api/runs/{runId}",
        handler=get_run,
        access=Access.MEMBER,
        tag="runs",
        summary="One run",
        description="With a token: a run in a space of the entity, without its trigger, usage and error.",
        response=RunShape,
    ),
    Route(
        method="POST",
        path="/api/runs/{runId}/close",
        handler=close_run,
        access=Access.SECRET,
        tag="runs",
        summary="End a run",
        description="Calls that wait for someone stay open; their results go to the agent's inbox.",
        body=RunEnd,
        response=RunRecord,
        error_statuses=(409,),
    ),
    Route(
        method="POST",
        path="/api/runs/{runId}/cancel",
        handler=cancel_run,
        access=Access.SECRET,
        tag="runs",
        summary="Cancel a run and its calls",
        response=RunRecord,
        error_statuses=(409,),
    ),
]
