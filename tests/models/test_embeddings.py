"""Embeddings over HTTP, from a local server with OpenAI's format."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import HttpTestServer, http_server
from toolspace.errors import ModelError
from toolspace.models.embeddings import HttpEmbedder, open_embedder

pytestmark = [pytest.mark.spec("9.5")]

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def of_lengths(request: web.Request) -> web.Response:
    """Vectors with the length of each text, in another order than the texts."""
    texts = json.loads(await request.text())["input"]
    data = [{"object": "embedding", "index": n, "embedding": [len(text), n]} for n, text in enumerate(texts)]
    return web.json_response({"object": "list", "data": data[::-1], "model": "small"})


def embedder(server: HttpTestServer, **options: Any) -> HttpEmbedder:
    return HttpEmbedder("small", api_key="sk-secret", base_url=server.url("/v1/"), **options)


async def test_each_text_gets_its_vector_in_the_order_of_the_texts() -> None:
    async with http_server(of_lengths) as server:
        embedder_client = embedder(server, headers={"x-team": "search"})
        texts = ["a" * n for n in range(250)]
        vectors = await embedder_client.embed(texts)
        await embedder_client.aclose()
    assert [vector[0] for vector in vectors] == list(range(250))
    assert [len(json.loads(request.body)["input"]) for request in server.requests] == [100, 100, 50]
    first = server.requests[0]
    assert (first.method, first.path, json.loads(first.body)["model"]) == ("POST", "/v1/embeddings", "small")
    assert (first.headers["authorization"], first.headers["x-team"]) == ("Bearer sk-secret", "search")


async def test_without_texts_no_request_is_sent() -> None:
    async with http_server(of_lengths) as server:
        assert await embedder(server).embed([]) == []
    assert server.requests == []


BAD: list[tuple[int, Any, str]] = [
    (401, {"error": {"message": "Incorrect API key"}}, "not_permitted"),
    (429, {"error": {"message": "Slow down"}}, "rate_limited"),
    (302, {}, "not_found"),
    (200, {"data": []}, "broken"),
    (200, {"data": [{"embedding": [1.0]}, {"embedding": [1.0]}]}, "broken"),
    (200, {"data": [{"embedding": []}]}, "broken"),
    (200, {"data": [{"embedding": "AAAA"}]}, "broken"),
    (200, [1], "broken"),
]


@pytest.mark.parametrize(("status", "body", "kind"), BAD)
async def test_an_invalid_response_is_an_error_of_its_kind(status: int, body: Any, kind: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(body, status=status, headers={"location": "/elsewhere"} if status == 302 else None)

    async with http_server(answer) as server:
        embedder_client = embedder(server)
        with pytest.raises(ModelError) as error_info:
            await embedder_client.embed(["text"])
        await embedder_client.aclose()
    assert error_info.value.kind == kind
    assert "sk-secret" not in str(error_info.value)
    assert len(server.requests) == 1


async def test_an_unreachable_server_is_a_transient_error() -> None:
    async with http_server(of_lengths) as server:
        pass
    embedder_client = embedder(server)
    with pytest.raises(ModelError) as error_info:
        await embedder_client.embed(["text"])
    await embedder_client.aclose()
    assert error_info.value.kind == "unavailable"


async def test_the_key_of_a_provider_goes_to_that_provider_alone() -> None:
    environ = {"OPENAI_API_KEY": "sk-openai"}

    async def numbers(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"embedding": [1.0]}]})

    async with http_server(numbers) as server:
        for model, more, proof in (
            ("small", {}, None),  # Whoever is there: no key is theirs.
            ("small", {"api_key": "own"}, "Bearer own"),
            ("openai:small", {}, "Bearer sk-openai"),
        ):
            embedder = open_embedder(model, environ=environ, base_url=server.url("/v1"), **more)
            await embedder.embed(["a"])
            await embedder.aclose()
            assert server.requests[-1].headers.get("authorization") == proof
            assert json.loads(server.requests[-1].body)["model"] == "small"


@pytest.mark.parametrize(
    ("model", "environ", "reason"),
    [
        ("small", {}, "openai:small: no key is set; set OPENAI_API_KEY in the environment, or embeddings.apiKey"),
        ("mistral:m", {"OPENAI_API_KEY": "k"}, "MISTRAL_API_KEY"),
        ("azure:m", {}, "set embeddings.baseUrl"),
        ("small", {"OPENAI_API_KEY": "k\nl"}, "OPENAI_API_KEY"),
    ],
)
def test_a_missing_setting_of_an_embedder_is_reported(model: str, environ: dict[str, str], reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        open_embedder(model, environ=environ)
