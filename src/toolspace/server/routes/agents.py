"""Routes of agents, and of their goals, memories and plans. Their inbox, documents and tasks have their own modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from toolspace.agents.prebuilt.goals_memories_plans import (
    MAX_GOAL_METADATA,
    MAX_GOAL_TEXT,
    MAX_GOALS_PER_CALL,
    MAX_MEMORY_BYTES,
    MAX_PLAN_TEXT,
    MAX_PLANS_PER_CALL,
    MAX_PRIORITY,
)
from toolspace.core.ids import agent_of_session
from toolspace.core.stored_records import AgentEntity, Entity, RunRecord
from toolspace.server.api_types import (
    Id,
    JsonRequestBody,
    PageQuery,
    QueryParameters,
    ResponseBody,
    ResultPage,
    build_page,
    check_json_size,
    full_match_pattern,
)
from toolspace.server.authorization import AGENT, Access, entity_id_of, get_visible
from toolspace.server.redaction import redact_entity
from toolspace.server.requests import Request
from toolspace.server.responses import Problem, not_found
from toolspace.server.routes.runs import AgentRunListQuery
from toolspace.server.routing import RouteTable
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import entities_and_spaces, goals_and_memories, runs
from toolspace.storage.queries import plans as plan_queries
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange, Memory
from toolspace.storage.queries.plans import Plan, PlanStatus

T = TypeVar("T")

_NO_NUL = "^[^\\u0000]+$"
_SHORT_TEXT = Meta(min_length=1, max_length=200, pattern=_NO_NUL)
_AGENT = "/api/agents/{agentId}"

routes = RouteTable("agents")


SessionId = Annotated[
    str, Meta(max_length=300, pattern=full_match_pattern("^[A-Za-z0-9_.:@~-]+(/[A-Za-z0-9_.:@~-]+)?$"))
]
"""The id of a session: that of the agent for its main session, or `AGENT/space:ID`, `AGENT/user:ID`."""


class SessionQuery(QueryParameters, frozen=True, kw_only=True):
    session: SessionId | None = None
    """Only what belongs to this session of the agent (`sessionId`)."""


async def get_agent_id(request: Request) -> str:
    """Returns the path parameter `agentId`. Raises `Problem` 404 or 403 unless the caller may see that agent."""
    return (await get_visible(request, AGENT)).id


async def get_session_id(request: Request, session_id: str | None) -> str:
    """Returns a session of the agent of the path, by default its main session. Raises `Problem`."""
    agent_id = await get_agent_id(request)
    if session_id is not None and agent_of_session(session_id) != agent_id:
        raise Problem(400, f'Session "{session_id}" is not of agent "{agent_id}"', path="session")
    return session_id or agent_id


@routes.add(
    "GET",
    "/api/agents",
    "List agents, ordered by id",
    access=Access.MEMBER,
    description="With a token: the agents that share a space with the entity, without their metadata.",
    query=PageQuery,
)
async def list_agents(request: Request) -> ResultPage[AgentEntity]:
    query = request.query(PageQuery)
    agents = await request.read(
        entities_and_spaces.list_entities,
        type="agent",
        sharing_with=entity_id_of(request.caller),
        after=query.cursor or "",
        limit=query.limit + 1,
    )
    return build_page([_to_agent(request, agent) for agent in agents], query.limit)


@routes.add("GET", _AGENT, "Get an agent", access=Access.MEMBER)
async def get_agent(request: Request) -> AgentEntity:
    return _to_agent(request, await get_visible(request, AGENT))


def _to_agent(request: Request, entity: Entity) -> AgentEntity:
    fields = msgspec.structs.asdict(redact_entity(entity, request.caller))
    return AgentEntity(**fields, is_running=request.ledger.waiters.is_waited_for(f"inbox:{entity.id}"))


@routes.add("GET", f"{_AGENT}/runs", "List the runs of an agent, newest first", query=AgentRunListQuery)
async def list_agent_runs(request: Request) -> ResultPage[RunRecord]:
    query = request.query(AgentRunListQuery)
    agent_id = await get_agent_id(request)
    records = await request.read(
        runs.list_runs, agent_entity_id=agent_id, status=query.status, before=query.cursor, limit=query.limit + 1
    )
    return build_page(records, query.limit)


# Goals and memories


class NewGoal(GoalChange, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A goal to add, or, with the `id` of a goal, a change of it; missing fields then stay unchanged."""

    description: Annotated[str, Meta(min_length=1, max_length=MAX_GOAL_TEXT, pattern=_NO_NUL)]
    """What the agent wants to achieve."""
    id: Id | None = None
    """The goal to change, or the id of a new goal."""
    status: Annotated[str, Meta(min_length=1, max_length=50, pattern=_NO_NUL, examples=["active"])] | None = None
    """The status, in the agent's own words."""
    priority: Annotated[float, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    """Goals with a higher priority come first."""
    is_long_term: bool | None = None
    """Whether the goal lasts longer than one task."""
    is_completed: bool | None = None
    """Whether the goal is reached."""
    metadata: dict[str, Any] | None = None
    """Any JSON object. It replaces the previous one."""

    def __post_init__(self) -> None:
        check_json_size("metadata", self.metadata, MAX_GOAL_METADATA)


class NewGoals(JsonRequestBody, frozen=True, kw_only=True):
    """Goals to add or change."""

    goals: Annotated[list[NewGoal], Meta(max_length=MAX_GOALS_PER_CALL)]
    """The goals to add or to change. An `id` that the agent does not have yet adds a goal."""
    clear_existing: bool = False
    """Whether to delete all other goals."""


class NewMemory(JsonRequestBody, frozen=True, kw_only=True):
    """A value to store under a key."""

    key: Annotated[str, _SHORT_TEXT, Meta(examples=["deadline"])]
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


class _ItemKind(msgspec.Struct, Generic[T], frozen=True):
    """Goals or memories: where they are stored, and how they are listed."""

    table: Literal["goals", "memories"]
    list_of_session: Callable[[str], Program[Sequence[T]]]
    list_of_agent: Callable[[str], Program[Sequence[T]]]


_GOALS = _ItemKind[Goal]("goals", goals_and_memories.list_goals, goals_and_memories.list_goals_of_agent)
_MEMORIES = _ItemKind[Memory]("memories", goals_and_memories.list_memories, goals_and_memories.list_memories_of_agent)


@routes.add("GET", f"{_AGENT}/goals", "List the goals of an agent, highest priority first", query=SessionQuery)
async def list_goals(request: Request) -> ResultPage[Goal]:
    return await _list_items(request, _GOALS)


@routes.add(
    "PUT",
    f"{_AGENT}/goals",
    "Add or change goals of an agent",
    description="All or none. An id that the session does not have yet adds a goal. Returns all goals of the session: "
    "the agent's main one, unless `session` names another.",
    body=NewGoals,
    query=SessionQuery,
)
async def set_goals(request: Request) -> ResultPage[Goal]:
    body = await request.json(NewGoals)
    store = partial(goals_and_memories.set_goals, changes=body.goals, clear=body.clear_existing)
    return await _store_items(request, _GOALS, store)


@routes.add(
    "DELETE",
    f"{_AGENT}/goals",
    "Delete all goals of an agent",
    description="Those of all its sessions, or of one (`session`).",
    query=SessionQuery,
)
async def clear_goals(request: Request) -> DeletedResponse:
    return await _delete_items(request, _GOALS)


@routes.add("DELETE", f"{_AGENT}/goals/{{goalId}}", "Delete a goal of an agent", query=SessionQuery)
async def delete_goal(request: Request) -> DeletedResponse:
    session_id = await _get_session_id(request)
    goal_ids = [request.params["goalId"]]
    return DeletedResponse(deleted=await request.ledger.write(goals_and_memories.delete_goals, session_id, goal_ids))


@routes.add("GET", f"{_AGENT}/memories", "List the memories of an agent, ordered by key", query=SessionQuery)
async def list_memories(request: Request) -> ResultPage[Memory]:
    return await _list_items(request, _MEMORIES)


@routes.add(
    "PUT",
    f"{_AGENT}/memories",
    "Store memories of an agent",
    description="Returns all memories of the session: the agent's main one, unless `session` names another.",
    body=NewMemories,
    query=SessionQuery,
)
async def set_memories(request: Request) -> ResultPage[Memory]:
    body = await request.json(NewMemories)
    values = [(memory.key, memory.value) for memory in body.memories]
    return await _store_items(request, _MEMORIES, partial(goals_and_memories.set_memories, values=values))


@routes.add(
    "DELETE",
    f"{_AGENT}/memories",
    "Delete all memories of an agent",
    description="Those of all its sessions, or of one (`session`).",
    query=SessionQuery,
)
async def clear_memories(request: Request) -> DeletedResponse:
    return await _delete_items(request, _MEMORIES)


@routes.add(
    "DELETE",
    f"{_AGENT}/memories/{{key}}",
    "Delete a memory of an agent",
    parameter_descriptions={"key": "The key of the memory."},
    query=SessionQuery,
)
async def delete_memory(request: Request) -> DeletedResponse:
    session_id = await _get_session_id(request)
    key = request.params["key"]
    # The application has refused a key with a NUL character, which PostgreSQL would reject.
    if not await request.ledger.write(goals_and_memories.delete_memories, session_id, [key]):
        raise not_found("Memory", key)
    return DeletedResponse(deleted=1)


async def _get_session_id(request: Request) -> str:
    """Returns the session that the query names, by default the agent's main session. Raises `Problem`."""
    return await get_session_id(request, request.query(SessionQuery).session)


async def _list_items(request: Request, kind: _ItemKind[T]) -> ResultPage[T]:
    """Returns the items of the session that the query names, or of all sessions of the agent."""
    session_id = await _get_session_id(request)
    list_items = kind.list_of_agent if request.query(SessionQuery).session is None else kind.list_of_session
    return ResultPage(items=await request.read(list_items, session_id), next=None)


async def _store_items(request: Request, kind: _ItemKind[T], store: Callable[[str], Program[object]]) -> ResultPage[T]:
    """Stores items of the session that the query names, by default the main one, and returns all of its items."""
    session_id = await _get_session_id(request)

    def change() -> Program[Sequence[T]]:
        yield from store(session_id)
        return (yield from kind.list_of_session(session_id))

    return ResultPage(items=await request.ledger.write(change), next=None)


async def _delete_items(request: Request, kind: _ItemKind[Any]) -> DeletedResponse:
    """Deletes the items of the session that the query names, or of all sessions of the agent."""
    session_id = await _get_session_id(request)
    if request.query(SessionQuery).session is None:
        delete = partial(goals_and_memories.delete_all_of_agent, kind.table, entity_id=session_id)
    else:
        delete = partial(goals_and_memories.delete_all, kind.table, session_id=session_id)
    return DeletedResponse(deleted=await request.ledger.write(delete))


# Plans


class PlanBody(NewPlan, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """A plan to add, or, with an `id`, to change. It has exactly one of `runAfter`, `scheduledAt` and `cron`."""

    name: Annotated[str, _SHORT_TEXT]
    """The name of the plan."""
    instruction: Annotated[str, Meta(min_length=1, max_length=MAX_PLAN_TEXT, pattern=_NO_NUL)]
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


class PlanBodies(JsonRequestBody, frozen=True, kw_only=True):
    """Plans to add or change."""

    plans: Annotated[list[PlanBody], Meta(min_length=1, max_length=MAX_PLANS_PER_CALL)]
    """The plans to add, and, with an `id`, those to change."""


class PlanListQuery(SessionQuery, frozen=True, kw_only=True):
    status: PlanStatus | None = None
    """Only plans with this status."""


class DeletedPlansResponse(DeletedResponse, frozen=True, kw_only=True):
    """The result of a deletion."""


@routes.add("GET", f"{_AGENT}/plans", "List the plans of an agent, next run first", query=PlanListQuery)
async def list_plans(request: Request) -> ResultPage[Plan]:
    query = request.query(PlanListQuery)
    session_id = await get_session_id(request, query.session)
    if query.session is None:
        records = await request.read(plan_queries.list_plans_of_agent, session_id, status=query.status)
    else:
        records = await request.read(plan_queries.list_plans, session_id, status=query.status)
    return ResultPage(items=records, next=None)


@routes.add(
    "PUT",
    f"{_AGENT}/plans",
    "Add or change plans of an agent, all or none",
    description="Returns all plans of the session: the agent's main one, unless `session` names another.",
    body=PlanBodies,
    query=SessionQuery,
)
async def set_plans(request: Request) -> ResultPage[Plan]:
    body = await request.json(PlanBodies)
    session_id = await _get_session_id(request)
    principal = request.gateway.tool_key_policy.context_for(request.caller).user_id

    def update(effects: Effects) -> Program[Sequence[Plan]]:
        yield from plans.set_plans(effects, session_id, body.plans, principal=principal)
        return (yield from plan_queries.list_plans(session_id))

    return ResultPage(items=await request.ledger.commit(update), next=None)


@routes.add("DELETE", f"{_AGENT}/plans/{{planId}}", "Delete a plan of an agent")
async def delete_plan(request: Request) -> DeletedPlansResponse:
    agent_id = await get_agent_id(request)
    plan_id = request.params["planId"]
    plan = await request.read(plan_queries.find, plan_id)
    if plan is None or plan.entity_id != agent_id:
        raise not_found("Plan", plan_id)
    await request.ledger.write(plan_queries.delete, plan.session_id, [plan_id])
    return DeletedPlansResponse(deleted=1)
