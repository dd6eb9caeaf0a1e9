"""Which credentials an operation needs, and where they go. Sends nothing.

`security` is a list of ways in, each a set of schemes that are needed together. The first way for which the
configuration has every credential is taken.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from yarl import URL

from toolspace.core.names import did_you_mean
from toolspace.core.secret_masking import remember_secrets
from toolspace.errors import ToolPermissionError
from toolspace.providers.openapi.document import Broken, Document, Json, mapping, members
from toolspace.providers.openapi.parameters import FRAMING, can_be_sent
from toolspace.providers.openapi.serialize import encoded
from toolspace.providers.openapi.tokens import Client, Tokens
from toolspace.providers.rest.client import HttpClient

Requirements = list[Json]
_TOKEN_KEYS = ("token", "accessToken", "value", "apiKey", "key")
_OTHER_SECRETS = ("password", "clientSecret")


class Credentials(msgspec.Struct, frozen=True):
    """What is added to every request of one operation. Its text shows nothing of it."""

    headers: dict[str, str] = {}
    query: tuple[str, ...] = ()
    """Encoded `name=value` texts."""
    cookies: tuple[str, ...] = ()
    tokens: Tokens | None = None
    """Where the token for the header `Authorization` comes from, if it has to be fetched."""

    def __repr__(self) -> str:
        return "Credentials(…)"


class _Missing(Exception):
    """The configuration lacks something for a scheme; the text says what to set."""


class Security:
    """The security schemes of one document, with the credentials that the configuration has for them."""

    def __init__(
        self, document: Document, service: str, auth: Mapping[str, Any], headers: Mapping[str, str], http: HttpClient
    ) -> None:
        self._document = document
        self._service = service
        self._auth = auth
        self._headers = {name.lower() for name in headers}
        self._http = http
        self._tokens: dict[tuple[str, Client], Tokens] = {}
        remember_secrets(_secrets(auth))
        components = mapping(document.data.get("components")) or {}
        self.schemes = mapping(components.get("securitySchemes")) or {}

    def warnings(self) -> list[str]:
        """Credentials that fit no scheme: most likely misspelt."""
        known = ", ".join(self.schemes) or "none"
        return [
            f'auth: the document has no security scheme "{name}"; it has {known}{did_you_mean(name, self.schemes)}'
            for name in self._auth
            if name not in self.schemes
        ]

    def requirements(self, operation: Json) -> Requirements:
        """The ways in for an operation: its own, else the document's. Raises `Broken`."""
        said = operation["security"] if "security" in operation else self._document.data.get("security")
        if said is None:
            return []
        ways = [way for one in members(said) if (way := mapping(one)) is not None]
        if not isinstance(said, list) or len(ways) != len(members(said)):
            # Taken for nothing, it would send without what the service wants.
            raise Broken("its security is no list of mappings from schemes to scopes")
        return ways

    def carried(self, requirements: Requirements) -> set[tuple[str, str]]:
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

    def credentials(self, requirements: Requirements, server: URL) -> Credentials:
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
            return Credentials()
        raise ToolPermissionError(f"no credentials for {self._service}: {'; or '.join(dict.fromkeys(missing))}")

    async def aclose(self) -> None:
        for tokens in self._tokens.values():
            await tokens.aclose()

    def _together(self, way: Mapping[str, Any], server: URL) -> Credentials:
        headers: dict[str, str] = {}
        query: list[str] = []
        cookies: list[str] = []
        tokens: Tokens | None = None
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
        return Credentials(headers, tuple(query), tuple(cookies), tokens)

    def _key_at(self, name: str, scheme: Json, headers: dict[str, str], query: list[str], cookies: list[str]) -> None:
        """Puts an API key where its scheme says."""
        at, place = str(scheme.get("name")), scheme.get("in")
        if place == "query":
            query.append(f"{encoded(at)}={encoded(self._text(name))}")
        elif place not in ("header", "cookie") or not can_be_sent(at) or (place == "header" and at.lower() in FRAMING):
            raise _Missing(f'the security scheme "{name}" does not say where its key goes')
        elif place == "cookie":
            cookies.append(f"{at}={_cookie(self._text(name))}")
        elif at.lower() not in self._headers:
            headers[at] = self._text(name)

    def _scheme(self, name: str) -> Json:
        try:
            return mapping(self._document.root.follow(self.schemes.get(name)).node) or {}
        except Broken:
            return {}

    def _text(self, name: str) -> str:
        """The key or token of a scheme."""
        given = self._auth.get(name)
        if (named := mapping(given)) is not None:
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
            if scheme.lower() == "digest" or not can_be_sent(scheme):
                raise _Missing(f'the security scheme "{name}" is HTTP {scheme!r}, which is not supported')
            return f"{scheme} {self._text(name)}"
        given = self._auth.get(name)
        if (pair := mapping(given)) is not None:
            given = f"{pair['username']}:{pair.get('password', '')}" if pair.get("username") else None
        if not isinstance(given, str) or ":" not in given:
            raise self._missing(name, "{username, password}")
        return f"Basic {b64encode(given.encode()).decode()}"

    def _has_client(self, name: str) -> bool:
        given = self._auth.get(name, {})
        return isinstance(given, dict) and not any(key in given for key in _TOKEN_KEYS)

    def _client(self, name: str, scheme: Json, scopes: Any, server: URL) -> Tokens:
        given = mapping(self._auth.get(name)) or {}
        if not given.get("clientId") or not given.get("clientSecret"):
            raise self._missing(name, "{clientId, clientSecret}, or to an access token,")
        flow = mapping((mapping(scheme.get("flows")) or {}).get("clientCredentials")) or {}
        url = given.get("tokenUrl") or flow.get("tokenUrl")
        try:
            token_url = server.join(URL(url)) if isinstance(url, str) and url else URL()
        except ValueError:
            token_url = URL()
        if token_url.scheme not in ("http", "https") or not token_url.host:
            raise _Missing(f'set {self._key(name)}.tokenUrl: the document has no URL for the security scheme "{name}"')
        own = given.get("scopes")
        asked = own.split() if isinstance(own, str) else members(own if own is not None else scopes)
        client = Client(
            token_url=token_url.with_fragment(None).with_user(None),
            client_id=str(given["clientId"]),
            client_secret=str(given["clientSecret"]),
            scopes=tuple(map(str, asked)),
            in_body=given.get("clientAuth") == "body",
        )
        key = (name, client)  # Operations that ask for the same share the token.
        if key not in self._tokens:
            self._tokens[key] = Tokens(client, self._http, name)
        return self._tokens[key]

    def _missing(self, name: str, wanted: str) -> _Missing:
        return _Missing(f'set {self._key(name)} to {wanted} for the security scheme "{name}"')

    def _key(self, name: str) -> str:
        return f"openapi.{self._service}.auth.{name}"


def _secrets(auth: Mapping[str, Any]) -> Iterator[str]:
    """What the service must not be able to bring into a log, by sending it back."""
    for given in auth.values():
        named = mapping(given)
        for value in [given] if named is None else [named.get(key) for key in (*_TOKEN_KEYS, *_OTHER_SECRETS)]:
            if isinstance(value, str | int):
                yield str(value)
                yield str(value).partition(":")[2]  # Where it is `user:password`.


def _cookie(text: str) -> str:
    """A credential as a cookie: as it is where it can be, since services compare it with what they gave out."""
    return encoded(text) if any(character in ';, "\\' or ord(character) > 126 for character in text) else text
