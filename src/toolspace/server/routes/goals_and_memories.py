"""Routes of the goals and memories of an agent, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta

from toolspace.agents.prebuilt.goals_and_memories import (
    MAX_GOAL_TEXT,
    MAX_GOALS_PER_CALL,
    MAX_MEMORY_BYTES,
    MAX_PRIORITY,
)
from toolspace.server.api_types import Id, JsonRequestBody, ResponseBody, ResultPage, check_json_size
from toolspace.server.authorization import Access
from toolspace.server.problems import not_found
from toolspace.server.requests import Request
from toolspace.server.routes.agents import get_agent_id
from toolspace.server.routing import Route
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange, Memory

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


ROUTES = [
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
