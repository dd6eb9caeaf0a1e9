"""Has a model draw a picture: OpenAI's and Google's image models, and the tools of the execution type `image`."""

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
from toolspace.models import errors
from toolspace.models.http import ModelHttpClient
from toolspace.models.registry import find_key, missing_key_error, resolve_base_url, validate_headers
from toolspace.models.retry import MAX_WAIT_SECONDS, retry_delay
from toolspace.models.streaming import ModelEndpoint, encode_body

IMAGE_TIMEOUT_SECONDS = 180.0
"""Seconds for a picture: the best models take more than a minute."""
PROMPT_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string", "minLength": 1, "description": "What the picture shows, in words."},
    },
    "required": ["prompt"],
    "additionalProperties": False,
}
DEFAULT_IMAGE_MODELS: Mapping[str, str] = {"openai": "gpt-image-2.5-flare", "google": "gemini-3.1-flash-image"}
"""The model to use where nobody names one, by provider; the first whose key is set comes first."""

_MOST = 64 << 20
"""Bytes of an answer: a picture in base64, and little else."""
_ATTEMPTS = 3
_RATIOS = ("1:1", "3:2", "2:3", "4:3", "3:4", "5:4", "4:5", "16:9", "9:16", "21:9")
_SIZES = {"square": "1024x1024", "wide": "1536x1024", "tall": "1024x1536"}
_KEYS = ("provider", "model", "size", "quality", "baseUrl", "apiKey", "headers")

T = TypeVar("T")
Handler = Callable[[dict[str, Any], ToolContext], Coroutine[Any, Any, ImagePart]]


class ImageModel(ABC):
    """Draws pictures. Holds nothing open."""

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
        """The picture. `size` is `1024x1536` or a ratio, `16:9`; each model comes as near as it can.

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
                    wait = retry_delay(error, attempt)
                    if not error.is_transient or attempt >= _ATTEMPTS or wait > MAX_WAIT_SECONDS:
                        raise
                attempt += 1
                await asyncio.sleep(wait)
        finally:
            await http.aclose()

    @abstractmethod
    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        """The body of the request."""

    @abstractmethod
    def parse_response(self, body: bytes) -> ImagePart:
        """The picture in an answer."""

    async def _post(self, http: ModelHttpClient, body: bytes, timeout: float) -> bytes:
        from yarl import URL

        from toolspace.core.http_errors import HTTP_FAILURES

        url = URL(self.endpoint.url)
        begun = False
        try:
            headers = {**self.endpoint.headers, "Content-Type": "application/json"}
            response = await http.post(url, headers, body, timeout)
            try:
                begun = response.status == 200
                answer = bytearray()
                while chunk := await response.content.readany():
                    answer += chunk
                    if len(answer) > _MOST:
                        raise ModelError("invalid", f"{self.name}: its answer has more than {_MOST:,} bytes")
            finally:
                response.close()
        except HTTP_FAILURES as fault:
            raise errors.error_from_connection(self.name, fault, url, timeout=timeout, begun=begun) from None
        if response.status != 200:
            head = {name.lower(): value for name, value in response.headers.items()}
            raise errors.error_from_response(
                self.name, response.status, head, bytes(answer[:65_536]), check=self.endpoint.credential_name
            )
        return bytes(answer)

    def _nothing(self, why: str = "") -> ModelError:
        reason = f": {why[:300]}" if why else "; the provider may object to the prompt"
        return ModelError("invalid", f"{self.name}: it drew no picture{reason}")


class _OpenAIImage(msgspec.Struct):
    b64_json: str | None = None


class _OpenAIImages(msgspec.Struct):
    data: list[_OpenAIImage] | None = None
    output_format: str | None = None


class OpenAIImageModel(ImageModel):
    """OpenAI's image models, and servers that speak as they do."""

    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.model, "prompt": prompt, "n": 1}
        if size is not None:
            body["size"] = _pixels(size)
        if quality is not None:
            body["quality"] = quality
        if self.model.startswith("dall-e"):
            body["response_format"] = "b64_json"  # The newer ones know no other, and refuse to be told.
        return body

    def parse_response(self, body: bytes) -> ImagePart:
        answer = _decode(_OpenAIImages, body, self.name)
        data = answer.data[0].b64_json if answer.data else None
        if not data:
            raise self._nothing()
        return ImagePart(data=data, mime_type=f"image/{answer.output_format or 'png'}")


class _Blob(msgspec.Struct, rename="camel"):
    mime_type: str | None = None
    data: str | None = None


class _Part(msgspec.Struct, rename="camel"):
    inline_data: _Blob | None = None
    text: str | None = None
    thought: bool | None = None


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
    """Google's models: Gemini's, which answer with parts, and Imagen's, which predict."""

    @property
    def _predicts(self) -> bool:
        return self.model.startswith("imagen")

    def build_request(self, prompt: str, size: str | None, quality: str | None) -> dict[str, Any]:
        ratio = _ratio(size) if size is not None else None
        if self._predicts:
            parameters: dict[str, Any] = {"sampleCount": 1}
            if ratio is not None:
                parameters["aspectRatio"] = ratio
            return {"instances": [{"prompt": prompt}], "parameters": parameters}
        generation: dict[str, Any] = {"responseModalities": ["IMAGE"]}
        if ratio is not None:
            generation["imageConfig"] = {"aspectRatio": ratio}
        return {"contents": [{"role": "user", "parts": [{"text": prompt}]}], "generationConfig": generation}

    def parse_response(self, body: bytes) -> ImagePart:
        answer = _decode(_GoogleImages, body, self.name)
        for one in answer.predictions or ():
            if one.bytes_base64_encoded:
                return ImagePart(data=one.bytes_base64_encoded, mime_type=one.mime_type or "image/png")
        parts = [part for one in answer.candidates or () if one.content for part in one.content.parts or ()]
        for part in parts:
            blob = part.inline_data
            if blob is not None and blob.data and not part.thought:
                return ImagePart(data=blob.data, mime_type=blob.mime_type or "image/png")
        raise self._nothing(" ".join(part.text for part in parts if part.text))


def open_image_model(
    provider: str | None,
    model: str | None,
    *,
    environ: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> ImageModel:
    """The image model that is named, or the one whose provider's key is set. Raises `ModelError`."""
    said = (provider or "").strip().lower() or _first_with_key(environ, model)
    said = {"gemini": "google"}.get(said, said)
    if said not in (*DEFAULT_IMAGE_MODELS, "openai-compatible"):
        near = (
            did_you_mean(said, DEFAULT_IMAGE_MODELS)
            or f"; it is one of {', '.join(DEFAULT_IMAGE_MODELS)}, openai-compatible"
        )
        raise ModelError("not_found", f"no images are to be had from {said[:80]!r}{near}")
    name = model or DEFAULT_IMAGE_MODELS.get(said) or ""
    if not name:
        raise ModelError("not_found", "no image model is named; set execution.model")
    address, own = resolve_base_url(said, base_url, environ)
    variable, key = ("execution.apiKey", api_key) if api_key else find_key(said, environ)
    if not key and own:
        raise missing_key_error(said, name)
    register_secrets([key] if key else [])
    validate_headers({variable: key or "", **(headers or {})})
    if said == "google":
        verb = "predict" if name.startswith("imagen") else "generateContent"
        place = name if "/" in name else f"models/{name}"
        version = "" if address.rpartition("/")[2].startswith("v1") else "/v1beta"
        url, proof = f"{address}{version}/{quote(place)}:{verb}", {"x-goog-api-key": key or ""}
    else:
        url, proof = f"{address}/images/generations", {"Authorization": f"Bearer {key}"}
    endpoint = ModelEndpoint(url=url, headers={**(proof if key else {}), **(headers or {})}, credential_name=variable)
    return (GoogleImageModel if said == "google" else OpenAIImageModel)(said, name, endpoint)


def create_image_handler(name: str, execution: Mapping[str, Any]) -> Handler:
    """What runs a configured tool that draws. The model is looked for when it is called: a key may come later.

    Raises `ToolDefinitionError` that begins with the key of `execution` that is wrong.
    """
    for key, value in execution.items():
        if key not in _KEYS:
            near = did_you_mean(key, _KEYS) or f"; it takes {', '.join(_KEYS)}"
            raise ToolDefinitionError(f"{key}: is not known to the execution type image{near}")
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
            raise _failure(name, error) from None

    return handle


def _failure(name: str, error: ModelError) -> ToolExecutionError | ToolTransportError:
    message = f'tool "{name}" cannot draw: {error}'
    if error.is_transient:
        return ToolTransportError(message, executed=error.kind == "broken")
    return ToolExecutionError(message, executed=False)


def _first_with_key(environ: Mapping[str, str], model: str | None) -> str:
    if model is not None and model.startswith(("gemini", "imagen")):
        return "google"
    if model is not None and model.startswith(("gpt", "dall-e", "chatgpt")):
        return "openai"
    return next((one for one in DEFAULT_IMAGE_MODELS if find_key(one, environ)[1]), "openai")


def _measure(size: str) -> tuple[int, int] | None:
    for sign in ("x", "×", ":"):
        left, found, right = size.lower().partition(sign)
        if found and left.strip().isdigit() and right.strip().isdigit():
            width, height = int(left.strip()[:6]), int(right.strip()[:6])
            return (width, height) if width and height else None
    return None


def _pixels(size: str) -> str:
    """A size as OpenAI takes it; a ratio becomes the size that comes near it."""
    measured = _measure(size)
    if measured is None or ":" not in size:
        return size
    width, height = measured
    return _SIZES["square" if width == height else "wide" if width > height else "tall"]


def _ratio(size: str) -> str | None:
    """A size as Google takes it: the nearest of its ratios."""
    measured = _measure(size)
    if measured is None:
        return None
    wanted = measured[0] / measured[1]

    def distance(ratio: str) -> float:
        width, _, height = ratio.partition(":")
        return abs(int(width) / int(height) - wanted)

    return min(_RATIOS, key=distance)


def _decode(kind: type[T], body: bytes, name: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as fault:
        raise ModelError("broken", f"{name}: its answer is not of the form of its API: {fault}") from None
