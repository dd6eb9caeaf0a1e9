"""5.3: every setting of the gateway has an effect. One check a setting; a setting without one fails here."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from aiohttp import web

from tests.server.gateway_api import JWT_SECRET, PUBLIC, ApiClient, open_api, write_config
from tests.server.gateway_process import start_gateway_process
from toolspace.config.documentation import list_all_rows
from toolspace.core.records import space_stream
from toolspace.server.gateway import Gateway
from toolspace.storage.queries import events

TOOLS = """
import asyncio
from toolspace import tool

@tool
async def endless() -> None:
    await asyncio.Event().wait()
"""
EXTERNAL = {"name": "move", "executionType": "external", "visible": False, "inputSchema": {"type": "object"}}
OTHER = "https://elsewhere.example"


class World:
    """Opens gateways with some settings, all in one folder."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self.folder = folder
        self.request = request
        (folder / "tools.py").write_text(TOOLS)

    def config(self, storage: dict[str, Any] | None = None, **server: Any) -> Path:
        kept = {"dir": "./state", **(storage or {})}
        return write_config(self.folder, functions="./tools.py", tools=[EXTERNAL], storage=kept, server=server)

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


Check = Callable[[World], Awaitable[None]]
CHECKS: dict[str, Check] = {}


def shows(*settings: str) -> Callable[[Check], Check]:
    def keep(check: Check) -> Check:
        CHECKS.update(dict.fromkeys(settings, check))
        return check

    return keep


def token(secret: str = JWT_SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": "ann", "exp": time.time() + 60, **claims}, secret, "HS256")


async def ann(api: ApiClient) -> None:
    await api.create("/api/entities", id="ann", type="human", name="Ann")


async def gets_in(api: ApiClient, signed: str, key: str = PUBLIC) -> bool:
    """Whether someone with this token is known."""
    reply = await api.with_headers(x_public_key=key, authorization=f"Bearer {signed}").get("/api/me")
    assert reply.status in (200, 401), reply
    return reply.status == 200


@asynccontextmanager
async def stream(api: ApiClient, path: str = "/api/spaces/room/stream") -> AsyncGenerator[aiohttp.ClientResponse]:
    async with api.session.get(api.url + path, headers=api.headers) as response:
        yield response


@shows("server.host", "server.port")
async def _(world: World) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.2", 0))
        port = free.getsockname()[1]
    async with start_gateway_process(world.folder, world.config(host="127.0.0.2", port=port), port=None) as gateway:
        assert gateway.url == f"http://127.0.0.2:{port}"


@shows("server.publicUrl")
async def _(world: World) -> None:
    named = {"host": "tools.example:8443"}
    async with world.api() as api:
        assert (await api.get("/health", headers=named)).status == 421
    async with world.api(publicUrl="https://tools.example:8443") as api:
        assert (await api.get("/health", headers=named)).status == 200


@shows("server.secretKey")
async def _(world: World) -> None:
    async with world.api(secretKey="sk_another_key_of_some_length") as api:
        assert (await api.get("/api/me")).status == 401
        assert (await api.with_headers(x_secret_key="sk_another_key_of_some_length").get("/api/me")).status == 200


@shows("server.publicKey", "server.jwtSecret")
async def _(world: World) -> None:
    other = "another-secret-with-more-than-32-characters"
    async with world.api(publicKey="pk_another_key_of_some_length", jwtSecret=other) as api:
        await ann(api)
        assert await gets_in(api, token(other), "pk_another_key_of_some_length")
        assert not await gets_in(api, token(other))
        assert not await gets_in(api, token(), "pk_another_key_of_some_length")


@shows("server.jwksUrl")
async def _(world: World) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec
    from jwt.algorithms import ECAlgorithm

    private = ec.generate_private_key(ec.SECP256R1())
    published = ECAlgorithm.to_jwk(private.public_key(), as_dict=True)

    async def keys(_: web.Request) -> web.Response:
        return web.json_response({"keys": [{**published, "kid": "one", "use": "sig", "alg": "ES256"}]})

    app = web.Application()
    app.router.add_get("/keys", keys)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/keys"
        async with world.api(jwksUrl=url) as api:
            await ann(api)
            claims = {"sub": "ann", "exp": time.time() + 60}
            assert await gets_in(api, jwt.encode(claims, private, "ES256", headers={"kid": "one"}))
    finally:
        await runner.cleanup()


@shows("server.jwtClaim", "server.jwtAudience", "server.jwtIssuer")
async def _(world: World) -> None:
    async with world.api(jwtClaim="entity", jwtAudience="tools", jwtIssuer="me") as api:
        await ann(api)
        right = {"sub": "bob", "entity": "ann", "aud": "tools", "iss": "me"}
        assert await gets_in(api, token(**right))
        for wrong in ({"entity": "bob"}, {"aud": "others"}, {"iss": "others"}):
            assert not await gets_in(api, token(**{**right, **wrong}))


@shows("server.allowedHosts")
async def _(world: World) -> None:
    async with world.api(allowedHosts=["tools.example"]) as api:
        statuses = [
            (await api.get("/health", headers={"host": name})).status for name in ("tools.example", "other.example")
        ]
    assert statuses == [200, 421]


@shows("server.allowedOrigins")
async def _(world: World) -> None:
    page = {"origin": OTHER}
    async with world.api() as api:
        assert (await api.get("/health", headers=page)).status == 403
    async with world.api(allowedOrigins=[OTHER]) as api:
        assert (await api.get("/health", headers=page)).headers["access-control-allow-origin"] == OTHER


@shows("server.maxBodyBytes")
async def _(world: World) -> None:
    async with world.api(maxBodyBytes=200) as api:
        assert (await api.post("/api/entities", {"type": "human", "name": "n" * 50})).status == 201
        assert (await api.post("/api/entities", {"type": "human", "name": "n" * 500})).status == 413


@shows("server.maxStreams", "server.maxStreamsPerCaller")
async def _(world: World) -> None:
    for server, status in (({"maxStreams": 1}, 503), ({"maxStreamsPerCaller": 1}, 429)):
        async with world.api(**server) as api:
            await api.post("/api/spaces", {"id": "room", "name": "Room"})
            async with stream(api) as first, stream(api) as second:
                assert (first.status, second.status) == (200, status)


@shows("server.rateLimit", "server.secretRateLimit")
async def _(world: World) -> None:
    async with world.api(rateLimit="1/hour", secretRateLimit="3/hour") as api:
        await ann(api)
        member = api.with_headers(x_public_key=PUBLIC, authorization=f"Bearer {token()}")
        assert [(await member.get("/api/me")).status for _ in range(3)] == [200, 200, 429]
        assert [(await api.get("/api/me")).status for _ in range(6)] == [200] * 5 + [429]


@shows("server.failedLoginLimit")
async def _(world: World) -> None:
    async with world.api(failedLoginLimit="2/hour") as api:
        guesses = [api.with_headers(x_secret_key=f"sk_a_guess_of_some_length_{number}") for number in range(4)]
        assert [(await guess.get("/api/me")).status for guess in guesses] == [401, 401, 429, 429]


@shows("server.maxConcurrentRequests")
async def _(world: World) -> None:
    async with world.gateway(maxConcurrentRequests=1, stopTimeout=10) as (gateway, api):
        first = asyncio.create_task(api.post("/api/tools/endless/call", {"args": {}}))
        while gateway.limiter.requests == 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
        assert (await api.get("/api/me")).status == 503
        gateway.toolspace.orchestrator.cancel()
        assert (await first).status == 200


@shows("server.stopTimeout")
async def _(world: World) -> None:
    async with world.gateway(stopTimeout=50) as (gateway, api):
        call = asyncio.create_task(api.post("/api/tools/endless/call", {"args": {}}))
        while gateway.limiter.requests == 0:  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0.005)
        await gateway.drain(gateway.config.server.stop_timeout)
        assert (await call).data["errorKind"] == "canceled"


@shows("server.heartbeat")
async def _(world: World) -> None:
    async with world.api(heartbeat=20) as api:
        await api.create("/api/spaces", id="room", name="Room")
        async with stream(api) as response:
            comments = 0
            async for line in response.content:
                comments += line.startswith(b":")
                if comments >= 3:
                    break


@shows("server.eventRetention")
async def _(world: World) -> None:
    async with world.api() as api:
        await ann(api)
        await api.create("/api/spaces", id="room", name="Room", members=["ann"])
        await api.create("/api/spaces/room/messages", entityId="ann", content="hello")
    kept: list[Any] = []
    for settings in (None, 1):
        server: dict[str, Any] = {"eventRetention": settings} if settings else {}
        async with world.gateway(None, **server) as (gateway, _):
            for _attempt in range(100):
                kept.append(await gateway.ledger.read(events.list_after, space_stream("room"), 0, 100))
                if not kept[-1] or not settings:
                    break
                await asyncio.sleep(0.02)
    assert kept[0]
    assert not kept[-1]


@shows("server.retention")
async def _(world: World) -> None:
    async with world.api() as api:
        await api.create("/api/entities", id="robot", type="agent", name="Robot")
        await api.create("/api/runs", id="run", agentEntityId="robot")
        assert (await api.post("/api/runs/run/close", {})).status == 200
    async with world.api() as api:
        assert (await api.get("/api/runs/run")).status == 200
    async with world.api(retention=1) as api:
        for _attempt in range(500):
            if (reply := await api.get("/api/runs/run")).status == 404:
                break
            await asyncio.sleep(0.02)
    assert reply.status == 404


@shows("server.workerGrace")
async def _(world: World) -> None:
    async with world.api(workerGrace=1) as api:
        async with stream(api, "/api/tools/stream?tools=move&workerId=one") as first:
            await _offered(first, "worker.ready")
            call = asyncio.create_task(api.post("/api/tools/move/call", {"args": {}}))
            await _offered(first, "call.offered")
        async with stream(api, "/api/tools/stream?tools=move&workerId=two") as second:
            await _offered(second, "call.offered")
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)


async def _offered(response: aiohttp.ClientResponse, wanted: str) -> None:
    async with asyncio.timeout(20):
        async for line in response.content:
            if wanted.encode() in line:
                return
    raise AssertionError(f"there was no {wanted}")


@shows("storage.url")
async def _(world: World) -> None:
    file = world.folder / "elsewhere" / "data.db"
    for url in (f"sqlite:///{file}", world.request.getfixturevalue("postgres_url")):
        for expected in (201, 409):
            async with world.gateway({"url": url}) as (gateway, api):
                assert (
                    await api.post("/api/entities", {"id": "ann", "type": "human", "name": "Ann"})
                ).status == expected
                assert gateway.ledger.database.is_shared is url.startswith("postgresql:")
    assert file.exists()
    assert not list((world.folder / "state").rglob("toolspace.db"))


OF_AGENTS = "server.maxActiveAgents"
"""Shown in test_agent_settings.py."""
SETTINGS = [
    row.path for row in list_all_rows() if row.path.startswith(("server.", "storage.url")) and row.path != OF_AGENTS
]


@pytest.mark.spec("5.3")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_documented_setting_of_the_gateway_has_a_check(setting: str) -> None:
    assert setting in CHECKS, f"{setting} is documented, and no check shows what it does"


TOGETHER = {check: [setting for setting, one in CHECKS.items() if one is check] for check in CHECKS.values()}


@pytest.mark.spec("5.3")
@pytest.mark.parametrize("check", TOGETHER, ids=[settings[0] for settings in TOGETHER.values()])
async def test_the_settings_of_the_gateway_have_an_effect(
    check: Check, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    await check(World(tmp_path, request))
