"""The actions for goals, memories and documents: what an agent stores, and what it can search.

Goals and memories are in every prompt of their agent; documents are found with `search_knowledge`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from toolspace.agents.prebuilt.action import CHANGES, DELETES, NO_NUL, READ_ONLY, Action, ActionCaller, object_schema
from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError, ToolValidationError
from toolspace.spaces import plans
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories
from toolspace.storage.queries import plans as rows
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange

MAX_GOAL_TEXT = 4_000
MAX_GOALS_PER_CALL = 100
MAX_PRIORITY = 1_000_000
_goal_id = {"type": "string", "pattern": ID_PATTERN}


async def _set_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    changes = [parse_goal_change(goal) for goal in arguments["goals"]]
    return await caller.write_once(_save_goals, caller.agent_id, changes, bool(arguments.get("clearExisting", False)))


async def _get_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    goals = await caller.ledger.read(goals_and_memories.list_goals, caller.agent_id)
    return {"goals": [format_goal(goal) for goal in goals], "totalGoals": len(goals)}


async def _delete_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    deleted = await caller.write_once(goals_and_memories.delete_goals, caller.agent_id, arguments["goalIds"])
    return {"success": True, "deleted": deleted}


def _save_goals(agent_id: str, changes: list[GoalChange], clear: bool) -> Program[dict[str, Any]]:
    modified = yield from goals_and_memories.set_goals(agent_id, changes, clear=clear)
    current = yield from goals_and_memories.list_goals(agent_id)
    return {
        "success": True,
        "goalsModified": [
            {"action": "created" if is_new else "updated", "id": goal.id, "description": goal.description}
            for goal, is_new in modified
        ],
        "currentGoals": [format_goal(goal) for goal in current],
        "totalGoals": len(current),
    }


def parse_goal_change(arguments: Mapping[str, Any]) -> GoalChange:
    """Converts a goal of the arguments of `set_goals`."""
    return GoalChange(
        id=arguments.get("id"),
        description=json_text.valid_text(arguments["description"]),
        status=arguments.get("status"),
        priority=arguments.get("priority"),
        is_long_term=arguments.get("isLongTerm"),
        is_completed=arguments.get("isCompleted"),
    )


def format_goal(goal: Goal) -> dict[str, Any]:
    """A goal as the goal actions return it."""
    priority = int(goal.priority) if goal.priority.is_integer() else goal.priority
    return {
        "id": goal.id,
        "description": goal.description,
        "status": goal.status,
        "priority": priority,
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
        description="List your goals, the most important first.",
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


# Memories

MAX_MEMORY_BYTES = 16 * 1024
"""The size of one value as JSON."""
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


async def _set_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    memories: list[dict[str, Any]] = [*arguments.get("memories", ())]
    if "key" in arguments:
        memories.append({"key": arguments["key"], "value": arguments.get("value")})
    if not memories:
        raise ToolValidationError("give a key and a value, or memories")
    for memory in memories:
        if json_text.encoded_size(memory["value"]) > MAX_MEMORY_BYTES:
            raise ToolValidationError(
                f'the value of "{memory["key"]}" is too large; a memory has at most {MAX_MEMORY_BYTES} bytes'
            )
    values = [(json_text.valid_text(memory["key"]), memory["value"]) for memory in memories]
    return {"success": True, "count": await caller.write_once(goals_and_memories.set_memories, caller.agent_id, values)}


async def _get_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    keys = [*arguments.get("keys", ()), *([arguments["key"]] if "key" in arguments else ())]
    memories = await caller.ledger.read(goals_and_memories.list_memories, caller.agent_id, keys or None)
    return {"memories": [{"key": memory.key, "value": memory.value} for memory in memories]}


async def _delete_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    deleted = await caller.write_once(goals_and_memories.delete_memories, caller.agent_id, arguments["keys"])
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
        description="List your memories; only those under these keys, if you name any.",
        input_schema=object_schema({"keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_memories",
        description="Delete the memories under these keys.",
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
        description="List your memories; only the one under this key, if you name one.",
        input_schema=object_schema({"key": _key, "keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
)
"""Older action names, for one memory at a time."""


# Documents

MAX_RESULTS = 20
DEFAULT_RESULTS = 5


async def _search_knowledge(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    library = caller.call_host.services.library or DocumentLibrary(caller.ledger)
    limit = int(arguments.get("limit", DEFAULT_RESULTS))
    page = await library.search(caller.agent_id, arguments["query"], limit=limit)
    return {
        "results": [
            {
                "documentId": hit.document_id,
                "title": hit.title,
                "source": hit.source,
                "text": hit.text,
                "score": hit.score,
            }
            for hit in page.matches
        ],
        "total": page.total,
    }


KNOWLEDGE_ACTIONS = (
    Action(
        name="search_knowledge",
        description=(
            "Search the documents that were arguments to you. Gives the passages that fit best; use the words that you "
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


# MERGED from plans: The actions for plans: instructions that come to the agent's inbox at a time, or repeatedly.

MAX_PLANS_PER_CALL = 100
MAX_PLAN_TEXT = 10_000
_plan_id = {"type": "string", "pattern": ID_PATTERN}


async def _set_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    new_plans = msgspec.convert(arguments["plans"], list[NewPlan])
    return await caller.commit_once(_save_plans, caller.agent_id, new_plans)


def _save_plans(effects: Effects, agent_id: str, new_plans: list[NewPlan]) -> Program[dict[str, Any]]:
    records = yield from plans.set_plans(effects, agent_id, new_plans)
    return {"success": True, "plans": [plans.describe(plan) for plan in records]}


async def _get_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    records = await caller.ledger.read(rows.list_plans, caller.agent_id, status=arguments.get("status"))
    return {"plans": [plans.describe(plan) for plan in records]}


async def _delete_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    deleted = await caller.write_once(rows.delete, caller.agent_id, arguments["planIds"])
    return {"success": True, "deleted": deleted}


async def _create_plan(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    result = await _set_plans(caller, {"plans": [arguments]})
    return {"success": True, "plan": result["plans"][0]}


async def _get_plan(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    if "id" not in arguments:
        return await _get_plans(caller, arguments)
    plan = await caller.ledger.read(rows.find, arguments["id"])
    if plan is None or plan.entity_id != caller.agent_id:
        raise RefusedError("not_found", f'you have no plan "{arguments["id"]}"')
    return {"plan": plans.describe(plan)}


def _text(description: str, max_length: int = 200) -> dict[str, Any]:
    return {"type": "string", "minLength": 1, "maxLength": max_length, "pattern": NO_NUL, "description": description}


_PLAN = {
    "id": {**_plan_id, "description": "The plan to change; leave it out for a new one."},
    "name": _text("What to call it."),
    "instruction": _text("What you want to be told when it is time.", MAX_PLAN_TEXT),
    "runAfter": _text('Once, after a while: "2 hours", "30 minutes", "1 day".'),
    "scheduledAt": _text('Once, at a time: "2026-03-01T08:00:00Z".'),
    "cron": _text('Again and again: five fields, "0 9 * * *" is every day at 9.'),
    "timezone": _text('What cron, and a time without an offset, mean: "Europe/Berlin".'),
}
_status = {"type": "string", "enum": ["active", "completed", "expired"]}

PLAN_ACTIONS = (
    Action(
        name="set_plans",
        description=(
            "Plan something for later: its instruction comes to your inbox when it is time. With its id a plan of "
            "yours is changed, without one it is new. Each has exactly one of runAfter, scheduledAt and cron."
        ),
        input_schema=object_schema(
            {
                "plans": {
                    "type": "array",
                    "minItems": 1,
                    "maxItems": MAX_PLANS_PER_CALL,
                    "items": object_schema(_PLAN, "name", "instruction"),
                }
            },
            "plans",
        ),
        run=_set_plans,
        category=ToolCategory.AGENT,
        annotations=CHANGES,
    ),
    Action(
        name="get_plans",
        description="List your plans, the next one first.",
        input_schema=object_schema({"status": _status}),
        run=_get_plans,
        category=ToolCategory.AGENT,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_plans",
        description="Delete plans of yours.",
        input_schema=object_schema(
            {"planIds": {"type": "array", "items": _plan_id, "minItems": 1, "maxItems": MAX_PLANS_PER_CALL}}, "planIds"
        ),
        run=_delete_plans,
        category=ToolCategory.AGENT,
        annotations=DELETES,
    ),
)

SINGULAR_PLAN_ACTIONS = (
    Action(
        name="createPlan",
        description=(
            "Plan something for later: its instruction comes to your inbox when it is time. Give exactly one of "
            "runAfter, scheduledAt and cron."
        ),
        input_schema=object_schema(_PLAN, "name", "instruction"),
        run=_create_plan,
        category=ToolCategory.AGENT,
        annotations=CHANGES,
    ),
    Action(
        name="getPlan",
        description="Get one of your plans, or without an id list all of them, the next one first.",
        input_schema=object_schema({"id": _plan_id, "status": _status}),
        run=_get_plan,
        category=ToolCategory.AGENT,
        annotations=READ_ONLY,
    ),
)
"""Older action names, for one plan at a time."""
