"""Embeddings from any endpoint that speaks OpenAI's `/v1/embeddings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ModelError
from toolspace.models.errors import build_error, error_from_connection, error_from_response
from toolspace.models.http import ModelHttpClient
from toolspace.models.registry import find_key, parse_model_name, resolve_base_url, validate_headers

OPENAI = "https://api.openai.com/v1"
_MOST_BYTES = 64 * 1024 * 1024
"""Of one answer: 100 texts with 3,072 numbers each are about 6 MB."""
_AT_ONCE = 100


class _One(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


class _Answer(msgspec.Struct):
    data: list[_One]


class HttpEmbedder:
    """An `Embedder`. `base_url` is everything before `/embeddings`."""

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str = OPENAI,
        headers: Mapping[str, str] | None = None,
        timeout: float = 30.0,
        http: ModelHttpClient | None = None,
    ) -> None:
        self.name = f"embeddings:{model}"
        self._model = model
        self._url = f"{base_url.rstrip('/')}/embeddings"
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = timeout
        self._http = http or ModelHttpClient()

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        vectors: list[list[float]] = []
        for start in range(0, len(texts), _AT_ONCE):
            vectors += await self._embed(texts[start : start + _AT_ONCE])
        return vectors

    async def aclose(self) -> None:
        """Lets go of its connections, also those that it was given."""
        await self._http.aclose()

    async def _embed(self, texts: Sequence[str]) -> list[list[float]]:
        from yarl import URL

        from toolspace.core.http_errors import HTTP_FAILURES

        url = URL(self._url)
        body = json_text.encode_bytes({"model": self._model, "input": [json_text.valid_text(text) for text in texts]})
        try:
            response = await self._http.post(url, self._headers, body, self._timeout)
            async with response:
                answer = await _read(response)
                status, headers = response.status, response.headers
        except HTTP_FAILURES as fault:
            raise error_from_connection(self.name, fault, url, timeout=self._timeout, begun=False) from fault
        if status != 200:
            raise error_from_response(self.name, status, headers, answer, check="its key")
        return self._vectors(answer, len(texts))

    def _vectors(self, answer: bytes, count: int) -> list[list[float]]:
        try:
            found = msgspec.json.decode(answer, type=_Answer).data
        except (msgspec.DecodeError, RecursionError) as error:
            raise build_error(self.name, "broken", str(error)) from None
        # In the order of their numbers, where the endpoint says them: it may answer in another.
        found.sort(key=lambda one: one.index or 0)
        lengths = {len(one.embedding) for one in found}
        if len(found) != count or len(lengths) > 1 or lengths == {0}:
            raise build_error(
                self.name, "broken", f"{len(found)} vectors of {sorted(lengths)} numbers for {count} texts"
            )
        return [one.embedding for one in found]


def open_embedder(
    model: str,
    *,
    environ: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpEmbedder:
    """The embedder that a configuration names: `openai:text-embedding-3-small`, or a name alone, which is OpenAI's, or
    belongs to whoever is at `base_url`. Close it. Raises `ModelError` where its key or address is missing.
    """
    provider, name = parse_model_name(model)
    provider = provider or ("openai-compatible" if base_url else "openai")
    try:
        address, own = resolve_base_url(provider, base_url, environ)
    except ModelError as error:
        raise ModelError(error.kind, str(error).replace("model.", "embeddings.")) from None
    variable, key = ("embeddings.apiKey", api_key) if api_key else find_key(provider, environ)
    if not key and own and variable != "model.apiKey":
        way = f"set {variable} in the environment, or embeddings.apiKey in the configuration"
        raise ModelError("no_key", f"{provider}:{name}: no key is set; {way}")
    validate_headers({variable: key or "", **(headers or {})})
    register_secrets([key] if key else [])
    return HttpEmbedder(name, api_key=key, base_url=address, headers=headers)


async def _read(response: Any) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MOST_BYTES:
            raise ModelError("broken", f"the answer has more than {_MOST_BYTES} bytes")
    return bytes(body)
