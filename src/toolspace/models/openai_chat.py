"""The adapter for OpenAI's chat completions API, which most other providers and local servers have too.

Servers differ in what they leave out: ids, indices, usage, the finish reason, the last line. The adapter accepts all of
them. Used by `registry`; `streaming` sends its requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.model import FinishReason, ModelCall, ModelRequest, ModelTurn, ResultsTurn, Usage, UserTurn
from toolspace.models import http
from toolspace.models.prices import ModelPrice
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

_FINISH_REASONS: dict[str, FinishReason] = {
    "stop": "stop",
    "eos": "stop",
    "end_turn": "stop",
    "tool_calls": "tools",
    "function_call": "tools",
    "length": "length",
    "max_tokens": "length",
    "content_filter": "filter",
}
_REASONING_CONTENT = "reasoning_content"
_REASONING_DETAILS = "reasoning_details"


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


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _TokenCounts(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    cost: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _TokenCounts | None = None
    error: Any = None


# Not strict: some servers write numbers as text.
_decode = msgspec.json.Decoder(_Chunk, strict=False).decode
_decode_string = msgspec.json.Decoder(str).decode


class OpenAIChatResponse(StreamedResponse):
    """A response of the chat completions API."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._call_indices: dict[int, int] = {}
        """The server's index of a call → our index."""
        self._call_ids: dict[int, str] = {}
        """Our index of a call → the server's id."""
        self._early_arguments: dict[int, list[str]] = {}
        """The server's index → arguments of a call whose name has not arrived."""
        self._early_ids: dict[int, str] = {}
        """The server's index → id of a call whose name has not arrived."""
        self._reasoning: list[str] = []
        self._reasoning_details: list[Any] = []

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
                    self._add_delta(delta)
                if choice.finish_reason:
                    self.finish = _FINISH_REASONS.get(choice.finish_reason, "other")
        if chunk.usage is not None:
            self._count_tokens(chunk.usage)
        if chunk.error is not None:
            raise http.error_from_event(self.name, chunk.error, credential_name=self.credential_name)

    def build_turn(self, model: str, price: ModelPrice | None, request_bytes: int) -> ModelTurn:
        # Only with calls: models that need their reasoning back need it between calls, and others refuse it.
        if self.call_count and self._reasoning_details:
            self.layout.add_entry({"type": _REASONING_DETAILS, "value": self._reasoning_details})
        elif self.call_count and self._reasoning:
            self.layout.add_entry({"type": _REASONING_CONTENT, "value": "".join(self._reasoning)})
        return super().build_turn(model, price, request_bytes)

    def _add_delta(self, delta: _Delta) -> None:
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
            self._add_reasoning(delta.reasoning_content)
        elif isinstance(delta.reasoning, str) and delta.reasoning:
            self._add_reasoning(delta.reasoning)
        if delta.reasoning_details:
            self._reasoning_details.extend(delta.reasoning_details)
        if delta.refusal:
            self.add_refusal(delta.refusal)
        if delta.function_call is not None:
            self._add_call(_ToolCall(index=0, function=delta.function_call))

    def _add_parts(self, parts: list[Any]) -> None:
        """Adds content that is a list of parts, as some servers write it."""
        for part in parts:
            if isinstance(part, str):
                self.add_text(part)
            elif isinstance(part, dict):
                text: Any = part.get("text")  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
                if isinstance(text, str) and text:
                    self.add_text(text)

    def _add_reasoning(self, piece: str) -> None:
        self._reasoning.append(piece)
        self.add_thinking(piece)

    def _add_call(self, call: _ToolCall) -> None:
        function = call.function
        name = function.name if function is not None else None
        piece = _decode_arguments(function.arguments) if function is not None else ""
        server_index = call.index
        if server_index is None:
            # A new id, or a name after arguments, starts another call; anything else continues the last one.
            last = self.call_count - 1
            is_new = last < 0 or bool(call.id and call.id != self._call_ids.get(last))
            is_new = is_new or bool(name and not call.id and self.has_arguments(last))
            server_index = len(self._call_indices) if is_new else len(self._call_indices) - 1
        index = self._call_indices.get(server_index)
        if index is not None and name and call.id and self._call_ids.get(index) not in (None, call.id):
            index = None  # This server uses one index for all calls, and different ids.
        if index is None:
            if not name:
                self._early_arguments.setdefault(server_index, []).append(piece)
                if call.id:
                    self._early_ids[server_index] = call.id
                return
            call_id = call.id or self._early_ids.pop(server_index, None)
            index = self.start_call(call_id, name)
            self._call_indices[server_index] = index
            if call_id:
                self._call_ids[index] = call_id
            piece = "".join(self._early_arguments.pop(server_index, ())) + piece
        if piece:
            self.add_arguments(index, piece)

    def _count_tokens(self, usage: _TokenCounts) -> None:
        details = usage.prompt_tokens_details
        cached_tokens = details.cached_tokens if details is not None else usage.prompt_cache_hit_tokens
        if usage.prompt_tokens is None and usage.completion_tokens is None:
            return
        self.usage = Usage(
            input_tokens=usage.prompt_tokens or 0,
            cached_tokens=cached_tokens or 0,
            output_tokens=usage.completion_tokens or 0,
        )
        self.cost = usage.cost


class OpenAIChatModel(StreamingModel):
    """A model behind a chat completions API."""

    response_class = OpenAIChatResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "stream_options": ("stream_options",),
        "temperature": ("temperature",),
        "reasoning_effort": ("reasoning_effort", "reasoning effort"),
        "max_tokens": ("max_tokens",),
        "max_completion_tokens": ("max_completion_tokens",),
        "tool_choice": ("tool_choice",),
        "thoughts": (_REASONING_CONTENT, _REASONING_DETAILS),
        "descriptions": ("description",),
        "images": ("image", "multimodal", "vision", "file"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._tool_encoder = ToolEncoder("openai")
        # OpenAI's own models accept only the new name of the limit, and most other servers only the old one.
        if "//api.openai.com" in self.endpoint.url or ".azure.com" in self.endpoint.url:
            self._omitted_features = frozenset(("max_tokens",))

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        body: dict[str, Any] = {
            "model": self.model,
            "messages": self._build_messages(request, omitted_features),
            "stream": True,
        }
        if "stream_options" not in omitted_features:
            body["stream_options"] = {"include_usage": True}
        if request.tools:
            encoded = self._tool_encoder.encode(request.tools, brief="descriptions" in omitted_features)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if choice != "auto" and "tool_choice" not in omitted_features:
                if choice in ("required", "none"):
                    body["tool_choice"] = choice
                elif choice in encoded.names:
                    body["tool_choice"] = {"type": "function", "function": {"name": choice}}
        if settings.temperature is not None and "temperature" not in omitted_features:
            body["temperature"] = settings.temperature
        if settings.max_output_tokens is not None:
            keys = [key for key in ("max_tokens", "max_completion_tokens") if key not in omitted_features]
            body |= dict.fromkeys(keys[:1], settings.max_output_tokens)
        if settings.reasoning is not None and "reasoning_effort" not in omitted_features:
            body["reasoning_effort"] = settings.reasoning
        return body

    def _build_messages(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if request.system.strip():
            messages.append({"role": "system", "content": request.system})
        # The message of a tool's result takes text only: media of results go into the next user message.
        media_parts: list[dict[str, Any]] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, UserTurn):
                messages.append({"role": "user", "content": _build_user_content(media_parts, turn, omitted_features)})
                media_parts = []
            elif isinstance(turn, ModelTurn):
                if media_parts:
                    messages.append({"role": "user", "content": media_parts})
                    media_parts = []
                messages.append(self._build_model_message(turn, omitted_features))
            else:
                messages.extend(
                    {"role": "tool", "tool_call_id": result.id, "content": result.text} for result in turn.results
                )
                media_parts = _build_result_media(turn, omitted_features)
        if media_parts:
            messages.append({"role": "user", "content": media_parts})
        return messages

    def _build_model_message(self, turn: ModelTurn, omitted_features: frozenset[str]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None}
        texts: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, ModelCall):
                function = {"name": piece.name, "arguments": bytes(encode_arguments(piece)).decode()}
                calls.append({"id": piece.id, "type": "function", "function": function})
            elif piece.get("type") in (_REASONING_CONTENT, _REASONING_DETAILS) and "thoughts" not in omitted_features:
                message[piece["type"]] = piece["value"]
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        return message


def _build_user_content(
    media_parts: list[dict[str, Any]], turn: UserTurn, omitted_features: frozenset[str]
) -> str | list[dict[str, Any]]:
    """The content of a user message, after the media of the results before it."""
    if not turn.media and not media_parts:
        return turn.text
    attachments, text = split_content(turn.text, turn.media, omitted_features)
    if not media_parts and not attachments:
        return text
    return [
        *media_parts,
        *([{"type": "text", "text": text}] if text else []),
        *map(_build_attachment, attachments),
    ]


def _build_result_media(turn: ResultsTurn, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for result in turn.results:
        attachments, _ = split_content(result.text, result.media, omitted_features)
        if attachments:
            parts.append({"type": "text", "text": f"From the result of {result.name}:"})
            parts.extend(map(_build_attachment, attachments))
    return parts


def _build_attachment(attachment: Attachment) -> dict[str, Any]:
    url = f"data:{attachment.mime_type};base64,{attachment.data}"
    if attachment.mime_type == PDF:
        return {"type": "file", "file": {"filename": "document.pdf", "file_data": url}}
    return {"type": "image_url", "image_url": {"url": url}}


def _decode_arguments(raw: msgspec.Raw) -> str:
    data = bytes(raw)
    if data.startswith(b'"'):
        return _decode_string(data)
    return "" if data in (b"", b"null") else data.decode()  # Some servers send an object instead of its text.
