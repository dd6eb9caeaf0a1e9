"""Routes for what agents plan, for whoever operates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from toolspace.agents.prebuilt.plans import MOST_AT_ONCE, MOST_TEXT
from toolspace.server.authorization import sees_agent
from toolspace.server.body_types import Body, Id, Page, Query, Shape
from toolspace.server.callers import Access
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


class PlanBody(Body, frozen=True, kw_only=True):
    """A new plan, or with the id of one what it becomes. Exactly one of `runAfter`, `scheduledAt`, `cron` says when."""

    name: Annotated[str, _text]
    instruction: Annotated[str, Meta(min_length=1, max_length=MOST_TEXT, pattern="^[^\\u0000]+$")]
    id: Id | None = None
    run_after: Annotated[str, _text, Meta(examples=["2 hours"])] | None = None
    scheduled_at: Annotated[str, _text, Meta(examples=["2027-03-01T08:00:00Z"])] | None = None
    cron: Annotated[str, _text, Meta(examples=["0 9 * * *"])] | None = None
    timezone: Annotated[str, _text, Meta(examples=["Europe/Berlin"])] | None = None

    def new(self) -> NewPlan:
        return NewPlan(**{field: getattr(self, field) for field in NewPlan.__struct_fields__})


class PlanBodies(Body, frozen=True, kw_only=True):
    plans: Annotated[list[PlanBody], Meta(min_length=1, max_length=MOST_AT_ONCE)]


class PlanList(Query, frozen=True, kw_only=True):
    status: PlanStatus | None = None


class DeletedPlans(Shape, frozen=True, kw_only=True):
    deleted: int


async def list_plans(request: Request) -> Page[Plan]:
    query = request.query(PlanList)
    agent_id = await _agent(request)
    return Page(items=await request.gateway.ledger.read(rows.listing, agent_id, status=query.status), next=None)


async def set_plans(request: Request) -> Page[Plan]:
    body = await request.json(PlanBodies)
    agent_id = await _agent(request)

    def setting(effects: Effects) -> Program[Sequence[Plan]]:
        yield from plans.set_plans(effects, agent_id, [plan.new() for plan in body.plans])
        return (yield from rows.listing(agent_id))

    return Page(items=await request.gateway.ledger.commit(setting), next=None)


async def delete_plan(request: Request) -> DeletedPlans:
    agent_id = await _agent(request)
    plan_id = request.params["planId"]
    if not await request.gateway.ledger.write(rows.delete, agent_id, [plan_id]):
        raise Problem(404, f'the agent has no plan "{plan_id}"')
    return DeletedPlans(deleted=1)


async def _agent(request: Request) -> str:
    agent = await sees_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return agent.id


ROUTES = [
    Route(
        method="GET",
        path=_PLANS,
        handler=list_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="What an agent plans, the next first",
        query=PlanList,
        answer=Page[Plan],
    ),
    Route(
        method="PUT",
        path=_PLANS,
        handler=set_plans,
        access=Access.SECRET,
        tag=_TAG,
        summary="Make plans for an agent, or change some; all or none",
        body=PlanBodies,
        answer=Page[Plan],
    ),
    Route(
        method="DELETE",
        path=_PLANS + "/{planId}",
        handler=delete_plan,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete a plan of an agent",
        answer=DeletedPlans,
    ),
]
