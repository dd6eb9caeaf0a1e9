"""The adapter for providers that have no adapter in this package: uses Pydantic AI. Needs `toolspace[pydantic-ai]`.

It imports and streams more slowly than the other adapters, so `registry` prefers those.
"""

from __future__ import annotations

import base64
import binascii
import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, cast

from toolspace.core.language_model import (
    FinishReason,
    Media,
    Model,
    ModelCall,
    ModelListener,
    ModelRequest,
    ModelTurn,
    UserTurn,
)
from toolspace.errors import ModelError
from toolspace.models.errors import build_error, response_error
from toolspace.models.http import ModelEndpoint
from toolspace.models.prices import find_price
from toolspace.models.request_encoding import media_data, normalize_turns, split_turn
from toolspace.models.streaming import StreamedResponse

_THINKING_PART = "pydantic"
_FINISH_REASONS: Mapping[str | None, FinishReason] = {
    "stop": "stop",
    "length": "length",
    "content_filter": "filter",
    "tool_call": "tools",
}
_TEMPORARY_ERRORS = ("Connection", "Timeout", "Unavailable", "Overloaded")


class PydanticAIModel(Model):
    """A model that Pydantic AI calls. The first request creates its Pydantic AI model."""

    def __init__(
        self,
        provider: str,
        model: str,
        *,
        base_url: str | None = None,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`provider` is Pydantic AI's name of the provider: `bedrock`, `cohere`, `huggingface`."""
        self.name = f"{provider}:{model}"
        self.price = find_price(model)
        self.context_window = self.price.context_window if self.price is not None else None
        self._provider_options = {"base_url": base_url, "api_key": api_key}
        self._headers = dict(headers or {})
        self._endpoint = ModelEndpoint(name=self.name)
        self._model: Any = None

    async def respond(self, request: ModelRequest, listen: ModelListener | None = None) -> ModelTurn:
        model = self._model
        if model is None:
            model = self._model = self._create_model()
            await model.__aenter__()  # Opens its connections; `aclose` closes them.
        direct, models, tools = (import_module(f"pydantic_ai.{name}") for name in ("direct", "models", "tools"))
        response = StreamedResponse(self._endpoint, listen)
        messages = self._build_messages(request)
        parameters = models.ModelRequestParameters(
            function_tools=[
                tools.ToolDefinition(
                    name=tool.name,
                    description=tool.description,
                    parameters_json_schema=dict(tool.model_schema.schema),
                )
                for tool in request.tools
            ]
        )
        try:
            async with direct.model_request_stream(
                model, messages, model_settings=self._build_settings(request), model_request_parameters=parameters
            ) as stream:
                events = _EventReceiver(response)
                async for event in stream:
                    events.receive(event)
                pydantic_response = stream.get()
        except ModelError:
            raise
        except Exception as error:
            raise self._to_model_error(error) from None
        events.finish(pydantic_response)
        return self._build_turn(response, pydantic_response)

    async def aclose(self) -> None:
        model, self._model = self._model, None
        if model is not None:
            await model.__aexit__(None, None, None)

    def _create_model(self) -> Any:
        try:
            models, providers = import_module("pydantic_ai.models"), import_module("pydantic_ai.providers")

            def create_provider(name: str) -> Any:
                provider_class = providers.infer_provider_class(name)
                parameters = inspect.signature(provider_class.__init__).parameters
                options = self._provider_options.items()
                return provider_class(
                    **{key: value for key, value in options if value is not None and key in parameters}
                )

            return models.infer_model(self.name, create_provider)
        except ImportError as error:
            package = "toolspace[pydantic-ai]" if error.name == "pydantic_ai" else "pydantic-ai-slim and its extra"
            message = f"{self.name}: its provider needs Pydantic AI, and {error.name or error} is not installed"
            raise ModelError("not_found", f"{message}; install {package} for it") from None
        except Exception as error:  # No key, or no such provider: each adapter has its own class of error for it.
            kind = "no_key" if "api_key" in str(error).lower() else "not_found"
            raise build_error(self._endpoint, kind, str(error)) from None

    def _build_settings(self, request: ModelRequest) -> dict[str, Any]:
        settings = request.settings
        result: dict[str, Any] = {"timeout": settings.timeout, "max_retries": 0}
        if settings.temperature is not None:
            result["temperature"] = settings.temperature
        if settings.max_output_tokens is not None:
            result["max_tokens"] = settings.max_output_tokens
        if settings.reasoning is not None:
            result["thinking"] = False if settings.reasoning == "none" else settings.reasoning
        if request.tools and request.tool_choice != "auto":
            choice = request.tool_choice
            result["tool_choice"] = choice if choice in ("required", "none") else [choice]
        if self._headers:
            result["extra_headers"] = self._headers
        return result

    def _build_messages(self, request: ModelRequest) -> list[Any]:
        types = import_module("pydantic_ai.messages")
        system = request.system if request.system.strip() else None
        messages: list[Any] = []
        for turn in normalize_turns(request.turns):
            if isinstance(turn, ModelTurn):
                messages.append(types.ModelResponse(parts=self._build_model_parts(types, turn)))
                continue
            parts: list[Any] = []
            if isinstance(turn, UserTurn):
                parts.append(types.UserPromptPart(_build_content(types, turn.text, turn.media)))
            else:
                for result in turn.results:
                    parts.append(types.ToolReturnPart(result.name, result.text, result.id))
                    if result.media:
                        label = f"From the result of {result.name}:"
                        parts.append(types.UserPromptPart(_build_content(types, label, result.media)))
            messages.append(types.ModelRequest(parts=parts, instructions=system))
        return messages

    def _build_model_parts(self, types: Any, turn: ModelTurn) -> list[Any]:
        parts: list[Any] = []
        for piece in split_turn(turn, self.name):
            if isinstance(piece, str):
                parts.append(types.TextPart(piece))
            elif isinstance(piece, ModelCall):
                parts.append(types.ToolCallPart(piece.name, piece.arguments, piece.id))
            elif piece.get("type") == _THINKING_PART:
                parts.append(types.ThinkingPart(**cast("dict[str, Any]", piece.get("part"))))
        return parts

    def _build_turn(self, response: StreamedResponse, pydantic_response: Any) -> ModelTurn:
        response.finish = _FINISH_REASONS.get(pydantic_response.finish_reason, "other")
        usage = pydantic_response.usage
        if usage.input_tokens or usage.output_tokens:
            response.set_usage(
                usage.input_tokens,
                usage.output_tokens,
                cached=usage.cache_read_tokens,
                cache_writes=usage.cache_write_tokens,
            )
        return response.build_turn(self.price, 0)

    def _to_model_error(self, error: Exception) -> ModelError:
        status, headers = getattr(error, "status_code", None), getattr(error, "headers", None)
        if isinstance(status, int):
            body = str(getattr(error, "body", None) or error).encode("utf-8", "replace")
            return response_error(self._endpoint, status, headers or {}, body)
        is_temporary = any(word in type(error).__name__ for word in _TEMPORARY_ERRORS)
        kind = "unavailable" if is_temporary else "broken"
        return build_error(self._endpoint, kind, f"{type(error).__name__}: {error}")


class _EventReceiver:
    """Passes the events of a Pydantic AI stream on to a response."""

    def __init__(self, response: StreamedResponse) -> None:
        self._response = response
        self._object_arguments: set[int] = set()
        """Positions of calls whose arguments are objects, which are complete only at the end."""

    def receive(self, event: Any) -> None:
        response = self._response
        if event.event_kind == "part_start":
            part = event.part
            kind, text, arguments = part.part_kind, getattr(part, "content", ""), getattr(part, "args", None)
            if kind == "tool-call":
                response.call_indices[event.index] = response.start_call(part.tool_call_id, part.tool_name)
        elif event.event_kind == "part_delta":
            delta = event.delta
            kind, text = delta.part_delta_kind, getattr(delta, "content_delta", "")
            arguments = getattr(delta, "args_delta", None)
        else:
            return
        if kind == "text" and text:
            response.add_text(text)
        elif kind == "thinking":
            response.add_thinking(text or "")
        elif isinstance(arguments, str) and arguments:
            response.add_arguments(response.call_indices.get(event.index), arguments)
        elif arguments:
            self._object_arguments.add(event.index)

    def finish(self, pydantic_response: Any) -> None:
        """Adds what is complete only at the end: signed reasoning, and arguments that are objects."""
        thinking_entries: list[dict[str, Any]] = []
        for position, part in enumerate(pydantic_response.parts):
            if part.part_kind == "thinking" and (part.signature or part.provider_details):
                keys = ("content", "id", "signature", "provider_name", "provider_details")
                thinking_entries.append({"type": _THINKING_PART, "part": {key: getattr(part, key) for key in keys}})
            if position in self._object_arguments:
                self._response.add_arguments(self._response.call_indices.get(position), part.args_as_json_str())
        self._response.layout.prepend(thinking_entries)


def _build_content(types: Any, text: str, media: Sequence[Media]) -> Any:
    if not media:
        return text
    parts: list[Any] = [text] if text.strip() else []
    for part in media:
        try:
            data = base64.b64decode(media_data(part), validate=True)
            parts.append(types.BinaryContent(data, media_type=part.mime_type))
        except (binascii.Error, ValueError):
            parts.append(f"[{part.mime_type} that cannot be read]")
    return parts
