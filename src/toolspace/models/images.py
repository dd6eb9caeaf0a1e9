"""Image models of OpenAI and Google, and the handler of tools of the execution type `image`.

Used by `composition`.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from toolspace.core.names import did_you_mean
from toolspace.core.result import ImagePart
from toolspace.core.secret_masking import register_secrets
from toolspace.core.tool_context import ToolContext
from toolspace.errors import ModelError, ToolDefinitionError, ToolExecutionError, ToolTransportError
from toolspace.models.http import ModelEndpoint, ModelHttpClient, encode_body, retry_transient
from toolspace.models.registry import find_key, google_resource, resolve_access

IMAGE_TIMEOUT_SECONDS = 180.0
"""How long one image may take: the best models need more than a minute."""
PROMPT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {"prompt": {"type": "string", "minLength": 1, "description": "What the picture shows, in words."}},
    "required": ["prompt"],
    "additionalProperties": False,
}
DEFAULT_IMAGE_MODELS: Mapping[str, str] = {"openai": "gpt-image-2.5-flare", "google": "gemini-3.1-flash-image"}
"""Provider → its default image model. Without a provider it is the first one whose key is set."""

_MAX_RESPONSE = 64 << 20
"""Bytes of a response: an image in base64, and little else."""
_RETRIES = 2
_RATIOS = ("1:1", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "16:9", "9:16", "21:9")
_SIZE = re.compile(r"\s*(\d{1,6})\s*[x×:]\s*(\d{1,6})\s*")
_SIZES = {"square": "1024x1024", "wide": "1536x1024", "tall": "1024x1536"}
_EXECUTION_KEYS = ("provider", "model", "size", "quality", "baseUrl", "apiKey", "headers")

T = TypeVar("T")
Handler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ImagePart]]


class ImageModel(ABC):
    """Generates images. Keeps no connection open."""

    def __init__(self, model: str, endpoint: ModelEndpoint) -> None:
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
        """The image. `size` is `1024x1536` or a ratio, `16:9`; `_pixels` and `_ratio` adapt it to the provider.

        Raises `ModelError`.
        """
        body = encode_body(self.build_request(prompt, size, quality))
        http = ModelHttpClient()

        async def send() -> ImagePart:
            return self.parse_response(await http.fetch(self.endpoint, body, timeout=timeout, max_bytes=_MAX_RESPONSE))

        try:
            return await retry_transient(send, retries=_RETRIES)
        finally:
            await http.aclose()

    @abstractmethod
    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        """The body of the request."""

    @abstractmethod
    def parse_response(self, body: bytes) -> ImagePart:
        """The image in a response."""

    def _no_image_error(self, text: str = "") -> ModelError:
        reason = f": {text[:300]}" if text else "; the provider may object to the prompt"
        return ModelError("invalid", f"{self.endpoint.name}: it returned no image{reason}")

    def _decode(self, response_type: type[T], body: bytes) -> T:
        try:
            return msgspec.json.decode(body, type=response_type)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            message = f"its response does not have the form of its API: {error}"
            raise ModelError("broken", f"{self.endpoint.name}: {message}") from None


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
        response = self._decode(_OpenAIImages, body)
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

    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        ratio = _ratio(size) if size is not None else None
        aspect = {"aspectRatio": ratio} if ratio is not None else {}
        if self.model.startswith("imagen"):
            return {"instances": [{"prompt": prompt}], "parameters": {"sampleCount": 1, **aspect}}
        generation = {"responseModalities": ["IMAGE"], **({"imageConfig": aspect} if aspect else {})}
        return {"contents": [{"role": "user", "parts": [{"text": prompt}]}], "generationConfig": generation}

    def parse_response(self, body: bytes) -> ImagePart:
        response = self._decode(_GoogleImages, body)
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
        raise ModelError("not_found", f"unknown image provider {provider[:80]!r}{hint}")
    name = model or DEFAULT_IMAGE_MODELS.get(provider) or ""
    if not name:
        raise ModelError("not_found", "no image model is named; set execution.model")
    access = resolve_access(
        provider, name, environ, section="execution", base_url=base_url, api_key=api_key, headers=headers
    )
    url, key = access.base_url, access.key
    if provider == "google":
        verb = "predict" if name.startswith("imagen") else "generateContent"
        version = "" if url.rpartition("/")[2].startswith("v1") else "/v1beta"
        url, authorization = f"{url}{version}/{google_resource(name)}:{verb}", {"x-goog-api-key": key or ""}
    else:
        url, authorization = f"{url}/images/generations", {"Authorization": f"Bearer {key}"}
    endpoint = ModelEndpoint(
        name=f"{provider}:{name}",
        url=url,
        headers={**(authorization if key else {}), **(headers or {})},
        credential_name=access.credential_name,
    )
    return (GoogleImageModel if provider == "google" else OpenAIImageModel)(name, endpoint)


def create_image_handler(name: str, execution: Mapping[str, Any]) -> Handler:
    """The handler of a tool that generates images. It opens the model when it is called: a key may be set later.

    Raises `ToolDefinitionError`, whose message begins with the wrong key of `execution`.
    """
    for key, value in execution.items():
        if key not in _EXECUTION_KEYS:
            hint = did_you_mean(key, _EXECUTION_KEYS) or f"; it takes {', '.join(_EXECUTION_KEYS)}"
            raise ToolDefinitionError(f"{key}: is not known to the execution type image{hint}")
        if key != "headers" and value is not None and not isinstance(value, str):
            raise ToolDefinitionError(f"{key}: must be text")
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
    match = _SIZE.fullmatch(size.lower())
    return (int(match[1]), int(match[2])) if match is not None and int(match[1]) and int(match[2]) else None


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
