"""Which credentials an operation needs, and where they go. Sends nothing.

`security` is a list of ways in, each a set of schemes that are needed together. The first way for which the
configuration has every credential is taken.
"""

from __future__ import annotations

import asyncio
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any, cast
from urllib.parse import quote_plus, urlencode

import msgspec
from yarl import URL

from toolspace.core import json_text
from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import mask_secrets, register_secrets
from toolspace.errors import ToolError, ToolPermissionError, ToolTransportError
from toolspace.providers.openapi.document import JsonObject, OpenApiDocument, OpenApiError, as_list, as_object
from toolspace.providers.openapi.parameters import FORBIDDEN_HEADERS, is_valid_name, percent_encode
from toolspace.providers.rest.client import HttpClient, HttpRequest

# MERGED from tokens: Access tokens by client credentials: fetched when needed, shared by all calls, kept until the…

_MAX_BYTES = 1 << 20
_MARGIN = 30.0
"""Seconds before its end at which a token is not used any more: a request takes time to arrive."""
_PATIENCE = 30.0


class TokenClient(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks for tokens, and where."""

    token_url: URL
    client_id: str
    client_secret: str
    scopes: tuple[str, ...] = ()
    secret_in_body: bool = False
    """Whether id and secret go in the form, for servers that take no basic authentication."""

    def __repr__(self) -> str:
        return f"Client({self.token_url.host})"


class AccessTokens:
    """The token of one client for one set of scopes."""

    def __init__(self, client: TokenClient, http: HttpClient, scheme: str) -> None:
        self._client = client
        self._http = http
        self._scheme = scheme
        self._token: str | None = None
        self._until = 0.0
        self._fetching: asyncio.Task[str] | None = None

    async def get(self) -> str:
        """A token that holds. Calls that need one at the same time wait for the same answer."""
        if self._token is not None and time.monotonic() < self._until:
            return self._token
        loop = asyncio.get_running_loop()
        if self._fetching is None or self._fetching.done() or self._fetching.get_loop() is not loop:
            self._fetching = loop.create_task(self._fetch())
            self._fetching.add_done_callback(_retrieve)
        # Shielded: a caller that goes away must not take the others' token with it.
        return await asyncio.shield(self._fetching)

    def discard(self, token: str) -> None:
        """The service did not accept it. Another that came meanwhile stays."""
        if token == self._token:
            self._token = None

    async def aclose(self) -> None:
        if self._fetching is not None and not self._fetching.done():
            self._fetching.cancel()
            await asyncio.wait((self._fetching,))

    async def _fetch(self) -> str:
        client = self._client
        form = {"grant_type": "client_credentials"}
        headers = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
        if client.scopes:
            form["scope"] = " ".join(client.scopes)
        if client.secret_in_body:
            form |= {"client_id": client.client_id, "client_secret": client.client_secret}
        else:
            pair = f"{quote_plus(client.client_id)}:{quote_plus(client.client_secret)}"
            headers["Authorization"] = f"Basic {b64encode(pair.encode()).decode()}"
        request = HttpRequest("POST", client.token_url, headers, urlencode(form).encode())
        try:
            async with asyncio.timeout(_PATIENCE):
                answer = await self._http.fetch(request, max_bytes=_MAX_BYTES)
        except TimeoutError:
            raise self._failed(f"no answer within {_PATIENCE:.0f} s") from None
        except ToolError as error:
            raise self._failed(str(error)) from None
        try:
            said: Any = json_text.decode(answer.body)
        except ValueError:
            said = None
        given = cast("dict[str, Any]", said) if isinstance(said, dict) else {}
        token, lifetime = given.get("access_token"), given.get("expires_in")
        if answer.status != 200 or not isinstance(token, str) or not _can_be_sent(token):
            reason = given.get("error") if isinstance(given.get("error"), str) else "it gives no token"
            raise self._failed(f"status {answer.status}, {mask_secrets(json_text.describe(reason, 100))}")
        seconds = _seconds(lifetime)
        self._token = token
        self._until = time.monotonic() + max(seconds - _MARGIN, seconds / 2)
        return token

    def _failed(self, reason: str) -> ToolTransportError:
        url = self._client.token_url
        return ToolTransportError(
            f'no access token for the security scheme "{self._scheme}" from {url.host}{url.path}: {reason}',
            executed=False,
        )


def _seconds(lifetime: Any) -> float:
    if isinstance(lifetime, str) and lifetime.isdecimal() and len(lifetime) < 12:
        lifetime = int(lifetime)
    if isinstance(lifetime, int | float) and not isinstance(lifetime, bool) and 0 <= lifetime < 1e10:
        return float(lifetime)
    return 1e10  # It did not say: until the service says no.


def _can_be_sent(token: str) -> bool:
    return token != "" and token.isascii() and token.isprintable() and " " not in token


def _retrieve(task: asyncio.Task[str]) -> None:
    """Looks at a failure that nobody may be left to hear of."""
    if not task.cancelled():
        task.exception()


SecurityRequirements = list[JsonObject]
_TOKEN_KEYS = ("token", "accessToken", "value", "apiKey", "key")
_OTHER_SECRETS = ("password", "clientSecret")


class OperationCredentials(msgspec.Struct, frozen=True):
    """What is added to every request of one operation. Its text shows nothing of it."""

    headers: dict[str, str] = {}
    query: tuple[str, ...] = ()
    """Encoded `name=value` texts."""
    cookies: tuple[str, ...] = ()
    tokens: AccessTokens | None = None
    """Where the token for the header `Authorization` comes from, if it has to be fetched."""

    def __repr__(self) -> str:
        return "Credentials(…)"


class _Missing(Exception):
    """The configuration lacks something for a scheme; the text says what to set."""


class SecuritySchemes:
    """The security schemes of one document, with the credentials that the configuration has for them."""

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
        self._headers = {name.lower() for name in headers}
        self._http = http
        self._tokens: dict[tuple[str, TokenClient], AccessTokens] = {}
        register_secrets(_secrets(auth))
        components = as_object(document.data.get("components")) or {}
        self.schemes = as_object(components.get("securitySchemes")) or {}

    def warnings(self) -> list[str]:
        """Credentials that fit no scheme: most likely misspelt."""
        known = ", ".join(self.schemes) or "none"
        return [
            f'auth: the document has no security scheme "{name}"; it has {known}{did_you_mean(name, self.schemes)}'
            for name in self._auth
            if name not in self.schemes
        ]

    def requirements(self, operation: JsonObject) -> SecurityRequirements:
        """The ways in for an operation: its own, else the document's. Raises `Broken`."""
        said = operation["security"] if "security" in operation else self._document.data.get("security")
        if said is None:
            return []
        ways = [way for one in as_list(said) if (way := as_object(one)) is not None]
        if not isinstance(said, list) or len(ways) != len(as_list(said)):
            # Taken for nothing, it would send without what the service wants.
            raise OpenApiError("its security is no list of mappings from schemes to scopes")
        return ways

    def credential_locations(self, requirements: SecurityRequirements) -> set[tuple[str, str]]:
        """Place and name of what credentials are sent in, whichever way is taken: no model should be asked for it."""
        found: set[tuple[str, str]] = set()
        for name in {name for way in requirements for name in way}:
            scheme = self._scheme(name)
            at, place = str(scheme.get("name")), scheme.get("in")
            if scheme.get("type") == "apiKey" and place in ("header", "query", "cookie"):
                found.add((place, at.lower() if place == "header" else at))
                if place == "cookie":
                    found.add(("header", "cookie"))  # Which would be a second cookie of that name.
        return found

    def get_credentials(self, requirements: SecurityRequirements, server: URL) -> OperationCredentials:
        """What to send. Raises `ToolPermissionError` that says what to configure, where it lacks something."""
        missing: list[str] = []
        anonymous = not requirements
        for way in requirements:
            if not way:
                anonymous = True
                continue
            try:
                return self._together(way, server)
            except _Missing as error:
                missing.append(str(error))
        if anonymous:
            return OperationCredentials()
        raise ToolPermissionError(f"no credentials for {self._service}: {'; or '.join(dict.fromkeys(missing))}")

    async def aclose(self) -> None:
        for tokens in self._tokens.values():
            await tokens.aclose()

    def _together(self, way: Mapping[str, Any], server: URL) -> OperationCredentials:
        headers: dict[str, str] = {}
        query: list[str] = []
        cookies: list[str] = []
        tokens: AccessTokens | None = None
        for name, scopes in way.items():
            scheme = self._scheme(name)
            match scheme.get("type"):
                case "apiKey":
                    self._key_at(name, scheme, headers, query, cookies)
                case "http" | "oauth2" | "openIdConnect" if "authorization" in self._headers:
                    continue  # The operator has set the header by hand.
                case "http":
                    headers["Authorization"] = self._http_scheme(name, str(scheme.get("scheme")))
                case "oauth2" if self._has_client(name):
                    tokens = self._client(name, scheme, scopes, server)
                case "oauth2" | "openIdConnect":
                    headers["Authorization"] = f"Bearer {self._text(name)}"
                case None:
                    raise _Missing(f'the document does not describe the security scheme "{name}"')
                case other:
                    raise _Missing(f'the security scheme "{name}" is of the type {other!r}, which is not supported')
        return OperationCredentials(headers, tuple(query), tuple(cookies), tokens)

    def _key_at(
        self, name: str, scheme: JsonObject, headers: dict[str, str], query: list[str], cookies: list[str]
    ) -> None:
        """Puts an API key where its scheme says."""
        at, place = str(scheme.get("name")), scheme.get("in")
        if place == "query":
            query.append(f"{percent_encode(at)}={percent_encode(self._text(name))}")
        elif (
            place not in ("header", "cookie")
            or not is_valid_name(at)
            or (place == "header" and at.lower() in FORBIDDEN_HEADERS)
        ):
            raise _Missing(f'the security scheme "{name}" does not say where its key goes')
        elif place == "cookie":
            cookies.append(f"{at}={_cookie(self._text(name))}")
        elif at.lower() not in self._headers:
            headers[at] = self._text(name)

    def _scheme(self, name: str) -> JsonObject:
        try:
            return as_object(self._document.root.follow(self.schemes.get(name)).node) or {}
        except OpenApiError:
            return {}

    def _text(self, name: str) -> str:
        """The key or token of a scheme."""
        given = self._auth.get(name)
        if (named := as_object(given)) is not None:
            given = next((named[key] for key in _TOKEN_KEYS if key in named), None)
        if not isinstance(given, str | int) or given == "":
            raise self._missing(name, "its key or token")
        text = str(given)
        if any(ord(character) < 32 or ord(character) == 127 for character in text):
            raise _Missing(f"{self._key(name)} holds a line break or another control character; remove it")
        return text

    def _http_scheme(self, name: str, scheme: str) -> str:
        if scheme.lower() == "bearer":
            return f"Bearer {self._text(name)}"
        if scheme.lower() != "basic":
            if scheme.lower() == "digest" or not is_valid_name(scheme):
                raise _Missing(f'the security scheme "{name}" is HTTP {scheme!r}, which is not supported')
            return f"{scheme} {self._text(name)}"
        given = self._auth.get(name)
        if (pair := as_object(given)) is not None:
            given = f"{pair['username']}:{pair.get('password', '')}" if pair.get("username") else None
        if not isinstance(given, str) or ":" not in given:
            raise self._missing(name, "{username, password}")
        return f"Basic {b64encode(given.encode()).decode()}"

    def _has_client(self, name: str) -> bool:
        given = self._auth.get(name, {})
        return isinstance(given, dict) and not any(key in given for key in _TOKEN_KEYS)

    def _client(self, name: str, scheme: JsonObject, scopes: Any, server: URL) -> AccessTokens:
        given = as_object(self._auth.get(name)) or {}
        if not given.get("clientId") or not given.get("clientSecret"):
            raise self._missing(name, "{clientId, clientSecret}, or to an access token,")
        flow = as_object((as_object(scheme.get("flows")) or {}).get("clientCredentials")) or {}
        url = given.get("tokenUrl") or flow.get("tokenUrl")
        try:
            token_url = server.join(URL(url)) if isinstance(url, str) and url else URL()
        except ValueError:
            token_url = URL()
        if token_url.scheme not in ("http", "https") or not token_url.host:
            raise _Missing(f'set {self._key(name)}.tokenUrl: the document has no URL for the security scheme "{name}"')
        own = given.get("scopes")
        asked = own.split() if isinstance(own, str) else as_list(own if own is not None else scopes)
        client = TokenClient(
            token_url=token_url.with_fragment(None).with_user(None),
            client_id=str(given["clientId"]),
            client_secret=str(given["clientSecret"]),
            scopes=tuple(map(str, asked)),
            secret_in_body=given.get("clientAuth") == "body",
        )
        key = (name, client)  # Operations that ask for the same share the token.
        if key not in self._tokens:
            self._tokens[key] = AccessTokens(client, self._http, name)
        return self._tokens[key]

    def _missing(self, name: str, wanted: str) -> _Missing:
        return _Missing(f'set {self._key(name)} to {wanted} for the security scheme "{name}"')

    def _key(self, name: str) -> str:
        return f"openapi.{self._service}.auth.{name}"


def _secrets(auth: Mapping[str, Any]) -> Iterator[str]:
    """What the service must not be able to bring into a log, by sending it back."""
    for given in auth.values():
        named = as_object(given)
        for value in [given] if named is None else [named.get(key) for key in (*_TOKEN_KEYS, *_OTHER_SECRETS)]:
            if isinstance(value, str | int):
                yield str(value)
                yield str(value).partition(":")[2]  # Where it is `user:password`.


def _cookie(text: str) -> str:
    """A credential as a cookie: as it is where it can be, since services compare it with what they gave out."""
    return percent_encode(text) if any(character in ';, "\\' or ord(character) > 126 for character in text) else text
