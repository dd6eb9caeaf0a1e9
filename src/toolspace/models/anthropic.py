"""The adapter for Anthropic's messages API. Used by `registry`; `streaming` sends its requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.language_model import (
    FinishReason,
    Media,
    ModelCall,
    ModelRequest,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
)
from toolspace.models.request_encoding import PDF, ToolEncoder, encode_arguments, media_data, split_turn
from toolspace.models.streaming import StreamedResponse, StreamingModel

_CACHE_CONTROL = {"type": "ephemeral"}
"""Marks the end of a part of the request that the provider caches for the next one."""
_FINISH_REASONS: dict[str, FinishReason] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tools",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "filter",
}
_MODEL_VERSION = re.compile(r"claude-(?:[a-z]+-)?(\d+)(?:-(\d{1,2})(?!\d))?")
_MAX_TOKENS = 32_000
"""The default length limit of a response: the API requires one, and every model since version 4 accepts this one."""
_OLD_MAX_TOKENS = 4_096
_THINKING_BUDGETS = {"minimal": 1_024, "low": 2_048, "medium": 8_192, "high": 24_576, "xhigh": 24_576, "max": 24_576}
"""Reasoning effort → tokens, for the models that take a number."""
_THINKING_BLOCKS = ("thinking", "redacted_thinking")
_THINKING_FEATURES = frozenset(("thinking", "thoughts"))


class _TokenCounts(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Delta(msgspec.Struct):
    type: str = ""
    text: str | None = None
    partial_json: str | None = None
    thinking_text: str | None = msgspec.field(default=None, name="thinking")
    signature: str | None = None
    stop_reason: str | None = None


class _Block(msgspec.Struct):
    type: str = ""
    id: str | None = None
    name: str | None = None
    text: str | None = None
    input: msgspec.Raw = msgspec.Raw()
    thinking_text: str | None = msgspec.field(default=None, name="thinking")
    signature: str | None = None
    data: str | None = None


class _Message(msgspec.Struct):
    usage: _TokenCounts | None = None
    content: list[_Block] | None = None
    stop_reason: str | None = None


class _Event(msgspec.Struct):
    type: str = ""
    index: int = 0
    delta: _Delta | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: _TokenCounts | None = None
    error: Any = None
    content: list[_Block] | None = None
    stop_reason: str | None = None


_decode = msgspec.json.Decoder(_Event, strict=False).decode


class AnthropicResponse(StreamedResponse):
    """A response of the messages API."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._initial_arguments: dict[int, str] = {}
        """Position of a block → the arguments in its first event."""
        self._thinking_blocks: dict[int, dict[str, Any]] = {}
        self._thinking_texts: dict[int, list[str]] = {}
        self._token_counts = dict.fromkeys(_TokenCounts.__struct_fields__, 0)

    def receive_event(self, data: bytes) -> None:
        event = _decode(data)
        match event.type:
            case "content_block_delta" if event.delta is not None:
                self._add_delta(event.index, event.delta)
            case "content_block_start" if event.content_block is not None:
                self._start_block(event.index, event.content_block)
            case "content_block_stop":
                self._end_block(event.index)
            case "message_start" if event.message is not None:
                self._count_tokens(event.message.usage)
            case "message_delta":
                self._count_tokens(event.usage)
                if event.delta is not None and event.delta.stop_reason:
                    self.finish = _FINISH_REASONS.get(event.delta.stop_reason, "other")
            case "message_stop":
                self.is_complete = True
            case "error":
                raise self.event_error(event.error)
            case "message":
                self._add_message(event)
            case _:
                pass  # `ping`, and types that the API may get later.

    def _start_block(self, position: int, block: _Block) -> None:
        match block.type:
            case "tool_use":
                self.call_indices[position] = self.start_call(block.id, block.name or "")
                arguments = bytes(block.input).decode()
                if arguments not in ("", "{}", "null"):
                    self._initial_arguments[position] = arguments
            case "thinking":
                self._thinking_blocks[position] = {"type": "thinking", "signature": block.signature or ""}
                self._thinking_texts[position] = [block.thinking_text] if block.thinking_text else []
            case "redacted_thinking":
                self._thinking_blocks[position] = {"type": "redacted_thinking", "data": block.data or ""}
            case "text" if block.text:
                self.add_text(block.text)
            case _:
                pass  # Results of the provider's own tools.

    def _add_delta(self, position: int, delta: _Delta) -> None:
        if delta.text:
            self.add_text(delta.text)
        elif delta.partial_json:
            self.add_arguments(self.call_indices.get(position), delta.partial_json)
        elif delta.thinking_text:
            self.add_thinking(delta.thinking_text)
            self._thinking_texts.setdefault(position, []).append(delta.thinking_text)
        elif delta.signature and position in self._thinking_blocks:
            self._thinking_blocks[position]["signature"] += delta.signature

    def _end_block(self, position: int) -> None:
        index = self.call_indices.get(position)
        if index is not None and not self.has_arguments(index):
            self.add_arguments(index, self._initial_arguments.get(position, "{}"))
        block = self._thinking_blocks.pop(position, None)
        if block is not None:
            if block["type"] == "thinking":
                block["thinking"] = "".join(self._thinking_texts.pop(position, ()))
            if block.get("signature") or block.get("data"):  # Without one the provider would not accept it back.
                self.layout.add_entry(block)

    def _add_message(self, message: _Event) -> None:
        """Adds a response that is not streamed."""
        for position, block in enumerate(message.content or ()):
            if block.type == "thinking" and block.thinking_text:
                self.add_thinking(block.thinking_text)
            self._start_block(position, block)
            self._end_block(position)
        self._count_tokens(message.usage)
        self.finish = _FINISH_REASONS.get(message.stop_reason or "", "other")

    def _count_tokens(self, usage: _TokenCounts | None) -> None:
        """Counts are totals so far; a count that an event omits stays valid."""
        if usage is None:
            return
        counts = self._token_counts
        counts.update({name: count for name, count in msgspec.structs.asdict(usage).items() if count is not None})
        cached, cache_writes = counts["cache_read_input_tokens"], counts["cache_creation_input_tokens"]
        input_tokens = counts["input_tokens"] + cached + cache_writes
        self.set_usage(input_tokens, counts["output_tokens"], cached=cached, cache_writes=cache_writes)


class AnthropicModel(StreamingModel):
    """A model of Anthropic, or of a server with the same API."""

    tool_format = "anthropic"
    response_class = AnthropicResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "effort": ("output_config", "effort"),
        "thoughts": ("thinking block", "redacted_thinking", "signature"),
        "thinking": ("thinking",),
        "tool_choice": ("tool_choice",),
        "max_tokens": ("max_tokens",),
        "cache_control": ("cache_control",),
        "images": ("image", "document", "pdf"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._marking_encoder = ToolEncoder(self.tool_format, _mark_last)
        match = _MODEL_VERSION.match(self.model)
        # A name without a version counts as a new model.
        self._version: tuple[int, int] = (int(match[1]), int(match[2] or 0)) if match is not None else (99, 0)

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        settings = request.settings
        uses_cache = "cache_control" not in omitted_features
        is_forced = request.tool_choice not in ("auto", "none") and "tool_choice" not in omitted_features
        default_limit = _OLD_MAX_TOKENS if self._version < (4, 0) or "max_tokens" in omitted_features else _MAX_TOKENS
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": settings.max_output_tokens or default_limit,
            "stream": True,
            "messages": self._build_messages(request, omitted_features),
        }
        if request.system.strip():
            system = [{"type": "text", "text": request.system}]
            body["system"] = _mark_last(system) if uses_cache else system
        encoder = self._marking_encoder if uses_cache else self.tool_encoder
        choice = self.add_tools(body, request, omitted_features, encoder)
        if choice == "none":
            body["tool_choice"] = {"type": "none"}
        elif choice is not None and is_forced:
            body["tool_choice"] = {"type": "any"} if choice == "required" else {"type": "tool", "name": choice}
        thinks = self._add_thinking_settings(body, settings.reasoning, is_forced, omitted_features)
        if settings.temperature is not None and not thinks and "temperature" not in omitted_features:
            body["temperature"] = min(1.0, settings.temperature)
        return body

    def _add_thinking_settings(
        self, body: dict[str, Any], reasoning: str | None, is_forced: bool, omitted_features: frozenset[str]
    ) -> bool:
        """Adds the reasoning effort in the form of the model's version. Returns whether the model will think."""
        if reasoning is None or "thinking" in omitted_features:
            return False
        if reasoning == "none":
            if self._version >= (4, 0):
                body["thinking"] = {"type": "disabled"}
            return False
        if self._version >= (4, 6):
            body["thinking"] = {"type": "adaptive", "display": "summarized"}
            if "effort" not in omitted_features:
                body["output_config"] = {"effort": "low" if reasoning == "minimal" else reasoning}
            return True
        if self._version < (3, 7) or is_forced:  # Older models cannot think if they must call a tool.
            return False
        budget = _THINKING_BUDGETS.get(reasoning, _THINKING_BUDGETS["medium"])
        body["thinking"] = {"type": "enabled", "budget_tokens": budget}
        body["max_tokens"] += budget  # Thinking counts as output.
        return True

    def _build_messages(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        for turn in self.normalize_turns(request, omitted_features):
            if isinstance(turn, ModelTurn):
                messages.append({"role": "assistant", "content": self._build_model_blocks(turn, omitted_features)})
                continue
            if isinstance(turn, ResultsTurn):
                blocks = [_build_result(result) for result in turn.results]
            else:
                blocks = [*map(_build_attachment, turn.media), *_build_text(turn.text)]
            if messages and messages[-1]["role"] == "user":
                messages[-1]["content"].extend(blocks)
            else:
                messages.append({"role": "user", "content": blocks})
        if "cache_control" not in omitted_features:
            # The last one is cached for the next request; the one before it was cached by the previous request.
            user_messages = [message for message in messages if message["role"] == "user"]
            for message in user_messages[-2:]:
                message["content"][-1]["cache_control"] = _CACHE_CONTROL
        return messages

    def _build_model_blocks(self, turn: ModelTurn, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        blocks: list[dict[str, Any]] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                blocks.append({"type": "text", "text": piece})
            elif isinstance(piece, ModelCall):
                arguments = encode_arguments(piece)
                blocks.append({"type": "tool_use", "id": piece.id, "name": piece.name, "input": arguments})
            elif piece.get("type") in _THINKING_BLOCKS and not omitted_features & _THINKING_FEATURES:
                blocks.append(dict(piece))
        return blocks


def _mark_last(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Marks the last of several tools or blocks as the end of a part to cache."""
    return [*blocks[:-1], {**blocks[-1], "cache_control": _CACHE_CONTROL}]


def _build_result(result: ModelToolResult) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "tool_result", "tool_use_id": result.id}
    if result.is_error:
        block["is_error"] = True
    if result.media and not result.is_error:  # An error may have text only.
        block["content"] = [*_build_text(result.text), *map(_build_attachment, result.media)]
    elif result.text.strip():
        block["content"] = result.text
    return block


def _build_text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text.strip() else []


def _build_attachment(part: Media) -> dict[str, Any]:
    source = {"type": "base64", "media_type": part.mime_type, "data": media_data(part)}
    return {"type": "document" if part.mime_type == PDF else "image", "source": source}
