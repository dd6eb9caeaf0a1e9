"""Allowed hosts, allowed origins and CORS."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.gateway_api import ApiClient, open_api, write_config
from toolspace.config.server_settings import ServerSettings
from toolspace.server.gateway import Gateway
from toolspace.server.host_and_cors import allowed_hosts

PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "x-public-key"}


@pytest.mark.spec("8.3")
async def test_a_foreign_host_is_refused(api: ApiClient) -> None:
    for host in ("evil.example", "evil.example:8787", "localhost.evil.example", "127.0.0.1.evil.example", ""):
        reply = await api.get("/health", headers={"host": host})
        assert reply.status in (400, 421), host
    assert (await api.get("/health", headers={"host": "localhost:1"})).status == 200


@pytest.mark.spec("8.3")
async def test_a_foreign_origin_is_refused(api: ApiClient) -> None:
    for origin in ("https://evil.example", "null", "file://", "http://localhost.evil.example", "http://127.0.0.1@evil"):
        reply = await api.get("/api/me", headers={"origin": origin})
        assert reply.status == 403, origin
        assert "access-control-allow-origin" not in reply.headers
        assert (await api.request("OPTIONS", "/api/me", headers={"origin": origin, **PREFLIGHT})).status == 403


async def test_an_allowed_origin_gets_cors_headers(tmp_path: Path) -> None:
    config = write_config(tmp_path, server={"allowedOrigins": ["https://app.example"]})
    async with Gateway.open(config) as gateway, open_api(gateway) as api:
        for origin in ("https://app.example", "http://localhost:5173"):
            preflight = await api.request("OPTIONS", "/api/me", headers={"origin": origin, **PREFLIGHT})
            assert preflight.status == 204
            assert preflight.headers["access-control-allow-origin"] == origin
            assert "x-public-key" in preflight.headers["access-control-allow-headers"]
            for path, status in (("/api/me", 200), ("/api/nothing", 404)):
                reply = await api.get(path, headers={"origin": origin})
                assert reply.status == status
                assert reply.headers["access-control-allow-origin"] == origin
                assert reply.headers["vary"] == "origin"
        assert (await api.get("/api/me", headers={"origin": "http://app.example"})).status == 403


def test_the_configured_hosts_are_allowed() -> None:
    assert allowed_hosts(ServerSettings()) == ("127.0.0.1",)
    server = ServerSettings(host="0.0.0.0", allowed_hosts=("a.example",), public_url="https://b.example:8443/x")
    assert allowed_hosts(server) == ("a.example", "b.example:8443")
    assert allowed_hosts(ServerSettings(host="::1")) == ("[::1]",)
