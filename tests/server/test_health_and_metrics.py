"""The routes /health, /ready and /metrics, also during a database outage."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.server.gateway_api import ApiClient, ApiResponse, open_api, write_config
from tests.server.test_prometheus_format import samples
from tests.servers.postgres import LocalPostgresServer
from toolspace.server.gateway import Gateway
from toolspace.storage.sqlite import database_file

pytestmark = pytest.mark.spec("12.4")


async def test_health_and_ready_need_no_credentials(api: ApiClient) -> None:
    anonymous = api.with_headers()

    health, ready = await anonymous.get("/health"), await anonymous.get("/ready")

    assert (health.status, health.data) == (200, {"status": "ok"})
    assert (ready.status, ready.data) == (200, {"status": "ready"})


async def test_it_is_not_ready_while_it_stops(gateway: Gateway, api: ApiClient) -> None:
    gateway.readiness.is_stopping = True

    reply = await api.with_headers().get("/ready")

    assert reply.status == 503
    assert reply.headers["content-type"] == "application/problem+json"
    assert reply.headers["retry-after"] == "1"
    assert reply.data["reasons"] == ["the gateway is stopping"]
    assert (await api.get("/health")).status == 200


async def test_it_is_not_ready_once_damage_was_found(gateway: Gateway, api: ApiClient) -> None:
    gateway.ledger.database.report_damage("page 3 is never used")
    reply = await api.with_headers().get("/ready")

    assert reply.status == 503
    assert reply.data["reasons"] == ["the database is damaged; toolspace doctor says more"]


@pytest.mark.spec("15.3")
async def test_it_is_not_ready_while_the_disk_is_full(api: ApiClient, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(database_file, "LEAST_ROOM", 1 << 62)
        reply = await wait_for_readiness(api, 503)
        assert reply.data["reasons"] == ["the database cannot be written"]
    await wait_for_readiness(api, 200)


async def test_metrics_require_a_secret_key(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")
    member = await api.member("ann")

    assert (await api.with_headers().get("/metrics")).status == 401
    assert (await member.get("/metrics")).status == 403


async def test_metrics_count_what_happened(api: ApiClient) -> None:
    await api.post("/api/tools/json_parse/call", {"args": {"text": "[1]"}})
    await api.post("/api/tools/json_parse/call", {"args": {"text": "["}})
    await api.post("/api/tools/http_get/call", {"args": {"url": "http://127.0.0.1:1"}})
    await api.get("/api/no/such/path")
    await api.create("/api/entities", id="robot", type="agent", name="Robot")
    await api.create("/api/runs", agentEntityId="robot")
    await api.create("/api/agents/robot/inbox", data={"order": 1})

    reply = await api.get("/metrics")
    metrics = samples(reply.body)

    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert metrics['toolspace_tool_calls_total{tool="json_parse",status="ok",error_kind=""}'] == "1"
    assert metrics['toolspace_tool_calls_total{tool="http_get",status="failed",error_kind="not_permitted"}'] == "1"
    assert (
        metrics['toolspace_tool_calls_total{tool="json_parse",status="failed",error_kind="invalid_parameters"}'] == "1"
    )
    assert metrics['toolspace_tool_call_duration_seconds_bucket{tool="json_parse",le="+Inf"}'] == "2"
    assert metrics['toolspace_http_requests_total{method="POST",route="/api/tools/{name}/call",status="200"}'] == "3"
    assert metrics['toolspace_http_requests_total{method="other",route="other",status="404"}'] == "1"
    assert metrics['toolspace_runs_open{status="running"}'] == "1"
    assert metrics['toolspace_inbox_events{status="pending"}'] == "1"
    assert metrics['toolspace_calls_open{status="pending"}'] == "0"
    assert int(metrics['toolspace_database_seconds_count{kind="write"}']) > 0
    assert metrics["toolspace_database_up"] == metrics["toolspace_nodes"] == "1"
    assert int(metrics["process_resident_memory_bytes"]) > 1_000_000


async def test_values_from_requests_do_not_become_labels(api: ApiClient) -> None:
    for number in range(30):
        await api.post(f"/api/tools/made_up_{number}/call", {"args": {}})
        await api.get(f"/made/up/{number}")
        await api.get(f"/api/spaces/made_up_{number}")

    text = (await api.get("/metrics")).body

    assert b"made_up" not in text
    assert b"/made/up" not in text


async def wait_for_readiness(api: ApiClient, status: int) -> ApiResponse:
    """Waits until /ready has these reasons: a check is cached for a moment."""
    for _ in range(1_000):
        if (reply := await api.get("/ready")).status == status:
            return reply
        await asyncio.sleep(0.02)
    raise AssertionError(f"/ready never said {status}")


@pytest.mark.spec("15.3")
async def test_the_gateway_survives_a_database_outage_and_recovers(
    stoppable_postgres: LocalPostgresServer, tmp_path: Path
) -> None:
    with stoppable_postgres.database() as url:
        config = write_config(tmp_path, storage={"url": url})
        async with Gateway.open(config) as gateway, open_api(gateway) as api:
            before = await api.create("/api/entities", type="agent", name="Robot")
            assert (await api.get("/ready")).status == 200

            await asyncio.to_thread(stoppable_postgres.crash)
            failure = await api.post("/api/entities", {"type": "agent", "name": "Nobody"})
            readiness = await wait_for_readiness(api, 503)
            lives = await api.get("/health")
            metrics = samples((await api.get("/metrics")).body)
            works = await api.post("/api/tools/json_parse/call", {"args": {"text": "1"}})

            await asyncio.to_thread(stoppable_postgres.start)
            await wait_for_readiness(api, 200)
            after = await api.get(f"/api/entities/{before['id']}")

    assert failure.status == 503
    assert "The database is unavailable" in failure.detail
    assert readiness.data["reasons"] == ["the database does not respond"]
    assert "postgres" not in readiness.body.decode() + failure.body.decode()
    assert lives.status == 200
    assert metrics["toolspace_database_up"] == "0"
    assert (works.status, works.data["result"]) == (200, {"data": 1})
    assert after.data == before


async def test_every_metric_is_documented(api: ApiClient) -> None:
    page = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text()
    text = (await api.get("/metrics")).body.decode()
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE ")]

    assert len(names) > 20
    assert [name for name in names if f"\n| `{name}` |" not in page] == []
