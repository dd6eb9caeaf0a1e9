"""Authorization at MCP servers over HTTP: finds the token for a request, and says what to do where there is none.

The way of a token: the file of `tokens`, renewed by `oauth_http` before it expires or when the server refuses it; a
login by `oauth_flow` where nothing else helps. A request that has a good token waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

import httpx2

from toolspace.core.secret_masking import register_secrets
from toolspace.errors import ConfigError, ProviderError
from toolspace.providers.mcp.oauth.http import (
    AuthChallenge,
    OAuthHttpClient,
    limit_body,
    refresh_login,
    replace_with_error,
    revoke_login,
)
from toolspace.providers.mcp.oauth.redirect_listener import OpenLoginPage
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem, parse_oauth_settings
from toolspace.providers.mcp.oauth.token_store import LoginFile, StoredLogin, TokenStore
from toolspace.providers.mcp.spec import ServerSpec

__all__ = ["AuthChallenge", "HttpAuth", "OpenLoginPage", "create_http_auth", "login", "logout"]

_log = logging.getLogger("toolspace.mcp")
LOGIN_TIMEOUT_SECONDS = 300.0
"""Seconds for a person to log in."""


def create_http_auth(
    name: str,
    spec: ServerSpec,
    *,
    store: TokenStore,
    open_login_page: OpenLoginPage | None,
    timeout: float = LOGIN_TIMEOUT_SECONDS,
) -> HttpAuth | None:
    """What authorizes the requests to a server, as `auth` of the HTTP client that talks to it.

    Without `interact` nobody can be asked: a login that is needed fails at once and names the command for it. None
    where the server is not reached by HTTP.
    """
    if spec.kind not in ("http", "sse") or spec.url is None:
        if spec.auth:
            raise ConfigError(
                f"server {name!r}: auth works over http and sse, not over {spec.kind}; use headers or env"
            )
        return None
    if _has_own_authorization(name, spec):
        return _StaticAuth(name)
    return _OAuth(_Server(name, spec, store), interact=open_login_page, patience=timeout)


async def login(
    name: str,
    spec: ServerSpec,
    store: TokenStore,
    open_login_page: OpenLoginPage,
    *,
    timeout: float = LOGIN_TIMEOUT_SECONDS,
) -> None:
    """Logs in anew, and stores what was granted. Raises `ProviderError` that says why it did not work."""
    if spec.kind not in ("http", "sse") or spec.url is None:
        raise ConfigError(f"server {name!r} is reached by {spec.kind}, which has no login; give it headers or env")
    if _has_own_authorization(name, spec):
        raise ConfigError(f"server {name!r} has an Authorization header in its configuration; remove it to log in")
    server = _Server(name, spec, store)
    server.check_url()
    async with OAuthHttpClient(name, server.url) as http:
        refusal = AuthChallenge.from_response(await http.send(_probe(spec, server.url, None), head_only=True))
        try:
            granted = await server.log_in(refusal, http, interact=open_login_page, patience=timeout)
        except ProviderError as error:
            if refusal.status in (401, 403):
                raise
            raise ProviderError(
                f"server {name!r} does not ask for a login (HTTP {refusal.status}), and none was found: {error}"
            ) from None
        await server.keep(granted)
        answer = await http.send(_probe(spec, server.url, granted), head_only=True)
        if answer.status_code == 401:
            raise ProviderError(_token_refused(name))


async def logout(name: str, spec: ServerSpec, store: TokenStore) -> bool:
    """Forgets a login, and tells the authorization server; says whether there was one."""
    if spec.kind not in ("http", "sse") or spec.url is None:
        return False
    server = _Server(name, spec, store)
    async with server.slot.lock():
        held = server.slot.read()
        removed = server.slot.remove()
    if held is not None and held.revocation_endpoint is not None:
        try:
            async with OAuthHttpClient(name, server.url) as http:
                await revoke_login(held, server.settings, http)
        except ProviderError as error:  # It is forgotten here in any case, and will expire there.
            _log.warning("The login of server %r is forgotten, but was not revoked: %s", name, error)
    return removed


class _Server:
    """One server's settings and its stored login."""

    def __init__(self, name: str, spec: ServerSpec, store: TokenStore) -> None:
        assert spec.url is not None
        self.name, self.url = name, spec.url
        self.configured = bool(spec.auth)
        self.settings: OAuthSettings = parse_oauth_settings(name, spec.auth)
        if self.configured:
            self.check_url()
        register_secrets(secret for secret in (self.settings.client_secret,) if secret is not None)
        self.slot: LoginFile = store.login_file(name=name, url=self.url, client_id=self.settings.client_id)

    def check_url(self) -> None:
        if (refused := find_url_problem(self.url)) is not None:
            raise ConfigError(f"server {self.name!r}: url {refused}, or its tokens could be read on the way")

    async def log_in(
        self,
        refusal: AuthChallenge,
        http: OAuthHttpClient,
        *,
        interact: OpenLoginPage | None,
        patience: float,
        held: StoredLogin | None = None,
    ) -> StoredLogin:
        self.check_url()
        # Imports the MCP library.
        from toolspace.providers.mcp.oauth.login_flow import (
            LoginRequest,
            log_in_with_browser,
            log_in_with_client_credentials,
        )

        asked = LoginRequest(name=self.name, url=self.url, settings=self.settings, refusal=refusal, held=held)
        if self.settings.grant == "client_credentials":
            return await log_in_with_client_credentials(asked, http)
        assert interact is not None
        return await log_in_with_browser(asked, http, interact, patience=patience)

    async def keep(self, granted: StoredLogin) -> None:
        async with self.slot.lock():
            self.slot.write(granted)

    @property
    def command(self) -> str:
        return f"`toolspace servers login {shlex.quote(self.name)}`"


class HttpAuth(httpx2.Auth, ABC):
    """Authorizes the requests to one server: as `auth` of an httpx2 client, or by its two methods for any other."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    async def get_authorization(self) -> str | None:
        """The `Authorization` header for a request made now; None: send it without."""

    @abstractmethod
    async def renew_authorization(self, refusal: AuthChallenge, *, sent: str | None) -> str:
        """The header to send the request with once more, after it was refused with the one that was sent.

        Raises `ProviderError` where there is none: it names the server and the way out.
        """

    def refused_error(self) -> ProviderError:
        """What to raise where the renewed header was refused too."""
        return ProviderError(_token_refused(self._name))

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        sent = await self.get_authorization()
        if sent is not None:
            request.headers["Authorization"] = sent
        response = yield request
        refusal = AuthChallenge.from_response(response)
        if not refusal.requires_login:
            return
        try:
            again = await self.renew_authorization(refusal, sent=sent)
        except ProviderError as error:
            if request.method != "POST":  # A stream that does not open: there is nobody whom an answer could reach.
                raise
            replace_with_error(response, error)
            return
        limit_body(response)  # The client reads it before it sends the request again.
        request.headers["Authorization"] = again
        response = yield request
        if response.status_code == 401:
            if request.method != "POST":
                raise self.refused_error()
            replace_with_error(response, self.refused_error())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"


class _OAuth(HttpAuth):
    """Gives each request the server's token, and gets a new one where the server wants it."""

    def __init__(self, server: _Server, *, interact: OpenLoginPage | None, patience: float) -> None:
        super().__init__(server.name)
        self._server = server
        self._interact = interact
        self._patience = patience
        self._held: StoredLogin | None = None
        self._looked = False
        self._lost = False
        self._asking = asyncio.Lock()
        self._renewing: asyncio.Task[StoredLogin | None] | None = None

    async def get_authorization(self) -> str | None:
        held = await self._usable()
        return None if held is None else _header(held)

    async def renew_authorization(self, refusal: AuthChallenge, *, sent: str | None) -> str:
        async with self._asking:
            if refusal.status == 401 and (better := await self._better_than(sent)) is not None:
                return _header(better)
            self._check_possible(refusal, had_login=sent is not None or self._lost)
            async with OAuthHttpClient(self._name, self._server.url) as http:
                granted = await self._server.log_in(
                    refusal,
                    http,
                    interact=self._interact,
                    patience=self._patience,
                    held=self._held if refusal.needs_more_scope else None,
                )
            self._held = granted
            try:
                await self._server.keep(granted)
            except ProviderError as error:
                self._tell_unkept(error)
            return _header(granted)

    async def _usable(self) -> StoredLogin | None:
        """The login at hand, renewed where it is due."""
        if not self._looked:
            self._held, self._looked = self._server.slot.read(), True
        held = self._held
        if held is None or not held.is_due():
            return held
        if held.refresh_token is None:
            return None
        try:
            return await self._renew(held)
        except ProviderError:
            return held  # It may do for a while still. Where not, the server's refusal leads here again, and is told.

    async def _better_than(self, sent: str | None) -> StoredLogin | None:
        """What another request or another process has got in the meantime, or what the refresh token gives."""
        if self._held is None or _header(self._held) == sent:
            self._held = self._server.slot.read()
        held = self._held
        if held is None or _header(held) != sent:
            return await self._usable()
        return await self._renew(held) if held.refresh_token is not None else None

    async def _renew(self, old: StoredLogin) -> StoredLogin | None:
        """One renewal at a time, for all who wait. Shielded: the authorization server may have replaced the refresh
        token already when a caller is cancelled, and the new one must not be lost.
        """
        if self._renewing is None or self._renewing.done():
            self._renewing = asyncio.create_task(self._renew_stored(old))
            self._renewing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._renewing)

    async def _renew_stored(self, old: StoredLogin) -> StoredLogin | None:
        server = self._server
        async with server.slot.lock():
            stored = server.slot.read()
            # Another one where another process was first, none where it has logged out.
            same = stored is not None and (stored.access_token == old.access_token or stored.is_due())
            if stored is not None and same and stored.refresh_token is not None:
                async with OAuthHttpClient(server.name, server.url) as http:
                    stored = await refresh_login(server.name, stored, server.settings, http)
                if stored is None:
                    server.slot.remove()
                else:
                    try:
                        server.slot.write(stored)
                    except ProviderError as error:
                        self._tell_unkept(error)
        self._held = stored
        self._lost = stored is None
        return stored

    def _tell_unkept(self, error: ProviderError) -> None:
        _log.warning("The login of server %r holds only until this program ends: %s", self._name, error)

    def _check_possible(self, refusal: AuthChallenge, *, had_login: bool) -> None:
        """Raises where no login can help, or where nobody is there to log in."""
        server = self._server
        if refusal.needs_more_scope and (server.settings.scope is not None or self._nobody()):
            raise ProviderError(
                f"server {server.name!r} wants more rights than its login has: add the scope"
                f" {refusal.get_parameter('scope')!r} to auth.scope, then run {server.command}"
            )
        if not self._nobody():
            return
        if not server.configured and not had_login:
            raise ProviderError(
                f"server {server.name!r} wants authorization (HTTP 401): run {server.command}, or set its"
                " `auth` (`oauth`, or a mapping with its client), or its `headers`"
            )
        lost = " (the stored one is no longer accepted)" if had_login else ""
        raise ProviderError(f"server {server.name!r} needs a login: run {server.command}{lost}")

    def _nobody(self) -> bool:
        return self._interact is None and self._server.settings.grant == "authorization_code"


class _StaticAuth(HttpAuth):
    """For a server with an Authorization header of its own: says what a refusal means."""

    async def get_authorization(self) -> str | None:
        return None

    async def renew_authorization(self, refusal: AuthChallenge, *, sent: str | None) -> str:
        raise ProviderError(
            f"server {self._name!r} refuses the Authorization header of its configuration (HTTP {refusal.status});"
            " correct it"
        )


def _has_own_authorization(name: str, spec: ServerSpec) -> bool:
    own = any(header.lower() == "authorization" for header in spec.headers)
    if own and spec.auth:
        raise ConfigError(f"server {name!r} has both auth and an Authorization header; keep one")
    return own


def _header(held: StoredLogin) -> str:
    return f"Bearer {held.access_token}"


def _token_refused(name: str) -> str:
    return f"server {name!r} refuses the token that its authorization server has just given (HTTP 401)"


def _probe(spec: ServerSpec, url: str, granted: StoredLogin | None) -> httpx2.Request:
    """A request that does nothing, to see how the server refuses it."""
    headers = dict(spec.headers)
    if granted is not None:
        headers["Authorization"] = _header(granted)
    if spec.kind == "sse":
        return httpx2.Request("GET", url, headers={**headers, "Accept": "text/event-stream"})
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    return httpx2.Request("POST", url, headers={**headers, "Accept": "application/json, text/event-stream"}, json=ping)
