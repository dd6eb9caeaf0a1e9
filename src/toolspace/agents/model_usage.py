"""Counts what agents ask of models, by model, since the process started. Bounds nothing: for that there are frames."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from toolspace.core.conversation import NO_USAGE, Listener, ModelRequest, ModelTurn, Usage
from toolspace.core.model import Model
from toolspace.errors import ModelError

ANSWERED = "ok"


class Spent:
    """What one model was asked."""

    __slots__ = ("requests", "usage")

    def __init__(self) -> None:
        self.requests: dict[str, int] = {}
        """How many, by how they ended: `ok`, `canceled`, or the kind of error."""
        self.usage: Usage = NO_USAGE

    def count(self, end: str, usage: Usage = NO_USAGE) -> None:
        self.requests[end] = self.requests.get(end, 0) + 1
        self.usage = self.usage + usage


class Spending:
    """The books of all models."""

    def __init__(self) -> None:
        self._books: dict[str, Spent] = {}

    @property
    def models(self) -> Mapping[str, Spent]:
        """By name: `openai:gpt-5`."""
        return self._books

    def counting(self, model: Model) -> Model:
        """The same model, with a look at what comes of each request."""
        return _Counted(model, self._books.setdefault(model.name, Spent()))


class _Counted(Model):
    def __init__(self, model: Model, books: Spent) -> None:
        self.name = model.name
        self.context_window = model.context_window
        self._model = model
        self._books = books

    async def respond(self, request: ModelRequest, listen: Listener | None = None) -> ModelTurn:
        try:
            turn = await self._model.respond(request, listen)
        except ModelError as error:
            self._books.count(error.kind)
            raise
        except asyncio.CancelledError:
            self._books.count("canceled")
            raise
        self._books.count(ANSWERED, turn.usage)
        return turn

    async def aclose(self) -> None:
        await self._model.aclose()
