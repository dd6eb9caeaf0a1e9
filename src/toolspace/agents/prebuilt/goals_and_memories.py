"""What an agent wants to reach: its goals, which every prompt of its shows by priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.agents.prebuilt.action import CHANGES, DELETES, NO_NUL, READ_ONLY, Action, ActionCaller, object_schema
from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN
from toolspace.core.tool import ToolCategory
from toolspace.errors import ToolValidationError
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange

MAX_GOAL_TEXT = 4_000
MAX_GOALS_PER_CALL = 100
MAX_PRIORITY = 1_000_000
_goal_id = {"type": "string", "pattern": ID_PATTERN}


async def _set_goals(actor: ActionCaller, given: dict[str, Any]) -> Any:
    changes = [parse_goal_change(one) for one in given["goals"]]
    return await actor.write_once(_set, actor.agent_id, changes, bool(given.get("clearExisting", False)))


async def _get_goals(actor: ActionCaller, given: dict[str, Any]) -> Any:
    found = await actor.ledger.read(goals_and_memories.list_goals, actor.agent_id)
    return {"goals": [format_goal(goal) for goal in found], "totalGoals": len(found)}


async def _delete_goals(actor: ActionCaller, given: dict[str, Any]) -> Any:
    deleted = await actor.write_once(goals_and_memories.delete_goals, actor.agent_id, given["goalIds"])
    return {"success": True, "deleted": deleted}


def _set(agent_id: str, changes: list[GoalChange], clear: bool) -> Program[dict[str, Any]]:
    modified = yield from goals_and_memories.set_goals(agent_id, changes, clear=clear)
    current = yield from goals_and_memories.list_goals(agent_id)
    return {
        "success": True,
        "goalsModified": [
            {"action": "created" if new else "updated", "id": goal.id, "description": goal.description}
            for goal, new in modified
        ],
        "currentGoals": [format_goal(goal) for goal in current],
        "totalGoals": len(current),
    }


def parse_goal_change(given: Mapping[str, Any]) -> GoalChange:
    """A goal as an agent writes it."""
    return GoalChange(
        id=given.get("id"),
        description=json_text.valid_text(given["description"]),
        status=given.get("status"),
        priority=given.get("priority"),
        is_long_term=given.get("isLongTerm"),
        is_completed=given.get("isCompleted"),
    )


def format_goal(goal: Goal) -> dict[str, Any]:
    """A goal as its agent sees it."""
    whole = int(goal.priority) if goal.priority.is_integer() else goal.priority
    return {
        "id": goal.id,
        "description": goal.description,
        "status": goal.status,
        "priority": whole,
        "isLongTerm": goal.is_long_term,
        "isCompleted": goal.is_completed,
    }


GOAL_ACTIONS = (
    Action(
        name="set_goals",
        description="Set goals of yours, or change some: with its id a goal is changed, without one it is new.",
        input_schema=object_schema(
            {
                "goals": {
                    "type": "array",
                    "maxItems": MAX_GOALS_PER_CALL,
                    "items": object_schema(
                        {
                            "id": {**_goal_id, "description": "The goal to change; leave it out for a new one."},
                            "description": {
                                "type": "string",
                                "minLength": 1,
                                "maxLength": MAX_GOAL_TEXT,
                                "pattern": NO_NUL,
                                "description": "What you want to reach.",
                            },
                            "status": {
                                "type": "string",
                                "minLength": 1,
                                "maxLength": 50,
                                "pattern": NO_NUL,
                                "description": "`active`, `completed`, or a word of your own.",
                            },
                            "priority": {
                                "type": "number",
                                "minimum": -MAX_PRIORITY,
                                "maximum": MAX_PRIORITY,
                                "description": "A higher one comes first.",
                            },
                            "isLongTerm": {"type": "boolean"},
                            "isCompleted": {"type": "boolean"},
                        },
                        "description",
                    ),
                },
                "clearExisting": {"type": "boolean", "description": "Delete the goals that are not named here."},
            },
            "goals",
        ),
        run=_set_goals,
        category=ToolCategory.AGENT,
        annotations=CHANGES,
    ),
    Action(
        name="get_goals",
        description="Your goals, the most important first.",
        input_schema=object_schema(),
        run=_get_goals,
        category=ToolCategory.AGENT,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_goals",
        description="Delete goals of yours.",
        input_schema=object_schema(
            {"goalIds": {"type": "array", "items": _goal_id, "minItems": 1, "maxItems": MAX_GOALS_PER_CALL}}, "goalIds"
        ),
        run=_delete_goals,
        category=ToolCategory.AGENT,
        annotations=DELETES,
    ),
)


# MERGED from memories: What an agent remembers: values under keys, which every prompt of its shows.

MAX_MEMORY_BYTES = 16 * 1024
"""Of one value, as JSON."""
MAX_MEMORIES_PER_CALL = 100
_key = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": NO_NUL}
_value = {"description": "What to remember: a text, or any JSON."}
_keys = {"type": "array", "items": _key, "maxItems": MAX_MEMORIES_PER_CALL}
_memories = {
    "type": "array",
    "minItems": 1,
    "maxItems": MAX_MEMORIES_PER_CALL,
    "items": object_schema({"key": _key, "value": _value}, "key", "value"),
}


async def _set_memories(actor: ActionCaller, given: dict[str, Any]) -> Any:
    wanted = [*given.get("memories", ())]
    if "key" in given:
        wanted.append({"key": given["key"], "value": given.get("value")})
    if not wanted:
        raise ToolValidationError("give a key and a value, or memories")
    for one in wanted:
        if json_text.encoded_size(one["value"]) > MAX_MEMORY_BYTES:
            raise ToolValidationError(
                f'the value of "{one["key"]}" is too large; a memory has at most {MAX_MEMORY_BYTES} bytes'
            )
    values = [(json_text.valid_text(one["key"]), one["value"]) for one in wanted]
    return {"success": True, "count": await actor.write_once(goals_and_memories.set_memories, actor.agent_id, values)}


async def _get_memories(actor: ActionCaller, given: dict[str, Any]) -> Any:
    keys = [*given.get("keys", ()), *([given["key"]] if "key" in given else ())]
    found = await actor.ledger.read(goals_and_memories.list_memories, actor.agent_id, keys or None)
    return {"memories": [{"key": memory.key, "value": memory.value} for memory in found]}


async def _delete_memories(actor: ActionCaller, given: dict[str, Any]) -> Any:
    deleted = await actor.write_once(goals_and_memories.delete_memories, actor.agent_id, given["keys"])
    return {"success": True, "deleted": deleted}


MEMORY_ACTIONS = (
    Action(
        name="set_memories",
        description="Remember facts beyond this run, each under a key of your choice. An old value is replaced.",
        input_schema=object_schema({"memories": _memories}, "memories"),
        run=_set_memories,
        category=ToolCategory.MEMORY,
        annotations=CHANGES,
    ),
    Action(
        name="get_memories",
        description="What you remember; only under these keys, if you name some.",
        input_schema=object_schema({"keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_memories",
        description="Forget what you remember under these keys.",
        input_schema=object_schema({"keys": {**_keys, "minItems": 1}}, "keys"),
        run=_delete_memories,
        category=ToolCategory.MEMORY,
        annotations=DELETES,
    ),
)

SINGULAR_MEMORY_ACTIONS = (
    Action(
        name="setMemory",
        description="Remember a fact beyond this run, under a key of your choice. An old value is replaced.",
        input_schema=object_schema({"key": _key, "value": _value, "memories": _memories}),
        run=_set_memories,
        category=ToolCategory.MEMORY,
        annotations=CHANGES,
    ),
    Action(
        name="getMemory",
        description="What you remember; only under this key, if you name one.",
        input_schema=object_schema({"key": _key, "keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
)
"""Older names, of one memory at a time."""


# MERGED from knowledge: What an agent can look up: passages of the documents that were given to it.

MAX_RESULTS = 20
DEFAULT_RESULTS = 5


async def _search_knowledge(actor: ActionCaller, given: dict[str, Any]) -> Any:
    library = actor.room.services.library or DocumentLibrary(actor.ledger)
    limit = int(given.get("limit", DEFAULT_RESULTS))
    found = await library.search(actor.agent_id, given["query"], limit=limit)
    return {
        "results": [
            {
                "documentId": hit.document_id,
                "title": hit.title,
                "source": hit.source,
                "text": hit.text,
                "score": hit.score,
            }
            for hit in found.matches
        ],
        "total": found.total,
    }


KNOWLEDGE_ACTIONS = (
    Action(
        name="search_knowledge",
        description=(
            "Search the documents that were given to you. Gives the passages that fit best; use the words that you "
            "expect in them."
        ),
        input_schema=object_schema(
            {
                "query": {"type": "string", "minLength": 1, "maxLength": 2_000, "pattern": NO_NUL},
                "limit": {
                    "type": "integer",
                    "minimum": 1,
                    "maximum": MAX_RESULTS,
                    "default": DEFAULT_RESULTS,
                    "description": "How many passages to give.",
                },
            },
            "query",
        ),
        run=_search_knowledge,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
)
