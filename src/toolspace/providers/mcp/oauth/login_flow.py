"""Logs in at the authorization server of an MCP server. Stores nothing, and does not decide when to.

Discovery, registration and PKCE are the MCP library's. It is driven step by step, so that each of its requests goes
through `OAuthHttp`, and no answer reaches it that it would show in an error or a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
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
from toolspace.providers.mcp.oauth.redirect_listener import OpenLoginPage, RedirectListener, open_redirect_listener
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem
from toolspace.providers.mcp.oauth.token_store import ClientAuth, StoredLogin


class LoginRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A server that asks for a login, and how it asked."""

    name: str
    url: str
    settings: OAuthSettings
    refusal: AuthChallenge
    held: StoredLogin | None = None
    """What the server holds for too little, where it asks for more rights."""


class _Flow(OAuthClientProvider):
    """One login by the MCP library, with the client and the limits of our settings."""

    def __init__(
        self, asked: LoginRequest, metadata: OAuthClientMetadata, client: OAuthClientInformationFull | None
    ) -> None:
        settings = asked.settings
        memory = _Memory(client)
        if asked.held is not None:  # Its rights are asked for again, beside the new ones.
            memory.tokens = OAuthToken(access_token=asked.held.access_token, scope=asked.held.scope)
        super().__init__(asked.url, metadata, memory, client_metadata_url=settings.client_metadata_url)
        self.memory = memory
        self._settings = settings

    def _select_authorization_server(self, advertised: list[str]) -> str:
        wanted = self._settings.issuer
        return next((one for one in advertised if wanted is not None and issuers_match(one, wanted)), advertised[0])

    async def _perform_authorization(self) -> httpx2.Request:
        found, wanted = self.context.oauth_metadata, self._settings.issuer
        if wanted is not None and (found is None or not issuers_match(str(found.issuer), wanted)):
            other = "it names none" if found is None else f"it names {str(found.issuer)!r}"
            raise OAuthFlowError(f"its authorization server is not auth.issuer {wanted!r}: {other}")
        client = self.context.client_info
        if client is not None and self._settings.client_secret is not None:
            methods = found.token_endpoint_auth_methods_supported if found else None
            by_form = bool(methods) and "client_secret_basic" not in methods and "client_secret_post" in methods
            default = "client_secret_post" if by_form else "client_secret_basic"
            client.token_endpoint_auth_method = self._settings.client_auth or default
        return await self._ask_for_token()

    async def _ask_for_token(self) -> httpx2.Request:
        return await super()._perform_authorization()

    @property
    def token_endpoint(self) -> str:
        return self._get_token_endpoint()


class _CredentialsFlow(_Flow):
    """The grant without a person (RFC 6749, 4.4). The library's own warns where no issuer is configured."""

    async def _ask_for_token(self) -> httpx2.Request:
        context = self.context
        data = {"grant_type": "client_credentials"}
        if context.should_include_resource_param(context.protocol_version):
            data["resource"] = context.get_resource_url()
        if context.client_metadata.scope:
            data["scope"] = context.client_metadata.scope
        data, headers = context.prepare_token_auth(data, {"Content-Type": FORM})
        return httpx2.Request("POST", self._get_token_endpoint(), data=data, headers=headers)


class _Memory:
    """What the library wants stored, until the login is complete."""

    def __init__(self, client: OAuthClientInformationFull | None) -> None:
        self.client, self.tokens = client, None

    client: OAuthClientInformationFull | None
    tokens: OAuthToken | None

    async def get_tokens(self) -> OAuthToken | None:
        return self.tokens

    async def set_tokens(self, tokens: OAuthToken) -> None:
        self.tokens = tokens

    async def get_client_info(self) -> OAuthClientInformationFull | None:
        return self.client

    async def set_client_info(self, client_info: OAuthClientInformationFull) -> None:
        self.client = client_info


async def log_in_with_browser(
    asked: LoginRequest, http: OAuthHttpClient, interact: OpenLoginPage, *, patience: float
) -> StoredLogin:
    """The authorization code grant, with PKCE: a person says yes in a browser.

    A client that registers itself does so anew for each login: the port may be another one, and an authorization
    server that has forgotten the old client shows the person an error and tells us nothing.
    """
    settings = asked.settings
    async with open_redirect_listener(settings.redirect_port) as listener:
        back = [AnyUrl(listener.uri)]
        metadata = OAuthClientMetadata(client_name="Toolspace", redirect_uris=back, scope=settings.scope)
        client = None
        if settings.client_id is not None:
            client = OAuthClientInformationFull(
                client_id=settings.client_id, client_secret=settings.client_secret, redirect_uris=back
            )
            client.token_endpoint_auth_method = "none"
        flow = _Flow(asked, metadata, client)
        visit = _Visit(asked.name, listener, interact, patience)
        flow.context.redirect_handler, flow.context.callback_handler = visit.go, visit.come_back
        return await _run(flow, asked, http, redirect_uri=listener.uri)


async def log_in_with_client_credentials(asked: LoginRequest, http: OAuthHttpClient) -> StoredLogin:
    """The client credentials grant: a program for itself."""
    settings = asked.settings
    assert settings.client_id is not None
    metadata = OAuthClientMetadata(redirect_uris=None, grant_types=["client_credentials"], scope=settings.scope)
    client = OAuthClientInformationFull(client_id=settings.client_id, client_secret=settings.client_secret)
    return await _run(_CredentialsFlow(asked, metadata, client), asked, http)


class _Visit:
    """A person's way to the authorization server and back."""

    def __init__(self, name: str, listener: RedirectListener, interact: OpenLoginPage, patience: float) -> None:
        self._name, self._listener, self._interact = name, listener, interact
        self._patience = patience
        self._until = 0.0

    async def go(self, url: str) -> None:
        if (refused := find_url_problem(url)) is not None:
            raise ProviderError(f"server {self._name!r} names a page for its login which {refused}")
        self._until = asyncio.get_running_loop().time() + self._patience
        self._listener.expect(parse_qs(urlsplit(url).query)["state"][-1])
        async with self._in_time():
            await self._interact(self._name, url)

    async def come_back(self) -> AuthorizationCodeResult:
        async with self._in_time():
            redirect = await self._listener.wait()
        if redirect.code is None:
            why = format_error(redirect.error, redirect.error_description)
            raise ProviderError(f"the login to server {self._name!r} was refused: {why}")
        return AuthorizationCodeResult(code=redirect.code, state=redirect.state, iss=redirect.issuer)

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncGenerator[None]:
        try:
            async with asyncio.timeout_at(self._until):
                yield
        except TimeoutError:
            raise ProviderError(f"nobody logged in to server {self._name!r} within {self._patience:g} s") from None


class _NoTraces(logging.Filter):
    """The library logs each failure with its trace, and raises it to us as well: told once is enough."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.exc_info is None


_NO_TRACES = _NoTraces()


async def _run(
    flow: _Flow, asked: LoginRequest, http: OAuthHttpClient, *, redirect_uri: str | None = None
) -> StoredLogin:
    logging.getLogger("mcp.client.auth.oauth2").addFilter(_NO_TRACES)  # The same one again changes nothing.
    version = asked.refusal.protocol_version
    request = httpx2.Request("POST", asked.url, headers={"MCP-Protocol-Version": version} if version else None)
    steps = flow.async_auth_flow(request)
    try:
        await anext(steps)  # The request itself, which has been refused already.
        answer = _refusal(asked, request)
        while (outgoing := await steps.asend(answer)) is not request:
            answer = _checked(asked.name, await http.send(outgoing), redirect_uri)
    except OAuthFlowError as error:
        raise ProviderError(f"login to server {asked.name!r} failed: {mask_secrets(str(error))[:500]}") from None
    finally:
        await steps.aclose()
    return _granted(flow, asked.settings)


def _refusal(asked: LoginRequest, request: httpx2.Request) -> httpx2.Response:
    """The server's refusal as the library reads it. A configured scope is put as if the server had asked for it:
    the library would take whatever the server asks for instead.
    """
    challenge = asked.refusal.challenge or "Bearer"
    if (scope := asked.settings.scope) is not None:
        where = asked.refusal.get_parameter("resource_metadata")
        challenge = f'Bearer scope="{scope}"' + (f', resource_metadata="{where}"' if where else "")
    status = 403 if asked.held is not None else 401
    return httpx2.Response(status, headers={"WWW-Authenticate": challenge}, request=request)


def _checked(name: str, answer: httpx2.Response, redirect_uri: str | None) -> httpx2.Response:
    """An answer that the library can be given: it would show what it does not understand, tokens too."""
    request = answer.request
    if request.method != "POST" or answer.next_request is not None:
        return answer
    if request.headers.get("content-type") == FORM:
        if answer.status_code not in (200, 201):
            raise ProviderError(f"login to server {name!r} failed: {describe_oauth_error(answer)}")
        return httpx2.Response(200, content=msgspec.json.encode(parse_token_response(name, answer)), request=request)
    if answer.status_code not in (200, 201):
        raise ProviderError(
            f"login to server {name!r} failed: its authorization server registers no client"
            f" ({describe_oauth_error(answer)}); register"
            f" one there, with the redirect URI {redirect_uri}, and set auth.clientId and auth.redirectPort"
        )
    return answer


def _granted(flow: _Flow, settings: OAuthSettings) -> StoredLogin:
    tokens, client, context = flow.memory.tokens, flow.memory.client, flow.context
    assert tokens is not None
    assert client is not None
    found = context.oauth_metadata
    with_resource = context.should_include_resource_param(context.protocol_version)
    return StoredLogin(
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token,
        renew_at=compute_renewal_time(tokens.expires_in),
        scope=tokens.scope,
        token_endpoint=flow.token_endpoint,
        revocation_endpoint=str(found.revocation_endpoint) if found and found.revocation_endpoint else None,
        resource=context.get_resource_url() if with_resource else None,
        client_id=client.client_id,
        client_secret=client.client_secret if settings.client_secret is None else None,
        client_auth=_client_auth(client.token_endpoint_auth_method),
    )


def _client_auth(method: str | None) -> ClientAuth:
    return method if method in ("client_secret_basic", "client_secret_post") else "none"
