"""Routes for what agents keep in mind: their goals and memories, for whoever operates them."""

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
from toolspace.server.authorization import Access, get_visible_agent
from toolspace.server.problems import Problem
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange, Memory

_AGENT = "/api/agents/{agentId}"
_TAG = "agents"


class NewGoal(JsonRequestBody, frozen=True, kw_only=True):
    """A new goal, or with the id of one what becomes of it; what is left out stays."""

    description: Annotated[str, Meta(min_length=1, max_length=MAX_GOAL_TEXT, pattern="^[^\\u0000]+$")]
    id: Id | None = None
    status: Annotated[str, Meta(min_length=1, max_length=50, pattern="^[^\\u0000]+$", examples=["active"])] | None = (
        None
    )
    priority: (
        Annotated[float, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="A higher one comes first.")] | None
    ) = None
    is_long_term: bool | None = None
    is_completed: bool | None = None

    def change(self) -> GoalChange:
        return GoalChange(
            id=self.id,
            description=self.description,
            status=self.status,
            priority=self.priority,
            is_long_term=self.is_long_term,
            is_completed=self.is_completed,
        )


class NewGoals(JsonRequestBody, frozen=True, kw_only=True):
    goals: Annotated[list[NewGoal], Meta(max_length=MAX_GOALS_PER_CALL)]
    clear_existing: Annotated[bool, Meta(description="Delete the goals that are not named.")] = False


class NewMemory(JsonRequestBody, frozen=True, kw_only=True):
    key: Annotated[str, Meta(min_length=1, max_length=200, pattern="^[^\\u0000]+$", examples=["deadline"])]
    value: Annotated[Any, Meta(description=f"Up to {MAX_MEMORY_BYTES} bytes of JSON.", examples=["Friday"])]

    def __post_init__(self) -> None:
        check_json_size("value", self.value, MAX_MEMORY_BYTES)


class NewMemories(JsonRequestBody, frozen=True, kw_only=True):
    memories: Annotated[list[NewMemory], Meta(max_length=MAX_GOALS_PER_CALL)]


class DeletedResponse(ResponseBody, frozen=True, kw_only=True):
    deleted: int


async def list_goals(request: Request) -> ResultPage[Goal]:
    agent_id = await _agent(request)
    return ResultPage(items=await request.gateway.ledger.read(goals_and_memories.list_goals, agent_id), next=None)


async def set_goals(request: Request) -> ResultPage[Goal]:
    body = await request.json(NewGoals)
    agent_id = await _agent(request)
    changes = [goal.change() for goal in body.goals]

    def setting() -> Program[Sequence[Goal]]:
        yield from goals_and_memories.set_goals(agent_id, changes, clear=body.clear_existing)
        return (yield from goals_and_memories.list_goals(agent_id))

    return ResultPage(items=await request.gateway.ledger.write(setting), next=None)


async def clear_goals(request: Request) -> DeletedResponse:
    agent_id = await _agent(request)

    def clearing() -> Program[int]:
        own = yield from goals_and_memories.list_goals(agent_id)
        return (yield from goals_and_memories.delete_goals(agent_id, [goal.id for goal in own]))

    return DeletedResponse(deleted=await request.gateway.ledger.write(clearing))


async def delete_goal(request: Request) -> DeletedResponse:
    agent_id = await _agent(request)
    deleted = await request.gateway.ledger.write(goals_and_memories.delete_goals, agent_id, [request.params["goalId"]])
    return DeletedResponse(deleted=deleted)


async def list_memories(request: Request) -> ResultPage[Memory]:
    agent_id = await _agent(request)
    return ResultPage(items=await request.gateway.ledger.read(goals_and_memories.list_memories, agent_id), next=None)


async def set_memories(request: Request) -> ResultPage[Memory]:
    body = await request.json(NewMemories)
    agent_id = await _agent(request)

    def setting() -> Program[Sequence[Memory]]:
        yield from goals_and_memories.set_memories(agent_id, [(memory.key, memory.value) for memory in body.memories])
        return (yield from goals_and_memories.list_memories(agent_id))

    return ResultPage(items=await request.gateway.ledger.write(setting), next=None)


async def clear_memories(request: Request) -> DeletedResponse:
    agent_id = await _agent(request)

    def clearing() -> Program[int]:
        own = yield from goals_and_memories.list_memories(agent_id)
        return (yield from goals_and_memories.delete_memories(agent_id, [memory.key for memory in own]))

    return DeletedResponse(deleted=await request.gateway.ledger.write(clearing))


async def delete_memory(request: Request) -> DeletedResponse:
    agent_id = await _agent(request)
    key = request.params["key"]
    # No database keeps a NUL in a text, so there is nothing under such a key.
    deleted = (
        0 if "\0" in key else await request.gateway.ledger.write(goals_and_memories.delete_memories, agent_id, [key])
    )
    if not deleted:
        raise Problem(404, f'the agent remembers nothing under "{key}"')
    return DeletedResponse(deleted=deleted)


async def _agent(request: Request) -> str:
    agent = await get_visible_agent(request.gateway.ledger, request.caller, request.params["agentId"])
    return agent.id


ROUTES = [
    Route(
        method="GET",
        path=f"{_AGENT}/goals",
        handler=list_goals,
        access=Access.SECRET,
        tag=_TAG,
        summary="The goals of an agent, the most important first",
        response=ResultPage[Goal],
    ),
    Route(
        method="PUT",
        path=f"{_AGENT}/goals",
        handler=set_goals,
        access=Access.SECRET,
        tag=_TAG,
        summary="Add and change goals of an agent",
        description="All or none: an id that is not a goal of the agent is a 404. Gives all goals as they are then.",
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
        summary="Delete one goal of an agent",
        response=DeletedResponse,
    ),
    Route(
        method="GET",
        path=f"{_AGENT}/memories",
        handler=list_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="What an agent remembers, by key",
        response=ResultPage[Memory],
    ),
    Route(
        method="PUT",
        path=f"{_AGENT}/memories",
        handler=set_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="Have an agent remember values under keys",
        description="Gives all memories as they are then.",
        body=NewMemories,
        response=ResultPage[Memory],
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/memories",
        handler=clear_memories,
        access=Access.SECRET,
        tag=_TAG,
        summary="Have an agent forget everything",
        response=DeletedResponse,
    ),
    Route(
        method="DELETE",
        path=f"{_AGENT}/memories/{{key}}",
        handler=delete_memory,
        access=Access.SECRET,
        tag=_TAG,
        summary="Have an agent forget what is under a key",
        response=DeletedResponse,
    ),
]
