"""Models over Anthropic's messages API."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.model import (
    FinishReason,
    ModelCall,
    ModelRequest,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    Usage,
    UserTurn,
)
from toolspace.models import errors
from toolspace.models.request_encoding import (
    IMAGES,
    PDF,
    ToolEncoder,
    encode_arguments,
    normalize_turns,
    split_media,
    split_turn,
)
from toolspace.models.streaming import StreamedResponse, StreamingModel

VERSION = "2023-06-01"

_KEPT = {"type": "ephemeral"}
"""Marks up to where the provider keeps what it has read, for the next request."""
_FINISHES: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tools",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "filter",
}
_NUMBERS = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:-(\d{1,2})(?!\d))?")
_MAX_TOKENS = 32_000
"""Tokens of an answer, where nobody says: the API wants to be told, and every model since version 4 can do that."""
_OLD_MAX_TOKENS = 4_096
_BUDGETS = {"minimal": 1_024, "low": 2_048, "medium": 8_192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
"""Tokens to think with, for the models that want a number."""
_THOUGHTS = ("thinking", "redacted_thinking")
_THOUGHTLESS = frozenset(("thinking", "thoughts"))


class _Counts(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str | None = None
    partial_json: str | None = None
    thinking: str | None = None
    signature: str | None = None
    stop_reason: str | None = None


class _Block(msgspec.Struct):
    type: str = ""
    id: str | None = None
    name: str | None = None
    text: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None


class _Message(msgspec.Struct):
    usage: _Counts | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    delta: _Delta | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: _Counts | None = None
    error: Any = None
    content: list[_Block] | None = None
    stop_reason: str | None = None


_decode = msgspec.json.Decoder(_Event, strict=False).decode


class AnthropicResponse(StreamedResponse):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._places: dict[int, int] = {}
        """The place of a block in the message → the index of the call."""
        self._inputs: dict[int, str] = {}
        """The place of a block → arguments that it began with."""
        self._thoughts: dict[int, dict[str, Any]] = {}
        self._pieces: dict[int, list[str]] = {}
        self._counts = _Counts()

    def receive_event(self, data: bytes) -> None:
        if not data:
            return
        event = _decode(data)
        match event.type:
            case "content_block_delta":
                if event.delta is not None:
                    self._add(event.index, event.delta)
            case "content_block_start":
                if event.content_block is not None:
                    self._begin(event.index, event.content_block)
            case "content_block_stop":
                self._stop(event.index)
            case "message_start":
                if event.message is not None and event.message.usage is not None:
                    self._count(event.message.usage)
            case "message_delta":
                if event.usage is not None:
                    self._count(event.usage)
                if event.delta is not None and event.delta.stop_reason:
                    self.finish = _FINISHES.get(event.delta.stop_reason, "other")
            case "message_stop":
                self.is_complete = True
            case "error":
                raise errors.error_from_event(self.name, event.error, check=self.credential_name)
            case "message":
                self._take_whole(event)
            case _:
                pass  # `ping`, and whatever is to come.

    def _begin(self, place: int, block: _Block) -> None:
        match block.type:
            case "tool_use":
                self._places[place] = self.start_call(block.id, block.name or "")
                given = bytes(block.input).decode()
                if given not in ("", "{}", "null"):
                    self._inputs[place] = given
            case "thinking":
                self._thoughts[place] = {"type": "thinking", "signature": block.signature or ""}
                self._pieces[place] = [block.thinking] if block.thinking else []
            case "redacted_thinking":
                self._thoughts[place] = {"type": "redacted_thinking", "data": block.data or ""}
            case "text":
                if block.text:
                    self.add_text(block.text)
            case _:
                pass  # What the provider's own tools did.

    def _add(self, place: int, delta: _Delta) -> None:
        if delta.text:
            self.add_text(delta.text)
        elif delta.partial_json:
            at = self._places.get(place)
            if at is not None:
                self.add_arguments(at, delta.partial_json)
        elif delta.thinking:
            self.add_thinking(delta.thinking)
            self._pieces.setdefault(place, []).append(delta.thinking)
        elif delta.signature and place in self._thoughts:
            self._thoughts[place]["signature"] += delta.signature

    def _stop(self, place: int) -> None:
        at = self._places.get(place)
        if at is not None and not self.has_arguments(at):
            self.add_arguments(at, self._inputs.get(place, "{}"))
        thought = self._thoughts.pop(place, None)
        if thought is not None:
            if thought["type"] == "thinking":
                thought["thinking"] = "".join(self._pieces.pop(place, ()))
            if thought.get("signature") or thought.get("data"):  # Without, the provider would not take it back.
                self.layout.add_entry(thought)

    def _take_whole(self, message: _Event) -> None:
        for place, block in enumerate(message.content or ()):
            if block.type == "thinking" and block.thinking:
                self.add_thinking(block.thinking)
            self._begin(place, block)
            self._stop(place)
        if message.usage is not None:
            self._count(message.usage)
        self.finish = _FINISHES.get(message.stop_reason or "", "other")

    def _count(self, usage: _Counts) -> None:
        """Counts are of the whole so far; those that an event leaves out still hold."""
        for field in usage.__struct_fields__:
            value = getattr(usage, field)
            if value is not None:
                setattr(self._counts, field, value)
        counts = self._counts
        cached = counts.cache_read_input_tokens or 0
        self.cache_write_tokens = counts.cache_creation_input_tokens or 0
        self.usage = Usage(
            input_tokens=(counts.input_tokens or 0) + cached + self.cache_write_tokens,
            cached_tokens=cached,
            output_tokens=counts.output_tokens or 0,
        )


class AnthropicModel(StreamingModel):
    """One of Anthropic's models, or whatever speaks as they do."""

    response_class = AnthropicResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "effort": ("output_config", "effort"),
        "thoughts": ("thinking block", "redacted_thinking", "signature"),
        "thinking": ("thinking",),
        "tool_choice": ("tool_choice",),
        "max_tokens": ("max_tokens",),
        "marks": ("cache_control",),
        "images": ("image", "document", "pdf"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._toolbox = ToolEncoder("anthropic", _mark_last)
        self._plain_toolbox = ToolEncoder("anthropic")
        found = _NUMBERS.match(self.model)
        # A name without a version is taken for a new model.
        self._version: tuple[int, int] = (int(found[1]), int(found[2] or 0)) if found is not None else (99, 0)

    def build_request(self, request: ModelRequest, without: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        marks = "marks" not in without
        forced = request.tool_choice not in ("auto", "none") and "tool_choice" not in without
        limit = settings.max_output_tokens or self._default_limit(without)
        body: dict[str, Any] = {"model": self.model, "max_tokens": limit, "stream": True}
        if request.system.strip():
            system: dict[str, Any] = {"type": "text", "text": request.system}
            body["system"] = [{**system, "cache_control": _KEPT}] if marks else [system]
        body["messages"] = self._messages(request, without)
        if request.tools:
            encoded = (self._toolbox if marks else self._plain_toolbox).encode(request.tools)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if forced:
                if choice == "required":
                    body["tool_choice"] = {"type": "any"}
                elif choice in encoded.names:
                    body["tool_choice"] = {"type": "tool", "name": choice}
            elif choice == "none":
                body["tool_choice"] = {"type": "none"}
        thinks = self._think(body, settings.reasoning, limit, forced=forced, without=without)
        if settings.temperature is not None and not thinks and "temperature" not in without:
            body["temperature"] = min(1.0, settings.temperature)
        return body

    def _default_limit(self, without: frozenset[str]) -> int:
        return _OLD_MAX_TOKENS if self._version < (4, 0) or "max_tokens" in without else _MAX_TOKENS

    def _think(
        self, body: dict[str, Any], reasoning: str | None, limit: int, *, forced: bool, without: frozenset[str]
    ) -> bool:
        """Says how much to think, as models of this version want to hear it; and whether it does."""
        if reasoning is None or "thinking" in without:
            return False
        if reasoning == "none":
            if self._version >= (4, 0):
                body["thinking"] = {"type": "disabled"}
            return False
        if self._version >= (4, 6):
            body["thinking"] = {"type": "adaptive", "display": "summarized"}
            if "effort" not in without:
                body["output_config"] = {"effort": "low" if reasoning == "minimal" else reasoning}
            return True
        if self._version < (3, 7) or forced:  # The older ones do not think where they are told which tool to call.
            return False
        budget = _BUDGETS.get(reasoning, _BUDGETS["medium"])
        body["thinking"] = {"type": "enabled", "budget_tokens": budget}
        body["max_tokens"] = limit + budget  # Thinking counts as output.
        return True

    def _messages(self, request: ModelRequest, without: frozenset[str]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, ModelTurn):
                messages.append({"role": "assistant", "content": self._spoken(turn, without)})
                continue
            blocks = _results(turn, without) if isinstance(turn, ResultsTurn) else _user(turn, without)
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"].extend(blocks)
            else:
                messages.append({"role": "user", "content": blocks})
        if "marks" not in without:
            # The last, for the next request; and the one before it, which this request finds kept.
            asked = [message for message in messages if message["role"] == "user"]
            for message in asked[-2:]:
                message["content"][-1]["cache_control"] = _KEPT
        return messages

    def _spoken(self, turn: ModelTurn, without: frozenset[str]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                blocks.append({"type": "text", "text": piece})
            elif isinstance(piece, ModelCall):
                blocks.append(
                    {"type": "tool_use", "id": piece.id, "name": piece.name, "input": encode_arguments(piece)}
                )
            elif piece.get("type") in _THOUGHTS and not without & _THOUGHTLESS:
                blocks.append(dict(piece))
        return blocks


def _mark_last(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if tools:
        tools[-1] = {**tools[-1], "cache_control": _KEPT}
    return tools


def _user(turn: UserTurn, without: frozenset[str]) -> list[dict[str, Any]]:
    seen, rest = split_media(turn.media, frozenset() if "images" in without else IMAGES | {PDF})
    text = "\n".join((turn.text, *rest)) if turn.text.strip() else "\n".join(rest)
    return [*map(_part, seen), *([{"type": "text", "text": text}] if text.strip() else [])]


def _results(turn: ResultsTurn, without: frozenset[str]) -> list[dict[str, Any]]:
    return [_result(one, without) for one in turn.results]


def _result(answer: ModelToolResult, without: frozenset[str]) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": answer.id}
    if answer.is_error:
        block["is_error"] = True  # Which takes text only.
        seen: list[tuple[str, str]] = []
    else:
        seen, _ = split_media(answer.media, frozenset() if "images" in without else IMAGES | {PDF})
    if seen:
        text = [{"type": "text", "text": answer.text}] if answer.text.strip() else []
        block["content"] = [*text, *map(_part, seen)]
    elif answer.text.strip():
        block["content"] = answer.text
    return block


def _part(seen: tuple[str, str]) -> dict[str, Any]:
    kind, data = seen
    source = {"type": "base64", "media_type": kind, "data": data}
    return {"type": "document" if kind == PDF else "image", "source": source}
