"""Counts what agents ask of models, by model, since the process started. Bounds nothing: for that there are frames."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from toolspace.core.model import NO_USAGE, Model, ModelListener, ModelRequest, ModelTurn, Usage
from toolspace.errors import ModelError

SUCCEEDED = "ok"


class ModelUsage:
    """What one model was asked."""

    __slots__ = ("requests", "usage")

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """How many, by how they ended: `ok`, `canceled`, or the kind of error."""
        self.usage: Usage = NO_USAGE

    def add(self, end: str, usage: Usage = NO_USAGE) -> None:
        self.requests[end] = self.requests.get(end, 0) + 1
        self.usage = self.usage + usage


class ModelUsageCounter:
    """The books of all models."""

    def __init__(self) -> None:
        self._usage_by_model: dict[str, ModelUsage] = {}

    @property
    def by_model(self) -> Mapping[str, ModelUsage]:
        """By name: `openai:gpt-5`."""
        return self._usage_by_model

    def wrap(self, model: Model) -> Model:
        """The same model, with a look at what comes of each request."""
        return _CountingModel(model, self._usage_by_model.setdefault(model.name, ModelUsage()))


class _CountingModel(Model):
    def __init__(self, model: Model, books: ModelUsage) -> None:
        self.name = model.name
        self.context_window = model.context_window
        self._model = model
        self._books = books

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        try:
            turn = await self._model.respond(request, listen)
        except ModelError as error:
            self._books.add(error.kind)
            raise
        except asyncio.CancelledError:
            self._books.add("canceled")
            raise
        self._books.add(SUCCEEDED, turn.usage)
        return turn

    async def aclose(self) -> None:
        await self._model.aclose()
