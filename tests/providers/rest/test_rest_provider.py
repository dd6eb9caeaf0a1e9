"""REST tools as a provider, and configured tools that are requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import http_server
from tests.providers.rest.rest_tools import rest_spec
from toolspace import Tool, ToolContext, Toolspace
from toolspace.core.extension_points import ToolProvider
from toolspace.core.tool import Annotations, ToolCategory
from toolspace.errors import ToolDefinitionError
from toolspace.providers.rest.client import HttpClient
from toolspace.providers.rest.provider import RestProvider, RestSpec, build_request_handler
from toolspace.testing import ProviderContract

open_requests: list[web.Request] = []
"""The slow requests that a server is processing."""


async def answer(request: web.Request) -> web.StreamResponse:
    match request.path:
        case "/wrong":
            return web.Response(status=500)
        case "/slow":
            open_requests.append(request)
            try:
                await asyncio.Event().wait()
            finally:
                open_requests.remove(request)
    return web.json_response({"at": request.path})


class TestRestProvider(ProviderContract):
    call = ("weather", {"city": "Paris"})
    failing_call = ("wrong", {})
    slow_call = ("slow", {})

    def is_working(self, provider: ToolProvider) -> bool:
        return bool(open_requests)

    @pytest.fixture
    async def provider(self) -> AsyncIterator[ToolProvider]:  # pyright: ignore
        async with http_server(answer) as server:
            yield RestProvider(
                [
                    RestSpec(name="weather", url=server.url("/weather/${parameters.city}")),
                    RestSpec(name="wrong", url=server.url("/wrong")),
                    RestSpec(name="slow", url=server.url("/slow")),
                ]
            )


@pytest.mark.spec("3.20")
def test_annotations_follow_from_the_method() -> None:
    def annotations(method: str, **settings: bool) -> Annotations:
        spec = RestSpec(name="t", url="https://api.example/", method=method, annotations=Annotations(**settings))
        (rest_tool,) = RestProvider([spec]).list_tools()
        assert rest_tool.category is ToolCategory.REST
        return rest_tool.annotations

    assert annotations("get") == Annotations(read_only=True, destructive=False, idempotent=True, open_world=True)
    assert annotations("POST") == Annotations(read_only=False, destructive=False, idempotent=False, open_world=True)
    assert annotations("DELETE") == Annotations(read_only=False, destructive=True, idempotent=True, open_world=True)
    assert annotations("POST", read_only=True).read_only


@pytest.mark.spec("2.1")
async def test_rest_tools_have_the_namespace_rest() -> None:
    async with http_server(answer) as server:
        provider = RestProvider([RestSpec(name="weather", url=server.url("/w"), description="The weather.")])
        async with Toolspace(providers=[provider]) as toolspace:
            result = await toolspace.call("rest__weather", {})
    assert (result.result, result.kind, result.namespace) == ({"at": "/w"}, "rest", "rest")


def test_two_tools_with_one_name_are_an_error() -> None:
    with pytest.raises(ToolDefinitionError, match="two REST tools 't'"):
        RestProvider([rest_spec("https://a.example/"), rest_spec("https://b.example/")])


async def test_a_shared_client_stays_open() -> None:
    client = HttpClient()
    async with http_server() as server:
        first = RestProvider([rest_spec(server.url())], client=client)
        second = RestProvider([rest_spec(server.url())], client=client)
        assert (await first.execute("t", {}, ToolContext())).ok
        await first.aclose()
        assert (await second.execute("t", {}, ToolContext())).ok
        await client.aclose()


@pytest.mark.spec("6.1")
@pytest.mark.parametrize(
    ("execution", "method", "target", "body"),
    [({"method": "GET"}, "GET", "/v1?city=Paris", b""), ({}, "POST", "/v1", b'{"city":"Paris"}')],
    ids=["get", "unsaid"],
)
async def test_a_configured_tool_with_a_url_is_a_request(
    execution: dict[str, Any], method: str, target: str, body: bytes
) -> None:
    client = HttpClient()
    async with http_server() as server:
        handler, _ = build_request_handler("weather", {"url": server.url("/v1"), **execution}, client)
        weather = Tool("weather", "", {"type": "object"}, handler=handler, execution_type="gateway")
        async with Toolspace(tools=[weather]) as toolspace:
            assert (await toolspace.call("weather", {"city": "Paris"})).result == {}
        await client.aclose()
    (request,) = server.requests
    assert (request.method, request.target, request.body) == (method, target, body)


@pytest.mark.spec("3.20")
async def test_variables_and_parameters_expand_in_a_configured_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with http_server() as server:
        monkeypatch.setenv("WEATHER_URL", server.url("/v1"))
        monkeypatch.setenv("WEATHER_KEY", "k-e-y-0-1")
        file = tmp_path / "toolspace.yaml"
        file.write_text(
            "restTools:\n"
            "  weather:\n"
            "    method: POST\n"
            "    url: ${WEATHER_URL}/${parameters.city}\n"
            "    headers: {X-Key: '${WEATHER_KEY}'}\n"
            "    query: {units: '${UNITS:-metric}'}\n"
            "    body: {key: '${WEATHER_KEY}', days: '${parameters.days}'}\n"
        )
        async with Toolspace.open(file) as toolspace:
            result = await toolspace.call("rest__weather", {"city": "New York", "days": 3})
    assert result.ok, result.error
    (request,) = server.requests
    assert request.target == "/v1/New%20York?units=metric"
    assert request.headers["x-key"] == "k-e-y-0-1"
    assert request.body == b'{"key":"k-e-y-0-1","days":3}'
