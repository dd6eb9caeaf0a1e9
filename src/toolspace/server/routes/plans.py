"""Routes of the plans of an agent: instructions that it gets at a time or on a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from toolspace.agents.prebuilt.plans import MAX_PLAN_TEXT, MAX_PLANS_PER_CALL
from toolspace.server.api_types import Id, JsonRequestBody, QueryParameters, ResponseBody, ResultPage
from toolspace.server.authorization import Access
from toolspace.server.problems import not_found
from toolspace.server.requests import Request
from toolspace.server.routes.agents import get_agent_id
from toolspace.server.routing import Route
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.plans import Plan, PlanStatus

_PLANS = "/api/agents/{agentId}/plans"
_TAG = "agents"
_SHORT_TEXT = Meta(min_length=1, max_length=200, pattern="^[^\\u0000]+$")


class PlanBody(JsonRequestBody, frozen=True, kw_only=True):
    """A plan to add, or, with an `id`, to change. It has exactly one of `runAfter`, `scheduledAt` and `cron`."""

    name: Annotated[str, _SHORT_TEXT]
    """The name of the plan."""
    instruction: Annotated[str, Meta(min_length=1, max_length=MAX_PLAN_TEXT, pattern="^[^\\u0000]+$")]
    """What the agent is told when the plan runs."""
    id: Id | None = None
    """The plan to change."""
    run_after: Annotated[str, _SHORT_TEXT, Meta(examples=["2 hours"])] | None = None
    """Runs once after this time."""
    scheduled_at: Annotated[str, _SHORT_TEXT, Meta(examples=["2027-03-01T08:00:00Z"])] | None = None
    """Runs once at this time."""
    cron: Annotated[str, _SHORT_TEXT, Meta(examples=["0 9 * * *"])] | None = None
    """Runs repeatedly: a cron expression of five fields."""
    timezone: Annotated[str, _SHORT_TEXT, Meta(examples=["Europe/Berlin"])] | None = None
    """The time zone of times without an offset."""

    def to_plan(self) -> NewPlan:
        return NewPlan(**{field: getattr(self, field) for field in NewPlan.__struct_fields__})


class PlanBodies(JsonRequestBody, frozen=True, kw_only=True):
    """Plans to add or change."""

    plans: Annotated[list[PlanBody], Meta(min_length=1, max_length=MAX_PLANS_PER_CALL)]
    """The plans to add, and, with an `id`, those to change."""


class PlanListQuery(QueryParameters, frozen=True, kw_only=True):
    status: PlanStatus | None = None
    """Only plans with this status."""


class DeletedPlansResponse(ResponseBody, frozen=True, kw_only=True):
    """The result of a deletion."""

    deleted: int
    """How many plans were deleted."""


async def list_plans(request: Request) -> ResultPage[Plan]:
    query = request.query(PlanListQuery)
    agent_id = await get_agent_id(request)
    return ResultPage(
        items=await request.gateway.ledger.read(rows.list_plans, agent_id, status=query.status), next=None
    )


async def set_plans(request: Request) -> ResultPage[Plan]:
    body = await request.json(PlanBodies)
    agent_id = await get_agent_id(request)

    def update(effects: Effects) -> Program[Sequence[Plan]]:
        yield from plans.set_plans(effects, agent_id, [plan.to_plan() for plan in body.plans])
        return (yield from rows.list_plans(agent_id))

    return ResultPage(items=await request.gateway.ledger.commit(update), next=None)


async def delete_plan(request: Request) -> DeletedPlansResponse:
    agent_id = await get_agent_id(request)
    plan_id = request.params["planId"]
    if not await request.gateway.ledger.write(rows.delete, agent_id, [plan_id]):
        raise not_found("Plan", plan_id)
    return DeletedPlansResponse(deleted=1)


ROUTES = [
    Route(
        method="GET",
        path=_PLANS,
        handler=list_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="List the plans of an agent, next run first",
        query=PlanListQuery,
        response=ResultPage[Plan],
    ),
    Route(
        method="PUT",
        path=_PLANS,
        handler=set_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="Add or change plans of an agent, all or none",
        body=PlanBodies,
        response=ResultPage[Plan],
    ),
    Route(
        method="DELETE",
        path=_PLANS + "/{planId}",
        handler=delete_plan,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete a plan of an agent",
        response=DeletedPlansResponse,
    ),
]
