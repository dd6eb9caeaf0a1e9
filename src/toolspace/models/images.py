"""Image models of OpenAI and Google, and the handler of tools of the execution type `image`.

Used by `composition`.
"""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from toolspace.core.context import ToolContext
from toolspace.core.names import did_you_mean
from toolspace.core.result import ImagePart
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import (
    ModelError,
    ToolDefinitionError,
    ToolExecutionError,
    ToolTransportError,
)
from toolspace.models import http as errors
from toolspace.models.http import MAX_WAIT_SECONDS, ModelHttpClient, retry_delay
from toolspace.models.registry import find_key, missing_key_error, resolve_base_url, validate_headers
from toolspace.models.streaming import ModelEndpoint, encode_body

IMAGE_TIMEOUT_SECONDS = 180.0
"""How long one image may take: the best models need more than a minute."""
PROMPT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string", "minLength": 1, "description": "What the picture shows, in words."},
    },
    "required": ["prompt"],
    "additionalProperties": False,
}
DEFAULT_IMAGE_MODELS: Mapping[str, str] = {"openai": "gpt-image-2.5-flare", "google": "gemini-3.1-flash-image"}
"""Provider → its default image model. Without a provider it is the first one whose key is set."""

_MAX_RESPONSE = 64 << 20
"""Bytes of a response: an image in base64, and little else."""
_MAX_ATTEMPTS = 3
_RATIOS = ("1:1", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "16:9", "9:16", "21:9")
_SIZES = {"square": "1024x1024", "wide": "1536x1024", "tall": "1024x1536"}
_EXECUTION_KEYS = ("provider", "model", "size", "quality", "baseUrl", "apiKey", "headers")

T = TypeVar("T")
Handler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ImagePart]]


class ImageModel(ABC):
    """Generates images. Keeps no connection open."""

    def __init__(self, provider: str, model: str, endpoint: ModelEndpoint) -> None:
        self.name = f"{provider}:{model}"
        self.model = model
        self.endpoint = endpoint

    async def generate(
        self,
        prompt: str,
        *,
        size: str | None = None,
        quality: str | None = None,
        timeout: float = IMAGE_TIMEOUT_SECONDS,
    ) -> ImagePart:
        """The image. `size` is `1024x1536` or a ratio, `16:9`; each model comes as close as it can.

        Raises `ModelError`.
        """
        body = encode_body(self.build_request(prompt, size, quality))
        http = ModelHttpClient()
        try:
            attempt = 1
            while True:
                try:
                    return self.parse_response(await self._post(http, body, timeout))
                except ModelError as error:
                    delay = retry_delay(error, attempt)
                    if not error.is_transient or attempt >= _MAX_ATTEMPTS or delay > MAX_WAIT_SECONDS:
                        raise
                attempt += 1
                await asyncio.sleep(delay)
        finally:
            await http.aclose()

    @abstractmethod
    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        """The body of the request."""

    @abstractmethod
    def parse_response(self, body: bytes) -> ImagePart:
        """The image in a response."""

    async def _post(self, http: ModelHttpClient, body: bytes, timeout: float) -> bytes:
        from yarl import URL

        from toolspace.core.http_errors import HTTP_FAILURES

        url = URL(self.endpoint.url)
        has_started = False
        try:
            headers = {**self.endpoint.headers, "Content-Type": "application/json"}
            response = await http.post(url, headers, body, timeout)
            try:
                has_started = response.status == 200
                content = bytearray()
                while chunk := await response.content.readany():
                    content += chunk
                    if len(content) > _MAX_RESPONSE:
                        raise ModelError("invalid", f"{self.name}: its answer has more than {_MAX_RESPONSE:,} bytes")
            finally:
                response.close()
        except HTTP_FAILURES as failure:
            raise errors.error_from_connection(
                self.name, failure, url, timeout=timeout, has_started=has_started
            ) from None
        if response.status != 200:
            raise errors.error_from_response(
                self.name,
                response.status,
                {name.lower(): value for name, value in response.headers.items()},
                bytes(content[:65_536]),
                credential_name=self.endpoint.credential_name,
            )
        return bytes(content)

    def _no_image_error(self, text: str = "") -> ModelError:
        reason = f": {text[:300]}" if text else "; the provider may object to the prompt"
        return ModelError("invalid", f"{self.name}: it returned no image{reason}")


class _OpenAIImage(msgspec.Struct):
    b64_json: str | None = None


class _OpenAIImages(msgspec.Struct):
    data: list[_OpenAIImage] | None = None
    output_format: str | None = None


class OpenAIImageModel(ImageModel):
    """An image model of OpenAI, or of a server with the same API."""

    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "n": 1}
        if size is not None:
            body["size"] = _pixels(size)
        if quality is not None:
            body["quality"] = quality
        if self.model.startswith("dall-e"):
            body["response_format"] = "b64_json"  # Newer models have no other format, and refuse the parameter.
        return body

    def parse_response(self, body: bytes) -> ImagePart:
        response = _decode(_OpenAIImages, body, self.name)
        data = response.data[0].b64_json if response.data else None
        if not data:
            raise self._no_image_error()
        return ImagePart(data=data, mime_type=f"image/{response.output_format or 'png'}")


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str | None = None
    data: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    inline_data: _Blob | None = None
    text: str | None = None
    is_thought: bool | None = msgspec.field(default=None, name="thought")


class _Content(msgspec.Struct):
    parts: list[_Part] | None = None


class _Candidate(msgspec.Struct):
    content: _Content | None = None


class _Prediction(msgspec.Struct, rename="camel"):
    bytes_base64_encoded: str | None = None
    mime_type: str | None = None


class _GoogleImages(msgspec.Struct):
    candidates: list[_Candidate] | None = None
    predictions: list[_Prediction] | None = None


class GoogleImageModel(ImageModel):
    """An image model of Google: Gemini, which returns parts, or Imagen, which returns predictions."""

    @property
    def _is_imagen(self) -> bool:
        return self.model.startswith("imagen")

    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        ratio = _ratio(size) if size is not None else None
        if self._is_imagen:
            parameters: dict[str, Any] = {"sampleCount": 1}
            if ratio is not None:
                parameters["aspectRatio"] = ratio
            return {"instances": [{"prompt": prompt}], "parameters": parameters}
        generation: dict[str, Any] = {"responseModalities": ["IMAGE"]}
        if ratio is not None:
            generation["imageConfig"] = {"aspectRatio": ratio}
        return {"contents": [{"role": "user", "parts": [{"text": prompt}]}], "generationConfig": generation}

    def parse_response(self, body: bytes) -> ImagePart:
        response = _decode(_GoogleImages, body, self.name)
        for prediction in response.predictions or ():
            if prediction.bytes_base64_encoded:
                return ImagePart(data=prediction.bytes_base64_encoded, mime_type=prediction.mime_type or "image/png")
        contents = [candidate.content for candidate in response.candidates or () if candidate.content]
        parts = [part for content in contents for part in content.parts or ()]
        for part in parts:
            blob = part.inline_data
            if blob is not None and blob.data and not part.is_thought:
                return ImagePart(data=blob.data, mime_type=blob.mime_type or "image/png")
        raise self._no_image_error(" ".join(part.text for part in parts if part.text))


def open_image_model(
    provider: str | None,
    model: str | None,
    *,
    environ: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ImageModel:
    """Opens the image model that is named, or one whose provider's key is set. Raises `ModelError`."""
    provider = (provider or "").strip().lower() or _choose_provider(environ, model)
    provider = {"gemini": "google"}.get(provider, provider)
    if provider not in (*DEFAULT_IMAGE_MODELS, "openai-compatible"):
        hint = did_you_mean(provider, DEFAULT_IMAGE_MODELS)
        hint = hint or f"; it is one of {', '.join(DEFAULT_IMAGE_MODELS)}, openai-compatible"
        raise ModelError("not_found", f"unknown provider of images {provider[:80]!r}{hint}")
    name = model or DEFAULT_IMAGE_MODELS.get(provider) or ""
    if not name:
        raise ModelError("not_found", "no image model is named; set execution.model")
    api_url, is_own_url = resolve_base_url(provider, base_url, environ)
    variable, key = ("execution.apiKey", api_key) if api_key else find_key(provider, environ)
    if not key and is_own_url:
        raise missing_key_error(provider, name)
    register_secrets([key] if key else [])
    validate_headers({variable: key or "", **(headers or {})})
    if provider == "google":
        verb = "predict" if name.startswith("imagen") else "generateContent"
        resource = name if "/" in name else f"models/{name}"
        version = "" if api_url.rpartition("/")[2].startswith("v1") else "/v1beta"
        url, authorization = f"{api_url}{version}/{quote(resource)}:{verb}", {"x-goog-api-key": key or ""}
    else:
        url, authorization = f"{api_url}/images/generations", {"Authorization": f"Bearer {key}"}
    all_headers = {**(authorization if key else {}), **(headers or {})}
    endpoint = ModelEndpoint(url=url, headers=all_headers, credential_name=variable)
    return (GoogleImageModel if provider == "google" else OpenAIImageModel)(provider, name, endpoint)


def create_image_handler(name: str, execution: Mapping[str, Any]) -> Handler:
    """The handler of a tool that generates images. It opens the model when it is called: a key may be set later.

    Raises `ToolDefinitionError`, whose message begins with the wrong key of `execution`.
    """
    for key, value in execution.items():
        if key not in _EXECUTION_KEYS:
            hint = did_you_mean(key, _EXECUTION_KEYS) or f"; it takes {', '.join(_EXECUTION_KEYS)}"
            raise ToolDefinitionError(f"{key}: is not known to the execution type image{hint}")
        if key != "headers" and value is not None and not isinstance(value, str):
            raise ToolDefinitionError(f"{key}: must be a text")
    register_secrets([execution["apiKey"]] if execution.get("apiKey") else [])

    async def handle(parameters: dict[str, Any], context: ToolContext) -> ImagePart:
        try:
            model = open_image_model(
                execution.get("provider"),
                execution.get("model"),
                environ=os.environ,
                base_url=execution.get("baseUrl"),
                api_key=execution.get("apiKey"),
                headers=execution.get("headers"),
            )
            return await model.generate(
                str(parameters["prompt"]), size=execution.get("size"), quality=execution.get("quality")
            )
        except ModelError as error:
            raise _to_tool_error(name, error) from None

    return handle


def _to_tool_error(name: str, error: ModelError) -> ToolExecutionError | ToolTransportError:
    message = f'tool "{name}" cannot generate an image: {error}'
    if error.is_transient:
        return ToolTransportError(message, executed=error.kind == "broken")
    return ToolExecutionError(message, executed=False)


def _choose_provider(environ: Mapping[str, str], model: str | None) -> str:
    if model is not None and model.startswith(("gemini", "imagen")):
        return "google"
    if model is not None and model.startswith(("gpt", "dall-e", "chatgpt")):
        return "openai"
    return next((provider for provider in DEFAULT_IMAGE_MODELS if find_key(provider, environ)[1]), "openai")


def _parse_size(size: str) -> tuple[int, int] | None:
    for separator in ("x", "×", ":"):
        width_text, matched_separator, height_text = size.lower().partition(separator)
        if matched_separator and width_text.strip().isdigit() and height_text.strip().isdigit():
            width, height = int(width_text.strip()[:6]), int(height_text.strip()[:6])
            return (width, height) if width and height else None
    return None


def _pixels(size: str) -> str:
    """A size as OpenAI accepts it; a ratio becomes the size of the same orientation."""
    dimensions = _parse_size(size)
    if dimensions is None or ":" not in size:
        return size
    width, height = dimensions
    return _SIZES["square" if width == height else "wide" if width > height else "tall"]


def _ratio(size: str) -> str | None:
    """A size as Google accepts it: the nearest of its aspect ratios."""
    dimensions = _parse_size(size)
    if dimensions is None:
        return None
    target = dimensions[0] / dimensions[1]

    def distance(ratio: str) -> float:
        width, _, height = ratio.partition(":")
        return abs(int(width) / int(height) - target)

    return min(_RATIOS, key=distance)


def _decode(response_type: type[T], body: bytes, name: str) -> T:
    try:
        return msgspec.json.decode(body, type=response_type)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError("broken", f"{name}: its answer is not of the form of its API: {error}") from None
