"""Embeddings from any server with OpenAI's `/v1/embeddings`. Used by the server for `search_knowledge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from toolspace.core import json_text
from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ModelError
from toolspace.models.http import ModelHttpClient, build_error, error_from_connection, error_from_response
from toolspace.models.registry import find_key, parse_model_name, resolve_base_url, validate_headers

OPENAI_URL = "https://api.openai.com/v1"
_MAX_BYTES = 64 * 1024 * 1024
"""The size limit of a response: 100 texts with 3,072 numbers each are about 6 MB."""
_BATCH_SIZE = 100


class _Embedding(msgspec.Struct):
    embedding: list[float]
    index: int | None = None


class _EmbeddingsResponse(msgspec.Struct):
    data: list[_Embedding]


class HttpEmbedder:
    """An `Embedder` over HTTP. `base_url` is the URL up to `/embeddings`."""

    def __init__(
        self,
        model: str,
        *,
        api_key: str | None = None,
        base_url: str = OPENAI_URL,
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
        for start in range(0, len(texts), _BATCH_SIZE):
            vectors += await self._embed_batch(texts[start : start + _BATCH_SIZE])
        return vectors

    async def aclose(self) -> None:
        """Closes its connections, including those of a given `http`."""
        await self._http.aclose()

    async def _embed_batch(self, texts: Sequence[str]) -> list[list[float]]:
        from yarl import URL

        from toolspace.core.http_errors import HTTP_FAILURES

        url = URL(self._url)
        body = json_text.encode_bytes({"model": self._model, "input": [json_text.valid_text(text) for text in texts]})
        try:
            response = await self._http.post(url, self._headers, body, self._timeout)
            async with response:
                content = await _read(response)
                status, headers = response.status, response.headers
        except HTTP_FAILURES as failure:
            raise error_from_connection(self.name, failure, url, timeout=self._timeout, has_started=False) from failure
        if status != 200:
            raise error_from_response(self.name, status, headers, content, credential_name="its key")
        return self._parse_vectors(content, len(texts))

    def _parse_vectors(self, content: bytes, count: int) -> list[list[float]]:
        try:
            embeddings = msgspec.json.decode(content, type=_EmbeddingsResponse).data
        except (msgspec.DecodeError, RecursionError) as error:
            raise build_error(self.name, "broken", str(error)) from None
        # By index, if the server sends one: it may answer in another order.
        embeddings.sort(key=lambda embedding: embedding.index or 0)
        lengths = {len(embedding.embedding) for embedding in embeddings}
        if len(embeddings) != count or len(lengths) > 1 or lengths == {0}:
            message = f"{len(embeddings)} vectors of {sorted(lengths)} numbers for {count} texts"
            raise build_error(self.name, "broken", message)
        return [embedding.embedding for embedding in embeddings]


def open_embedder(
    model: str,
    *,
    environ: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> HttpEmbedder:
    """Opens the embedder that a configuration names: `openai:text-embedding-3-small`.

    A name without a provider is a model of OpenAI, or of the server at `base_url`. The caller closes the embedder.
    Raises `ModelError` if its key or URL is missing.
    """
    provider, name = parse_model_name(model)
    provider = provider or ("openai-compatible" if base_url else "openai")
    try:
        url, is_own_url = resolve_base_url(provider, base_url, environ)
    except ModelError as error:
        raise ModelError(error.kind, str(error).replace("model.", "embeddings.")) from None
    variable, key = ("embeddings.apiKey", api_key) if api_key else find_key(provider, environ)
    if not key and is_own_url and variable != "model.apiKey":
        remedy = f"set {variable} in the environment, or embeddings.apiKey in the configuration"
        raise ModelError("no_key", f"{provider}:{name}: no key is set; {remedy}")
    validate_headers({variable: key or "", **(headers or {})})
    register_secrets([key] if key else [])
    return HttpEmbedder(name, api_key=key, base_url=url, headers=headers)


async def _read(response: Any) -> bytes:
    body = bytearray()
    async for piece in response.content.iter_any():
        body += piece
        if len(body) > _MAX_BYTES:
            raise ModelError("broken", f"the answer has more than {_MAX_BYTES} bytes")
    return bytes(body)
