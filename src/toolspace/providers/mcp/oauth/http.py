"""The HTTP part of OAuth: sends its requests safely, parses token responses, renews and revokes logins.

It uses its own HTTP client, so that no trace, header or time limit of the server's connection applies to tokens. Stores
nothing, and does not import the MCP SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import re
import ssl
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self, cast
from urllib.parse import quote

import httpx2
import msgspec

from toolspace.core.decompression import SUPPORTED_ENCODINGS, Decompressor, normalize_encoding
from toolspace.core.http_messages import basic_authorization
from toolspace.core.secret_masking import mask_secrets
from toolspace.errors import ProviderError
from toolspace.providers.mcp.oauth.settings import OAuthSettings, find_url_problem
from toolspace.providers.mcp.oauth.token_store import StoredLogin

_MAX_BODY_BYTES = 256 * 1024
_REQUEST_SECONDS = 30.0
"""For one request to an authorization server, including its response."""
_RENEWAL_MARGIN_SECONDS = 30.0
_MAX_LIFETIME_SECONDS = 10 * 365 * 86400
_TOKEN = re.compile(r"[\x21-\x7e]{1,16384}")
_INTERNAL_ERROR = -32603
FORM = "application/x-www-form-urlencoded"


class AuthChallenge(msgspec.Struct, frozen=True, kw_only=True):
    """A server's refusal of a request, from any HTTP client."""

    status: int
    challenge: str = ""
    """The `WWW-Authenticate` header."""
    protocol_version: str | None = None
    """The request's `MCP-Protocol-Version`."""

    @classmethod
    def from_response(cls, response: httpx2.Response) -> Self:
        return cls(
            status=response.status_code,
            challenge=response.headers.get("WWW-Authenticate", ""),
            protocol_version=response.request.headers.get("MCP-Protocol-Version"),
        )

    @property
    def requires_login(self) -> bool:
        return self.status == 401 or self.needs_more_scope

    @property
    def needs_more_scope(self) -> bool:
        """Whether the token is valid, but its scope is too small."""
        return self.status == 403 and self.get_parameter("error") == "insufficient_scope"

    def get_parameter(self, name: str) -> str | None:
        """Returns a parameter of the challenge, safe to be shown; None if it is missing."""
        match = re.search(rf'\b{name}=(?:"([^"]*)"|([^\s,]+))', self.challenge[:4096])
        return None if match is None else format_error(match[1] or match[2], None)


class _LimitedBody(httpx2.AsyncByteStream):
    """A decompressed response body that raises ProviderError above the size limit."""

    def __init__(self, stream: httpx2.AsyncByteStream, decompressor: Decompressor | None) -> None:
        self._stream = stream
        self._decompressor = decompressor

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = received_size = 0
        async with contextlib.aclosing(cast("AsyncGenerator[bytes]", aiter(self._stream))) as chunks:
            async for chunk in chunks:
                received_size += len(chunk)  # Compressed bytes can go on forever and decompress to nothing.
                piece = chunk
                if self._decompressor is not None:
                    try:
                        piece = self._decompressor.decompress(chunk, _MAX_BODY_BYTES + 1 - size)
                    except zlib.error:
                        raise ProviderError("an answer about authorization cannot be decompressed") from None
                size += len(piece)
                if max(size, received_size) > _MAX_BODY_BYTES:
                    raise ProviderError(f"an answer about authorization was longer than {_MAX_BODY_BYTES // 1024} KiB")
                yield piece

    async def aclose(self) -> None:
        await self._stream.aclose()


def limit_body(response: httpx2.Response) -> None:
    """Limits how much of a response is read, counted after decompression. Raises ProviderError for other encodings."""
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    encoding = normalize_encoding(response.headers.pop("content-encoding", ""))
    if encoding and encoding not in SUPPORTED_ENCODINGS:
        raise ProviderError(f"an answer about authorization has the encoding {encoding[:40]!r}, which is not supported")
    response.stream = _LimitedBody(response.stream, Decompressor(encoding) if encoding else None)


async def replace_with_error(response: httpx2.Response, error: ProviderError) -> None:
    """Replaces a response's body by a JSON-RPC error, which fails one request.

    Raising an exception instead would end the SDK's whole connection.
    """
    assert isinstance(response.stream, httpx2.AsyncByteStream)
    await response.stream.aclose()
    body = {"jsonrpc": "2.0", "id": None, "error": {"code": _INTERNAL_ERROR, "message": str(error)}}
    response.stream = httpx2.ByteStream(msgspec.json.encode(body))
    for name in ("content-length", "content-encoding", "transfer-encoding"):
        response.headers.pop(name, None)
    response.headers["content-type"] = "application/json"


@functools.cache
def tls_context() -> ssl.SSLContext:
    """Returns the one TLS context: loading the system's certificates takes longer than most requests."""
    return httpx2.create_ssl_context()


class OAuthHttpClient:
    """Sends OAuth requests, and only to safe addresses: most of the URLs come from the server."""

    def __init__(self, server_name: str, server_url: str) -> None:
        self._server_name, self._server_url = server_name, server_url
        self._client = httpx2.AsyncClient(timeout=_REQUEST_SECONDS, verify=tls_context())

    async def __aenter__(self) -> Self:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def send(self, request: httpx2.Request, *, head_only: bool = False) -> httpx2.Response:
        """Returns the response with its body, or without it if `head_only`. Raises ProviderError."""
        url = str(request.url)
        address = f"{request.url.scheme}://{request.url.host}{request.url.path}"[:200]
        if (problem := find_url_problem(url, named_by=self._server_url)) is not None:
            raise ProviderError(f"server {self._server_name!r} names {address!r} for its login, which {problem}")
        request.headers["Accept-Encoding"] = "identity"  # A compressed body could grow beyond any limit.
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                response = await self._client.send(request, stream=True)
                try:
                    if not head_only:
                        limit_body(response)
                        await response.aread()
                finally:
                    await response.aclose()
                return response
        except (httpx2.HTTPError, TimeoutError) as error:
            is_timeout = isinstance(error, TimeoutError | httpx2.TimeoutException)
            reason = f"no answer within {_REQUEST_SECONDS:g} s" if is_timeout else error
            raise ProviderError(
                f"server {self._server_name!r}: cannot reach {address!r} for its login: {reason}"
            ) from None


class TokenResponse(msgspec.Struct, omit_defaults=True):
    """A token endpoint's response: the fields that are used."""

    access_token: str
    token_type: str = "Bearer"
    expires_in: int | float | str | None = None
    scope: str | None = None
    refresh_token: str | None = None


def parse_token_response(name: str, response: httpx2.Response) -> TokenResponse:
    """Raises ProviderError if the response holds no bearer token."""
    try:
        tokens = msgspec.json.decode(response.content, type=TokenResponse)
        if tokens.token_type.lower() != "bearer":
            raise ValueError
        for token in (tokens.access_token, tokens.refresh_token):
            if token is not None and not _TOKEN.fullmatch(token):
                raise ValueError
        lifetime = 0.0 if tokens.expires_in is None else float(tokens.expires_in)
        # Some servers send 0 for an unknown lifetime.
        tokens.expires_in = int(min(lifetime, _MAX_LIFETIME_SECONDS)) if lifetime >= 1 else None
    except (ValueError, OverflowError, RecursionError):  # Its text is not shown: it may quote a token.
        raise ProviderError(
            f"login to server {name!r} failed: its authorization server gave something that is no bearer token"
        ) from None
    return tokens


def compute_renewal_time(expires_in: int | float | str | None) -> float | None:
    if expires_in is None:
        return None
    lifetime = float(expires_in)
    return time.time() + lifetime - min(_RENEWAL_MARGIN_SECONDS, lifetime / 10)


async def refresh_login(
    name: str, login: StoredLogin, settings: OAuthSettings, http: OAuthHttpClient
) -> StoredLogin | None:
    """Renews a login with its refresh token. Returns None if the token is no longer accepted."""
    assert login.refresh_token is not None
    data = {"grant_type": "refresh_token", "refresh_token": login.refresh_token}
    if login.resource is not None:
        data["resource"] = login.resource
    response = await http.send(_build_token_request(login.token_endpoint, data, login, settings))
    if response.status_code in (400, 401, 403):
        return None
    if response.status_code not in (200, 201):
        # A temporary problem: the refresh token stays valid.
        raise ProviderError(f"cannot renew the login to server {name!r} now: {describe_oauth_error(response)}")
    tokens = parse_token_response(name, response)
    return msgspec.structs.replace(
        login,
        access_token=tokens.access_token,
        refresh_token=tokens.refresh_token or login.refresh_token,
        renew_at=compute_renewal_time(tokens.expires_in),
        scope=tokens.scope or login.scope,
    )


async def revoke_login(login: StoredLogin, settings: OAuthSettings, http: OAuthHttpClient) -> None:
    """Revokes a login at the revocation endpoint of the authorization server (RFC 7009)."""
    assert login.revocation_endpoint is not None
    token = login.refresh_token or login.access_token
    await http.send(_build_token_request(login.revocation_endpoint, {"token": token}, login, settings))


def _build_token_request(url: str, data: dict[str, str], login: StoredLogin, settings: OAuthSettings) -> httpx2.Request:
    headers: dict[str, str] = {}
    secret = settings.client_secret or login.client_secret
    data = {**data, "client_id": login.client_id}
    if secret is not None and login.client_auth == "client_secret_basic":
        credentials = f"{quote(login.client_id, safe='')}:{quote(secret, safe='')}"
        headers["Authorization"] = basic_authorization(credentials)
    elif secret is not None and login.client_auth == "client_secret_post":
        data["client_secret"] = secret
    return httpx2.Request("POST", url, data=data, headers=headers)


def describe_oauth_error(response: httpx2.Response) -> str:
    """Describes an OAuth error response (RFC 6749, 5.2) by its code and description, and nothing else of its body."""
    status = f"HTTP {response.status_code}"
    try:
        body: Any = msgspec.json.decode(response.content)
        text = format_error(body["error"], body.get("error_description"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return status
    return f"{text} ({status})"


def format_error(error: object, description: object) -> str:
    text = f"{error}: {description}" if description else str(error)
    return mask_secrets("".join(char if char.isprintable() else " " for char in text[:300]))
