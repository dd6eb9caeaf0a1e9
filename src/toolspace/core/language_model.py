"""The interfaces `Model` and `Embedder`, and the data of requests and responses, the same for every provider.

The adapters in `models` implement them; agents use them. Turns are stored as JSON, so field names must stay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec

from toolspace.core import json_text
from toolspace.core.defaults import MODEL_TIMEOUT_SECONDS
from toolspace.core.result import AudioPart, ImagePart, ResourcePart
from toolspace.core.tool import Tool

FinishReason = Literal["stop", "tools", "length", "filter", "other"]
"""Why a model stopped: done, it calls tools, it reached its token limit, a content filter, or unknown."""
ToolChoice = Literal["auto", "required", "none"] | str
"""Any number of tool calls, at least one, none, or the name of the tool to call."""
Media = ImagePart | AudioPart | ResourcePart


class Usage(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Tokens and cost of model requests. `input_tokens` includes cached tokens."""

    requests: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost: float = 0.0
    """In US dollars; 0 for a model whose price is unknown."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, usage: Usage) -> Usage:
        return Usage(**{name: getattr(self, name) + getattr(usage, name) for name in self.__struct_fields__})


NO_USAGE = Usage()


class ModelCall(msgspec.Struct, frozen=True, rename="camel"):
    """A tool call, as the model wrote it."""

    id: str
    """The id that the model chose. It is unique within a turn at best."""
    name: str
    arguments: str
    """JSON text, which may be malformed."""


class ModelToolResult(msgspec.Struct, frozen=True, rename="camel", omit_defaults=True):
    """The result of a model's tool call, as the model reads it."""

    id: str
    """The `id` of the `ModelCall`."""
    name: str
    text: str
    is_error: bool = False
    media: tuple[Media, ...] = ()
    """For models that accept media. The text has a placeholder for each."""


class UserTurn(msgspec.Struct, frozen=True, tag="user", rename="camel", omit_defaults=True):
    """Input for the model: events, requests, advice."""

    text: str
    media: tuple[Media, ...] = ()


class ModelTurn(msgspec.Struct, frozen=True, kw_only=True, tag="model", rename="camel", omit_defaults=True):
    """One response of the model."""

    text: str = ""
    calls: tuple[ModelCall, ...] = ()
    finish: FinishReason = "stop"
    usage: Usage = NO_USAGE
    model: str = ""
    thinking_data: tuple[Mapping[str, Any], ...] = msgspec.field(default=(), name="thinking")
    """Opaque data that the provider needs back, unchanged, with the next request."""


class ResultsTurn(msgspec.Struct, frozen=True, tag="results", rename="camel"):
    """The results of all calls of the previous model turn, in the order of the calls."""

    results: tuple[ModelToolResult, ...] = msgspec.field(name="answers")


Turn = UserTurn | ModelTurn | ResultsTurn
_turns_decoder = msgspec.json.Decoder(tuple[Turn, ...])


def encode_turns(turns: Iterable[Turn]) -> str:
    """Returns a conversation as JSON text, for `decode_turns`."""
    return json_text.encode(tuple(turns))


def decode_turns(text: str | bytes) -> tuple[Turn, ...]:
    """Returns the conversation that `encode_turns` wrote. Raises `ValueError` if it is none."""
    try:
        return _turns_decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"this is not a conversation: {error}") from None


def convert_turns(turns: Iterable[Turn | Mapping[str, Any]]) -> tuple[Turn, ...]:
    """Returns turns that may be given as JSON data, as in the decoded text of `encode_turns`. Raises `ValueError`."""
    try:
        return tuple(
            turn if isinstance(turn, UserTurn | ModelTurn | ResultsTurn) else msgspec.convert(turn, Turn)
            for turn in turns
        )
    except (msgspec.ValidationError, TypeError) as error:
        raise ValueError(f"this is not a conversation: {error}") from None


class ModelSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a request. None: the provider's default."""

    temperature: float | None = None
    max_output_tokens: int | None = None
    reasoning: str | None = None
    """`low`, `medium`, `high`, `none`, or another value that the provider accepts."""
    timeout: float = MODEL_TIMEOUT_SECONDS
    """Seconds for one request."""


DEFAULT_SETTINGS = ModelSettings()


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to a model.

    Adapters cache what they derive from `tools` for the next request with the same tuple object.
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
    """A piece of the model's reasoning before its answer."""

    text: str


class CallStarted(msgspec.Struct, frozen=True):
    """The model starts to write a tool call. `index` counts the calls of the turn."""

    index: int
    id: str
    name: str


class CallDelta(msgspec.Struct, frozen=True):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


class ResponseRestarted(msgspec.Struct, frozen=True):
    """The response broke off and is requested again. All pieces of this turn so far are void."""


ModelStreamPart = TextDelta | ThinkingDelta | CallStarted | CallDelta | ResponseRestarted
ModelListener = Callable[[ModelStreamPart], None]
"""Receives the pieces of a response while the model writes it."""


class Model(ABC):
    """A language model. It is stateless: each request has the whole conversation."""

    name: str = ""
    """`provider:model`, for example `openai:gpt-5`."""
    context_window: int | None = None
    """In tokens; None if unknown."""

    @abstractmethod
    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        """Returns the model's response. Calls `listen` with its pieces while they arrive. Raises `ModelError`.

        Cancelling it stops the request.
        """

    async def aclose(self) -> None:
        """Closes its connections."""


class Embedder(Protocol):
    """Turns texts into vectors. Texts with similar meanings have vectors with similar directions."""

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """Returns a vector for each text, in their order, all of the same length. Raises `ModelError`."""
        ...
