"""An `openapi` section of a configuration creates callable tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.http_servers import http_server
from tests.providers.openapi.services import document, operation, parameter
from toolspace.toolspace import Toolspace


@pytest.mark.spec("3.22")
async def test_a_service_in_the_configuration_is_listed_and_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BILLING_KEY", "hush-hush-key")
    schemes = {"securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-Key"}}}
    paths = {
        **operation("/bills/{id}", parameters=[parameter("id", "path")], tags=["bills"]),
        "/other": {"get": {"operationId": "other", "responses": {}}},
    }
    (tmp_path / "billing.json").write_text(json.dumps(document(paths, components=schemes, security=[{"key": []}])))
    async with http_server() as server:
        (tmp_path / "toolspace.yaml").write_text(
            "openapi:\n"
            "  billing:\n"
            "    spec: ./billing.json\n"
            f"    baseUrl: {server.url()}\n"
            "    tags: [bills]\n"
            "    auth: {key: '${BILLING_KEY}'}\n"
        )
        async with Toolspace.open(tmp_path / "toolspace.yaml") as toolspace:
            assert toolspace.find_tool("billing__other") is None
            result = await toolspace.call("billing__op", {"id": 7})
            assert (result.ok, result.kind, result.namespace) == (True, "openapi", "billing")
    assert (server.requests[0].target, server.requests[0].headers["x-key"]) == ("/bills/7", "hush-hush-key")
