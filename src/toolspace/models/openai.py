"""The adapters for OpenAI's two APIs: chat completions, and responses.

Most other providers and local servers have chat completions too. They differ in what they leave out: ids, indices,
usage, the finish reason, the last line. The adapter accepts all of them. OpenAI's own models reason and call tools in
one request only in the responses API. OpenAI stores nothing: each request contains the whole conversation, with the
model's reasoning in encrypted form. Used by `registry`; `streaming` sends the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.language_model import FinishReason, Media, ModelCall, ModelRequest, ModelTurn, ResultsTurn, UserTurn
from toolspace.models.prices import ModelPrice
from toolspace.models.request_encoding import PDF, encode_arguments, media_data, split_turn
from toolspace.models.streaming import StreamedResponse, StreamingModel, select_options

JsonObject = dict[str, Any]

_PLAIN_CHOICES = (None, "required", "none")
"""Tool choices that are sent as they are; others name a tool."""
_decode_string = msgspec.json.Decoder(str).decode


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = None


def _build_content(
    text: str, media: tuple[Media, ...], text_type: str, build_attachment: Callable[[Media], JsonObject]
) -> str | list[JsonObject]:
    if not media:
        return text
    return [*([{"type": text_type, "text": text}] if text else []), *map(build_attachment, media)]


def _data_url(part: Media) -> str:
    return f"data:{part.mime_type};base64,{media_data(part)}"


def _arguments_text(call: ModelCall) -> str:
    return bytes(encode_arguments(call)).decode()


# Chat completions

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


class _ChatTokens(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _TokenDetails | None = None
    prompt_cache_hit_tokens: int | None = None
    cost: float | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _ChatTokens | None = None
    error: Any = None


# Not strict: some servers write numbers as text.
_decode_chunk = msgspec.json.Decoder(_Chunk, strict=False).decode


class OpenAIChatResponse(StreamedResponse):
    """A response of the chat completions API."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._call_ids: dict[int, str] = {}
        """Our index of a call → the server's id."""
        self._early_arguments: dict[int, list[str]] = {}
        """The server's index → arguments of a call whose name has not arrived."""
        self._early_ids: dict[int, str] = {}
        """The server's index → id of a call whose name has not arrived."""
        self._reasoning: list[str] = []
        self._reasoning_details: list[Any] = []

    def receive_event(self, data: bytes) -> None:
        chunk = _decode_chunk(data)
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
            raise self.event_error(chunk.error)

    def build_turn(self, price: ModelPrice | None, request_bytes: int) -> ModelTurn:
        # Only with calls: models that need their reasoning back need it between calls, and others refuse it.
        if self.call_count and self._reasoning_details:
            self.layout.add_entry({"type": _REASONING_DETAILS, "value": self._reasoning_details})
        elif self.call_count and self._reasoning:
            self.layout.add_entry({"type": _REASONING_CONTENT, "value": "".join(self._reasoning)})
        return super().build_turn(price, request_bytes)

    def _add_delta(self, delta: _Delta) -> None:
        content = delta.content
        if isinstance(content, str):
            if content:
                self.add_text(content)
        elif content:
            self._add_parts(content)
        for call in delta.tool_calls or ():
            self._add_call(call)
        reasoning = delta.reasoning_content or delta.reasoning
        if isinstance(reasoning, str) and reasoning:
            self._reasoning.append(reasoning)
            self.add_thinking(reasoning)
        if delta.reasoning_details:
            self._reasoning_details.extend(delta.reasoning_details)
        if delta.refusal:
            self.add_refusal(delta.refusal)
        if delta.function_call is not None:
            self._add_call(_ToolCall(index=0, function=delta.function_call))

    def _add_parts(self, parts: list[Any]) -> None:
        """Adds content that is a list of parts, as some servers write it."""
        for part in parts:
            text: Any = part.get("text") if isinstance(part, dict) else part  # pyright: ignore
            if isinstance(text, str) and text:
                self.add_text(text)

    def _add_call(self, call: _ToolCall) -> None:
        function = call.function or _Function()
        name, piece = function.name, _decode_arguments(function.arguments)
        server_index = call.index
        if server_index is None:
            # A new id, or a name after arguments, starts another call; anything else continues the last one.
            last = self.call_count - 1
            is_new = last < 0 or bool(call.id and call.id != self._call_ids.get(last))
            is_new = is_new or bool(name and not call.id and self.has_arguments(last))
            server_index = len(self.call_indices) if is_new else len(self.call_indices) - 1
        index = self.call_indices.get(server_index)
        if index is not None and name and call.id and self._call_ids.get(index) not in (None, call.id):
            index = None  # This server uses one index for all calls, and different ids.
        if index is None:
            if not name:
                self._early_arguments.setdefault(server_index, []).append(piece)
                if call.id:
                    self._early_ids[server_index] = call.id
                return
            call_id = call.id or self._early_ids.pop(server_index, None)
            index = self.call_indices[server_index] = self.start_call(call_id, name)
            if call_id:
                self._call_ids[index] = call_id
            piece = "".join(self._early_arguments.pop(server_index, ())) + piece
        if piece:
            self.add_arguments(index, piece)

    def _count_tokens(self, usage: _ChatTokens) -> None:
        if usage.prompt_tokens is None and usage.completion_tokens is None:
            return
        details = usage.prompt_tokens_details
        cached = details.cached_tokens if details is not None else usage.prompt_cache_hit_tokens
        self.set_usage(usage.prompt_tokens, usage.completion_tokens, cached=cached)
        self.cost = usage.cost


class OpenAIChatModel(StreamingModel):
    """A model behind a chat completions API."""

    tool_format = "openai"
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
        # OpenAI's own models accept only the new name of the limit, and most other servers only the old one.
        if "//api.openai.com" in self.endpoint.url or ".azure.com" in self.endpoint.url:
            self._omitted_features = frozenset(("max_tokens",))

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> JsonObject:
        settings = request.settings
        messages = self._build_messages(request, omitted_features)
        body: JsonObject = {"model": self.model, "messages": messages, "stream": True}
        choice = self.add_tools(body, request, omitted_features)
        options = {
            "stream_options": {"include_usage": True},
            "tool_choice": choice if choice in _PLAIN_CHOICES else {"type": "function", "function": {"name": choice}},
            "temperature": settings.temperature,
            "max_tokens": settings.max_output_tokens,
            "max_completion_tokens": settings.max_output_tokens if "max_tokens" in omitted_features else None,
            "reasoning_effort": settings.reasoning,
        }
        return body | select_options(options, omitted_features)

    def _build_messages(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[JsonObject]:
        messages: list[JsonObject] = []
        if request.system.strip():
            messages.append({"role": "system", "content": request.system})
        # The message of a tool's result takes text only: media of results go into the next user message.
        media_parts: list[JsonObject] = []
        for turn in self.normalize_turns(request, omitted_features):
            if isinstance(turn, UserTurn):
                content = _build_content(turn.text, turn.media, "text", _build_chat_attachment)
                if media_parts and isinstance(content, str):
                    content = [{"type": "text", "text": content}] if content else []
                messages.append({"role": "user", "content": [*media_parts, *content] if media_parts else content})
                media_parts = []
                continue
            if media_parts:
                messages.append({"role": "user", "content": media_parts})
                media_parts = []
            if isinstance(turn, ModelTurn):
                messages.append(self._build_model_message(turn, omitted_features))
                continue
            for result in turn.results:
                messages.append({"role": "tool", "tool_call_id": result.id, "content": result.text})
                if result.media:
                    media_parts.append({"type": "text", "text": f"From the result of {result.name}:"})
                    media_parts.extend(map(_build_chat_attachment, result.media))
        if media_parts:
            messages.append({"role": "user", "content": media_parts})
        return messages

    def _build_model_message(self, turn: ModelTurn, omitted_features: frozenset[str]) -> JsonObject:
        message: JsonObject = {"role": "assistant", "content": None}
        texts: list[str] = []
        calls: list[JsonObject] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                texts.append(piece)
            elif isinstance(piece, ModelCall):
                function = {"name": piece.name, "arguments": _arguments_text(piece)}
                calls.append({"id": piece.id, "type": "function", "function": function})
            elif piece.get("type") in (_REASONING_CONTENT, _REASONING_DETAILS) and "thoughts" not in omitted_features:
                message[piece["type"]] = piece["value"]
        if texts:
            message["content"] = "".join(texts)
        if calls:
            message["tool_calls"] = calls
        return message


def _build_chat_attachment(part: Media) -> JsonObject:
    if part.mime_type == PDF:
        return {"type": "file", "file": {"filename": "document.pdf", "file_data": _data_url(part)}}
    return {"type": "image_url", "image_url": {"url": _data_url(part)}}


def _decode_arguments(raw: msgspec.Raw) -> str:
    data = bytes(raw)
    if data.startswith(b'"'):
        return _decode_string(data)
    return "" if data in (b"", b"null") else data.decode()  # Some servers send an object instead of its text.


# Responses

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


class _ResponsesTokens(msgspec.Struct):
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _ResponsesTokens | None = None
    incomplete_details: dict[str, Any] | None = None
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


_decode_event = msgspec.json.Decoder(_Event, strict=False).decode


class OpenAIResponsesResponse(StreamedResponse):
    """A response of the responses API."""

    def receive_event(self, data: bytes) -> None:
        event = _decode_event(data)
        match event.type:
            case "response.output_text.delta":
                self.add_text(event.delta)
            case "response.function_call_arguments.delta":
                self.add_arguments(self.call_indices.get(event.output_index), event.delta)
            case "response.output_item.added" | "response.output_item.done" if event.item is not None:
                self._add_item(event.output_index, event.item, is_done=event.type.endswith(".done"))
            case "response.reasoning_text.delta" | "response.reasoning_summary_text.delta":
                self.add_thinking(event.delta)
            case "response.refusal.delta":
                self.add_refusal(event.delta)
            case "response.completed" | "response.incomplete" | "response.done":
                self._end(event.response or _Response())
            case "response.failed":
                raise self.event_error((event.response or _Response()).error)
            case "error":
                raise self.event_error(event.error or {"code": event.code, "message": event.message})
            case _:
                pass  # Starts and ends of parts, and types that the API may get later.

    def _add_item(self, position: int, item: _Item, *, is_done: bool) -> None:
        if item.type == _REASONING and item.encrypted_content and is_done:
            self.layout.add_entry(
                {"type": _REASONING, "summary": item.summary or [], "encrypted_content": item.encrypted_content}
            )
        if item.type != "function_call":
            return
        index = self.call_indices.get(position)
        if index is None:
            index = self.call_indices[position] = self.start_call(item.call_id, item.name or "")
        if item.arguments and not self.has_arguments(index):
            self.add_arguments(index, item.arguments)

    def _end(self, response: _Response) -> None:
        self.is_complete = True
        usage = response.usage
        if usage is not None:
            details = usage.input_tokens_details
            cached = details.cached_tokens if details is not None else None
            self.set_usage(usage.input_tokens, usage.output_tokens, cached=cached)
        reason = (response.incomplete_details or {}).get("reason")
        if reason is not None:
            self.finish = "filter" if reason == "content_filter" else "length"
        else:
            self.finish = "other" if response.status == "incomplete" else "stop"


class OpenAIResponsesModel(StreamingModel):
    """A model of OpenAI."""

    tool_format = "openai-responses"
    response_class = OpenAIResponsesResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "include": ("encrypted", "'include'"),
        "reasoning": ("reasoning",),
        "max_output_tokens": ("max_output_tokens",),
        "tool_choice": ("tool_choice",),
        "descriptions": ("description",),
        "images": ("image", "input_file"),
    }

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> JsonObject:
        settings = request.settings
        items = self._build_input(request, omitted_features)
        body: JsonObject = {"model": self.model, "input": items, "stream": True, "store": False}
        choice = self.add_tools(body, request, omitted_features)
        max_tokens = settings.max_output_tokens
        options = {
            "instructions": request.system if request.system.strip() else None,
            "include": [_ENCRYPTED_REASONING],
            "tool_choice": choice if choice in _PLAIN_CHOICES else {"type": "function", "name": choice},
            "temperature": settings.temperature,
            "max_output_tokens": max(_MIN_OUTPUT_TOKENS, max_tokens) if max_tokens is not None else None,
            "reasoning": {"effort": settings.reasoning} if settings.reasoning is not None else None,
        }
        return body | select_options(options, omitted_features)

    def _build_input(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[JsonObject]:
        items: list[JsonObject] = []
        for turn in self.normalize_turns(request, omitted_features):
            if isinstance(turn, UserTurn):
                items.append({"role": "user", "content": _build_input_content(turn.text, turn.media)})
            elif isinstance(turn, ResultsTurn):
                for result in turn.results:
                    output = _build_input_content(result.text, result.media)
                    items.append({"type": "function_call_output", "call_id": result.id, "output": output})
            else:
                items.extend(self._build_model_items(turn, omitted_features))
        return items

    def _build_model_items(self, turn: ModelTurn, omitted_features: frozenset[str]) -> list[JsonObject]:
        items: list[JsonObject] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                items.append({"role": "assistant", "content": [{"type": "output_text", "text": piece}]})
            elif isinstance(piece, ModelCall):
                arguments = _arguments_text(piece)
                items.append({"type": "function_call", "call_id": piece.id, "name": piece.name, "arguments": arguments})
            elif piece.get("type") == _REASONING and "include" not in omitted_features:
                items.append(dict(piece))
        return items


def _build_input_content(text: str, media: tuple[Media, ...]) -> str | list[JsonObject]:
    return _build_content(text, media, "input_text", _build_input_attachment)


def _build_input_attachment(part: Media) -> JsonObject:
    if part.mime_type == PDF:
        return {"type": "input_file", "filename": "document.pdf", "file_data": _data_url(part)}
    return {"type": "input_image", "image_url": _data_url(part)}
