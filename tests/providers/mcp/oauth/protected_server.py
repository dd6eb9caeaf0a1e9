"""An MCP server that needs OAuth, and its authorization server, each on its own port."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import secrets
import socket
import time
from collections.abc import AsyncGenerator
from typing import Any
from urllib.parse import unquote

import httpx2
import uvicorn
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server.auth.provider import (
    AccessToken,
    AuthorizationCode,
    AuthorizationParams,
    AuthorizeError,
    RefreshToken,
    construct_redirect_uri,
)
from mcp.server.auth.routes import create_auth_routes
from mcp.server.auth.settings import AuthSettings, ClientRegistrationOptions, RevocationOptions
from mcp.server.mcpserver import MCPServer
from mcp.shared.auth import OAuthClientInformationFull, OAuthToken
from pydantic import AnyHttpUrl
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from toolspace.providers.mcp.server_spec import ServerSpec


class AuthorizationServer:
    """An authorization server that approves every login by default and records the requests."""

    def __init__(self) -> None:
        self.clients: dict[str, OAuthClientInformationFull] = {}
        self.codes: dict[str, AuthorizationCode] = {}
        self.access: dict[str, AccessToken] = {}
        self.refresh: dict[str, RefreshToken] = {}
        self.client_secrets = {"robot": "robot-secret-%:/é"}
        self.life: int | None = 3600
        self.denies = False
        self.down = False
        self.hold = asyncio.Event()
        """While it is not set, renewals wait."""
        self.hold.set()
        self.renewal_event = asyncio.Event()
        self.renewals = 0
        self.authorizations: list[AuthorizationParams] = []
        self.request_headers: list[dict[str, str]] = []
        """The headers of every request."""
        self.grants: list[dict[str, str]] = []
        """The requests of client credentials grants."""

    def expire(self) -> None:
        """Invalidates all access tokens."""
        self.access.clear()

    def issue(self, client_id: str, scopes: list[str], resource: str | None, *, renewable: bool = True) -> OAuthToken:
        access, refresh = f"at-{secrets.token_hex(16)}", f"rt-{secrets.token_hex(16)}"
        self.access[access] = AccessToken(token=access, client_id=client_id, scopes=scopes, resource=resource)
        if renewable:
            self.refresh[refresh] = RefreshToken(token=refresh, client_id=client_id, scopes=scopes, resource=resource)
        return OAuthToken(
            access_token=access,
            expires_in=self.life,
            scope=" ".join(scopes),
            refresh_token=refresh if renewable else None,
        )

    async def get_client(self, client_id: str) -> OAuthClientInformationFull | None:
        return self.clients.get(client_id)

    async def register_client(self, client_info: OAuthClientInformationFull) -> None:
        self.clients[client_info.client_id] = client_info

    async def authorize(self, client: OAuthClientInformationFull, params: AuthorizationParams) -> str:
        self.authorizations.append(params)
        if self.denies:
            raise AuthorizeError(error="access_denied", error_description="not you")
        code = secrets.token_hex(20)
        self.codes[code] = AuthorizationCode(
            code=code,
            scopes=params.scopes or [],
            expires_at=time.time() + 60,
            client_id=client.client_id,
            code_challenge=params.code_challenge,
            redirect_uri=params.redirect_uri,
            redirect_uri_provided_explicitly=params.redirect_uri_provided_explicitly,
            resource=params.resource,
        )
        return construct_redirect_uri(str(params.redirect_uri), code=code, state=params.state)

    async def load_authorization_code(self, client: Any, authorization_code: str) -> AuthorizationCode | None:
        return self.codes.get(authorization_code)

    async def exchange_authorization_code(self, client: Any, authorization_code: AuthorizationCode) -> OAuthToken:
        code = self.codes.pop(authorization_code.code)
        return self.issue(code.client_id, code.scopes, code.resource)

    async def load_refresh_token(self, client: Any, refresh_token: str) -> RefreshToken | None:
        return self.refresh.get(refresh_token)

    async def exchange_refresh_token(self, client: Any, refresh_token: RefreshToken, scopes: list[str]) -> OAuthToken:
        del self.refresh[refresh_token.token]  # A refresh token is valid once.
        self.renewals += 1
        self.renewal_event.set()
        await self.hold.wait()
        return self.issue(refresh_token.client_id, scopes, refresh_token.resource)

    async def load_access_token(self, token: str) -> AccessToken | None:
        return self.access.get(token)

    async def revoke_token(self, token: AccessToken | RefreshToken) -> None:
        self.access = {
            key: stored_token for key, stored_token in self.access.items() if stored_token.client_id != token.client_id
        }
        self.refresh = {
            key: stored_token for key, stored_token in self.refresh.items() if stored_token.client_id != token.client_id
        }

    async def exchange_identity_assertion(self, client: Any, params: Any) -> OAuthToken:
        raise NotImplementedError

    def app(self, issuer: str) -> Starlette:
        inner = Starlette(
            routes=create_auth_routes(
                self,
                AnyHttpUrl(issuer),
                client_registration_options=ClientRegistrationOptions(enabled=True, default_scopes=["use"]),
                revocation_options=RevocationOptions(enabled=True),
            )
        )

        async def listening_socket(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                request = Request(scope, receive)
                self.request_headers.append(dict(request.headers))
                answer: Response | None = None
                if self.down:
                    answer = JSONResponse({}, 503)
                elif scope["path"] == "/token":
                    body = await request.body()
                    form = await Request(scope, _replay(body)).form()
                    receive = _replay(body)
                    if form.get("grant_type") == "client_credentials":
                        answer = self._grant_client_credentials(
                            request, {key: str(value) for key, value in form.items()}
                        )
                if answer is not None:
                    await answer(scope, receive, send)
                    return
            await inner(scope, receive, send)

        return listening_socket  # type: ignore[return-value]

    def _grant_client_credentials(self, request: Request, form: dict[str, str]) -> Response:
        """The SDK's authorization server lacks this grant."""
        kind, _, value = request.headers.get("authorization", "").partition(" ")
        if kind != "Basic":
            return JSONResponse({"error": "invalid_client"}, 401)
        name, _, secret = base64.b64decode(value).decode().partition(":")
        if self.client_secrets.get(unquote(name)) != unquote(secret):
            return JSONResponse({"error": "invalid_client", "error_description": f"who is {value}?"}, 401)
        self.grants.append(form)
        token = self.issue(unquote(name), form.get("scope", "use").split(), form.get("resource"), renewable=False)
        return JSONResponse(token.model_dump(exclude_none=True))


def _replay(body: bytes) -> Receive:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    return receive


class ProtectedServer:
    def __init__(self, url: str, issuer: str, authorization_server: AuthorizationServer) -> None:
        self.url, self.issuer, self.authorization_server = url, issuer, authorization_server
        self.entered_event, self.leave = asyncio.Event(), asyncio.Event()
        """Events of the slow tool."""

    def spec(self, **changes: Any) -> ServerSpec:
        return ServerSpec(url=self.url, **{"auth": {"type": "authorization_code"}, **changes})


class _Server(uvicorn.Server):
    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        return contextlib.nullcontext()  # Signals belong to the test run.


@contextlib.asynccontextmanager
async def run_app(app: Any, listening_socket: socket.socket) -> AsyncGenerator[None]:
    server = _Server(uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listening_socket]))
    try:
        yield
    finally:
        server.should_exit = True
        await task


def open_socket() -> tuple[socket.socket, str]:
    """Opens a listening socket. Connections wait until the server runs."""
    listening_socket = socket.create_server(("127.0.0.1", 0), backlog=100)
    return listening_socket, f"http://127.0.0.1:{listening_socket.getsockname()[1]}"


@contextlib.asynccontextmanager
async def protected_server(*, sse: bool = False) -> AsyncGenerator[ProtectedServer]:
    authorization_server = AuthorizationServer()
    (auth_socket, issuer), (mcp_socket, origin) = open_socket(), open_socket()
    server = ProtectedServer(f"{origin}/{'sse' if sse else 'mcp'}", issuer, authorization_server)
    mcp = MCPServer(
        "guarded",
        token_verifier=_Verifier(authorization_server),
        auth=AuthSettings(
            issuer_url=AnyHttpUrl(issuer),
            resource_server_url=AnyHttpUrl(server.url),
            required_scopes=["use"],
            validate_token_resource=True,
        ),
    )

    @mcp.tool()
    async def greet(name: str) -> str:
        return f"hello {name}"

    @mcp.tool()
    async def linger() -> str:
        server.entered_event.set()
        await server.leave.wait()
        return "at last"

    app = mcp.sse_app() if sse else mcp.streamable_http_app(json_response=True)
    async with run_app(authorization_server.app(issuer), auth_socket), run_app(app, mcp_socket):
        yield server


class _Verifier:
    def __init__(self, authorization_server: AuthorizationServer) -> None:
        self._authority = authorization_server

    async def verify_token(self, token: str) -> AccessToken | None:
        return await self._authority.load_access_token(token)


TRUST = httpx2.create_ssl_context()
"""Loaded once, because that takes longer than most requests."""


class Browser:
    """A user who approves: follows the redirects of the page."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.pages: list[httpx2.Response] = []

    async def __call__(self, server: str, url: str) -> None:
        self.urls.append(url)
        async with httpx2.AsyncClient(follow_redirects=True, verify=TRUST) as client:
            self.pages.append(await client.get(url))


@contextlib.asynccontextmanager
async def connected(url: str, auth: httpx2.Auth | None, **options: Any) -> AsyncGenerator[Client]:
    """Connects the MCP SDK's client with our authorization."""
    async with (
        httpx2.AsyncClient(auth=auth, timeout=30, verify=TRUST, **options) as http,
        Client(streamable_http_client(url, http_client=http)) as client,
    ):
        yield client


async def greet_through(url: str, auth: httpx2.Auth | None, **options: Any) -> str:
    async with connected(url, auth, **options) as client:
        result = await client.call_tool("greet", {"name": "you"})
        return result.content[0].text  # type: ignore[union-attr]
