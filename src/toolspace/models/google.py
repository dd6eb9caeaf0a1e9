"""The adapter for Google's generateContent API, streamed. Used by `registry`; `streaming` sends its requests."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from toolspace.core.language_model import (
    FinishReason,
    Media,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    ResultsTurn,
)
from toolspace.errors import ModelError
from toolspace.models.request_encoding import IMAGES_AND_PDF, ToolEncoder, encode_arguments, media_data, split_turn
from toolspace.models.streaming import StreamedResponse, StreamingModel, select_options

_AUDIO = frozenset(("audio/wav", "audio/mp3", "audio/mpeg", "audio/aiff", "audio/aac", "audio/ogg", "audio/flac"))
_SIGNATURE = "signature"
"""The type of an entry of `thinking`: the thought signature of the part that follows it."""
_NO_SIGNATURE = "skip_thought_signature_validator"
"""Google accepts this instead of a signature, for calls of another model."""
_FINISH_REASONS: dict[str, FinishReason] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "OTHER": "other",
    "LANGUAGE": "other",
    **dict.fromkeys(("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"), "filter"),
}
_INVALID_RESPONSES = frozenset(("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "MALFORMED_RESPONSE"))
_THINKING_BUDGETS = {"none": 0, "minimal": 512, "low": 1_024, "medium": 8_192, "high": 24_576}
_GENERATION = re.compile(r"gemini-(\d+)")
_OWN_ID = re.compile(r"call_\d")
"""Ids that `StreamedResponse` made, because the model sent none."""
_NAME_START = re.compile(r"[A-Za-z_]")


class _FunctionCall(msgspec.Struct):
    name: str = ""
    args: msgspec.Raw = msgspec.Raw()
    id: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    is_thought: bool | None = msgspec.field(default=None, name="thought")
    thought_signature: str | None = None
    function_call: _FunctionCall | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    index: int | None = None


class _TokenCounts(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    cached_content_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None


class _Chunk(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: _TokenCounts | None = None
    prompt_feedback: dict[str, Any] | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk, strict=False).decode


class GoogleResponse(StreamedResponse):
    """A response of the generateContent API."""

    def receive_event(self, data: bytes) -> None:
        chunk = _decode(data)
        if chunk.error is not None:
            raise self.event_error(chunk.error)
        for candidate in chunk.candidates or ():
            if not candidate.index:
                self._add_candidate(candidate)
        if self.finish is None and (chunk.prompt_feedback or {}).get("blockReason"):
            self.finish = "filter"
        counts = chunk.usage_metadata
        if counts is not None:
            self.set_usage(
                (counts.prompt_token_count or 0) + (counts.tool_use_prompt_token_count or 0),
                (counts.candidates_token_count or 0) + (counts.thoughts_token_count or 0),
                cached=counts.cached_content_token_count,
            )

    def _add_candidate(self, candidate: _Candidate) -> None:
        parts = candidate.content.parts if candidate.content is not None else None
        for part in parts or ():
            if part.is_thought:
                self.add_thinking(part.text or "")
                continue
            if part.thought_signature:
                self.layout.add_entry({"type": _SIGNATURE, "value": part.thought_signature})
            if part.text:
                self.add_text(part.text)
            if part.function_call is not None:
                self._add_call(part.function_call)
        reason = candidate.finish_reason
        if reason in _INVALID_RESPONSES:
            message = candidate.finish_message or "it contains an invalid tool call"
            raise ModelError("broken", f"{self.endpoint.name}: the response is invalid: {message[:300]}")
        if reason:
            self.finish = _FINISH_REASONS.get(reason, "other")

    def _add_call(self, call: _FunctionCall) -> None:
        index = self.start_call(call.id, call.name)
        arguments = bytes(call.args).decode()
        self.add_arguments(index, "{}" if arguments in ("", "null") else arguments)


class GoogleModel(StreamingModel):
    """A model of Google."""

    tool_format = "gemini"
    response_class = GoogleResponse
    accepted_media = IMAGES_AND_PDF | _AUDIO
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "thoughts": ("thought_signature", "thought signature"),
        "thinkingConfig": ("thinking",),
        "function_parts": ("function_response.parts", "functionresponse.parts", "multimodal function"),
        "images": ("image", "mime", "inline_data", "inlinedata"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.tool_encoder = ToolEncoder(self.tool_format, _declare_functions)
        match = _GENERATION.search(self.model)
        self._generation = int(match[1]) if match is not None else 99

    def create_response(self, request: ModelRequest, listen: ModelListener | None) -> StreamedResponse:
        response = super().create_response(request, listen)
        response.tool_names = {
            google_tool_name(tool.name): tool.name for tool in request.tools if not _NAME_START.match(tool.name)
        }
        return response

    def build_request(self, request: ModelRequest, omitted_features: frozenset[str]) -> dict[str, Any]:
        body: dict[str, Any] = {"contents": self._build_contents(request, omitted_features)}
        if request.system.strip():
            body["systemInstruction"] = {"parts": [{"text": request.system}]}
        choice = self.add_tools(body, request, omitted_features)
        if choice in ("required", "none"):
            body["toolConfig"] = {"functionCallingConfig": {"mode": "ANY" if choice == "required" else "NONE"}}
        elif choice is not None:
            calling_config = {"mode": "ANY", "allowedFunctionNames": [google_tool_name(choice)]}
            body["toolConfig"] = {"functionCallingConfig": calling_config}
        settings = request.settings
        options = {
            "temperature": settings.temperature,
            "maxOutputTokens": settings.max_output_tokens,
            "thinkingConfig": self._build_thinking_config(settings.reasoning) if settings.reasoning else None,
        }
        if generation := select_options(options, omitted_features):
            body["generationConfig"] = generation
        return body

    def _build_thinking_config(self, reasoning: str) -> dict[str, Any]:
        if self._generation < 3:
            return {"thinkingBudget": _THINKING_BUDGETS.get(reasoning, -1), "includeThoughts": reasoning != "none"}
        level = {"none": "minimal", "xhigh": "high", "max": "high"}.get(reasoning, reasoning)
        return {"thinkingLevel": level, "includeThoughts": reasoning != "none"}

    def _build_contents(self, request: ModelRequest, omitted_features: frozenset[str]) -> list[dict[str, Any]]:
        contents: list[dict[str, Any]] = []
        own_ids: set[str] = set()
        for turn in self.normalize_turns(request, omitted_features):
            if isinstance(turn, ResultsTurn):
                contents.extend(self._build_results(turn, omitted_features, own_ids))
            elif isinstance(turn, ModelTurn):
                contents.append({"role": "model", "parts": self._build_model_parts(turn, omitted_features, own_ids)})
            else:
                text_parts = [{"text": turn.text}] if turn.text.strip() else []
                contents.append({"role": "user", "parts": [*map(_build_attachment, turn.media), *text_parts]})
        return contents

    def _build_model_parts(
        self, turn: ModelTurn, omitted_features: frozenset[str], own_ids: set[str]
    ) -> list[dict[str, Any]]:
        """The parts of a turn. Adds the call ids that this model itself sent to `own_ids`."""
        parts: list[dict[str, Any]] = []
        signature: str | None = None
        has_call = False
        for piece in split_turn(turn, self.name):
            if isinstance(piece, Mapping):
                is_usable = piece.get("type") == _SIGNATURE and "thoughts" not in omitted_features
                signature = piece.get("value") if is_usable else None
                continue
            if isinstance(piece, ModelCall):
                call: dict[str, Any] = {"name": google_tool_name(piece.name), "args": encode_arguments(piece)}
                if turn.model == self.name and not _OWN_ID.match(piece.id):
                    call["id"] = piece.id
                    own_ids.add(piece.id)
                part: dict[str, Any] = {"functionCall": call}
                # The first call of a turn must have a signature; the others arrived without one.
                if signature is None and not has_call and self._generation >= 3:
                    signature = _NO_SIGNATURE
                has_call = True
            else:
                part = {"text": piece}
            if signature is not None:
                part["thoughtSignature"] = signature
                signature = None
            parts.append(part)
        if signature is not None:  # It arrived with an empty text at the end.
            parts.append({"text": "", "thoughtSignature": signature})
        return parts

    def _build_results(
        self, turn: ResultsTurn, omitted_features: frozenset[str], own_ids: set[str]
    ) -> list[dict[str, Any]]:
        accepts_parts = self._generation >= 3 and "function_parts" not in omitted_features
        responses: list[dict[str, Any]] = []
        media_parts: list[dict[str, Any]] = []
        for result in turn.results:
            content = {"error" if result.is_error else "result": result.text}
            response: dict[str, Any] = {"name": google_tool_name(result.name), "response": content}
            if result.id in own_ids:
                response["id"] = result.id
            if result.media and accepts_parts:
                response["parts"] = list(map(_build_attachment, result.media))
            elif result.media:
                media_parts += [{"text": f"From the result of {result.name}:"}, *map(_build_attachment, result.media)]
            responses.append({"functionResponse": response})
        contents = [{"role": "user", "parts": responses}]
        if media_parts:
            contents.append({"role": "user", "parts": media_parts})
        return contents


def google_tool_name(name: str) -> str:
    """A tool's name as Google accepts it: it must not begin with a digit or a hyphen."""
    return name if _NAME_START.match(name) else f"_{name}"[:64]


def _declare_functions(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"functionDeclarations": [{**tool, "name": google_tool_name(tool["name"])} for tool in tools]}]


def _build_attachment(part: Media) -> dict[str, Any]:
    return {"inlineData": {"mimeType": part.mime_type, "data": media_data(part)}}
