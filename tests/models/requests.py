"""Requests of the model tests, and a helper that records the streamed parts."""

from __future__ import annotations

from toolspace import Tool
from toolspace.core.language_model import Model, ModelRequest, ModelStreamPart, ModelTurn, UserTurn

HELLO = ModelRequest(system="Be brief.", turns=[UserTurn("Hello")])
ADD = Tool("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]})


async def respond_and_record(model: Model, request: ModelRequest = HELLO) -> tuple[ModelTurn, list[ModelStreamPart]]:
    """The response to a request, and its streamed parts."""
    parts: list[ModelStreamPart] = []
    return await model.respond(request, parts.append), parts
