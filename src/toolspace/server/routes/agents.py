"""Routes of agents. Their inbox, plans, goals, memories, documents and tasks have their own modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from toolspace.agents.prebuilt.goals_memories_plans import (
    MAX_GOAL_TEXT,
    MAX_GOALS_PER_CALL,
    MAX_MEMORY_BYTES,
    MAX_PLAN_TEXT,
    MAX_PLANS_PER_CALL,
    MAX_PRIORITY,
)
from toolspace.core.records import Entity, RunRecord
from toolspace.server.api_types import (
    Id,
    JsonRequestBody,
    PageQuery,
    QueryParameters,
    ResponseBody,
    ResultPage,
    build_page,
    check_json_size,
)
from toolspace.server.authorization import Access, EntityCaller, get_visible_agent
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.responses import not_found
from toolspace.server.routes.runs import AgentRunListQuery
from toolspace.server.routing import Route
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, runs
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange, Memory
from toolspace.storage.queries.plans import Plan, PlanStatus


async def get_agent_id(request: Request) -> str:
    """Returns the path parameter `agentId`. Raises `Problem` 404 or 403 unless the caller may see that agent."""
    return (await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])).id


async def list_agents(request: Request) -> ResultPage[Entity]:
    query = request.query(PageQuery)
    caller = request.caller
    agents = await request.gateway.ledger.read(
        entities_and_spaces.list_entities,
        type="agent",
        sharing_with=caller.entity_id if isinstance(caller, EntityCaller) else None,
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page([redact_entity(agent, caller) for agent in agents], query.limit, lambda agent: agent.id)


async def get_agent(request: Request) -> Entity:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return redact_entity(agent, request.caller)


async def list_agent_runs(request: Request) -> ResultPage[RunRecord]:
    query = request.query(AgentRunListQuery)
    agent_id = await get_agent_id(request)
    records = await request.gateway.ledger.read(
        runs.list_runs, agent_entity_id=agent_id, status=query.status, before=query.cursor, limit=query.limit + 1
    )
    return build_page(records, query.limit, lambda run: run.id)


ROUTES = [
    Route(
        method="GET",
        path="/api/agents",
        handler=list_agents,
        access=Access.MEMBER,
        tag="agents",
        summary="List agents, ordered by id",
        description="With a token: the agents that share a space with the entity, without their metadata.",
        query=PageQuery,
        response=ResultPage[Entity],
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}",
        handler=get_agent,
        access=Access.MEMBER,
        tag="agents",
        summary="Get an agent",
        response=Entity,
    ),
    Route(
        method="GET",
        path="/api/agents/{agentId}/runs",
        handler=list_agent_runs,
        access=Access.SECRET,
        tag="agents",
        summary="List the runs of an agent, newest first",
        query=AgentRunListQuery,
        response=ResultPage[RunRecord],
    ),
]


# MERGED from goals_and_memories: Routes of the goals and memories of an agent, for operators.

_AGENT = "/api/agents/{agentId}"
_TAG = "agents"


class NewGoal(JsonRequestBody, frozen=True, kw_only=True):
    """A goal to add, or, with an `id`, a goal to change; missing fields then stay unchanged."""

    description: Annotated[str, Meta(min_length=1, max_length=MAX_GOAL_TEXT, pattern="^[^\\u0000]+$")]
    """What the agent wants to achieve."""
    id: Id | None = None
    """The goal to change."""
    status: Annotated[str, Meta(min_length=1, max_length=50, pattern="^[^\\u0000]+$", examples=["active"])] | None = (
        None
    )
    """The status, in the agent's own words."""
    priority: Annotated[float, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Goals with a higher priority come first."""
    is_long_term: bool | None = None
    """Whether the goal lasts longer than one task."""
    is_completed: bool | None = None
    """Whether the goal is reached."""

    def to_change(self) -> GoalChange:
        return GoalChange(
            id=self.id,
            description=self.description,
            status=self.status,
            priority=self.priority,
            is_long_term=self.is_long_term,
            is_completed=self.is_completed,
        )


class NewGoals(JsonRequestBody, frozen=True, kw_only=True):
    """Goals to add or change."""

    goals: Annotated[list[NewGoal], Meta(max_length=MAX_GOALS_PER_CALL)]
    """The goals to add, and, with an `id`, those to change."""
    clear_existing: bool = False
    """Whether to delete all other goals."""


class NewMemory(JsonRequestBody, frozen=True, kw_only=True):
    """A value to store under a key."""

    key: Annotated[str, Meta(min_length=1, max_length=200, pattern="^[^\\u0000]+$", examples=["deadline"])]
    """The key of the memory."""
    value: Annotated[Any, Meta(description=f"Any value; up to {MAX_MEMORY_BYTES} bytes of JSON.", examples=["Friday"])]

    def __post_init__(self) -> None:
        check_json_size("value", self.value, MAX_MEMORY_BYTES)


class NewMemories(JsonRequestBody, frozen=True, kw_only=True):
    """Memories to store."""

    memories: Annotated[list[NewMemory], Meta(max_length=MAX_GOALS_PER_CALL)]
    """The values and their keys."""


class DeletedResponse(ResponseBody, frozen=True, kw_only=True):
    """The result of a deletion."""

    deleted: int
    """How many were deleted."""


async def list_goals(request: Request) -> ResultPage[Goal]:
    agent_id = await get_agent_id(request)
    return ResultPage(items=await request.gateway.ledger.read(goals_and_memories.list_goals, agent_id), next=None)


async def set_goals(request: Request) -> ResultPage[Goal]:
    body = await request.json(NewGoals)
    agent_id = await get_agent_id(request)
    changes = [goal.to_change() for goal in body.goals]

    def update() -> Program[Sequence[Goal]]:
        yield from goals_and_memories.set_goals(agent_id, changes, clear=body.clear_existing)
        return (yield from goals_and_memories.list_goals(agent_id))

    return ResultPage(items=await request.gateway.ledger.write(update), next=None)


async def clear_goals(request: Request) -> DeletedResponse:
    agent_id = await get_agent_id(request)

    def delete_all() -> Program[int]:
        goals = yield from goals_and_memories.list_goals(agent_id)
        return (yield from goals_and_memories.delete_goals(agent_id, [goal.id for goal in goals]))

    return DeletedResponse(deleted=await request.gateway.ledger.write(delete_all))


async def delete_goal(request: Request) -> DeletedResponse:
    agent_id = await get_agent_id(request)
    deleted = await request.gateway.ledger.write(goals_and_memories.delete_goals, agent_id, [request.params["goalId"]])
    return DeletedResponse(deleted=deleted)


async def list_memories(request: Request) -> ResultPage[Memory]:
    agent_id = await get_agent_id(request)
    return ResultPage(items=await request.gateway.ledger.read(goals_and_memories.list_memories, agent_id), next=None)


async def set_memories(request: Request) -> ResultPage[Memory]:
    body = await request.json(NewMemories)
    agent_id = await get_agent_id(request)

    def update() -> Program[Sequence[Memory]]:
        yield from goals_and_memories.set_memories(agent_id, [(memory.key, memory.value) for memory in body.memories])
        return (yield from goals_and_memories.list_memories(agent_id))

    return ResultPage(items=await request.gateway.ledger.write(update), next=None)


async def clear_memories(request: Request) -> DeletedResponse:
    agent_id = await get_agent_id(request)

    def delete_all() -> Program[int]:
        memories = yield from goals_and_memories.list_memories(agent_id)
        return (yield from goals_and_memories.delete_memories(agent_id, [memory.key for memory in memories]))

    return DeletedResponse(deleted=await request.gateway.ledger.write(delete_all))


async def delete_memory(request: Request) -> DeletedResponse:
    agent_id = await get_agent_id(request)
    key = request.params["key"]
    # No key has a NUL character, and PostgreSQL would reject it.
    deleted = (
        0 if "\0" in key else await request.gateway.ledger.write(goals_and_memories.delete_memories, agent_id, [key])
    )
    if not deleted:
        raise not_found("Memory", key)
    return DeletedResponse(deleted=deleted)


GOAL_AND_MEMORY_ROUTES = [
    Route(
        method="GET",
        path=f"{_AGENT}/goals",
        handler=list_goals,
        access=Access.SECRET,
        tag=_TAG,
        summary="List the goals of an agent, highest priority first",
        response=ResultPage[Goal],
    ),
    Route(
        method="PUT",
        path=f"{_AGENT}/goals",
        handler=set_goals,
        access=Access.SECRET,
        tag=_TAG,
        summary="Add or change goals of an agent",
        description="All or none: 404 if the agent has no goal with one of the ids. Returns all goals of the agent.",
        body=NewGoals,
        response=ResultPage[Goal],
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/goals",
        handler=clear_goals,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete all goals of an agent",
        response=DeletedResponse,
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/goals/{{goalId}}",
        handler=delete_goal,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete a goal of an agent",
        response=DeletedResponse,
    ),
    Route(
        method="GET",
        path=f"{_AGENT}/memories",
        handler=list_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="List the memories of an agent, ordered by key",
        response=ResultPage[Memory],
    ),
    Route(
        method="PUT",
        path=f"{_AGENT}/memories",
        handler=set_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="Store memories of an agent",
        description="Returns all memories of the agent.",
        body=NewMemories,
        response=ResultPage[Memory],
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/memories",
        handler=clear_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete all memories of an agent",
        response=DeletedResponse,
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/memories/{{key}}",
        parameter_descriptions={"key": "The key of the memory."},
        handler=delete_memory,
        access=Access.SECRET,
        tag=_TAG,
        summary="Delete a memory of an agent",
        response=DeletedResponse,
    ),
]


# MERGED from plans: Routes of the plans of an agent: instructions that it gets at a time or on a schedule.

_PLANS = "/api/agents/{agentId}/plans"
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


PLAN_ROUTES = [
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
