"""Real documents: GitHub's, and the examples of ReadMe."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.core.provider_schema_rules import find_violations
from tests.http_servers import http_server
from tests.peers.install import npm_package
from toolspace import Settings
from toolspace.core.argument_validation import compile_schema
from toolspace.core.names import qualify_all
from toolspace.errors import ProviderError
from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec
from toolspace.toolspace import Toolspace

pytestmark = pytest.mark.spec("3.22")


def github() -> Path:
    return npm_package("@octokit/openapi") / "generated" / "api.github.com.json"


async def read(file: Path, **fields: str) -> OpenApiProvider:
    provider = OpenApiProvider("api", OpenApiSpec(spec=str(file), **fields))  # type: ignore[arg-type]
    await provider.warmup()
    await provider.aclose()
    return provider


def check(provider: OpenApiProvider) -> None:
    """Every schema is valid and self-contained: a reference out of it would not compile."""
    for tool in provider.list_tools():
        compile_schema(tool.input_schema, owner=tool.name)
        assert tool.input_schema["type"] == "object"
        if tool.output_schema is not None:
            compile_schema(tool.output_schema, owner=f"the output of {tool.name}")


async def test_every_github_operation_is_a_tool_with_valid_schemas() -> None:
    provider = await read(github())
    assert provider.warnings == ()
    assert len(provider.list_tools()) == 1223
    check(provider)
    names = qualify_all("github", [tool.name for tool in provider.list_tools()])
    assert len(set(names.values())) == 1223
    assert all(re.fullmatch(r"[A-Za-z0-9_]{1,64}", name) for name in names.values())
    assert names["repos/create-for-authenticated-user"] == "github__repos_create_for_authenticated_user"


async def test_github_calls_match_the_document() -> None:
    async with http_server() as server:
        spec = OpenApiSpec(spec=str(github()), base_url=server.url(""), headers={"Authorization": "Bearer t"})
        async with Toolspace(providers=[OpenApiProvider("github", spec)]) as toolspace:
            for name, arguments in (
                ("issues_list_for_repo", {"owner": "o", "repo": "r", "labels": "a,b", "per_page": 5}),
                ("issues_create", {"owner": "o", "repo": "r", "title": "T", "labels": ["x", {"name": "y"}]}),
                ("repos_get_content", {"owner": "o", "repo": "r", "path": "docs/a b.md"}),
                ("markdown_render_raw", {"body": "# hello"}),
            ):
                result = await toolspace.call(f"github__{name}", arguments)
                assert result.ok, result.error
    list_request, create_request, content, render_request = server.requests
    assert (list_request.method, list_request.target) == ("GET", "/repos/o/r/issues?labels=a%2Cb&per_page=5")
    assert (create_request.method, create_request.target) == ("POST", "/repos/o/r/issues")
    assert create_request.body == b'{"title":"T","labels":["x",{"name":"y"}]}'
    assert content.target == "/repos/o/r/contents/docs%2Fa%20b.md"
    assert (render_request.headers["content-type"], render_request.body) == ("text/plain", b"# hello")
    assert all(request.headers["authorization"] == "Bearer t" for request in server.requests)


def examples() -> list[Path]:
    folder = npm_package("@readme/oas-examples")
    return sorted(
        path
        for version in ("3.0", "3.1")
        for path in folder.glob(f"{version}/**/*")
        if path.suffix in (".json", ".yaml")
    )


async def test_every_3_0_and_3_1_example_is_read_without_warnings() -> None:
    files = examples()
    assert len(files) > 80
    for file in files:
        provider = await read(file, base_url="https://example.com")
        assert provider.warnings == (), file.name
        check(provider)


@pytest.mark.spec("1.9")
async def test_no_tool_of_a_real_document_makes_a_provider_of_models_refuse_the_request() -> None:
    for file in (github(), *examples()):
        spec = OpenApiSpec(spec=str(file), base_url="https://example.com")
        async with Toolspace(
            providers=[OpenApiProvider("api", spec)], settings=Settings(tool_search_threshold=10**9)
        ) as ts:
            assert find_violations(ts) == [], file.name


async def test_an_example_is_the_same_in_json_and_yaml() -> None:
    folder = npm_package("@readme/oas-examples")
    for name in ("parameters-style", "security", "petstore", "schema-types"):
        json_texts = [
            await read(folder / f"3.0/{kind}/{name}.{kind}", base_url="https://example.com")
            for kind in ("json", "yaml")
        ]
        first, second = ([tool.to_dict() for tool in provider.list_tools()] for provider in json_texts)
        assert first == second


async def test_2_0_documents_are_rejected_with_a_hint() -> None:
    with pytest.raises(ProviderError, match=r"Swagger 2\.0.*convert it"):
        await read(npm_package("@readme/oas-examples") / "2.0/json/petstore.json")
