"""What tests ask models, and what they hear."""

from __future__ import annotations

from toolspace import Tool
from toolspace.core.model import Model, ModelRequest, ModelStreamPart, ModelTurn, UserTurn

HELLO = ModelRequest(system="Be brief.", turns=[UserTurn("Hello")])
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


async def respond_and_record(model: Model, request: ModelRequest = HELLO) -> tuple[ModelTurn, list[ModelStreamPart]]:
    """The answer to a request, and the pieces that were heard of it."""
    parts: list[ModelStreamPart] = []
    return await model.respond(request, parts.append), parts
