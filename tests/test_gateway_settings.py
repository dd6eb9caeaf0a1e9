"""Every documented setting of the gateway has an effect."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web

from tests.server.gateway_api import JWT_SECRET, PUBLIC, ApiClient, open_api, open_app_api, write_config
from tests.server.gateway_process import start_gateway_process
from tests.setting_coverage import SettingCoverage
from toolspace.core.stored_records import space_stream
from toolspace.server.authorization import Access
from toolspace.server.gateway import Gateway
from toolspace.server.requests import Request
from toolspace.server.routing import Route
from toolspace.storage.database import Program
from toolspace.storage.queries import events

pytestmark = pytest.mark.spec("5.3")

TOOLS = """
import asyncio
from toolspace import tool

@tool
async def endless() -> None:
    await asyncio.Event().wait()
"""
EXTERNAL = {"name": "move", "executionType": "external", "visible": False, "inputSchema": {"type": "object"}}
OTHER = "https://elsewhere.example"


class GatewaySetup:
    """Opens gateways with settings, in one folder."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder = folder
        self.request = request
        (folder / "tools.py").write_text(TOOLS)

    def config(self, storage: dict[str, Any] | None = None, **server: Any) -> Path:
        storage_settings = {"dir": "./state", **(storage or {})}
        return write_config(
            self.folder, functions="./tools.py", tools=[EXTERNAL], storage=storage_settings, server=server
        )

    @asynccontextmanager
    async def gateway(
        self, storage: dict[str, Any] | None = None, **server: Any
    ) -> AsyncGenerator[tuple[Gateway, ApiClient]]:
        async with Gateway.open(self.config(storage, **server)) as gateway, open_api(gateway) as api:
            yield gateway, api

    @asynccontextmanager
    async def api(self, **server: Any) -> AsyncGenerator[ApiClient]:
        async with self.gateway(**server) as (_, api):
            yield api


coverage = SettingCoverage()


@pytest.fixture
def setup(tmp_path: Path, request: pytest.FixtureRequest) -> GatewaySetup:
    return GatewaySetup(tmp_path, request)


def token(secret: str = JWT_SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": time.time() + 60, **claims}, secret, "HS256")


async def create_ann(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")


async def is_token_accepted(api: ApiClient, token: str, key: str = PUBLIC) -> bool:
    """Whether the token is accepted."""
    reply = await api.with_headers(x_public_key=key, authorization=f"Bearer {token}").get("/api/me")
    assert reply.status in (200, 401), reply
    return reply.status == 200


@asynccontextmanager
async def stream(api: ApiClient, path: str = "/api/spaces/room/stream") -> AsyncGenerator[aiohttp.ClientResponse]:
    async with api.session.get(api.url + path, headers=api.headers) as response:
        yield response


@coverage.covers("server.host", "server.port")
async def test_the_gateway_listens_on_host_and_port(setup: GatewaySetup) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    async with start_gateway_process(setup.folder, setup.config(host="127.0.0.2", port=port), port=None) as gateway:
        assert gateway.url == f"http://127.0.0.2:{port}"


@coverage.covers("server.publicUrl")
async def test_requests_may_use_the_public_url(setup: GatewaySetup) -> None:
    headers = {"host": "tools.example:8443"}
    async with setup.api() as api:
        assert (await api.get("/health", headers=headers)).status == 421
    async with setup.api(publicUrl="https://tools.example:8443") as api:
        assert (await api.get("/health", headers=headers)).status == 200


@coverage.covers("server.secretKey")
async def test_the_configured_secret_key_is_accepted(setup: GatewaySetup) -> None:
    async with setup.api(secretKey="sk_another_key_of_some_length") as api:
        assert (await api.get("/api/me")).status == 401
        assert (await api.with_headers(x_secret_key="sk_another_key_of_some_length").get("/api/me")).status == 200


@coverage.covers("server.publicKey", "server.jwtSecret")
async def test_the_configured_public_key_and_jwt_secret_are_accepted(setup: GatewaySetup) -> None:
    other_secret = "another-secret-with-more-than-32-characters"
    async with setup.api(publicKey="pk_another_key_of_some_length", jwtSecret=other_secret) as api:
        await create_ann(api)
        assert await is_token_accepted(api, token(other_secret), "pk_another_key_of_some_length")
        assert not await is_token_accepted(api, token(other_secret))
        assert not await is_token_accepted(api, token(), "pk_another_key_of_some_length")


@coverage.covers("server.jwksUrl")
async def test_tokens_of_another_issuer_are_verified_with_its_jwks(setup: GatewaySetup) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from jwt.algorithms import ECAlgorithm

    private = ec.generate_private_key(ec.SECP256R1())
    public_jwk = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)

    async def keys(_: web.Request) -> web.Response:
        return web.json_response({"keys": [{**public_jwk, "kid": "one", "use": "sig", "alg": "ES256"}]})

    app = web.Application()
    app.router.add_get("/keys", keys)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
        async with setup.api(jwksUrl=url) as api:
            await create_ann(api)
            claims = {"sub": "ann", "exp": time.time() + 60}
            assert await is_token_accepted(api, jwt.encode(claims, private, "ES256", headers={"kid": "one"}))
    finally:
        await runner.cleanup()


@coverage.covers("server.jwtClaim", "server.jwtAudience", "server.jwtIssuer")
async def test_claim_audience_and_issuer_of_tokens_are_checked(setup: GatewaySetup) -> None:
    async with setup.api(jwtClaim="entity", jwtAudience="tools", jwtIssuer="me") as api:
        await create_ann(api)
        right = {"sub": "bob", "entity": "ann", "aud": "tools", "iss": "me"}
        assert await is_token_accepted(api, token(**right))
        for wrong in ({"entity": "bob"}, {"aud": "others"}, {"iss": "others"}):
            assert not await is_token_accepted(api, token(**{**right, **wrong}))


@coverage.covers("server.allowedHosts")
async def test_requests_may_use_allowed_hosts(setup: GatewaySetup) -> None:
    async with setup.api(allowedHosts=["tools.example"]) as api:
        statuses = [
            (await api.get("/health", headers={"host": name})).status for name in ("tools.example", "other.example")
        ]
    assert statuses == [200, 421]


@coverage.covers("server.allowedOrigins")
async def test_browsers_may_use_allowed_origins(setup: GatewaySetup) -> None:
    page = {"origin": OTHER}
    async with setup.api() as api:
        assert (await api.get("/health", headers=page)).status == 403
    async with setup.api(allowedOrigins=[OTHER]) as api:
        assert (await api.get("/health", headers=page)).headers["access-control-allow-origin"] == OTHER


@coverage.covers("server.maxBodyBytes")
async def test_larger_bodies_are_refused(setup: GatewaySetup) -> None:
    async with setup.api(maxBodyBytes=200) as api:
        assert (await api.post("/api/entities", {"type": "human", "name": "n" * 50})).status == 201
        assert (await api.post("/api/entities", {"type": "human", "name": "n" * 500})).status == 413


@coverage.covers("server.maxStreams", "server.maxStreamsPerCaller")
async def test_streams_are_limited_in_all_and_per_caller(setup: GatewaySetup) -> None:
    for server, status in (({"maxStreams": 1}, 503), ({"maxStreamsPerCaller": 1}, 429)):
        async with setup.api(**server) as api:
            await api.post("/api/spaces", {"id": "room", "name": "Room"})
            async with stream(api) as first, stream(api) as second:
                assert (first.status, second.status) == (200, status)


@coverage.covers("server.rateLimit", "server.secretRateLimit")
async def test_requests_are_rate_limited_per_kind_of_key(setup: GatewaySetup) -> None:
    async with setup.api(rateLimit="1/hour", secretRateLimit="3/hour") as api:
        await create_ann(api)
        member = api.with_headers(x_public_key=PUBLIC, authorization=f"Bearer {token()}")
        assert [(await member.get("/api/me")).status for _ in range(3)] == [200, 200, 429]
        assert [(await api.get("/api/me")).status for _ in range(6)] == [200] * 5 + [429]


@coverage.covers("server.failedLoginLimit")
async def test_failed_logins_are_rate_limited(setup: GatewaySetup) -> None:
    async with setup.api(failedLoginLimit="2/hour") as api:
        guesses = [api.with_headers(x_secret_key=f"sk_a_guess_of_some_length_{number}") for number in range(4)]
        assert [(await guess.get("/api/me")).status for guess in guesses] == [401, 401, 429, 429]


@coverage.covers("server.maxConcurrentRequests")
async def test_concurrent_requests_are_limited(setup: GatewaySetup) -> None:
    async with setup.gateway(maxConcurrentRequests=1, stopTimeout=10) as (gateway, api):
        first = asyncio.create_task(api.post("/api/tools/endless/call", {"args": {}}))
        while gateway.limiter.requests == 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
        assert (await api.get("/api/me")).status == 503
        gateway.toolspace.orchestrator.cancel()
        assert (await first).status == 200


@coverage.covers("server.maxPendingCallsPerCaller")
async def test_pending_calls_of_one_tool_key_are_limited(setup: GatewaySetup) -> None:
    async with setup.gateway(maxPendingCallsPerCaller=1) as (gateway, api):
        key = await api.create("/api/keys", kind="tools", name="program")
        program = api.with_headers(authorization=f"Bearer {key['key']}")
        first = asyncio.create_task(program.post("/api/tools/move/call", {}))
        while gateway.pending_calls.waiting_count == 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
        assert (await program.post("/api/tools/move/call", {})).data["errorKind"] == "limit_exceeded"
        gateway.toolspace.orchestrator.cancel()
        assert (await first).data["errorKind"] == "canceled"


@coverage.covers("server.maxConnectionsPerAddress")
async def test_connections_of_one_address_are_limited(setup: GatewaySetup) -> None:
    for limit, expected in ((1, 503), (2, 200), (None, 200)):
        async with setup.gateway(maxConnectionsPerAddress=limit) as (_, api):
            # One connection stays open for the stream, the other request needs one of its own.
            headers = {**api.headers, "accept": "text/event-stream"}
            async with api.session.get(f"{api.url}/api/events", headers=headers) as stream:
                assert stream.status == 200
                assert (await api.get("/api/me")).status == expected


@coverage.covers("server.stopTimeout")
async def test_running_calls_have_time_to_finish_when_the_gateway_stops(setup: GatewaySetup) -> None:
    async with setup.gateway(stopTimeout=50) as (gateway, api):
        call = asyncio.create_task(api.post("/api/tools/endless/call", {"args": {}}))
        while gateway.limiter.requests == 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
        await gateway.drain(gateway.config.server.stop_timeout)
        assert (await call).data["errorKind"] == "canceled"


@coverage.covers("server.heartbeat")
async def test_idle_streams_send_heartbeats(setup: GatewaySetup) -> None:
    async with setup.api(heartbeat=20) as api:
        await api.create("/api/spaces", id="room", name="Room")
        async with stream(api) as response:
            comments = 0
            async for line in response.content:
                comments += line.startswith(b":")
                if comments >= 3:
                    break


@coverage.covers("server.eventRetention")
async def test_stream_events_are_deleted_after_their_retention(setup: GatewaySetup) -> None:
    async with setup.api() as api:
        await create_ann(api)
        await api.create("/api/spaces", id="room", name="Room", members=["ann"])
        await api.create("/api/spaces/room/messages", entityId="ann", content="hello")
    stored_events: list[Any] = []
    for settings in (None, 1):
        server: dict[str, Any] = {"eventRetention": settings} if settings else {}
        async with setup.gateway(None, **server) as (gateway, _):
            for _attempt in range(100):
                stored_events.append(await gateway.ledger.read(events.list_after, space_stream("room"), 0, 100))
                if not stored_events[-1] or not settings:
                    break
                await asyncio.sleep(0.02)
    assert stored_events[0]
    assert not stored_events[-1]


@coverage.covers("server.retention")
async def test_finished_calls_are_deleted_after_their_retention(setup: GatewaySetup) -> None:
    async with setup.api() as api:
        await api.create("/api/entities", id="robot", type="agent", name="Robot")
        await api.create("/api/runs", id="run", agentEntityId="robot")
        assert (await api.post("/api/runs/run/close", {})).status == 200
    async with setup.api() as api:
        assert (await api.get("/api/runs/run")).status == 200
    async with setup.api(retention=1) as api:
        for _attempt in range(500):
            if (reply := await api.get("/api/runs/run")).status == 404:
                break
            await asyncio.sleep(0.02)
    assert reply.status == 404


@coverage.covers("server.readTimeout")
async def test_a_read_of_a_request_may_take_the_read_timeout(setup: GatewaySetup) -> None:
    def count() -> Program[int]:
        rows = yield "WITH RECURSIVE n (x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT COUNT(*) FROM n", ()
        return rows[0][0]

    async def get_count(request: Request) -> int:
        return await request.read(count)

    route = Route(method="GET", path="/count", handler=get_count, access=Access.SECRET, summary="Count", tag="Test")
    async with setup.gateway(readTimeout="150ms") as (gateway, _), open_app_api(gateway, [route]) as api:
        reply = await api.get("/count")
        assert (reply.status, reply.detail.partition(";")[0]) == (503, "the read took longer than 0.15 s")


@coverage.covers("server.workerGrace")
async def test_a_disconnected_worker_keeps_its_calls_for_the_grace_time(setup: GatewaySetup) -> None:
    async with setup.api(workerGrace=1) as api:
        async with stream(api, "/api/tools/stream?tools=move&workerId=one") as first:
            await wait_for_offer(first, "worker.ready")
            call = asyncio.create_task(api.post("/api/tools/move/call", {"args": {}}))
            await wait_for_offer(first, "call.offered")
        async with stream(api, "/api/tools/stream?tools=move&workerId=two") as second:
            await wait_for_offer(second, "call.offered")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def wait_for_offer(response: aiohttp.ClientResponse, tool_name: str) -> None:
    async with asyncio.timeout(20):
        async for line in response.content:
            if tool_name.encode() in line:
                return
    raise AssertionError(f"there was no {tool_name}")


@coverage.covers("storage.url")
async def test_the_database_is_the_configured_one(setup: GatewaySetup) -> None:
    file = setup.folder / "elsewhere" / "data.db"
    for url in (f"sqlite:///{file}", setup.request.getfixturevalue("postgres_url")):
        for expected in (201, 409):
            async with setup.gateway({"url": url}) as (gateway, api):
                assert (
                    await api.post("/api/entities", {"id": "ann", "type": "human", "name": "Ann"})
                ).status == expected
                assert gateway.ledger.database.is_shared is url.startswith("postgresql:")
    assert file.exists()
    assert not list((setup.folder / "state").rglob("toolspace.db"))


def test_every_documented_setting_of_the_gateway_has_a_test() -> None:
    assert coverage.list_missing("server.", "storage.url", other_modules=("server.maxActiveAgents",)) == []
