"""Models of every other provider, through Pydantic AI, which has an adapter for each. Needs `toolspace[pydantic-ai]`.

Slower to import and to listen to than the adapters here, which is why those come first.
"""

from __future__ import annotations

import base64
import binascii
import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

from toolspace.core.model import (
    FinishReason,
    Media,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    Usage,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models import errors
from toolspace.models.prices import find_price
from toolspace.models.request_encoding import IMAGES, PDF, normalize_turns, split_media, split_turn, to_object_schema
from toolspace.models.streaming import StreamedResponse

_THOUGHT = "pydantic"
_FINISHES: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "filter",
    "tool_call": "tools",
}


class PydanticAIModel(Model):
    """One model behind an adapter of Pydantic AI, made by the first request."""

    def __init__(
        self,
        provider: str,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        check: str = "",
    ) -> None:
        """`provider` as Pydantic AI spells it: `bedrock`, `cohere`, `huggingface`."""
        self.name = f"{provider}:{model}"
        self.price = find_price(model)
        self.context_window = self.price.context_window if self.price is not None else None
        self._given = {"base_url": base_url, "api_key": api_key}
        self._headers = dict(headers or {})
        self._check = check
        self._behind: Any = None

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        behind = self._behind
        if behind is None:
            behind = self._behind = self._make()
            await behind.__aenter__()  # Its connections are its own, until `aclose`.
        direct, models, tools = (import_module(f"pydantic_ai.{name}") for name in ("direct", "models", "tools"))
        answer = StreamedResponse(self.name, self._check, listen)
        messages = self._messages(request)
        parameters = models.ModelRequestParameters(
            function_tools=[
                tools.ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=dict(to_object_schema(tool.input_schema)),
                )
                for tool in request.tools
            ]
        )
        try:
            async with direct.model_request_stream(
                behind, messages, model_settings=self._settings(request), model_request_parameters=parameters
            ) as stream:
                heard = _Heard(answer)
                async for event in stream:
                    heard.take(event)
                response = stream.get()
        except ModelError:
            raise
        except Exception as error:
            raise self._explain(error) from None
        return self._turn(answer, heard, response)

    async def aclose(self) -> None:
        behind, self._behind = self._behind, None
        if behind is not None:
            await behind.__aexit__(None, None, None)

    def _make(self) -> Any:
        try:
            models, providers = import_module("pydantic_ai.models"), import_module("pydantic_ai.providers")

            def provide(name: str) -> Any:
                kind = providers.infer_provider_class(name)
                takes = inspect.signature(kind.__init__).parameters
                given = {key: value for key, value in self._given.items() if value is not None and key in takes}
                return kind(**given)

            return models.infer_model(self.name, provide)
        except ImportError as error:
            package = "toolspace[pydantic-ai]" if error.name == "pydantic_ai" else "pydantic-ai-slim and its extra"
            message = f"{self.name}: its provider is asked through Pydantic AI, and {error.name or error} is missing"
            raise ModelError("not_found", f"{message}; install {package} for it") from None
        except Exception as error:  # No key, or no such provider: each adapter says it in its own class of error.
            kind = "no_key" if "api_key" in str(error).lower() else "not_found"
            raise errors.build_error(self.name, kind, str(error)) from None

    def _settings(self, request: ModelRequest) -> dict[str, Any]:
        said = request.settings
        settings: dict[str, Any] = {"timeout": said.timeout, "max_retries": 0}
        if said.temperature is not None:
            settings["temperature"] = said.temperature
        if said.max_output_tokens is not None:
            settings["max_tokens"] = said.max_output_tokens
        if said.reasoning is not None:
            settings["thinking"] = False if said.reasoning == "none" else said.reasoning
        if request.tools and request.tool_choice != "auto":
            choice = request.tool_choice
            settings["tool_choice"] = choice if choice in ("required", "none") else [choice]
        if self._headers:
            settings["extra_headers"] = self._headers
        return settings

    def _messages(self, request: ModelRequest) -> list[Any]:
        said = import_module("pydantic_ai.messages")
        system = request.system if request.system.strip() else None
        messages: list[Any] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, ModelTurn):
                messages.append(said.ModelResponse(parts=self._spoken(said, turn)))
                continue
            parts: list[Any] = []
            if isinstance(turn, UserTurn):
                parts.append(said.UserPromptPart(_content(said, turn.text, turn.media)))
            else:
                for one in turn.results:
                    parts.append(said.ToolReturnPart(one.name, one.text, one.id))
                    if split_media(one.media, IMAGES | {PDF})[0]:
                        label = f"From the result of {one.name}:"
                        parts.append(said.UserPromptPart(_content(said, label, one.media)))
            messages.append(said.ModelRequest(parts=parts, instructions=system))
        return messages

    def _spoken(self, said: Any, turn: ModelTurn) -> list[Any]:
        parts: list[Any] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                parts.append(said.TextPart(piece))
            elif isinstance(piece, ModelCall):
                parts.append(said.ToolCallPart(piece.name, piece.arguments, piece.id))
            elif piece.get("type") == _THOUGHT:
                parts.append(said.ThinkingPart(**cast("dict[str, Any]", piece.get("part"))))
        return parts

    def _turn(self, answer: StreamedResponse, heard: _Heard, response: Any) -> ModelTurn:
        heard.finish(response)
        answer.finish = _FINISHES.get(response.finish_reason, "other")
        usage = response.usage
        if usage.input_tokens or usage.output_tokens:
            answer.usage = Usage(
                input_tokens=usage.input_tokens,
                cached_tokens=usage.cache_read_tokens,
                output_tokens=usage.output_tokens,
            )
            answer.cache_write_tokens = usage.cache_write_tokens
        return answer.build_turn(self.name, self.price, 0)

    def _explain(self, error: Exception) -> ModelError:
        status, headers = getattr(error, "status_code", None), getattr(error, "headers", None)
        if isinstance(status, int):
            body = str(getattr(error, "body", None) or error).encode("utf-8", "replace")
            return errors.error_from_response(self.name, status, headers or {}, body, check=self._check)
        passing = any(word in type(error).__name__ for word in ("Connection", "Timeout", "Unavailable", "Overloaded"))
        return errors.build_error(self.name, "unavailable" if passing else "broken", f"{type(error).__name__}: {error}")


class _Heard:
    """Passes the events of a stream on to an answer."""

    def __init__(self, answer: StreamedResponse) -> None:
        self._answer = answer
        self._calls: dict[int, int] = {}
        """The place of a part → the index of its call."""
        self._objects: dict[int, bool] = {}
        """Calls whose arguments come as objects: those are known when all is there."""

    def take(self, event: Any) -> None:
        if event.event_kind == "part_start":
            part = event.part
            match part.part_kind:
                case "text":
                    self._say(part.content)
                case "thinking":
                    self._answer.add_thinking(part.content or "")
                case "tool-call":
                    self._calls[event.index] = self._answer.start_call(part.tool_call_id, part.tool_name)
                    self._argue(event.index, part.args)
                case _:
                    pass
        elif event.event_kind == "part_delta":
            delta = event.delta
            match delta.part_delta_kind:
                case "text":
                    self._say(delta.content_delta)
                case "thinking":
                    self._answer.add_thinking(delta.content_delta or "")
                case "tool_call":
                    self._argue(event.index, delta.args_delta)
                case _:
                    pass

    def finish(self, response: Any) -> None:
        thoughts: list[dict[str, Any]] = []
        for place, part in enumerate(response.parts):
            if part.part_kind == "thinking" and (part.signature or part.provider_details):
                kept = {key: getattr(part, key) for key in ("content", "id", "signature", "provider_name")}
                kept["provider_details"] = part.provider_details
                thoughts.append({"type": _THOUGHT, "part": kept})
            at = self._calls.get(place)
            if at is not None and place in self._objects:
                self._answer.add_arguments(at, part.args_as_json_str())
        self._answer.layout.prepend(thoughts)

    def _say(self, text: str) -> None:
        if text:
            self._answer.add_text(text)

    def _argue(self, place: int, arguments: Any) -> None:
        at = self._calls.get(place)
        if at is None or not arguments:
            return
        if isinstance(arguments, str):
            self._answer.add_arguments(at, arguments)
        else:
            self._objects[place] = True


def _content(said: Any, text: str, media: tuple[Media, ...]) -> Any:
    seen, rest = split_media(media, IMAGES | {PDF})
    text = "\n".join((text, *rest)) if text.strip() else "\n".join(rest)
    parts: list[Any] = [text] if text.strip() else []
    for kind, data in seen:
        try:
            parts.append(said.BinaryContent(base64.b64decode(data, validate=True), media_type=kind))
        except (binascii.Error, ValueError):
            parts.append(f"[{kind} that cannot be read]")
    return text if len(parts) == 1 and not seen else parts
