"""Serves a gateway for tests, and an HTTP client of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from toolspace.server.gateway import Gateway
from toolspace.server.routing import App, Route
from toolspace.server.uvicorn_server import WebServer, bind_socket, serve_gateway, socket_url, uvicorn_config

SECRET = "sk_test_0123456789abcdef0123456789abcdef"
PUBLIC = "pk_test_0123456789abcdef0123456789abcdef"
JWT_SECRET = "a-secret-for-tokens-with-32-characters"


class ApiResponse(NamedTuple):
    """The response to one request."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def data(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def detail(self) -> str:
        """The detail of a problem."""
        assert self.headers["content-type"] == "application/problem+json", self
        return self.data["detail"]


class ApiClient:
    """Sends requests to a gateway with fixed headers."""

    def __init__(self, url: str, session: aiohttp.ClientSession, headers: Mapping[str, str]) -> None:
        self.url = url
        self.session = session
        self.headers = dict(headers)

    def with_headers(self, **headers: str) -> ApiClient:
        return ApiClient(self.url, self.session, {name.replace("_", "-"): value for name, value in headers.items()})

    async def request(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, headers: Mapping[str, str] = {}
    ) -> ApiResponse:
        request_headers = {**self.headers, **headers}
        if body is not None:
            raw = msgspec.json.encode(body)
        if raw is not None:
            request_headers.setdefault("content-type", "application/json")
        async with self.session.request(method, self.url + path, data=raw, headers=request_headers) as response:
            names = {name.lower(): value for name, value in response.headers.items()}
            return ApiResponse(response.status, names, await response.read())

    async def get(self, path: str, **options: Any) -> ApiResponse:
        return await self.request("GET", path, **options)

    async def post(self, path: str, body: Any = None, **options: Any) -> ApiResponse:
        return await self.request("POST", path, body, **options)

    async def put(self, path: str, body: Any = None) -> ApiResponse:
        return await self.request("PUT", path, body)

    async def patch(self, path: str, body: Any = None) -> ApiResponse:
        return await self.request("PATCH", path, body)

    async def delete(self, path: str) -> ApiResponse:
        return await self.request("DELETE", path)

    async def create(self, path: str, **body: Any) -> Any:
        """Sends a POST that must succeed; returns its data."""
        reply = await self.post(path, body)
        assert reply.status in (200, 201), reply
        return reply.data

    async def member(self, entity_id: str) -> ApiClient:
        """Returns a client of the same gateway for an entity, with a public key and a token."""
        token = await self.create(f"/api/entities/{entity_id}/token")
        return self.with_headers(x_public_key=PUBLIC, authorization=f"Bearer {token['token']}")


def write_config(folder: Path, **more: Any) -> Path:
    """Writes a configuration with fixed keys and only the given agents."""
    path = folder / "toolspace.json"
    server = {"secretKey": SECRET, "publicKey": PUBLIC, "jwtSecret": JWT_SECRET, **more.pop("server", {})}
    path.write_bytes(msgspec.json.encode({"server": server, "demo": False, **more}))
    return path


@asynccontextmanager
async def open_api(gateway: Gateway) -> AsyncIterator[ApiClient]:
    """Serves a gateway; yields a client with its secret key."""
    async with serve_gateway(gateway, bind_socket("127.0.0.1", 0)) as url, aiohttp.ClientSession() as session:
        yield ApiClient(url, session, {"x-secret-key": SECRET})


@asynccontextmanager
async def open_app_api(gateway: Gateway, routes: Sequence[Route], **options: Any) -> AsyncIterator[ApiClient]:
    """Serves the given routes with a gateway; yields a client."""
    import asyncio

    server_socket = bind_socket("127.0.0.1", 0)
    server = WebServer(uvicorn_config(App(gateway, routes, **options), stop_seconds=1))
    serve_task = asyncio.create_task(server.serve(sockets=[server_socket]))
    try:
        await server.wait_until_started(serve_task)
        async with aiohttp.ClientSession() as session:
            yield ApiClient(socket_url(server_socket), session, {"x-secret-key": SECRET})
    finally:
        server.stop()
        await serve_task
        server_socket.close()
