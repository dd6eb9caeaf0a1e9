"""An OpenAPI service fulfils the contract of providers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.http_servers import http_server
from tests.providers.openapi.services import document, parameter
from toolspace.core.extension_points import ToolProvider
from toolspace.providers.openapi.provider import OpenApiProvider, OpenApiSpec
from toolspace.testing import ProviderContract

_WAY = [parameter("way", "path", {"type": "string"})]


@pytest.mark.spec("3.22")
class TestOpenApi(ProviderContract):
    call = ("go", {"way": "on"})
    failing_call = ("go", {"way": "missing"})
    slow_call = ("go", {"way": "slow"})
    running_calls = 0

    @pytest_asyncio.fixture
    async def provider(self, tmp_path: Path) -> AsyncIterator[ToolProvider]:
        async def answer(request: web.Request) -> web.StreamResponse:
            if request.path == "/missing":
                return web.json_response({"message": "no such way"}, status=404)
            if request.path == "/slow":
                self.running_calls += 1
                try:
                    await asyncio.Event().wait()
                finally:
                    self.running_calls -= 1
            return web.json_response({"way": request.path})

        document_json = document({"/{way}": {"get": {"operationId": "go", "parameters": _WAY, "responses": {}}}})
        file = tmp_path / "openapi.json"
        file.write_text(json.dumps(document_json))
        async with http_server(answer) as server:
            yield OpenApiProvider("api", OpenApiSpec(spec=str(file), base_url=server.url("")))

    def is_working(self, provider: Any) -> bool | None:
        return self.running_calls > 0
