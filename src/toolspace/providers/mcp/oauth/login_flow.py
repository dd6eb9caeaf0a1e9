"""Logs in at the authorization server of an MCP server, with the MCP SDK's OAuth client. Stores nothing.

The SDK does discovery, client registration, PKCE, scope selection and the token request. Its flow is driven request by
request instead of being the `auth` of the connection's HTTP client, for these reasons:

- it holds a lock during every request, so that a slow tool would block all others;
- it would send the server's own headers to the authorization server, to any address and without a size limit;
- it shows the authorization server's response, tokens included, in errors and logs;
- it cannot renew a token after a restart: it stores no token endpoint, and any failed renewal discards the login.

Renewal and revocation are therefore in `http`. `_SdkFlow` overrides methods of the SDK that start with an underscore,
as the SDK's own subclasses do; `tests/providers/mcp/test_sdk_version.py` pins the SDK's version range.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import os
import socket
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

import httpx2
import msgspec
from mcp.client.auth import OAuthClientProvider, OAuthFlowError
from mcp.client.auth.utils import issuers_match
from mcp.shared.auth import AuthorizationCodeResult, OAuthClientInformationFull, OAuthClientMetadata, OAuthToken
from pydantic import AnyUrl

from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.http import (
    FORM,
    AuthChallenge,
    OAuthHttpClient,
    compute_renewal_time,
    describe_oauth_error,
    format_error,
    parse_token_response,
)
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem
from toolspace.providers.mcp.oauth.token_store import StoredLogin

if TYPE_CHECKING:
    from toolspace.providers.mcp.oauth.authorization import OpenLoginPage

_PATH = "/callback"
_MAX_HEAD_BYTES = 16 * 1024
_REQUEST_SECONDS = 10.0
"""How long a browser may take to send its request after it has connected."""
_PAGE = (
    "<!doctype html><html lang=en><meta charset=utf-8><title>Toolspace</title>"
    "<body style='font-family:sans-serif;margin:4em auto;max-width:30em'><p>{}</p></body></html>"
)
_SUCCESS_TEXT = "Toolspace is logged in. You can close this window."
_REFUSED_TEXT = "The login was refused. You can close this window."
_UNEXPECTED_TEXT = "This is not the login that Toolspace waits for."


class LoginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server that needs a login, and its challenge."""

    name: str
    url: str
    settings: OAuthSettings
    challenge: AuthChallenge
    current_login: StoredLogin | None = None
    """The login whose scope is too small, if the server asks for more."""


async def log_in(
    request: LoginRequest, http: OAuthHttpClient, open_login_page: OpenLoginPage | None, *, timeout: float
) -> StoredLogin:
    """Gets tokens from the authorization server, with a person in a browser or with the client's credentials."""
    settings = request.settings
    if settings.grant == "client_credentials":
        assert settings.client_id is not None
        metadata = OAuthClientMetadata(redirect_uris=None, grant_types=["client_credentials"], scope=settings.scope)
        client = OAuthClientInformationFull(client_id=settings.client_id, client_secret=settings.client_secret)
        return await _run_flow(_SdkClientCredentialsFlow(request, metadata, client), request, http)
    assert open_login_page is not None
    async with _open_browser_login(request, open_login_page, timeout) as browser_login:
        # A client without a configured id registers anew for each login. Its redirect port may differ, and an
        # authorization server that has deleted the old client would show the error to the person only.
        redirect_uris = [AnyUrl(browser_login.redirect_uri)]
        metadata = OAuthClientMetadata(client_name="Toolspace", redirect_uris=redirect_uris, scope=settings.scope)
        client = None
        if settings.client_id is not None:
            client = OAuthClientInformationFull(
                client_id=settings.client_id, client_secret=settings.client_secret, redirect_uris=redirect_uris
            )
            client.token_endpoint_auth_method = "none"
        flow = _SdkFlow(request, metadata, client)
        flow.context.redirect_handler = browser_login.open
        flow.context.callback_handler = browser_login.wait
        return await _run_flow(flow, request, http, redirect_uri=browser_login.redirect_uri)


class _SdkFlow(OAuthClientProvider):
    """The SDK's flow for one login, with the client and the issuer of our settings."""

    def __init__(
        self, request: LoginRequest, metadata: OAuthClientMetadata, client: OAuthClientInformationFull | None
    ) -> None:
        self.storage = _MemoryStorage(client)
        if (current := request.current_login) is not None:
            # The SDK asks for its scope again, together with the new one.
            self.storage.tokens = OAuthToken(access_token=current.access_token, scope=current.scope)
        self._settings = request.settings
        super().__init__(request.url, metadata, self.storage, client_metadata_url=self._settings.client_metadata_url)

    def _select_authorization_server(self, servers: list[str]) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        issuer = self._settings.issuer
        return next((server for server in servers if issuer and issuers_match(server, issuer)), servers[0])

    async def _perform_authorization(self) -> httpx2.Request:
        metadata, issuer = self.context.oauth_metadata, self._settings.issuer
        if issuer is not None and (metadata is None or not issuers_match(str(metadata.issuer), issuer)):
            actual = "it names none" if metadata is None else f"it names {str(metadata.issuer)!r}"
            raise OAuthFlowError(f"its authorization server is not auth.issuer {issuer!r}: {actual}")
        client = self.context.client_info
        if client is not None and self._settings.client_secret is not None:
            methods = metadata.token_endpoint_auth_methods_supported if metadata else None
            only_post = bool(methods) and "client_secret_basic" not in methods and "client_secret_post" in methods
            default = "client_secret_post" if only_post else "client_secret_basic"
            client.token_endpoint_auth_method = self._settings.client_auth or default
        return await self._build_token_request()

    async def _build_token_request(self) -> httpx2.Request:
        return await super()._perform_authorization()

    @property
    def token_endpoint(self) -> str:
        return self._get_token_endpoint()


class _SdkClientCredentialsFlow(_SdkFlow):
    """The client credentials grant (RFC 6749, 4.4). The SDK's own provider for it demands a configured issuer."""

    async def _build_token_request(self) -> httpx2.Request:
        context = self.context
        data = {"grant_type": "client_credentials"}
        if context.should_include_resource_param(context.protocol_version):
            data["resource"] = context.get_resource_url()
        if context.client_metadata.scope:
            data["scope"] = context.client_metadata.scope
        data, headers = context.prepare_token_auth(data, {"Content-Type": FORM})
        return httpx2.Request("POST", self._get_token_endpoint(), data=data, headers=headers)


class _MemoryStorage:
    """The SDK's `TokenStorage` for the duration of one login."""

    def __init__(self, client: OAuthClientInformationFull | None) -> None:
        self.client = client
        self.tokens: OAuthToken | None = None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


class _NoTracebacks(logging.Filter):
    """Drops the SDK's log records with a traceback: it raises the same error."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None


_NO_TRACEBACKS = _NoTracebacks()


async def _run_flow(
    flow: _SdkFlow, request: LoginRequest, http: OAuthHttpClient, *, redirect_uri: str | None = None
) -> StoredLogin:
    logging.getLogger("mcp.client.auth.oauth2").addFilter(_NO_TRACEBACKS)  # Adding the same filter again does nothing.
    version = request.challenge.protocol_version
    mcp_request = httpx2.Request("POST", request.url, headers={"MCP-Protocol-Version": version} if version else None)
    steps = flow.async_auth_flow(mcp_request)
    try:
        await anext(steps)  # The MCP request itself, which the server has already refused.
        response = _build_challenge_response(request, mcp_request)
        while (oauth_request := await steps.asend(response)) is not mcp_request:
            response = _check_response(request.name, await http.send(oauth_request), redirect_uri)
    except OAuthFlowError as error:
        raise ProviderError(f"login to server {request.name!r} failed: {mask_secrets(str(error))[:500]}") from None
    finally:
        await steps.aclose()
    return _build_login(flow, request.settings)


def _build_challenge_response(request: LoginRequest, mcp_request: httpx2.Request) -> httpx2.Response:
    """Builds the server's refusal for the SDK.

    A configured scope replaces the server's, because the SDK would ask for whatever the server names.
    """
    challenge = request.challenge.challenge or "Bearer"
    if (scope := request.settings.scope) is not None:
        metadata_url = request.challenge.get_parameter("resource_metadata")
        challenge = f'Bearer scope="{scope}"' + (f', resource_metadata="{metadata_url}"' if metadata_url else "")
    status = 403 if request.current_login is not None else 401
    return httpx2.Response(status, headers={"WWW-Authenticate": challenge}, request=mcp_request)


def _check_response(name: str, response: httpx2.Response, redirect_uri: str | None) -> httpx2.Response:
    """Returns a response that is safe for the SDK, which would show an unexpected one with its tokens."""
    request = response.request
    if request.method != "POST" or response.next_request is not None:
        return response
    if request.headers.get("content-type") == FORM:
        if response.status_code not in (200, 201):
            raise ProviderError(f"login to server {name!r} failed: {describe_oauth_error(response)}")
        tokens = parse_token_response(name, response)
        return httpx2.Response(200, content=msgspec.json.encode(tokens), request=request)
    if response.status_code not in (200, 201):
        raise ProviderError(
            f"login to server {name!r} failed: its authorization server registers no client"
            f" ({describe_oauth_error(response)}); register one there, with the redirect URI {redirect_uri}, and set"
            " auth.clientId and auth.redirectPort"
        )
    return response


def _build_login(flow: _SdkFlow, settings: OAuthSettings) -> StoredLogin:
    tokens, client, context = flow.storage.tokens, flow.storage.client, flow.context
    assert tokens is not None
    assert client is not None
    metadata, method = context.oauth_metadata, client.token_endpoint_auth_method
    has_resource = context.should_include_resource_param(context.protocol_version)
    return StoredLogin(
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token,
        renew_at=compute_renewal_time(tokens.expires_in),
        scope=tokens.scope,
        token_endpoint=flow.token_endpoint,
        revocation_endpoint=(str(metadata.revocation_endpoint) if metadata and metadata.revocation_endpoint else None),
        resource=context.get_resource_url() if has_resource else None,
        client_id=client.client_id,
        client_secret=client.client_secret if settings.client_secret is None else None,
        client_auth=method if method in ("client_secret_basic", "client_secret_post") else "none",
    )


# The browser


class _BrowserLogin:
    """Sends a person to the authorization server, and waits on a loopback port for the redirect (PKCE).

    Accepts one redirect with the expected state. Any other request gets an error response and has no effect, so that no
    other page or program can end the login or inject a code.
    """

    def __init__(self, name: str, open_login_page: OpenLoginPage, timeout: float, port: int) -> None:
        self.redirect_uri = f"http://127.0.0.1:{port}{_PATH}"
        self._name = name
        self._open_login_page = open_login_page
        self._timeout = timeout
        self._deadline = 0.0
        self._expected_state: str | None = None
        self._redirect: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        """The query parameters of the redirect: `code` or `error`."""
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, url: str) -> None:
        if (problem := find_url_problem(url)) is not None:
            raise ProviderError(f"server {self._name!r} names a page for its login which {problem}")
        self._deadline = asyncio.get_running_loop().time() + self._timeout
        self._expected_state = parse_qs(urlsplit(url).query)["state"][-1]
        async with self._time_limit():
            await self._open_login_page(self._name, url)

    async def wait(self) -> AuthorizationCodeResult:
        async with self._time_limit():
            redirect = await self._redirect
        if (code := redirect.get("code")) is None:
            reason = format_error(redirect.get("error"), redirect.get("error_description"))
            raise ProviderError(f"the login to server {self._name!r} was refused: {reason}")
        return AuthorizationCodeResult(code=code, state=redirect.get("state"), iss=redirect.get("iss"))

    @contextlib.asynccontextmanager
    async def _time_limit(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout_at(self._deadline):
                yield
        except TimeoutError:
            raise ProviderError(f"nobody logged in to server {self._name!r} within {self._timeout:g} s") from None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(_REQUEST_SECONDS):
                    await self._respond(await reader.readuntil(b"\r\n\r\n"), writer)
        finally:
            self._connections.discard(task)
            writer.close()

    async def _respond(self, head: bytes, writer: asyncio.StreamWriter) -> None:
        method, target, *_ = head.partition(b"\r\n")[0].decode("ascii").split(" ")
        url = urlsplit(target)
        parameters = self._parse_redirect(url.query) if method == "GET" and url.path == _PATH else None
        if parameters is None:
            await _send_page(writer, "404 Not Found" if url.path != _PATH else "400 Bad Request", _UNEXPECTED_TEXT)
            return
        # Cleared before the page is sent: from now on no other redirect is accepted.
        self._expected_state = None
        try:
            await _send_page(writer, "200 OK", _SUCCESS_TEXT if "code" in parameters else _REFUSED_TEXT)
        finally:
            if not self._redirect.done():
                self._redirect.set_result(parameters)

    def _parse_redirect(self, query: str) -> Mapping[str, str] | None:
        """Returns None if the query is not a redirect with the expected state."""
        values = parse_qs(query, max_num_fields=50)
        if any(len(duplicates) > 1 for duplicates in values.values()):
            return None
        parameters = {key: value for key, (value,) in values.items()}
        state = self._expected_state
        if state is None or not hmac.compare_digest(parameters.get("state", "").encode(), state.encode()):
            return None
        return parameters if ("code" in parameters) != ("error" in parameters) else None

    async def aclose(self) -> None:
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._redirect.cancel()


async def _send_page(writer: asyncio.StreamWriter, status: str, text: str) -> None:
    page = _PAGE.format(text).encode()
    writer.write(
        f"HTTP/1.1 {status}\r\nContent-Type: text/html; charset=utf-8\r\nContent-Length: {len(page)}\r\n"
        "Cache-Control: no-store\r\nReferrer-Policy: no-referrer\r\nContent-Security-Policy: default-src 'none';"
        " style-src 'unsafe-inline'\r\nConnection: close\r\n\r\n".encode()
        + page
    )
    await writer.drain()
    writer.close()
    await writer.wait_closed()


@contextlib.asynccontextmanager
async def _open_browser_login(
    request: LoginRequest, open_login_page: OpenLoginPage, timeout: float
) -> AsyncGenerator[_BrowserLogin]:
    """Listens on the loopback address for the duration of the block, at a free port if none is configured."""
    port = request.settings.redirect_port or 0
    try:
        listening_socket = socket.create_server(("127.0.0.1", port))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else error
        raise ProviderError(
            f"cannot wait for the login at 127.0.0.1:{port}: {reason}; set another auth.redirectPort"
        ) from None
    browser_login = _BrowserLogin(request.name, open_login_page, timeout, listening_socket.getsockname()[1])
    server = await asyncio.start_server(browser_login.serve, sock=listening_socket, limit=_MAX_HEAD_BYTES)
    try:
        yield browser_login
    finally:
        server.close()
        await browser_login.aclose()
