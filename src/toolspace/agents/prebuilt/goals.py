"""What an agent wants to reach: its goals, which every prompt of its shows by priority."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from toolspace.agents.prebuilt.action import CHANGES, DELETES, NO_NUL, READ_ONLY, Action, Actor, takes
from toolspace.core import json_text
from toolspace.core.ids import ID_PATTERN
from toolspace.core.tool import ToolCategory
from toolspace.storage.database import Program
from toolspace.storage.queries import goals_and_memories
from toolspace.storage.queries.goals_and_memories import Goal, GoalChange

MOST_TEXT = 4_000
MOST_AT_ONCE = 100
HIGHEST = 1_000_000
_goal_id = {"type": "string", "pattern": ID_PATTERN}


async def _set_goals(actor: Actor, given: dict[str, Any]) -> Any:
    changes = [change_of(one) for one in given["goals"]]
    return await actor.once(_set, actor.agent_id, changes, bool(given.get("clearExisting", False)))


async def _get_goals(actor: Actor, given: dict[str, Any]) -> Any:
    found = await actor.ledger.read(goals_and_memories.goals, actor.agent_id)
    return {"goals": [shown(goal) for goal in found], "totalGoals": len(found)}


async def _delete_goals(actor: Actor, given: dict[str, Any]) -> Any:
    deleted = await actor.once(goals_and_memories.delete_goals, actor.agent_id, given["goalIds"])
    return {"success": True, "deleted": deleted}


def _set(agent_id: str, changes: list[GoalChange], clear: bool) -> Program[dict[str, Any]]:
    modified = yield from goals_and_memories.set_goals(agent_id, changes, clear=clear)
    current = yield from goals_and_memories.goals(agent_id)
    return {
        "success": True,
        "goalsModified": [
            {"action": "created" if new else "updated", "id": goal.id, "description": goal.description}
            for goal, new in modified
        ],
        "currentGoals": [shown(goal) for goal in current],
        "totalGoals": len(current),
    }


def change_of(given: Mapping[str, Any]) -> GoalChange:
    """A goal as an agent writes it."""
    return GoalChange(
        id=given.get("id"),
        description=json_text.valid_text(given["description"]),
        status=given.get("status"),
        priority=given.get("priority"),
        is_long_term=given.get("isLongTerm"),
        is_completed=given.get("isCompleted"),
    )


def shown(goal: Goal) -> dict[str, Any]:
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


ACTIONS = (
    Action(
        name="set_goals",
        description="Set goals of yours, or change some: with its id a goal is changed, without one it is new.",
        input_schema=takes(
            {
                "goals": {
                    "type": "array",
                    "maxItems": MOST_AT_ONCE,
                    "items": takes(
                        {
                            "id": {**_goal_id, "description": "The goal to change; leave it out for a new one."},
                            "description": {
                                "type": "string",
                                "minLength": 1,
                                "maxLength": MOST_TEXT,
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
                                "minimum": -HIGHEST,
                                "maximum": HIGHEST,
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
        input_schema=takes(),
        run=_get_goals,
        category=ToolCategory.AGENT,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_goals",
        description="Delete goals of yours.",
        input_schema=takes(
            {"goalIds": {"type": "array", "items": _goal_id, "minItems": 1, "maxItems": MOST_AT_ONCE}}, "goalIds"
        ),
        run=_delete_goals,
        category=ToolCategory.AGENT,
        annotations=DELETES,
    ),
)
