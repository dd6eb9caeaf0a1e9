"""Documents are read from files and URLs, in JSON and YAML; errors are reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.http_servers import http_server
from tests.providers.openapi.services import document, operation, service
from toolspace.core.network_addresses import Address
from toolspace.core.tool_context import ToolContext
from toolspace.core.yaml_text import parse_yaml_as_json
from toolspace.errors import ProviderError
from toolspace.providers.openapi import document as documents
from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec
from toolspace.providers.rest.client import HttpClient
from toolspace.toolspace import Toolspace

pytestmark = pytest.mark.spec("3.22")

YAML = """
openapi: 3.1.0
info: {title: t, version: "1"}
paths:
  /pets:
    get:
      operationId: list-pets
      parameters:
        - {name: day, in: query, schema: {type: string, enum: [no, 12:30, 2020-01-01]}}
      responses:
        200: {description: fine}
"""


async def load_provider(spec: str, **fields: Any) -> OpenApiProvider:
    provider = OpenApiProvider("api", OpenApiSpec(spec=spec, **fields))
    try:
        await provider.warmup()
    finally:
        await provider.aclose()
    return provider


def names(provider: OpenApiProvider) -> list[str]:
    return [tool.name for tool in provider.list_tools()]


async def test_yaml_scalars_follow_yaml_1_2(tmp_path: Path) -> None:
    file = tmp_path / "api.yaml"
    file.write_text(YAML)
    [tool] = (await load_provider(str(file))).list_tools()
    assert tool.name == "list-pets"
    assert tool.input_schema["properties"]["day"]["enum"] == ["no", "12:30", "2020-01-01"]


@pytest.mark.parametrize("text", [YAML, json.dumps(document(operation()))], ids=["yaml", "json"])
async def test_a_document_may_be_a_url_and_its_servers_relative_to_it(text: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text) if request.path == "/docs/api" else web.json_response({"at": request.path})

    async with http_server(answer) as server:
        provider = OpenApiProvider("api", OpenApiSpec(spec=server.url("/docs/api")))
        await provider.warmup()
        [tool] = provider.list_tools()
        result = await provider.execute(tool.name, {}, ToolContext())
        await provider.aclose()
    assert result.ok, result.error
    assert server.requests[-1].target in ("/pets", "/x")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "expected a mapping"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"{", "cannot be read"),
        (b"[" * 100_000, "nested"),
        (b"- " * 100_000, "nested deeper"),
        (b"a: &a [*a]", "stands inside the value of its anchor"),
        (b'{"swagger": "2.0"}', "swagger2openapi"),
        (b'{"openapi": "4.0.0"}', "use 3.0 or 3.1"),
        (b'{"info": {}}', "no openapi: version"),
    ],
    ids=["empty", "bytes", "cut", "deep-json", "deep-yaml", "circle", "swagger", "future", "other"],
)
async def test_an_invalid_document_is_rejected_with_the_reason(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "api.json"
    file.write_bytes(content)
    with pytest.raises(ProviderError, match=expected):
        await load_provider(str(file))


def test_nested_aliases_are_counted_not_expanded() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(ValueError, match="after its aliases are expanded"):
        parse_yaml_as_json("\n".join(lines))


def test_own_keys_override_merged_keys() -> None:
    assert parse_yaml_as_json("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"y": 3, "x": 1}


async def test_missing_and_oversized_files_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProviderError, match="no such file"):
        await load_provider(str(tmp_path / "none.yaml"))
    file = tmp_path / "api.yaml"
    file.write_text(YAML)
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 100)
    with pytest.raises(ProviderError, match="larger than"):
        await load_provider(str(file))


async def test_a_failed_download_is_reported_without_the_query() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        raise web.HTTPForbidden

    async with http_server(answer) as server:
        with pytest.raises(ProviderError, match="answers 403") as error_info:
            await load_provider(server.url("/api.json?key=hush-hush"))
    assert "hush" not in str(error_info.value)


async def test_headers_are_sent_to_the_document_only_at_the_service_origin() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(document(operation()))

    async with http_server(answer) as server:
        await load_provider(server.url("/a.json"), headers={"X-Key": "k"})
        await load_provider(server.url("/a.json"), headers={"X-Key": "k"}, base_url="https://elsewhere.test")
        await load_provider(server.url("/a.json"), headers={"X-Key": "k"}, base_url=server.url("/v1"))
    assert ["x-key" in request.headers for request in server.requests] == [False, False, True]


async def test_references_reach_only_files_in_the_document_folder(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "parts").mkdir(parents=True)
    (tmp_path / "secret.yaml").write_text("Pet: {type: string}")
    (folder / "link.yaml").symlink_to(tmp_path / "secret.yaml")
    (folder / "parts" / "pets.yaml").write_text(
        "Pet: {properties: {name: {$ref: '#/Name'}, owner: {$ref: '../api.json#/components/schemas/Who'}}}\n"
        "Name: {type: string}\n"
    )

    def body_with_reference(ref: str) -> dict[str, Any]:
        return {"requestBody": {"content": {"application/json": {"schema": {"$ref": ref}}}}, "responses": {}}

    document_json = document(
        {
            "/good": {"post": {"operationId": "good", **body_with_reference("parts/pets.yaml#/Pet")}},
            "/up": {"post": {"operationId": "up", **body_with_reference("../secret.yaml#/Pet")}},
            "/link": {"post": {"operationId": "link", **body_with_reference("link.yaml#/Pet")}},
            "/web": {"post": {"operationId": "web", **body_with_reference("https://example.com/pets.yaml#/Pet")}},
            "/none": {"post": {"operationId": "none", **body_with_reference("#/components/schemas/None")}},
            "/fine": {"get": {"operationId": "fine", "responses": {}}},
        },
        components={"schemas": {"Who": {"type": "integer"}}},
    )
    (folder / "api.json").write_text(json.dumps(document_json))
    provider = await load_provider(str(folder / "api.json"))
    assert names(provider) == ["good", "fine"]
    left_out = {warning.split('"')[1] for warning in provider.warnings if "left out" in warning}
    assert left_out == {"up", "link", "web", "none"}
    schema = provider.list_tools()[0].input_schema
    assert set(schema["properties"]) == {"name", "owner"}
    assert sorted(definition["type"] for definition in schema["$defs"].values()) == ["integer", "string"]


async def test_a_document_from_the_web_loads_no_files_and_urls() -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(document(operation(parameters=[{"$ref": "other.json#/p"}])))

    async with http_server(answer) as server:
        provider = await load_provider(server.url("/api.json"))
    assert names(provider) == []
    assert "leaves the document" in provider.warnings[0]
    assert len(server.requests) == 1


async def test_servers_come_from_the_operation_the_path_or_the_document() -> None:
    document_json = document(
        {
            "/own": {"get": {"operationId": "own", "servers": [{"url": "http://server/op"}], "responses": {}}},
            "/path": {"servers": [{"url": "http://server/path"}], "get": {"operationId": "path", "responses": {}}},
            "/all": {"get": {"operationId": "all", "responses": {}}},
            "/broken": {"get": {"operationId": "broken", "servers": [{"url": "ftp://x"}], "responses": {}}},
        },
        servers=[
            {"url": "http://server/{stage}/{v}", "variables": {"stage": {"default": "live"}, "v": {"default": 2}}}
        ],
    )
    async with service(document_json) as api:
        assert [(await api.capture_request(name)).target for name in ("own", "path", "all")] == [
            "/op/own",
            "/path/path",
            "/live/2/all",
        ]
        assert any('"broken"' in warning for warning in api.provider.warnings)
    async with service(document_json, base_url="http://127.0.0.1:9/x") as api:
        assert "broken" in api.tools


async def test_a_service_without_a_host_says_what_to_set() -> None:
    async with service(document(operation(), servers=[{"url": "/v1"}])) as api:
        result = await api.call()
        assert (result.error_kind, result.executed) == ("execution_error", False)
        assert "set openapi.api.baseUrl" in (result.error or "")
        assert any("baseUrl" in warning for warning in api.provider.warnings)


async def test_an_invalid_base_url_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "api.yaml"
    file.write_text(YAML)
    with pytest.raises(ProviderError, match="baseUrl: expected an absolute URL"):
        await load_provider(str(file), base_url="api.example.com")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.1", "[::ffff:127.0.0.1]"])
async def test_a_document_from_the_web_cannot_lead_to_a_private_address(host: str) -> None:
    """In these tests 127.0.0.2 counts as public; all other addresses are private."""

    def special(address: Address) -> str | None:
        return None if str(address) == "127.0.0.2" else "private"

    client = HttpClient(classify_address=special)
    async with http_server() as private:
        document_json = document(operation("/x"), servers=[{"url": f"http://{host}:{private.port}"}])

        async def answer(request: web.Request) -> web.StreamResponse:
            return web.json_response(document_json)

        async with http_server(answer, host="127.0.0.2") as web_server, http_server(answer) as own_server:
            async with Toolspace(providers=[OpenApiProvider("api", OpenApiSpec(spec=web_server.url()), client)]) as ts:
                refused_result = await ts.call("api__op", {})
            assert (refused_result.error_kind, refused_result.executed) == ("not_permitted", False), (
                refused_result.error
            )
            assert private.requests == []
            for spec in (
                OpenApiSpec(spec=web_server.url(), base_url=private.url()),
                OpenApiSpec(spec=own_server.url(), base_url=None if host == "127.0.0.1" else private.url()),
            ):
                async with Toolspace(providers=[OpenApiProvider("api", spec, client)]) as ts:
                    allowed = await ts.call("api__op", {})
                assert allowed.ok, allowed.error
        await client.aclose()
