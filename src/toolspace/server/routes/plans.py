"""Routes for what agents plan, for whoever operates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from toolspace.agents.prebuilt.plans import MAX_PLAN_TEXT, MAX_PLANS_PER_CALL
from toolspace.server.api_types import Id, JsonRequestBody, QueryParameters, ResponseBody, ResultPage
from toolspace.server.authorization import Access, get_visible_agent
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.plans import Plan, PlanStatus

_PLANS = "/api/agents/{agentId}/plans"
_TAG = "agents"
_text = Meta(min_length=1, max_length=200, pattern="^[^\\u0000]+$")


class PlanBody(JsonRequestBody, frozen=True, kw_only=True):
    """A new plan, or with the id of one what it becomes. Exactly one of `runAfter`, `scheduledAt`, `cron` says when."""

    name: Annotated[str, _text]
    instruction: Annotated[str, Meta(min_length=1, max_length=MAX_PLAN_TEXT, pattern="^[^\\u0000]+$")]
    id: Id | None = None
    run_after: Annotated[str, _text, Meta(examples=["2 hours"])] | None = None
    scheduled_at: Annotated[str, _text, Meta(examples=["2027-03-01T08:00:00Z"])] | None = None
    cron: Annotated[str, _text, Meta(examples=["0 9 * * *"])] | None = None
    timezone: Annotated[str, _text, Meta(examples=["Europe/Berlin"])] | None = None

    def new(self) -> NewPlan:
        return NewPlan(**{field: getattr(self, field) for field in NewPlan.__struct_fields__})


class PlanBodies(JsonRequestBody, frozen=True, kw_only=True):
    plans: Annotated[list[PlanBody], Meta(min_length=1, max_length=MAX_PLANS_PER_CALL)]


class PlanListQuery(QueryParameters, frozen=True, kw_only=True):
    status: PlanStatus | None = None


class DeletedPlansResponse(ResponseBody, frozen=True, kw_only=True):
    deleted: int


async def list_plans(request: Request) -> ResultPage[Plan]:
    query = request.query(PlanListQuery)
    agent_id = await _agent(request)
    return ResultPage(
        items=await request.gateway.ledger.read(rows.list_plans, agent_id, status=query.status), next=None
    )


async def set_plans(request: Request) -> ResultPage[Plan]:
    body = await request.json(PlanBodies)
    agent_id = await _agent(request)

    def setting(effects: Effects) -> Program[Sequence[Plan]]:
        yield from plans.set_plans(effects, agent_id, [plan.new() for plan in body.plans])
        return (yield from rows.list_plans(agent_id))

    return ResultPage(items=await request.gateway.ledger.commit(setting), next=None)


async def delete_plan(request: Request) -> DeletedPlansResponse:
    agent_id = await _agent(request)
    plan_id = request.params["planId"]
    if not await request.gateway.ledger.write(rows.delete, agent_id, [plan_id]):
        raise Problem(404, f'the agent has no plan "{plan_id}"')
    return DeletedPlansResponse(deleted=1)


async def _agent(request: Request) -> str:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return agent.id


ROUTES = [
    Route(
        method="GET",
        path=_PLANS,
        handler=list_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="What an agent plans, the next first",
        query=PlanListQuery,
        response=ResultPage[Plan],
    ),
    Route(
        method="PUT",
        path=_PLANS,
        handler=set_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="Make plans for an agent, or change some; all or none",
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
