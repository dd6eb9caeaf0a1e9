"""Fixtures: a real gateway and HTTP clients of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.server.gateway import Gateway


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    """A gateway on SQLite with fixed keys."""
    async with Gateway.open(write_config(tmp_path)) as open_gateway:
        yield open_gateway


@pytest.fixture
async def api(gateway: Gateway) -> AsyncIterator[ApiClient]:
    """An HTTP client with a secret key."""
    async with open_api(gateway) as client:
        yield client


@pytest.fixture(params=["sqlite", "postgres"])
async def each_database_api(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[ApiClient]:
    """An HTTP client with a secret key; the test runs once for each kind of database."""
    more = {}
    if request.param == "postgres":
        more["storage"] = {"url": request.getfixturevalue("postgres_url")}
    async with Gateway.open(write_config(tmp_path, **more)) as open_gateway, open_api(open_gateway) as client:
        yield client
