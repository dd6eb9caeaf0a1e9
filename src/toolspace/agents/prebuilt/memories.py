"""What an agent remembers: values under keys, which every prompt of its shows."""

from __future__ import annotations

from typing import Any

from toolspace.agents.prebuilt.action import CHANGES, DELETES, NO_NUL, READ_ONLY, Action, Actor, takes
from toolspace.core import json_text
from toolspace.core.tool import ToolCategory
from toolspace.errors import ToolValidationError
from toolspace.storage.queries import goals_and_memories

MOST_BYTES = 16 * 1024
"""Of one value, as JSON."""
MOST_AT_ONCE = 100
_key = {"type": "string", "minLength": 1, "maxLength": 200, "pattern": NO_NUL}
_value = {"description": "What to remember: a text, or any JSON."}
_keys = {"type": "array", "items": _key, "maxItems": MOST_AT_ONCE}
_memories = {
    "type": "array",
    "minItems": 1,
    "maxItems": MOST_AT_ONCE,
    "items": takes({"key": _key, "value": _value}, "key", "value"),
}


async def _set_memories(actor: Actor, given: dict[str, Any]) -> Any:
    wanted = [*given.get("memories", ())]
    if "key" in given:
        wanted.append({"key": given["key"], "value": given.get("value")})
    if not wanted:
        raise ToolValidationError("give a key and a value, or memories")
    for one in wanted:
        if json_text.size(one["value"]) > MOST_BYTES:
            raise ToolValidationError(
                f'the value of "{one["key"]}" is too large; a memory has at most {MOST_BYTES} bytes'
            )
    values = [(json_text.valid_text(one["key"]), one["value"]) for one in wanted]
    return {"success": True, "count": await actor.once(goals_and_memories.set_memories, actor.agent_id, values)}


async def _get_memories(actor: Actor, given: dict[str, Any]) -> Any:
    keys = [*given.get("keys", ()), *([given["key"]] if "key" in given else ())]
    found = await actor.ledger.read(goals_and_memories.memories, actor.agent_id, keys or None)
    return {"memories": [{"key": memory.key, "value": memory.value} for memory in found]}


async def _delete_memories(actor: Actor, given: dict[str, Any]) -> Any:
    deleted = await actor.once(goals_and_memories.delete_memories, actor.agent_id, given["keys"])
    return {"success": True, "deleted": deleted}


ACTIONS = (
    Action(
        name="set_memories",
        description="Remember facts beyond this run, each under a key of your choice. An old value is replaced.",
        input_schema=takes({"memories": _memories}, "memories"),
        run=_set_memories,
        category=ToolCategory.MEMORY,
        annotations=CHANGES,
    ),
    Action(
        name="get_memories",
        description="What you remember; only under these keys, if you name some.",
        input_schema=takes({"keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
    Action(
        name="delete_memories",
        description="Forget what you remember under these keys.",
        input_schema=takes({"keys": {**_keys, "minItems": 1}}, "keys"),
        run=_delete_memories,
        category=ToolCategory.MEMORY,
        annotations=DELETES,
    ),
)

SINGULAR = (
    Action(
        name="setMemory",
        description="Remember a fact beyond this run, under a key of your choice. An old value is replaced.",
        input_schema=takes({"key": _key, "value": _value, "memories": _memories}),
        run=_set_memories,
        category=ToolCategory.MEMORY,
        annotations=CHANGES,
    ),
    Action(
        name="getMemory",
        description="What you remember; only under this key, if you name one.",
        input_schema=takes({"key": _key, "keys": _keys}),
        run=_get_memories,
        category=ToolCategory.MEMORY,
        annotations=READ_ONLY,
    ),
)
"""Older names, of one memory at a time."""
