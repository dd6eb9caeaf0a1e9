"""Counts the requests to models since the process started: results, tokens and cost, by model. Limits nothing.

The registry wraps every model that it opens; the metrics endpoint reads the counts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from toolspace.core.model import NO_USAGE, Model, ModelListener, ModelRequest, ModelTurn, Usage
from toolspace.errors import ModelError

SUCCEEDED = "ok"


class ModelUsage:
    """The requests to one model."""

    __slots__ = ("requests", "usage")

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """Counts by result: `ok`, `canceled`, or the kind of error."""
        self.usage: Usage = NO_USAGE

    def add(self, result: str, usage: Usage = NO_USAGE) -> None:
        self.requests[result] = self.requests.get(result, 0) + 1
        self.usage = self.usage + usage


class ModelUsageCounter:
    """Counts the requests to all models that it wraps."""

    def __init__(self) -> None:
        self._usage_by_model: dict[str, ModelUsage] = {}

    @property
    def by_model(self) -> Mapping[str, ModelUsage]:
        """By name of the model, such as `openai:gpt-5`."""
        return self._usage_by_model

    def wrap(self, model: Model) -> Model:
        """Returns the same model, with its requests counted."""
        return _CountingModel(model, self._usage_by_model.setdefault(model.name, ModelUsage()))


class _CountingModel(Model):
    def __init__(self, model: Model, usage: ModelUsage) -> None:
        self.name = model.name
        self.context_window = model.context_window
        self._model = model
        self._usage = usage

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        try:
            turn = await self._model.respond(request, listen)
        except ModelError as error:
            self._usage.add(error.kind)
            raise
        except asyncio.CancelledError:
            self._usage.add("canceled")
            raise
        self._usage.add(SUCCEEDED, turn.usage)
        return turn

    async def aclose(self) -> None:
        await self._model.aclose()
