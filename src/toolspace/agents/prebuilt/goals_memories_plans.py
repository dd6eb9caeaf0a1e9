"""The actions for goals, memories, plans and documents: what an agent stores, and what it can search.

Goals, memories and plans are in every prompt of their agent; documents are found with `search_knowledge`. A plan is an
instruction that comes to the agent's inbox at a time, or repeatedly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from toolspace.agents.prebuilt.action import (
    CHANGES,
    DELETES,
    ID_SCHEMA,
    READ_ONLY,
    ActionCaller,
    action,
    list_schema,
    object_schema,
    text_schema,
)
from toolspace.core import json_text
from toolspace.core.text_search import query_words, split_words
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError, ToolValidationError
from toolspace.spaces import plans
from toolspace.spaces.document_library import DocumentLibrary
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories, sessions
from toolspace.storage.queries import plans as plan_rows
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange, Memory

# Goals

MAX_GOAL_TEXT = 4_000
MAX_GOALS_PER_CALL = 100
MAX_PRIORITY = 1_000_000
MAX_GOAL_METADATA = 4 * 1024
"""The size of the metadata of one goal as JSON."""
_GOAL = {
    "id": {**ID_SCHEMA, "description": "The goal to change, or an id of your choice for a new one."},
    "description": text_schema(MAX_GOAL_TEXT, "What you want to reach."),
    "status": text_schema(50, "`active`, `completed`, or a word of your own."),
    "priority": {
        "type": "number",
        "minimum": -MAX_PRIORITY,
        "maximum": MAX_PRIORITY,
        "description": "A higher one comes first.",
    },
    "isLongTerm": {"type": "boolean"},
    "isCompleted": {"type": "boolean"},
    "metadata": {"type": "object", "description": "Anything else to store with it; it replaces what was there."},
}


@action(
    "Set goals of yours, or change some: with its id a goal is changed, with a new id or without one it is new.",
    {
        "goals": list_schema(object_schema(_GOAL, "description"), MAX_GOALS_PER_CALL, min_items=0),
        "clearExisting": {"type": "boolean", "description": "Delete the goals that are not named here."},
    },
    "goals",
    annotations=CHANGES,
)
async def set_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    changes = [_parse_goal_change(goal) for goal in arguments["goals"]]
    return await caller.write_once(_save_goals, caller.session_id, changes, bool(arguments.get("clearExisting", False)))


@action("List your goals, the most important first.", annotations=READ_ONLY)
async def get_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    goals = await caller.ledger.read(goals_and_memories.list_goals, caller.session_id)
    return {"goals": [_format_goal(goal) for goal in goals], "totalGoals": len(goals)}


@action(
    "Delete goals of yours.", {"goalIds": list_schema(ID_SCHEMA, MAX_GOALS_PER_CALL)}, "goalIds", annotations=DELETES
)
async def delete_goals(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    count = await caller.write_once(goals_and_memories.delete_goals, caller.session_id, arguments["goalIds"])
    return {"success": True, "deleted": count}


def _save_goals(session_id: str, changes: list[GoalChange], clear: bool) -> Program[dict[str, Any]]:
    modified_goals = yield from goals_and_memories.set_goals(session_id, changes, clear=clear)
    current_goals = yield from goals_and_memories.list_goals(session_id)
    return {
        "success": True,
        "goalsModified": [
            {"action": "created" if is_new else "updated", "id": goal.id, "description": goal.description}
            for goal, is_new in modified_goals
        ],
        "currentGoals": [_format_goal(goal) for goal in current_goals],
        "totalGoals": len(current_goals),
    }


def _parse_goal_change(arguments: Mapping[str, Any]) -> GoalChange:
    metadata = arguments.get("metadata")
    if metadata is not None and (size := json_text.encoded_size(metadata)) > MAX_GOAL_METADATA:
        raise ToolValidationError(
            f'the metadata of the goal "{arguments["description"][:80]}" has {size} bytes of JSON; '
            f"at most {MAX_GOAL_METADATA} are accepted"
        )
    return GoalChange(
        id=arguments.get("id"),
        description=json_text.valid_text(arguments["description"]),
        status=arguments.get("status"),
        priority=arguments.get("priority"),
        is_long_term=arguments.get("isLongTerm"),
        is_completed=arguments.get("isCompleted"),
        metadata=metadata,
    )


def _format_goal(goal: Goal) -> dict[str, Any]:
    priority = int(goal.priority) if goal.priority.is_integer() else goal.priority
    return {
        "id": goal.id,
        "description": goal.description,
        "status": goal.status,
        "priority": priority,
        "isLongTerm": goal.is_long_term,
        "isCompleted": goal.is_completed,
        "metadata": goal.metadata,
    }


# Memories

MAX_MEMORY_BYTES = 16 * 1024
"""The size of one value as JSON."""
MAX_MEMORIES_PER_CALL = 100
_key = text_schema(200)
_value = {"description": "What to remember: a text, or any JSON."}
_keys = list_schema(_key, MAX_MEMORIES_PER_CALL, min_items=0)
_shared = {"type": "boolean", "description": "For all your conversations, not only for this one; if you share any."}
_memories = list_schema(
    object_schema({"key": _key, "value": _value, "shared": _shared}, "key", "value"), MAX_MEMORIES_PER_CALL
)
_memory_action = partial(action, category=ToolCategory.MEMORY)


@_memory_action(
    "Remember facts beyond this run, each under a key of your choice. An old value is replaced.",
    {"memories": _memories},
    "memories",
    annotations=CHANGES,
)
async def set_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    memories: list[dict[str, Any]] = [*arguments.get("memories", ())]
    if "key" in arguments:
        memories.append({"key": arguments["key"], "value": arguments.get("value"), "shared": arguments.get("shared")})
    if not memories:
        raise ToolValidationError("give a key and a value, or memories")
    for memory in memories:
        if json_text.encoded_size(memory["value"]) > MAX_MEMORY_BYTES:
            raise ToolValidationError(
                f'the value of "{memory["key"]}" is too large; a memory has at most {MAX_MEMORY_BYTES} bytes'
            )
    own_values, shared_values = (
        [
            (json_text.valid_text(memory["key"]), memory["value"])
            for memory in memories
            if bool(memory.get("shared")) is shared
        ]
        for shared in (False, True)
    )
    return {"success": True, "count": await caller.write_once(_save_memories, caller, own_values, shared_values)}


def _save_memories(
    caller: ActionCaller, own_values: Sequence[tuple[str, Any]], shared_values: Sequence[tuple[str, Any]]
) -> Program[int]:
    count = yield from goals_and_memories.set_memories(caller.session_id, own_values)
    if shared_values:
        if not (yield from _shares_memories(caller)):
            raise RefusedError("invalid", "shared: your conversations share no memories; store it without `shared`")
        count += yield from goals_and_memories.set_memories(caller.agent_id, shared_values)
    return count


def _shares_memories(caller: ActionCaller) -> Program[bool]:
    """Whether the caller may use the memories of the agent's main session."""
    if caller.session_id == caller.agent_id:
        return True
    return (yield from sessions.find_scope(caller.agent_id)).shares_memories


@_memory_action(
    "List your memories; only those under these keys, if you name any.", {"keys": _keys}, annotations=READ_ONLY
)
async def get_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    keys = [*arguments.get("keys", ()), *([arguments["key"]] if "key" in arguments else ())]
    memories = await caller.ledger.read(_load_memories, caller, keys or None)
    if "topic" in arguments:
        memories = _select_by_topic(memories, arguments["topic"])
    return {"memories": [_format_memory(memory, caller) for memory in memories]}


def _load_memories(caller: ActionCaller, keys: Sequence[str] | None) -> Program[Sequence[Memory]]:
    """The memories of the caller's session, and those that all sessions of the agent share."""
    memories = yield from goals_and_memories.list_memories(caller.session_id, keys)
    if caller.session_id != caller.agent_id and (yield from _shares_memories(caller)):
        memories += yield from goals_and_memories.list_memories(caller.agent_id, keys)
    return memories


def _format_memory(memory: Memory, caller: ActionCaller) -> dict[str, Any]:
    data = {"key": memory.key, "value": memory.value}
    return data if memory.session_id == caller.session_id else {**data, "shared": True}


def _select_by_topic(memories: Sequence[Memory], topic: str) -> list[Memory]:
    """The memories that have words of a topic in their key or value; those with the most of them first, then by key."""
    words = set(query_words(topic))
    counts = {
        (memory.session_id, memory.key): len(
            words.intersection(split_words(f"{memory.key.replace('_', ' ')} {_value_text(memory.value)}"))
        )
        for memory in memories
    }
    matches = [memory for memory in memories if counts[memory.session_id, memory.key]]
    return sorted(matches, key=lambda memory: (-counts[memory.session_id, memory.key], memory.key))


def _value_text(value: Any) -> str:
    return value if isinstance(value, str) else json_text.encode(value)


@_memory_action(
    "Delete the memories under these keys.",
    {"keys": {**_keys, "minItems": 1}, "shared": {"type": "boolean", "description": "Those that you share."}},
    "keys",
    annotations=DELETES,
)
async def delete_memories(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    count = await caller.write_once(_delete_memories, caller, arguments["keys"], bool(arguments.get("shared")))
    return {"success": True, "deleted": count}


def _delete_memories(caller: ActionCaller, keys: Sequence[str], shared: bool) -> Program[int]:
    if shared and not (yield from _shares_memories(caller)):
        return 0
    session_id = caller.agent_id if shared else caller.session_id
    return (yield from goals_and_memories.delete_memories(session_id, keys))


# Plans

MAX_PLANS_PER_CALL = 100
MAX_PLAN_TEXT = 10_000
_PLAN = {
    "id": {**ID_SCHEMA, "description": "The plan to change; leave it out for a new one."},
    "name": text_schema(200, "What to call it."),
    "instruction": text_schema(MAX_PLAN_TEXT, "What you want to be told when it is time."),
    "runAfter": text_schema(200, 'Once, after a while: "2 hours", "30 minutes", "1 day".'),
    "scheduledAt": text_schema(200, 'Once, at a time: "2026-03-01T08:00:00Z".'),
    "cron": text_schema(200, 'Again and again: five fields, "0 9 * * *" is every day at 9.'),
    "timezone": text_schema(200, 'What cron, and a time without an offset, mean: "Europe/Berlin".'),
}
_status = {"type": "string", "enum": ["active", "completed", "expired"]}


@action(
    "Plan something for later: its instruction comes to your inbox when it is time. With its id a plan of "
    "yours is changed, without one it is new. Each has exactly one of runAfter, scheduledAt and cron.",
    {"plans": list_schema(object_schema(_PLAN, "name", "instruction"), MAX_PLANS_PER_CALL)},
    "plans",
    annotations=CHANGES,
)
async def set_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    new_plans = msgspec.convert(arguments["plans"], list[NewPlan])
    return await caller.commit_once(_save_plans, caller, new_plans)


@action("List your plans, the next one first.", {"status": _status}, annotations=READ_ONLY)
async def get_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    records = await caller.ledger.read(plan_rows.list_plans, caller.session_id, status=arguments.get("status"))
    return {"plans": [plans.describe(plan) for plan in records]}


@action(
    "Delete plans of yours.", {"planIds": list_schema(ID_SCHEMA, MAX_PLANS_PER_CALL)}, "planIds", annotations=DELETES
)
async def delete_plans(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    count = await caller.write_once(plan_rows.delete, caller.session_id, arguments["planIds"])
    return {"success": True, "deleted": count}


def _save_plans(effects: Effects, caller: ActionCaller, new_plans: list[NewPlan]) -> Program[dict[str, Any]]:
    records = yield from plans.set_plans(effects, caller.session_id, new_plans, principal=caller.principal)
    return {"success": True, "plans": [plans.describe(plan) for plan in records]}


# Documents

MAX_RESULTS = 20
DEFAULT_RESULTS = 5


@_memory_action(
    "Search the documents that were given to you. Gives the passages that fit best; use the words that you "
    "expect in them.",
    {
        "query": text_schema(2_000),
        "limit": {
            "type": "integer",
            "minimum": 1,
            "maximum": MAX_RESULTS,
            "default": DEFAULT_RESULTS,
            "description": "How many passages to give.",
        },
    },
    "query",
    annotations=READ_ONLY,
)
async def search_knowledge(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
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


# Actions of older configurations, for one item at a time or under another name

_query_knowledge = msgspec.structs.replace(search_knowledge, name="queryKnowledge")

_set_memory = _memory_action(
    "Remember a fact beyond this run, under a key of your choice. An old value is replaced.",
    {"key": _key, "value": _value, "memories": _memories},
    annotations=CHANGES,
    name="setMemory",
)(set_memories.run)
_get_memory = _memory_action(
    "List your memories; only the one under this key, if you name one, or those about a topic, the best first.",
    {"key": _key, "keys": _keys, "topic": text_schema(200, "Words that the memory has in its key or value.")},
    annotations=READ_ONLY,
    name="getMemory",
)(get_memories.run)


@action(
    "Plan something for later: its instruction comes to your inbox when it is time. Give exactly one of "
    "runAfter, scheduledAt and cron.",
    _PLAN,
    "name",
    "instruction",
    annotations=CHANGES,
    name="createPlan",
)
async def _create_plan(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    result = await set_plans.run(caller, {"plans": [arguments]})
    return {"success": True, "plan": result["plans"][0]}


@action(
    "Get one of your plans, or without an id list all of them, the next one first.",
    {"id": ID_SCHEMA, "status": _status},
    annotations=READ_ONLY,
    name="getPlan",
)
async def _get_plan(caller: ActionCaller, arguments: dict[str, Any]) -> Any:
    if "id" not in arguments:
        return await get_plans.run(caller, arguments)
    plan = await caller.ledger.read(plan_rows.find, arguments["id"])
    if plan is None or plan.session_id != caller.session_id:
        raise RefusedError("not_found", f'you have no plan "{arguments["id"]}"')
    return {"plan": plans.describe(plan)}


STORED_ITEM_ACTIONS = (
    set_memories,
    get_memories,
    delete_memories,
    set_goals,
    get_goals,
    delete_goals,
    set_plans,
    get_plans,
    delete_plans,
    search_knowledge,
)
SINGULAR_ACTIONS = (_set_memory, _get_memory, _create_plan, _get_plan, _query_knowledge)
