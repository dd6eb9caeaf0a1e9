"""Authorizes requests to MCP servers over HTTP: finds the token for a request, or says what to do if there is none.

A token comes from the file of `token_store`. `http` renews it before it expires, or when the server refuses it.
`login_flow` logs in if nothing else helps. A request with a valid token waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import shlex
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable

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
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem, parse_oauth_settings
from toolspace.providers.mcp.oauth.token_store import LoginFile, StoredLogin, TokenStore
from toolspace.providers.mcp.server_spec import ServerSpec

OpenLoginPage = Callable[[str, str], Awaitable[None]]
"""Shows a login page: `await open_login_page(server_name, url)` prints the URL or opens a browser, and returns."""

_log = logging.getLogger("toolspace.mcp")
LOGIN_TIMEOUT_SECONDS = 300.0
"""How long a person may take to log in."""


def create_http_auth(
    name: str,
    spec: ServerSpec,
    *,
    store: TokenStore,
    open_login_page: OpenLoginPage | None,
    timeout: float = LOGIN_TIMEOUT_SECONDS,
) -> HttpAuth | None:
    """Creates what authorizes the requests to a server; None if the server is not reached over HTTP.

    Without `open_login_page` nobody can log in: a request that needs a login fails at once and names the command.
    """
    if spec.kind not in ("http", "sse") or spec.url is None:
        if spec.auth:
            raise ConfigError(
                f"server {name!r}: auth works over http and sse, not over {spec.kind}; use headers or env"
            )
        return None
    if _has_authorization_header(name, spec):
        return _ConfiguredHeaderAuth(name)
    return _OAuth(name, spec, store, open_login_page, timeout)


async def login(
    name: str,
    spec: ServerSpec,
    store: TokenStore,
    open_login_page: OpenLoginPage,
    *,
    timeout: float = LOGIN_TIMEOUT_SECONDS,
) -> None:
    """Logs in and stores the tokens. Raises ProviderError with the reason if that fails."""
    if spec.kind not in ("http", "sse") or spec.url is None:
        raise ConfigError(f"server {name!r} is reached by {spec.kind}, which has no login; give it headers or env")
    if _has_authorization_header(name, spec):
        raise ConfigError(f"server {name!r} has an Authorization header in its configuration; remove it to log in")
    auth = _OAuth(name, spec, store, open_login_page, timeout)
    auth.check_url()
    async with auth.open_http() as http:
        response = await http.send(_probe_request(spec, None), head_only=True)
        challenge = AuthChallenge.from_response(response)
        try:
            new_login = await auth.log_in(challenge, http)
        except ProviderError as error:
            if challenge.status in (401, 403):
                raise
            raise ProviderError(
                f"server {name!r} does not ask for a login (HTTP {challenge.status}), and none was found: {error}"
            ) from None
        await auth.save(new_login)
        response = await http.send(_probe_request(spec, new_login), head_only=True)
        if response.status_code == 401:
            raise auth.refused_error()


async def logout(name: str, spec: ServerSpec, store: TokenStore) -> bool:
    """Deletes the stored login and revokes it at the authorization server. Returns whether there was one."""
    if spec.kind not in ("http", "sse") or spec.url is None:
        return False
    auth = _OAuth(name, spec, store, None)
    async with auth.login_file.lock():
        stored_login = auth.login_file.read()
        was_removed = auth.login_file.remove()
    if stored_login is not None and stored_login.revocation_endpoint is not None:
        try:
            async with auth.open_http() as http:
                await revoke_login(stored_login, auth.settings, http)
        except ProviderError as error:  # It is deleted here in any case, and expires there.
            _log.warning("server %r: the login is deleted, but was not revoked: %s", name, error)
    return was_removed


class HttpAuth(httpx2.Auth, ABC):
    """Authorizes the requests to one server: as `auth` of an httpx2 client, or by its methods for another client."""

    def __init__(self, name: str) -> None:
        self._name = name

    @abstractmethod
    async def get_authorization(self) -> str | None:
        """Returns the `Authorization` header for a request, or None to send it without."""

    @abstractmethod
    async def renew_authorization(self, challenge: AuthChallenge, *, sent_header: str | None) -> str:
        """Returns the header to send a refused request with once more. `sent_header` is the one that was refused.

        Raises ProviderError, which says what to do, if there is none.
        """

    def refused_error(self) -> ProviderError:
        """The error to raise if the server refuses the renewed header, too."""
        return ProviderError(
            f"server {self._name!r} refuses the token that its authorization server has just given (HTTP 401)"
        )

    async def async_auth_flow(self, request: httpx2.Request) -> AsyncGenerator[httpx2.Request, httpx2.Response]:
        sent_header = await self.get_authorization()
        if sent_header is not None:
            request.headers["Authorization"] = sent_header
        response = yield request
        challenge = AuthChallenge.from_response(response)
        if not challenge.requires_login:
            return
        try:
            authorization = await self.renew_authorization(challenge, sent_header=sent_header)
        except ProviderError as error:
            if request.method != "POST":  # A stream that cannot be opened: no request waits for a response.
                raise
            await replace_with_error(response, error)
            return
        limit_body(response)  # The client reads it before it sends the request again.
        request.headers["Authorization"] = authorization
        response = yield request
        if response.status_code == 401:
            if request.method != "POST":
                raise self.refused_error()
            await replace_with_error(response, self.refused_error())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._name!r})"


class _OAuth(HttpAuth):
    """Adds the server's token to each request, and gets a new one if the server demands it."""

    def __init__(
        self,
        name: str,
        spec: ServerSpec,
        store: TokenStore,
        open_login_page: OpenLoginPage | None,
        timeout: float = LOGIN_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__(name)
        assert spec.url is not None
        self._url = spec.url
        self._has_settings = bool(spec.auth)
        self.settings: OAuthSettings = parse_oauth_settings(name, spec.auth)
        if self._has_settings:
            self.check_url()
        if self.settings.client_secret is not None:
            register_secrets((self.settings.client_secret,))
        self.login_file: LoginFile = store.login_file(name=name, url=self._url, client_id=self.settings.client_id)
        self._open_login_page = open_login_page
        self._timeout = timeout
        self._login: StoredLogin | None = None
        self._is_loaded = False
        self._was_rejected = False
        """Whether the authorization server no longer accepted the stored login."""
        self._login_lock = asyncio.Lock()
        self._renewal: asyncio.Task[StoredLogin | None] | None = None

    def check_url(self) -> None:
        if (problem := find_url_problem(self._url)) is not None:
            raise ConfigError(f"server {self._name!r}: url {problem}, or its tokens could be read on the way")

    def open_http(self) -> OAuthHttpClient:
        return OAuthHttpClient(self._name, self._url)

    async def log_in(
        self, challenge: AuthChallenge, http: OAuthHttpClient, current_login: StoredLogin | None = None
    ) -> StoredLogin:
        self.check_url()
        # Imported here because it imports the MCP SDK.
        from toolspace.providers.mcp.oauth.login_flow import LoginRequest, log_in

        request = LoginRequest(
            name=self._name, url=self._url, settings=self.settings, challenge=challenge, current_login=current_login
        )
        return await log_in(request, http, self._open_login_page, timeout=self._timeout)

    async def save(self, login: StoredLogin) -> None:
        async with self.login_file.lock():
            self.login_file.write(login)

    async def get_authorization(self) -> str | None:
        login = await self._get_usable_login()
        return None if login is None else _bearer(login)

    async def renew_authorization(self, challenge: AuthChallenge, *, sent_header: str | None) -> str:
        async with self._login_lock:
            if challenge.status == 401 and (renewed_login := await self._find_newer_login(sent_header)) is not None:
                return _bearer(renewed_login)
            self._check_login_possible(challenge, had_login=sent_header is not None or self._was_rejected)
            async with self.open_http() as http:
                current_login = self._login if challenge.needs_more_scope else None
                self._login = new_login = await self.log_in(challenge, http, current_login)
            try:
                await self.save(new_login)
            except ProviderError as error:
                self._warn_not_saved(error)
            return _bearer(new_login)

    async def _get_usable_login(self) -> StoredLogin | None:
        """Returns the current login, renewed if it is due."""
        if not self._is_loaded:
            self._login, self._is_loaded = self.login_file.read(), True
        login = self._login
        if login is None or not login.is_due():
            return login
        if login.refresh_token is None:
            return None
        try:
            return await self._renew(login)
        except ProviderError:
            return login  # It may still be valid. If not, the server refuses it, and that error is reported.

    async def _find_newer_login(self, sent_header: str | None) -> StoredLogin | None:
        """Returns a login that another request or process has got meanwhile, or that the refresh token gives."""
        if self._login is None or _bearer(self._login) == sent_header:
            self._login = self.login_file.read()
        login = self._login
        if login is None or _bearer(login) != sent_header:
            return await self._get_usable_login()
        return await self._renew(login) if login.refresh_token is not None else None

    async def _renew(self, login: StoredLogin) -> StoredLogin | None:
        """Runs one renewal for all requests that wait for it.

        Shielded: the authorization server may already have replaced the refresh token when a caller is cancelled, and
        the new one must not be lost.
        """
        if self._renewal is None or self._renewal.done():
            self._renewal = asyncio.create_task(self._renew_stored_login(login))
            self._renewal.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(self._renewal)

    async def _renew_stored_login(self, login: StoredLogin) -> StoredLogin | None:
        async with self.login_file.lock():
            stored_login = self.login_file.read()
            # It differs if another process has renewed it, and is None if another process has logged out.
            if (
                stored_login is not None
                and stored_login.refresh_token is not None
                and (stored_login.access_token == login.access_token or stored_login.is_due())
            ):
                async with self.open_http() as http:
                    stored_login = await refresh_login(self._name, stored_login, self.settings, http)
                try:
                    if stored_login is None:
                        self.login_file.remove()
                    else:
                        self.login_file.write(stored_login)
                except ProviderError as error:
                    self._warn_not_saved(error)
        self._login = stored_login
        self._was_rejected = stored_login is None
        return stored_login

    def _warn_not_saved(self, error: ProviderError) -> None:
        _log.warning("server %r: the login is valid only until this program ends: %s", self._name, error)

    def _check_login_possible(self, challenge: AuthChallenge, *, had_login: bool) -> None:
        """Raises if no login can help, or if nobody can log in."""
        can_log_in = self._open_login_page is not None or self.settings.grant != "authorization_code"
        command = f"run `toolspace servers login {shlex.quote(self._name)}`"
        if challenge.needs_more_scope and (self.settings.scope is not None or not can_log_in):
            raise ProviderError(
                f"server {self._name!r} wants more rights than its login has: add the scope"
                f" {challenge.get_parameter('scope')!r} to auth.scope, then {command}"
            )
        if can_log_in:
            return
        if not self._has_settings and not had_login:
            raise ProviderError(
                f"server {self._name!r} wants authorization (HTTP 401): {command}, or set its"
                " `auth` (`oauth`, or a mapping with its client), or its `headers`"
            )
        suffix = " (the stored one is no longer accepted)" if had_login else ""
        raise ProviderError(f"server {self._name!r} needs a login: {command}{suffix}")


class _ConfiguredHeaderAuth(HttpAuth):
    """For a server with a configured Authorization header: explains a refusal."""

    async def get_authorization(self) -> str | None:
        return None

    async def renew_authorization(self, challenge: AuthChallenge, *, sent_header: str | None) -> str:
        raise ProviderError(
            f"server {self._name!r} refuses the Authorization header of its configuration (HTTP {challenge.status});"
            " correct it"
        )


def _has_authorization_header(name: str, spec: ServerSpec) -> bool:
    has_header = any(header.lower() == "authorization" for header in spec.headers)
    if has_header and spec.auth:
        raise ConfigError(f"server {name!r} has both auth and an Authorization header; keep one")
    return has_header


def _bearer(login: StoredLogin) -> str:
    return f"Bearer {login.access_token}"


def _probe_request(spec: ServerSpec, login: StoredLogin | None) -> httpx2.Request:
    """Builds a request without effect, whose response shows whether the server asks for a login."""
    url, headers = spec.url or "", dict(spec.headers)
    if login is not None:
        headers["Authorization"] = _bearer(login)
    if spec.kind == "sse":
        return httpx2.Request("GET", url, headers={**headers, "Accept": "text/event-stream"})
    ping = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    return httpx2.Request("POST", url, headers={**headers, "Accept": "application/json, text/event-stream"}, json=ping)
