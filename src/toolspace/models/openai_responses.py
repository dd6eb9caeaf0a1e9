"""The adapter for OpenAI's responses API, the only one in which its models reason and call tools in one request.

OpenAI stores nothing: each request contains the whole conversation, with the model's reasoning in encrypted form. Used
by `registry`; `streaming` sends its requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.model import FinishReason, ModelCall, ModelRequest, ModelToolResult, ModelTurn, Usage, UserTurn
from toolspace.models import http
from toolspace.models.request_encoding import (
    PDF,
    Attachment,
    ToolEncoder,
    encode_arguments,
    normalize_turns,
    split_content,
    split_turn,
)
from toolspace.models.streaming import StreamedResponse, StreamingModel

_REASONING = "reasoning"
_ENCRYPTED_REASONING = "reasoning.encrypted_content"
_MIN_OUTPUT_TOKENS = 16
"""The smallest limit that the API accepts."""


class _Item(msgspec.Struct):
    type: str = ""
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    encrypted_content: str | None = None
    summary: list[Any] | None = None


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _TokenCounts(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None


class _IncompleteDetails(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _TokenCounts | None = None
    incomplete_details: _IncompleteDetails | None = None
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
    """A response of the responses API."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._call_indices: dict[int, int] = {}
        """Position of an item in the output → index of its call."""

    def receive_event(self, data: bytes) -> None:
        if not data or data == b"[DONE]":
            return
        event = _decode(data)
        match event.type:
            case "response.output_text.delta":
                self.add_text(event.delta)
            case "response.function_call_arguments.delta":
                index = self._call_indices.get(event.output_index)
                if index is not None:
                    self.add_arguments(index, event.delta)
            case "response.output_item.added":
                self._start_item(event.output_index, event.item)
            case "response.output_item.done":
                self._end_item(event.output_index, event.item)
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.add_thinking(event.delta)
            case "response.refusal.delta":
                self.add_refusal(event.delta)
            case "response.completed" | "response.incomplete" | "response.done":
                self._end(event.response or _Response())
            case "response.failed":
                error = (event.response or _Response()).error
                raise http.error_from_event(self.name, error, credential_name=self.credential_name)
            case "error":
                error = event.error or {"code": event.code, "message": event.message}
                raise http.error_from_event(self.name, error, credential_name=self.credential_name)
            case _:
                pass  # Starts and ends of parts, and types that the API may get later.

    def _start_item(self, position: int, item: _Item | None) -> None:
        if item is not None and item.type == "function_call" and position not in self._call_indices:
            self._call_indices[position] = self.start_call(item.call_id, item.name or "")
            if item.arguments:
                self.add_arguments(self._call_indices[position], item.arguments)

    def _end_item(self, position: int, item: _Item | None) -> None:
        if item is None:
            return
        if item.type == _REASONING and item.encrypted_content:
            self.layout.add_entry(
                {"type": _REASONING, "summary": item.summary or [], "encrypted_content": item.encrypted_content}
            )
        self._start_item(position, item)
        index = self._call_indices.get(position)
        if index is not None and item.arguments and not self.has_arguments(index):
            self.add_arguments(index, item.arguments)

    def _end(self, response: _Response) -> None:
        self.is_complete = True
        usage = response.usage
        if usage is not None:
            details = usage.input_tokens_details
            cached_tokens = details.cached_tokens if details is not None else None
            self.usage = Usage(
                input_tokens=usage.input_tokens, cached_tokens=cached_tokens or 0, output_tokens=usage.output_tokens
            )
        self.finish = _find_finish_reason(response)


class OpenAIResponsesModel(StreamingModel):
    """A model of OpenAI."""

    response_class = OpenAIResponsesResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "encrypted_reasoning": ("encrypted", "'include'"),
        "reasoning": ("reasoning",),
        "max_output_tokens": ("max_output_tokens",),
        "tool_choice": ("tool_choice",),
        "descriptions": ("description",),
        "images": ("image", "input_file"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._tool_encoder = ToolEncoder("openai-responses")

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        body: dict[str, Any] = {
            "model": self.model,
            "input": self._build_input(request, omitted_features),
            "stream": True,
            "store": False,
        }
        if request.system.strip():
            body["instructions"] = request.system
        if "encrypted_reasoning" not in omitted_features:
            body["include"] = [_ENCRYPTED_REASONING]
        if request.tools:
            encoded = self._tool_encoder.encode(request.tools, brief="descriptions" in omitted_features)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if choice != "auto" and "tool_choice" not in omitted_features:
                if choice in ("required", "none"):
                    body["tool_choice"] = choice
                elif choice in encoded.names:
                    body["tool_choice"] = {"type": "function", "name": choice}
        if settings.temperature is not None and "temperature" not in omitted_features:
            body["temperature"] = settings.temperature
        if settings.max_output_tokens is not None and "max_output_tokens" not in omitted_features:
            body["max_output_tokens"] = max(_MIN_OUTPUT_TOKENS, settings.max_output_tokens)
        if settings.reasoning is not None and "reasoning" not in omitted_features:
            body["reasoning"] = {"effort": settings.reasoning}
        return body

    def _build_input(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, UserTurn):
                items.append({"role": "user", "content": _build_user_content(turn, omitted_features)})
            elif isinstance(turn, ModelTurn):
                items.extend(self._build_model_items(turn, omitted_features))
            else:
                items.extend(
                    {
                        "type": "function_call_output",
                        "call_id": result.id,
                        "output": _build_output(result, omitted_features),
                    }
                    for result in turn.results
                )
        return items

    def _build_model_items(self, turn: ModelTurn, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                items.append({"role": "assistant", "content": [{"type": "output_text", "text": piece}]})
            elif isinstance(piece, ModelCall):
                arguments = bytes(encode_arguments(piece)).decode()
                items.append({"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": arguments})
            elif piece.get("type") == _REASONING and "encrypted_reasoning" not in omitted_features:
                items.append(dict(piece))
        return items


def _find_finish_reason(response: _Response) -> FinishReason:
    details = response.incomplete_details
    if details is None or details.reason is None:
        return "other" if response.status == "incomplete" else "stop"
    return "filter" if details.reason == "content_filter" else "length"


def _build_user_content(turn: UserTurn, omitted_features: frozenset[str]) -> str | list[dict[str, Any]]:
    if not turn.media:
        return turn.text
    attachments, text = split_content(turn.text, turn.media, omitted_features)
    if not attachments:
        return text
    return [*([{"type": "input_text", "text": text}] if text else []), *map(_build_attachment, attachments)]


def _build_output(result: ModelToolResult, omitted_features: frozenset[str]) -> str | list[dict[str, Any]]:
    # The text of a result has placeholders already.
    attachments, _ = split_content(result.text, result.media, omitted_features)
    if not attachments:
        return result.text
    return [{"type": "input_text", "text": result.text}, *map(_build_attachment, attachments)]


def _build_attachment(attachment: Attachment) -> dict[str, Any]:
    url = f"data:{attachment.mime_type};base64,{attachment.data}"
    if attachment.mime_type == PDF:
        return {"type": "input_file", "filename": "document.pdf", "file_data": url}
    return {"type": "input_image", "image_url": url}
