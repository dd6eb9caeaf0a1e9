"""What tests ask models, and what they hear."""

from __future__ import annotations

from toolspace import Tool
from toolspace.core.conversation import ModelPart, ModelRequest, ModelTurn, UserTurn
from toolspace.core.model import Model

HELLO = ModelRequest(system="Be brief.", turns=[UserTurn("Hello")])
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


async def hear(model: Model, request: ModelRequest = HELLO) -> tuple[ModelTurn, list[ModelPart]]:
    """The answer to a request, and the pieces that were heard of it."""
    heard: list[ModelPart] = []
    return await model.respond(request, heard.append), heard
