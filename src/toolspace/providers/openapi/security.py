"""Chooses the credentials of an operation and fetches access tokens by client credentials.

`security` of an operation is a list of alternatives, each a set of schemes that are needed together. The first
alternative for which the configuration has every credential is used. `operations` and `provider` use this module.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, quote_plus, urlencode

import msgspec
from yarl import URL

from toolspace.core import json_text
from toolspace.core.http_messages import CLIENT_HEADERS, basic_authorization, is_token
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import mask_secrets, register_secrets
from toolspace.errors import ToolError, ToolPermissionError, ToolTransportError
from toolspace.providers.openapi.document import JsonObject, OpenApiDocument, OpenApiError, as_list, as_object
from toolspace.providers.rest.client import HttpClient, HttpRequest, HttpResponse

SecurityRequirements = list[JsonObject]

_TOKEN_KEYS = ("token", "accessToken", "value", "apiKey", "key")
_OTHER_SECRET_KEYS = ("password", "clientSecret")
_MAX_TOKEN_RESPONSE_BYTES = 1 << 20
_TOKEN_EXPIRY_MARGIN = 30.0
"""Seconds before its expiry after which a token is no longer used: a request takes time to arrive."""
_TOKEN_TIMEOUT = 30.0
_NO_EXPIRY = 1e10
_SENDABLE_TOKEN = re.compile(r"[!-~]+")


def percent_encode(text: str) -> str:
    """Encodes everything except letters, digits and `-._~`."""
    return quote(text, safe="", errors="replace")


class AccessTokens:
    """The current access token of one client for one set of scopes. Fetched when needed, shared by all calls."""

    def __init__(self, request: HttpRequest, http: HttpClient, scheme: str) -> None:
        self._request = request
        self._http = http
        self._scheme = scheme
        self._token: str | None = None
        self._expires_at = 0.0
        self._fetch_task: asyncio.Task[str] | None = None

    async def get(self) -> str:
        """A valid token. Concurrent calls share one request. Raises `ToolTransportError`."""
        if self._token is not None and time.monotonic() < self._expires_at:
            return self._token
        loop = asyncio.get_running_loop()
        if self._fetch_task is None or self._fetch_task.done() or self._fetch_task.get_loop() is not loop:
            self._fetch_task = loop.create_task(self._fetch())
            # Retrieves its exception: every waiting caller may have been cancelled.
            self._fetch_task.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: a cancelled caller must not cancel the request that others wait for.
        return await asyncio.shield(self._fetch_task)

    def discard(self, token: str) -> None:
        """Discards a token that the service rejected, unless a newer one has replaced it."""
        if token == self._token:
            self._token = None

    async def aclose(self) -> None:
        if self._fetch_task is not None and not self._fetch_task.done():
            self._fetch_task.cancel()
            await asyncio.wait((self._fetch_task,))

    async def _fetch(self) -> str:
        response = await self._request_token()
        try:
            fields = as_object(json_text.decode(response.body)) or {}
        except ValueError:
            fields = {}
        token = fields.get("access_token")
        if response.status != 200 or not isinstance(token, str) or not _SENDABLE_TOKEN.fullmatch(token):
            reason = fields.get("error") if isinstance(fields.get("error"), str) else "the response has no token"
            raise self._error(f"status {response.status}, {mask_secrets(json_text.describe(reason, 100))}")
        lifetime = _parse_lifetime(fields.get("expires_in"))
        self._token = token
        self._expires_at = time.monotonic() + max(lifetime - _TOKEN_EXPIRY_MARGIN, lifetime / 2)
        return token

    async def _request_token(self) -> HttpResponse:
        try:
            async with asyncio.timeout(_TOKEN_TIMEOUT):
                return await self._http.fetch(self._request, max_bytes=_MAX_TOKEN_RESPONSE_BYTES)
        except TimeoutError:
            raise self._error(f"no response within {_TOKEN_TIMEOUT:.0f} s") from None
        except ToolError as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> ToolTransportError:
        url = self._request.url
        return ToolTransportError(
            f'no access token for the security scheme "{self._scheme}" from {url.host}{url.path}: {reason}',
            executed=False,
        )


def _token_request(url: URL, settings: JsonObject, scopes: tuple[str, ...]) -> HttpRequest:
    client_id, client_secret = str(settings["clientId"]), str(settings["clientSecret"])
    form = {"grant_type": "client_credentials"}
    headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
    if scopes:
        form["scope"] = " ".join(scopes)
    if settings.get("clientAuth") == "body":  # For servers without basic authentication.
        form |= {"client_id": client_id, "client_secret": client_secret}
    else:
        headers["Authorization"] = basic_authorization(f"{quote_plus(client_id)}:{quote_plus(client_secret)}")
    return HttpRequest("POST", url, headers, urlencode(form).encode())


def _parse_lifetime(value: Any) -> float:
    """Seconds of `expires_in`. Without a valid number the token is used until the service rejects it."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 12:
        value = int(value)
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < _NO_EXPIRY:
        return float(value)
    return _NO_EXPIRY


class OperationCredentials(msgspec.Struct):
    """What is added to every request of one operation. Its `repr` shows no values."""

    headers: dict[str, str] = {}
    query: list[str] = []
    """Encoded `name=value` texts."""
    cookies: list[str] = []
    tokens: AccessTokens | None = None
    """The source of the bearer token, if it must be fetched."""

    def __repr__(self) -> str:
        return "OperationCredentials(…)"


class _MissingCredentialError(Exception):
    """The configuration has no usable credential for a scheme. The message says what to set."""


class SecuritySchemes:
    """The security schemes of one document, with the configured credentials (`openapi.NAME.auth`)."""

    def __init__(
        self,
        document: OpenApiDocument,
        service: str,
        auth: Mapping[str, Any],
        headers: Mapping[str, str],
        http: HttpClient,
    ) -> None:
        self._document = document
        self._service = service
        self._auth = auth
        self._configured_headers = {name.lower() for name in headers}
        self._http = http
        self._tokens: dict[tuple[str, URL, tuple[str, ...]], AccessTokens] = {}
        register_secrets(_list_secrets(auth))
        components = as_object(document.data.get("components")) or {}
        self._schemes = as_object(components.get("securitySchemes")) or {}

    def warnings(self) -> list[str]:
        """Configured credentials whose scheme the document does not have."""
        names = ", ".join(self._schemes) or "none"
        return [
            f'auth: the document has no security scheme "{name}"; it has {names}{did_you_mean(name, self._schemes)}'
            for name in self._auth
            if name not in self._schemes
        ]

    def requirements(self, operation: JsonObject) -> SecurityRequirements:
        """The alternatives of an operation: its own, otherwise the document's. Raises `OpenApiError`."""
        security = operation["security"] if "security" in operation else self._document.data.get("security")
        if security is None:
            return []
        alternatives = [schemes for item in as_list(security) if (schemes := as_object(item)) is not None]
        if not isinstance(security, list) or len(alternatives) != len(as_list(security)):
            # Ignoring it would send requests without the credentials that the service wants.
            raise OpenApiError("its security is not a list of mappings from schemes to scopes")
        return alternatives

    def credential_locations(self, requirements: SecurityRequirements) -> set[tuple[str, str]]:
        """Location and name of every API key that these alternatives send. Models are not asked for them."""
        locations: set[tuple[str, str]] = set()
        for scheme_name in {name for alternative in requirements for name in alternative}:
            scheme = self._get_scheme(scheme_name)
            name, location = str(scheme.get("name")), scheme.get("in")
            if scheme.get("type") == "apiKey" and location in ("header", "query", "cookie"):
                locations.add((location, name.lower() if location == "header" else name))
                if location == "cookie":
                    locations.add(("header", "cookie"))  # A Cookie header could set the same cookie again.
        return locations

    def get_credentials(self, requirements: SecurityRequirements, server: URL) -> OperationCredentials:
        """The credentials to send. Raises `ToolPermissionError` that says what to configure."""
        missing_texts: list[str] = []
        for alternative in filter(None, requirements):
            try:
                return self._combine_schemes(alternative, server)
            except _MissingCredentialError as error:
                missing_texts.append(str(error))
        if not requirements or {} in requirements:  # Without credentials.
            return OperationCredentials()
        raise ToolPermissionError(f"no credentials for {self._service}: {'; or '.join(dict.fromkeys(missing_texts))}")

    async def aclose(self) -> None:
        for tokens in self._tokens.values():
            await tokens.aclose()

    def _combine_schemes(self, schemes: Mapping[str, Any], server: URL) -> OperationCredentials:
        """The credentials of all schemes of one alternative."""
        credentials = OperationCredentials()
        headers = credentials.headers
        for name, scopes in schemes.items():
            scheme = self._get_scheme(name)
            match scheme.get("type"):
                case "apiKey":
                    self._add_api_key(name, scheme, credentials)
                case "http" | "oauth2" | "openIdConnect" if "authorization" in self._configured_headers:
                    continue  # The operator has configured the header.
                case "http":
                    headers["Authorization"] = self._http_authorization(name, str(scheme.get("scheme")))
                case "oauth2" if self._has_client_credentials(name):
                    credentials.tokens = self._get_tokens(name, scheme, scopes, server)
                case "oauth2" | "openIdConnect":
                    headers["Authorization"] = f"Bearer {self._get_key(name)}"
                case None:
                    raise _MissingCredentialError(f'the document does not describe the security scheme "{name}"')
                case scheme_type:
                    raise _MissingCredentialError(
                        f'the security scheme "{name}" has the type {scheme_type!r}, which is not supported'
                    )
        return credentials

    def _add_api_key(self, scheme_name: str, scheme: JsonObject, credentials: OperationCredentials) -> None:
        name, location = str(scheme.get("name")), scheme.get("in")
        if location == "query":
            credentials.query.append(f"{percent_encode(name)}={percent_encode(self._get_key(scheme_name))}")
            return
        is_forbidden = location == "header" and name.lower() in CLIENT_HEADERS
        if location not in ("header", "cookie") or not is_token(name) or is_forbidden:
            raise _MissingCredentialError(f'the security scheme "{scheme_name}" does not say where its key goes')
        if location == "cookie":
            credentials.cookies.append(f"{name}={_encode_cookie(self._get_key(scheme_name))}")
        elif name.lower() not in self._configured_headers:
            credentials.headers[name] = self._get_key(scheme_name)

    def _get_scheme(self, name: str) -> JsonObject:
        try:
            return as_object(self._document.root.follow(self._schemes.get(name)).node) or {}
        except OpenApiError:
            return {}

    def _get_key(self, name: str) -> str:
        """The configured key or token of a scheme."""
        value = self._auth.get(name)
        if (settings := as_object(value)) is not None:
            value = next((settings[key] for key in _TOKEN_KEYS if key in settings), None)
        if not isinstance(value, str | int) or value == "":
            raise self._missing_error(name, "its key or token")
        text = str(value)
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise _MissingCredentialError(
                f"{self._setting_name(name)} contains a line break or another control character; remove it"
            )
        return text

    def _http_authorization(self, name: str, scheme: str) -> str:
        if scheme.lower() == "bearer":
            return f"Bearer {self._get_key(name)}"
        if scheme.lower() != "basic":
            if scheme.lower() == "digest" or not is_token(scheme):
                raise _MissingCredentialError(
                    f'the security scheme "{name}" is HTTP {scheme!r}, which is not supported'
                )
            return f"{scheme} {self._get_key(name)}"
        value = self._auth.get(name)
        if (settings := as_object(value)) is not None:
            value = f"{settings['username']}:{settings.get('password', '')}" if settings.get("username") else None
        if not isinstance(value, str) or ":" not in value:
            raise self._missing_error(name, "{username, password}")
        return basic_authorization(value)

    def _has_client_credentials(self, name: str) -> bool:
        value = self._auth.get(name, {})
        return isinstance(value, dict) and not any(key in value for key in _TOKEN_KEYS)

    def _get_tokens(self, name: str, scheme: JsonObject, scopes: Any, server: URL) -> AccessTokens:
        settings = as_object(self._auth.get(name)) or {}
        if not settings.get("clientId") or not settings.get("clientSecret"):
            raise self._missing_error(name, "{clientId, clientSecret}, or to an access token,")
        flow = as_object((as_object(scheme.get("flows")) or {}).get("clientCredentials")) or {}
        url = settings.get("tokenUrl") or flow.get("tokenUrl")
        try:
            token_url = server.join(URL(url)) if isinstance(url, str) and url else URL()
        except ValueError:
            token_url = URL()
        if token_url.scheme not in ("http", "https") or not token_url.host:
            raise _MissingCredentialError(
                f"set {self._setting_name(name)}.tokenUrl: "
                f'the document has no token URL for the security scheme "{name}"'
            )
        own_scopes = settings.get("scopes")
        if isinstance(own_scopes, str):
            own_scopes = own_scopes.split()
        scope_names = tuple(map(str, as_list(own_scopes if own_scopes is not None else scopes)))
        key = (name, token_url, scope_names)  # Operations with the same scopes share the token.
        if key not in self._tokens:
            request = _token_request(token_url.with_fragment(None).with_user(None), settings, scope_names)
            self._tokens[key] = AccessTokens(request, self._http, name)
        return self._tokens[key]

    def _missing_error(self, name: str, expected: str) -> _MissingCredentialError:
        return _MissingCredentialError(f'set {self._setting_name(name)} to {expected} for the security scheme "{name}"')

    def _setting_name(self, name: str) -> str:
        return f"openapi.{self._service}.auth.{name}"


def _list_secrets(auth: Mapping[str, Any]) -> Iterator[str]:
    """The secrets to mask, in case the service sends them back."""
    for value in auth.values():
        settings = as_object(value)
        candidates = [value] if settings is None else map(settings.get, (*_TOKEN_KEYS, *_OTHER_SECRET_KEYS))
        for candidate in candidates:
            if isinstance(candidate, str | int):
                yield str(candidate)
                yield str(candidate).partition(":")[2]  # The password of `user:password`.


def _encode_cookie(text: str) -> str:
    """A credential as a cookie value. Encoded only if necessary: services compare it with the value they issued."""
    needs_encoding = any(character in ';, "\\' or ord(character) > 126 for character in text)
    return percent_encode(text) if needs_encoding else text
