"""Models over OpenAI's chat completions, which most other providers and local servers speak too.

Servers differ in what they leave out: ids, indices, usage, the reason of the end, the last line. All of that is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from toolspace.core.model import (
    FinishReason,
    Media,
    ModelCall,
    ModelRequest,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    Usage,
    UserTurn,
)
from toolspace.models import errors
from toolspace.models.prices import ModelPrice
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

_FINISHES: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "tool_calls": "tools",
    "function_call": "tools",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "filter",
}
_THOUGHTS = "reasoning_content"
_DETAILS = "reasoning_details"


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: msgspec.Raw = msgspec.Raw()


class _ToolCall(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    reasoning_details: list[Any] | None = None
    tool_calls: list[_ToolCall] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    finish_reason: str | None = None
    index: int | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    prompt_cache_hit_tokens: int | None = None
    cost: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


# Not strict: some servers write numbers as texts.
_decode = msgspec.json.Decoder(_Chunk, strict=False).decode
_text = msgspec.json.Decoder(str).decode


class OpenAIChatResponse(StreamedResponse):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._places: dict[int, int] = {}
        """The index that the server gives a call → ours."""
        self._named: dict[int, str] = {}
        """Our index → the id that the server gave."""
        self._waiting: dict[int, list[str]] = {}
        """Arguments of calls whose name has not come, by the server's index; and the ids of those."""
        self._early: dict[int, str] = {}
        self._thoughts: list[str] = []
        self._details: list[Any] = []

    def receive_event(self, data: bytes) -> None:
        if not data or data == b"[DONE]":
            self.is_complete = self.is_complete or bool(data)
            return
        chunk = _decode(data)
        if chunk.choices:
            choice = chunk.choices[0]
            if not choice.index:
                delta = choice.delta or choice.message
                if delta is not None:
                    self._add(delta)
                if choice.finish_reason:
                    self.finish = _FINISHES.get(choice.finish_reason, "other")
        if chunk.usage is not None:
            self._count(chunk.usage)
        if chunk.error is not None:
            raise errors.error_from_event(self.name, chunk.error, check=self.credential_name)

    def build_turn(self, model: str, price: ModelPrice | None, asked: int) -> ModelTurn:
        # Only with calls: the models that want their thoughts back want them in the middle of their work, and
        # others refuse them.
        if self.call_count and self._details:
            self.layout.add_entry({"type": _DETAILS, "value": self._details})
        elif self.call_count and self._thoughts:
            self.layout.add_entry({"type": _THOUGHTS, "value": "".join(self._thoughts)})
        return super().build_turn(model, price, asked)

    def _add(self, delta: _Delta) -> None:
        content = delta.content
        if content:
            if isinstance(content, str):
                self.add_text(content)
            else:
                self._add_parts(content)
        if delta.tool_calls:
            for call in delta.tool_calls:
                self._add_call(call)
        if delta.reasoning_content:
            self._think(delta.reasoning_content)
        elif isinstance(delta.reasoning, str) and delta.reasoning:
            self._think(delta.reasoning)
        if delta.reasoning_details:
            self._details.extend(delta.reasoning_details)
        if delta.refusal:
            self.add_refusal(delta.refusal)
        if delta.function_call is not None:
            self._add_call(_ToolCall(index=0, function=delta.function_call))

    def _add_parts(self, parts: list[Any]) -> None:
        """Content that is a list of parts, as some servers write it."""
        for part in parts:
            if isinstance(part, str):
                self.add_text(part)
            elif isinstance(part, dict):
                text: Any = part.get("text")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                if isinstance(text, str) and text:
                    self.add_text(text)

    def _think(self, piece: str) -> None:
        self._thoughts.append(piece)
        self.add_thinking(piece)

    def _add_call(self, call: _ToolCall) -> None:
        function = call.function
        name = function.name if function is not None else None
        piece = _argument_text(function.arguments) if function is not None else ""
        place = call.index
        if place is None:
            # A new id, or a name after arguments, begins another call; all else goes on with the last.
            last = self.call_count - 1
            fresh = last < 0 or bool(call.id and call.id != self._named.get(last))
            fresh = fresh or bool(name and not call.id and self.has_arguments(last))
            place = len(self._places) if fresh else len(self._places) - 1
        at = self._places.get(place)
        if at is not None and name and call.id and self._named.get(at) not in (None, call.id):
            at = None  # All calls under one index, told apart by their ids.
        if at is None:
            if not name:
                self._waiting.setdefault(place, []).append(piece)
                if call.id:
                    self._early[place] = call.id
                return
            identity = call.id or self._early.pop(place, None)
            at = self.start_call(identity, name)
            self._places[place] = at
            if identity:
                self._named[at] = identity
            piece = "".join(self._waiting.pop(place, ())) + piece
        if piece:
            self.add_arguments(at, piece)

    def _count(self, usage: _Usage) -> None:
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else usage.prompt_cache_hit_tokens
        if usage.prompt_tokens is None and usage.completion_tokens is None:
            return
        self.usage = Usage(
            input_tokens=usage.prompt_tokens or 0,
            cached_tokens=cached or 0,
            output_tokens=usage.completion_tokens or 0,
        )
        self.cost = usage.cost


class OpenAIChatModel(StreamingModel):
    """One model behind a chat completions API."""

    response_class = OpenAIChatResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "stream_options": ("stream_options",),
        "temperature": ("temperature",),
        "reasoning_effort": ("reasoning_effort", "reasoning effort"),
        "max_tokens": ("max_tokens",),
        "max_completion_tokens": ("max_completion_tokens",),
        "tool_choice": ("tool_choice",),
        "thoughts": (_THOUGHTS, _DETAILS),
        "descriptions": ("description",),
        "images": ("image", "multimodal", "vision", "file"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._toolbox = ToolEncoder("openai")
        # OpenAI's own models know the limit under its new name only, and most other servers under the old one only.
        if "//api.openai.com" in self.endpoint.url or ".azure.com" in self.endpoint.url:
            self._without = frozenset(("max_tokens",))

    def build_request(self, request: ModelRequest, without: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(request, without),
            "stream": True,
        }
        if "stream_options" not in without:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            encoded = self._toolbox.encode(request.tools, brief="descriptions" in without)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if choice != "auto" and "tool_choice" not in without:
                if choice in ("required", "none"):
                    body["tool_choice"] = choice
                elif choice in encoded.names:
                    body["tool_choice"] = {"type": "function", "function": {"name": choice}}
        if settings.temperature is not None and "temperature" not in without:
            body["temperature"] = settings.temperature
        if settings.max_output_tokens is not None:
            word = next((one for one in ("max_tokens", "max_completion_tokens") if one not in without), None)
            if word is not None:
                body[word] = settings.max_output_tokens
        if settings.reasoning is not None and "reasoning_effort" not in without:
            body["reasoning_effort"] = settings.reasoning
        return body

    def _messages(self, request: ModelRequest, without: frozenset[str]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if request.system.strip():
            messages.append({"role": "system", "content": request.system})
        pictures: list[dict[str, Any]] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, UserTurn):
                messages.append({"role": "user", "content": _content([*pictures], turn.text, turn.media, without)})
                pictures = []
            elif isinstance(turn, ModelTurn):
                if pictures:
                    messages.append({"role": "user", "content": pictures})
                    pictures = []
                messages.append(self._spoken(turn, without))
            else:
                messages.extend({"role": "tool", "tool_call_id": one.id, "content": one.text} for one in turn.results)
                pictures = _pictures(turn, without)
        if pictures:
            messages.append({"role": "user", "content": pictures})
        return messages

    def _spoken(self, turn: ModelTurn, without: frozenset[str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, ModelCall):
                function = {"name": piece.name, "arguments": bytes(encode_arguments(piece)).decode()}
                calls.append({"id": piece.id, "type": "function", "function": function})
            elif piece.get("type") in (_THOUGHTS, _DETAILS) and "thoughts" not in without:
                message[piece["type"]] = piece["value"]
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        return message


def _content(
    before: list[dict[str, Any]], text: str, media: Sequence[Media], without: frozenset[str]
) -> str | list[dict[str, Any]]:
    if not media and not before:
        return text
    seen, rest = split_media(media, frozenset() if "images" in without else IMAGES | {PDF})
    text = "\n".join((text, *rest)) if text.strip() else "\n".join(rest)
    parts = [*before, *([{"type": "text", "text": text}] if text else []), *map(_part, seen)]
    return text if not before and not seen else parts


def _part(seen: tuple[str, str]) -> dict[str, Any]:
    kind, data = seen
    url = f"data:{kind};base64,{data}"
    if kind == PDF:
        return {"type": "file", "file": {"filename": "document.pdf", "file_data": url}}
    return {"type": "image_url", "image_url": {"url": url}}


def _pictures(turn: ResultsTurn, without: frozenset[str]) -> list[dict[str, Any]]:
    """What the answers show, for the next message: a tool's own message takes text only."""
    parts: list[dict[str, Any]] = []
    for one in turn.results:
        parts.extend(_picture_of(one, without))
    return parts


def _picture_of(answer: ModelToolResult, without: frozenset[str]) -> list[dict[str, Any]]:
    if not answer.media or "images" in without:
        return []
    seen, _ = split_media(answer.media, IMAGES | {PDF})
    label = {"type": "text", "text": f"From the result of {answer.name}:"}
    return [label, *map(_part, seen)] if seen else []


def _argument_text(raw: msgspec.Raw) -> str:
    data = bytes(raw)
    if data.startswith(b'"'):
        return _text(data)
    return "" if data in (b"", b"null") else data.decode()  # An object, where the text of one is expected.
