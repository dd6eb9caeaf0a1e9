"""Models over OpenAI's responses API: its own models think and call tools in one request only there.

Nothing is kept at OpenAI: each request brings the whole conversation, and what the model thought comes along sealed.
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

_REASONING = "reasoning"
_SEALED = "reasoning.encrypted_content"


class _Item(msgspec.Struct):
    type: str = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    encrypted_content: str | None = None
    summary: list[Any] | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _Details | None = None


class _Reason(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    incomplete_details: _Reason | None = None
    error: Any = None


class _Event(msgspec.Struct):
    type: str = ""
    delta: Any = None
    output_index: int = 0
    item: _Item | None = None
    response: _Response | None = None
    code: Any = None
    message: str | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event, strict=False).decode


class OpenAIResponsesResponse(StreamedResponse):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._places: dict[int, int] = {}
        """The place of an item in the output → the index of the call."""

    def receive_event(self, data: bytes) -> None:
        if not data or data == b"[DONE]":
            return
        event = _decode(data)
        match event.type:
            case "response.output_text.delta":
                self.add_text(event.delta)
            case "response.function_call_arguments.delta":
                at = self._places.get(event.output_index)
                if at is not None:
                    self.add_arguments(at, event.delta)
            case "response.output_item.added":
                self._add(event.output_index, event.item)
            case "response.output_item.done":
                self._complete(event.output_index, event.item)
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.add_thinking(event.delta)
            case "response.refusal.delta":
                self.add_refusal(event.delta)
            case "response.completed" | "response.incomplete" | "response.done":
                self._end(event.response or _Response())
            case "response.failed":
                raise errors.error_from_event(
                    self.name, (event.response or _Response()).error, check=self.credential_name
                )
            case "error":
                said = event.error or {"code": event.code, "message": event.message}
                raise errors.error_from_event(self.name, said, check=self.credential_name)
            case _:
                pass  # Parts that begin and end, and whatever is to come.

    def _add(self, place: int, item: _Item | None) -> None:
        if item is not None and item.type == "function_call" and place not in self._places:
            self._places[place] = self.start_call(item.call_id, item.name or "")
            if item.arguments:
                self.add_arguments(self._places[place], item.arguments)

    def _complete(self, place: int, item: _Item | None) -> None:
        if item is None:
            return
        if item.type == _REASONING and item.encrypted_content:
            self.layout.add_entry(
                {"type": _REASONING, "summary": item.summary or [], "encrypted_content": item.encrypted_content}
            )
        self._add(place, item)
        at = self._places.get(place)
        if at is not None and item.arguments and not self.has_arguments(at):
            self.add_arguments(at, item.arguments)

    def _end(self, response: _Response) -> None:
        self.is_complete = True
        usage = response.usage
        if usage is not None:
            details = usage.input_tokens_details
            cached = details.cached_tokens if details is not None else None
            self.usage = Usage(
                input_tokens=usage.input_tokens, cached_tokens=cached or 0, output_tokens=usage.output_tokens
            )
        self.finish = _finish(response)


class OpenAIResponsesModel(StreamingModel):
    """One of OpenAI's own models."""

    response_class = OpenAIResponsesResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "sealed": ("encrypted", "'include'"),
        "reasoning": ("reasoning",),
        "max_output_tokens": ("max_output_tokens",),
        "tool_choice": ("tool_choice",),
        "descriptions": ("description",),
        "images": ("image", "input_file"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._toolbox = ToolEncoder("openai-responses")

    def build_request(self, request: ModelRequest, without: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        body: dict[str, Any] = {
            "model": self.model,
            "input": self._input(request, without),
            "stream": True,
            "store": False,
        }
        if request.system.strip():
            body["instructions"] = request.system
        if "sealed" not in without:
            body["include"] = [_SEALED]
        if request.tools:
            encoded = self._toolbox.encode(request.tools, brief="descriptions" in without)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if choice != "auto" and "tool_choice" not in without:
                if choice in ("required", "none"):
                    body["tool_choice"] = choice
                elif choice in encoded.names:
                    body["tool_choice"] = {"type": "function", "name": choice}
        if settings.temperature is not None and "temperature" not in without:
            body["temperature"] = settings.temperature
        if settings.max_output_tokens is not None and "max_output_tokens" not in without:
            body["max_output_tokens"] = max(16, settings.max_output_tokens)  # The least that the API takes.
        if settings.reasoning is not None and "reasoning" not in without:
            body["reasoning"] = {"effort": settings.reasoning}
        return body

    def _input(self, request: ModelRequest, without: frozenset[str]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, UserTurn):
                items.append({"role": "user", "content": _content(turn.text, turn.media, without)})
            elif isinstance(turn, ModelTurn):
                items.extend(self._spoken(turn, without))
            else:
                items.extend(
                    {"type": "function_call_output", "call_id": one.id, "output": _output(one, without)}
                    for one in turn.results
                )
        return items

    def _spoken(self, turn: ModelTurn, without: frozenset[str]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                items.append({"role": "assistant", "content": [{"type": "output_text", "text": piece}]})
            elif isinstance(piece, ModelCall):
                arguments = bytes(encode_arguments(piece)).decode()
                items.append({"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": arguments})
            elif piece.get("type") == _REASONING and "sealed" not in without:
                items.append(dict(piece))
        return items


def _finish(response: _Response) -> FinishReason:
    details = response.incomplete_details
    if details is None or details.reason is None:
        return "other" if response.status == "incomplete" else "stop"
    return "filter" if details.reason == "content_filter" else "length"


def _content(text: str, media: Sequence[Media], without: frozenset[str]) -> str | list[dict[str, Any]]:
    if not media:
        return text
    seen, rest = split_media(media, frozenset() if "images" in without else IMAGES | {PDF})
    text = "\n".join((text, *rest)) if text.strip() else "\n".join(rest)
    if not seen:
        return text
    return [*([{"type": "input_text", "text": text}] if text else []), *map(_part, seen)]


def _output(answer: ModelToolResult, without: frozenset[str]) -> str | list[dict[str, Any]]:
    # Its text has a placeholder for what cannot be shown.
    seen, _ = split_media(answer.media, frozenset() if "images" in without else IMAGES | {PDF})
    return [{"type": "input_text", "text": answer.text}, *map(_part, seen)] if seen else answer.text


def _part(seen: tuple[str, str]) -> dict[str, Any]:
    kind, data = seen
    url = f"data:{kind};base64,{data}"
    if kind == PDF:
        return {"type": "input_file", "filename": "document.pdf", "file_data": url}
    return {"type": "input_image", "image_url": url}
