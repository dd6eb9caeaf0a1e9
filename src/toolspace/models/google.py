"""Models over Google's generateContent API, streamed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from toolspace.core.model import (
    FinishReason,
    Media,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelToolResult,
    ModelTurn,
    ResultsTurn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError
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

_AUDIO = frozenset(("audio/wav", "audio/mp3", "audio/mpeg", "audio/aiff", "audio/aac", "audio/ogg", "audio/flac"))
_SEEN = IMAGES | _AUDIO | {PDF}
_SIGNED = "signature"
"""An entry of `thinking`: the seal of the part that comes next."""
_UNSIGNED = "skip_thought_signature_validator"
"""What Google takes in place of a seal, for calls that another model made."""
_FINISHES: dict[str, FinishReason] = {"STOP": "stop", "MAX_TOKENS": "length", "OTHER": "other", "LANGUAGE": "other"}
_OBJECTIONS = frozenset(("SAFETY", "RECITATION", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"))
_BLUNDERS = frozenset(("MALFORMED_FUNCTION_CALL", "UNEXPECTED_TOOL_CALL", "MALFORMED_RESPONSE"))
_BUDGETS = {"none": 0, "minimal": 512, "low": 1_024, "medium": 8_192, "high": 24_576}
_GENERATION = re.compile(r"gemini-(\d+)")
_OWN_ID = re.compile(r"call_\d")
"""Ids that were made here, because the model gave none."""
_START = re.compile(r"[A-Za-z_]")


class _Call(msgspec.Struct):
    name: str = ""
    args: msgspec.Raw = msgspec.Raw()
    id: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    text: str | None = None
    thought: bool | None = None
    thought_signature: str | None = None
    function_call: _Call | None = None


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct, rename="camel"):
    content: _Content | None = None
    finish_reason: str | None = None
    finish_message: str | None = None
    index: int | None = None


class _Counts(msgspec.Struct, rename="camel"):
    prompt_token_count: int | None = None
    candidates_token_count: int | None = None
    thoughts_token_count: int | None = None
    cached_content_token_count: int | None = None
    tool_use_prompt_token_count: int | None = None


class _Feedback(msgspec.Struct, rename="camel"):
    block_reason: str | None = None


class _Chunk(msgspec.Struct, rename="camel"):
    candidates: list[_Candidate] | None = None
    usage_metadata: _Counts | None = None
    prompt_feedback: _Feedback | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk, strict=False).decode


class GoogleResponse(StreamedResponse):
    def receive_event(self, data: bytes) -> None:
        if not data or data == b"[DONE]":
            return
        chunk = _decode(data)
        if chunk.error is not None:
            raise errors.error_from_event(self.name, chunk.error, check=self.credential_name)
        for candidate in chunk.candidates or ():
            if not candidate.index:
                self._add(candidate)
        feedback = chunk.prompt_feedback
        if feedback is not None and feedback.block_reason and self.finish is None:
            self.finish = "filter"
        if chunk.usage_metadata is not None:
            self._count(chunk.usage_metadata)

    def _add(self, candidate: _Candidate) -> None:
        parts = candidate.content.parts if candidate.content is not None else None
        for part in parts or ():
            if part.thought:
                self.add_thinking(part.text or "")
                continue
            if part.thought_signature:
                self.layout.add_entry({"type": _SIGNED, "value": part.thought_signature})
            if part.text:
                self.add_text(part.text)
            if part.function_call is not None:
                self._add_call(part.function_call)
        reason = candidate.finish_reason
        if reason in _BLUNDERS:
            message = candidate.finish_message or "it wrote a call that is none"
            raise ModelError("broken", f"{self.name}: its answer makes no sense: {message[:300]}")
        if reason:
            self.finish = "filter" if reason in _OBJECTIONS else _FINISHES.get(reason, "other")

    def _add_call(self, call: _Call) -> None:
        index = self.start_call(call.id, call.name)
        arguments = bytes(call.args).decode()
        self.add_arguments(index, "{}" if arguments in ("", "null") else arguments)

    def _count(self, counts: _Counts) -> None:
        self.usage = Usage(
            input_tokens=(counts.prompt_token_count or 0) + (counts.tool_use_prompt_token_count or 0),
            cached_tokens=counts.cached_content_token_count or 0,
            output_tokens=(counts.candidates_token_count or 0) + (counts.thoughts_token_count or 0),
        )


class GoogleModel(StreamingModel):
    """One of Google's models."""

    response_class = GoogleResponse
    optional_features: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "temperature": ("temperature",),
        "thoughts": ("thought_signature", "thought signature"),
        "thinking": ("thinking",),
        "function_parts": ("function_response.parts", "functionresponse.parts", "multimodal function"),
        "images": ("image", "mime", "inline_data", "inlinedata"),
    }

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self._toolbox = ToolEncoder("gemini", _declare)
        found = _GENERATION.search(self.model)
        self._generation = int(found[1]) if found is not None else 99

    def create_response(self, request: ModelRequest, listen: ModelListener | None) -> StreamedResponse:
        answer = super().create_response(request, listen)
        answer.tool_names = {
            google_tool_name(tool.name): tool.name for tool in request.tools if not _START.match(tool.name)
        }
        return answer

    def build_request(self, request: ModelRequest, without: frozenset[str]) -> dict[str, Any]:
        body: dict[str, Any] = {"contents": self._contents(request, without)}
        if request.system.strip():
            body["systemInstruction"] = {"parts": [{"text": request.system}]}
        if request.tools:
            encoded = self._toolbox.encode(request.tools)
            body["tools"] = encoded.raw
            choice = request.tool_choice
            if choice in ("required", "none"):
                mode = "ANY" if choice == "required" else "NONE"
                body["toolConfig"] = {"functionCallingConfig": {"mode": mode}}
            elif choice in encoded.names:
                only = {"mode": "ANY", "allowedFunctionNames": [google_tool_name(choice)]}
                body["toolConfig"] = {"functionCallingConfig": only}
        settings = request.settings
        generation: dict[str, Any] = {}
        if settings.temperature is not None and "temperature" not in without:
            generation["temperature"] = settings.temperature
        if settings.max_output_tokens is not None:
            generation["maxOutputTokens"] = settings.max_output_tokens
        if settings.reasoning is not None and "thinking" not in without:
            generation["thinkingConfig"] = self._thinking(settings.reasoning)
        if generation:
            body["generationConfig"] = generation
        return body

    def _thinking(self, reasoning: str) -> dict[str, Any]:
        if self._generation < 3:
            return {"thinkingBudget": _BUDGETS.get(reasoning, -1), "includeThoughts": reasoning != "none"}
        level = {"none": "minimal", "xhigh": "high", "max": "high"}.get(reasoning, reasoning)
        return {"thinkingLevel": level, "includeThoughts": reasoning != "none"}

    def _contents(self, request: ModelRequest, without: frozenset[str]) -> list[dict[str, Any]]:
        contents: list[dict[str, Any]] = []
        ids: set[str] = set()
        for turn in normalize_turns(request.turns):
            if isinstance(turn, UserTurn):
                contents.append({"role": "user", "parts": _user(turn.text, turn.media, without)})
            elif isinstance(turn, ModelTurn):
                contents.append({"role": "model", "parts": self._spoken(turn, without, ids)})
            else:
                contents.extend(self._results(turn, without, ids))
        return contents

    def _spoken(self, turn: ModelTurn, without: frozenset[str], ids: set[str]) -> list[dict[str, Any]]:
        parts: list[dict[str, Any]] = []
        seal: str | None = None
        sealed = False
        for piece in split_turn(turn, self.name):
            if isinstance(piece, Mapping):
                seal = piece.get("value") if piece.get("type") == _SIGNED and "thoughts" not in without else None
                continue
            if isinstance(piece, ModelCall):
                call: dict[str, Any] = {"name": google_tool_name(piece.name), "args": encode_arguments(piece)}
                if turn.model == self.name and not _OWN_ID.match(piece.id):
                    call["id"] = piece.id
                    ids.add(piece.id)
                part: dict[str, Any] = {"functionCall": call}
                # The first call of a turn must bear a seal; the others came without.
                if seal is None and not sealed and self._generation >= 3:
                    seal = _UNSIGNED
                sealed = True
            else:
                part = {"text": piece}
            if seal is not None:
                part["thoughtSignature"] = seal
                seal = None
            parts.append(part)
        if seal is not None:  # It came with an empty text, at the end.
            parts.append({"text": "", "thoughtSignature": seal})
        return parts

    def _results(self, turn: ResultsTurn, without: frozenset[str], ids: set[str]) -> list[dict[str, Any]]:
        inside = self._generation >= 3 and "function_parts" not in without
        accepted = frozenset[str]() if "images" in without else _SEEN
        answers: list[dict[str, Any]] = []
        pictures: list[dict[str, Any]] = []
        for one in turn.results:
            response: dict[str, Any] = {"name": google_tool_name(one.name), "response": _response(one)}
            if one.id in ids:
                response["id"] = one.id
            seen, _ = split_media(one.media, accepted)
            if seen and inside:
                response["parts"] = [_part(each) for each in seen]
            elif seen:
                pictures.append({"text": f"From the result of {one.name}:"})
                pictures.extend(map(_part, seen))
            answers.append({"functionResponse": response})
        contents = [{"role": "user", "parts": answers}]
        if pictures:
            contents.append({"role": "user", "parts": pictures})
        return contents


def google_tool_name(name: str) -> str:
    """A tool's name as Google takes it: it must not begin with a digit or a hyphen."""
    return name if _START.match(name) else f"_{name}"[:64]


def _declare(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"functionDeclarations": [{**tool, "name": google_tool_name(tool["name"])} for tool in tools]}]


def _response(answer: ModelToolResult) -> dict[str, Any]:
    return {"error" if answer.is_error else "result": answer.text}


def _user(text: str, media: Sequence[Media], without: frozenset[str]) -> list[dict[str, Any]]:
    seen, rest = split_media(media, frozenset() if "images" in without else _SEEN)
    text = "\n".join((text, *rest)) if text.strip() else "\n".join(rest)
    return [*map(_part, seen), *([{"text": text}] if text.strip() else [])]


def _part(seen: tuple[str, str]) -> dict[str, Any]:
    kind, data = seen
    return {"inlineData": {"mimeType": kind, "data": data}}
