"""Parses and checks the `auth` setting of an MCP server. Connects to nothing and does not import the MCP SDK."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, cast
from urllib.parse import SplitResult, urlsplit

import msgspec

from toolspace.core.names import did_you_mean
from toolspace.core.network_addresses import parse_address, special_kind
from toolspace.errors import ConfigError

Grant = Literal["authorization_code", "client_credentials"]

_GRANTS: dict[str, Grant] = {
    "authorization_code": "authorization_code",
    "oauth": "authorization_code",
    "client_credentials": "client_credentials",
}
_TEXT_KEYS = ("clientId", "clientSecret", "clientMetadataUrl", "tokenEndpointAuthMethod", "issuer")
_KEYS = ("type", "scope", "scopes", "redirectPort", *_TEXT_KEYS)
_AUTHORIZATION_CODE_KEYS = ("redirectPort", "clientMetadataUrl")
_AUTH_METHODS = ("client_secret_basic", "client_secret_post")
_SCOPE = re.compile(r"[\x21\x23-\x5b\x5d-\x7e]+( [\x21\x23-\x5b\x5d-\x7e]+)*")
"""RFC 6749, 3.3."""


class OAuthSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The `auth` setting of one server."""

    grant: Grant = "authorization_code"
    client_id: str | None = None
    """None: the client registers itself (RFC 7591), or uses `client_metadata_url` as its id."""
    client_secret: str | None = None
    client_auth: Literal["client_secret_basic", "client_secret_post"] | None = None
    """None: as the authorization server's metadata says, with a preference for HTTP Basic."""
    scope: str | None = None
    """None: what the server asks for. Otherwise never more than this."""
    redirect_port: int | None = None
    client_metadata_url: str | None = None
    issuer: str | None = None
    """The only authorization server that may receive the client's credentials. None: the one that the server names."""

    def __repr__(self) -> str:
        return f"OAuthSettings({self.grant})"


def parse_oauth_settings(server: str, value: object) -> OAuthSettings:
    """Parses a server's `auth`: a mapping, or just `oauth`. Raises ConfigError, which names the key."""
    try:
        return _parse_settings({"type": value} if isinstance(value, str) else value)
    except _InvalidSetting as error:
        raise ConfigError(f"server {server!r}: auth{error}") from None


class _InvalidSetting(ValueError):
    """What is wrong, as the end of a sentence that begins with `auth`."""


def _parse_settings(value: object) -> OAuthSettings:
    if not isinstance(value, Mapping):
        raise _InvalidSetting(f" must be a mapping or `oauth`, not {type(value).__name__}")
    auth = cast("Mapping[Any, Any]", value)
    for key in auth:
        if key not in _KEYS:
            raise _InvalidSetting(f" has an unknown key {str(key)!r}{did_you_mean(str(key), _KEYS)}")
    kind = auth.get("type", "authorization_code")
    grant = _GRANTS.get(kind) if isinstance(kind, str) else None
    if grant is None:
        raise _InvalidSetting(f".type must be authorization_code or client_credentials, not {kind!r}")
    for key in _TEXT_KEYS:
        text = auth.get(key)
        if text is not None and not (isinstance(text, str) and text.strip()):
            raise _InvalidSetting(f".{key} must be a non-empty text")  # Not the value: it may be the secret.
    port = auth.get("redirectPort")
    if port is not None and (not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535):
        raise _InvalidSetting(f".redirectPort must be a port from 1 to 65535, not {port!r}")
    settings = OAuthSettings(
        grant=grant,
        client_id=auth.get("clientId"),
        client_secret=auth.get("clientSecret"),
        client_auth=auth.get("tokenEndpointAuthMethod"),
        scope=_parse_scope(auth),
        redirect_port=port,
        client_metadata_url=auth.get("clientMetadataUrl"),
        issuer=auth.get("issuer"),
    )
    _check_combination(settings, auth)
    return settings


def _parse_scope(auth: Mapping[Any, Any]) -> str | None:
    values = [auth[key] for key in ("scope", "scopes") if auth.get(key) is not None]
    if len(values) > 1:
        raise _InvalidSetting(" has both scope and scopes; keep one")
    if not values:
        return None
    parts = list(cast("list[object]", values[0])) if isinstance(values[0], list | tuple) else values
    if all(isinstance(part, str) for part in parts):
        scope = " ".join(" ".join(cast("list[str]", parts)).split())
        if not scope or _SCOPE.fullmatch(scope):
            return scope or None
    raise _InvalidSetting(f".scope must be words separated by spaces, or a list of them, not {values[0]!r}")


def _check_combination(settings: OAuthSettings, auth: Mapping[Any, Any]) -> None:
    """Raises if settings contradict each other."""
    if settings.grant == "client_credentials":
        for key in ("clientId", "clientSecret"):
            if auth.get(key) is None:
                raise _InvalidSetting(f" of type client_credentials needs {key}")
        for key in _AUTHORIZATION_CODE_KEYS:
            if auth.get(key) is not None:
                raise _InvalidSetting(f".{key} is for type authorization_code; remove it")
    if settings.client_secret is not None and settings.client_id is None:
        raise _InvalidSetting(" has a clientSecret without its clientId")
    if settings.client_auth is not None:
        if settings.client_auth not in _AUTH_METHODS:
            methods = " or ".join(_AUTH_METHODS)
            raise _InvalidSetting(f".tokenEndpointAuthMethod must be {methods}, not {settings.client_auth!r}")
        if settings.client_secret is None:
            raise _InvalidSetting(".tokenEndpointAuthMethod needs a clientSecret")
    if (metadata_url := settings.client_metadata_url) is not None:
        if settings.client_id is not None:
            raise _InvalidSetting(" has both clientId and clientMetadataUrl; keep one")
        parts = split_url(metadata_url)
        if parts is None or parts.scheme != "https" or parts.path in ("", "/"):
            raise _InvalidSetting(".clientMetadataUrl must be an https URL with a path")
    if settings.issuer is not None and (problem := find_url_problem(settings.issuer)) is not None:
        raise _InvalidSetting(f".issuer {problem}")


def split_url(url: str) -> SplitResult | None:
    """Returns the parts of a URL, or None if it has no host."""
    try:
        parts = urlsplit(url)
        _ = parts.port  # Raises ValueError if it is not a number.
    except ValueError:
        return None
    return parts if parts.hostname else None


def find_url_problem(url: str, *, named_by: str | None = None) -> str | None:
    """Returns why no secret may be sent to a URL, or None. Only https is allowed, and http to this machine.

    `named_by` is the URL of the server that named it: a public server must not name an address of this machine or of
    the local network.
    """
    parts = split_url(url)
    if parts is None or parts.scheme not in ("http", "https"):
        return "must be an http or https URL"
    if parts.username is not None or parts.password is not None:
        return "must not carry a user name or password"
    kind = _find_address_kind(parts)
    if parts.scheme == "http" and kind != "loopback":
        return "must be https (http is for this machine only)"
    if named_by is not None and kind is not None and _find_address_kind(split_url(named_by)) is None:
        return "leads into the local network"
    return None


def _find_address_kind(parts: SplitResult | None) -> str | None:
    """Returns why a host is not public, such as `loopback`. None for a name, which is not resolved: TLS verifies it."""
    host = (parts.hostname if parts is not None else None) or ""
    if host == "localhost" or host.endswith(".localhost"):
        return "loopback"
    try:
        return special_kind(parse_address(host.partition("%")[0]))
    except ValueError:
        return None
