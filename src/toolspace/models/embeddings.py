"""Embeddings from any server with OpenAI's `/v1/embeddings`. Used by the server for `search_knowledge`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from toolspace.core import json_text
from toolspace.models.errors import build_error
from toolspace.models.http import ModelEndpoint, ModelHttpClient
from toolspace.models.registry import parse_model_name, resolve_access

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
        self._model = model
        self._endpoint = ModelEndpoint(
            name=f"embeddings:{model}",
            url=f"{base_url.rstrip('/')}/embeddings",
            headers={**(headers or {}), **({"Authorization": f"Bearer {api_key}"} if api_key else {})},
            credential_name="its key",
        )
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
        body = json_text.encode_bytes({"model": self._model, "input": [json_text.valid_text(text) for text in texts]})
        content = await self._http.fetch(self._endpoint, body, timeout=self._timeout, max_bytes=_MAX_BYTES)
        return self._parse_vectors(content, len(texts))

    def _parse_vectors(self, content: bytes, count: int) -> list[list[float]]:
        try:
            embeddings = msgspec.json.decode(content, type=_EmbeddingsResponse).data
        except (msgspec.DecodeError, RecursionError) as error:
            raise build_error(self._endpoint, "broken", str(error)) from None
        # By index, if the server sends one: it may answer in another order.
        embeddings.sort(key=lambda embedding: embedding.index or 0)
        lengths = {len(embedding.embedding) for embedding in embeddings}
        if len(embeddings) != count or len(lengths) > 1 or lengths == {0}:
            message = f"{len(embeddings)} vectors of {sorted(lengths)} numbers for {count} texts"
            raise build_error(self._endpoint, "broken", message)
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
    access = resolve_access(
        provider, name, environ, section="embeddings", base_url=base_url, api_key=api_key, headers=headers
    )
    return HttpEmbedder(name, api_key=access.key, base_url=access.base_url, headers=headers)
