"""Fixtures of the model tests: a model server, and a model that uses it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.models.model_server import ModelTestServer
from toolspace.core.language_model import Model
from toolspace.models.registry import open_model


@pytest.fixture
async def server() -> AsyncIterator[ModelTestServer]:
    async with ModelTestServer().serve() as loopback:
        yield loopback


@pytest.fixture
async def chat_model(server: ModelTestServer) -> AsyncIterator[Model]:
    model = open_model(
        "openai", "gpt-4.1", base_url=f"{server.url}/v1", api_key="sk-secret-1234567890", environ={}, retries=0
    )
    yield model
    await model.aclose()
