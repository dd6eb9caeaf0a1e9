"""The actions for plans: instructions that come to the agent's inbox at a time, or repeatedly."""

from __future__ import annotations

from typing import Any

import msgspec

from toolspace.agents.prebuilt.action import CHANGES, DELETES, NO_NUL, READ_ONLY, Action, ActionCaller, object_schema
from toolspace.core.ids import ID_PATTERN
from toolspace.core.tool import ToolCategory
from toolspace.errors import RefusedError
from toolspace.spaces import plans
from toolspace.spaces.ledger import Effects
from toolspace.spaces.plans import NewPlan
from toolspace.storage.database import Program
from toolspace.storage.queries import plans as rows

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
