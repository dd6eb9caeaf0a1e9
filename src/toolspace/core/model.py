"""What a model is told and what it says, as data that is the same for every provider. Asks no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from toolspace.core.defaults import MODEL_TIMEOUT_SECONDS
from toolspace.core.result import AudioPart, ImagePart, ResourcePart
from toolspace.core.tool import Tool

FinishReason = Literal["stop", "tools", "length", "filter", "other"]
"""Why a model stopped: it was done, it wants tools, it ran out of room, its provider objected, or who knows."""
ToolChoice = Literal["auto", "required", "none"] | str
"""Any, at least one, none; or the name of the one tool to call."""
Media = ImagePart | AudioPart | ResourcePart


class Usage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What model requests cost. `input_tokens` counts everything that was read, cached or not."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """In US dollars, as far as the price is known."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            requests=self.requests + other.requests,
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
            cost=self.cost + other.cost,
        )


NO_USAGE = Usage()


class ModelCall(msgspec.Struct, frozen=True, rename="camel"):
    """A tool call as a model wrote it."""

    id: str
    """The model's own id for it: unique within its turn at best."""
    name: str
    arguments: str
    """JSON text, as it came: it may be malformed."""


class ModelToolResult(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The answer to a model's call, as the model reads it."""

    id: str
    """The `id` of the `ModelCall`."""
    name: str
    text: str
    is_error: bool = False
    media: tuple[Media, ...] = ()
    """For models that can look at it; the text has a placeholder for each."""


class UserTurn(msgspec.Struct, frozen=True, tag="user", rename="camel", omit_defaults=True):
    """What the model is told: events, requests, advice."""

    text: str
    media: tuple[Media, ...] = ()


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True, tag="model", rename="camel", omit_defaults=True):
    """What the model said."""

    text: str = ""
    calls: tuple[ModelCall, ...] = ()
    finish: FinishReason = "stop"
    usage: Usage = NO_USAGE
    model: str = ""
    thinking: tuple[Mapping[str, Any], ...] = ()
    """Whatever its provider wants back unchanged with the next request; opaque."""


class ResultsTurn(msgspec.Struct, frozen=True, tag="results", rename="camel"):
    """The answers to all calls of the model's turn before, in the order asked."""

    results: tuple[ModelToolResult, ...] = msgspec.field(name="answers")


Turn = UserTurn | ModelTurn | ResultsTurn


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is to answer. None: as its provider likes."""

    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning: str | None = None
    """`low`, `medium`, `high`, `none`, or another word that the provider knows."""
    timeout: float = MODEL_TIMEOUT_SECONDS
    """Seconds for one request."""


DEFAULT_SETTINGS = ModelSettings()


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One question to a model.

    Providers keep what they made of `tools` for the next request that has the very same tuple.
    """

    system: str
    turns: Sequence[Turn]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    settings: ModelSettings = DEFAULT_SETTINGS


class TextDelta(msgspec.Struct, frozen=True):
    """A piece of the model's text."""

    text: str


class ThinkingDelta(msgspec.Struct, frozen=True):
    """A piece of what it thinks before it answers."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """The model begins to write a tool call. `index` counts the calls of the turn."""

    index: int
    id: str
    name: str


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


class ResponseRestarted(msgspec.Struct, frozen=True):
    """The answer broke off and is asked for again: forget every piece of this turn so far."""


ModelStreamPart = TextDelta | ThinkingDelta | CallStarted | CallDelta | ResponseRestarted
ModelListener = Callable[[ModelStreamPart], None]
"""Hears the pieces of an answer while the model writes it."""


# MERGED from model: A model, whoever serves it.


class Model(ABC):
    """Answers requests. Holds no conversation: each request brings all of it."""

    name: str = ""
    """`provider:model`, as people write it: `openai:gpt-5`."""
    context_window: int | None = None
    """In tokens, where it is known."""

    @abstractmethod
    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        """The model's whole turn; `listen` hears its pieces as they come. Raises `ModelError`.

        Cancelling it stops the request.
        """

    async def aclose(self) -> None:
        """Lets go of its connections."""


# MERGED from embedder: Meaning as numbers, whoever computes them.


class Embedder(Protocol):
    """Turns texts into vectors: the closer their directions, the closer what the texts mean."""

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, in their order, all of one length. Raises `ModelError`."""
        ...
